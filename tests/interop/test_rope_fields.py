"""Rotary positions in config.json: the same in old words and in new."""

import math

import pytest

from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from tests.interop.numpy_folders import LLAMA3, YARN, config_from_fields


def rope(kind="llama", **fields):
    return config_from_fields(kind, **fields).attention.positions[0]


@pytest.mark.parametrize(
    "old, new",
    [
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 4}},
            {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "beta_fast": 4},
        ),
    ],
)
def test_old_and_new_fields_say_the_same(old, new):
    length = {"max_position_embeddings": old.get("max_position_embeddings", 128), "head_dim": 4}
    actual = rope(**{**old, **length})
    assert actual == rope(rope_parameters=new, **length)
    assert actual == rope(rope_parameters=new, **{**old, **length})
    assert type(actual.scaling).__name__ == {
        "default": "NoneType",
        "linear": "LinearScaling",
        "dynamic": "DynamicNTK",
        "llama3": "Llama3Scaling",
        "yarn": "Yarn",
    }.get(new["rope_type"])


def test_lengths_and_factors_of_scalings():
    scaling = {"type": "dynamic", "factor": 2.0}
    dynamic = rope(head_dim=4, max_position_embeddings=16, rope_scaling=scaling)
    assert (dynamic.scaling.factor, dynamic.scaling.original_max_length) == (2.0, 16)
    yarn = rope(rope_scaling={"type": "yarn", **YARN}).scaling
    assert (yarn.beta_fast, yarn.beta_slow, yarn.attention_factor) == (32, 1, None)
    assert rope(rope_scaling={"type": "yarn", **YARN, "attention_factor": 1.5}).scaling == (
        type(yarn)(factor=4.0, original_max_length=16, attention_factor=1.5)
    )
    scales = {"mscale": 1.0, "mscale_all_dim": 0.5}
    expected = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    actual = rope(rope_scaling={"type": "yarn", **YARN, **scales}).scaling.attention_factor
    assert math.isclose(actual, expected, rel_tol=1e-12)
    short = rope(rope_parameters={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=32)
    assert short.scaling.original_max_length == 32


def test_longrope_takes_its_growth_from_the_lengths_or_from_factor():
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    kinds = {"type": "su", **factors}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    scaling = rope("phi3", rope_scaling=kinds, **lengths).scaling
    assert (scaling.short_factors, scaling.long_factors) == ((1.0,), (2.0,))
    assert (scaling.original_max_length, scaling.max_length) == (16, 64)
    assert scaling.attention_factor is None
    same = rope("phi3", rope_scaling={**kinds, "factor": 4.0}, **lengths).scaling
    assert same == scaling
    other = rope("phi3", rope_scaling={**kinds, "factor": 2.0}, **lengths).scaling
    expected = math.sqrt(1 + math.log(2) / math.log(16))
    assert math.isclose(other.attention_factor, expected, rel_tol=1e-12)


def test_scalings_that_are_not_built():
    with pytest.raises(ValueError, match=r"rope_scaling\.type = 'axial': expected one of"):
        rope(rope_scaling={"type": "axial", "factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_scaling\.factor = 2.0: .* it must be 1\."):
        rope(rope_scaling={"type": "proportional", "factor": 2.0})
    section = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="'proportional': this family rotates a fraction of each"):
        rope("stablelm", rope_parameters=section)
    with pytest.raises(ValueError, match=r"rope_scaling\.factor = None: expected a value of type"):
        rope(rope_scaling={"type": "linear"})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN, "beta_fast": 4.0, "attention_factor": 1.5},
        {"rope_type": "yarn", **YARN, "beta_fast": 4.0, "truncate": False},
        {"rope_type": "proportional", "partial_rotary_factor": 0.7},
    ],
)
def test_both_kinds_of_fields_are_written(scaling):
    """A reader of old files and one of new files find the same."""
    config = config_from_fields("llama", rope_theta=5e5, rope_scaling=scaling)
    written = FAMILIES["llama"].write(config)
    assert written["rope_theta"] == 5e5
    expected = {"beta_slow": 1.0, **scaling} if scaling["rope_type"] == "yarn" else scaling
    assert written["rope_scaling"] == {"type": scaling["rope_type"], **expected}
    assert written["rope_parameters"] == {"rope_theta": 5e5, **expected}
    for dropped in ("rope_parameters", "rope_scaling"):
        remaining = {name: x for name, x in written.items() if name != dropped}
        assert build_config(FAMILIES["llama"], remaining, where="") == config


@pytest.mark.parametrize("kind", ["llama", "ministral3"])
def test_a_training_length_that_is_none(kind):
    section = {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 0}
    if kind == "ministral3":
        section["llama_4_scaling_beta"] = 0.1
    message = r"rope_parameters\.original_max_position_embeddings = 0: expected 1 or more\."
    with pytest.raises(ValueError, match=message):
        config_from_fields(kind, rope_parameters=section)


def test_where_both_stand_the_old_one_counts():
    actual = rope(
        rope_theta=2e4,
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 3e4},
    )
    assert (actual.base, actual.scaling.factor) == (2e4, 2.0)


def test_gemma_3_has_two():
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    fields = {"num_hidden_layers": 6, "sliding_window": 3}
    config = config_from_fields("gemma3_text", **fields, **old)
    local, full = config.attention.positions[0], config.attention.positions[5]
    assert (local.base, local.scaling) == (2e4, None)
    assert (full.base, full.scaling.factor) == (5e5, 8.0)
    assert config_from_fields("gemma3_text", **fields, rope_parameters=new) == config
    written = FAMILIES["gemma3_text"].write(config)
    assert written["rope_parameters"] == new
    assert {name: written[name] for name in old} == old
    new["full_attention"]["extra"] = 1
    message = r"here: 1 .*:\n  rope_parameters\.full_attention\.extra = 1: unknown attribute"
    with pytest.raises(ValueError, match=message):
        config_from_fields("gemma3_text", **fields, rope_parameters=new)


@pytest.mark.parametrize("order", ["SFSS", "SFSSS", "SFFF", "FSSF", "SSF"])
@pytest.mark.parametrize("kind", ["olmo3", "gemma3_text"])
def test_ropes_of_layers_follow_their_kind_in_any_order(kind, order):
    types = {"F": "full_attention", "S": "sliding_attention"}
    config = config_from_fields(
        kind,
        num_hidden_layers=len(order),
        layer_types=[types[x] for x in order],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    layers = [config.layers[i] for i in range(len(order))]
    bases = {"F": 1e6, "S": 1e4}
    assert [layer.positions.base for layer in layers] == [bases[x] for x in order]
    assert [layer.window is not None for layer in layers] == [x == "S" for x in order]
