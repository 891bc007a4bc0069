"""Sinusoidal position embeddings."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxformer.functional.argument_checks import typechecked

Layout = Literal["interleaved", "halves", "tensor2tensor"]


@typechecked
def sinusoidal_positions(
    positions: Real[Array, "*batch T"],
    dim: int,
    *,
    base: float = 10_000.0,
    layout: Layout = "interleaved",
    sin_first: bool = True,
) -> Float[Array, "*batch T {dim}"]:
    """Sinusoidal position embedding: a sine and a cosine per feature pair.

        phase[t, j] = positions[t] * base ** (-2 * j / dim),    j = 0 ... dim / 2 - 1
        y[t, 2 * j], y[t, 2 * j + 1] = sin(phase[t, j]), cos(phase[t, j])

    It is defined at any position. A shift by ``delta`` positions rotates each (sin, cos) pair
    clockwise by ``delta * frequency``.

    Args:
        positions: Absolute positions; they may be packed, offset or fractional.
        dim: Number of features, even.
        base: Ratio of the longest to the shortest wavelength, approximately.
        layout: "interleaved" as above (the paper); "halves" has all sines before all cosines
            (Marian); "tensor2tensor" too, with ``base ** (-j / (dim / 2 - 1))``, for which the
            ratio is exact (tensor2tensor, fairseq, FSMT; they count positions from pad + 1).
        sin_first: False swaps sines and cosines.

    Returns:
        The embeddings, float32, to be added to token embeddings.

    Raises:
        ValueError: If ``dim`` is odd or too small for the layout, the layout is unknown, or
            ``base`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> np.asarray(F.sinusoidal_positions(jnp.arange(3), 4)).round(2)
        array([[ 0.  ,  1.  ,  0.  ,  1.  ],
               [ 0.84,  0.54,  0.01,  1.  ],
               [ 0.91, -0.42,  0.02,  1.  ]], dtype=float32)

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3.5
    """
    smallest = 4 if layout == "tensor2tensor" else 2
    if dim % 2 or dim < smallest:
        raise ValueError(
            f"dim must be even and at least {smallest} for layout {layout!r}; got {dim}."
        )
    if base <= 0:
        raise ValueError(f"base must be positive; got {base}.")
    steps = dim // 2 - 1 if layout == "tensor2tensor" else dim // 2
    frequencies = jnp.asarray(base ** (-np.arange(dim // 2) / steps), jnp.float32)
    phases = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    waves = jnp.sin(phases), jnp.cos(phases)
    first, second = waves if sin_first else waves[::-1]
    if layout == "interleaved":
        return jnp.stack([first, second], axis=-1).reshape(*positions.shape, dim)
    return jnp.concatenate([first, second], axis=-1)
