"""Linear attention against its recurrence in NumPy in float64, its forms and its cases."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional
from tests.functional.jitted_functions import F

CASES, T, K, N, H, HV = 50, 37, 2, 4, 8, 5
FORMS = {
    "scan": dict(method="scan"),
    "chunks": dict(chunk_size=16),  # the last chunk is not whole
    "whole": dict(chunk_size=T),
}
RULES = pytest.mark.parametrize("delta_rule", [False, True], ids=["sum", "delta rule"])
DECAYS = pytest.mark.parametrize("features", [1, H], ids=["per head", "per feature"])


def loop(x, *, delta_rule, segments=None, valid=None):
    """One token at a time, in float64: the outputs, and the states after the last."""
    x = {name: np.float64(array) for name, array in x.items()}
    query, key = (np.repeat(x[name], N // K, axis=-2) for name in ("query", "key"))
    decay = np.exp(x["log_decay"]).reshape(*query.shape[:3], -1)
    rows, length = query.shape[:2]
    valid = np.ones((rows, length), bool) if valid is None else valid
    segments = np.zeros((rows, length)) if segments is None else segments
    state, document = x["initial_state"].copy(), np.full(rows, np.nan)
    output = np.zeros(x["value"].shape)
    for t in range(length):
        real = valid[:, t]
        starts = real & ~np.isnan(document) & (segments[:, t] != document)
        document = np.where(real, segments[:, t], document)
        state[starts] = 0
        decayed = decay[:, t, :, :, None] * state
        value = x["value"][:, t]
        if delta_rule:
            value = value - np.einsum("bnkv,bnk->bnv", decayed, key[:, t])
        written = np.einsum("bn,bnk,bnv->bnkv", x["beta"][:, t], key[:, t], value)
        state = np.where(real[:, None, None, None], decayed + written, state)
        output[:, t] = np.einsum("bnkv,bnk->bnv", state, query[:, t])
    return output, state


def draw(seed=0, *, features=1, rows=CASES, length=T):
    """Keys of length 1; decays of a row near 1, in between, near 0, and of 0; beta of 0 to 1."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return np.float32(rng.normal(size=(rows, *shape)))

    key = normal(length, K, H)
    scale = np.resize([1e-4, 1.0, 30.0, 1e4], rows)[:, None, None, None]
    log_decay = np.float32(-scale * rng.random((rows, length, N, features)))
    return dict(
        query=normal(length, K, H),
        key=key / np.linalg.norm(key, axis=-1, keepdims=True),
        value=normal(length, N, HV),
        log_decay=log_decay[..., 0] if features == 1 else log_decay,
        beta=np.float32(rng.choice([0, 0.3, 1], size=(rows, length, N))),
        initial_state=normal(N, H, HV),
    )


def draw_documents(seed=0, *, rows=CASES, length=T):
    rng = np.random.default_rng(seed)
    starts, valid = rng.random((rows, length)) < 0.1, rng.random((rows, length)) < 0.8
    return dict(segments=np.cumsum(starts, axis=1), valid=valid)


@DECAYS
@RULES
@pytest.mark.slow
def test_every_form_is_the_loop(features, delta_rule):
    """50 cases each: packed documents, padding, a state that goes on."""
    x, documents = draw(features=features), draw_documents()
    expected, state = loop(x, delta_rule=delta_rule, **documents)
    for form in FORMS.values():
        actual = F.linear_attention(**x, delta_rule=delta_rule, **documents, **form)
        real = documents["valid"]
        np.testing.assert_allclose(actual.output[real], expected[real], atol=1e-5)
        np.testing.assert_allclose(actual.state, state, atol=1e-5)


@DECAYS
@RULES
@pytest.mark.parametrize("form", [FORMS["scan"], FORMS["chunks"]], ids=["scan", "chunks"])
@pytest.mark.slow
def test_gradients_are_the_loops(features, delta_rule, form):
    """Along a random direction of each input, by central differences of the loop in float64."""
    rows = 12
    x = draw(1, features=features, rows=rows)
    documents = draw_documents(1, rows=rows)
    real = documents["valid"][..., None, None]
    rng, weights = np.random.default_rng(2), draw(3, rows=rows)

    @jax.jit
    def gradients(x):
        def total(x):
            result = functional.linear_attention(**x, delta_rule=delta_rule, **documents, **form)
            output = jnp.sum(jnp.where(real, result.output, 0) * weights["value"])
            return output + jnp.sum(result.state * weights["initial_state"])

        return jax.grad(total)(x)

    def totals(x):
        output, state = loop(x, delta_rule=delta_rule, **documents)
        total = np.sum(np.where(real, output, 0) * weights["value"], axis=(1, 2, 3))
        return total + np.sum(state * weights["initial_state"], axis=(1, 2, 3))

    x64 = {name: np.float64(array) for name, array in x.items()}
    for name, gradient in gradients(x).items():
        direction = rng.normal(size=gradient.shape)
        step = 1e-5 * direction
        expected = totals(x64 | {name: x64[name] + step}) - totals(x64 | {name: x64[name] - step})
        axes = tuple(range(1, gradient.ndim))
        actual = np.sum(np.float64(gradient) * direction, axis=axes)
        bound = 1 + np.sqrt(np.sum(gradient**2, axis=axes) * np.sum(direction**2, axis=axes))
        np.testing.assert_allclose(actual / bound, expected / 2e-5 / bound, atol=1e-5)


