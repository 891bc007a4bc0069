"""Flax linen modules: each holds parameters and calls `functional`."""

from jaxformer.layers.attention import Attention as Attention
from jaxformer.layers.block import Block as Block
from jaxformer.layers.cache import Cache as Cache
from jaxformer.layers.cache import KVCache as KVCache
from jaxformer.layers.cache import LayerCache as LayerCache
from jaxformer.layers.cache import empty_cache as empty_cache
from jaxformer.layers.cache import take_rows as take_rows
from jaxformer.layers.feed_forward import FeedForward as FeedForward
from jaxformer.layers.guide import Guide as Guide
from jaxformer.layers.linear import Linear as Linear
from jaxformer.layers.mode import Axes as Axes
from jaxformer.layers.mode import Mode as Mode
from jaxformer.layers.norms import Norm as Norm
from jaxformer.layers.rotary import RotaryEmbedding as RotaryEmbedding
from jaxformer.layers.stack import Stack as Stack
from jaxformer.layers.transformer import Transformer as Transformer
