"""Test-size configurations: every option keeps its kind, with small sizes."""

import math
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from jaxformer.config.attention import Attention, AttentionKind, Hybrid, Latent, MultiHead, SharedKV
from jaxformer.config.decay import Decay
from jaxformer.config.embedding import Embedding, LMHead
from jaxformer.config.feed_forward import GLU, MLP, ClampedGEGLU, FeedForward, MoE
from jaxformer.config.mixer import Mixer
from jaxformer.config.positions import BlockSparse, Learned, Positions, Rope, ScoreBias, Window
from jaxformer.config.rope_scaling import DynamicNTK, Llama3Scaling, LongRope, RopeScaling, Yarn
from jaxformer.config.topology import EncoderDecoder, Topology

TINY_VOCAB_SIZE = 128
TINY_HEAD_DIM = 16
TINY_HIDDEN_DIM = 88
TINY_WINDOW = 6
TINY_MAX_LENGTH = 64
TINY_NUM_EXPERTS = 4
MAX_PATTERN_LENGTH = 8

T = TypeVar("T")
Scale = TypeVar("Scale", float, float | None)


def heads_width(attention: Attention) -> int:
    """Total width of all heads, the input of the output projection."""
    match attention:
        case Hybrid(kinds=kinds):
            return max(map(heads_width, kinds))
        case Mixer(num_heads=heads):  # a mixer does not declare its width
            return heads * TINY_HEAD_DIM
        case Latent(num_heads=heads, value_dim=width):
            return heads * width
    return attention.num_heads * attention.head_dim


def tiny_attention(attention: Attention) -> Attention:
    """Return attention with few narrow heads and a full pattern of positions and windows."""
    if isinstance(attention, Hybrid):
        return replace(
            attention, kinds=tuple(map(_tiny_attention_kind, shorten_pattern(attention.kinds)))
        )
    return _tiny_attention_kind(attention)


def _tiny_attention_kind(attention: AttentionKind) -> AttentionKind:
    heads = attention.num_heads
    num_heads = 4 if heads & (heads - 1) == 0 else 6
    positions = tuple(_tiny_positions(p) for p in shorten_pattern(attention.positions))
    windows = tuple(_tiny_window(w) for w in shorten_pattern(attention.windows))
    match attention:
        case MultiHead(num_kv_heads=kv_heads) | SharedKV(num_kv_heads=kv_heads):
            return replace(
                attention,
                num_heads=num_heads,
                num_kv_heads=num_heads if kv_heads == heads else 1 if kv_heads == 1 else 2,
                head_dim=TINY_HEAD_DIM,
                positions=positions,
                scale=_rescale_with_width(attention.scale, attention.head_dim, TINY_HEAD_DIM),
                windows=windows,
            )
        case Latent(query_latent_dim=query, nope_dim=plain, rope_dim=rotary):
            return replace(
                attention,
                num_heads=num_heads,
                latent_dim=2 * TINY_HEAD_DIM,
                query_latent_dim=None if query is None else 3 * TINY_HEAD_DIM,
                nope_dim=TINY_HEAD_DIM,
                rope_dim=TINY_HEAD_DIM,
                value_dim=TINY_HEAD_DIM,
                positions=positions,
                scale=_rescale_with_width(attention.scale, plain + rotary, 2 * TINY_HEAD_DIM),
                windows=windows,
            )
        case Decay():
            return replace(attention, num_heads=num_heads, head_dim=TINY_HEAD_DIM)
        case Mixer():
            return attention.tiny()


