"""Multi-head latent attention (MLA): expand latents to keys and values, or absorb the query.

Heads n, tokens j with a latent c[j] and a rotated key r[j] that heads share, kernels W_K and W_V:

    expanded    score[i, j] = q[i] @ [W_K[n].T c[j], r[j]],    value[j] = W_V[n].T c[j]
    absorbed    score[i, j] = [W_K[n] q[i], q_r[i]] @ [c[j], r[j]],    value[j] = c[j]

where q_r is the rotary part of the query. Scores are equal, and so are the outputs after the mean
of the absorbed values is multiplied by W_V, since both are linear. The absorbed form has one
key-value head and caches only [c, r] per token. The expanded form needs fewer FLOPs if many queries
attend to the same tokens.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.argument_checks import typechecked


@typechecked
def expand_latent(
    latent: Float[Array, "*batch S C"],
    rotary_key: Float[Array, "*batch S R"],
    key_kernel: Float[Array, "C N P"],
    value_kernel: Float[Array, "C N Hv"],
) -> tuple[Float[Array, "*batch S N P+R"], Float[Array, "*batch S N Hv"]]:
    """Expand latents and the shared rotary key to keys and values of each head.

        key[s, n] = [latent[s] @ key_kernel[:, n], rotary_key[s]]
        value[s, n] = latent[s] @ value_kernel[:, n]

    Args:
        latent: Latents that keys and values are projected from.
        rotary_key: Key features that all heads share, after RoPE.
        key_kernel: Kernel of the first P features of the keys.
        value_kernel: Kernel of the values.

    Returns:
        Keys and values, for `dot_product_attention`, in the dtype of `latent`.

    References:
        DeepSeek-AI, DeepSeek-V2, 2024. arXiv:2405.04434, section 2.1
    """
    key = jnp.einsum("...sc,cnp->...snp", latent, key_kernel)
    shared = jnp.broadcast_to(rotary_key[..., None, :], (*key.shape[:-1], rotary_key.shape[-1]))
    value = jnp.einsum("...sc,cnh->...snh", latent, value_kernel)
    return jnp.concatenate([key, shared.astype(key.dtype)], axis=-1), value


@typechecked
def absorb_query(
    query: Float[Array, "*batch T N Q"], key_kernel: Float[Array, "C N P"]
) -> Float[Array, "*batch T N C+Q-P"]:
    """Absorb the key kernel into the queries, so that they score latents directly.

        y[t, n] = [key_kernel[:, n] @ query[t, n, :P], query[t, n, P:]]

    so that y[t, n] @ [latent[s], rotary_key[s]] = query[t, n] @ key[s, n] of `expand_latent`. The
    scale of the scores stays ``Q ** -0.5``, for the width of `query`.

    Args:
        query: Queries for expanded keys; the features after the first P score the rotary key.
        key_kernel: As in `expand_latent`.

    Returns:
        Queries for the one key head ``[latent, rotary_key]``.

    References:
        DeepSeek-AI, DeepSeek-V2, 2024. arXiv:2405.04434, section 2.1.2
    """
    nope_query, rope_query = jnp.split(query, [key_kernel.shape[-1]], axis=-1)
    absorbed = jnp.einsum("...tnp,cnp->...tnc", nope_query, key_kernel)
    return jnp.concatenate([absorbed, rope_query], axis=-1)


@typechecked
def up_project_values(
    latent_mean: Float[Array, "*batch T N C"], value_kernel: Float[Array, "C N Hv"]
) -> Float[Array, "*batch T N Hv"]:
    """Project weighted means of latents to weighted means of values (W^UV after attention).

        y[t, n] = mean[t, n] @ value_kernel[:, n]

    Args:
        latent_mean: Output of attention with `absorb_query` and latents as values.
        value_kernel: As in `expand_latent`.

    Returns:
        The output of attention to expanded keys and values.
    """
    return jnp.einsum("...tnc,cnh->...tnh", latent_mean, value_kernel)


def prefer_absorbed(num_queries: int, latent_dim: int, nope_dim: int, value_dim: int) -> bool:
    """Whether the absorbed form takes fewer multiply-adds than the expanded form.

    Per cached token and head, expanding takes C (P + Hv) multiply-adds and each query another
    P + Hv; absorbed, each query takes 2 C.

    Args:
        num_queries: Queries per cached token.
        latent_dim: Width of the latent, C.
        nope_dim: Width of a key without its rotary part, P.
        value_dim: Width of a value, Hv.

    Returns:
        Whether 2 C queries < (C + queries) (P + Hv).
    """
    return 2 * latent_dim * num_queries < (latent_dim + num_queries) * (nope_dim + value_dim)
