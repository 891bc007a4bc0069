"""Checks that attention kinds share: heads, biases, per-layer positions and windows."""

from collections.abc import Sequence
from typing import Any

from jaxformer.checks import INT32_MAX, require, require_nonempty, require_positive
from jaxformer.config.positions import Positions, Rope, ScoreBias, window_size
from jaxformer.config.rope_scaling import DynamicNTK, LongRope, NTKScaling

MAX_ROTARY_DIM = 2**16  # their frequencies are a table that is made before any weight is read

MAX_CONVOLUTION_WIDTH = 256


def is_shared_bias(positions: Positions | None) -> bool:
    """Whether the option is a score bias with one set of parameters for all layers."""
    return isinstance(positions, ScoreBias) and positions.shared_across_layers


def check_heads(attention: Any) -> None:
    """Check that num_heads is a multiple of num_kv_heads and that biases do not repeat."""
    require_positive(attention, "num_heads", "num_kv_heads", "head_dim", "logit_softcap")
    require(
        attention.num_heads % attention.num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads; "
        f"got num_heads={attention.num_heads}, num_kv_heads={attention.num_kv_heads}.",
    )
    check_biases(attention)


def check_biases(attention: Any) -> None:
    """Check that biases do not repeat."""
    require(
        len(set(attention.biases)) == len(attention.biases),
        f"biases must not repeat a projection; got {attention.biases}.",
    )


def indivisibility(name: str, count: int, tensor: int, joint_norm: str | None) -> str | None:
    """Why key heads, or key-value heads, cannot be sharded over `tensor`; None if they can.

    Args:
        name: Field of the number of heads.
        count: Its value.
        tensor: Devices along `tensor`.
        joint_norm: A norm that needs all heads in one place, in words.
    """
    if count % tensor == 0:
        return None
    if tensor % count:
        return f"{name} {count} and tensor {tensor}: one must be a multiple of the other"
    return joint_norm and f"{name} {count} with {joint_norm} cannot be sharded over tensor {tensor}"


def check_convolution_width(name: str, width: int) -> None:
    """Check the number of taps; every tap is a product of its own in the compiled program."""
    require(
        2 <= width <= MAX_CONVOLUTION_WIDTH,
        f"{name} must be from 2 to {MAX_CONVOLUTION_WIDTH}; got {width}.",
    )


def check_layer_patterns(attention: Any) -> None:
    """Check the per-layer positions and windows, and that at most one bias is shared."""
    require_nonempty(attention, "positions", "windows")
    for window in attention.windows:
        size = window_size(window)
        tokens = 1 if size is None else size
        require(tokens >= 1, f"A window must be at least 1; got {window}.")
        require(tokens <= INT32_MAX, f"A window must be at most {INT32_MAX}; got {window}.")
    for rope in attention.positions:
        if isinstance(rope, Rope):
            _check_rope(rope, attention)


def check_shared_bias(kinds: Sequence[Any]) -> None:
    """Check that at most one bias is shared, by attention kinds with the same number of heads."""
    shared_biases = {p for kind in kinds for p in kind.positions if is_shared_bias(p)}
    head_counts = {kind.num_heads for kind in kinds if shared_biases & set(kind.positions)}
    require(
        len(shared_biases) < 2 and len(head_counts) < 2,
        "Layers may share one score bias, and then need the same num_heads; got "
        f"{', '.join(sorted(map(repr, shared_biases)))} for {sorted(head_counts)} heads.",
    )


def check_position_types(attention: Any) -> None:
    """Check that every position option is Rope or a score bias, which these kinds support."""
    for kind in attention.positions:
        require(
            kind is None or isinstance(kind, Rope | ScoreBias),
            f"{type(attention).__name__} supports only Rope or a ScoreBias as positions; "
            f"got {type(kind).__name__}.",
        )


def _check_rope(rope: Rope, attention: Any) -> None:
    name = "rope_dim" if hasattr(attention, "rope_dim") else "head_dim"
    width = rope.rotary_dim(attention.rope_head_dim)
    require(
        width > 0 and width % 2 == 0,
        "RoPE rotates pairs of features, so the rotated width must be even and above 0; "
        f"got {width} of {name}={attention.rope_head_dim} (fraction {rope.fraction}).",
    )
    require(
        width <= MAX_ROTARY_DIM,
        f"RoPE rotates at most {MAX_ROTARY_DIM} features; got {width} of "
        f"{name}={attention.rope_head_dim}.",
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
