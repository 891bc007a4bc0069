"""Fields of config.json: each reads what it writes, and says what it cannot."""

import math

import pytest

from jaxformer import config as c
from jaxformer.interop import config_fields as f
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.experts import DenseFirst
from jaxformer.interop.families.mixers import BothTypes, LayerNumbers
from jaxformer.interop.families.windows import PerLayer, Windows, all_but_every, from_layer
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

MODEL = like(LLAMA, num_heads=6, head_dim=4, norm=c.RMSNorm(eps=1e-3))
FIELDS = (
    f.Field("width", "model_dim"),
    f.Field("inner.eps", "norm.eps", 1e-6),
    f.Field("act", "feed_forward.activation", "silu"),
    f.Field("parallel", "block", False, choices={False: "serial", True: "parallel"}),
    f.BiasesField("qkv_bias", layers=("query", "key", "value")),
    f.PresenceField("qk_norm", "attention.qk_norm", part=c.QKNorm()),
    f.Field("inner.eps", "attention.qk_norm.norm.eps", 1e-6),
    f.Derived("embedding.scale", lambda options: math.sqrt(options["model_dim"])),
)
FAMILY = Family("tiny", "Tiny", MODEL, FIELDS, decoder_mapping())


def test_a_family_reads_what_it_writes():
    values = {
        "width": 16,
        "inner": {"eps": 0.25},
        "act": "gelu_new",
        "parallel": True,
        "qkv_bias": True,
        "qk_norm": True,
    }
    reader = ConfigReader(values)
    config = FAMILY.read(reader)
    assert not reader.unsupported()
    assert (config.model_dim, config.block, config.embedding.scale) == (16, "parallel", 4.0)
    assert config.norm.eps == config.attention.qk_norm.norm.eps == 0.25
    assert config.feed_forward[0].activation == "gelu_tanh"
    assert FAMILY.write(config) == values | {"act": "gelu_pytorch_tanh"}


def test_options_of_an_absent_part_have_no_effect():
    config = FAMILY.read(ConfigReader({"width": 16, "qk_norm": False}))
    assert config.attention.qk_norm is None
    assert FAMILY.write(config)["inner"] == {"eps": 1e-6}


def test_a_field_of_another_kind_cannot_be_written():
    assert f.Field("limit", "feed_forward.limit", 7.0).write(MODEL) is None
    other = like(LLAMA, feed_forward=(c.MoE(expert=c.GLU(hidden_dim=2), num_experts=2),))
    assert FAMILY.write(other) is None


def test_a_change_sees_the_option_that_the_fields_have_set():
    class Twice:
        def read(self, reader, options):
            return {"attention": f.Change(lambda attention: (attention, c.NoAttention()))}

        def write(self, model):
            return {}

    fields = (f.Field("n", "attention.num_heads"), Twice())
    family = Family("tiny", "Tiny", MODEL, fields, decoder_mapping())
    config = family.read(ConfigReader({"n": 3}))
    assert [type(x).__name__ for x in config.attention] == ["MultiHead", "NoAttention"]
    assert config.attention[0].num_heads == 3


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        (f.Fixed("x", (1, 2)), 3, "x = 3: not supported by jaxformer; it must be 1 or 2."),
        (f.Repeated("x", lambda options: 4, "it repeats y"), 5, "x = 5: it repeats y"),
        (FIELDS[3], "no", "parallel = 'no': expected a value of type bool."),
    ],
)
def test_what_a_field_refuses(field, value, problem):
    reader = ConfigReader({"parallel" if field is FIELDS[3] else "x": value})
    field.read(reader, {})
    assert reader.problems[0].startswith(problem)


def test_a_path_without_option_is_named():
    with pytest.raises(TypeError, match="QKNorm has no option 'epsilon'"):
        f.with_options(MODEL, {"attention.qk_norm": c.QKNorm(), "attention.qk_norm.epsilon": 1})


def test_a_field_that_is_not_written():
    row = f.NotWritten(f.Field("width", "model_dim"))
    assert row.read(ConfigReader({"width": 3}), {}) == {"model_dim": 3}
    assert row.write(MODEL) == {}


WORDS = PerLayer("types", {"a": True, "b": False, "old_a": True})


def test_words_of_layers():
    assert WORDS.read(ConfigReader({"types": ["b", "old_a"]}), 2, bool) == (False, True)
    assert WORDS.read(ConfigReader({}), 3, lambda i: i == 2) == (False, False, True)
    assert WORDS.write((True, False)) == {"types": ["a", "b"]}
    reader = ConfigReader({"types": ["b", "c"]})
    WORDS.read(reader, 2, bool)
    assert reader.problems == ["types = ['b', 'c']: expected a or b or old_a for each of 2 layers."]


def test_both_words_must_be_there():
    reader = ConfigReader({"types": ["b", "b"]})
    BothTypes("types", {"a": True, "b": False}).read(reader, 2, bool)
    assert reader.problems == ["types = ['b', 'b']: expected a and b for 2 layers."]


def test_numbers_of_layers():
    numbers = LayerNumbers("full")
    assert numbers.read(ConfigReader({"full": [1]}), 3, bool) == [False, True, False]
    assert numbers.write([False, True, True]) == {"full": [1, 2]}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (all_but_every(3), {}, (5, 5, None, 5)),
        (all_but_every(3, "every"), {"every": 2}, (5, None, 5, None)),
        (from_layer(3), {}, (None, None, None, 5)),
        (from_layer(3), {"max_window_layers": 1}, (None, 5, 5, 5)),
        (from_layer(3), {"layer_types": ["sliding_attention"] * 4}, (5, 5, 5, 5)),
    ],
)
def test_which_layers_have_a_window(rule, values, expected):
    reader = ConfigReader({"sliding_window": 5, **values})
    read = Windows(None, rule=rule).read(reader, {"num_layers": 4})
    assert read == {"attention.windows": expected}


def test_dense_layers_come_first():
    layers = DenseFirst(1, "dense", has_types=True)
    assert layers.read(ConfigReader({}), 3) == [False, True, True]
    assert layers.write([False, False, True]) == {
        "dense": 2,
        "mlp_layer_types": ["dense", "dense", "sparse"],
    }
    assert layers.write([True, False]) is None
    reader = ConfigReader({"mlp_layer_types": ["sparse", "dense"]})
    layers.read(reader, 2)
    assert "expected dense, then sparse for all 2 layers." in reader.problems[0]


def test_tensors_of_layers_are_told_by_their_names():
    outside = MappingRule("model.layers.0.norm.weight", "embedding/norm/scale")
    layer = MappingRule("model.layers.{next_layer}.norm.weight", "norm/scale")
    mapping = decoder_mapping(outside, layer)
    assert mapping.top_level == (outside,)
    assert mapping.stacks == {"decoder": (layer,)}
