"""Options that stand in a person's own file, here this one, do all that the library's own do."""

import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from experiments.studies.variants import make_variants
from jaxformer import Transformer, costs, generate, inspect, options, save_pretrained, zoo
from jaxformer import functional as F
from jaxformer.checks import Size
from jaxformer.config import (
    GLU,
    MLP,
    MultiHead,
    Rope,
    TransformerConfig,
    from_json,
    from_python,
    to_json,
)
from jaxformer.config.registry import Option
from jaxformer.data import Batch
from jaxformer.functional.attention import blockwise
from jaxformer.interop.save import choose_family
from jaxformer.layers import empty_cache
from jaxformer.layers.parameters import sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import parameter_metadata, put_batch
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.planning import main as plan
from jaxformer.run.program import print_run
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import SGD, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from jaxformer.training.skip_step import init_skip_state
from tests.compiled_steps import train_step_on
from tests.small_models import jitted_forward, random_params

LLAMA = zoo.get("llama-2-7b").tiny()


@options.activation
def starred_relu(x):
    return 0.8944 * jax.nn.relu(x) ** 2 - 0.4472


def test_an_export_with_an_own_activation_is_refused_in_one_sentence():
    feed_forward = (GLU(hidden_dim=11, activation="starred_relu"),)
    message = "Hugging Face has no name for the activation 'starred_relu'"
    with pytest.raises(ValueError) as refused:
        choose_family(replace(LLAMA, feed_forward=feed_forward), {})
    assert str(refused.value) == f"No family can represent this configuration: {message}."


@dataclass(frozen=True, kw_only=True)
class Blend(options.ScoreBias):
    """Three curves of the distance, of which each head has its blend, times one learned number."""

    reach: float = 6.0

    def parameters(self, num_heads):
        return {
            "gate": options.Parameter((3, num_heads), "features -> heads"),
            "size": options.Parameter((), "", 1.5),
        }

    def __call__(self, params, query_positions, key_positions, *, causal):
        away = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(jnp.float32)
        curves = jnp.stack([1 / (1 + away), jnp.exp(-away / self.reach), jnp.tanh(away)], -1)
        return params["size"] * jnp.einsum("tsf,fn->nts", curves, params["gate"])


@dataclass(frozen=True, kw_only=True)
class SharedBlend(Blend):
    """One blend for all layers."""

    shared_across_layers = True


@dataclass(frozen=True, kw_only=True)
class Nearness(options.ScoreBias):
    """A term of scores without its arithmetic."""

    reach: float = 8.0


@pytest.fixture
def ideas(tmp_path, monkeypatch):
    """Files of a person, which programs find where they are started."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name, text):
        header = "from dataclasses import dataclass\nfrom jaxformer import options\n\n"
        (tmp_path / f"{name}.py").write_text(header + text)

    yield write
    for name in set(sys.modules) - before:
        sys.modules.pop(name, None)
    options.IMPORTED_MODULES.clear()


A_BIAS = """
@dataclass(frozen=True, kw_only=True)
class {name}(options.ScoreBias):
    slope: float = 1.0
