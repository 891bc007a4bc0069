"""What config.json says is either honoured, known to be harmless, or refused by name."""

import json
import re

import numpy as np
import pytest

from jaxformer.config import Alibi
from jaxformer.interop import load_config
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from tests.interop.golden_files import GOLDEN, NAMES
from tests.interop.numpy_folders import LLAMA, SIZES, config_from_fields, write_folder
from tests.interop.references_without_family import REFERENCES_WITHOUT_FAMILY

# The audit


def test_all_that_is_not_honoured_is_named_at_once(tmp_path):
    config = LLAMA | {
        "hidden_act": "mish",
        "num_hidden_layers": "three",
        "residual_multiplier": 0.22,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 1]},
        "partial_rotary_factor": 0.5,
        "quantization_config": {"bits": 4},
    }
    with pytest.raises(ValueError) as error:
        load_config(write_folder(tmp_path / "x", config, {}))
    lines = str(error.value).split("\n")
    assert re.fullmatch(r".*config\.json: 6 attributes are not supported:", lines[0])
    assert sorted(lines[1:-1]) == [
        "  hidden_act = 'mish': expected one of silu, swish, gelu, gelu_python, "
        "gelu_pytorch_tanh, gelu_new, gelu_fast, gelu_accurate, gelu_python_tanh, quick_gelu, "
        "relu, relu2, sigmoid, linear.",
        "  num_hidden_layers = 'three': expected a value of type int.",
        "  partial_rotary_factor = 0.5: this family rotates whole heads; it must be 1.",
        "  quantization_config = {'bits': 4}: quantized weights are not read; convert the "
        "folder to bfloat16 first.",
        "  residual_multiplier = 0.22: unknown attribute, which may change the model.",
        "  rope_scaling.mrope_section = [1, 1]: unknown attribute, which may change the model.",
    ]
    assert lines[-1].endswith("pass its name in ignore=(...).")


def test_what_the_user_vouches_for_is_ignored(tmp_path):
    config = LLAMA | {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "note": 1},
        "my_own_note": "x",
    }
    folder = write_folder(tmp_path / "x", config, {})
    with pytest.raises(ValueError, match=r": 2 attributes are not"):
        load_config(folder)
    with pytest.raises(ValueError, match=r": 1 attributes are not.*\n  my_own_note = 'x': "):
        load_config(folder, ignore=("rope_scaling.note",))
    assert load_config(folder, ignore=("rope_scaling.note", "my_own_note")).num_layers == 3


@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", 4096),
        ("use_bidirectional_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("attention_multiplier", 2.0),
        ("qk_layernorm", True),
        ("layer_types", ["sliding_attention"] * 4),
        ("output_multiplier_scale", 0.5),
        ("num_local_experts", 8),
        ("logits_scaling", 8.0),
    ],
)
def test_a_llama_refuses_what_others_have(name, value):
    with pytest.raises(ValueError, match=rf"here: 1 attributes .*:\n  {name} = "):
        config_from_fields("llama", **{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", None),
        ("use_bidirectional_attention", False),
        ("pad_token_id", 0),
        ("hidden_dropout", 0.1),
        ("torch_dtype", "bfloat16"),
        ("pretraining_tp", 2),
        ("initializer_range", 0.02),
        ("output_attentions", True),
        ("temperature", 0.7),
        ("max_sequence_length", 2048),
    ],
)
def test_what_changes_nothing_is_let_through(name, value):
    assert config_from_fields("llama") == build_config(
        FAMILIES["llama"], {"model_type": "llama", **SIZES, name: value}, where="here"
    )


@pytest.mark.parametrize(
    "kind, name, good, bad",
    [
        ("gemma2", "sliding_window_size", 4096, 17),
        ("gpt2", "n_special", 0, 2),
        ("openai-gpt", "n_special", 0, 2),
    ],
)
def test_what_released_files_say_twice(kind, name, good, bad):
    sizes = SIZES if kind == "gemma2" else {"vocab_size": 13}
    values = {"model_type": kind, **sizes}
    family = FAMILIES[kind]
    plain = build_config(family, values, where="here")
    assert build_config(family, {**values, name: good}, where="here") == plain
    with pytest.raises(ValueError, match=rf"here: 1 attributes .*:\n  {name} = {bad}: "):
        build_config(family, {**values, name: bad}, where="here")


