"""Attention options: multi-head (MHA, GQA, MQA), shared-KV, latent (MLA), and hybrids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.checks import check_fields, require, require_nonempty, require_positive
from jaxformer.config.decay import Decay
from jaxformer.config.mixer import Mixer
from jaxformer.config.norms import Norm, QKNorm, RMSNorm
from jaxformer.config.positions import Positions, Rope, ScoreBias, Window
from jaxformer.config.rope_scaling import DynamicNTK, LongRope, NTKScaling

Projection = Literal["query", "key", "value", "out"]
ROPE_ON_QKVO = Rope(targets=("q", "k", "v", "o"))


@dataclass(frozen=True, kw_only=True)
class MultiHead:
    """Dot-product attention: multi-head, grouped-query or multi-query by `num_kv_heads`.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: How positions enter the scores, cycled over the layers.
        windows: How far a query sees, cycled over the layers: W keys, itself included (an
            encoder's as many to the other side), or a pattern of blocks, or everything (None).
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Scores s become c * tanh(s / c).
        clip_qkv: Queries, keys and values are clipped to this size.
        qk_norm: Norm of queries and keys.
        biases: Which projections add a bias.
        normalizer: What turns scores into weights.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: tuple[Positions | None, ...] = (Rope(),)
    windows: tuple[Window, ...] = (None,)
    scale: float | None = None
    logit_softcap: float | None = None
    clip_qkv: float | None = None
    qk_norm: QKNorm | None = None
    biases: tuple[Projection, ...] = ()
    normalizer: Literal["softmax", "relu"] = "softmax"

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "clip_qkv")
        _check_heads(self)
        _check_layer_patterns(self)

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class SharedKV:
    """Attention with one projection for key and value, cached once per token.

        o[i] = R[i]^-1 sum over j of a[i, j] R[j] c[j] = sum over j of a[i, j] R[j - i] c[j]

    with a[i, j] from (R[i] q[i]) @ (R[j] c[j]). The rotations R turn the key, and so the value;
    turned back by that of the query, the output depends on distances alone.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of the shared vector; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: How positions enter the scores, cycled over the layers. A `Rope` turns query,
            key, value and output, unless its targets say otherwise; where it turns only one of key
            and value, the other is kept too.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Scores s become c * tanh(s / c).
        qk_norm: Norm of queries and of the shared vectors, so of values too.
        biases: Which projections add a bias.

    References:
        Su, Transformer upgrade path 19: rotary positions of the second kind, 2025.
        https://spaces.ac.cn/archives/10862
    """

    num_heads: int
    num_kv_heads: int = 1
    head_dim: int
    positions: tuple[Positions | None, ...] = (ROPE_ON_QKVO,)
    windows: tuple[Window, ...] = (None,)
    scale: float | None = None
    logit_softcap: float | None = None
    qk_norm: QKNorm | None = None
    biases: tuple[Literal["query", "key_value", "out"], ...] = ()

    def __post_init__(self):
        check_fields(self)
        _check_heads(self)
        _check_layer_patterns(self)
        _check_position_types(self)

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.head_dim

    @staticmethod
    def num_cached_arrays(positions: Positions | None) -> Literal[1, 2]:
        """Arrays cached per token: 2 if RoPE rotates only one of key and value, else 1."""
        targets = positions.targets if isinstance(positions, Rope) else ()
        return 1 if ("k" in targets) == ("v" in targets) else 2


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values are projections of one latent per token.

        score[i, j] = scale * (plain query[i] @ W_K latent[j] + R[i] query[i] @ R[j] key[j])

    The rotated key is small, and heads share it. A cache keeps it and the latent, no more.

    Attributes:
        num_heads: Query heads.
        latent_dim: Width of the latent, from which keys and values are made.
        query_latent_dim: Width of a latent from which queries are made; None makes them from the
            token's vector.
        nope_dim: Width of a head's query and key without positions.
        rope_dim: Width of the key that heads share, and of the queries for it.
        value_dim: Width of a head's value.
        positions: How positions enter the scores, cycled over the layers. A `Rope` turns queries
            and key within `rope_dim`.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is (nope_dim + rope_dim) ** -0.5. With YaRN, DeepSeek
            multiplies that by the square of `yarn_attention_factor`.
        norm: Norm of the latents.
        biases: Which projections add a bias.

    References:
        DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
        Model, 2024. arXiv:2405.04434, section 2.1
    """

    num_heads: int
    latent_dim: int
    query_latent_dim: int | None = None
    nope_dim: int
    rope_dim: int
    value_dim: int
    positions: tuple[Positions | None, ...] = (Rope(pairing="neighbours"),)
    windows: tuple[Window, ...] = (None,)
    scale: float | None = None
    norm: Norm = RMSNorm()
    biases: tuple[Literal["query_latent", "latent", "rotary_key", "out"], ...] = ()

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_heads", "latent_dim", "query_latent_dim")
        require_positive(self, "nope_dim", "rope_dim", "value_dim")
        _check_biases(self)
        _check_layer_patterns(self)
        require(
            "query_latent" not in self.biases or self.query_latent_dim is not None,
            "A bias of the query_latent needs query_latent_dim; got None.",
        )
        _check_position_types(self)
        for kind in self.positions:
            targets = kind.targets if isinstance(kind, Rope) else ()
            require(
                not set(targets) & set("vo"),
                "In Latent the value is made from what is kept of a token, which knows no position:"
                f" Rope.targets may be q and k; got {tuple(targets)}.",
            )

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.rope_dim


AttentionKind = MultiHead | SharedKV | Latent | Decay | Mixer


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A pattern of attention kinds over the layers, such as recurrent layers with some attention.

    Attributes:
        kinds: Those of the layers, cycled; the positions and windows of a kind are cycled over all
            layers too.

    References:
        Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model, 2024. arXiv:2403.19887,
        section 2
    """

    kinds: tuple[AttentionKind, ...]

    def __post_init__(self):
        check_fields(self)
        require_nonempty(self, "kinds")
        shared_biases = {p for kind in self.kinds for p in kind.positions if _is_shared_bias(p)}
        head_counts = {kind.num_heads for kind in self.kinds if shared_biases & set(kind.positions)}
        require(
            len(shared_biases) < 2 and len(head_counts) < 2,
            "Layers may share one bias of scores, and then have as many heads; got "
            f"{', '.join(sorted(map(repr, shared_biases)))} for {sorted(head_counts)} heads.",
        )

    @property
    def positions(self) -> tuple[Positions | None, ...]:
        """Position option of each layer, over one whole pattern."""
        return self._interleave_patterns([kind.positions for kind in self.kinds])

    @property
    def windows(self) -> tuple[Window, ...]:
        """Attention window of each layer, over one whole pattern."""
        return self._interleave_patterns([kind.windows for kind in self.kinds])

    def _interleave_patterns(self, patterns: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        count = math.lcm(len(patterns), *map(len, patterns))
        layer_patterns = (patterns[i % len(patterns)] for i in range(count))
        return tuple(pattern[i % len(pattern)] for i, pattern in enumerate(layer_patterns))


Attention = AttentionKind | Hybrid
RECURRENT_KINDS = Decay, Mixer  # kinds without scores: no masks, windows or biases of them


def _is_shared_bias(positions: Positions | None) -> bool:
    """Whether the option is a score bias with one set of parameters for all layers."""
    return isinstance(positions, ScoreBias) and positions.shared_across_layers


def _check_heads(attention: MultiHead | SharedKV) -> None:
    """Check that num_heads is a multiple of num_kv_heads, and that no bias is named twice."""
    require_positive(attention, "num_heads", "num_kv_heads", "head_dim", "logit_softcap")
    require(
        attention.num_heads % attention.num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads; "
        f"got num_heads={attention.num_heads}, num_kv_heads={attention.num_kv_heads}.",
    )
    _check_biases(attention)


def _check_biases(attention: MultiHead | SharedKV | Latent) -> None:
    require(
        len(set(attention.biases)) == len(attention.biases),
        f"biases names one twice: {attention.biases}.",
    )


def _check_layer_patterns(attention: MultiHead | SharedKV | Latent) -> None:
    """Check the per-layer positions and windows, and that at most one bias is shared."""
    require_nonempty(attention, "positions", "windows")
    for window in attention.windows:
        is_empty = isinstance(window, int) and window < 1
        require(not is_empty, f"A window holds at least one key; got {window}.")
    shared_biases = {p for p in attention.positions if _is_shared_bias(p)}
    require(
        len(shared_biases) < 2,
        "One bias of scores may be shared by the layers of a stack; got "
        f"{', '.join(sorted(map(repr, shared_biases)))}.",
    )
    for rope in attention.positions:
        if isinstance(rope, Rope):
            _check_rope(rope, attention)


def _check_position_types(attention: SharedKV | Latent) -> None:
    """Check that every position option is Rope or a score bias, which these kinds support."""
    for kind in attention.positions:
        require(
            kind is None or isinstance(kind, Rope | ScoreBias),
            f"{type(attention).__name__} takes Rope or a bias of scores as positions; "
            f"got {type(kind).__name__}.",
        )


def _check_rope(rope: Rope, attention: MultiHead | SharedKV | Latent) -> None:
    name = "rope_dim" if isinstance(attention, Latent) else "head_dim"
    width = rope.rotary_dim(attention.rope_head_dim)
    require(
        width > 0 and width % 2 == 0,
        "Rotary positions pair up features, so the rotated width must be even and above 0; "
        f"got {width} of {name}={attention.rope_head_dim} (fraction {rope.fraction}).",
    )
    require(
        width >= 4 or not isinstance(rope.scaling, NTKScaling | DynamicNTK),
        f"{type(rope.scaling).__name__} slows the last pair of features and keeps the first, so at "
        f"least 4 features must be rotated; got {width} of {name}={attention.rope_head_dim}.",
    )
    if isinstance(rope.scaling, LongRope):
        counts = len(rope.scaling.short_factors), len(rope.scaling.long_factors)
        require(
            counts == (width // 2, width // 2),
            f"LongRope needs one factor per feature pair, {width // 2} of them; "
            f"got {counts[0]} short and {counts[1]} long.",
        )
