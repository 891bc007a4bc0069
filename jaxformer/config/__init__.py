"""Configuration options: frozen, keyword-only dataclasses, one per design choice; no arrays.

Alternatives are a union of dataclasses, each with its own settings. Options per layer are a tuple
cycled over the layers. `TransformerConfig` combines all and rejects impossible combinations.
"""

from jaxformer.config.attention.decay import Angles as Angles
from jaxformer.config.attention.decay import Decay as Decay
from jaxformer.config.attention.hybrid import Attention as Attention
from jaxformer.config.attention.hybrid import AttentionKind as AttentionKind
from jaxformer.config.attention.hybrid import Hybrid as Hybrid
from jaxformer.config.attention.latent import Latent as Latent
from jaxformer.config.attention.mixer import Mixer as Mixer
from jaxformer.config.attention.mixer import MixerInputs as MixerInputs
from jaxformer.config.attention.multi_head import MultiHead as MultiHead
from jaxformer.config.attention.no_attention import NoAttention as NoAttention
from jaxformer.config.attention.shared_kv import SharedKV as SharedKV
from jaxformer.config.embedding import Embedding as Embedding
from jaxformer.config.embedding import LMHead as LMHead
from jaxformer.config.feed_forward import GLU as GLU
from jaxformer.config.feed_forward import MLP as MLP
from jaxformer.config.feed_forward import ClampedGEGLU as ClampedGEGLU
from jaxformer.config.feed_forward import FeedForward as FeedForward
from jaxformer.config.feed_forward import MoE as MoE
from jaxformer.config.feed_forward import NoFeedForward as NoFeedForward
from jaxformer.config.initialisation import FanAverage as FanAverage
from jaxformer.config.initialisation import FanIn as FanIn
from jaxformer.config.initialisation import Initialisation as Initialisation
from jaxformer.config.initialisation import Initialiser as Initialiser
from jaxformer.config.initialisation import Normal as Normal
from jaxformer.config.initialisation import Zeros as Zeros
from jaxformer.config.layer import Layer as Layer
from jaxformer.config.layer import LayerConfig as LayerConfig
from jaxformer.config.model import Dropout as Dropout
from jaxformer.config.model import Stack as Stack
from jaxformer.config.model import TransformerConfig as TransformerConfig
from jaxformer.config.norms import LayerNorm as LayerNorm
from jaxformer.config.norms import Norm as Norm
from jaxformer.config.norms import QKNorm as QKNorm
from jaxformer.config.norms import RMSNorm as RMSNorm
from jaxformer.config.positions import Alibi as Alibi
from jaxformer.config.positions import BlockSparse as BlockSparse
from jaxformer.config.positions import Fire as Fire
from jaxformer.config.positions import Learned as Learned
from jaxformer.config.positions import Positions as Positions
from jaxformer.config.positions import Rope as Rope
from jaxformer.config.positions import ScoreBias as ScoreBias
from jaxformer.config.positions import Sinusoid as Sinusoid
from jaxformer.config.positions import T5Bias as T5Bias
from jaxformer.config.positions import TransformerXL as TransformerXL
from jaxformer.config.positions import Window as Window
from jaxformer.config.residual import Residual as Residual
from jaxformer.config.rope_scaling import DynamicNTK as DynamicNTK
from jaxformer.config.rope_scaling import LinearScaling as LinearScaling
from jaxformer.config.rope_scaling import Llama3Scaling as Llama3Scaling
from jaxformer.config.rope_scaling import LongRope as LongRope
from jaxformer.config.rope_scaling import NTKScaling as NTKScaling
from jaxformer.config.rope_scaling import RopeScaling as RopeScaling
from jaxformer.config.rope_scaling import Yarn as Yarn
from jaxformer.config.serialization import from_json as from_json
from jaxformer.config.serialization import from_python as from_python
from jaxformer.config.serialization import to_json as to_json
from jaxformer.config.topology import Decoder as Decoder
from jaxformer.config.topology import Encoder as Encoder
from jaxformer.config.topology import EncoderDecoder as EncoderDecoder
from jaxformer.config.topology import Topology as Topology
