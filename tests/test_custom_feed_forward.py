"""What a layer makes of each token, from a person's own file: here this one."""

import shlex
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer, costs, generate, options, save_pretrained, zoo
from jaxformer.config import GLU, Dropout, MoE, TransformerConfig, from_json, to_json
from jaxformer.layers import FeedForward, RuntimeConfig
from jaxformer.layers.runtime import MeshAxes
from jaxformer.parallel import check_divisible, parameter_metadata
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.program import print_run
from tests.small_models import jitted_forward, random_params
from tests.test_custom_options import after_a_step, texts

LLAMA = zoo.get("llama-2-7b").tiny()


@dataclass(frozen=True, kw_only=True)
class HandWritten(options.FeedForward):
    """SwiGLU."""

    hidden_dim: int = 24

    def parameters(self, model_dim):
        into = options.Parameter((model_dim, self.hidden_dim), "model -> hidden")
        out = options.Parameter((self.hidden_dim, model_dim), "hidden -> model")
        return {"gate": into, "up": into, "down": out}

    def __call__(self, params, x):
        return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]

    def flops(self, model_dim, length):
        return 3 * 2 * length * model_dim * self.hidden_dim


@dataclass(frozen=True, kw_only=True)
class Soft(options.FeedForward):
    """Every expert sees every token, by as much as the token asks."""

    num_experts: int = 3

    def parameters(self, model_dim):
        return {
            "router": options.Parameter((model_dim, self.num_experts), "model -> features"),
            "bias": options.Parameter((self.num_experts, 8), "experts hidden", 0.1),
            "into": options.Parameter((self.num_experts, model_dim, 8), "experts model -> hidden"),
            "out": options.Parameter((self.num_experts, 8, model_dim), "experts hidden -> model"),
        }

    def __call__(self, params, x):
        weights = jax.nn.softmax(x @ params["router"])
        hidden = jnp.einsum("...d,edh->...eh", x, params["into"])
        hidden = jnp.tanh(hidden + params["bias"].reshape((1,) * (x.ndim - 1) + (3, -1)))
        return jnp.einsum("...e,...eh,ehd->...d", weights, hidden, params["out"])


@dataclass(frozen=True, kw_only=True)
class Whole(options.FeedForward):
    """One matrix, of which every device along `tensor` has all."""

    def parameters(self, model_dim):
        return {"kernel": options.Parameter((model_dim, model_dim), "model -> model")}

    def __call__(self, params, x):
        return jnp.sin(x @ params["kernel"])


def of(*branches, **fields):
    return replace(LLAMA, feed_forward=branches, num_layers=len(branches) + 1, **fields)


OWN = of(HandWritten())
CONFIGS = {
    "serial": OWN,
    "soft, beside ours": of(Soft(), GLU(hidden_dim=16)),
    "soft, parallel": of(Soft(), block="parallel"),
    "whole, one norm": of(Whole(), HandWritten(), block="parallel_shared_norm"),
}
TRAINED = [*((name, "fsdp") for name in CONFIGS), ("serial", "context")]


@pytest.mark.parametrize("name, axis", TRAINED)
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(name, axis):
    config = CONFIGS[name]
    actual = after_a_step(config, (("data", 2), (axis, 2), ("tensor", 2)))
    expected = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), actual[1], expected[1])


@pytest.mark.slow
def test_it_computes_what_the_librarys_own_does():
    """From the same numbers: logits, tokens and counts."""
    library, tokens = of(GLU(hidden_dim=24)), texts().tokens[:2]
    params = random_params(library)
    layer = params["decoder"]["layers"]["layer_0"]
    layer["feed_forward"] = {name: x["kernel"] for name, x in layer["feed_forward"].items()}
    expected = jitted_forward(library)(random_params(library), tokens)
    np.testing.assert_allclose(jitted_forward(OWN)(params, tokens), expected, atol=1e-5)
    prompt = dict(prompt=tokens[:, :5], max_new_tokens=4)
    wanted = generate(library, random_params(library), **prompt)
    np.testing.assert_array_equal(generate(OWN, params, **prompt), wanted)
    for count in (costs.num_parameters, lambda c: costs.forward_flops(c, 8)):
        assert count(OWN) == count(library)
    actual, wanted = (costs.activation_bytes(c, 2, 8, remat="dots") for c in (OWN, library))
    assert actual == wanted


def test_its_matrices_are_known():
    layer = parameter_metadata(OWN)["decoder"]["layers"]["layer_0"]["feed_forward"]
    assert {x.role for x in layer.values()} == {"kernel"}
    assert layer["down"].partition_spec({"tensor": 2, "fsdp": 2}) == P(None, "tensor", "fsdp")
    square = parameter_metadata(of(Whole()))["decoder"]["layers"]["layer_0"]["feed_forward"][
        "kernel"
    ]
    assert square.partition_spec({"tensor": 2, "fsdp": 2}) == P(None, "fsdp", None)
    assert OWN.tiny().feed_forward == OWN.feed_forward


def test_it_prints_is_read_back_and_is_a_flag():
    assert from_json(TransformerConfig, to_json(OWN)) == OWN
    run = parse_run(
        pretraining.RUNS, "", ["--model.feed-forward", "HandWritten(hidden_dim=8)", "Soft()"]
    )
    assert run.model.feed_forward == (HandWritten(hidden_dim=8), Soft())
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run


def test_what_it_leaves_out_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Hollow(options.FeedForward):
        pass

    init = Transformer(of(Hollow())).init
    with pytest.raises(NotImplementedError, match=r"Hollow has no parameters\(...\), which the mo"):
        jax.eval_shape(init, jax.random.key(0), jnp.arange(5))

    with pytest.raises(NotImplementedError, match=r"Soft has no flops\(...\), which costs needs"):
        costs.forward_flops(of(Soft()), 8)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="HandWritten has no hidden dropout.*; got 0.1"):
        of(HandWritten(), dropout=Dropout(feed_forward=0.1))
    with pytest.raises(ValueError, match="HandWritten's hidden 24 is not divisible by tensor 16"):
        check_divisible(OWN, {"tensor": 16})
    with pytest.raises(ValueError, match="expert 2, but the model has no experts"):
        check_divisible(of(Soft()), {"expert": 2})
    mode = RuntimeConfig(mesh_axes=MeshAxes(expert="expert"))
    with pytest.raises(ValueError, match="cannot be sharded; got the mesh axis 'expert'"):
        FeedForward(OWN, Soft(), mode).init(jax.random.key(0), jnp.ones((1, 3, 8)))
    with pytest.raises(
        ValueError,
        match=r"No family can represent .* No family near it supports this feed_forward\[0\]",
    ):
        save_pretrained(tmp_path / "mine", OWN, random_params(OWN))
    with pytest.raises(ValueError, match="must be MLP or GLU or ClampedGEGLU; got HandWritten"):
        MoE(expert=HandWritten(), num_experts=2)
