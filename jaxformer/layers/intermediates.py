"""Sow intermediate values, and add perturbations to them."""

from typing import Any

from flax import linen as nn

INTERMEDIATES = "intermediates"
PERTURBATIONS = "perturbations"


def sow_and_perturb(module: nn.Module, name: str, value: Any) -> Any:
    """Sow a value as an intermediate, after adding its perturbation if one was passed in.

    `apply(..., mutable=["intermediates"])` gives the value under the module's path. An array in the
    collection "perturbations" under the same path is added to it: zeros there, to differentiate
    in. To all others this does nothing and costs nothing.

    Args:
        module: Whose value it is.
        name: What it is called.
        value: An array, or a tree of arrays where nobody perturbs.

    Returns:
        The value, perturbed.
    """
    if module.has_variable(PERTURBATIONS, name):
        value = value + module.get_variable(PERTURBATIONS, name)
    if not module.is_initializing():
        module.sow(INTERMEDIATES, name, value, init_fn=lambda: None, reduce_fn=lambda _, last: last)
    return value
