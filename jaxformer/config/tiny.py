"""Shrink a configuration to test size: every option keeps its kind, every size becomes small."""

import math
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from jaxformer.config.attention import Attention, Hybrid, Kind, Latent, MultiHead, SharedKV
from jaxformer.config.decay import Decay
from jaxformer.config.feed_forward import GLU, MLP, ClampedGEGLU, Experts, FeedForward
from jaxformer.config.mixer import Mixer
from jaxformer.config.model import Embedding, EncoderDecoder, Head, TransformerConfig
from jaxformer.config.positions import BlockSparse, Learned, Positions, Rope, ScoreBias, Window
from jaxformer.config.rope_scaling import DynamicNTK, Llama3Scaling, LongRope, RopeScaling, Yarn

VOCABULARY = 128
HEAD_DIM = 16
HIDDEN = 88
WINDOW = 6
LENGTH = 64
EXPERTS = 4
LONGEST_PATTERN = 8

T = TypeVar("T")
Scale = TypeVar("Scale", float, float | None)


def tiny(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with small sizes and the same kind of every option.

    Head counts keep whether they are a power of two and how they are grouped, the model width
    keeps whether it equals the heads side by side, depth keeps a whole pattern and whether layers
    are left over after it, and scales that follow from a width follow from the new one.
    """
    attention = _tiny_attention(config.attention)
    heads_width = _heads_width(attention)
    heads_fill_width = _heads_width(config.attention) == config.model_dim
    model_dim = heads_width if heads_fill_width else heads_width - HEAD_DIM
    feed_forward = tuple(map(_tiny_feed_forward, _short_pattern(config.feed_forward)))
    period = math.lcm(len(attention.positions), len(attention.windows), len(feed_forward))
    has_remainder = config.num_layers % config.period != 0
    topology = config.topology
    if isinstance(topology, EncoderDecoder):
        source = None if topology.source_vocab_size is None else VOCABULARY + 3
        encoder_attention, encoder_feed_forward = topology.attention, topology.feed_forward
        topology = replace(
            topology,
            num_encoder_layers=2,
            source_vocab_size=source,
            attention=None if encoder_attention is None else _tiny_attention(encoder_attention),
            feed_forward=encoder_feed_forward
            and tuple(map(_tiny_feed_forward, _short_pattern(encoder_feed_forward))),
        )
    vocab_size = min(config.vocab_size, VOCABULARY)
    return replace(
        config,
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=max(2, period) + (1 if has_remainder else 0),
        attention=attention,
        feed_forward=feed_forward,
        topology=topology,
        embedding=_tiny_embedding(config.embedding, config.model_dim, model_dim),
        head=_tiny_head(config.head, config.model_dim, model_dim, vocab_size),
    )


def _heads_width(attention: Attention) -> int:
    """Total width of all heads, the input of the output projection."""
    match attention:
        case Hybrid(kinds=kinds):
            return max(map(_heads_width, kinds))
        case Mixer(num_heads=heads):  # which alone knows
            return heads * HEAD_DIM
        case Latent(num_heads=heads, value_dim=width):
            return heads * width
    return attention.num_heads * attention.head_dim


def _tiny_attention(attention: Attention) -> Attention:
    if isinstance(attention, Hybrid):
        return replace(attention, kinds=tuple(map(_tiny_kind, _short_pattern(attention.kinds))))
    return _tiny_kind(attention)


def _tiny_kind(attention: Kind) -> Kind:
    heads = attention.num_heads
    num_heads = 4 if heads & (heads - 1) == 0 else 6
    positions = tuple(_tiny_positions(p) for p in _short_pattern(attention.positions))
    windows = tuple(_tiny_window(w) for w in _short_pattern(attention.windows))
    match attention:
        case MultiHead(num_kv_heads=kv_heads) | SharedKV(num_kv_heads=kv_heads):
            return replace(
                attention,
                num_heads=num_heads,
                num_kv_heads=num_heads if kv_heads == heads else 1 if kv_heads == 1 else 2,
                head_dim=HEAD_DIM,
                positions=positions,
                scale=_follow_width(attention.scale, attention.head_dim, HEAD_DIM),
                windows=windows,
            )
        case Latent(query_latent_dim=query, nope_dim=plain, rope_dim=rotary):
            return replace(
                attention,
                num_heads=num_heads,
                latent_dim=2 * HEAD_DIM,
                query_latent_dim=None if query is None else 3 * HEAD_DIM,
                nope_dim=HEAD_DIM,
                rope_dim=HEAD_DIM,
                value_dim=HEAD_DIM,
                positions=positions,
                scale=_follow_width(attention.scale, plain + rotary, 2 * HEAD_DIM),
                windows=windows,
            )
        case Decay():
            return replace(attention, num_heads=num_heads, head_dim=HEAD_DIM)
        case Mixer():
            return attention.small()


def _tiny_positions(positions: Positions | None) -> Positions | None:
    match positions:
        case Rope():
            pairs = max(1, round(HEAD_DIM * positions.fraction / 2))
            if positions.fraction < 1:
                pairs = min(pairs, HEAD_DIM // 2 - 1)
            return replace(
                positions,
                fraction=2 * pairs / HEAD_DIM,
                scaling=_tiny_scaling(positions.scaling, pairs),
            )
        case ScoreBias():
            return positions.small()
    return positions


def _tiny_scaling(scaling: RopeScaling | None, pairs: int) -> RopeScaling | None:
    match scaling:
        case DynamicNTK() | Llama3Scaling() | Yarn():
            return replace(scaling, original_max_length=LENGTH // 4)
        case LongRope(short=short, long=long):
            step = len(short) / pairs
            pair_indices = [int(i * step) for i in range(pairs)]
            return replace(
                scaling,
                short=tuple(short[i] for i in pair_indices),
                long=tuple(long[i] for i in pair_indices),
                original_max_length=LENGTH // 4,
                max_length=LENGTH,
            )
    return scaling


def _tiny_feed_forward(choice: FeedForward) -> FeedForward:
    match choice:
        case MLP() | GLU() | ClampedGEGLU():
            return replace(choice, hidden_dim=HIDDEN)
        case Experts(expert=expert, num_experts=count, top_k=top_k):
            return replace(
                choice,
                expert=replace(expert, hidden_dim=HIDDEN),
                num_experts=min(count, EXPERTS),
                top_k=min(top_k, EXPERTS - 1, count),
            )
    return choice.small()


def _tiny_window(window: Window) -> Window:
    if isinstance(window, BlockSparse):
        return BlockSparse(block=4, local_blocks=2, stride=3)
    return None if window is None else min(window, WINDOW)


def _tiny_embedding(embedding: Embedding, before: int, after: int) -> Embedding:
    positions = embedding.positions
    if isinstance(positions, Learned):
        positions = replace(positions, max_length=LENGTH)
    factorised = embedding.dim is not None
    return replace(
        embedding,
        scale=_follow_width(embedding.scale, before, after),
        positions=positions,
        dim=after // 2 if factorised else None,
    )


def _tiny_head(head: Head, before: int, after: int, vocab_size: int) -> Head:
    return replace(
        head,
        multiplier=_follow_width(head.multiplier, before, after),
        masked_ids=(vocab_size - 1,) if head.masked_ids else (),
    )


def _follow_width(scale: Scale, before: int, after: int) -> Scale:
    """If the scale is a power of the old width, return that power of the new width."""
    for power in (0.5, -0.5, -1):
        if scale is not None and math.isclose(scale, before**power, rel_tol=1e-2):
            return after**power
    return scale


def _short_pattern(pattern: tuple[T, ...]) -> tuple[T, ...]:
    """Shorten a per-layer pattern to its cycle, or else to one entry per run."""
    if len(pattern) <= LONGEST_PATTERN:
        return pattern
    for length in range(1, LONGEST_PATTERN + 1):
        if all(entry == pattern[i % length] for i, entry in enumerate(pattern)):
            return pattern[:length]
    return tuple(key for key, _ in groupby(pattern))
