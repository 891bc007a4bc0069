"""How a branch joins the residual stream, from a person's own file: here this one."""

import re
import shlex
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pretrain
from experiments.command_line import parse_run
from experiments.training.program import print_run
from jaxformer import Transformer, costs, options, save_pretrained, zoo
from jaxformer import config as c
from jaxformer.config import TransformerConfig, from_json, to_json
from tests.small_models import jitted_forward, random_params
from tests.test_custom_options import after_a_step, assert_cached_is_whole, texts

LLAMA = zoo.get("llama-2-7b").tiny()


@dataclass(frozen=True, kw_only=True)
class Total(options.Residual):
    """The sum, which is what there is without an option."""

    def __call__(self, params, x, y):
        return x + y


@dataclass(frozen=True, kw_only=True)
class LayerScale(options.Residual):
    """x + scale * y. Touvron et al., 2021. arXiv:2103.17239, section 3."""

    initial_scale: float = 0.1

    def parameters(self, model_dim):
        return {"scale": options.Parameter((model_dim,), "model", self.initial_scale)}

    def __call__(self, params, x, y):
        return x + jnp.broadcast_to(params["scale"], y.shape) * y


@dataclass(frozen=True, kw_only=True)
class Highway(options.Residual):
    """A gate between stream and branch. Srivastava et al., 2015. arXiv:1505.00387, equation 3."""

    def parameters(self, model_dim):
        return {"gate": options.Parameter((model_dim, model_dim), "model -> features")}

    def __call__(self, params, x, y):
        gate = jax.nn.sigmoid(x @ params["gate"])
        return x + gate * (y - x)


def of(option, **fields):
    return replace(LLAMA, residual=option, num_layers=2, **fields)


CONFIGS = {
    "serial": of(LayerScale()),
    "gated, sandwich": of(Highway(), norm_placement="sandwich"),
    "parallel": of(LayerScale(), block="parallel"),
    "a norm after the sum": of(Highway(), block="parallel", norm_placement="post"),
    "one norm": of(LayerScale(), block="parallel_shared_norm"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(name):
    actual = after_a_step(CONFIGS[name], (("data", 2), ("fsdp", 2), ("tensor", 2)))
    expected = after_a_step(CONFIGS[name], (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), actual[1], expected[1])


@pytest.mark.parametrize("block", ["serial", "parallel", "parallel_shared_norm"])
def test_a_sum_is_what_there_is_without_an_option(block):
    library, tokens = replace(LLAMA, block=block), texts().tokens[:2]
    params = random_params(library)
    actual = jitted_forward(replace(library, residual=Total()))(params, tokens)
    np.testing.assert_array_equal(actual, jitted_forward(library)(params, tokens))


@pytest.mark.parametrize("name", ["serial", "gated, sandwich"])
@pytest.mark.slow(but=["serial"])
def test_with_a_cache_it_is_the_whole_text_at_once(name):
    assert_cached_is_whole(CONFIGS[name])


def test_it_is_counted_printed_read_back_and_a_flag():
    config, plain = of(LayerScale()), of(None)
    extra = costs.num_parameters(config) - costs.num_parameters(plain)
    assert extra == 2 * 2 * LLAMA.model_dim  # two layers of two branches
    assert from_json(TransformerConfig, to_json(config)) == config == config.tiny().tiny()
    assert eval(repr(config), {**vars(c), "LayerScale": LayerScale}) == config
    run = parse_run(pretrain.RUNS, "", ["--model.residual", "LayerScale(initial_scale=0.5)"])
    assert run.model.residual == LayerScale(initial_scale=0.5)
    again = shlex.split(print_run(run, pretrain.RUNS))[3:]
    assert parse_run(pretrain.RUNS, "", again) == run


@pytest.mark.parametrize("name", ["depth", "__dataclass_fields__"])
def test_what_is_no_field_is_named_beside_its_fields(name):
    text = to_json(of(LayerScale())).replace('"initial_scale"', f'"{name}"')
    with pytest.raises(ValueError, match=f"no field {name}; its fields are initial_scale.$"):
        from_json(TransformerConfig, text)


@dataclass(frozen=True, kw_only=True)
class Sharded(options.Residual):
    """Has a parameter of an axis that devices share."""

    def parameters(self, model_dim):
        return {"w": options.Parameter((model_dim, 8), "model -> hidden")}

    def __call__(self, params, x, y):
        return x + y


@dataclass(frozen=True, kw_only=True)
class Narrow(options.Residual):
    """Gives fewer features than the stream has."""

    def __call__(self, params, x, y):
        return (x + y)[..., :3]


@dataclass(frozen=True, kw_only=True)
class Unfinished(options.Residual):
    """Implements nothing."""


WRONG = {
    "axes": (Sharded(), "every device has all of the stream, .*; got 'model -> hidden' of 'w'"),
    "shape": (Narrow(), r"Narrow .*\[rows, tokens, width\].*got \(5, 3\)"),
    "nothing": (Unfinished(), r"Unfinished has no __call__\(...\), which the model needs"),
}


@pytest.mark.parametrize("option, message", WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(option, message):
    init = Transformer(of(option)).init
    with pytest.raises((ValueError, NotImplementedError)) as error:
        jax.eval_shape(init, jax.random.key(0), jnp.arange(5))
    assert re.search(message, str(error.value).replace("\n", " ")), error.value


def test_no_family_has_it(tmp_path):
    config = of(LayerScale())
    with pytest.raises(ValueError, match="No family can represent .*residual"):
        save_pretrained(tmp_path / "mine", config, random_params(config))
