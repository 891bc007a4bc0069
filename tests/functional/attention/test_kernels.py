"""Which implementation is used, what kernels refuse, and that they agree where they run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import cudnn_attention, dot_product_attention, splash_attention
from jaxformer.functional.attention import cudnn, dispatch, kernels
from jaxformer.functional.attention.dispatch import choose_implementation
from jaxformer.functional.attention.kernels import AttentionRequest
from jaxformer.functional.external_kernels import merge_vmap_axes
from jaxformer.functional.platforms import TargetDevice
from tests.functional.jitted_functions import F

AT = np.arange(512, dtype=np.int32)
IN_ORDER = F.AttentionMask(AT, AT, rule=F.MaskRule(causal=True, contiguous_positions=True))


def shaped(length=512, width=64, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((2, length, 4, width), dtype)


def chosen(query=None, key=None, value=None, implementation="auto", **request):
    query = shaped() if query is None else query
    key = query if key is None else key
    value = key if value is None else value
    return choose_implementation(query, key, value, implementation, AttentionRequest(**request))


@pytest.fixture
def elsewhere(monkeypatch):
    """The choice as it is made on another platform; nothing is computed."""

    def on(platform, kind="NVIDIA H100 80GB HBM3"):
        for module in (cudnn, kernels, dispatch):
            monkeypatch.setattr(module, "target_device", lambda: TargetDevice(platform, kind))

    return on


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def platform(request, elsewhere):
    elsewhere(request.param)
    return request.param


def test_each_platform_has_its_own(platform):
    best = {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}[platform]
    assert chosen(mask=IN_ORDER) == best
    assert chosen(mask=IN_ORDER._replace(rule=F.MaskRule(causal=True))) == "blockwise"
    assert chosen(mask=IN_ORDER, dropout_rate=0.1) == "blockwise"
    assert chosen(mask=IN_ORDER, normalizer="relu") == "blockwise"
    assert chosen(mask=jnp.ones((512, 512), bool)) == "xla"
    assert chosen(mask=IN_ORDER, bias=jnp.ones((4, 512, 512))) == "xla"
    assert (
        chosen(mask=IN_ORDER, bias=F.attention_bias(F.alibi_bias, F.alibi_slopes(4), AT, AT))
        == "blockwise"
    )
    assert chosen(mask=np.ones((512, 512), bool)) == "xla"


def test_types_inside_a_kernels_program_are_not_compared(platform):
    with jax.enable_checks(True):
        assert chosen(mask=IN_ORDER) == "blockwise"


def test_older_gpus_and_those_of_others_have_blocks(elsewhere):
    for kind in ("Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "AMD Instinct MI300X"):
        elsewhere("gpu", kind)
        assert chosen(mask=IN_ORDER) == "blockwise"
        with pytest.raises(ValueError, match=f"compute capability 8.0 or more; got {kind}"):
            chosen(implementation="cudnn")


def test_before_hopper_heads_are_narrower(elsewhere):
    elsewhere("gpu", "NVIDIA H100 80GB HBM3")
    assert chosen(shaped(width=256), mask=IN_ORDER) == "cudnn"
    elsewhere("gpu", "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ValueError, match="on an NVIDIA A100-SXM4-80GB at most 128 .* got 256"):
        chosen(shaped(width=256), mask=IN_ORDER, implementation="cudnn")


def test_the_choice_is_logged_with_its_reason(elsewhere, caplog):
    caplog.set_level("INFO", logger="jaxformer")
    for platform, options in (("cpu", {}), ("tpu", {}), ("gpu", dict(logit_softcap=3.0))):
        elsewhere(platform)
        chosen(mask=IN_ORDER, **options)
    start = "Attention of 512 queries to 512 keys: "
    assert caplog.messages == [
        f"{start}blockwise, since there is no kernel for a cpu",
        f"{start}splash",
        f"{start}blockwise, since it has no soft cap; got logit_softcap 3.0",
    ]


def test_the_form_of_segments_is_logged(elsewhere, caplog):
    caplog.set_level("INFO", logger="jaxformer")
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
        elsewhere("gpu", kind)
        chosen(mask=IN_ORDER._replace(query_segments=AT // 100, key_segments=AT // 100))
    chosen(mask=IN_ORDER)
    start = "Attention of 512 queries to 512 keys: cudnn"
    assert caplog.messages == [
        f"{start}, segments as offsets, or as a T x T mask if a row has more than 16",
        f"{start}, segments as a T x T mask, since an NVIDIA A100-SXM4-80GB takes no offsets",
        start,
    ]


def test_few_scores_are_whole_matrices(platform):
    few = shaped(length=60, width=60, dtype=jnp.float32)
    assert chosen(few) == "xla"
    query = jax.ShapeDtypeStruct((2, 1, 4, 60), jnp.float32)
    assert chosen(query, shaped(100_000, 60, jnp.float32)) == "xla"


WINDOW = F.MaskRule(window=9, lookahead=8, contiguous_positions=True)
ODD = F.AttentionMask(*[jnp.arange(511)] * 4, F.MaskRule(contiguous_positions=True))


CANNOT = {
    "cudnn": [
        (dict(query=shaped(dtype=jnp.float32)), "bfloat16 or float16; got float32"),
        (dict(query=shaped(width=60)), "a multiple of 8 and on an NVIDIA H100 .*; got 60"),
        (dict(query=shaped(width=264)), "at most 256 features; got 264"),
        (dict(key=shaped(dtype=jnp.float32)), "or float16; got bfloat16, float32"),
        (dict(logit_softcap=3.0), "no soft cap; got logit_softcap 3.0"),
        (dict(mask=IN_ORDER._replace(rule=WINDOW)), "the query's token; got a lookahead of 8"),
        (dict(query=shaped(511), mask=ODD), "of even lengths; got 511 and 511"),
        (dict(query=shaped(511)), "of even lengths; got 511 and 511"),
    ],
    "splash": [
        (dict(query=shaped(length=60)), "multiples of 128; got 60 queries and 60 keys"),
        (dict(query=shaped(width=264)), "at most 256 features; got 264"),
        (dict(query=shaped(dtype=jnp.float16)), "bfloat16 or float32; got float16"),
    ],
    "either": [
        (dict(value=shaped(width=32)), "values are as wide as keys; got 32 and 64"),
        (
            dict(mask=jnp.ones((512, 512), bool)),
            "must be an AttentionMask whose rule is contiguous",
        ),
        (dict(bias=jnp.ones((4, 512, 512))), "adds nothing to the scores; got a bias"),
        (dict(key=shaped(1024), mask=IN_ORDER), "got 512 queries and 1024 keys"),
        (dict(normalizer="relu"), "its weights are a softmax; got normalizer 'relu'"),
        (dict(dropout_rate=0.1), "drops no weights; got dropout_rate 0.1"),
    ],
}


@pytest.mark.parametrize("kernel, platform", [("cudnn", "gpu"), ("splash", "tpu")])
def test_a_kernel_refuses_what_it_cannot(kernel, platform, elsewhere):
    elsewhere(platform)
    for request, message in (*CANNOT[kernel], *CANNOT["either"]):
        start = f'implementation="{kernel}" cannot be used: .*{message}.*Use "auto"'
        with pytest.raises(ValueError, match=start):
            chosen(implementation=kernel, **request)
    assert chosen(implementation=kernel, mask=IN_ORDER) == kernel


@pytest.mark.parametrize("kernel, home", [("cudnn", "NVIDIA GPUs"), ("splash", "TPUs")])
def test_a_kernel_of_another_platform_is_refused(kernel, home):
    if jax.default_backend() != "cpu":
        pytest.skip("Of a CPU; this is another platform.")
    x = jnp.ones((128, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"it runs on {home}, and this is a cpu"):
        F.dot_product_attention(x, x, x, implementation=kernel)


def test_blocks_take_rules_alone():
    x = jnp.ones((3, 1, 2))
    with pytest.raises(
        ValueError, match="an attention_bias, not arrays; got an array as mask and bias"
    ):
        F.dot_product_attention(
            x, x, x, jnp.ones((3, 3), bool), jnp.ones((1, 3, 3)), implementation="blockwise"
        )


ROWS, T = 4, 256
SEGMENTS = {
    "one text": None,
    "whole rows": np.ones((ROWS, T), np.int64),
    "packed": np.repeat([[1] * 100 + [2] * 156, [1] * 256], 2, axis=0),
    "many": np.repeat([np.arange(T) // 10, [0] * 9 + [1] * 247], 2, axis=0),
}
CASES = {  # heads of queries, of keys, and their width
    "all": ((2, 2, 256), None, {}),
    "causal": ((4, 2, 64), F.MaskRule(causal=True, contiguous_positions=True), {}),
    "window": (
        (2, 2, 96),
        F.MaskRule(causal=True, window=70, contiguous_positions=True),
        dict(scale=0.2),
    ),
    "to both sides": (
        (2, 1, 128),
        F.MaskRule(window=40, lookahead=39, contiguous_positions=True),
        {},
    ),
    "chunks": ((2, 1, 64), F.MaskRule(causal=True, chunk=70, contiguous_positions=True), {}),
    "chunks to both sides": ((2, 2, 64), F.MaskRule(chunk=100, contiguous_positions=True), {}),
    "capped": (
        (2, 1, 80),
        F.MaskRule(causal=True, contiguous_positions=True),
        dict(logit_softcap=0.5),
    ),
}


def arrays(heads, dtype=jnp.float32):
    rng, (N, K, H) = np.random.default_rng(0), heads
    return [jnp.asarray(rng.normal(size=(ROWS, T, n, H)), dtype) for n in (N, K, K, N)]


def error(kernel, name, segments, dtype):
    """Of values and gradients beside whole matrices in float32, relative to the largest too.

    The kernel has a row on each of four devices, or of as many as there are.
    """
    heads, rule, options = CASES[name]
    rules = () if SEGMENTS[segments] is None else (SEGMENTS[segments],)
    mesh = jax.sharding.Mesh(jax.devices()[:ROWS], ("data",))
    by_row = jax.sharding.PartitionSpec("data")

    def both(function, query, key, value, slopes, rules):
        mask = rule and F.AttentionMask(jnp.arange(T), jnp.arange(T), rule=rule)
        if rules:
            (ids,) = rules
            at = jnp.broadcast_to(jnp.arange(T), ids.shape)
            mask = F.AttentionMask(at, at, ids, ids, rule or F.MaskRule(contiguous_positions=True))
        attend = partial(function, mask=mask, **options)
        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(slopes.astype(output.dtype))

    run = jax.shard_map(partial(both, kernel), mesh=mesh, in_specs=by_row, out_specs=by_row)
    actual = jax.jit(run)(*arrays(heads, dtype), rules)
    whole = partial(dot_product_attention, implementation="xla")
    expected = jax.jit(partial(both, whole))(*arrays(heads), rules)
    errors = []
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = np.abs(other) + np.max(np.abs(other))
        errors.append(np.max(np.abs(np.asarray(one, np.float32) - other) / size))
    return np.max(errors)


INTERPRET = jax.default_backend() != "tpu"  # the kernel's steps; on a TPU, the kernel itself


@pytest.mark.parametrize("segments", ["one text", "packed"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_splash_is_attention(name, segments):
    """Inside `jax.shard_map`, which asks how results vary."""
    kernel = partial(splash_attention, interpret=INTERPRET)
    assert error(kernel, name, segments, jnp.float32) <= (1e-5 if INTERPRET else 2e-2)


def test_axes_of_vmap_are_merged_into_a_kernels_batch():
    """`jax.vmap` of some of the arrays, twice, repeats the others: a batch is one call."""
    one, two = np.arange(5.0), np.arange(15.0).reshape(3, 5)
    shapes = []

    def batched(x, y):
        shapes.append((x.shape, y.shape))
        return {"sum": x + y}, x

    call = merge_vmap_axes(batched)
    mapped = jax.vmap(jax.vmap(call, in_axes=(None, 0)), in_axes=(0, None))
    sums, repeated = mapped(np.stack([one, 2 * one]), two)
    np.testing.assert_array_equal(sums["sum"], np.stack([one + two, 2 * one + two]))
    np.testing.assert_array_equal(repeated[:, 2], np.stack([one, 2 * one]))
    assert shapes[-1] == ((30,), (30,))


@pytest.mark.slow
def test_a_kernel_inside_vmap_and_on_devices():
    """Values and gradients, with keys that some share and others have of their own."""
    T, mesh, P = (128, jax.sharding.Mesh(jax.devices()[:2], ("data",)), jax.sharding.PartitionSpec)
    rng = np.random.default_rng(0)
    query, key = (np.float32(rng.normal(size=(*n, T, 1, 64))) for n in ((3, 2), (2,)))

    def slopes(attend, query, key):
        def total(query, key):
            return jnp.sum(jnp.sin(attend(query, key, key)))

        differentiated = jax.value_and_grad(total, argnums=(0, 1))
        value, gradients = jax.vmap(differentiated, in_axes=(0, None))(query, key)
        return value, gradients

    def local(query, key):
        value, gradients = slopes(partial(splash_attention, interpret=INTERPRET), query, key)
        return jax.lax.psum(value, "data"), gradients

    rows = P(None, "data")
    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, P("data")), out_specs=(P(), (rows, rows))
    )
    expected = jax.jit(partial(slopes, partial(dot_product_attention, implementation="xla")))
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        jax.jit(spread)(query, key),
        expected(query, key),
    )


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("name", ["all", "causal", "window"])
def test_cudnn_is_attention(name, segments):
    """Segments are nothing, offsets or a mask, as many as there are."""
    assert error(cudnn_attention, name, segments, jnp.bfloat16) <= 3e-2


@pytest.mark.slow
def test_a_learned_scale_reaches_kernels_through_their_queries():
    """A kernel is told 1; the gradient of the scale is that of what multiplies queries."""
    x = jax.random.normal(jax.random.key(0), (1, 128, 1, 128), jnp.float32)

    def loss(attention, scale, **options):
        return jnp.sum(jnp.square(attention(x, x, x, scale=scale, **options)))

    wanted = jax.value_and_grad(lambda s: loss(F.dot_product_attention, s))(jnp.float32(0.1))
    interpret = jax.default_backend() != "tpu"
    actual = jax.value_and_grad(lambda s: loss(F.splash_attention, s, interpret=interpret))(
        jnp.float32(0.1)
    )
    np.testing.assert_allclose(actual, wanted, rtol=1e-4)
