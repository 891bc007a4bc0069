"""Rotary position embedding (RoPE): multiply feature pairs by unit complex numbers."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Complex64, Float, Real

from jaxformer.functional.argument_checks import typechecked

Pairing = Literal["halves", "neighbours"]


@typechecked
def rope_frequencies(head_dim: int, *, base: float = 10_000.0) -> Float[Array, " {head_dim//2}"]:
    """RoPE frequency of each feature pair: base ** (-2 j / head_dim).

        frequencies[j] = base ** (-2 * j / head_dim),    j = 0 ... head_dim / 2 - 1

    The wavelength of pair ``j`` is ``2 * pi / frequencies[j]`` positions. A larger base lowers all
    frequencies but the first. They are computed in float64 and rounded once.

    Args:
        head_dim: Rotated features per head; with partial rotation, fewer than the whole head.
        base: Base of the frequencies, also called theta.

    Returns:
        Radians per position, float32.

    Raises:
        ValueError: If ``head_dim`` is odd or less than two, or ``base`` is not positive.

    Example:
        >>> from jaxformer import functional as F
        >>> F.rope_frequencies(8)  # radians per position
        Array([1.   , 0.1  , 0.01 , 0.001], dtype=float32)

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.2.2
    """
    if head_dim % 2 or head_dim < 2:
        raise ValueError(
            f"RoPE rotates pairs of features, so head_dim must be even; got {head_dim}."
        )
    if base <= 0:
        raise ValueError(f"base must be positive; got {base}.")
    return jnp.asarray(base ** (-np.arange(0, head_dim, 2) / head_dim), jnp.float32)


@typechecked
def rope_rotations(
    positions: Real[Array, "*batch T"], frequencies: Float[Array, " C"]
) -> Complex64[Array, "*batch T C"]:
    """RoPE rotations: one unit complex number per position and feature pair.

        rotations[t, j] = exp(i * positions[t] * frequencies[j])

    Phases are float32 with a relative error of 1e-7. For the highest frequencies the error of the
    cosine is 2e-4 near position 4,000, 1e-2 near 100,000, 1e-1 near a million and total beyond ten
    million; for the lowest ones these positions are a hundred times larger. Pass integer positions:
    bfloat16 is exact only up to 256.

    If a RoPE scaling has an attention factor (YaRN, LongRoPE), multiply the rotations of queries
    and keys by it.

    Args:
        positions: Absolute positions; they may be packed, offset, negative or fractional.
        frequencies: Radians per position, from `rope_frequencies`, scaled or not.

    Returns:
        The rotations, which all heads and layers share.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> rotations = F.rope_rotations(jnp.array([0, 1, 2, 100]), F.rope_frequencies(4))
        >>> np.angle(rotations).round(2)  # two pairs; angles are in (-pi, pi]
        array([[ 0.  ,  0.  ],
               [ 1.  ,  0.01],
               [ 2.  ,  0.02],
               [-0.53,  1.  ]], dtype=float32)

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.2.1
    """
    phases = jnp.multiply.outer(positions.astype(jnp.float32), frequencies.astype(jnp.float32))
    return jax.lax.complex(jnp.cos(phases), jnp.sin(phases))


def as_complex(x: Float[Array, "*batch H"], *, pairing: Pairing) -> Complex64[Array, "*batch H//2"]:
    """Convert feature pairs to complex numbers, the first of each pair as the real part."""
    if pairing == "halves":
        real, imag = jnp.split(x, 2, axis=-1)
    else:
        real, imag = jnp.unstack(x.reshape(*x.shape[:-1], -1, 2), axis=-1)
    return jax.lax.complex(real.astype(jnp.float32), imag.astype(jnp.float32))


def as_real(z: Complex[Array, "*batch C"], *, pairing: Pairing) -> Float[Array, "*batch 2*C"]:
    """Convert complex numbers to feature pairs; the inverse of `as_complex`."""
    if pairing == "halves":
        return jnp.concatenate([z.real, z.imag], axis=-1)
    return jnp.stack([z.real, z.imag], axis=-1).reshape(*z.shape[:-1], -1)


@typechecked
def rotate(
    x: Float[Array, "*batch T N H"],
    rotations: Complex64[Array, "*#batch T C"],
    *,
    pairing: Pairing = "halves",
) -> Float[Array, "*batch T N H"]:
    """Apply RoPE: multiply feature pairs, as complex numbers, by the rotations.

        z[j] -> z[j] * exp(i * position * frequency[j])

    Rotations preserve lengths, and <rotate(q, m), rotate(k, n)> depends on m - n only, so attention
    depends on relative positions. The inverse is the conjugate:
    ``rotate(rotate(x, r), jnp.conj(r))`` is ``x``.

    With fewer rotations than pairs, only the first ``2 * C`` features of each head are rotated, in
    pairs among themselves (GPT-J, GPT-NeoX, Nemotron).

    Args:
        x: Queries or keys (or values and outputs).
        rotations: From `rope_rotations`, shared by all heads. Leading axes may be 1 or absent if
            the batch shares its positions.
        pairing: "halves" pairs feature j with j + C (GPT-NeoX, Llama, Qwen, Gemma); "neighbours"
            pairs 2j with 2j + 1 (RoFormer, GPT-J, Cohere). They differ by a fixed permutation of
            features; a checkpoint works with one of them only.

    Returns:
        The rotated features, computed in float32, in the dtype of ``x``.

    Raises:
        ValueError: If there are more rotations than feature pairs, or the pairing is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> query = key = jnp.ones((4, 1, 8))  # four tokens, one head, the same everywhere
        >>> rotations = F.rope_rotations(jnp.arange(4), F.rope_frequencies(8))
        >>> query, key = F.rotate(query, rotations), F.rotate(key, rotations)
        >>> scores = jnp.einsum("tnh,snh->ts", query, key)
        >>> np.asarray(scores).round(2)  # each diagonal is one distance
        array([[8.  , 7.07, 5.13, 3.93],
               [7.07, 8.  , 7.07, 5.13],
               [5.13, 7.07, 8.  , 7.07],
               [3.93, 5.13, 7.07, 8.  ]], dtype=float32)

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.2; partial: Black et al., GPT-NeoX-20B, 2022. arXiv:2204.06745,
        section 2.1
    """
    width = 2 * rotations.shape[-1]
    if width > x.shape[-1]:
        raise ValueError(
            f"{rotations.shape[-1]} rotations need a head_dim of at least {width}; "
            f"got {x.shape[-1]}."
        )
    rotated_part, unrotated_part = jnp.split(x, [width], axis=-1)
    z = as_complex(rotated_part, pairing=pairing)
    rotated = z * jnp.broadcast_to(rotations[..., None, :], z.shape)
    return jnp.concatenate(
        [as_real(rotated, pairing=pairing).astype(x.dtype), unrotated_part], axis=-1
    )
