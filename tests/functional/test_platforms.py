import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from jaxformer.functional.platforms import (
    TargetDevice,
    compute_capability_major,
    target_device,
    target_platform,
)


def device(kind, platform):
    old = jax.__version_info__ < (0, 9)  # it has no platform, which its kind tells
    return AbstractDevice(kind, 1) if old else AbstractDevice(kind, 1, platform)


@pytest.mark.parametrize(
    "kind, of_device, expected",
    [
        ("TPU v5 lite", "tpu", "tpu"),
        ("NVIDIA H100 80GB HBM3", "cuda", "gpu"),
        ("AMD Instinct MI300X", "rocm", "gpu"),
        ("Intel Data Center GPU Max 1550", "xpu", "gpu"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_a_mesh_says_what_a_program_is_for(kind, of_device, expected):
    mesh = AbstractMesh((2,), ("data",), abstract_device=device(kind, of_device))
    with use_abstract_mesh(mesh):
        assert target_device() == TargetDevice(expected, kind)


def test_a_program_is_for_the_devices_of_its_shard_map(monkeypatch):
    """And no device is asked, of which this process may have none of that kind."""
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("data",)), PartitionSpec("data")
    here, seen = target_device(), []
    assert here == TargetDevice(jax.default_backend(), jax.devices()[0].device_kind)
    monkeypatch.setattr(jax, "local_devices", None)

    def inside(x):
        seen.append(target_device())
        return x

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((2,), "float32"))
    assert seen == [here]


def test_elsewhere_the_default_device_says_it():
    for chosen in ("cpu", jax.devices("cpu")[1]):
        with jax.default_device(chosen):
            assert target_platform() == "cpu"


GENERATIONS = {
    0: ["AMD Instinct MI300X", "gfx942", "cpu"],
    7: ["Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA T1000", "Quadro RTX 6000", "NVIDIA TITAN RTX"]
    + ["NVIDIA GeForce GTX 1660", "NVIDIA GeForce RTX 2080 Ti"],
    8: ["NVIDIA A100-SXM4-40GB", "NVIDIA A10G", "NVIDIA L4", "NVIDIA L40S", "NVIDIA RTX A6000"]
    + ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation"],
    9: ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20"],
    10: ["NVIDIA B200", "NVIDIA GB200", "NVIDIA GeForce RTX 5090", "NVIDIA GB10"]
    + ["NVIDIA RTX PRO 6000 Blackwell"],
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generations_of_nvidia_are_known_by_name(generation):
    assert {compute_capability_major(kind) for kind in GENERATIONS[generation]} == {generation}
