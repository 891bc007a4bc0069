"""Every function of positions under jit, vmap and grad."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F

INTEGERS = np.int32([3, 0, 7, 2, 11])
WAVES = np.sin(np.arange(5 * 3 * 8, dtype=np.float32)).reshape(5, 3, 8)
FREQUENCIES = F.rope_frequencies(8)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_length": 64}


def buckets(relative):
    return F.relative_position_buckets(relative, bidirectional=True, num_buckets=8, max_distance=14)


def fire(hidden, out, c, query_positions, key_positions):
    return F.fire_bias(
        query_positions,
        key_positions,
        hidden_kernel=hidden[None, :3],
        hidden_bias=hidden[3:6],
        out_kernel=out,
        out_bias=out[0],
        c=c,
        length=5 * c,
    )


# name, function, arguments; gradients are taken in the arguments that are floats
CASES = [
    ("sinusoid", lambda p: F.sinusoidal_positions(p, 6), (INTEGERS / 2,)),
    ("alibi", F.alibi_bias, (F.alibi_slopes(3), INTEGERS, INTEGERS[:2])),
    ("slopes", lambda x: x * F.alibi_slopes(3), (jnp.ones(3),)),
    ("buckets", buckets, (INTEGERS - 5,)),
    ("t5", partial(F.t5_bias, bidirectional=True), (WAVES[:4, 0], INTEGERS, INTEGERS[:2])),
    ("fire", fire, (WAVES[0, 0], WAVES[0], jnp.float32(0.3), INTEGERS, INTEGERS[:2])),
    ("bias", F.relative_position_bias, (WAVES[0, 0][:, None], jnp.arange(6).reshape(2, 3))),
    ("frequencies", lambda x: x * F.rope_frequencies(8), (jnp.ones(4),)),
    ("rotations", lambda p, f: F.rope_rotations(p, f).imag, (INTEGERS, FREQUENCIES)),
    ("rotate", lambda x, f: F.rotate(x, F.rope_rotations(INTEGERS, f)), (WAVES, FREQUENCIES)),
    ("linear", lambda f: F.rope_scale_linear(f, factor=4.0), (FREQUENCIES,)),
    ("ntk", lambda f, factor: F.rope_scale_ntk(f, factor=factor), (FREQUENCIES, jnp.float32(4))),
    (
        "dynamic",
        lambda f, n: F.rope_scale_dynamic_ntk(f, length=n, factor=4.0, original_max_length=64),
        (FREQUENCIES, jnp.int32(100)),
    ),
    ("llama3", lambda f: F.rope_scale_llama3(f, factor=8.0, **LLAMA3), (FREQUENCIES,)),
    (
        "yarn",
        lambda f: F.rope_scale_yarn(f, base=1e4, factor=4.0, original_max_length=64),
        (FREQUENCIES,),
    ),
    (
        "longrope",
        lambda f, s, n: F.rope_scale_longrope(f, s, 2 * s, length=n, original_max_length=64),
        (FREQUENCIES, jnp.arange(1.0, 5.0), jnp.int32(65)),
    ),
    ("truncated", lambda f: F.rope_truncate(f, fraction=0.5), (FREQUENCIES,)),
    ("query power", partial(F.query_power, exponent=0.3, length=3), (INTEGERS,)),
    ("query scale", partial(F.query_scale, beta=0.3, original_max_length=3), (INTEGERS,)),
    ("yarn factor", lambda x: x * F.yarn_attention_factor(4.0), (jnp.ones(2),)),
    ("longrope factor", lambda x: x * F.longrope_attention_factor(256, 64), (jnp.ones(2),)),
]


@pytest.mark.parametrize("function, args", [case[1:] for case in CASES], ids=[c[0] for c in CASES])
@pytest.mark.slow(
    but=["slopes", "buckets", "linear", "llama3", "yarn", "longrope", "longrope factor"]
)
def test_values_and_gradients(function, args):
    """One compilation holds the value, a vmapped batch of two, and the gradient."""
    floats = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(*args):
        y = function(*args)
        return jnp.vdot(jnp.cos(jnp.arange(y.size, dtype=y.dtype)), y.ravel())

    def everything(*args):
        pairs = [jnp.stack([a, a]) for a in args]
        gradient = jax.grad(loss, floats)(*args) if floats else ()
        return function(*args), jax.vmap(function)(*pairs), gradient

    expected, jitted = jax.jit(function)(*args), jax.jit(loss)
    value, batch, gradient = jax.jit(everything)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch, np.stack([expected] * 2), rtol=1e-5, atol=1e-6)
    for i, slope in zip(floats, gradient, strict=True):
        step = 1e-2 * jnp.ones_like(args[i])
        up, down = (jitted(*args[:i], args[i] + s, *args[i + 1 :]) for s in (step, -step))
        np.testing.assert_allclose(np.sum(slope * step), (up - down) / 2, rtol=2e-2, atol=1e-3)
