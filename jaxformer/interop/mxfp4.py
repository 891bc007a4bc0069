"""MXFP4: weights of four bits, in blocks of 32 that share an exponent, as bfloat16.

References:
    Rouhani et al., Microscaling Data Formats for Deep Learning, 2023. arXiv:2310.10537, section 4
"""

import ml_dtypes
import numpy as np

BLOCK_BYTES = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)  # by the four bits


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Kernels of experts from their blocks and scales.

        kernels[e, :, f] = values[blocks[e, f]] * 2 ** (scales[e, f] - 127)

    Args:
        blocks: Bytes, [E, F, D / 32, 16], each of two values, the first in the low bits.
        scales: Bytes, [E, F, D / 32]; 255 is NaN.

    Returns:
        Kernels in bfloat16, [E, D, F]. They are exact.
    """
    E, F, groups, num_bytes = blocks.shape
    kernels = np.empty((E, 2 * groups * num_bytes, F), ml_dtypes.bfloat16)
    for kernel, block, scale in zip(kernels, blocks, scales, strict=True):
        values = np.stack([VALUES[block & 15], VALUES[block >> 4]], axis=-1).reshape(F, groups, -1)
        factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
        with np.errstate(over="ignore"):  # what is not finite is refused with all that are read
            kernel[:] = (values * factors).reshape(F, -1).T
    return kernels