"""


STARRED = replace(LLAMA, feed_forward=(GLU(hidden_dim=24, activation="starred_relu"),))


@pytest.mark.parametrize(
    "axes, message",
    [
        ("model -> haeds features", "must be among model, heads, .*; got 'haeds' in 'model -> hae"),
        ("model -> heads", r"gate \(4, 2, 3\) has 3 axes; 'model -> heads' names 2"),
    ],
)
def test_a_parameter_needs_a_word_for_each_of_its_axes(axes, message):
    class Gate(nn.Module):
        runtime: RuntimeConfig = RuntimeConfig()

        @nn.compact
        def __call__(self):
            return sharded_parameter(self, "gate", nn.initializers.zeros, (4, 2, 3), axes)

    with pytest.raises(ValueError, match=message):
        Gate().init(jax.random.key(0))


def test_an_activation_stands_on_the_gate():
    gate, value = np.random.default_rng(0).normal(size=(2, 3, 5))
    into = {"gate": np.float32(gate), "up": np.float32(value)}
    expected = 0.8944 * np.maximum(gate, 0) ** 2 - 0.4472
    actual = GLU(hidden_dim=5, activation="starred_relu").activate(into)
    np.testing.assert_allclose(actual, expected * value, rtol=1e-5, atol=1e-6)
    alone = MLP(hidden_dim=5, activation="starred_relu").activate({"up": into["gate"]})
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
    actual = GLU(hidden_dim=7, activation=name).activate({"gate": gate, "up": value})
    np.testing.assert_array_equal(actual, formula(gate, value))


def test_a_configuration_prints_and_is_read_back():
    assert from_json(TransformerConfig, to_json(STARRED)) == STARRED
    branch = STARRED.feed_forward[0]
    assert from_python(repr(branch), {"GLU": GLU}) == branch
    misspelt = json.loads(to_json(STARRED))
    misspelt["feed_forward"][0]["activation"] = "starred_rely"
    with pytest.raises(ValueError, match="GLU.activation must be one of 'relu', .*'starred_rely'"):
        from_json(TransformerConfig, json.dumps(misspelt))


@pytest.mark.slow
def test_another_definition_in_the_same_file_takes_the_place_of_the_first():
    """Also in programs that were compiled with the first, as in a notebook."""

    def define(factor):
        @options.activation
        def mine(x):
            return factor * x

    define(2)
    run = jax.jit(lambda x: MLP(hidden_dim=3, activation="mine").activate({"up": x}))
    assert float(run(jnp.ones(()))) == 2
    define(3)
    assert float(run(jnp.ones(()))) == 3


def test_a_name_of_another_file_is_refused():
    def silu(x):
        return x

    with pytest.raises(ValueError, match="jaxformer has already registered an activation 'silu'"):
        options.activation(silu)

    def other(x):
        return x

    other.__name__, other.__module__ = "starred_relu", "their_ideas"
    with pytest.raises(
        ValueError, match=r"test_custom_options has already registered an activation 'starred_relu'"
    ):
        options.activation(other)


def test_an_export_refuses_what_its_readers_would_not_know(tmp_path):
    with pytest.raises(ValueError, match="no name for the activation 'starred_relu'"):
        save_pretrained(tmp_path / "mine", STARRED, random_params(STARRED))
    gpt = zoo.get("gpt-2-small").tiny()
    gpt = replace(gpt, feed_forward=(replace(gpt.feed_forward[0], activation="starred_relu"),))
    with pytest.raises(ValueError, match="no name for the activation 'starred_relu'"):
        save_pretrained(tmp_path / "mine", gpt, random_params(gpt))


# Names


def with_positions(*kinds):
    return replace(LLAMA, attention=replace(LLAMA.attention, positions=kinds))


def test_an_imported_bias_prints_and_is_read_back():
    config = with_positions(Nearness(reach=3), Rope())
    assert from_json(TransformerConfig, to_json(config)) == config
    kinds = {"Nearness": Nearness, "Rope": Rope, "MultiHead": MultiHead}
    printed = repr(config.attention.positions)
    assert from_python(printed, kinds) == config.attention.positions
    assert printed.startswith("(Nearness(reach=3.0), Rope(base=10000.0")


def test_an_own_option_has_ranges_and_keeps_its_size():
    @dataclass(frozen=True, kw_only=True)
    class Damped(options.ScoreBias):
        num_terms: Size = 32
        hidden_dim: Size | None = None

    assert with_positions(Damped(hidden_dim=64)).tiny().attention.positions[0].hidden_dim == 64
    with pytest.raises(ValueError, match=r"^Damped\.num_terms must be positive; got 0\.$"):
        Damped(num_terms=0)


def test_flags_know_what_is_imported_and_nothing_else(ideas, capsys):
    ideas("ideas_of_flags", A_BIAS.format(name="Sloped"))
    chosen = ["--model.attention.positions", "Sloped(slope=2)", "None"]
    with pytest.raises(SystemExit):
        parse_run(pretraining.RUNS, "", chosen)
    assert "Sloped" in capsys.readouterr().err
    run = parse_run(pretraining.RUNS, "", ["--import", "ideas_of_flags", *chosen])
    sloped, none = run.model.attention.positions
    assert none is None and repr(sloped) == "Sloped(slope=2.0)"
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse_run(pretraining.RUNS, "", ["--import", "ideas_of_flags", chosen[0], "Slopd()"])
    output = " ".join(capsys.readouterr().err.split())
    assert "Slopd" in output and "Rope" in output and "Sloped" in output


@pytest.mark.parametrize(
    "name", ["nobodys_ideas", "", ".", ".mine", "../mine", "some/mine", "ideas_here.py"]
)
def test_a_name_that_is_of_no_module_is_refused(ideas, name):
    ideas("ideas_here", "")
    with pytest.raises(ValueError, match=rf"--import needs .* package; got '{re.escape(name)}'"):
        options.import_from_flags(["--steps", "3", "--import", name])


@pytest.mark.parametrize(
    "text, message",
    [
        ("\ndef f(:", "line 5 of NAME.py: invalid syntax"),
        ("import nope_nope", "line 4 of NAME.py: ModuleNotFoundError: No module named 'nope_nope'"),
        ("import json\njson.loads('')", "line 5 of NAME.py: Expecting value: line 1 column 1"),
        ("def f():\n    {}['x']\nf()", "line 5 of NAME.py: KeyError: 'x'"),
        ("raise SystemExit(3)", "line 4 of NAME.py: SystemExit: 3"),
        ("text = '\0'", ": source code string cannot contain null bytes"),
    ],
    ids=["syntax", "module", "library", "function", "exit", "no text"],
)
def test_what_an_imported_file_raises_is_told_with_its_line(ideas, request, text, message):
    name = f"ideas_{request.node.callspec.id.replace(' ', '_')}"
    ideas(name, text)
    with pytest.raises(ValueError) as refused:
        options.import_from_flags([f"--import={name}"])
    refusal = str(refused.value)
    assert refusal.startswith(f"--import {name}: ") and message.replace("NAME", name) in refusal
    assert refused.value.__cause__ is not None  # for JAXFORMER_TRACEBACK=1


def test_json_names_what_must_be_imported():
    text = to_json(with_positions(Nearness())).replace("Nearness", "Farness")
    with pytest.raises(ValueError, match=r"'Nearness', .*got type 'Farness'.* \(--import MODULE\)"):
        from_json(TransformerConfig, text)


def test_an_option_of_another_protocol_has_no_place_here():
    class Other(Option, protocol=True):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Elsewhere(Other):
        pass

    text = to_json(with_positions(Nearness())).replace("Nearness", "Elsewhere")
    with pytest.raises(ValueError, match="expected one of .*, got type 'Elsewhere'"):
        from_json(TransformerConfig, text)
    with pytest.raises(ValueError, match="must be Rope or ScoreBias or Tra.*; got .*Elsewhere"):
        with_positions(Elsewhere())


def test_a_file_may_define_a_name_anew_and_another_may_not(ideas):
    ideas("ideas_a", A_BIAS.format(name="Anew") * 2 + "kind = Anew\n")
    options.import_from_flags(["--import", "ideas_a"])
    kind = sys.modules["ideas_a"].kind
    made = from_json(TransformerConfig, to_json(with_positions(kind())))
    assert type(made.attention.positions[0]) is kind
    ideas("ideas_b", A_BIAS.format(name="Anew"))
    with pytest.raises(ValueError, match="ideas_a has already registered an option Anew"):
        options.import_from_flags(["--import", "ideas_b"])


def test_an_option_is_a_frozen_dataclass():
    class Plain(options.ScoreBias):
        pass

    with pytest.raises(ValueError, match="Plain must be a frozen dataclass: .* @dataclass"):
        Plain()


def test_what_an_option_leaves_out_is_named():
    with pytest.raises(NotImplementedError, match=r"Nearness has no parameters\(...\), which the"):
        Nearness().parameters(4)


def test_a_study_has_arms_of_what_is_imported():
    run = replace(pretraining.RUNS["default"], model=LLAMA)
    variants = make_variants("position", run, ["ALiBi", "Nearness(reach=2)"])
    assert [variant.name for variant in variants[1:]] == ["ALiBi", "Nearness(reach=2)"]
    assert variants[2].model.attention.positions == (Nearness(reach=2),)
    names = ["starred_relu", "silu", "starred_relu, gated"]
    branches = {
        variant.name: variant.model.feed_forward[0]
        for variant in make_variants("activation", run, names)
    }
    assert set(names) < set(branches) and len(make_variants("activation", run)) == 9
    assert isinstance(branches["starred_relu, gated"], GLU)
    with pytest.raises(ValueError, match="Axis position has no variant 'nearness'. Variants: "):
        make_variants("position", run, ["nearness"])


def test_a_plan_counts_a_configuration_of_your_own(tmp_path, capsys):
    wide = replace(STARRED, feed_forward=(GLU(hidden_dim=128, activation="starred_relu"),))
    (tmp_path / "mine.json").write_text(to_json(wide))
    plan([str(tmp_path / "mine.json"), "--devices", "1", "--length", "64"])
    assert f"{costs.num_parameters(wide):,}" in capsys.readouterr().out


# A bias of scores in the model

TEXT, ROWS = 24, 8
BLENDED = replace(with_positions(Blend(), Rope()), feed_forward=STARRED.feed_forward)
SHARED = with_positions(SharedBlend(reach=2.0), Rope())
KINDS = {"of each layer": BLENDED, "shared": SHARED}
by_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def texts():
    """Rows of two documents each."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, LLAMA.vocab_size - 1, (ROWS, TEXT + 1), np.int32)
    ends = rng.integers(5, TEXT - 5, (ROWS, 1))
    places = np.broadcast_to(np.arange(TEXT), (ROWS, TEXT))
    positions = np.where(places < ends, places, places - ends).astype(np.int32)
    segments = 1 + np.int32(places >= ends)
    return Batch(tokens[:, :-1], tokens[:, 1:], positions, segments, np.ones((ROWS, TEXT), bool))


