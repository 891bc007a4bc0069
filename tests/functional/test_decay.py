"""Decay attention and the linear recurrence that it is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional
from tests.functional.jitted_functions import F

B, T, N, C = 2, 13, 3, 2
METHODS = ["scan", "associative", "chunked"]
GAMMA = np.float32([0.3, 0.9, 1.0])
THETA = np.float32([[0.4, 2.0], [3.0, 0.01], [1.0, 0.0]])
WEIGHT = np.cos(np.arange(B * T * N * 2 * C)).reshape(B, T, N, 2 * C)


def draw(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


VALUE = draw(B, T, N, 2 * C)


def as_pairs(x, pairing):
    x = np.asarray(x, np.float64)
    if pairing == "halves":
        return x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    return x[..., 0::2] + 1j * x[..., 1::2]


def as_features(z, pairing):
    if pairing == "halves":
        return np.concatenate([z.real, z.imag], axis=-1)
    return np.stack([z.real, z.imag], axis=-1).reshape(*z.shape[:-1], -1)


def by_hand(value, gamma, theta, weight, *, keep=None, real=None, initial=None, pairing="halves"):
    """The recurrence in complex128, and the gradients of sum(weight * output) by its adjoint.

    `keep` is False where the state is forgotten before a token, `real` where a token is padding.
    """
    length = value.shape[-3]
    turning = theta is not None
    gamma = np.asarray(gamma, np.float64)[:, None]
    angles = np.asarray(theta, np.float64) if turning else np.zeros((len(gamma), 1))
    once = gamma * np.exp(-1j * angles)
    both = lambda x: as_pairs(x, pairing) if turning else np.asarray(x, complex)  # noqa: E731
    keep = np.ones(length, bool) if keep is None else keep
    real = np.ones(length, bool) if real is None else real
    z, w = both(value), both(weight)
    h = np.zeros_like(z[..., 0, :, :]) if initial is None else both(initial)
    states, before = [], []
    for t in range(length):
        forget = np.asarray(keep[..., t])[..., None, None]
        now = np.asarray(real[..., t])[..., None, None]
        before.append(h * forget)
        h = np.where(now, once, 1) * h * forget + np.where(now, z[..., t, :, :], 0)
        states.append(h)
    d_z, d_once, back = [None] * length, 0, np.zeros_like(h)
    for t in reversed(range(length)):
        forget = np.asarray(keep[..., t])[..., None, None]
        now = np.asarray(real[..., t])[..., None, None]
        back = back + w[..., t, :, :]
        d_z[t] = np.where(now, back, 0)
        d_once = d_once + np.where(now, before[t].conj() * back, 0)
        back = np.where(now, once.conj(), 1) * back * forget
    d_once = d_once.reshape(-1, *d_once.shape[-2:]).sum(axis=0)
    d_gamma = (d_once.conj() * np.exp(-1j * angles)).real.sum(axis=-1)
    d_theta = (d_once.conj() * -1j * once).real
    of = lambda x: as_features(x, pairing) if turning else x.real  # noqa: E731
    gradients = (of(np.stack(d_z, axis=-3)), d_gamma, *((d_theta,) if turning else ()))
    return of(np.stack(states, axis=-3)), of(h), gradients


def everything(function, arguments, weight):
    """Output, state and gradients of one form, in one compilation."""

    def loss(*floats):
        output, state = function(*floats)
        return jnp.vdot(np.float32(weight), output), (output, state)

    chosen = tuple(range(len(arguments)))
    gradients, results = jax.jit(jax.grad(loss, chosen, has_aux=True))(*arguments)
    return *results, gradients


def error(actual, expected):
    """The largest error, as a part of the largest number; of what is small, as it is."""
    assert np.shape(actual) == np.shape(expected)
    largest = max(1.0, float(np.abs(expected).max()))
    return float(np.abs(np.asarray(actual, np.float64) - expected).max()) / largest


@functools.partial(jax.jit, static_argnames=("form", "pairing", "chunk"))
def run(value, gamma, theta=None, *, form, chunk=4, **options):
    """Output and state; the attention form has no state but its last output."""
    if form == "attention":
        output = F.decay_attention(value, gamma, theta, **options)
        return output, output[..., -1, :, :]
    return F.linear_recurrence(value, gamma, theta, method=form, chunk_size=chunk, **options)


FORMS = ["attention", *METHODS]


# The forms are one function


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["halves", "neighbours", "real"])
@pytest.mark.slow(but=["halves-attention", "halves-scan", "real-attention", "real-scan"])
def test_forms_agree_in_value_and_gradient(form, kind):
    """inventory row 77: sum_j gamma^(i-j) R_(j-i) v_j is h_i = gamma e^(-I theta) h_(i-1) + v_i,
    in attention form, token by token, by an associative scan (complex64) and by chunks; with an
    angle for each pair, and real."""
    pairing = "halves" if kind == "real" else kind
    theta = None if kind == "real" else THETA
    arguments = (VALUE, GAMMA) if theta is None else (VALUE, GAMMA, THETA)
    function = functools.partial(run, form=form, pairing=pairing)
    output, state, gradients = everything(function, arguments, WEIGHT)
    value_64, state_64, gradients_64 = by_hand(VALUE, GAMMA, theta, WEIGHT, pairing=pairing)
    assert error(output, value_64) <= 1e-5
    assert error(state, state_64) <= 1e-5
    for actual, expected in zip(gradients, gradients_64, strict=True):
        assert error(actual, expected) <= 1e-5


def test_attention_form_is_rotated_values_with_decaying_weights():
    """inventory rows 68, 77: values turned by `F.rotate`, weights gamma^(i-j), output turned by the
    conjugate; weights are not normalised, and j = i is included."""
    one_head = THETA[0]
    at = np.arange(T)
    weights = np.tril(0.9 ** (at[:, None] - at[None, :]).clip(0).astype(float))
    turns = F.rope_rotations(np.arange(T), one_head)
    turned = F.rotate(VALUE[0], turns)
    mixed = np.einsum("ts,snh->tnh", weights, np.asarray(turned))
    expected = F.rotate(np.float32(mixed), jnp.conj(turns))
    actual = F.decay_attention(VALUE[0], np.full(N, 0.9), jnp.stack([one_head] * N))
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    np.testing.assert_allclose(actual[0], VALUE[0, 0], atol=1e-6)
    assert weights[-1].sum() > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["chunked"])
def test_no_angle_is_an_angle_of_zero(form):
    """inventory row 77: theta = 0 is the real recurrence."""
    real, _ = run(VALUE, GAMMA, form=form)
    zero, _ = run(VALUE, GAMMA, np.zeros((N, C)), form=form)
    np.testing.assert_allclose(zero, real, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_known_values(form):
    """inventory row 77: gamma = 1/2, a quarter turn: h = v_2 - i v_1 / 2 - v_0 / 4."""
    value = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])[:, None]
    output, state = run(value, np.array([0.5]), np.array([[np.pi / 2]], jnp.float32), form=form)
    np.testing.assert_allclose(output[:, 0], [[1, 0], [2, -0.5], [2.75, -1]], atol=1e-6)
    np.testing.assert_allclose(state[0], [2.75, -1], atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (7, 2), (2, 7, 1), (2, 3, 2, 3)]),
    pairs=st.integers(0, 3),
    chunk=st.sampled_from([1, 3, 64]),
    pairing=st.sampled_from(["halves", "neighbours"]),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_any_shape(shape, pairs, chunk, pairing, seed):
    """inventory row 77: any batch axes, lengths, heads and widths (an odd one where nothing
    turns); all forms against complex128."""
    heads, rng = shape[-1], np.random.default_rng(seed)
    value = draw(*shape, 2 * pairs or 3, seed=seed)
    gamma = np.float32(rng.uniform(0, 1, heads))
    theta = np.float32(rng.uniform(-4, 4, (heads, pairs))) if pairs else None
    expected, last, _ = by_hand(value, gamma, theta, value, pairing=pairing)

    @jax.jit
    def all_forms(*arguments):
        return [run(*arguments, form=form, chunk=chunk, pairing=pairing) for form in FORMS]

    for output, state in all_forms(value, gamma, theta):
        assert error(output, expected) <= 1e-5
        assert error(state, last) <= 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_only_distances_matter(form):
    """inventory rows 68, 77: text that begins later gives the same, later: nothing is absolute."""
    whole, _ = run(VALUE, GAMMA, THETA, form=form)
    late = jnp.concatenate([jnp.zeros_like(VALUE[:, :5]), VALUE[:, :-5]], axis=1)
    shifted, _ = run(late, GAMMA, THETA, form=form)
    np.testing.assert_allclose(shifted[:, 5:], whole[:, :-5], atol=1e-5)
    np.testing.assert_array_equal(shifted[:, :5], 0)


# Documents, padding, parts


DOCUMENTS = np.int32([[4, 4, 4, 1, 1, 1, 1, 2, 2, 4, 4, 4, 4], [7] * 8 + [0] * 5])
REAL = np.array([[True] * 5 + [False, True] * 4, [False] * 2 + [True] * 9 + [False] * 2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["chunked", "scan"])
def test_documents_in_value_and_gradient(form):
    """A document is a run of equal numbers: the last of the first row does not see the first."""
    keep = np.ones((B, T), bool)
    keep[:, 1:] = np.diff(DOCUMENTS, axis=-1) == 0
    function = functools.partial(run, form=form, segments=DOCUMENTS)
    output, _, gradients = everything(function, (VALUE, GAMMA, THETA), WEIGHT)
    expected, _, gradients_64 = by_hand(VALUE, GAMMA, THETA, WEIGHT, keep=keep)
    assert error(output, expected) <= 1e-5
    for actual, slope in zip(gradients, gradients_64, strict=True):
        assert error(actual, slope) <= 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["chunked", "attention"])
def test_documents_do_not_leak(form):
    """What a document gives does not depend on those before it, not even by rounding."""

    @jax.jit
    def slopes(value):
        of = lambda v: run(v, GAMMA, THETA, form=form, segments=DOCUMENTS)[0][0, 7:].sum()  # noqa: E731
        return jax.grad(of)(value)

    gradient = slopes(VALUE)
    np.testing.assert_array_equal(gradient[0, :7], 0)
    np.testing.assert_array_equal(gradient[1], 0)
    assert np.all(np.abs(gradient[0, 7:]).max(axis=(-2, -1)) > 0)


def test_documents_shared_by_rows():
    one_for_all, _ = run(VALUE, GAMMA, THETA, form="chunked", segments=DOCUMENTS[0])
    alone, _ = run(VALUE[1], GAMMA, THETA, form="chunked", segments=DOCUMENTS[0])
    np.testing.assert_allclose(one_for_all[1], alone, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_padding_passes_the_state_on(method):
    """Each row gives what its tokens give without the padding, in value, state and gradient."""
    start = draw(B, N, 2 * C, seed=3)

    def of(value, gamma, theta):
        return run(value, gamma, theta, form=method, initial_state=start, valid=REAL)

    output, state, gradients = everything(of, (VALUE, GAMMA, THETA), WEIGHT)
    expected, last, gradients_64 = by_hand(
        VALUE, GAMMA, THETA, WEIGHT, real=np.asarray(REAL), initial=start
    )
    assert error(output, expected) <= 1e-5
    assert error(state, last) <= 1e-5
    for actual, slope in zip(gradients, gradients_64, strict=True):
        assert error(actual, slope) <= 1e-5
    for row in range(B):
        text = VALUE[row, np.asarray(REAL[row])]
        alone, end = run(text, GAMMA, THETA, form=method, initial_state=start[row])
        np.testing.assert_allclose(output[row, np.asarray(REAL[row])], alone, atol=1e-5)
        np.testing.assert_allclose(state[row], end, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_padding_between_documents(method):
    """Padding ends no document, whatever its number; the token after it may begin one. What comes
    before the first token does not keep it from the state that there was."""
    numbers = np.array([9, 1, 1, 9, 1, 9, 9, 2, 2])
    real, value, start = numbers < 9, VALUE[0, :9], draw(N, 2 * C, seed=3)
    go = functools.partial(run, gamma=GAMMA, theta=THETA, form=method, initial_state=start)
    output, state = go(value, segments=numbers, valid=real)
    dense = np.asarray([1, 2, 4, 7, 8])
    alone, end = go(value[dense], segments=numbers[dense])
    np.testing.assert_allclose(output[dense], alone, atol=1e-6)
    np.testing.assert_allclose(state, end, atol=1e-6)
    assert np.abs(output[7] - value[7]).max() < 1e-6


@pytest.mark.parametrize("parts", [(1,) * 6, (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow(but=["chunked-(5, 1)", "scan-(1, 5)", "associative-(1, 5)"])
def test_reading_in_parts(method, parts):
    """The state of one part begins the next."""
    text, state, outputs = VALUE[:, :6], np.zeros((B, N, 2 * C)), []
    whole, last, _ = by_hand(text, GAMMA, THETA, text)
    for part in jnp.split(text, np.cumsum(parts)[:-1], axis=1):
        output, state = run(part, GAMMA, THETA, form=method, initial_state=state)
        outputs.append(output)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.slow
def test_initial_state_belongs_to_the_first_document():
    start = draw(B, N, 2 * C, seed=3)
    for method in METHODS:
        given_it, _ = run(VALUE, GAMMA, THETA, form=method, initial_state=start, segments=DOCUMENTS)
        none = jnp.zeros_like(start)
        without, _ = run(VALUE, GAMMA, THETA, form=method, initial_state=none, segments=DOCUMENTS)
        assert np.all(np.abs(given_it - without)[0, :3].max(axis=(-2, -1)) > 1e-3)
        np.testing.assert_array_equal(given_it[0, 3:], without[0, 3:])


# Long texts, extremes, dtypes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["scan"])
def test_long_texts(form):
    """inventory row 77: 4,096 tokens with a decay of 1/2, whose powers go down to 1e-1233, and one
    of 0.999. As attention and by chunks values are good to 1e-6 of the largest. One token's
    multiplier is rounded to 6e-8 of itself, so token by token the same error comes once for each of
    the 1 / (1 - gamma) tokens that are remembered."""
    length = 4096
    value, weight = draw(length, 2, 2), draw(length, 2, 2, seed=1)
    gamma, theta = np.float32([0.5, 0.999]), np.float32([[2.9], [0.7]])
    function = functools.partial(run, form=form, chunk=64)
    output, _, gradients = everything(function, (value, gamma, theta), weight)
    expected, _, gradients_64 = by_hand(value, gamma, theta, weight)
    by_one = form in ("scan", "associative")
    for head, decay in enumerate((0.5, 0.999)):
        largest = np.abs(expected[:, head]).max()
        part = 1e-6 + (6e-8 / (1 - decay) if by_one else 0)
        assert np.abs(output[:, head] - expected[:, head]).max() < part * largest
    for actual, exact in zip(gradients, gradients_64, strict=True):
        assert error(actual, exact) <= (1e-3 if by_one else 3e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["chunked"])
def test_a_decay_of_zero_and_of_one(form):
    """All is forgotten, and nothing is; of 0 ** n the slope is 1 for n = 1 and else 0."""
    value = VALUE[:, :5, :2]
    gamma = np.array([0.0, 1.0])

    def of(value, gamma):
        output = run(value, gamma, form=form)[0]
        return output.sum(), output

    gradients, output = jax.jit(jax.grad(of, (0, 1), has_aux=True))(value, gamma)
    np.testing.assert_allclose(output[..., 0, :], value[..., 0, :], atol=1e-6)
    np.testing.assert_allclose(output[..., 1, :], np.cumsum(value[..., 1, :], axis=1), atol=1e-5)
    slopes = np.zeros((2, *value.shape[:1], *value.shape[3:]))
    v = np.asarray(value, np.float64)
    for t in range(5):
        for s in range(t):
            slopes[0] += (t - s == 1) * v[:, s, 0]
            slopes[1] += (t - s) * v[:, s, 1]
    expected = slopes.sum(axis=tuple(range(1, slopes.ndim)))
    np.testing.assert_allclose(gradients[1], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0][..., 0, :], 1.0)
    seen = np.broadcast_to(np.arange(5.0, 0.0, -1.0)[:, None], value.shape[1:2] + value.shape[3:])
    np.testing.assert_allclose(gradients[0][..., 1, :], np.broadcast_to(seen, v[:, :, 1].shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["scan-bfloat16", "scan-float16", "associative-float16"])
def test_computes_in_float32(form, dtype):
    value = (10 * VALUE[:, :5]).astype(dtype)
    gamma, theta = GAMMA.astype(dtype), THETA.astype(dtype)
    output, state = run(value, gamma, theta, form=form)
    wide, end = run(*(x.astype(jnp.float32) for x in (value, gamma, theta)), form=form)
    assert output.dtype == dtype
    once = float(jnp.finfo(dtype).eps) / 2  # rounded once, at the end
    np.testing.assert_allclose(output.astype(jnp.float32), wide, rtol=1.01 * once, atol=1e-5)
    if form != "attention":
        assert state.dtype == jnp.float32
        np.testing.assert_allclose(state, end, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_linear_in_time(method):
    """No array of the recurrence has T x T numbers; the attention form has."""

    def largest(function, length):
        shapes = jax.ShapeDtypeStruct((length, 1, 2), jnp.float32)
        equations = jax.make_jaxpr(function)(shapes).eqns
        return max(v.aval.size for e in equations for v in e.outvars)

    gamma = np.array([0.5])
    linear = lambda value: functional.linear_recurrence(value, gamma, method=method, chunk_size=8)  # noqa: E731
    assert largest(linear, 512) == 2 * largest(linear, 256) < 512 * 16
    square = lambda value: functional.decay_attention(value, gamma)  # noqa: E731
    assert largest(square, 512) == 512**2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["scan"])
def test_devices_add_up_real_gradients(form):
    """Rows on two devices give the gradients of all rows on one; what is added up is real."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    weight = np.float32(WEIGHT)

    def gradients(value, gamma, theta, weight, add=lambda x: x):
        def loss(*floats):
            return add(jnp.vdot(weight, run(*floats, form=form)[0]))

        return jax.grad(loss, (0, 1, 2))(value, gamma, theta)

    rows, whole = P("data"), P()
    spread = functools.partial(gradients, add=lambda x: jax.lax.psum(x, "data"))
    specs = {"in_specs": (rows, whole, whole, rows), "out_specs": (rows, whole, whole)}
    program = jax.jit(jax.shard_map(spread, mesh=mesh, **specs)).lower(VALUE, GAMMA, THETA, weight)
    sums = re.findall(r"all_reduce.*?\}\) : \((.*?)\)", program.as_text(), re.S)
    assert len(sums) >= 2 and not any("complex" in types for types in sums)
    expected = jax.jit(gradients)(VALUE, GAMMA, THETA, weight)
    for one, other in zip(program.compile()(VALUE, GAMMA, THETA, weight), expected, strict=True):
        assert error(one, other) <= 1e-5