def _tiny_positions(positions: Positions | None) -> Positions | None:
    match positions:
        case Rope():
            pairs = max(1, round(TINY_HEAD_DIM * positions.fraction / 2))
            if positions.fraction < 1:
                pairs = min(pairs, TINY_HEAD_DIM // 2 - 1)
            return replace(
                positions,
                fraction=2 * pairs / TINY_HEAD_DIM,
                scaling=_tiny_scaling(positions.scaling, pairs),
            )
        case ScoreBias():
            return positions.tiny()
    return positions


def _tiny_scaling(scaling: RopeScaling | None, pairs: int) -> RopeScaling | None:
    match scaling:
        case DynamicNTK() | Llama3Scaling() | Yarn():
            return replace(scaling, original_max_length=TINY_MAX_LENGTH // 4)
        case LongRope(short_factors=short, long_factors=long):
            step = len(short) / pairs
            pair_indices = [int(i * step) for i in range(pairs)]
            return replace(
                scaling,
                short_factors=tuple(short[i] for i in pair_indices),
                long_factors=tuple(long[i] for i in pair_indices),
                original_max_length=TINY_MAX_LENGTH // 4,
                max_length=TINY_MAX_LENGTH,
            )
    return scaling


def tiny_feed_forward(feed_forward: FeedForward) -> FeedForward:
    """Return a narrow feed-forward of the same kind, with few experts."""
    match feed_forward:
        case MLP() | GLU() | ClampedGEGLU():
            return replace(feed_forward, hidden_dim=TINY_HIDDEN_DIM)
        case MoE(expert=expert, num_experts=count, top_k=top_k):
            return replace(
                feed_forward,
                expert=replace(expert, hidden_dim=TINY_HIDDEN_DIM),
                num_experts=min(count, TINY_NUM_EXPERTS),
                top_k=min(top_k, TINY_NUM_EXPERTS - 1, count),
            )
    return feed_forward.tiny()


def _tiny_window(window: Window) -> Window:
    if isinstance(window, BlockSparse):
        return BlockSparse(block_size=4, local_blocks=2, stride=3)
    return None if window is None else min(window, TINY_WINDOW)


def tiny_embedding(embedding: Embedding, old_width: int, new_width: int) -> Embedding:
    """Return the embedding for another model width."""
    positions = embedding.positions
    if isinstance(positions, Learned):
        positions = replace(positions, max_length=TINY_MAX_LENGTH)
    factorised = embedding.dim is not None
    return replace(
        embedding,
        scale=_rescale_with_width(embedding.scale, old_width, new_width),
        positions=positions,
        dim=new_width // 2 if factorised else None,
    )


def tiny_topology(topology: Topology) -> Topology:
    """Return a topology of the same kind with two encoder layers."""
    if not isinstance(topology, EncoderDecoder):
        return topology
    attention, feed_forward = topology.attention, topology.feed_forward
    return replace(
        topology,
        num_encoder_layers=2,
        source_vocab_size=topology.source_vocab_size and TINY_VOCAB_SIZE + 3,
        attention=attention and tiny_attention(attention),
        feed_forward=feed_forward and tuple(map(tiny_feed_forward, shorten_pattern(feed_forward))),
    )


def tiny_head(head: LMHead, old_width: int, new_width: int, vocab_size: int) -> LMHead:
    """Return the head for another model width and vocabulary."""
    return replace(
        head,
        multiplier=_rescale_with_width(head.multiplier, old_width, new_width),
        masked_ids=(vocab_size - 1,) if head.masked_ids else (),
    )


def _rescale_with_width(scale: Scale, old_width: int, new_width: int) -> Scale:
    """If the scale is a power of the old width, return that power of the new width."""
    for power in (0.5, -0.5, -1):
        if scale is not None and math.isclose(scale, old_width**power, rel_tol=1e-2):
            return new_width**power
    return scale


def shorten_pattern(pattern: tuple[T, ...]) -> tuple[T, ...]:
    """Shorten a per-layer pattern to its cycle, or else to one entry per run."""
    if len(pattern) <= MAX_PATTERN_LENGTH:
        return pattern
    for length in range(1, MAX_PATTERN_LENGTH + 1):
        if all(entry == pattern[i % length] for i, entry in enumerate(pattern)):
            return pattern[:length]
    return tuple(key for key, _ in groupby(pattern))
