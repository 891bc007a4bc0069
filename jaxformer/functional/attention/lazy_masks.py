"""Lazy masks and biases, computed per tile from positions, without a [T, S] array."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.masks import (
    BlockSparsePattern,
    causal_mask,
    chunk_mask,
    segment_mask,
    window_mask,
)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """Static part of an `AttentionMask`: what positions allow, and whether they are contiguous.

    Attributes:
        causal: Only keys at the query's position and before.
        window: Only this many latest keys, the query's own included; None is all.
        lookahead: With a window, also this many keys after the query.
        contiguous_positions: Positions increase by one within each segment, and queries and keys
            are the same tokens, as fused kernels need.
        chunk: Only keys of the query's chunk of so many positions; None is all.
        block_sparse: Only keys of the blocks that this pattern shows to each head.
        max_segments: No row has more segments, which kernels rely on; None is unknown.
    """

    causal: bool = False
    window: int | None = None
    lookahead: int = 0
    contiguous_positions: bool = False
    chunk: int | None = None
    block_sparse: BlockSparsePattern | None = None
    max_segments: int | None = None

    def __post_init__(self):
        for name in ("window", "chunk", "max_segments"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"MaskRule.{name} must be at least 1; got {number}.")
        if self.lookahead < 0 or (self.lookahead and self.window is None):
            raise ValueError(
                "MaskRule.lookahead is a number of keys after the query, beside a window of keys "
                f"before it; got lookahead={self.lookahead} and window={self.window}."
            )


class AttentionMask(NamedTuple):
    """Lazy attention mask, from positions, segments and a `MaskRule`.

    Attributes:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        query_segments: Document number of each query; None is one document.
        key_segments: Document number of each key; None if and only if `query_segments` is.
        rule: Conditions on positions.
        head_shifts: Shift of each head's remote blocks, if the rule is block-sparse.
    """

    query_positions: Integer[Array, "*batch T"]
    key_positions: Integer[Array, "*batch S"]
    query_segments: Integer[Array, "*batch T"] | None = None
    key_segments: Integer[Array, "*batch S"] | None = None
    rule: MaskRule = MaskRule()
    head_shifts: Integer[Array, " N"] | None = None

    @classmethod
    def causal(
        cls,
        positions: Integer[Array, "*batch T"],
        window: int | None = None,
        segments: Integer[Array, "*batch T"] | None = None,
    ) -> "AttentionMask":
        """Causal self-attention mask of these tokens.

        Args:
            positions: Position of each token.
            window: Keys that a query sees at most, its own included; None is all.
            segments: Number of the document of each token; None is one for all.
        """
        rule = MaskRule(causal=True, window=window)
        return cls(positions, positions, segments, segments, rule)

    def materialize(self) -> Bool[Array, "*batch T S"] | Bool[Array, "*batch N T S"] | None:
        """Return the boolean mask, with a heads axis if block-sparse; None if all is allowed."""
        rule, masks, positions = self.rule, [], (self.query_positions, self.key_positions)
        if rule.causal:
            masks.append(causal_mask(*positions))
        if rule.window is not None:
            masks.append(window_mask(*positions, rule.window, lookahead=rule.lookahead))
        if rule.chunk is not None:
            masks.append(chunk_mask(*positions, rule.chunk))
        if self.query_segments is not None and self.key_segments is not None:
            masks.append(segment_mask(self.query_segments, self.key_segments))
        if rule.block_sparse is not None and self.head_shifts is not None:
            masks = [jnp.expand_dims(x, -3) for x in masks]
            masks.append(rule.block_sparse.mask(*positions, self.head_shifts))
        shape = jnp.broadcast_shapes(*(part.shape for part in masks))
        return reduce(and_, (jnp.broadcast_to(x, shape) for x in masks)) if masks else None


@jax.tree_util.register_static
@dataclass(frozen=True)
class BiasFunction:
    """Static part of an `AttentionBias`: function, keywords, head axes of the parameters."""

    function: Callable[..., Float[Array, "N T S"]]
    kwargs: tuple[tuple[str, Any], ...]
    head_axes: tuple[int | None, ...]  # of each array of the parameters

    def __call__(
        self,
        params: Any,
        query_positions: Integer[Array, " T"],
        key_positions: Integer[Array, " S"],
    ) -> Float[Array, "N T S"]:
        """Return the bias [N, T, S] between these queries and keys."""
        kwargs = dict(self.kwargs)
        bias = jnp.asarray(self.function(params, query_positions, key_positions, **kwargs))
        expected = len(query_positions), len(key_positions)
        if bias.ndim != 3 or bias.shape[1:] != expected:
            raise ValueError(
                f"{getattr(self.function, '__name__', self.function)} gives a bias [heads, "
                f"queries, keys], here of {expected[0]} queries and {expected[1]} keys; got shape "
                f"{bias.shape}."
            )
        return bias


class AttentionBias(NamedTuple):
    """Lazy attention bias, a function of parameters and positions; made by `attention_bias`.

    Attributes:
        params: Differentiable arrays.
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        bias_function: The function and its keywords.
    """

    params: Any
    query_positions: Integer[Array, "*batch T"]
    key_positions: Integer[Array, "*batch S"]
    bias_function: BiasFunction

    def materialize(self) -> Float[Array, "*batch N T S"]:
        """Return the bias as an array, ``[*batch, N, T, S]``."""
        of_sequence = jnp.vectorize(
            lambda *positions: self.bias_function(self.params, *positions),
            signature="(t),(s)->(n,t,s)",
        )
        return of_sequence(self.query_positions, self.key_positions)

    def map_heads(self, function: Callable[[Array, int | None], Array]) -> "AttentionBias":
        """Apply a function to each parameter array and its head axis."""
        leaves, tree = jax.tree.flatten(self.params)
        changed = map(function, leaves, self.bias_function.head_axes)
        return self._replace(params=jax.tree.unflatten(tree, changed))


@typechecked
def attention_bias(
    function: Callable[..., Float[Array, "N T S"]],
    params: Any,
    query_positions: Integer[Array, "*batch T"],
    key_positions: Integer[Array, "*batch S"],
    *,
    head_axes: Any = 0,
    **kwargs: Any,
) -> AttentionBias:
    """Make a lazy attention bias from a function of parameters and positions.

        bias = function(params, query_positions, key_positions, **kwargs)

    Blockwise attention computes the bias and its gradient tile by tile, so the [T, S] array never
    exists.

    Args:
        function: From parameters, query positions [T] and key positions [S] to [N, T, S], with the
            heads of the parameters; for example `alibi_bias`.
        params: A tree of float arrays.
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        head_axes: The heads axis of each array of the parameters, or None: one number for all, or a
            prefix tree of `params`, as in `jax.vmap`.
        **kwargs: Further hashable keywords of the function.

    Returns:
        The bias, as `dot_product_attention` takes it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> at = jnp.arange(3)
        >>> F.attention_bias(F.alibi_bias, F.alibi_slopes(8), at, at).materialize()[0]
        Array([[-0. , -0.5, -1. ],
               [-0.5, -0. , -0.5],
               [-1. , -0.5, -0. ]], dtype=float32)
    """
    axes = jax.tree.broadcast(head_axes, params, is_leaf=lambda x: x is None)
    axes = tuple(jax.tree.leaves(axes, is_leaf=lambda x: x is None))
    bias_function = BiasFunction(function, tuple(sorted(kwargs.items())), axes)
    params = jax.tree.map(jnp.asarray, params)
    return AttentionBias(params, query_positions, key_positions, bias_function)


TOKENS_OR_HEADS = {"query": "queries", "key": "keys", "head": "query heads"}


def check_arrays(query: Array, key: Array, mask: Any, bias: Any) -> None:
    """Check the heads, and that a lazy mask and bias have one entry per query, key and head."""
    (T, N), (S, K) = query.shape[-3:-1], key.shape[-3:-1]
    if K == 0 or N % K:
        raise ValueError(f"Query heads must be a multiple of key/value heads; got {N} and {K}.")
    for mask_or_bias in (mask, bias):
        if not isinstance(mask_or_bias, AttentionMask | AttentionBias):
            continue
        name = type(mask_or_bias).__name__
        lengths = {"query_positions": T, "key_positions": S}
        if isinstance(mask_or_bias, AttentionMask):
            if (mask_or_bias.query_segments is None) != (mask_or_bias.key_segments is None):
                raise ValueError(f"{name} needs both query_segments and key_segments, or neither.")
            if (mask_or_bias.rule.block_sparse is None) != (mask_or_bias.head_shifts is None):
                raise ValueError(
                    f"{name} needs both head_shifts and rule.block_sparse, or neither."
                )
            lengths |= {"query_segments": T, "key_segments": S, "head_shifts": N}
        for attribute, count in lengths.items():
            numbers = getattr(mask_or_bias, attribute)
            if numbers is not None and numbers.shape[-1] != count:
                what = TOKENS_OR_HEADS[attribute.partition("_")[0]]
                raise ValueError(
                    f"{name}.{attribute} has a number for each of {count} {what}; got shape "
                    f"{numbers.shape}."
                )
        if isinstance(mask_or_bias, AttentionBias):
            head_axes = mask_or_bias.bias_function.head_axes
            for array, axis in zip(jax.tree.leaves(mask_or_bias.params), head_axes, strict=True):
                if axis is not None and array.shape[axis] != N:
                    raise ValueError(
                        f"{name}.params have a number for each of {N} query heads along axis "
                        f"{axis}; got shape {array.shape}."
                    )


def materialize(mask_or_bias: Any, *, num_axes: int | None = None) -> Any:
    """Return a lazy mask or bias as an array; arrays and None pass unchanged.

    Args:
        mask_or_bias: An `AttentionMask`, an `AttentionBias`, an array or None.
        num_axes: Axes of an array ``[*batch, N, T, S]``: a mask that differs between heads gets
            leading axes of size 1 up to that number, since the number of axes tells it from one
            without heads.

    Returns:
        The array that it is; arrays and None as they are.
    """
    if not isinstance(mask_or_bias, AttentionMask | AttentionBias):
        return mask_or_bias
    array: Any = mask_or_bias.materialize()
    if isinstance(mask_or_bias, AttentionBias) or mask_or_bias.head_shifts is None:
        return array
    return jnp.expand_dims(array, tuple(range((num_axes or 0) - array.ndim)))
