"""Segments as cuDNN takes them, with both of JAX's functions for it written out, without a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxformer.data import Batch
from jaxformer.functional import external_kernels
from jaxformer.functional.attention import cudnn, dispatch, kernels
from jaxformer.functional.platforms import TargetDevice
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training.gradient import make_value_and_grad
from tests.functional.jitted_functions import F
from tests.small_models import BASE, random_params

T = 48


def rows_of(*lengths):
    """Segment ids of a row whose documents have these lengths; 0 is padding."""
    return np.concatenate([np.full(abs(n), 0 if n < 0 else i + 1) for i, n in enumerate(lengths)])


ROWS = {
    "one": [rows_of(48), rows_of(48)],
    "few": [rows_of(20, 28), rows_of(48)],
    "padding in front, between, behind": [rows_of(-5, 20, -3, 20), rows_of(30, 10, -8)],
    "padding behind": [rows_of(40, -8), rows_of(30, -18)],
    "as many as there is room for": [rows_of(*[3] * 16), rows_of(48)],
    "one too many": [rows_of(*[2] * 16, 16), rows_of(48)],
    "too many": [rows_of(*[2] * 20, 8), rows_of(48)],
    "a token each": [rows_of(*[1] * 48), rows_of(40, 8)],
}


def offsets_of(row, most):
    """By a loop."""
    edges = [0, *(t for t in range(1, T) if row[t] != row[t - 1]), T]
    offsets, lengths = [-1] * (most + 1), [-1] * most
    for m, (begin, end) in enumerate(list(zip(edges[:-1], edges[1:], strict=True))[:most]):
        offsets[m], lengths[m] = begin, end - begin
    return offsets, lengths


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("most", [4, 16, 48])
def test_offsets_are_those_of_a_loop(name, most):
    rows = np.stack(ROWS[name])
    expected = [offsets_of(row, most) for row in rows]
    for array, wanted in zip(
        F.segment_offsets(rows, most), zip(*expected, strict=True), strict=True
    ):
        assert array.dtype == jnp.int32
        np.testing.assert_array_equal(array, wanted)


@jax.custom_vjp
def attention(query, key, value, seen, row, place):
    """Softmax attention; the sums of token t of row b are at [row[b, t], :, place[b, t]]."""
    return forwards(query, key, value, seen, row, place)[0]


def weights_of(query, key, seen, sums):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    return jnp.where(seen[:, None], jnp.exp(scores - sums[..., None]), 0)


def forwards(query, key, value, seen, row, place):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    sums = jax.nn.logsumexp(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    output = jnp.einsum("bnts,bsnh->btnh", weights_of(query, key, seen, sums), value)
    B, N, T = sums.shape
    rows = B if row is None else B * cudnn.MAX_SEGMENTS
    saved = (
        sums
        if row is None
        else jnp.full((rows, N, T), jnp.nan).at[row, :, place].set(jnp.moveaxis(sums, 1, 2))
    )
    return output, (query, key, value, seen, row, place, output, saved)


def backwards(residuals, cotangent):
    query, key, value, seen, row, place, output, saved = residuals
    sums = saved if row is None else jnp.moveaxis(saved[row, :, place], 2, 1)
    weights = weights_of(query, key, seen, sums)
    slopes = jnp.einsum("btnh,bsnh->bnts", cotangent, value)
    totals = jnp.einsum("btnh,btnh->bnt", cotangent, output)
    slopes = weights * (slopes - totals[..., None])
    return (
        jnp.einsum("bnts,bsnh->btnh", slopes, key),
        jnp.einsum("bnts,btnh->bsnh", slopes, query),
        jnp.einsum("bnts,btnh->bsnh", weights, cotangent),
        *[None] * 3,
    )


attention.defvjp(forwards, backwards)


def allowed(causal, window):
    before = np.arange(T)[:, None] - np.arange(T)
    return (before >= 0 if causal else True) & (before < (window or T))


def by_mask(query, key, value, *, mask, scale, is_causal, local_window_size, implementation):
    """`jax.nn.dot_product_attention`."""
    assert implementation == "cudnn"
    seen = allowed(is_causal, local_window_size and local_window_size[0] + 1)
    seen = jnp.broadcast_to(seen, (len(query), T, T))
    seen = seen if mask is None else seen & mask[:, 0]
    CALLS.append("none" if mask is None else "mask")
    return grouped(query, key, value, seen, scale, None, None)


def by_offsets(query, key, value, *, q_seqlen, q_offsets, scale, mask_type, **options):
    """JAX's private function: sums of a segment are a row, as an H200 was seen to write them."""
    window, keys = options["sliding_window_length"], options["kv_offsets"]
    seen = jnp.broadcast_to(allowed("CAUSAL" in mask_type.name, window), (len(query), T, T))
    begins = q_offsets[:, :-1, None]
    inside = (
        (begins >= 0) & (np.arange(T) >= begins) & (np.arange(T) < begins + q_seqlen[..., None])
    )
    segment = jnp.argmax(inside, axis=1)
    row = jnp.cumsum((q_seqlen > 0).reshape(-1)).reshape(q_seqlen.shape) - 1
    row = jnp.take_along_axis(row, segment, axis=1)
    place = np.arange(T) - jnp.take_along_axis(q_offsets, segment, axis=1)
    seen &= (segment[:, :, None] == segment[:, None]) & jnp.any(inside, axis=1)[:, None]
    CALLS.append("offsets")
    assert keys is q_offsets and options["kv_seqlen"] is q_seqlen
    return grouped(query, key, value, seen, scale, row, place)


