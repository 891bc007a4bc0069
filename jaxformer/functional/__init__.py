"""Pure functions on arrays: no parameters, no state, no configuration. Import as ``F``.

Where an array is wanted, a list or an array of NumPy will do, ids and positions may be of any
integer dtype, and what does not fit is refused in words (`ValueError`).
"""

from types import ModuleType

from jaxformer.functional.activations import bilinear as bilinear
from jaxformer.functional.activations import clamped_geglu as clamped_geglu
from jaxformer.functional.activations import geglu as geglu
from jaxformer.functional.activations import gelu as gelu
from jaxformer.functional.activations import glu as glu
from jaxformer.functional.activations import quick_gelu as quick_gelu
from jaxformer.functional.activations import reglu as reglu
from jaxformer.functional.activations import relu as relu
from jaxformer.functional.activations import relu_squared as relu_squared
from jaxformer.functional.activations import sigmoid as sigmoid
from jaxformer.functional.activations import silu as silu
from jaxformer.functional.activations import soft_cap as soft_cap
from jaxformer.functional.activations import swiglu as swiglu
from jaxformer.functional.attention import attend as attend
from jaxformer.functional.attention import attention_weights as attention_weights
from jaxformer.functional.attention import dot_product_attention as dot_product_attention
from jaxformer.functional.attention_mask import AttentionMask as AttentionMask
from jaxformer.functional.attention_mask import MaskRule as MaskRule
from jaxformer.functional.attention_mask import ScoreBias as ScoreBias
from jaxformer.functional.attention_mask import materialized as materialized
from jaxformer.functional.attention_mask import score_bias as score_bias
from jaxformer.functional.blockwise import BY_BLOCKS as BY_BLOCKS
from jaxformer.functional.blockwise import blockwise_attention as blockwise_attention
from jaxformer.functional.collectives import gather_shares as gather_shares
from jaxformer.functional.collectives import sum_parts as sum_parts
from jaxformer.functional.collectives import to_parts as to_parts
from jaxformer.functional.collectives import varies_over as varies_over
from jaxformer.functional.collectives import varying as varying
from jaxformer.functional.cudnn import segment_offsets as segment_offsets
from jaxformer.functional.decay import DecayRates as DecayRates
from jaxformer.functional.decay import decay_attention as decay_attention
from jaxformer.functional.decay import decay_rates as decay_rates
from jaxformer.functional.embeddings import check_positions as check_positions
from jaxformer.functional.embeddings import check_token_ids as check_token_ids
from jaxformer.functional.embeddings import embed as embed
from jaxformer.functional.embeddings import learned_positions as learned_positions
from jaxformer.functional.embeddings import shift_right as shift_right
from jaxformer.functional.experts import RouterTotals as RouterTotals
from jaxformer.functional.experts import Routing as Routing
from jaxformer.functional.experts import load_balance_loss as load_balance_loss
from jaxformer.functional.experts import mix_experts as mix_experts
from jaxformer.functional.experts import room_for as room_for
from jaxformer.functional.experts import route as route
from jaxformer.functional.experts import router_totals as router_totals
from jaxformer.functional.experts import router_z_loss as router_z_loss
from jaxformer.functional.foreign_kernels import BY_KERNEL as BY_KERNEL
from jaxformer.functional.grouped import grouped_linear as grouped_linear
from jaxformer.functional.implementations import Implementation as Implementation
from jaxformer.functional.implementations import many_scores as many_scores
from jaxformer.functional.kernels import cudnn_attention as cudnn_attention
from jaxformer.functional.kernels import splash_attention as splash_attention
from jaxformer.functional.latent import absorb_query as absorb_query
from jaxformer.functional.latent import absorbing_saves as absorbing_saves
from jaxformer.functional.latent import expand_latent as expand_latent
from jaxformer.functional.latent import values_from_latent as values_from_latent
from jaxformer.functional.linear import dropout as dropout
from jaxformer.functional.linear import linear as linear
from jaxformer.functional.linear_losses import linear_cross_entropy as linear_cross_entropy
from jaxformer.functional.linear_losses import linear_logits as linear_logits
from jaxformer.functional.linear_losses import linear_scores as linear_scores
from jaxformer.functional.linear_losses import loss_chunk as loss_chunk
from jaxformer.functional.losses import TokenScores as TokenScores
from jaxformer.functional.losses import bits_per_byte as bits_per_byte
from jaxformer.functional.losses import cross_entropy as cross_entropy
from jaxformer.functional.losses import score_cross_entropy as score_cross_entropy
from jaxformer.functional.losses import token_cross_entropy as token_cross_entropy
from jaxformer.functional.losses import token_scores as token_scores
from jaxformer.functional.masks import block_sparse_mask as block_sparse_mask
from jaxformer.functional.masks import causal_mask as causal_mask
from jaxformer.functional.masks import key_mask as key_mask
from jaxformer.functional.masks import length_mask as length_mask
from jaxformer.functional.masks import prefix_mask as prefix_mask
from jaxformer.functional.masks import segment_mask as segment_mask
from jaxformer.functional.masks import window_mask as window_mask
from jaxformer.functional.norms import BatchStatistics as BatchStatistics
from jaxformer.functional.norms import batch_norm as batch_norm
from jaxformer.functional.norms import batch_norm_inference as batch_norm_inference
from jaxformer.functional.norms import layer_norm as layer_norm
from jaxformer.functional.norms import rms_norm as rms_norm
from jaxformer.functional.online_softmax import PartialAttention as PartialAttention
from jaxformer.functional.online_softmax import attend_partially as attend_partially
from jaxformer.functional.online_softmax import finish_attention as finish_attention
from jaxformer.functional.online_softmax import merge_attention as merge_attention
from jaxformer.functional.position_biases import alibi_bias as alibi_bias
from jaxformer.functional.position_biases import alibi_slopes as alibi_slopes
from jaxformer.functional.position_biases import fire_bias as fire_bias
from jaxformer.functional.position_biases import relative_position_bias as relative_position_bias
from jaxformer.functional.position_biases import (
    relative_position_buckets as relative_position_buckets,
)
from jaxformer.functional.position_biases import t5_bias as t5_bias
from jaxformer.functional.position_biases import transformer_xl_bias as transformer_xl_bias
from jaxformer.functional.positions import sinusoidal_positions as sinusoidal_positions
from jaxformer.functional.recurrence import RECURRENCE_CHUNK as RECURRENCE_CHUNK
from jaxformer.functional.recurrence import Recurrence as Recurrence
from jaxformer.functional.recurrence import linear_recurrence as linear_recurrence
from jaxformer.functional.ring import ring_attention as ring_attention
from jaxformer.functional.ring import ring_order as ring_order
from jaxformer.functional.rope import rope_frequencies as rope_frequencies
from jaxformer.functional.rope import rope_rotations as rope_rotations
from jaxformer.functional.rope import rotate as rotate
from jaxformer.functional.rope_scaling import longrope_attention_factor as longrope_attention_factor
from jaxformer.functional.rope_scaling import rope_scale_dynamic_ntk as rope_scale_dynamic_ntk
from jaxformer.functional.rope_scaling import rope_scale_linear as rope_scale_linear
from jaxformer.functional.rope_scaling import rope_scale_llama3 as rope_scale_llama3
from jaxformer.functional.rope_scaling import rope_scale_longrope as rope_scale_longrope
from jaxformer.functional.rope_scaling import rope_scale_ntk as rope_scale_ntk
from jaxformer.functional.rope_scaling import rope_scale_yarn as rope_scale_yarn
from jaxformer.functional.rope_scaling import yarn_attention_factor as yarn_attention_factor
from jaxformer.functional.sampling import keep_min_p as keep_min_p
from jaxformer.functional.sampling import keep_top_k as keep_top_k
from jaxformer.functional.sampling import keep_top_p as keep_top_p
from jaxformer.functional.sampling import penalise_repetition as penalise_repetition
from jaxformer.functional.sampling import scale_by_temperature as scale_by_temperature
from jaxformer.functional.sampling import seen_tokens as seen_tokens
from jaxformer.functional.scores import Normalizer as Normalizer
from jaxformer.functional.scores import attention_scores as attention_scores
from jaxformer.functional.slots import ring_slots as ring_slots
from jaxformer.functional.slots import write_slots as write_slots

# Functions and types; constants and the modules that functions live in stay out of sight.
__all__ = sorted(
    name
    for name, thing in globals().items()
    if not (name.startswith("_") or name.isupper() or isinstance(thing, ModuleType))
    and thing is not ModuleType
)


def __dir__() -> list[str]:
    return __all__