def by_four_devices(function, x, initial_state):
    """The function of shares of arrays [rows, T, ...] in zigzag order, as of the whole arrays."""
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    order = functional.zigzag_order(x["query"].shape[1], 4)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "context"), P()), out_specs=P("context"))
    def run(x, initial_state):
        result = function(**x, initial_state=initial_state, axis_name="context")
        return jnp.swapaxes(result.output, 0, 1), result.state[None]

    output, states = run({name: array[:, order] for name, array in x.items()}, initial_state)
    return jnp.swapaxes(output, 0, 1)[:, np.argsort(order)], states


@RULES
@pytest.mark.slow
def test_devices_that_share_the_sequence_hand_states_along(delta_rule):
    """The outputs, the last state and the gradients are those of one device."""
    x, documents = draw(features=H, rows=2, length=32), draw_documents(rows=2, length=32)
    documents["segments"][1] = 0
    documents["segments"][1, 4:12], documents["valid"][1, 4:12] = 9, False  # two parts of padding
    real, weights = documents["valid"], draw(3, rows=2, length=32)
    attend = partial(functional.linear_attention, delta_rule=delta_rule, chunk_size=3)

    def whole(x):
        result = attend(**x, **documents)
        return result.output, result.state[None]

    def sharded(x):
        arrays = {name: array for name, array in x.items() if name != "initial_state"}
        return by_four_devices(attend, arrays | documents, x["initial_state"])

    def outputs_and_gradients(function):
        def total(x):
            output, states = function(x)
            output = jnp.where(real[..., None, None], output, 0)
            loss = jnp.sum(output * weights["value"]) + jnp.sum(
                states[-1] * weights["initial_state"]
            )
            return loss, (output, states)

        return jax.jit(jax.grad(total, has_aux=True))(x)

    gradients, (output, states) = outputs_and_gradients(sharded)
    expected_gradients, (expected, expected_states) = outputs_and_gradients(whole)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    for state in states:
        np.testing.assert_allclose(state, expected_states[0], atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], atol=2e-5, err_msg=name)


@DECAYS
def test_one_token_of_rows_sharded_over_devices(features):
    """As in decoding, where the triangular system of a chunk is of size 1."""
    x = draw(features=features, rows=4, length=1)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    attend = partial(functional.linear_attention, delta_rule=True)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(x):
        return attend(**x)

    output, state = run(x)
    expected, expected_state = loop(x, delta_rule=True)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, atol=1e-5)


@pytest.mark.slow
@RULES
def test_a_sequence_in_parts_is_the_whole(delta_rule):
    x = draw(rows=4)
    whole = F.linear_attention(**x, delta_rule=delta_rule, chunk_size=8)
    state, parts = x.pop("initial_state"), []
    for part in (slice(0, 1), slice(1, 20), slice(20, T)):
        tokens = {name: array[:, part] for name, array in x.items()}
        result = F.linear_attention(**tokens, initial_state=state, delta_rule=delta_rule)
        state = result.state
        parts.append(result.output)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.output, atol=1e-5)
    np.testing.assert_allclose(state, whole.state, atol=1e-5)


@pytest.mark.slow
def test_decay_attention_is_a_case():
    """One feature of queries and keys, all 1, and a decay that does not depend on the token."""
    value, gamma = draw(rows=2)["value"], np.float32([0.1, 0.9, 0.99, 1])
    ones = np.ones((2, T, N, 1), np.float32)
    log_decay = np.broadcast_to(np.log(gamma), (2, T, N))
    actual = F.linear_attention(ones, ones, value, log_decay=log_decay)
    np.testing.assert_allclose(actual.output, F.decay_attention(value, gamma), atol=1e-5)