@by_kind
@pytest.mark.slow
def test_a_bias_by_blocks_is_that_of_whole_matrices(config, monkeypatch):
    """In packed rows and grouped heads, values and all gradients; blocks of 8 queries and keys."""
    monkeypatch.setattr(
        blockwise, "DEFAULT_BLOCK_SIZE", dict.fromkeys(blockwise.DEFAULT_BLOCK_SIZE, 8)
    )
    batch, results = texts(), {}
    for implementation in ("xla", "blockwise"):
        model = Transformer(config, attention_implementation=implementation)

        @jax.jit
        @jax.value_and_grad
        def loss(params, model=model):
            options = {"positions": batch.positions, "segments": batch.segments}
            logits = model.apply({"params": params}, jnp.asarray(batch.tokens), **options)
            return F.cross_entropy(logits, jnp.asarray(batch.targets))

        results[implementation] = loss(random_params(config))
    (value, whole), (other, by_blocks) = results.values()
    np.testing.assert_allclose(value, other, rtol=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(jax.device_get(whole)))
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(by_blocks), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5 * largest)
    place = whole["decoder"] if config is SHARED else whole["decoder"]["layers"]["layer_0"]
    assert all(float(np.abs(x).max()) > 1e-3 * largest for x in place["relative_bias"].values())


