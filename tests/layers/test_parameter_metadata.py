"""Parameters of another model are refused by whoever takes them beside a configuration."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxformer import Transformer, generate, inspect, save_pretrained
from jaxformer.config import GLU, MLP
from jaxformer.generation import Beam, decode_step, log_likelihoods, prefill, stream, unroll
from jaxformer.layers.layouts import arrange_layers
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training.train_step import init_train_state
from tests.small_models import BASE, jitted_forward, random_params

QUERY = "decoder/layers/layer_0/attention/query/kernel"
GATE = "decoder/layers/layer_0/feed_forward/gate/kernel"
PLAIN = replace(BASE, feed_forward=(MLP(hidden_dim=11),))
OTHERS = {
    "of two layers": (replace(BASE, num_layers=2), rf"{QUERY} is \[2, 14, 4, 6\], not \[3, 14, "),
    "of five layers": (replace(BASE, num_layers=5), rf"{QUERY} is \[5, 14, 4, 6\], not \[3, 14, "),
    "narrower": (
        replace(BASE, vocab_size=29),
        r"^2 parameters .*/embedding is \[29, 14\], not \[3",
    ),
    "without a gate": (PLAIN, f"^1 parameter does not fit the configuration: {GATE} is missing.$"),
}
ONE = jnp.array([[1, 2]])
TAKING = {
    "generate": lambda config, params: generate(config, params, [[1, 2]], max_new_tokens=3),
    "beams": lambda config, params: generate(
        config, params, [[1, 2]], max_new_tokens=3, sampler=Beam(num_beams=2)
    ),
    "stream": lambda config, params: stream(config, params, [[1, 2]], max_new_tokens=3),
    "unroll": unroll,
    "likelihoods": lambda config, params: next(log_likelihoods(config, params, [], max_length=4)),
    "trace": lambda config, params: inspect.trace(config, params, [[1, 2]]),
    "token_losses": lambda config, params: inspect.token_losses(config, params, [[1, 2]]),
    "attention_maps": lambda config, params: inspect.attention_maps(config, params, [[1, 2]]),
    "init_state": lambda config, params: init_train_state(
        Transformer(config),
        optax.identity(),
        jax.random.key(0),
        make_mesh(MeshConfig(), jax.devices()[:1]),
        params=params,
    ),
    "apply": lambda config, params: jitted_forward(config)(params, ONE),
    "prefill": lambda config, params: prefill(config, params, ONE, jnp.array([2]), capacity=4),
    "decode_step": lambda config, params: decode_step(
        config, params, jnp.array([1]), TAKING["prefill"](config, random_params(config))[1]
    ),
    "save_pretrained": lambda config, params: save_pretrained("never", config, params),
}


@pytest.mark.parametrize("other", OTHERS)
def test_parameters_of_another_model_are_named(other):
    config, message = OTHERS[other]
    with pytest.raises(ValueError, match=message):
        check_parameters(BASE, random_params(config))
    assert check_parameters(config, random_params(config)) is None


def test_surplus_parameters_are_named_the_first_of_many():
    with pytest.raises(
        ValueError, match=f"^1 parameter .*: {GATE} is not a parameter of the model.$"
    ):
        check_parameters(PLAIN, random_params(BASE))
    deep = replace(BASE, feed_forward=(*BASE.feed_forward * 2, MLP(hidden_dim=7)))
    with pytest.raises(
        ValueError, match=r"^26 parameters do not fit .* of the model; and 18 more\.$"
    ):
        check_parameters(BASE, random_params(deep))
    for params in ({}, {"params": random_params(BASE)}):
        with pytest.raises(
            ValueError, match=r"must be variables\['params'\]; got a tree with (nothing|params)"
        ):
            check_parameters(BASE, params)


@pytest.mark.parametrize("taking", TAKING)
def test_every_function_of_parameters_checks_them(taking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"^1 parameter .*: {GATE} is not a parameter of the model\\."
    ):
        TAKING[taking](PLAIN, random_params(BASE))


def test_options_of_a_call_hold_nothing_that_a_call_could_change():
    """Modules and threads share one `RuntimeConfig`: a set in it would collect from all calls."""
    assert all(isinstance(hash(value), int) for value in vars(RuntimeConfig()).values())


@pytest.mark.parametrize("layout", ["stacked", "by_layer"])
@pytest.mark.slow(but=["stacked"])
def test_a_name_that_is_not_the_models_is_refused_in_each_layout(layout):
    config = replace(PLAIN, num_layers=3)
    params = arrange_layers(config, random_params(config), layout)
    run = jax.jit(lambda params: Transformer(config).apply({"params": params}, ONE))
    assert run(params).shape == (*ONE.shape, config.vocab_size)
    (group,) = params["decoder"].keys() - {"final_norm"}
    params["decoder"][group]["layer_0"]["feed_forward"]["gate"] = {"kernel": jnp.ones(3)}
    with pytest.raises(ValueError, match=rf"1 parameter .*: decoder/{group}/layer_0/.*/gate"):
        run(params)


def test_a_model_too_large_to_unroll_is_looked_at_too(monkeypatch):
    monkeypatch.setattr("jaxformer.layers.layouts.MAX_COMPILED_LAYERS", 0)
    with pytest.raises(ValueError, match="9 parameters do not fit the configuration: "):
        TAKING["generate"](BASE, random_params(replace(BASE, num_layers=2)))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_layers": 2},
            r"have 2 layers \(0 first .* pattern of 1\), but .* 3 \(0 first layers, pattern of 1\)",
        ),
        (
            {"num_layers": 5},
            r"have 5 layers \(0 first .* pattern of 1\), but .* 3 \(0 first layers, pattern of 1\)",
        ),
        (
            {"feed_forward": (*BASE.feed_forward, GLU(hidden_dim=7, activation="gelu"))},
            r"have 3 layers \(0 first .* pattern of 2\), but .* 3 \(0 first layers, pattern of 1\)",
        ),
        (
            {"norm_placement": ("pre", "post", "sandwich")},
            r"have 3 layers \(0 first .* pattern of 3\), but .* 3 \(0 first layers, pattern of 1\)",
        ),
    ],
)
def test_applying_counts_the_layers(change, message, scan):
    model, params = Transformer(BASE, scan=scan), random_params(replace(BASE, **change))
    with pytest.raises(ValueError, match=f"Parameters of the decoder {message}"):
        jax.eval_shape(model.apply, {"params": params}, jnp.ones((1, 2), int))
