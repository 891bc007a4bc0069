"""Residual options in the stack: their parameters, and checks of what they return."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.checks import OptionError, named_errors, require_like, shown
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.custom_option import option_parameters
from jaxformer.layers.runtime import INTERMEDIATES, PERTURBATIONS, RuntimeConfig, sow_and_perturb

AXES = "[rows, tokens, width]"
Join = Callable[[Float[Array, "*batch T D"]], Any]


class ResidualParameters(nn.Module):
    """Parameters of a `config.Residual`, of one branch or layer, or of the model."""

    option: c.Residual
    runtime: RuntimeConfig
    model_dim: int
    of_model: bool = False

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """Return the arrays by name."""
        option, scope = self.option, "model_parameters" if self.of_model else "parameters"
        declared = getattr(option, scope)(self.model_dim)
        for parameter_name, parameter in declared.items():
            if set(parse_logical_axes(parameter.axes).names) - {"model", "features"}:
                raise OptionError(
                    f"{type(option).__name__}.{scope}: every device has all of the stream, so axes "
                    f"must be model or features; got {parameter.axes!r} of {parameter_name!r}."
                )
        dtype = jnp.float32 if option.in_float32 else self.runtime.dtype
        return option_parameters(self, option, declared, dtype)


def begin(
    option: c.Residual,
    params: dict[str, Array],
    x: Float[Array, "*batch T D"],
    attention: c.AttentionKind,
) -> Any:
    """Return the state that flows through the depth, which the first layer's branches can read."""
    name = f"{type(option).__name__}.begin"
    with named_errors(name):
        state = option.begin(x, params)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(state)] or [()]
    for shape in shapes:
        if shape[: x.ndim - 1] != x.shape[:-1]:
            raise OptionError(
                f"{name} must return arrays that begin with the axes {x.shape[:-1]} of rows and "
                f"tokens; got {shape}."
            )
    check_read(option, state, x, attention)
    return F.pvary_like(state, x)  # zeros that the option made are alike on all devices


def check_read(
    option: c.Residual, state: Any, x: Float[Array, "*batch T D"], attention: c.AttentionKind
) -> None:
    """Check that a branch reads one vector for each token."""
    name, declared = f"{type(option).__name__}.read", option.parameters(x.shape[-1])
    dtype = jnp.float32 if option.in_float32 else x.dtype
    params = {key: jax.ShapeDtypeStruct(one.shape, dtype) for key, one in declared.items()}
    branch = "layer" if option.per == "layer" else "attention"
    place = c.Place(jnp.int32(0), branch, attention, x)
    with named_errors(name):
        read, _ = jax.eval_shape(lambda s, p: option.read(s, p, place), state, params)
    require_like(name, AXES, read, x.shape, x.dtype)


def read(
    option: c.Residual, params: dict[str, Array], state: Any, place: c.Place
) -> tuple[Float[Array, "*batch T D"], Join]:
    """Return what a branch reads, and the function from its output to the next state."""
    name = type(option).__name__
    with named_errors(f"{name}.read"):
        x, held = option.read(state, params, place)

    def join(y: Float[Array, "*batch T D"]) -> Any:
        with named_errors(f"{name}.write"):
            new = option.write(state, held, y, params, place)
        before_and_after: Any = jax.tree.structure(state), jax.tree.structure(new)
        if before_and_after[0] != before_and_after[1]:
            raise OptionError(f"{name}.write must return a state like its input; got {shown(new)}.")
        for after, before in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
            require_like(name, AXES, after, before.shape, before.dtype)
        return new

    return x, join


def end(
    option: c.Residual, params: dict[str, Array], state: Any, x: Float[Array, "*batch T D"]
) -> Float[Array, "*batch T D"]:
    """Return the stream that the final norm reads, an array like the embeddings x."""
    name = f"{type(option).__name__}.end"
    with named_errors(name):
        stream = option.end(state, params)
    require_like(name, AXES, stream, x.shape, x.dtype)
    return stream


def sow_stream(module: nn.Module, state: Any, stack_input: Array | None) -> Any:
    """Sow the first array of the state as the residual stream, and return the state, perturbed.

    Of an array of several streams, each is sown too.
    """
    leaves, structure = jax.tree.flatten(state)
    x = sow_and_perturb(module, "residual_stream", leaves[0])
    has_streams = stack_input is not None and x.ndim > stack_input.ndim
    names = [f"stream_{i}" for i in range(x.shape[-2] if has_streams else 0)]
    is_patched = any(module.has_variable(PERTURBATIONS, name) for name in names)
    if names and (is_patched or module.is_mutable_collection(INTERMEDIATES)):
        streams = (sow_and_perturb(module, name, x[..., i, :]) for i, name in enumerate(names))
        x = jnp.stack([*streams], axis=-2)
    return jax.tree.unflatten(structure, [x, *leaves[1:]])