@by_kind
@pytest.mark.slow
def test_a_bias_with_a_cache_is_that_of_the_whole_text(config):
    tokens, params = texts().tokens[:2, :12], random_params(config)
    whole = jitted_forward(config)(params, tokens)
    cache, parts = empty_cache(config, (2,), 12), []
    for part in np.split(tokens, [7, 8, 9, 10, 11], axis=1):
        logits, cache = jitted_forward(config)(params, part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)


@lru_cache
def assert_cached_is_whole(config):
    """The last of nine tokens, read with a cache and written by `generate`, is the whole text's."""
    tokens, params = texts().tokens[:2, :9], random_params(config)

    @jax.jit
    def apply(tokens, cache):
        return Transformer(config).apply({"params": params}, tokens, cache=cache)

    _, cache = apply(tokens[:, :8], empty_cache(config, (2,), 9))
    last, _ = apply(tokens[:, 8:], cache)
    whole = jitted_forward(config)(params, tokens)
    np.testing.assert_allclose(last[:, 0], whole[:, -1], atol=1e-5)
    new = generate(config, params, tokens, max_new_tokens=1)
    np.testing.assert_array_equal(new[:, -1], jnp.argmax(whole[:, -1], axis=-1))


def after_a_step(config, sizes, params=None):
    """Loss, and parameters after a step by the whole gradient."""
    rule = OptimizerConfig(schedule=Constant(peak=1.0), optimizer=SGD(momentum=0.0), clip_norm=None)
    optimizer = make_optimizer(rule, 3, parameter_metadata(config))
    its = train_step_on(config, dict(sizes), optimizer, rows=ROWS, length=TEXT)
    params = random_params(config) if params is None else params
    state = step.TrainState(np.int32(0), {}, params, optimizer.init(params), init_skip_state())
    state = jax.tree.map(lambda x, to: jax.device_put(np.array(x), to.sharding), state, its.state)
    state, metrics = its.compiled(state, put_batch(texts(), its.mesh, ROWS))
    return float(metrics.loss), jax.device_get(state.params)