# Rates


def test_rates_of_retnet():
    """Logits log(2 ** (5 + n) - 1) are the decays 1 - 2 ** (-5 - n) of RetNet."""
    n = np.arange(8)
    rates = F.decay_rates(np.float32(np.log(2.0 ** (5 + n) - 1)))
    gamma = 1 - 2.0 ** (-5 - n)
    np.testing.assert_allclose(rates.gamma, gamma, rtol=1e-6)
    np.testing.assert_allclose(rates.gain, np.sqrt(1 - gamma**2), rtol=1e-5)


@pytest.mark.slow
def test_gain_keeps_the_variance_of_independent_values():
    rates = F.decay_rates(np.array([0.0, 2.0, 4.0]))
    output, _ = F.linear_recurrence(draw(20_000, 3, 2), rates.gamma, np.ones((3, 1)))
    spread = np.std(output[500:], axis=0) * np.asarray(rates.gain)[:, None]
    np.testing.assert_allclose(spread, 1, atol=0.1)
    assert np.std(output[500:, 2]) > 4


def test_outputs_are_bounded():
    """The worst text says the same all the time; then the output reaches the bound, and no more."""
    rates = F.decay_rates(np.array([2.0]))
    gamma = float(rates.gamma[0])
    bound = np.sqrt((1 + gamma) / (1 - gamma))
    output, _ = F.linear_recurrence(np.ones((200, 1, 1)), rates.gamma)
    assert 0.999 * bound < float(output[-1, 0, 0] * rates.gain[0]) < bound * (1 + 1e-5)
    np.testing.assert_allclose(np.sqrt((1 + 4095 / 4096) / (1 / 4096)), 90.5, atol=0.1)


