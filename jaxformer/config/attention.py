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
        positions: Position options, cycled over the layers.
        windows: Attention windows, cycled over the layers: W keys that end with the query's token
            (an encoder also attends to W - 1 after it), a `BlockSparse` pattern, or None for all.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Cap c of the scores: s becomes c * tanh(s / c).
        clip_qkv: Queries, keys and values are clipped to [-clip_qkv, clip_qkv].
        qk_norm: Norm of queries and keys.
        biases: Projections with a bias.
        normalizer: Function from scores to attention weights.
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

    with a[i, j] from (R[i] q[i]) @ (R[j] c[j]). RoPE rotates the key c, which is also the value;
    the output is rotated back by the query's angle, so it depends on distances alone.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of the shared vector; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: Position options, cycled over the layers. If a `Rope` rotates only one of key and
            value, the cache holds both.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Cap c of the scores: s becomes c * tanh(s / c).
        qk_norm: Norm of queries and of the shared vectors, hence also of the values.
        biases: Projections with a bias.

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

    All heads share the rotated key. The cache holds only this key and the latent of each token.

    Attributes:
        num_heads: Query heads.
        latent_dim: Width of the latent that keys and values are projected from.
        query_latent_dim: Width of the latent that queries are projected from; None projects them
            from the residual stream.
        nope_dim: Width of a head's query and key without positions.
        rope_dim: Width of the shared key, and of a head's query for it.
        value_dim: Width of a head's value.
        positions: Position options, cycled over the layers. A `Rope` rotates the shared key and the
            queries for it.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is (nope_dim + rope_dim) ** -0.5. With YaRN, DeepSeek
            multiplies that by the square of `yarn_attention_factor`.
        norm: Norm of the latents.
        biases: Projections with a bias.

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
                "Latent cannot rotate values or outputs, because the cached latent has no position:"
                f" Rope.targets may contain only q and k; got {tuple(targets)}.",
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
        kinds: Attention kinds, cycled over the layers. The positions and windows of each kind are
            also cycled over all layers.

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
            "Layers of a Hybrid may share one score bias, and then need the same num_heads; got "
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
RECURRENT_KINDS = Decay, Mixer  # kinds without scores, so without masks, windows or score biases


def _is_shared_bias(positions: Positions | None) -> bool:
    """Whether the option is a score bias with one set of parameters for all layers."""
    return isinstance(positions, ScoreBias) and positions.shared_across_layers


def _check_heads(attention: MultiHead | SharedKV) -> None:
    """Check that num_heads is a multiple of num_kv_heads and that biases do not repeat."""
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
        f"biases must not repeat a projection; got {attention.biases}.",
    )


def _check_layer_patterns(attention: MultiHead | SharedKV | Latent) -> None:
    """Check the per-layer positions and windows, and that at most one bias is shared."""
    require_nonempty(attention, "positions", "windows")
    for window in attention.windows:
        is_empty = isinstance(window, int) and window < 1
        require(not is_empty, f"A window must be at least 1; got {window}.")
    shared_biases = {p for p in attention.positions if _is_shared_bias(p)}
    require(
        len(shared_biases) < 2,
        "Layers may share at most one score bias; got "
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
            f"{type(attention).__name__} supports only Rope or a ScoreBias as positions; "
            f"got {type(kind).__name__}.",
        )


def _check_rope(rope: Rope, attention: MultiHead | SharedKV | Latent) -> None:
    name = "rope_dim" if isinstance(attention, Latent) else "head_dim"
    width = rope.rotary_dim(attention.rope_head_dim)
    require(
        width > 0 and width % 2 == 0,
        "RoPE rotates pairs of features, so the rotated width must be even and above 0; "
        f"got {width} of {name}={attention.rope_head_dim} (fraction {rope.fraction}).",
    )
    require(
        width >= 4 or not isinstance(rope.scaling, NTKScaling | DynamicNTK),
        f"{type(rope.scaling).__name__} needs at least 4 rotated features (2 pairs); "
        f"got {width} of {name}={attention.rope_head_dim}.",
    )
    if isinstance(rope.scaling, LongRope):
        counts = len(rope.scaling.short_factors), len(rope.scaling.long_factors)
        require(
            counts == (width // 2, width // 2),
            f"LongRope needs one factor per feature pair, {width // 2} of them; "
            f"got {counts[0]} short and {counts[1]} long.",
        )
