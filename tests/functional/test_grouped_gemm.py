"""Products of groups of rows: by blocks and by the kernel for TPUs, step by step, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.functional import grouped_gemm as grouped
from jaxformer.functional.grouped_gemm import (
    BlockedBackend,
    HopperBackend,
    MegabloxBackend,
    grouped_matmul_by,
)
from jaxformer.functional.platforms import TargetDevice, compute_capability_major
from tests.functional.jitted_functions import F

RNG = np.random.default_rng(0)
R, D, H, E = 300, 20, 136, 4
WAYS = {"blocked": BlockedBackend(), "megablox": MegabloxBackend(interpret=True)}
SIZES = [[130, 0, 169, 1], [0, 0, 0, 300], [128, 128, 44, 0]]


def draw(*shape):
    return np.float32(RNG.normal(size=shape))


@pytest.fixture(params=WAYS)
def linear(request):
    return partial(grouped_matmul_by, WAYS[request.param])


def by_hand(x, kernels, sizes, dy):
    """The products and both gradients, expert by expert, in float64."""
    x, kernels, dy = (np.asarray(a, np.float64) for a in (x, kernels, dy))
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    of_groups = list(zip(groups, kernels, strict=True))
    y = np.concatenate([x[rows] @ kernel for rows, kernel in of_groups])
    dx = np.concatenate([dy[rows] @ kernel.T for rows, kernel in of_groups])
    return y, dx, np.stack([x[rows].T @ dy[rows] for rows in groups])


def with_gradients(linear, x, kernels, sizes, dy):
    y, pull = jax.vjp(lambda x, kernels: linear(x, kernels, sizes), x, kernels)
    return y, *pull(dy)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.slow(
    but=["blocked-[130, 0, 169, 1]", "blocked-[0, 0, 0, 300]", "blocked-[128, 128, 44, 0]"]
)
def test_each_group_meets_its_own_kernel(linear, sizes):
    x, kernels, dy = draw(R, D), draw(E, D, H), draw(R, H)
    actual = jax.jit(partial(with_gradients, linear))(x, kernels, jnp.asarray(sizes), dy)
    for a, b in zip(actual, by_hand(x, kernels, sizes, dy), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_groups_differ_between_members_of_a_batch(linear):
    """vmap, nested, with shared kernels."""
    x, kernels, dy = draw(2, 3, R, D), draw(E, D, H), draw(2, 3, R, H)
    sizes = jnp.asarray([SIZES] * 2)
    function = partial(with_gradients, linear)
    mapped = jax.vmap(jax.vmap(function, (0, None, 0, 0)), (0, None, 0, 0))
    actual = jax.jit(mapped)(x, kernels, sizes, dy)
    for i, j in np.ndindex(2, 3):
        for a, b in zip(actual, by_hand(x[i, j], kernels, SIZES[j], dy[i, j]), strict=True):
            np.testing.assert_allclose(a[i, j], b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow(but=["blocked"])
def test_a_batch_without_members(linear):
    x, kernels, dy = map(jnp.asarray, (draw(0, R, D), draw(E, D, H), draw(0, R, H)))
    mapped = jax.vmap(partial(with_gradients, linear), (0, None, None, 0))
    actual = mapped(x, kernels, jnp.asarray(SIZES[0]), dy)
    assert [a.shape for a in actual] == [(0, R, H), (0, R, D), (0, E, D, H)]


@pytest.mark.slow
def test_on_a_mesh_gradients_of_shared_kernels_are_summed(linear):
    mesh, rows = jax.sharding.Mesh(jax.devices()[:3], ("data",)), P("data")
    x, kernels, dy = draw(3 * R, D), draw(E, D, H), draw(3 * R, H)
    inside = partial(with_gradients, linear)
    mapped = jax.shard_map(
        inside, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=(rows, rows, P())
    )
    y, dx, dk = jax.jit(mapped)(x, kernels, jnp.asarray(SIZES).reshape(-1), dy)
    parts = zip(*(a.reshape(3, R, -1) for a in (x, dy)), SIZES, strict=True)
    hand = [by_hand(x, kernels, sizes, dy) for x, dy, sizes in parts]
    actual = y.reshape(3, R, -1), dx.reshape(3, R, -1), dk
    expected = [
        np.stack([h[0] for h in hand]),
        np.stack([h[1] for h in hand]),
        sum(h[2] for h in hand),
    ]
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow(but=["blocked"])
def test_bfloat16_stays(linear):
    x, kernels, dy = (a.astype(jnp.bfloat16) for a in (draw(R, D), draw(E, D, H), draw(R, H)))
    actual = jax.jit(partial(with_gradients, linear))(x, kernels, jnp.asarray(SIZES[0]), dy)
    for a, b in zip(actual, by_hand(x, kernels, SIZES[0], dy), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(a), b, atol=np.abs(b).max() / 100)


@pytest.mark.skipif(
    compute_capability_major(jax.devices()[0].device_kind) != 9, reason="needs a Hopper"
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_hoppers_kernels_are_the_same_products(sizes):
    x, kernels, dy = (
        a.astype(jnp.bfloat16) for a in (draw(R, 256), draw(E, 256, 384), draw(R, 384))
    )
    actual = jax.jit(partial(with_gradients, partial(grouped_matmul_by, HopperBackend())))(
        x, kernels, jnp.asarray(sizes), dy
    )
    for a, b in zip(actual, by_hand(x, kernels, sizes, dy), strict=True):
        np.testing.assert_allclose(np.float32(a), b, atol=np.abs(b).max() / 100)


def test_blocks_need_memory_for_the_rows_and_the_gradient_alone():
    """A product of all rows with all kernels has a copy of the rows for each of them."""
    groups, rows, width = 64, 1024, 128
    x, kernels = jnp.zeros((rows, width)), jnp.zeros((groups, width, width))
    function = partial(with_gradients, partial(grouped_matmul_by, BlockedBackend()))
    compiled = jax.jit(function).lower(x, kernels, jnp.zeros(groups, int), x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * x.nbytes + kernels.nbytes


def test_tiles_hold_few_groups_and_suit_widths():
    groups = jnp.zeros(4)
    rows = [MegabloxBackend().row_tile(jnp.zeros((n, 1)), groups) for n in (1, 1024, 1100, 99999)]
    assert rows == [128, 256, 256, 512]
    wide = [20, 576, 1408, 2048, 11008]
    assert [grouped.tile_width(n, jnp.dtype("bfloat16")) for n in wide] == [
        20,
        576,
        768,
        1024,
        1024,
    ]
    assert [grouped.tile_width(n, jnp.dtype("float32")) for n in wide] == [20, 384, 512, 512, 512]


HOPPER = TargetDevice("gpu", "NVIDIA H100 80GB HBM3")
CHOICES = [
    (TargetDevice("cpu", "cpu"), "bfloat16", 128, BlockedBackend, "JAX has no kernel for cpu"),
    (TargetDevice("tpu", "TPU v5p"), "bfloat16", 100, MegabloxBackend, ""),
    (
        TargetDevice("tpu", "TPU v5p"),
        "float16",
        128,
        BlockedBackend,
        "bfloat16 or float32; got float16",
    ),
    (HOPPER, "bfloat16", 128, HopperBackend, ""),
    (HOPPER, "float32", 128, BlockedBackend, "bfloat16 or float16; got float32"),
    (HOPPER, "bfloat16", 100, BlockedBackend, "multiples of 128; got 100 and 128"),
    (
        TargetDevice("gpu", "NVIDIA A100-SXM4-40GB"),
        "bfloat16",
        128,
        BlockedBackend,
        "need a Hopper GPU; got NVIDIA A100",
    ),
    (
        TargetDevice("gpu", "NVIDIA B200"),
        "bfloat16",
        128,
        BlockedBackend,
        "need a Hopper GPU; got NVIDIA B200",
    ),
]


@pytest.mark.parametrize("target, dtype, width, kind, why", CHOICES)
def test_the_machine_decides_and_the_log_says_why(
    monkeypatch, caplog, target, dtype, width, kind, why
):
    monkeypatch.setattr(grouped, "target_device", lambda: target)
    monkeypatch.setattr(grouped, "find_spec", lambda name: name)  # JAX 0.7.2 lacks it
    kernels = jnp.zeros((E, width, 128), dtype)
    with caplog.at_level("INFO", logger="jaxformer"):
        assert type(grouped._choose_backend(kernels[0], kernels)) is kind
    (record,) = caplog.records
    assert f"Grouped matmul of {E} experts: {kind.name}" in record.message
    assert why in record.message


def test_older_versions_of_jax_have_no_gradient_for_hopper(monkeypatch):
    monkeypatch.setattr(grouped, "target_device", lambda: HOPPER)
    monkeypatch.setattr(grouped, "find_spec", lambda name: None)
    kernels = jnp.zeros((E, 128, 128), "bfloat16")
    assert type(grouped._choose_backend(kernels[0], kernels)) is BlockedBackend


def test_biases_of_groups_and_their_gradient():
    x, kernels, biases, dy = draw(R, D), draw(E, D, H), draw(E, H), draw(R, H)
    sizes = SIZES[0]

    def linear(biases):
        return F.grouped_matmul(x, kernels, jnp.asarray(sizes), biases)

    y, pullback = jax.vjp(linear, biases)
    groups = np.repeat(np.arange(E), sizes)
    expected = by_hand(x, kernels, sizes, dy)[0] + biases[groups]
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
    d_biases = np.zeros((E, H))
    np.add.at(d_biases, groups, dy)
    np.testing.assert_allclose(pullback(dy)[0], d_biases, atol=1e-4)


def test_sizes_of_any_whole_numbers_will_do():
    x, kernels = draw(R, D), draw(E, D, H)
    expected, *_ = by_hand(x, kernels, SIZES[0], draw(R, H))
    for kind in ("int16", "uint32"):
        y = F.grouped_matmul(x, kernels, jnp.asarray(SIZES[0], kind))
        np.testing.assert_allclose(y, expected, atol=1e-4)
