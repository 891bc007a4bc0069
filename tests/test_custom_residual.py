"""How a branch joins the residual stream, from a person's own file: here this one."""

import re
import shlex
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs, inspect, options, save_pretrained, zoo
from jaxformer import config as c
from jaxformer.config import TransformerConfig, from_json, to_json
from jaxformer.inspect import At, Replace
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.program import print_run
from tests.small_models import jitted_forward, random_params
from tests.test_custom_options import texts

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


@dataclass(frozen=True, kw_only=True)
class TwoStreams(options.Residual):
    """A branch reads a mean of two streams, weighted by the token, and writes to one of them."""

    def parameters(self, model_dim):
        return {"gate": options.Parameter((model_dim, 2), "model -> features")}

    def model_parameters(self, model_dim):
        return {"shift": options.Parameter((model_dim,), "model", 0.1)}

    def begin(self, x, params):
        return jnp.stack([x, x + jnp.broadcast_to(params["shift"], x.shape)], axis=-2)

    def read(self, state, params, place):
        weights = jax.nn.softmax(state[..., 0, :] @ params["gate"])
        return jnp.einsum("...n,...nd->...d", weights, state), place.layer % 2

    def write(self, state, held, y, params, place):
        is_written = jnp.broadcast_to(jnp.arange(2)[:, None] == held, state.shape)
        return jnp.where(is_written, state + y[..., None, :], state)

    def end(self, state, params):
        x = state.sum(-2)
        return x - jnp.broadcast_to(params["shift"], x.shape)


@dataclass(frozen=True, kw_only=True)
class DenseFormer(options.Residual):
    """Each layer reads a weighted sum of all outputs before it. Pagliardini et al., 2024.
    arXiv:2402.02622, section 3."""

    per = "layer"
    num_layers: int = 3

    def parameters(self, model_dim):
        return {"weights": options.Parameter((self.num_layers,), "features", 0.5)}

    def begin(self, x, params):
        return x, jnp.zeros((*x.shape[:-1], self.num_layers, x.shape[-1]), x.dtype)

    def read(self, state, params, place):
        x, before = state
        is_past = jnp.arange(self.num_layers) <= place.layer
        weights = jnp.where(is_past, params["weights"], 0)
        return x + jnp.einsum("n,...nd->...d", weights, before), None

    def write(self, state, held, y, params, place):
        _, before = state
        is_here = (jnp.arange(self.num_layers) == place.layer)[:, None]
        here = jnp.broadcast_to(is_here, before.shape)
        return y, jnp.where(here, y[..., None, :], before)

    def end(self, state, params):
        return state[0]


def of(option, **fields):
    return replace(LLAMA, **{"residual": option, "num_layers": 2, **fields})


@pytest.mark.parametrize("block", ["serial", "parallel", "parallel_shared_norm"])
@pytest.mark.slow
def test_a_sum_is_what_there_is_without_an_option(block):
    library, tokens = replace(LLAMA, block=block), texts().tokens[:2]
    params = random_params(library)
    actual = jitted_forward(replace(library, residual=Total()))(params, tokens)
    np.testing.assert_array_equal(actual, jitted_forward(library)(params, tokens))


def test_it_is_counted_printed_read_back_and_a_flag():
    config, plain = of(LayerScale()), of(None)
    extra = costs.num_parameters(config) - costs.num_parameters(plain)
    assert extra == 2 * 2 * LLAMA.model_dim  # two layers of two branches
    assert from_json(TransformerConfig, to_json(config)) == config == config.tiny().tiny()
    assert eval(repr(config), {**vars(c), "LayerScale": LayerScale}) == config
    run = parse_run(pretraining.RUNS, "", ["--model.residual", "LayerScale(initial_scale=0.5)"])
    assert run.model.residual == LayerScale(initial_scale=0.5)
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run


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


@dataclass(frozen=True, kw_only=True)
class NoEnd(TwoStreams):
    """Gives all streams to the final norm."""

    def end(self, state, params):
        return state


@dataclass(frozen=True, kw_only=True)
class OfNoToken(TwoStreams):
    """Its state has no tokens."""

    def begin(self, x, params):
        return {"stream": x, "count": 0}


@dataclass(frozen=True, kw_only=True)
class ReadsAll(TwoStreams):
    """Lets a branch read all streams, as if they were tokens."""

    def read(self, state, params, place):
        return state, state