def test_rates_are_finite_everywhere():
    logits = np.array([-300.0, -90.0, 0.0, 20.0, 90.0, 300.0])
    of = lambda x: jnp.stack(F.decay_rates(x)).sum()  # noqa: E731
    rates, slopes = F.decay_rates(logits), jax.grad(of)(logits)
    assert all(np.all((x >= 0) & (x <= 1)) for x in rates)
    assert np.all(np.isfinite(slopes))


# What the complex form adds


@pytest.mark.slow
def test_complex_decay_counts_modulo_a_number():
    """inventory row 78: the complex recurrence is "more complete": after one impulse a pair that
    turns by 2 pi / 5 holds the time modulo 5 for as long as one likes. States of real decays only
    fall: the best linear reading of eight of them is no better than a guess."""
    length, modulus = 400, 5
    impulse = jnp.zeros((length, 1, 2)).at[0, 0, 0].set(1)
    theta = np.array([[2 * np.pi / modulus]], jnp.float32)
    h, _ = F.linear_recurrence(impulse, np.array([1.0]), theta)
    angle = -np.arctan2(h[:, 0, 1], h[:, 0, 0]) * modulus / (2 * np.pi)
    np.testing.assert_array_equal(np.rint(angle) % modulus, np.arange(length) % modulus)

    gamma = 1 - 2.0 ** -np.arange(1.0, 9)
    fading, _ = F.linear_recurrence(jnp.zeros((length, 8, 1)).at[0].set(1), gamma)
    states, wanted = np.asarray(fading[..., 0]), np.eye(modulus)[np.arange(length) % modulus]
    readings, *_ = np.linalg.lstsq(states, wanted, rcond=None)
    right = (states @ readings).argmax(axis=-1) == np.arange(length) % modulus
    assert right.mean() < 0.3


