"""Hyper-connections: what a branch reads of several streams, and the weights of its output."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.norms import layer_norm


@typechecked
def hyper_connections(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    first: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "*batch T D"], tuple[Array, Array]]:
    """Return what a branch reads, the mixed streams, and the weights of its output.

        x = sum over i of a[i] h[i]        mixed[k] = sum over i of A[i, k] h[i]

    with a = e[first] + read + da, A = I + mix + dA and b = write + db. If there are "weights" W,
    da and dA are input_scale * tanh(N W[:, :n + 1]) and db is output_scale * tanh(N W[:, n + 1]),
    with N the layer norm of each stream. Else they are zero.

    Args:
        streams: The streams h of each token.
        weights: "read" [n], "mix" [n, n] and "write" [n]; for weights that depend on the streams
            also "norm" [D], "weights" [D, n + 2], "input_scale" [1] and "output_scale" [1].
        first: The stream that is read where "read" is zero.

    Returns:
        x, and the pair of the mixed streams ``[*batch, T, n, D]`` and b ``[*batch, T, n]``.

    References:
        Zhu et al., Hyper-Connections, 2024. arXiv:2409.19606, equations 2 to 6 and 10 to 13
    """
    n, h = streams.shape[-2], streams.astype(jnp.float32)
    w = {name: x.astype(jnp.float32) for name, x in weights.items()}
    read, mix = w["read"] + jax.nn.one_hot(first, n), w["mix"] + jnp.eye(n)
    inputs = jnp.broadcast_to(jnp.concatenate([read[:, None], mix], 1), (*h.shape[:-1], n + 1))
    outputs = jnp.broadcast_to(w["write"], h.shape[:-1])
    if "weights" in w:
        turned = jnp.tanh(layer_norm(h, w["norm"]) @ w["weights"])
        inputs = inputs + w["input_scale"][0] * turned[..., :-1]
        outputs = outputs + w["output_scale"][0] * turned[..., -1]
    mixed = jnp.einsum("...ik,...id->...kd", inputs, h).astype(streams.dtype)
    return mixed[..., 0, :], (mixed[..., 1:, :], outputs.astype(streams.dtype))
