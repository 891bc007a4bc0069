"""Sow intermediate values, and add perturbations to them."""

from typing import Any

from flax import linen as nn

INTERMEDIATES = "intermediates"
PERTURBATIONS = "perturbations"


def sow_and_perturb(module: nn.Module, name: str, value: Any) -> Any:
    """Sow a value as an intermediate, after adding its perturbation if one was passed in.

    `apply(..., mutable=["intermediates"])` returns the value under the module's path. An array in
    the collection "perturbations" under the same path is added to it; zeros there give the gradient
    with respect to the value. Without these collections there is no cost.

    Args:
        module: The module that computes the value.
        name: Name of the value.
        value: An array, or a tree of arrays if it is not perturbed.

    Returns:
        The value, perturbed.
    """
    if module.has_variable(PERTURBATIONS, name):
        value = value + module.get_variable(PERTURBATIONS, name)
    if not module.is_initializing():
        module.sow(INTERMEDIATES, name, value, init_fn=lambda: None, reduce_fn=lambda _, last: last)
    return value
