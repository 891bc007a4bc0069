from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer.parallel import MeshConfig, make_mesh, overlap, overlap_compiler_options


def mesh_of(kind, process=0, **sizes):
    """What is asked of a mesh of one host's devices."""
    platform = "gpu" if "NVIDIA" in kind else "tpu"
    chip = SimpleNamespace(device_kind=kind, platform=platform, process_index=process)
    return SimpleNamespace(devices=np.full(4, chip), shape=sizes)


@pytest.fixture(params=[True, False])
def known(request, monkeypatch):
    monkeypatch.setattr(overlap, "_compiler_accepts", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite", "NVIDIA H100 80GB HBM3", "NVIDIA A9"])
def test_sparse_cores_and_loops_on_gpus_send_where_the_compiler_knows_how(known, kind):
    assert bool(overlap_compiler_options(mesh_of(kind, data=1, fsdp=4))) == known
    assert overlap_compiler_options(mesh_of(kind, data=4, fsdp=1)) == {}
    assert overlap_compiler_options(mesh_of(kind, process=1, fsdp=4)) == {}


@pytest.mark.parametrize("kind", ["TPU v5 lite", "abacus"])
def test_others_have_no_options(known, kind):
    assert overlap_compiler_options(mesh_of(kind, data=1, fsdp=4)) == {}


def test_a_compiler_is_asked_what_it_knows():
    assert overlap_compiler_options(make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])) == {}
    assert overlap._compiler_accepts(jax.devices()[0], ("xla_cpu_enable_fast_math", False))
    assert not overlap._compiler_accepts(jax.devices()[0], *overlap.SPARSE_CORE_OPTIONS.items())
