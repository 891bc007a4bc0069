"""Flax linen modules: each holds parameters and calls `functional`."""

from jaxformer.layers.attention.inputs import AttentionInputs as AttentionInputs
from jaxformer.layers.attention.inputs import LayerInputs as LayerInputs
from jaxformer.layers.attention.multi_head import MultiHeadAttention as MultiHeadAttention
from jaxformer.layers.block import Block as Block
from jaxformer.layers.cache import Cache as Cache
from jaxformer.layers.cache import KVCache as KVCache
from jaxformer.layers.cache import LayerCache as LayerCache
from jaxformer.layers.cache import LayerState as LayerState
from jaxformer.layers.cache import empty_cache as empty_cache
from jaxformer.layers.cache import take_rows as take_rows
from jaxformer.layers.feed_forward import FeedForward as FeedForward
from jaxformer.layers.linear import Linear as Linear
from jaxformer.layers.lora_merging import merge_lora as merge_lora
from jaxformer.layers.norms import Norm as Norm
from jaxformer.layers.rope import RotaryEmbedding as RotaryEmbedding
from jaxformer.layers.runtime import MeshAxes as MeshAxes
from jaxformer.layers.runtime import RuntimeConfig as RuntimeConfig
from jaxformer.layers.stack import Stack as Stack
from jaxformer.layers.transformer import Transformer as Transformer
