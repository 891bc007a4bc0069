"""Checks that attention kinds share: heads, biases, per-layer positions and windows."""

from collections.abc import Sequence
from typing import Annotated, Any

from jaxformer.checks import Must, require
from jaxformer.config.positions import Positions, Rope, ScoreBias
from jaxformer.config.rope_scaling import DynamicNTK, LongRope, NTKScaling

MAX_ROTARY_DIM = 2**16  # their frequencies are a table that is made before any weight is read

# Every tap is a product of its own in the compiled program.
ConvolutionWidth = Annotated[int, Must("be from 2 to 256", lambda width: 2 <= width <= 256)]


def is_shared_bias(positions: Positions | None) -> bool:
    """Whether the option is a score bias with one set of parameters for all layers."""
    return isinstance(positions, ScoreBias) and positions.shared_across_layers


def check_heads(attention: Any) -> None:
    """Check that num_heads is a multiple of num_kv_heads."""
    require(
        attention.num_heads % attention.num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads; "
        f"got num_heads={attention.num_heads}, num_kv_heads={attention.num_kv_heads}.",
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


def check_ropes(attention: Any) -> None:
    """Check that each RoPE fits the heads."""
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