def test_retention_is_a_case():
    """And lightning attention: weights of the products of queries and keys, and of the distance."""
    x, gamma = draw(rows=2), 1 - 2.0 ** -np.arange(5, 5 + N)
    query, key = (np.repeat(np.float64(x[name]), N // K, axis=-2) for name in ("query", "key"))
    distance = np.arange(T)[:, None] - np.arange(T)
    weights = np.einsum("btnk,bsnk->bnts", query, key) * (distance >= 0)
    weights *= gamma[:, None, None] ** np.maximum(distance, 0)
    expected = np.einsum("bnts,bsnv->btnv", weights, x["value"])
    log_decay = np.broadcast_to(np.float32(np.log(gamma)), (2, T, N))
    actual = F.linear_attention(x["query"], x["key"], x["value"], log_decay=log_decay)
    np.testing.assert_allclose(actual.output, expected, atol=1e-5)


def test_mamba_2_is_a_case():
    """C, B, x and dt: the products of its recurrence, which keeps the feature of a head apart."""
    rng = np.random.default_rng(0)
    C, B, x, dt = (
        draw(rows=1)["query"][0],
        draw(1, rows=1)["key"][0],
        draw(rows=1)["value"][0],
        None,
    )
    dt = np.float32(np.log1p(np.exp(rng.normal(size=(T, N)))))
    A = -np.float32(np.exp(rng.normal(size=N)))
    expected = np.zeros(x.shape)
    for n in range(N):
        h = np.zeros((HV, H))
        for t in range(T):
            h = np.exp(np.float64(dt[t, n]) * A[n]) * h
            h += dt[t, n] * np.outer(x[t, n], B[t, n // (N // K)])
            expected[t, n] = h @ C[t, n // (N // K)]
    actual = F.linear_attention(C, B, x, log_decay=dt * A, beta=dt)
    np.testing.assert_allclose(actual.output, expected, atol=1e-5)


@pytest.mark.slow
def test_delta_rule_is_a_product_of_matrices():
    """DeltaNet, gated by head, and Kimi's by feature: the transitions written out."""
    x = draw(features=H, rows=1)
    x["log_decay"] = x["log_decay"] * 1e4  # the first case is that of decays near 1
    state = np.float64(x["initial_state"][0, 3])
    for t in range(T):
        key = np.float64(x["key"][0, t, 1])
        beta = np.float64(x["beta"][0, t, 3])
        transition = np.eye(H) - beta * np.outer(key, key)
        state = transition @ np.diag(np.exp(np.float64(x["log_decay"][0, t, 3]))) @ state
        state += beta * np.outer(key, x["value"][0, t, 3])
    actual = F.linear_attention(**x, delta_rule=True)
    np.testing.assert_allclose(actual.state[0, 3], state, atol=1e-5)


@pytest.mark.parametrize("features", [1, 64], ids=["per head", "per feature"])
@pytest.mark.slow
def test_memory_grows_with_the_length(features):
    """Not with its square, in the gradient too."""

    def temporary_bytes(length):
        tokens = jax.ShapeDtypeStruct((length, 2, 64), jnp.float32)
        heads = (length, 2) if features == 1 else (length, 2, features)
        log_decay, beta = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (heads, (length, 2)))

        def total(query, key, value, log_decay, beta):
            return functional.linear_attention(
                query, key, value, log_decay=log_decay, beta=beta, delta_rule=True
            ).output.sum()

        gradient = jax.jit(jax.grad(total, argnums=range(5)))
        compiled = gradient.lower(tokens, tokens, tokens, log_decay, beta).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16_384) < 4.1 * temporary_bytes(4096)


@pytest.mark.parametrize("method", ["scan", "chunked"])
def test_no_tokens_leave_the_state_as_it_is(method):
    x = draw(rows=1, length=0)
    actual = F.linear_attention(**x, delta_rule=True, method=method)
    assert actual.output.shape == (1, 0, N, HV)
    np.testing.assert_array_equal(actual.state, x["initial_state"])


@pytest.mark.slow
def test_bfloat16_in_and_out_float32_inside():
    x = draw(rows=1)
    halves = {name: jnp.asarray(array, jnp.bfloat16) for name, array in x.items()}
    actual = F.linear_attention(**halves, delta_rule=True)
    assert actual.output.dtype == jnp.bfloat16 and actual.state.dtype == np.float32
    expected = F.linear_attention(
        **{name: np.float32(array) for name, array in halves.items()}, delta_rule=True
    )
    np.testing.assert_array_equal(actual.state, expected.state)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(value=np.ones((3, 3, 5), np.float32)), "3 heads of the values .* the 2 of the keys"),
        (dict(method="parallel"), "method must be one of .*'scan', 'chunked'.* got 'parallel'"),
        (dict(log_decay=np.zeros((3, 2, 3))), r"shape \(3, 2\), .* \(3, 2, 4\); got \(3, 2, 3\)"),
        (dict(chunk_size=0), "chunk_size must be at least 1; got 0"),
    ],
)
def test_wrong_arguments(wrong, message, no_checks_of_annotations):
    tokens = np.ones((3, 2, 4), np.float32)
    arguments = dict(query=tokens, key=tokens, value=np.ones((3, 2, 5), np.float32)) | wrong
    with pytest.raises(ValueError, match=message):
        functional.linear_attention(**arguments)