WRONG = {
    "all streams at once": (ReadsAll(), r"ReadsAll.read must return .*got \(5, 2, 64\)"),
    "an end of streams": (NoEnd(), r"NoEnd.end must return \[rows, tokens, width\] .*\(5, 2, 64\)"),
    "a state of no token": (OfNoToken(), r"OfNoToken.begin must return arrays .*got \(\)"),
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


@pytest.mark.slow
def test_a_state_with_history_by_hand():
    """Layer after layer with the block of a plain model, and its sum of what came before."""
    config, tokens = of(DenseFormer(), num_layers=3), jnp.asarray(texts().tokens[:1, :7])
    params = random_params(config)
    trace = inspect.trace(config, params, tokens).decoder
    x, outputs = np.asarray(trace.embeddings), []
    plain = replace(config, residual=None, num_layers=1)
    for i, layer in enumerate(inspect.unstack_layers(params["decoder"])):
        weights = layer["layer_residual"]["weights"]
        x = x + sum((weights[j] * y for j, y in enumerate(outputs)), np.zeros_like(x))
        rest = {name: p for name, p in layer.items() if name != "layer_residual"}
        one = {"layer_0": jax.tree.map(lambda p: p[None], rest)}
        change = {At("embeddings"): Replace(x)}
        its = {**params, "decoder": {**params["decoder"], "layers": one}}
        run = inspect.run(plain, its, tokens, patches=change, record=("stream",))
        x = np.asarray(run.values["stream"][0])
        outputs.append(x)
        np.testing.assert_allclose(trace.stream[i], x, atol=2e-5)


@pytest.mark.slow
def test_streams_are_named_recorded_and_patched():
    config, tokens = of(TwoStreams(), num_layers=3), texts().tokens[:1, :7]
    params = random_params(config)
    rows = {(row.name, row.shape) for row in inspect.names(config)}
    width = LLAMA.model_dim
    assert ("stream", ("T", 2, width)) in rows and ("read_by_attention", ("T", width)) in rows
    run = inspect.run(config, params, tokens, record=("stream", "read_by_feed_forward"))
    state = run.values["stream"][1]  # after layer 1; layer 2 writes to the first stream
    gate = inspect.unstack_layers(params["decoder"])[2]["feed_forward_residual"]["gate"]
    written = run.values["stream"][2] - state
    np.testing.assert_allclose(written[..., 1, :], 0, atol=1e-6)
    assert np.abs(written[..., 0, :]).max() > 0.01 and gate.shape == (width, 2)
    other = inspect.run(config, random_params(config, 0.5), tokens, record=("stream",))
    patches = {At("stream", layer=1): Replace(other)}
    patched = inspect.run(config, params, tokens, patches=patches, record=())
    assert np.abs(patched.logits - run.logits).max() > 1e-3
    history = of(DenseFormer(), num_layers=3)
    with pytest.raises(ValueError, match="A lens reads one residual stream, but DenseFormer hands"):
        inspect.logit_lens(history, random_params(history), tokens)
    with pytest.raises(ValueError, match="branches are joined by TwoStreams"):
        inspect.logit_attribution(config, params, tokens, tokens)


def test_work_and_memory_of_streams():
    """Two streams: a product of width x 2 for each branch, and one more stream for each layer."""
    streams, plain = of(TwoStreams(), num_layers=3), of(None, num_layers=3)
    width = LLAMA.model_dim
    flops = [costs.forward_flops(config, 10) for config in (streams, plain)]
    assert flops[0] - flops[1] == 3 * 2 * 2 * 10 * width * 2
    kept = [costs.activation_bytes(x, 4, 10, bytes_per_number=2) for x in (streams, plain)]
    assert kept[0] - kept[1] == 3 * 4 * 10 * width * 2


def test_a_sum_scaled_by_depth_is_the_sum_of_its_parts_over_the_root_of_their_number():
    """In a loop over layers, whose number it reads; as the released code of Beam."""
    config, tokens = of(c.DepthScaledSum(), num_layers=3), texts().tokens[:1, :7]
    trace = inspect.trace(config, random_params(config), tokens).decoder
    parts = np.stack([trace.branches["attention"], trace.branches["feed_forward"]], axis=1)
    total = np.asarray(trace.embeddings) + np.cumsum(parts.sum(axis=1), axis=0)
    counts = np.array([3, 5, 7]).reshape(3, 1, 1, 1)
    np.testing.assert_allclose(trace.stream, total / np.sqrt(counts), atol=1e-5)


STREAMS_REFUSED = {
    "a scalar of the stream": (
        dict(layer_scalar=True),
        "layer_scalar needs one stream, which TwoStreams has not",
    ),
    "embeddings without a home": (
        dict(layer_embedding=c.LayerEmbedding(dim=3)),
        "TwoStreams.of_branch must have an option for the branch 'layer_embedding'; got None",
    ),
    "a norm of the sum": (dict(norm_placement="post"), "TwoStreams is no single stream, so norm_p"),
    "sums one by one": (
        dict(block="parallel", norm_placement="sandwich"),
        "TwoStreams reads once for all parallel branches, so block='parallel' needs norm_placement",
    ),
}


@pytest.mark.parametrize("fields, message", STREAMS_REFUSED.values(), ids=STREAMS_REFUSED)
def test_streams_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        of(TwoStreams(), **fields)