@pytest.mark.parametrize(
    "sizes",
    [dict(data=2, fsdp=2, tensor=2), dict(context=2, tensor=2, data=2)],
    ids=["fsdp and tensor", "ring"],
)
@by_kind
@pytest.mark.slow
def test_a_bias_trains_on_eight_devices_as_on_one(config, sizes):
    loss, params = after_a_step(config, tuple(sizes.items()))
    expected, wanted = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), params, wanted)


def test_muon_takes_a_bias_by_its_axes_and_costs_count_it():
    layer = parameter_metadata(BLENDED)["decoder"]["layers"]["layer_0"]["relative_bias"]
    assert (layer["gate"].role, layer["gate"].input_and_output_axes) == ("kernel", ((1,), (2,)))
    assert layer["gate"].partition_spec({"tensor": 2}) == P(None, None, "tensor")
    assert (layer["size"].role, layer["size"].input_and_output_axes) == ("vector", ((), ()))
    table = parameter_metadata(SHARED)["decoder"]["relative_bias"]["gate"]
    assert (table.role, table.input_and_output_axes) == ("kernel", ((0,), (1,)))
    for config in KINDS.values():
        count = sum(x.size for x in jax.tree.leaves(random_params(config)))
        assert costs.num_parameters(config) == count


def test_what_a_bias_leaves_out_is_named_by_the_model():
    with pytest.raises(NotImplementedError, match=r"Nearness has no parameters\(...\), which the"):
        parameter_metadata(with_positions(Nearness()))

    @dataclass(frozen=True, kw_only=True)
    class Silent(options.ScoreBias):
        def parameters(self, num_heads):
            return {}

    with pytest.raises(
        NotImplementedError, match=r"Silent has no __call__\(...\), which attention"
    ):
        parameter_metadata(with_positions(Silent()))


@pytest.mark.slow
def test_a_bias_is_looked_at_as_those_of_the_library():
    params = random_params(BLENDED)
    bias = inspect.position_bias(BLENDED, params, 5)
    bias_params = params["decoder"]["layers"]["layer_0"]["relative_bias"]
    at = jnp.arange(5)
    expected = Blend()(jax.tree.map(lambda x: x[0], bias_params), at, at, causal=True)
    np.testing.assert_allclose(bias, expected, rtol=1e-6)
    curve = inspect.score_by_distance(BLENDED, 5, params=params)
    np.testing.assert_allclose(curve, expected[:, -1, ::-1], rtol=1e-6)
