"""Sow intermediate values, and add perturbations to them."""

from typing import Any

from flax import linen as nn

WATCHED = "watched"
NUDGED = "nudged"


def watch(module: nn.Module, name: str, value: Any) -> Any:
    """Sow a value as an intermediate, after adding its perturbation if one was passed in.

    `apply(..., mutable=["watched"])` gives the value under the module's path. An array in the
    collection "nudged" under the same path is added to it: zeros there, to differentiate in. To
    all others this does nothing and costs nothing.

    Args:
        module: Whose value it is.
        name: What it is called.
        value: An array, or a tree of arrays where nobody nudges.

    Returns:
        The value, nudged.
    """
    if module.has_variable(NUDGED, name):
        value = value + module.get_variable(NUDGED, name)
    if not module.is_initializing():
        module.sow(WATCHED, name, value, init_fn=lambda: None, reduce_fn=lambda _, last: last)
    return value
