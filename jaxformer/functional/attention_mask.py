"""Lazy masks and biases, computed per tile from positions, without a [T, S] array."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxformer.functional.arguments import checked
from jaxformer.functional.masks import causal_mask, segment_mask, window_mask


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """Static part of an `AttentionMask`: causal, window, lookahead, contiguous positions.

    Attributes:
        causal: Only keys at its own position and before.
        window: Only the latest so many keys, its own included; None is all.
        lookahead: With a window, as many after the query.
        contiguous: Positions rise by one from each token to the next of the same segment, and
            queries are the keys' tokens, so that kernels which count tokens themselves may be used.
    """

    causal: bool = False
    window: int | None = None
    lookahead: int = 0
    contiguous: bool = False

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"MaskRule.window must be at least 1; got {self.window}.")
        if self.lookahead < 0 or (self.lookahead and self.window is None):
            raise ValueError(
                "MaskRule.lookahead is a number of keys after the query, beside a window of those "
                f"before; got lookahead={self.lookahead} and window={self.window}."
            )


class AttentionMask(NamedTuple):
    """Lazy attention mask, from positions, segments and a `MaskRule`.

    Attributes:
        query_positions: Of each query, in tokens.
        key_positions: Of each key, in tokens.
        query_segments: Number of the document each query belongs to; None is one for all.
        key_segments: Of each key; None if and only if those of the queries are.
        rule: What positions allow.
    """

    query_positions: Integer[Array, "*batch T"]
    key_positions: Integer[Array, "*batch S"]
    query_segments: Integer[Array, "*batch T"] | None = None
    key_segments: Integer[Array, "*batch S"] | None = None
    rule: MaskRule = MaskRule()

    def materialize(self) -> Bool[Array, "*batch T S"] | None:
        """Return the mask as a boolean array, or None if everything is allowed."""
        rule, parts, at = self.rule, [], (self.query_positions, self.key_positions)
        if rule.causal:
            parts.append(causal_mask(*at))
        if rule.window is not None:
            parts.append(window_mask(*at, rule.window, lookahead=rule.lookahead))
        if self.query_segments is not None and self.key_segments is not None:
            parts.append(segment_mask(self.query_segments, self.key_segments))
        shape = jnp.broadcast_shapes(*(part.shape for part in parts))
        return reduce(and_, (jnp.broadcast_to(x, shape) for x in parts)) if parts else None


@jax.tree_util.register_static
@dataclass(frozen=True)
class BiasFormula:
    """How a bias follows from parameters and positions, and where its parameters have heads."""

    function: Callable[..., Float[Array, "N T S"]]
    settings: tuple[tuple[str, Any], ...]
    head_axes: tuple[int | None, ...]  # of each array of the parameters

    def __call__(
        self,
        params: Any,
        query_positions: Integer[Array, " T"],
        key_positions: Integer[Array, " S"],
    ) -> Float[Array, "N T S"]:
        """Return the bias [N, T, S] between these queries and keys."""
        settings = dict(self.settings)
        bias = jnp.asarray(self.function(params, query_positions, key_positions, **settings))
        expected = len(query_positions), len(key_positions)
        if bias.ndim != 3 or bias.shape[1:] != expected:
            raise ValueError(
                f"{getattr(self.function, '__name__', self.function)} gives a bias [heads, "
                f"queries, keys], here of {expected[0]} queries and {expected[1]} keys; got shape "
                f"{bias.shape}."
            )
        return bias


class ScoreBias(NamedTuple):
    """Lazy attention bias, a function of parameters and positions; made by `attention_bias`.

    Attributes:
        params: Arrays, of which it has a gradient.
        query_positions: Of each query, in tokens.
        key_positions: Of each key, in tokens.
        formula: The function.
    """

    params: Any
    query_positions: Integer[Array, "*batch T"]
    key_positions: Integer[Array, "*batch S"]
    formula: BiasFormula

    def materialize(self) -> Float[Array, "*batch N T S"]:
        """Return the bias as an array [*batch, N, T, S]."""
        of_sequence = jnp.vectorize(
            lambda *positions: self.formula(self.params, *positions), signature="(t),(s)->(n,t,s)"
        )
        return of_sequence(self.query_positions, self.key_positions)

    def map_heads(self, function: Callable[[Array, int | None], Array]) -> "ScoreBias":
        """Apply a function to each parameter array and its head axis."""
        leaves, tree = jax.tree.flatten(self.params)
        changed = map(function, leaves, self.formula.head_axes)
        return self._replace(params=jax.tree.unflatten(tree, changed))


@checked
def score_bias(
    function: Callable[..., Float[Array, "N T S"]],
    params: Any,
    query_positions: Integer[Array, "*batch T"],
    key_positions: Integer[Array, "*batch S"],
    *,
    head_axes: Any = 0,
    **settings: Any,
) -> ScoreBias:
    """Make a lazy attention bias from a function of parameters and positions.

        bias = function(params, query_positions, key_positions, **settings)

    Attention by blocks asks for it between a block of queries and one of keys, and for its gradient
    there, so no array of all pairs exists.

    Args:
        function: From parameters and positions of any queries [T] and keys [S] of a sequence to
            [N, T, S], for as many heads as the parameters are of. For instance `alibi_bias`.
        params: A tree of float arrays.
        query_positions: Of each query, in tokens.
        key_positions: Of each key, in tokens.
        head_axes: Which axis of each array of the parameters counts heads, or None: one for all, or
            a tree like `params`, or the upper part of one, as in `jax.vmap`.
        **settings: More keywords of the function, hashable.

    Returns:
        The bias, as `dot_product_attention` takes it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> at = jnp.arange(3)
        >>> F.score_bias(F.alibi_bias, F.alibi_slopes(8), at, at).materialize()[0]
        Array([[-0. , -0.5, -1. ],
               [-0.5, -0. , -0.5],
               [-1. , -0.5, -0. ]], dtype=float32)
    """
    axes = jax.tree.broadcast(head_axes, params, is_leaf=lambda x: x is None)
    axes = tuple(jax.tree.leaves(axes, is_leaf=lambda x: x is None))
    formula = BiasFormula(function, tuple(sorted(settings.items())), axes)
    params = jax.tree.map(jnp.asarray, params)
    return ScoreBias(params, query_positions, key_positions, formula)


def check_mask_and_bias(query: Array, key: Array, mask: Any, bias: Any) -> None:
    """Check that a lazy mask and bias have one entry per query, key and head."""
    (T, N), S = query.shape[-3:-1], key.shape[-3]
    for given in (mask, bias):
        if not isinstance(given, AttentionMask | ScoreBias):
            continue
        name = type(given).__name__
        sides = {"query_positions": T, "key_positions": S}
        if isinstance(given, AttentionMask):
            if (given.query_segments is None) != (given.key_segments is None):
                raise ValueError(
                    f"{name} has segments of queries and of keys, or neither; give both."
                )
            sides |= {"query_segments": T, "key_segments": S}
        for side, count in sides.items():
            found = getattr(given, side)
            if found is not None and found.shape[-1] != count:
                raise ValueError(
                    f"{name}.{side} has a number for each of {count} "
                    f"{'queries' if side.startswith('quer') else 'keys'}; got shape {found.shape}."
                )
        if isinstance(given, ScoreBias):
            pairs = zip(jax.tree.leaves(given.params), given.formula.head_axes, strict=True)
            for array, axis in pairs:
                if axis is not None and array.shape[axis] != N:
                    raise ValueError(
                        f"{name}.params have a number for each of {N} query heads along axis "
                        f"{axis}; got shape {array.shape}."
                    )


def materialized(given: Any) -> Any:
    """Return a lazy mask or bias as an array; arrays and None pass unchanged.

    Args:
        given: An `AttentionMask`, a `ScoreBias`, an array or None.

    Returns:
        The array that it is; arrays and None as they are.
    """
    return given.materialize() if isinstance(given, AttentionMask | ScoreBias) else given
