"""Sums of one stream and a branch, against NumPy's in float64."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import Transformer, zoo
from jaxformer import config as c
from jaxformer.layers.runtime import INTERMEDIATES
from tests.small_models import random_params

D = 6
PLACE = c.Place(1, "attention", None)
X, Y = np.random.default_rng(0).normal(size=(2, 2, 3, D))


def made(option):
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=x.shape) for name, x in option.parameters(D).items()}


def joined(option, params):
    """What the branch reads, and the stream after it."""
    arrays = {name: jax.numpy.asarray(x, np.float32) for name, x in params.items()}
    x, held = option.read(np.float32(X), arrays, PLACE)
    return x, option.write(np.float32(X), held, np.float32(Y), arrays, PLACE)


def unit(x, eps):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps)


def rms(x, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def of_scale(p):
    return X + p["scale"] * Y


def of_gate(p):
    b = 1 / (1 + np.exp(-p["gate"] / 0.7))
    return np.sqrt(np.maximum(1 - b**2, 1e-3)) * X + b * Y


def of_scaling(p):
    stream = (X + p["stream_bias"]) * p["stream_scale"]
    return stream + (Y + p["branch_bias"]) * p["branch_scale"]


def of_interpolation(p):
    a = unit(X, 0.1)
    return a + np.abs(p["rate"] * 0.05 / 0.2) * (unit(Y, 0.1) - a)


def of_laurel(p):
    n = rms(X, 0.1) * p["norm"]
    low_rank = rms(n @ p["left"] @ p["right"], 0.1) * p["post_norm"]
    return (X + Y + n + low_rank) / np.sqrt(2)


SUMS = {
    "LayerScale": (c.BranchScale(), of_scale),
    "ReZero": (c.BranchScale(over="branch", start=0.0), of_scale),
    "gate": (c.ResidualGate(temperature=0.7), of_gate),
    "scaling": (c.ResidualScaling(), of_scaling),
    "interpolation": (
        c.SphericalInterpolation(initial_rate=0.05, parameter_scale=0.2, eps=0.1),
        of_interpolation,
    ),
    "Laurel": (c.Laurel(rank=4, norm_eps=0.1), of_laurel),
}


@pytest.mark.parametrize("option, by_hand", SUMS.values(), ids=SUMS)
def test_a_sum_of_stream_and_branch(option, by_hand):
    params = made(option)
    np.testing.assert_allclose(joined(option, params)[1], by_hand(params), atol=1e-5)


def test_what_a_branch_reads_is_normalised():
    for name, by_hand in (("Laurel", rms(X, 0.1)), ("interpolation", unit(X, 0.1))):
        option = SUMS[name][0]
        params = made(option) | {"norm": np.ones(D)}
        np.testing.assert_allclose(joined(option, params)[0], by_hand, atol=1e-5)


def test_rates_on_the_sphere_begin_alike_whatever_the_scale_of_their_parameter():
    for scale in (None, 0.1, 3.0):
        option = c.SphericalInterpolation(initial_rate=0.25, parameter_scale=scale, eps=0.0)
        start = {"rate": np.full(D, option.parameters(D)["rate"].init)}
        expected = unit(X, 0) + 0.25 * (unit(Y, 0) - unit(X, 0))
        np.testing.assert_allclose(joined(option, start)[1], expected, atol=1e-6)


def test_a_scaled_stream_is_in_float32_in_a_model_of_bfloat16():
    config = replace(zoo.get("llama-2-7b").tiny(), residual=c.ResidualScaling())
    model = Transformer(config, dtype=jax.numpy.bfloat16)
    _, sown = jax.eval_shape(
        lambda params, tokens: model.apply({"params": params}, tokens, mutable=[INTERMEDIATES]),
        random_params(config),
        np.arange(5),
    )
    layer = sown[INTERMEDIATES]["decoder"]["layers"]["layer_0"]
    assert layer["residual_stream"].dtype == "float32"
    assert layer["read_by_attention"].dtype == layer["from_attention"].dtype == "bfloat16"


def test_altup_joins_branches_inside_a_layer_by_an_option_of_one_stream():
    outer = c.AltUp(branches=c.Laurel())
    assert outer.of_branch("layer") is outer
    assert outer.of_branch("attention") == c.Laurel()
    assert outer.of_branch("feed_forward") is None is c.AltUp().of_branch("attention")
    with pytest.raises(ValueError, match=r"branches=Laurel\(.* joins attention alone.*'parallel'"):
        replace(zoo.get("llama-2-7b"), residual=outer, block="parallel")
    with pytest.raises(ValueError, match="AltUp.branches must have one stream; got HyperConnec"):
        c.AltUp(branches=c.HyperConnections())


def test_an_embedding_of_a_layer_joins_all_streams_but_the_first():
    option = c.AltUp(layer_embedding=c.OtherStreams()).of_branch("layer_embedding")
    rng = np.random.default_rng(0)
    streams, y, scale = (np.float32(rng.normal(size=s)) for s in ((2, 3, 4, D), (2, 3, D), (D,)))
    x, held = option.read(streams, {"scale": scale}, None)
    new = option.write(streams, held, y, {"scale": scale}, None)
    for at in np.ndindex(2, 3):
        np.testing.assert_allclose(x[at], scale * streams[at][0], rtol=1e-6)
        for i in range(4):
            np.testing.assert_allclose(new[at][i], streams[at][i] + (i > 0) * y[at], rtol=1e-6)
