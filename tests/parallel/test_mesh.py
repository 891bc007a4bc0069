import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer import zoo
from jaxformer.config import MultiHead, QKNorm, RMSNorm
from jaxformer.layers.runtime import MeshAxes
from jaxformer.parallel import MeshConfig, active_mesh_axes, check_divisible, make_mesh, token_axes
from jaxformer.parallel.mesh import arrange_devices

LLAMA = zoo.get("llama-2-70b").tiny()  # width 64, 4 heads, 2 of keys and values


def fits(config=LLAMA, **sizes):
    batch_size, accumulation = sizes.pop("batch_size", 16), sizes.pop("accumulation", 1)
    lengths = sizes.pop("lengths", [32])
    check_divisible(
        config,
        sizes,
        batch_size=batch_size,
        lengths=lengths,
        gradient_accumulation_steps=accumulation,
    )


def test_a_mesh_has_data_and_the_axes_with_several_devices():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(MeshConfig(), jax.devices()[:1]).shape) == {"data": 1}
    assert dict(make_mesh(MeshConfig(data=2, context=4)).shape) == {"data": 2, "context": 4}


def test_neighbours_along_tensor_are_neighbours():
    mesh = make_mesh(MeshConfig(tensor=2, fsdp=2))
    assert mesh.axis_names[-1] == "tensor"
    assert [d.id for d in mesh.devices[0, 0]] == [jax.devices()[0].id, jax.devices()[1].id]


def tpus(*sides, slices=1):
    """Devices of slices that are rectangles, as far as their places are asked for."""
    kind = dict(platform="tpu", device_kind="TPU v5 lite", core_on_chip=0)
    places = [(*place[::-1], 0) for place in np.ndindex(*sides)]
    return [
        SimpleNamespace(
            **kind, id=i * len(places) + j, coords=place, process_index=i, slice_index=i
        )
        for i in range(slices)
        for j, place in enumerate(places)
    ]


def test_any_division_of_a_slice_has_a_mesh():
    """Also where an axis has no lines of the torus to itself, as 2 x 8 of 4 x 4."""
    devices = tpus(4, 4)
    for powers in itertools.product(range(5), repeat=3):
        if sum(powers) == 4:
            sizes = dict(zip(("data", "fsdp", "tensor"), (2**n for n in powers), strict=True))
            grid = arrange_devices(sizes, devices)
            assert grid.shape == tuple(sizes.values())
            assert {d.id for d in grid.flat} == set(range(16))
    square = arrange_devices(dict(data=4, tensor=4), devices)
    assert all(len({d.coords[0] for d in line}) in (1, 4) for line in square)


@pytest.mark.parametrize(
    "sizes, axis",
    [(dict(data=2, fsdp=16), 0), (dict(data=1, fsdp=8, tensor=4), 1), (dict(data=8, tensor=4), 0)],
)
def test_only_one_axis_crosses_between_slices(sizes, axis):
    grid = arrange_devices(sizes, tpus(4, 4, slices=2))
    for place in range(grid.ndim):
        lines = np.moveaxis(grid, place, -1).reshape(-1, grid.shape[place])
        crossed = {len({d.slice_index for d in line}) for line in lines}
        assert crossed == {2 if place == axis else 1}


