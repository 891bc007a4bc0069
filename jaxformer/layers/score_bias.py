"""Biases of scores: what they learn, and how attention is told of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import learned, my_share, read_axes


class ScoreBias(nn.Module):
    """The parameters of an option, in float32, and its bias between some positions.

    Each device along `tensor` has those of its heads.
    """

    option: c.ScoreBias
    num_heads: int
    mode: Mode
    causal: bool

    @nn.compact
    def __call__(
        self, query_positions: Int[Array, "*batch T"], key_positions: Int[Array, "*batch S"]
    ) -> F.ScoreBias:
        """As `F.dot_product_attention` takes it."""
        declared = self.option.parameters(self.num_heads)
        wide = replace(self.mode, dtype=jnp.float32)
        return score_bias(
            self.option,
            {name: learned(self, name, one, wide) for name, one in declared.items()},
            self.num_heads,
            query_positions,
            key_positions,
            causal=self.causal,
            tensor=self.mode.axes.tensor,
        )


def score_bias(
    option: c.ScoreBias,
    params: Mapping[str, Any],
    num_heads: int,
    query_positions: Int[Array, "*batch T"],
    key_positions: Int[Array, "*batch S"],
    *,
    causal: bool,
    tensor: str | None = None,
) -> F.ScoreBias:
    """The bias of an option between some positions.

    Args:
        option: What is chosen.
        params: Its parameters, of the heads of this device.
        num_heads: On all devices together.
        query_positions: Of the queries.
        key_positions: Of the keys.
        causal: Whether keys after the query are masked.
        tensor: The device axis that shares heads.

    Returns:
        As `F.dot_product_attention` takes it.
    """
    constants = option.constants(num_heads)
    shares = {name: my_share(x, tensor, axis=0) for name, x in constants.items()}
    head_axes = dict.fromkeys(shares, 0) | {
        name: read_axes(one.axes).names.index("heads") if "heads" in one.axes.split() else None
        for name, one in option.parameters(num_heads).items()
    }
    return F.score_bias(
        option,
        {**params, **shares},
        query_positions,
        key_positions,
        head_axes=head_axes,
        causal=causal,
    )


def of_each_layer(positions: c.Positions | None, num_heads: int) -> c.ScoreBias | None:
    """The bias of which each layer has parameters of its own, if these positions are one."""
    if not isinstance(positions, c.ScoreBias) or positions.shared:
        return None
    return positions if positions.parameters(num_heads) else None
