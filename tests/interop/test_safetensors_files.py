"""Our reading and writing of safetensors against the library's."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxformer.interop.safetensors_files import FLOATS, Entry, read, read_header, write


def tensors(dtype):
    rng = np.random.default_rng(0)
    shapes = {"b": (3, 5), "a.weight": (7,), "scalar": (), "empty": (0, 4)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16"])
def test_the_library_reads_what_we_write_and_the_other_way_round(name, tmp_path):
    values = tensors(FLOATS[name])
    save_file(values, tmp_path / "theirs")
    found = read_header(tmp_path / "theirs")
    assert {key: stored.dtype for key, stored in found.items()} == dict.fromkeys(values, name)
    entries = [Entry(key, x.dtype, x.shape) for key, x in values.items()]
    write(tmp_path / "ours", entries, values.values())
    written = load_file(tmp_path / "ours")
    for key, x in values.items():
        for other in (read(found[key]), written[key]):
            assert (other.dtype, other.shape) == (x.dtype, x.shape)
            assert other.tobytes() == x.tobytes()
    with safe_open(tmp_path / "ours", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_eight_bits(name, tmp_path):
    """The library's numpy side has no such type; its dtype names are those of its format."""
    x = np.array([0.5, -1.5, 3.0]).astype(FLOATS[name])
    write(tmp_path / "x", [Entry("x", x.dtype, x.shape)], [x])
    stored = read_header(tmp_path / "x")["x"]
    assert stored.dtype == name
    np.testing.assert_array_equal(read(stored).astype(np.float32), [0.5, -1.5, 3.0])


def test_tensors_are_cast_and_start_at_multiples_of_eight(tmp_path):
    x = np.linspace(0, 1, 3, dtype=np.float32)
    entries = [Entry("a", np.dtype(ml_dtypes.bfloat16), (3,)), Entry("b", np.dtype("f4"), (3,))]
    write(tmp_path / "x", entries, [x, x])
    found = read_header(tmp_path / "x")
    assert found["a"].start % 8 == 0
    np.testing.assert_array_equal(read(found["a"]), x.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(read(found["b"]), x)
