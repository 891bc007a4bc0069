"""Pure functions on arrays: no parameters, no state, no configuration. Import as ``F``.

Array arguments may be lists or NumPy arrays, and ids and positions may have any integer dtype.
Arguments that do not match their annotations raise ValueError.
"""

from types import ModuleType

from jaxformer.functional.activations import bilinear as bilinear
from jaxformer.functional.activations import clamped_geglu as clamped_geglu
from jaxformer.functional.activations import gaussian_top_k as gaussian_top_k
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
from jaxformer.functional.activations import softplus as softplus
from jaxformer.functional.activations import swiglu as swiglu
from jaxformer.functional.activations import xielu as xielu
from jaxformer.functional.attention.blockwise import BLOCKWISE_REMAT_NAME as BLOCKWISE_REMAT_NAME
from jaxformer.functional.attention.blockwise import blockwise_attention as blockwise_attention
from jaxformer.functional.attention.cudnn import segment_offsets as segment_offsets
from jaxformer.functional.attention.differential import (
    differential_attention as differential_attention,
)
from jaxformer.functional.attention.differential import differential_factor as differential_factor
from jaxformer.functional.attention.differential import (
    initial_differential_factor as initial_differential_factor,
)
from jaxformer.functional.attention.dispatch import Implementation as Implementation
from jaxformer.functional.attention.dispatch import materialize_for_xla as materialize_for_xla
from jaxformer.functional.attention.dispatch import prefer_blockwise as prefer_blockwise
from jaxformer.functional.attention.dot_product import attend as attend
from jaxformer.functional.attention.dot_product import attention_weights as attention_weights
from jaxformer.functional.attention.dot_product import (
    dot_product_attention as dot_product_attention,
)
from jaxformer.functional.attention.kernels import cudnn_attention as cudnn_attention
from jaxformer.functional.attention.kernels import splash_attention as splash_attention
from jaxformer.functional.attention.latent import absorb_query as absorb_query
from jaxformer.functional.attention.latent import expand_latent as expand_latent
from jaxformer.functional.attention.latent import prefer_absorbed as prefer_absorbed
from jaxformer.functional.attention.latent import up_project_values as up_project_values
from jaxformer.functional.attention.lazy_masks import AttentionBias as AttentionBias
from jaxformer.functional.attention.lazy_masks import AttentionMask as AttentionMask
from jaxformer.functional.attention.lazy_masks import MaskRule as MaskRule
from jaxformer.functional.attention.lazy_masks import attention_bias as attention_bias
from jaxformer.functional.attention.lazy_masks import materialize as materialize
from jaxformer.functional.attention.masks import BlockSparsePattern as BlockSparsePattern
from jaxformer.functional.attention.masks import block_sparse_mask as block_sparse_mask
from jaxformer.functional.attention.masks import causal_mask as causal_mask
from jaxformer.functional.attention.masks import chunk_mask as chunk_mask
from jaxformer.functional.attention.masks import key_padding_mask as key_padding_mask
from jaxformer.functional.attention.masks import length_mask as length_mask
from jaxformer.functional.attention.masks import prefix_mask as prefix_mask
from jaxformer.functional.attention.masks import segment_mask as segment_mask
from jaxformer.functional.attention.masks import window_mask as window_mask
from jaxformer.functional.attention.online_softmax import PartialAttention as PartialAttention
from jaxformer.functional.attention.online_softmax import (
    combine_partial_attention as combine_partial_attention,
)
from jaxformer.functional.attention.online_softmax import (
    finish_partial_attention as finish_partial_attention,
)
from jaxformer.functional.attention.online_softmax import partial_attention as partial_attention
from jaxformer.functional.attention.position_biases import alibi_bias as alibi_bias
from jaxformer.functional.attention.position_biases import alibi_slopes as alibi_slopes
from jaxformer.functional.attention.position_biases import fire_bias as fire_bias
from jaxformer.functional.attention.position_biases import (
    relative_position_bias as relative_position_bias,
)
from jaxformer.functional.attention.position_biases import (
    relative_position_buckets as relative_position_buckets,
)
from jaxformer.functional.attention.position_biases import t5_bias as t5_bias
from jaxformer.functional.attention.position_biases import (
    transformer_xl_bias as transformer_xl_bias,
)
from jaxformer.functional.attention.query_scale import query_power as query_power
from jaxformer.functional.attention.query_scale import query_scale as query_scale
from jaxformer.functional.attention.ring import ring_attention as ring_attention
from jaxformer.functional.attention.ring import zigzag_order as zigzag_order
from jaxformer.functional.attention.scores import Normalizer as Normalizer
from jaxformer.functional.attention.scores import attention_scores as attention_scores
from jaxformer.functional.collectives import copy_to_tensor_parallel as copy_to_tensor_parallel
from jaxformer.functional.collectives import fsdp_all_gather as fsdp_all_gather
from jaxformer.functional.collectives import pvary as pvary
from jaxformer.functional.collectives import pvary_like as pvary_like
from jaxformer.functional.collectives import (
    reduce_from_tensor_parallel as reduce_from_tensor_parallel,
)
from jaxformer.functional.collectives import varying_axes as varying_axes
from jaxformer.functional.convolution import CausalConvolution as CausalConvolution
from jaxformer.functional.convolution import causal_convolution as causal_convolution
from jaxformer.functional.decay import DecayRates as DecayRates
from jaxformer.functional.decay import decay_attention as decay_attention
from jaxformer.functional.decay import decay_rates as decay_rates
from jaxformer.functional.depth_attention import attend_to_depth as attend_to_depth
from jaxformer.functional.depth_attention import attend_to_history as attend_to_history
from jaxformer.functional.depth_attention import history_at_end as history_at_end
from jaxformer.functional.embeddings import check_positions as check_positions
from jaxformer.functional.embeddings import check_token_ids as check_token_ids
from jaxformer.functional.embeddings import embed as embed
from jaxformer.functional.embeddings import learned_positions as learned_positions
from jaxformer.functional.embeddings import shift_right as shift_right
from jaxformer.functional.embeddings import unit_vectors as unit_vectors
from jaxformer.functional.external_kernels import KERNEL_REMAT_NAME as KERNEL_REMAT_NAME
from jaxformer.functional.grouped_gemm import grouped_matmul as grouped_matmul
from jaxformer.functional.hyper_connections import hyper_connections as hyper_connections
from jaxformer.functional.linear import dropout as dropout
from jaxformer.functional.linear import linear as linear
from jaxformer.functional.linear_attention import LinearAttention as LinearAttention
from jaxformer.functional.linear_attention import linear_attention as linear_attention
from jaxformer.functional.linear_losses import linear_cross_entropy as linear_cross_entropy
from jaxformer.functional.linear_losses import linear_logit_statistics as linear_logit_statistics
from jaxformer.functional.linear_losses import linear_logits as linear_logits
from jaxformer.functional.linear_losses import vocab_chunk_size as vocab_chunk_size
from jaxformer.functional.losses import LogitStatistics as LogitStatistics
from jaxformer.functional.losses import bits_per_byte as bits_per_byte
from jaxformer.functional.losses import cross_entropy as cross_entropy
from jaxformer.functional.losses import (
    cross_entropy_from_statistics as cross_entropy_from_statistics,
)
from jaxformer.functional.losses import dpo_loss as dpo_loss
from jaxformer.functional.losses import logit_statistics as logit_statistics
from jaxformer.functional.losses import token_cross_entropy as token_cross_entropy
from jaxformer.functional.moe import ExpertScore as ExpertScore
from jaxformer.functional.moe import ExpertSelection as ExpertSelection
from jaxformer.functional.moe import GroupScore as GroupScore
from jaxformer.functional.moe import RouterTotals as RouterTotals
from jaxformer.functional.moe import Routing as Routing
from jaxformer.functional.moe import drop_late_tokens as drop_late_tokens
from jaxformer.functional.moe import expert_capacity as expert_capacity
from jaxformer.functional.moe import load_balance_loss as load_balance_loss
from jaxformer.functional.moe import mixture_of_experts as mixture_of_experts
from jaxformer.functional.moe import route as route
from jaxformer.functional.moe import router_totals as router_totals
from jaxformer.functional.moe import router_z_loss as router_z_loss
from jaxformer.functional.moe import sparse_mixer as sparse_mixer
from jaxformer.functional.ngrams import gate_ngrams as gate_ngrams
from jaxformer.functional.ngrams import ngram_ids as ngram_ids
from jaxformer.functional.ngrams import recent_tokens as recent_tokens
from jaxformer.functional.norms import BatchStatistics as BatchStatistics
from jaxformer.functional.norms import batch_norm as batch_norm
from jaxformer.functional.norms import batch_norm_inference as batch_norm_inference
from jaxformer.functional.norms import layer_norm as layer_norm
from jaxformer.functional.norms import rms_norm as rms_norm
from jaxformer.functional.recurrence import RECURRENCE_CHUNK as RECURRENCE_CHUNK
from jaxformer.functional.recurrence import Recurrence as Recurrence
from jaxformer.functional.recurrence import linear_recurrence as linear_recurrence
from jaxformer.functional.rg_lru import GatedRecurrence as GatedRecurrence
from jaxformer.functional.rg_lru import rg_lru as rg_lru
from jaxformer.functional.ring_buffer import ring_buffer_slots as ring_buffer_slots
from jaxformer.functional.ring_buffer import write_slots as write_slots
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
from jaxformer.functional.rope_scaling import rope_truncate as rope_truncate
from jaxformer.functional.rope_scaling import yarn_attention_factor as yarn_attention_factor
from jaxformer.functional.sampling import keep_min_p as keep_min_p
from jaxformer.functional.sampling import keep_top_k as keep_top_k
from jaxformer.functional.sampling import keep_top_p as keep_top_p
from jaxformer.functional.sampling import penalise_repetition as penalise_repetition
from jaxformer.functional.sampling import scale_by_temperature as scale_by_temperature
from jaxformer.functional.sampling import seen_tokens as seen_tokens
from jaxformer.functional.selective_scan import SelectiveScan as SelectiveScan
from jaxformer.functional.selective_scan import selective_scan as selective_scan
from jaxformer.functional.sinusoidal import sinusoidal_positions as sinusoidal_positions
from jaxformer.functional.streams import altup_correct as altup_correct
from jaxformer.functional.streams import altup_predict as altup_predict
from jaxformer.functional.streams import gated_streams as gated_streams
from jaxformer.functional.streams import identity_hyper_connections as identity_hyper_connections
from jaxformer.functional.streams import manifold_hyper_connections as manifold_hyper_connections
from jaxformer.functional.streams import match_length as match_length
from jaxformer.functional.streams import sinkhorn as sinkhorn
from jaxformer.functional.streams import weighted_streams as weighted_streams
from jaxformer.functional.wkv import WeightedKeyValue as WeightedKeyValue
from jaxformer.functional.wkv import wkv as wkv

# Public functions and types, without constants and modules.
__all__ = sorted(
    name
    for name, thing in globals().items()
    if not (name.startswith("_") or name.isupper() or isinstance(thing, ModuleType))
    and thing is not ModuleType
)


def __dir__() -> list[str]:
    return __all__
