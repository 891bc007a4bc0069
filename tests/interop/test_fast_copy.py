"""Copies in blocks against NumPy's."""

import ml_dtypes
import numpy as np
import pytest

from jaxformer.interop.fast_copy import copy_into

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "transposed, into heads": lambda x: x.T.reshape(x.shape[1], 4, x.shape[0] // 4),
    "transposed, out of heads": lambda x: x.T.reshape(4, x.shape[1] // 4, x.shape[0]),
    "neither": lambda x: x[:, ::2],
    "a vector": lambda x: x[:, 0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(4, 700), (256, 512), (300, 260), (0, 4)])
def test_blocks_join_without_a_seam(shape, view):
    for dtype in DTYPES:
        values = VIEWS[view](np.random.default_rng(0).normal(size=shape).astype(dtype))
        for out_dtype in DTYPES:
            out = np.full((3, *values.shape), np.nan, out_dtype)
            copy_into(out[1], values)
            np.testing.assert_array_equal(out[1], values.astype(out_dtype))
            assert np.isnan(out[::2]).all()


def test_a_single_number_is_copied():
    out = np.zeros(3, np.float32)
    copy_into(out[(1, ...)], np.array(5, np.float32))
    np.testing.assert_array_equal(out, [0, 5, 0])
