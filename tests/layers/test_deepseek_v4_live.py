"""Shared-KV attention against transformers itself, at other sizes; needs the parity extra."""

import numpy as np
import pytest

from tests.layers.test_deepseek_v4 import output

pytest.importorskip("torch", reason="compares with torch: pip install 'jaxformer[parity]'")
pytest.importorskip(
    "transformers", reason="compares with transformers: pip install 'jaxformer[parity]'"
)

from tests.layers.golden.shared_kv import attention  # noqa: E402  (imports torch)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    "sizes",
    [
        dict(seed=3, length=17, heads=6, head_dim=10, rotated=2, window=5, dim=14),
        dict(seed=4, length=8, heads=2, head_dim=6, rotated=6, window=99),
    ],
    ids=["in part", "whole"],
)
def test_output_is_that_of_transformers(sizes):
    theirs = attention(**sizes)
    np.testing.assert_allclose(output(theirs), theirs["y"], rtol=0, atol=2e-5)
