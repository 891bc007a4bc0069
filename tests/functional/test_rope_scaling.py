"""Rotary positions beyond the length of training."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.jitted_functions import F

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("positions.json").read_text())
C = 8


def scale(name):
    """Compute a golden case with our function of its kind: frequencies and attention factor."""
    case = GOLDEN["scalings"][name]
    options = dict(case["parameters"])
    if "original_max_position_embeddings" in options:
        options["original_max_length"] = options.pop("original_max_position_embeddings")
    frequencies = F.rope_frequencies(2 * C, base=case["base"])
    match name.split(",")[0]:
        case "linear":
            return F.rope_scale_linear(frequencies, **options), 1.0
        case "dynamic":
            options |= {"length": case["length"], "original_max_length": case["max_length"]}
            return F.rope_scale_dynamic_ntk(frequencies, **options), 1.0
        case "llama3":
            return F.rope_scale_llama3(frequencies, **options), 1.0
        case "yarn":
            scales = {k: options.pop(k) for k in ("mscale", "mscale_all_dim") if k in options}
            return (
                F.rope_scale_yarn(frequencies, base=case["base"], **options),
                F.yarn_attention_factor(options["factor"], **scales),
            )
        case "longrope":
            short, long = (np.array(options.pop(k)) for k in ("short_factor", "long_factor"))
            return (
                F.rope_scale_longrope(frequencies, short, long, length=case["length"], **options),
                F.longrope_attention_factor(case["max_length"], options["original_max_length"]),
            )
        case "proportional":
            some = F.rope_truncate(frequencies, fraction=options["partial_rotary_factor"])
            return F.rope_scale_linear(some, factor=options["factor"]), 1.0


@pytest.mark.parametrize("name", list(GOLDEN["scalings"]))
def test_scalings_match_transformers(name):
    expected = GOLDEN["scalings"][name]
    frequencies, attention_factor = scale(name)
    assert frequencies.dtype == jnp.float32
    np.testing.assert_allclose(frequencies, expected["frequencies"], rtol=1e-6)
    np.testing.assert_allclose(attention_factor, expected["attention_factor"], rtol=1e-12)


OPTIONS = {
    "linear": (F.rope_scale_linear, {}),
    "ntk": (F.rope_scale_ntk, {}),
    "dynamic": (F.rope_scale_dynamic_ntk, {"length": 128, "original_max_length": 64}),
    "llama3": (
        F.rope_scale_llama3,
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_length": 64},
    ),
    "yarn": (F.rope_scale_yarn, {"base": 10_000.0, "original_max_length": 64}),
}
KINDS = list(OPTIONS)
STATIC = [kind for kind in KINDS if kind != "dynamic"]  # its growth is not its factor


def scaled(kind, factor, frequencies=None, **changes):
    function, options = OPTIONS[kind]
    frequencies = F.rope_frequencies(2 * C) if frequencies is None else frequencies
    return function(frequencies, factor=factor, **{**options, **changes})


@pytest.mark.parametrize("kind", STATIC)
def test_factor_one_changes_nothing(kind):
    np.testing.assert_allclose(scaled(kind, 1.0), F.rope_frequencies(2 * C), rtol=1e-6)


@pytest.mark.parametrize("kind", STATIC)
def test_no_pair_is_sped_up_or_slowed_beyond_the_factor(kind):
    slowing = F.rope_frequencies(2 * C) / scaled(kind, 4.0)
    assert np.all((slowing >= 1 - 1e-6) & (slowing <= 4.0 * (1 + 1e-6)))
    assert np.all(np.diff(slowing) >= -1e-5)  # slow pairs are slowed at least as much
    np.testing.assert_allclose(slowing[-1], 4.0, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_of_several_heads_is_the_scaling_of_each(kind):
    many = jnp.stack([F.rope_frequencies(2 * C, base=base) for base in (10_000.0, 3000.0, 99.0)])
    together = jax.vmap(lambda f: scaled(kind, 4.0, f))(many)
    for row, frequencies in zip(together, many, strict=True):
        np.testing.assert_allclose(row, scaled(kind, 4.0, frequencies), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_gradient(kind):
    """The scalings are linear in the frequencies, but for the turns that Llama 3 counts."""
    f = F.rope_frequencies(2 * C)
    step = 1e-3 * f
    slope = jax.jvp(lambda f: scaled(kind, 4.0, f), (f,), (step,))[1]
    difference = (scaled(kind, 4.0, f + step) - scaled(kind, 4.0, f - step)) / 2
    np.testing.assert_allclose(slope, difference, rtol=2e-2, atol=1e-7)


def test_linear_scaling_is_interpolation():
    """Rotations at position p * factor are the unscaled ones at p."""
    f = F.rope_frequencies(2 * C)
    there = F.rope_rotations(np.arange(7) * 4, F.rope_scale_linear(f, factor=4.0))
    np.testing.assert_allclose(there, F.rope_rotations(np.arange(7), f), atol=1e-6)


def test_ntk_is_a_change_of_base():
    d, base, factor = 2 * C, 10_000.0, 8.0
    expected = F.rope_frequencies(d, base=base * factor ** (d / (d - 2)))
    actual = F.rope_scale_ntk(F.rope_frequencies(d, base=base), factor=factor)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(actual[0], 1.0)
    np.testing.assert_allclose(actual[-1], F.rope_frequencies(d, base=base)[-1] / factor, rtol=1e-6)


@pytest.mark.parametrize("fraction, count", [(0.25, 2), (0.4, 3), (0.1, 0), (1.0, 8)])
def test_truncation_keeps_the_fastest_pairs_of_the_whole_head(fraction, count):
    actual = F.rope_truncate(F.rope_frequencies(2 * C, base=99.0), fraction=fraction)
    expected = [99.0 ** (-j / C) if j < count else 0 for j in range(C)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_dynamic_ntk_leaves_short_texts_alone():
    f = F.rope_frequencies(2 * C)
    for length in (1, 63, 64):
        np.testing.assert_array_equal(scaled("dynamic", 3.3, length=length), f)
    assert np.all(scaled("dynamic", 3.3, length=65)[1:] < f[1:])
    expected = F.rope_scale_ntk(f, factor=3.3 * 200 / 64 - (3.3 - 1))
    np.testing.assert_allclose(scaled("dynamic", 3.3, length=200), expected, rtol=1e-6)


def test_dynamic_and_longrope_lengths_may_be_traced():
    f, short, long = F.rope_frequencies(2 * C), np.ones(C), np.arange(2.0, 2 + C)
    options = {"original_max_length": 64}

    @jax.jit
    def both(length):
        return (
            F.rope_scale_dynamic_ntk(f, length=length, factor=4.0, **options),
            F.rope_scale_longrope(f, short, long, length=length, **options),
        )

    for length in (64, 65):
        dynamic, longrope = both(np.int32(length))
        np.testing.assert_allclose(dynamic, scaled("dynamic", 4.0, length=length), rtol=1e-6)
        np.testing.assert_allclose(longrope, f / (long if length > 64 else short), rtol=1e-6)


def test_llama3_has_three_ranges():
    """Kept above 4 turns in the training length, slowed in full below 1, in between in part."""
    turns = np.array([9.0, 4.0, 2.5, 1.0, 0.3])
    f = turns * (2 * math.pi / 64)
    slowing = f / scaled("llama3", 8.0, f)
    np.testing.assert_allclose(slowing[np.array([0, 1, 3, 4])], [1, 1, 8, 8], rtol=1e-5)
    np.testing.assert_allclose(slowing[2], 1 / (0.5 + 0.5 / 8), rtol=1e-5)


def test_yarn_ramp_lies_between_the_betas():
    """At base 1e4 pairs 8.06 and 20.10 of 32 make 32 turns and 1 in 2048 tokens; the ramp is linear
    in the index between them, or between 8 and 21 when they are truncated."""
    f, L = F.rope_frequencies(64), 2048
    indices = [32 * math.log(L / (2 * math.pi * turns)) / math.log(1e4) for turns in (32, 1)]
    for truncate, (first, last) in [(True, (8, 21)), (False, indices)]:
        actual = F.rope_scale_yarn(
            f, base=1e4, factor=4.0, original_max_length=L, truncate=truncate
        )
        slow = np.clip((np.arange(32) - first) / (last - first), 0, 1)
        np.testing.assert_allclose(actual, f * (1 - slow) + f / 4 * slow, rtol=1e-5)
    np.testing.assert_allclose(indices, [8.06, 20.10], atol=0.01)


def test_attention_factors():
    np.testing.assert_allclose(F.yarn_attention_factor(8.0), 0.1 * math.log(8) + 1)
    both = F.yarn_attention_factor(40.0, mscale=0.707, mscale_all_dim=0.707)
    assert both == 1.0
    scores = F.yarn_attention_factor(40.0, mscale=0.707) ** 2
    np.testing.assert_allclose(scores, (0.0707 * math.log(40) + 1) ** 2)
    np.testing.assert_allclose(F.longrope_attention_factor(131_072, 4096), math.sqrt(1 + 5 / 12))
    for short in (0.5, 1.0):
        assert F.yarn_attention_factor(short) == 1.0
        assert F.longrope_attention_factor(short * 4096, 4096) == 1.0


def test_attention_factor_scales_the_scores_by_its_square(normal):
    q, k = normal(3, 2, 8), normal(3, 2, 8)
    r, a = F.rope_rotations(np.arange(3), F.rope_frequencies(8)), F.yarn_attention_factor(8.0)
    plain = jnp.vdot(F.rotate(q, r), F.rotate(k, r))
    np.testing.assert_allclose(
        jnp.vdot(F.rotate(q, a * r), F.rotate(k, a * r)), a**2 * plain, rtol=1e-4
    )


def test_llama3_without_a_ramp_divides_what_turns_too_seldom():
    """Llama 4 Scout: both factors are 1, so nothing is between."""
    plain = F.rope_frequencies(16, base=10_000.0)
    scaled_frequencies = F.rope_scale_llama3(
        plain, factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_length=64
    )
    turns = np.asarray(plain) * 64 / (2 * math.pi)
    np.testing.assert_allclose(scaled_frequencies, plain / np.where(turns < 1, 8.0, 1.0), rtol=1e-6)
    assert 0 < (turns < 1).sum() < 8


def test_scaling_errors():
    with pytest.raises(ValueError, match="at least two frequencies; got 1"):
        F.rope_scale_ntk(np.ones(1), factor=2.0)
    with pytest.raises(ValueError, match="must be at least low_freq_factor; got 1.0 and 4.0"):
        scaled("llama3", 8.0, low_freq_factor=4.0, high_freq_factor=1.0)
    message = "beta_slow=1.0 and beta_fast=32.0 .* original_max_length=1 at base=10000.0"
    with pytest.raises(ValueError, match=message):
        scaled("yarn", 8.0, original_max_length=1)


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("linear", dict(factor=0.0), "factor must be positive; got 0.0"),
        ("ntk", dict(factor=-2.0), "factor must be positive; got -2.0"),
        (
            "dynamic_ntk",
            dict(length=9, factor=2.0, original_max_length=0),
            "original_max_length must be positive; got 0",
        ),
        (
            "llama3",
            dict(factor=0.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=64),
            "factor must be positive; got 0.0",
        ),
        ("yarn", dict(base=1.0, factor=2.0, original_max_length=64), "base must exceed 1; got 1.0"),
        (
            "yarn",
            dict(base=1e4, factor=2.0, original_max_length=64, beta_slow=0.0),
            "beta_slow must be positive; got 0.0",
        ),
    ],
)
def test_numbers_that_give_no_frequencies_are_named(method, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(F, f"rope_scale_{method}")(np.ones(4), **options)


def test_bad_fractions_and_lengths_are_named():
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\]; got -0.5"):
        F.rope_truncate(np.ones(4), fraction=-0.5)
    with pytest.raises(ValueError, match="original_max_length must exceed 1; got 1"):
        F.longrope_attention_factor(100, 1)