def grouped(query, key, value, seen, scale, row, place):
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    wide = [x.astype(jnp.float32) for x in (scale * query, key, value)]
    return attention(*wide, seen, row, place).astype(query.dtype)


CALLS: list[str] = []


@pytest.fixture
def kernel(monkeypatch):
    """`cudnn_attention` of an H100, with JAX's functions as they are above."""
    monkeypatch.setattr(
        cudnn, "target_device", lambda: TargetDevice("gpu", "NVIDIA H100 80GB HBM3")
    )
    monkeypatch.setattr(cudnn.jax.nn, "dot_product_attention", by_mask)
    monkeypatch.setattr(fused, "dot_product_attention", by_offsets)
    CALLS.clear()
    external_kernels._trace_programs.cache_clear()
    yield kernels.cudnn_attention
    external_kernels._trace_programs.cache_clear()


RULES = {
    "causal": F.MaskRule(causal=True, contiguous_positions=True),
    "window": F.MaskRule(causal=True, window=7, contiguous_positions=True),
    "to both sides": F.MaskRule(contiguous_positions=True),
}


def both(attend, rule, segments, query, key, value, cotangent):
    at = jnp.broadcast_to(jnp.arange(T), segments.shape)
    mask = F.AttentionMask(at, at, segments, segments, rule)
    output, pull = jax.vjp(partial(attend, mask=mask), query, key, value)
    return output, pull(cotangent)


def arrays(*batch):
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=(*batch, T, n, 8))) for n in (4, 2, 2, 4)]


def close(actual, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_segments_as_offsets_are_those_of_a_mask(rule, kernel):
    """Padding apart: a run of it is a segment of its own."""
    whole = partial(F.dot_product_attention, implementation="xla")
    programs = [jax.jit(partial(both, attend, RULES[rule])) for attend in (kernel, whole)]
    for rows in ROWS.values():
        segments, inputs = np.stack(rows), arrays(2)
        inputs[-1] *= (segments > 0)[..., None, None]
        actual, expected = (program(segments, *inputs) for program in programs)
        close(actual[1], expected[1])
        close(actual[0][segments > 0], expected[0][segments > 0])
    assert set(CALLS) == {"none", "offsets", "mask"}


@pytest.mark.parametrize("chunk", [7, 48])
def test_chunks_are_segments_of_their_own(chunk, kernel):
    """Counted from each document's position 0."""

    def values(attend, segments, at, query, key, value):
        rule = F.MaskRule(causal=True, chunk=chunk, contiguous_positions=True)
        return attend(query, key, value, F.AttentionMask(at, at, segments, segments, rule))

    whole = partial(F.dot_product_attention, implementation="xla")
    programs = [jax.jit(partial(values, attend)) for attend in (kernel, whole)]
    for rows in ROWS.values():
        segments, inputs = np.stack(rows), arrays(2)[:3]
        begins = np.diff(segments, axis=1, prepend=-1) != 0
        at = np.arange(T) - np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)
        actual, expected = (run(segments, at, *inputs) for run in programs)
        close(actual[segments > 0], expected[segments > 0])
    assert set(CALLS) == {"none", "offsets", "mask"}


@pytest.mark.parametrize(
    "documents, chunk, form",
    [(1, 48, "offsets"), (1, 4, "offsets"), (1, 3, "mask"), (16, 48, "mask"), (None, 4, "offsets")],
)
def test_how_many_chunks_a_row_has_at_most(documents, chunk, form, kernel):
    """Of 48 tokens; what pads a row may be one segment more. None is a row of one text."""
    at = np.broadcast_to(np.arange(T), (2, T))
    segments = None if documents is None else np.ones_like(at)
    rule = F.MaskRule(causal=True, chunk=chunk, contiguous_positions=True, max_segments=documents)
    mask = F.AttentionMask(at, at, segments, segments, rule)
    jax.eval_shape(partial(kernel, mask=mask), *arrays(2)[:3])
    assert set(CALLS) == {form}


@pytest.mark.slow
def test_rows_of_vmap_are_a_batch_each_with_the_same_kernel(kernel):
    """And `jax.checkpoint` that keeps what has the kernel's name runs it once."""
    segments = np.stack([ROWS["few"], ROWS["too many"], ROWS["one"]])
    rule, inputs = RULES["causal"], arrays(3, 2)
    policy = jax.checkpoint_policies.save_only_these_names(F.KERNEL_REMAT_NAME)
    attend = jax.checkpoint(partial(both, kernel, rule), policy=policy)
    whole = partial(both, partial(F.dot_product_attention, implementation="xla"), rule)
    close(jax.jit(jax.vmap(attend))(segments, *inputs), jax.jit(jax.vmap(whole))(segments, *inputs))


