from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import generate, zoo
from jaxformer.config import (
    GLU,
    MLP,
    Alibi,
    Angles,
    Decay,
    Encoder,
    EncoderDecoder,
    Latent,
    LinearAttention,
    MultiHead,
    Rope,
    SharedKV,
)
from jaxformer.generation import decode, unroll, unrolled
from jaxformer.layers import layouts
from jaxformer.layers.layouts import decoding_layout
from tests.small_models import jitted_forward, random_params

ATTENTION = {
    "one kind": MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    "windows, with a tail": MultiHead(num_heads=4, num_kv_heads=2, head_dim=6, windows=(3, None)),
    "positions, with a tail": MultiHead(
        num_heads=4, num_kv_heads=2, head_dim=6, positions=(Rope(), Alibi(), None)
    ),
    "positions and windows": MultiHead(
        num_heads=4, num_kv_heads=4, head_dim=6, positions=(Rope(), None), windows=(3, 4, None)
    ),
    "shared": SharedKV(num_heads=4, head_dim=6, positions=(Rope(targets=("q", "k", "v", "o")),)),
    "latent": Latent(
        num_heads=4, latent_dim=12, query_latent_dim=10, nope_dim=4, rope_dim=6, value_dim=5
    ),
    "decay": Decay(num_heads=4, head_dim=6, angles=Angles(learned=True)),
    "hybrid": (
        LinearAttention(num_heads=4, num_key_heads=2, key_dim=3, value_dim=4),
        MultiHead(num_heads=4, num_kv_heads=2, head_dim=6, positions=(Rope(), Alibi(), None)),
    ),
}
IN_TURNS = (GLU(hidden_dim=11), MLP(hidden_dim=9))


SELDOM = {"one kind", "positions, with a tail", "decay"}  # others have them beside more


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else ())
        for name in ATTENTION
    ]
)
def model(request, config):
    """A whole number of patterns, at least two where they are short, and one layer more."""
    attention = ATTENTION[request.param]
    kinds = {"feed_forward": IN_TURNS} if request.param.startswith("windows") else {}
    config = replace(config, attention=attention, **kinds)
    period = replace(config, num_layers=12).segments("decoder").period
    return replace(config, num_layers={1: 3, 2: 5, 3: 7, 6: 7}[period])


@pytest.mark.slow
def test_layers_of_their_own_compute_what_the_loop_does(model, prompts):
    params = random_params(model)
    apart = unroll(model, params)
    assert set(apart["decoder"]["first_layers"]) == {f"layer_{i}" for i in range(model.num_layers)}
    assert not {"layers", "tail"} & set(apart["decoder"])
    assert unroll(model, apart) is apart
    np.testing.assert_allclose(
        jitted_forward(model)(apart, prompts),
        jitted_forward(model)(params, prompts),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.slow
def test_both_write_the_same_text(model, prompts, monkeypatch):
    """Through the cache: windows shorter than the text, and states of recurrences."""
    params = random_params(model)
    alone = generate(model, params, prompts, max_new_tokens=7)
    monkeypatch.setattr(layouts, "MAX_COMPILED_LAYERS", 0)
    np.testing.assert_array_equal(generate(model, params, prompts, max_new_tokens=7), alone)
    assert len(np.unique(alone[:, 5:])) > 2


@pytest.mark.parametrize("own_kinds", [False, True])
@pytest.mark.slow
def test_an_encoder_stays_as_it_is(config, prompts, own_kinds, monkeypatch):
    """Also where it takes its kinds from the decoder."""
    kinds = {"feed_forward": (MLP(hidden_dim=8),)} if own_kinds else {}
    model = replace(
        config,
        num_layers=3,
        feed_forward=IN_TURNS,
        topology=EncoderDecoder(num_encoder_layers=2, **kinds),
    )
    source = prompts[:, ::-1]
    params = random_params(model)
    apart = unroll(model, params)
    jax.tree.map(np.testing.assert_array_equal, apart["encoder"], params["encoder"])
    np.testing.assert_allclose(
        jitted_forward(model)(apart, prompts, source=source),
        jitted_forward(model)(params, prompts, source=source),
        rtol=1e-5,
        atol=1e-5,
    )
    if own_kinds:  # as far as the decoder goes
        return
    alone = generate(model, params, prompts, max_new_tokens=5, source=source)
    monkeypatch.setattr(layouts, "MAX_COMPILED_LAYERS", 0)
    looped = generate(model, params, prompts, max_new_tokens=5, source=source)
    np.testing.assert_array_equal(looped, alone)


def test_an_encoder_is_refused(config):
    model = replace(config, topology=Encoder())
    with pytest.raises(ValueError, match=r"unroll needs a Decoder .*; got Encoder\(\)"):
        unroll(model, {})
    with pytest.raises(ValueError, match=r"Decoder or an EncoderDecoder; got Encoder\(\)"):
        decode.generate(model, random_params(model), [[1]], max_new_tokens=2)


def test_models_decode_unrolled_but_on_tpus_and_very_deep(config, monkeypatch):
    assert decoding_layout(zoo.get("llama-2-70b")) == "by_layer"
    deepest = replace(config, num_layers=layouts.MAX_COMPILED_LAYERS)
    assert decoding_layout(deepest) == "by_layer"
    deeper = replace(config, num_layers=deepest.num_layers + 1)
    encoder = replace(config, topology=Encoder())
    assert decoding_layout(deeper) == decoding_layout(encoder) == "stacked"
    monkeypatch.setattr(layouts, "target_platform", lambda: "tpu")
    assert decoding_layout(config) == "stacked"


@pytest.mark.slow
def test_a_large_model_is_not_copied_at_each_call_but_told_how(config, monkeypatch):
    """Of small models the copy is small; unrolled ones need none."""
    params = random_params(config)
    monkeypatch.setattr(unrolled, "MAX_COPIED_PARAMETERS", 1000)
    with pytest.warns(UserWarning, match=r"has 3\.9e\+03 parameters, .*unroll\(config"):
        stacked = generate(config, params, [[1, 2]], max_new_tokens=3)
    alone = generate(config, unroll(config, params), [[1, 2]], max_new_tokens=3)
    np.testing.assert_array_equal(alone, stacked)


@pytest.mark.slow
def test_an_array_at_two_places_is_deleted_after_both(config):
    """And NumPy's arrays are not deleted, nor those that are traced."""
    params = random_params(replace(config, num_layers=4))
    layer = params["decoder"]["layers"]["layer_0"]["feed_forward"]
    layer["up"] = layer["gate"]
    config = replace(config, num_layers=4)
    expected = unroll(config, params)
    traced = jax.jit(lambda params: unroll(config, params, donate=True))(params)
    numpy = unroll(config, jax.tree.map(np.asarray, params), donate=True)
    for result in (traced, numpy, unroll(config, params, donate=True)):
        jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert layer["gate"]["kernel"].is_deleted()


@pytest.mark.slow
def test_donated_parameters_are_deleted_one_by_one(config):
    model = replace(config, num_layers=5, feed_forward=IN_TURNS)
    params = random_params(model)
    expected = unroll(model, params)
    given = jax.tree.map(jnp.copy, params)
    result = unroll(model, given, donate=True)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(given["decoder"]["layers"]))
