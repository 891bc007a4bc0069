"""Options that stand in a person's own file, here this one, do all that the library's own do."""

import json
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments import pretrain
from experiments.command_line import parse
from experiments.studies.arms import arms_of
from jaxformer import Transformer, costs, options, save_pretrained, zoo
from jaxformer import functional as F
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
from jaxformer.config.option import Option
from jaxformer.layers.feed_forward import activate
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import parameter
from jaxformer.parallel.__main__ import main as plan
from tests.models import parameters

LLAMA = zoo.get("llama-2-7b").tiny()


@options.activation
def star_relu(x):
    return 0.8944 * jax.nn.relu(x) ** 2 - 0.4472


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


A_BIAS = """
@dataclass(frozen=True, kw_only=True)
class {name}(options.ScoreBias):
    slope: float = 1.0
"""


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


def test_flags_know_what_is_imported_and_nothing_else(ideas, capsys):
    ideas("ideas_of_flags", A_BIAS.format(name="Sloped"))
    chosen = ["--model.attention.positions", "Sloped(slope=2)", "None"]
    with pytest.raises(SystemExit):
        parse(pretrain.RUNS, "", chosen)
    assert "Sloped" in capsys.readouterr().err
    run = parse(pretrain.RUNS, "", ["--import", "ideas_of_flags", *chosen])
    sloped, none = run.model.attention.positions
    assert none is None and repr(sloped) == "Sloped(slope=2.0)"
    with pytest.raises(SystemExit):
        parse(pretrain.RUNS, "", ["--import", "ideas_of_flags", chosen[0], "Slopd()"])
    said = " ".join(capsys.readouterr().err.split())
    assert "Slopd" in said and "Rope" in said and "Sloped" in said


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="--import takes the name of a module .*'nobodys_ideas'"):
        options.imported(["--import", "nobodys_ideas"])
    with pytest.raises(ValueError, match="got ''"):
        options.imported(["--steps", "3", "--import"])


def test_a_mistake_inside_the_file_is_shown_as_it_is(ideas):
    ideas("ideas_that_need_more", "import a_module_that_nobody_has\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        options.imported(["--import=ideas_that_need_more"])


def test_json_names_what_must_be_imported():
    text = to_json(with_positions(Nearness())).replace("Nearness", "Farness")
    with pytest.raises(ValueError, match=r"'Nearness', .*got type 'Farness'.* \(--import\)"):
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
    import ideas_a

    made = from_json(TransformerConfig, to_json(with_positions(ideas_a.kind())))
    assert type(made.attention.positions[0]) is ideas_a.kind
    ideas("ideas_b", A_BIAS.format(name="Anew"))
    with pytest.raises(ValueError, match="ideas_a has an option Anew already"):
        import ideas_b  # noqa: F401


def test_an_option_is_a_frozen_dataclass():
    class Plain(options.ScoreBias):
        pass

    with pytest.raises(ValueError, match="Plain is .* frozen dataclass: write @dataclass"):
        Plain()


def test_what_an_option_leaves_out_is_named():
    with pytest.raises(NotImplementedError, match=r"Nearness has no parameters\(...\), which the"):
        Nearness().parameters(4)


def test_a_study_has_arms_of_what_is_imported():
    run = replace(pretrain.RUNS["default"], model=LLAMA)
    found = arms_of("position", run, ["ALiBi", "Nearness(reach=2)"])
    assert [arm.name for arm in found[1:]] == ["ALiBi", "Nearness(reach=2)"]
    assert found[2].model.attention.positions == (Nearness(reach=2),)
    names = [arm.name for arm in arms_of("activation", run)]
    assert {"star_relu", "star_relu, gated"} <= set(names)
    with pytest.raises(ValueError, match="Axis position has no arm 'nearness'. Arms: "):
        arms_of("position", run, ["nearness"])


def test_a_plan_counts_a_configuration_of_your_own(tmp_path, capsys):
    wide = replace(STARRED, feed_forward=(GLU(hidden_dim=128, activation="star_relu"),))
    (tmp_path / "mine.json").write_text(to_json(wide))
    plan(["plan", str(tmp_path / "mine.json"), "--devices", "1", "--length", "64"])
    assert f"{costs.parameters(wide):,}" in capsys.readouterr().out