def test_a_gpu_before_hopper_has_a_mask(kernel, monkeypatch):
    monkeypatch.setattr(
        cudnn, "target_device", lambda: TargetDevice("gpu", "NVIDIA A100-SXM4-80GB")
    )
    jax.jit(partial(both, kernel, RULES["causal"]))(np.stack(ROWS["few"]), *arrays(2))
    assert set(CALLS) == {"mask"}


@pytest.mark.slow
def test_a_learned_scale_is_none_of_what_cudnn_compares(kernel, monkeypatch):
    """The kernel's scale is 1; queries are multiplied before."""
    scales = []
    monkeypatch.setattr(
        cudnn.jax.nn,
        "dot_product_attention",
        lambda *x, scale, **y: scales.append(scale) or by_mask(*x, scale=scale, **y),
    )
    query, key, value, _ = arrays(2)

    def total(attend, scale):
        return attend(query, key, value, scale=scale).sum()

    actual = jax.grad(partial(total, kernel))(jnp.float32(0.1))
    wanted = jax.grad(partial(total, F.dot_product_attention))(jnp.float32(0.1))
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    assert set(scales) == {1.0}


def on_gpu(monkeypatch, kind):
    for module in (cudnn, dispatch, kernels):
        monkeypatch.setattr(module, "target_device", lambda: TargetDevice("gpu", kind))


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "name, kind, causal, bound",
    [
        ("one", H100, False, 1),
        ("padding behind", H100, True, 1),
        ("padding behind", H100, False, 16),
        ("padding in front, between, behind", H100, True, 16),
        ("as many as there is room for", H100, True, 16),
        ("one too many", H100, True, 17),
        ("padding behind", A100, True, 1),
        ("few", A100, True, 2),
    ],
)
def test_all_devices_take_the_branch_of_the_row_with_most_segments(
    name, kind, causal, bound, monkeypatch
):
    on_gpu(monkeypatch, kind)
    mesh, rows = make_mesh(MeshConfig(), jax.devices()[:2]), np.stack(ROWS[name])

    def bounds(rows):
        def function(max_segments):
            return checkpoint_name(jnp.int32([max_segments]), F.KERNEL_REMAT_NAME)

        return F.pvary(cudnn.switch_on_segments(function, rows, ("data",), causal=causal), "data")

    spec = P("data")
    run = jax.jit(jax.shard_map(bounds, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(run(rows), [bound, bound])


@pytest.mark.parametrize(
    "name, kind, accumulation",
    [
        ("padding behind", H100, 2),
        pytest.param("padding behind", A100, 1, marks=pytest.mark.slow),
        pytest.param("padding in front, between, behind", H100, 1, marks=pytest.mark.slow),
        pytest.param("too many", H100, 2, marks=pytest.mark.slow),
        pytest.param("too many", A100, 2, marks=pytest.mark.slow),
    ],
)
def test_an_update_has_one_conditional(name, kind, accumulation, kernel, monkeypatch):
    on_gpu(monkeypatch, kind)
    monkeypatch.setattr(kernels, "dtype_names", lambda *_: "bfloat16")  # but computes in float32
    attention = replace(BASE.attention, head_dim=8)
    config = replace(BASE, attention=attention)
    few, mesh = np.stack(ROWS["one"]), make_mesh(MeshConfig(), jax.devices()[:2])
    segments = np.concatenate([few, np.stack(ROWS[name])])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, segments.shape)
    positions = np.broadcast_to(np.arange(T), segments.shape)
    batch = Batch(tokens, tokens, positions, segments, segments > 0)

    def update(implementation, **bound):
        model = Transformer(config, attention_implementation=implementation, remat="dots", **bound)
        options = dict(gradient_accumulation_steps=accumulation)
        return jax.jit(make_value_and_grad(model, mesh, **options))

    inputs = random_params(config), {}, jnp.int32(0), batch
    branching, plain = update("cudnn"), update("xla")
    close(branching(*inputs), plain(*inputs))
    text = str(branching.trace(*inputs).jaxpr)
    assert text.count(" cond[") == text.count(" pmax[") == 1
    for program in (plain, update("cudnn", max_segments=T)):
        assert " cond[" not in str(program.trace(*inputs).jaxpr)


def test_which_jax_counts_the_queries_heads_in_keys_offsets():
    """Up to 0.10.2, so that keys are repeated there; offsets are in numbers of an array."""
    offsets, lengths = F.segment_offsets(np.stack(ROWS["few"]), 4)
    query, key, *_ = arrays(2)
    fixed = jax.jit(fused._fix_seqlen_offsets)(lengths, lengths, offsets, offsets, query, key)
    of_queries, of_keys = (np.asarray(x) for x in fixed[-2:])
    heads = 4 if jax.__version_info__ <= (0, 10, 2) else 2
    np.testing.assert_array_equal(4 * of_keys, heads * of_queries)
