"""Module of a score bias option: its parameters, and the lazy bias that attention takes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.checks import OptionError, require_like, shown
from jaxformer.config.parameter import Parameter, parse_logical_axes
from jaxformer.layers.custom_option import option_parameters
from jaxformer.layers.parameters import axis_size, local_shard
from jaxformer.layers.runtime import RuntimeConfig


class ScoreBiasModule(nn.Module):
    """Float32 parameters of a score bias option; call it with positions for the bias.

    Heads are sharded over `tensor`.
    """

    option: c.ScoreBias
    num_heads: int
    runtime: RuntimeConfig
    causal: bool

    @nn.compact
    def __call__(
        self, query_positions: Int[Array, "*batch T"], key_positions: Int[Array, "*batch S"]
    ) -> F.AttentionBias:
        """Return the `F.AttentionBias` between these positions."""
        declared = self.option.parameters(self.num_heads)
        return bind_score_bias(
            self.option,
            option_parameters(self, self.option, declared, jnp.float32),
            self.num_heads,
            query_positions,
            key_positions,
            causal=self.causal,
            tensor=self.runtime.mesh_axes.tensor,
        )


def bind_score_bias(
    option: c.ScoreBias,
    params: Mapping[str, Any],
    num_heads: int,
    query_positions: Int[Array, "*batch T"],
    key_positions: Int[Array, "*batch S"],
    *,
    causal: bool,
    tensor: str | None = None,
) -> F.AttentionBias:
    """Make the `F.AttentionBias` of an option from its parameters and positions.

    Args:
        option: The option.
        params: Its parameters for this device's heads.
        num_heads: Number of heads on all devices.
        query_positions: Positions of the queries.
        key_positions: Positions of the keys.
        causal: Whether keys after the query are masked.
        tensor: Mesh axis over which heads are sharded.

    Returns:
        The bias, as `F.dot_product_attention` takes it.
    """
    constants, declared = option.constants(num_heads), option.parameters(num_heads)
    check_constants(option, constants, declared, num_heads)
    local_constants = {
        name: local_shard(jnp.asarray(x), tensor, axis=0) for name, x in constants.items()
    }
    head_axes = dict.fromkeys(local_constants, 0) | {
        name: parse_logical_axes(parameter.axes).names.index("heads")
        if "heads" in parameter.axes.split()
        else None
        for name, parameter in declared.items()
    }
    everything = {**params, **local_constants}
    at = query_positions, key_positions
    check_bias(option, everything, at, num_heads // axis_size(tensor), causal=causal)
    return F.attention_bias(option, everything, *at, head_axes=head_axes, causal=causal)


def check_constants(
    option: c.ScoreBias, constants: Any, declared: Mapping[str, Parameter], num_heads: int
) -> None:
    """Check that constants are float arrays [heads, ...] and do not share a parameter's name."""
    giver = f"{type(option).__name__}.constants"
    wanted = "a dict of names to float arrays [heads, ...]"
    if not isinstance(constants, Mapping):
        raise OptionError(f"{giver} must return {wanted}; got {shown(constants)}.")
    for name, x in constants.items():
        if name in declared:
            raise OptionError(f"{giver} and parameters both define {name!r}.")
        shape, dtype = getattr(x, "shape", ()), getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise OptionError(f"{giver} must return {wanted}; got {shown(x)} for {name!r}.")
        if shape[:1] != (num_heads,):
            raise OptionError(
                f"{giver} must return {wanted} with {num_heads} heads; got {shape} for {name!r}."
            )
        if not isinstance(x, jax.core.Tracer) and np.isnan(x).any():
            raise OptionError(f"{giver} must not return NaN; {name!r} has NaN.")


def check_bias(
    option: Any,
    params: dict[str, Array],
    positions: tuple[Array, Array],
    num_heads: int,
    *,
    causal: bool,
) -> None:
    """Check that a bias has the shape [heads, queries, keys] on this device."""
    T, S = (jax.ShapeDtypeStruct(x.shape[-1:], x.dtype) for x in positions)
    bias = jax.eval_shape(partial(option, causal=causal), params, T, S)
    floats = jnp.issubdtype(getattr(bias, "dtype", jnp.int32), jnp.floating)
    shape = num_heads, *T.shape, *S.shape
    dtype = bias.dtype if floats and bias.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    require_like(type(option).__name__, "[heads, queries, keys]", bias, shape, dtype)