# Errors


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((np.array([0.5, 1.5, 0.5]), THETA), {}, r"gamma must be in \[0, 1\]; got 1.5"),
        ((np.array([0.5, -0.1, 0.5]), None), {}, r"gamma must be in \[0, 1\]; got -0.1"),
        ((np.array([0.5, jnp.nan, 0.5]), None), {}, r"gamma must be in \[0, 1\]; got nan"),
        (
            (GAMMA[:2], THETA),
            {},
            r"gamma has 2 heads \(axis 0 of shape \(2,\)\), but value has 3 \(axis 2",
        ),
        ((GAMMA, THETA[:, :1]), {}, r"theta must have shape .* = \[3, 4 / 2\]; got \(3, 1\)"),
        ((GAMMA, THETA), {"pairing": "thirds"}, "pairing must be one of .*; got 'thirds'"),
    ],
    ids=["large", "negative", "nan", "gamma's shape", "theta's shape", "pairing"],
)
def test_refused(no_checks_of_annotations, arguments, options, message):
    for function in (functional.decay_attention, functional.linear_recurrence):
        with pytest.raises(ValueError, match=message):
            function(VALUE, *arguments, **options)


def test_refused_by_the_recurrence(no_checks_of_annotations):
    with pytest.raises(ValueError, match="chunk_size must be at least 1; got 0"):
        F.linear_recurrence(VALUE, GAMMA, chunk_size=0)
    with pytest.raises(ValueError, match="method must be one of .*'chunked'.; got 'loop'"):
        F.linear_recurrence(VALUE, GAMMA, method="loop")
    odd = VALUE[..., :3]
    with pytest.raises(ValueError, match=r"theta must have shape .* = \[3, 3 / 2\]"):
        F.linear_recurrence(odd, GAMMA, THETA[:, :1])


@pytest.mark.parametrize("method", ["scan", "associative", "chunked"])
def test_a_text_of_no_tokens_leaves_the_state_as_it_was(method):
    state = VALUE[:, 0].astype(jnp.float32)
    for initial in (None, state):
        result = F.linear_recurrence(
            VALUE[:, :0], GAMMA, THETA, initial_state=initial, method=method
        )
        assert result.output.shape == VALUE[:, :0].shape
        np.testing.assert_array_equal(
            result.state, jnp.zeros_like(state) if initial is None else state
        )
    assert F.decay_attention(VALUE[:, :0], GAMMA, THETA).shape == VALUE[:, :0].shape
    assert F.linear_recurrence(VALUE[:0], GAMMA, method=method).state.shape == (0, *state.shape[1:])