def test_hosts_of_gpus_have_whole_groups_of_inner_axes():
    gpus = [SimpleNamespace(platform="gpu", process_index=i // 8) for i in range(32)]
    grid = arrange_devices(dict(data=2, fsdp=4, tensor=4), gpus)
    assert all(len({d.process_index for d in line}) == 1 for line in grid.reshape(-1, 4))


def test_what_no_slice_can_be_is_refused_with_both_numbers():
    with pytest.raises(
        ValueError, match="2 slices .* data 1 x fsdp 1 is not a multiple of 2. Make"
    ):
        arrange_devices(dict(data=1, fsdp=1, tensor=32), tpus(4, 4, slices=2))
    with pytest.raises(ValueError, match="The first 5 TPU chips do not form a rectangle"):
        arrange_devices(dict(data=5), tpus(4, 4)[:5])


def test_a_model_knows_the_axes_with_several_devices():
    assert active_mesh_axes({"data": 4, "fsdp": 1, "tensor": 2}) == MeshAxes(tensor="tensor")
    assert token_axes({"data": 1, "tensor": 2, "context": 2}) == ("data", "context")


@pytest.mark.parametrize(
    "config, devices, message",
    [
        (MeshConfig(data=2, tensor=8), 8, r"data 2 x tensor 8 needs 16 devices; there are 8\."),
        (MeshConfig(data=2), 8, r"The mesh data 2 needs 2 devices; there are 8\."),
        (MeshConfig(tensor=3), 8, r"The mesh tensor 3 needs a multiple of 3 devices; there are 8"),
        (MeshConfig(fsdp=16), 8, r"fsdp 16 needs a multiple of 16 devices; there are 8\."),
    ],
    ids=["too many", "too few", "not a multiple", "more than there are"],
)
def test_a_mesh_that_is_not_all_devices_is_refused(config, devices, message):
    with pytest.raises(ValueError, match=message):
        config.shape(devices)


def test_an_axis_without_devices_is_refused():
    with pytest.raises(ValueError, match=r"tensor must be positive; got 0"):
        MeshConfig(tensor=0)


BAD = [
    (
        dict(data=8, batch_size=12),
        r"batch_size 12 must be a multiple of data 8 x gradient_accumulation_steps 1",
    ),
    (
        dict(data=2, fsdp=2, batch_size=10, accumulation=3),
        r"batch_size 10 must be a multiple of data 2 x fsdp 2 x "
        r"gradient_accumulation_steps 3 = 12\.",
    ),
    (dict(context=4, lengths=[32, 36]), r"length 36 must be a multiple of 2 x context 4 = 8"),
    (dict(fsdp=7, batch_size=14), r"model_dim 64 is not divisible by fsdp 7"),
    (dict(tensor=3), r"num_heads 4 is not divisible by tensor 3"),
    (dict(tensor=3), r"hidden_dim \d+ is not divisible by tensor 3"),
    (dict(tensor=3), r"vocab_size \d+ is not divisible by tensor 3 \(pad it to \d+; the"),
    (dict(tensor=3), r"num_kv_heads 2 and tensor 3: one must be a multiple of the other"),
    (dict(expert=2), r"expert 2, but the model has no experts"),
]


@pytest.mark.parametrize("sizes, message", BAD, ids=range(len(BAD)))
def test_what_does_not_divide_is_refused_with_both_numbers(sizes, message):
    with pytest.raises(ValueError, match=message):
        fits(**sizes)


def test_all_that_does_not_fit_is_said_at_once():
    with pytest.raises(ValueError) as error:
        fits(data=3, tensor=3, context=3)
    assert len(str(error.value).splitlines()) == 7


def test_other_models_are_refused_by_their_own_numbers():
    mixtral = zoo.get("mixtral-8x7b").tiny()
    with pytest.raises(ValueError, match=r"num_experts \d+ is not divisible by expert 3"):
        fits(mixtral, expert=3, batch_size=9)
    normed = replace(
        LLAMA,
        attention=MultiHead(
            num_heads=8, num_kv_heads=2, head_dim=8, qk_norm=QKNorm(norm=RMSNorm(), over="width")
        ),
    )
    with pytest.raises(ValueError, match=r"num_kv_heads 2 with one QK-norm over all heads cannot"):
        fits(normed, tensor=8)
    marian = zoo.get("t5-small").tiny()
    with pytest.raises(ValueError, match=r"encoder's num_heads \d+ is not divisible by tensor 7"):
        fits(marian, tensor=7)


def test_what_fits_is_let_through():
    assert fits(data=2, fsdp=2, tensor=4, context=2, accumulation=2) is None
    assert fits(zoo.get("mixtral-8x7b").tiny(), expert=2, fsdp=2) is None