def test_rounded_alibi_slopes_are_loaded_only_with_ignore():
    fields = {"alibi": True, "num_attention_heads": 12}
    fields |= {"intermediate_size": None, "num_key_value_heads": None}
    with pytest.raises(ValueError, match=r"slopes of 12 heads .*ignore=\('alibi',\) to load it"):
        config_from_fields("falcon", **fields)
    values = {"model_type": "falcon", **SIZES, **fields}
    config = build_config(FAMILIES["falcon"], values, where="here", ignore=("alibi",))
    assert config.attention.positions == (Alibi(scale=1.0),)


def test_every_family_audits():
    """An attribute nobody ever heard of is the one complaint of every reference's config.json."""
    kinds = set()
    for name in set(NAMES) - set(REFERENCES_WITHOUT_FAMILY):
        with np.load(GOLDEN / f"{name}.npz") as file:
            values = json.loads(str(file["config"]))
        kinds.add(values["model_type"])
        with pytest.raises(ValueError, match=r"^here: 1 attributes .*:\n  never_heard_of = 1: "):
            build_config(
                FAMILIES[values["model_type"]], {**values, "never_heard_of": 1}, where="here"
            )
    assert kinds == set(FAMILIES) - {"gpt-sw3"}  # another name of gpt2


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_an_empty_file_lacks_sizes(kind):
    """Files of Gemma 3 and 3n leave out what is as in their classes; no other family's do."""
    widths = {"gemma3_text": 2304, "gemma3n_text": 2048}
    if kind in widths:
        assert build_config(FAMILIES[kind], {}, where="here").model_dim == widths[kind]
        return
    with pytest.raises(
        ValueError, match=r"(?s)^here: \d attributes .*vocab_size = None: expected a val"
    ):
        build_config(FAMILIES[kind], {}, where="here")


def test_sizes_that_cannot_be_are_told_with_their_file():
    with pytest.raises(ValueError, match=r"^here: num_heads must be a multiple of num_kv_heads"):
        config_from_fields("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"^here: 1 .*:\n  hidden_size = None: expected a val"):
        config_from_fields("llama", hidden_size=None)


def test_an_ignored_text_config_may_be_anything():
    values = {"model_type": "llama", **SIZES, "text_config": 5, "max_position_embeddings": 7}
    config = build_config(FAMILIES["llama"], values, where="here", ignore=("text_config",))
    assert config.max_position_embeddings == 7


@pytest.mark.parametrize("value", [0, "", False, []])
def test_an_object_that_is_none(value):
    message = rf"here: 1 attributes .*:\n  rope_scaling = {re.escape(repr(value))}: expected an obj"
    with pytest.raises(ValueError, match=message):
        config_from_fields("llama", rope_scaling=value)
    assert config_from_fields("llama", rope_scaling={}) == config_from_fields("llama")


def test_readers_stand_in_for_what_is_wrong():
    settings = ConfigReader({"a": "x", "b": True, "c": 2.5, "d": [1, "x"], "e": 3.0, "f": None})
    assert settings.integer("a", 4) == 1
    assert settings.integer("b", 4) == 1
    assert settings.integer("c", 4) == 1
    assert settings.sequence("d", int) is None
    assert settings.section("a") is None
    assert not settings.boolean("e", True)
    assert len(settings.problems) == 6
    assert settings.integer("e") == 3
    assert settings.optional_integer("f", 5) is None
    assert settings.optional_integer("g", 5) == 5
    assert settings.integer("f", 5) == 5
    assert settings.boolean("g", True) and not settings.boolean("f", False)
    assert len(settings.problems) == 6
    settings.boolean("f", True)  # transformers takes null for false
    assert settings.problems[6:] == ["f = None: expected a value of type bool."]
