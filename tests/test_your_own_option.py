"""Options that stand in a person's own file, here this one, do all that the library's own do."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import Transformer, options, save_pretrained, zoo
from jaxformer import functional as F
from jaxformer.config import GLU, MLP, TransformerConfig, from_json, from_python, to_json
from jaxformer.layers.feed_forward import activate
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import parameter
from tests.models import parameters

LLAMA = zoo.get("llama-2-7b").tiny()


@options.activation
def star_relu(x):
    return 0.8944 * jax.nn.relu(x) ** 2 - 0.4472


STARRED = replace(LLAMA, feed_forward=(GLU(hidden_dim=24, activation="star_relu"),))


@pytest.mark.parametrize(
    "axes, message",
    [
        ("model -> haeds features", "counts one of model, heads, .*; got 'haeds' in 'model -> hae"),
        ("model -> heads", r"gate \(4, 2, 3\) has 3 axes; 'model -> heads' names 2"),
    ],
)
def test_a_parameter_needs_a_word_for_each_of_its_axes(axes, message):
    class Gate(nn.Module):
        @nn.compact
        def __call__(self):
            return parameter(self, "gate", nn.initializers.zeros, (4, 2, 3), axes, Mode())

    with pytest.raises(ValueError, match=message):
        Gate().init(jax.random.key(0))


def test_an_activation_stands_on_the_gate():
    gate, value = np.random.default_rng(0).normal(size=(2, 3, 5))
    into = {"gate": jnp.asarray(gate, jnp.float32), "up": jnp.asarray(value, jnp.float32)}
    expected = 0.8944 * np.maximum(gate, 0) ** 2 - 0.4472
    found = activate(GLU(hidden_dim=5, activation="star_relu"), into)
    np.testing.assert_allclose(found, expected * value, rtol=1e-5, atol=1e-6)
    alone = activate(MLP(hidden_dim=5, activation="star_relu"), {"up": into["gate"]})
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, formula",
    [
        ("relu", F.reglu),
        ("gelu", F.geglu),
        ("gelu_tanh", lambda gate, value: F.geglu(gate, value, approximate=True)),
        ("silu", F.swiglu),
        ("sigmoid", F.glu),
        ("identity", F.bilinear),
    ],
)
def test_the_librarys_own_gates_are_its_functions_bit_for_bit(name, formula, normal):
    gate, value = normal(4, 7), normal(4, 7)
    found = activate(GLU(hidden_dim=7, activation=name), {"gate": gate, "up": value})
    np.testing.assert_array_equal(found, formula(gate, value))


def test_a_configuration_prints_and_is_read_back():
    assert from_json(TransformerConfig, to_json(STARRED)) == STARRED
    branch = STARRED.feed_forward[0]
    assert from_python(repr(branch), {"GLU": GLU}) == branch
    misspelt = json.loads(to_json(STARRED))
    misspelt["feed_forward"][0]["activation"] = "star_rely"
    with pytest.raises(ValueError, match="GLU.activation must be one of 'relu', .*'star_rely'"):
        from_json(TransformerConfig, json.dumps(misspelt))


def test_another_definition_in_the_same_file_takes_the_place_of_the_first():
    """Also in programs that were compiled with the first, as in a notebook."""

    def define(factor):
        @options.activation
        def mine(x):
            return factor * x

    define(2)
    model = Transformer(replace(STARRED, feed_forward=(GLU(hidden_dim=24, activation="mine"),)))
    run, params = jax.jit(model.apply), {"params": parameters(model.config)}
    first = run(params, jnp.arange(9))
    define(3)
    assert float(jnp.abs(run(params, jnp.arange(9)) - first).max()) > 0.01


def test_a_name_of_another_file_is_refused():
    def silu(x):
        return x

    with pytest.raises(ValueError, match="jaxformer has an activation 'silu' already"):
        options.activation(silu)

    def other(x):
        return x

    other.__name__, other.__module__ = "star_relu", "their_ideas"
    with pytest.raises(ValueError, match=r"test_your_own_option has an activation 'star_relu'"):
        options.activation(other)


def test_an_export_refuses_what_its_readers_would_not_know(tmp_path):
    with pytest.raises(ValueError, match="instead of .*activation='star_relu'"):
        save_pretrained(tmp_path / "mine", STARRED, parameters(STARRED))
    gpt = zoo.get("gpt-2-small").tiny()
    gpt = replace(gpt, feed_forward=(replace(gpt.feed_forward[0], activation="star_relu"),))
    with pytest.raises(ValueError, match="no name for the activation 'star_relu'"):
        save_pretrained(tmp_path / "mine", gpt, parameters(gpt))
