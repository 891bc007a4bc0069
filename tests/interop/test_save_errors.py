import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError

from jaxformer.config import GLU, ClampedGEGLU, Dropout, Embedding, Learned, LMHead, RMSNorm
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden
from tests.small_models import random_params


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, loaded):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match=r"exists and is not empty"):
        save_pretrained(tmp_path, *loaded)
    with pytest.raises(ValueError, match=r"mine exists and is not empty"):
        save_pretrained(tmp_path / "mine", *loaded)
    with pytest.raises(ValueError, match=r"out cannot be a folder: .*mine is a file\."):
        save_pretrained(tmp_path / "mine" / "new" / "out", *loaded)
    (tmp_path / "empty").mkdir()
    save_pretrained(tmp_path / "empty", *loaded)
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_model_is_overwritten_only_by_word_and_whole(tmp_path, loaded, monkeypatch):
    config, params = loaded
    save_pretrained(tmp_path / "x", config, params)
    (tmp_path / "x" / "old").write_text("x")
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="or pass overwrite=True"):
        save_pretrained(tmp_path / "x", config, params)
    twice = jax.tree.map(lambda p: 2 * p, params)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="cannot be renamed"):
        rename = Path.rename

        def refused(path, target):
            if path.suffix == ".partial":
                raise OSError("cannot be renamed")
            return rename(path, target)

        patch.setattr(Path, "rename", refused)
        save_pretrained(tmp_path / "x", config, twice, overwrite=True)
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before
    save_pretrained(tmp_path / "x", config, twice, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and not (tmp_path / "x/old").exists()
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "x").params, twice)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("x")
    with pytest.raises(ValueError, match=r"mine has no config\.json, so it is not a model folder"):
        save_pretrained(tmp_path / "mine", config, params, overwrite=True)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, None, r"model\.norm\.weight: 1 of 12 values are not finite"),
        (np.inf, None, r"model\.norm\.weight: 1 of 12 values are not finite"),
        (1e5, jnp.float16, r"weight: 1 of 12 values are too large for float16; pass a wider dtype"),
    ],
)
def test_weights_that_are_not_finite_are_not_saved(tmp_path, loaded, value, dtype, message):
    config, params = loaded
    scale = np.array(params["decoder"]["final_norm"]["scale"])
    scale[3] = value
    params = {**params, "decoder": {**params["decoder"], "final_norm": {"scale": scale}}}
    with pytest.raises(ValueError, match=message):
        save_pretrained(tmp_path / "x", config, params, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_nothing_half_written_stays(tmp_path, loaded, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("disk full")  # as it says it

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(OSError, match=r"/model\.safetensors could not be written: disk full\."):
        save_pretrained(tmp_path / "deep" / "out", *loaded)
    assert list((tmp_path / "deep").iterdir()) == []


def test_parameters_that_do_not_fit_are_all_named(tmp_path, loaded):
    config, params = loaded
    params = dict(params, more={"x": np.zeros(1)}, head={"kernel": np.zeros((9, 13))})
    del params["embedding"]
    with pytest.raises(
        ValueError,
        match=r"^3 parameters do not fit the configuration: embedding/tokens/embedding is missing; "
        r"more/x is not a parameter of the model; head/kernel is \[9, 13\], not \[12, 13\]\.$",
    ):
        save_pretrained(tmp_path / "out", config, params)
    assert not (tmp_path / "out").exists()


def test_bad_choices_for_an_export(tmp_path, loaded):
    config, params = loaded
    with pytest.raises(ValueError, match=r"^max_shard_bytes must be positive; got 0\.$"):
        save_pretrained(tmp_path / "out", config, params, max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"cannot be saved as int8; supported are float64, "):
        save_pretrained(tmp_path / "out", config, params, dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"^family 'lama' is not supported; .*llama"):
        save_pretrained(tmp_path / "out", config, params, family="lama")
    with pytest.raises(ValueError, match=r"^The family qwen2 cannot represent .*\n.*biases"):
        save_pretrained(tmp_path / "out", config, params, family="qwen2")
    with pytest.raises(ValueError, match=r"would change the model:\n  num_layers: 9 instead of 3$"):
        extra = {"num_hidden_layers": 9}
        save_pretrained(tmp_path / "out", config, params, family="llama", extra=extra)
    with pytest.raises(ValueError, match=r"'foo': 1\} is not valid: .*\n  foo = 1.*\nLeave"):
        save_pretrained(tmp_path / "out", config, params, extra={"foo": 1})
    with pytest.raises(TypeError, match=r"^extra holds \{3\} of type set, which is not JSON\.$"):
        save_pretrained(tmp_path / "out", config, params, extra={"eos_token_id": {3}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"norm_placement": "res_post"},
            r"^No family can represent this configuration\..* As \w+, it would change:\n  ",
        ),
        (
            {"final_norm": False},
            r"configuration\. As llama, it would change:\n  final_norm: True instead of False$",
        ),
        (
            {"norm": RMSNorm(eps_position="outside")},
            r"No family near it supports this norm\.eps_position\. As \w+, .*\n"
            r"  norm\.eps_position: inside",
        ),
        (
            {"embedding": Embedding(positions=Learned(max_length=5))},
            r"embedding\.positions: None instead of Learned",
        ),
        (
            {"feed_forward": (GLU(hidden_dim=11), GLU(hidden_dim=12))},
            r"feed_forward: \(GLU\(hidden_dim=11, .*instead of .*hidden_dim=12",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_configuration_that_no_family_has(changes, message, loaded):
    """The message names what stands in the way, and what the nearest family would do."""
    with pytest.raises(ValueError) as error:
        choose_family(replace(loaded.config, **changes), {})
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)


def test_a_multiplier_of_branches_is_not_lost(loaded):
    config = replace(loaded.config, residual_multiplier=0.5)
    with pytest.raises(ValueError, match=r"change:\n  residual_multiplier: 1\.0 instead of 0\.5$"):
        choose_family(config, {}, "llama")
    family, values = choose_family(config, {})
    assert (family.model_type, values["residual_multiplier"]) == ("granite", 0.5)
    with pytest.raises(
        ValueError,
        match=r"logits_scaling = 0\.0: the logits are divided by it\.\n"
        r"Change these options of the model, or name another family\.$",
    ):
        choose_family(replace(config, head=LMHead(multiplier=0.0)), {}, "granite")


def test_numbers_of_numpy_and_jax_are_written_as_json_has_them(tmp_path, loaded):
    extra = {"eos_token_id": np.int64(3), "bos_token_id": jnp.int32(4)}
    save_pretrained(tmp_path / "out", *loaded, extra=extra)
    config_json = json.loads((tmp_path / "out/config.json").read_text())
    assert (config_json["eos_token_id"], config_json["bos_token_id"]) == (3, 4)


def test_dropout_is_no_part_of_a_folder(loaded):
    family, _ = choose_family(replace(loaded.config, dropout=Dropout(residual=0.1)), {})
    assert family.model_type == "llama"
    plain = replace(loaded.config, feed_forward=(ClampedGEGLU(hidden_dim=11),))
    with pytest.raises(ValueError, match="No family can represent this configuration"):
        choose_family(plain, {})


def test_equal_configurations_have_the_same_family(loaded):
    """Patterns that repeat themselves and scales that are the default are no differences."""
    attention = loaded.config.attention
    attention = replace(
        attention, positions=attention.positions * 2, windows=(None,) * 3, scale=1 / 2
    )
    branches = loaded.config.feed_forward * 2
    long = replace(loaded.config, attention=attention, feed_forward=branches)
    assert choose_family(long, {})[1] == choose_family(loaded.config, {})[1]
    with pytest.raises(ValueError, match=r"attention\.scale: None instead of 0\.25"):
        choose_family(replace(long, attention=replace(attention, scale=0.25)), {}, "llama")


def test_a_modernbert_without_windows_keeps_their_size(tmp_path):
    """transformers makes the mask of windows whether or not a layer reads it."""
    golden = read_golden("modernbert_decoder")
    full = {"layer_types": len(golden.config["layer_types"]) * ["full_attention"]}
    config = build_config(FAMILIES["modernbert-decoder"], {**golden.config, **full}, where="here")
    assert {layer.window for layer in config.layers} == {None}
    save_pretrained(tmp_path / "x", config, random_params(config))
    written = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (written["sliding_window"], written["local_attention"]) == (64, 128)


def test_one_attribute_to_ignore_is_its_whole_name():
    golden = read_golden("llama")
    values = {**golden.config, "mup": 1}
    with pytest.raises(ValueError, match="mup = 1"):
        build_config(FAMILIES["llama"], values, where="here", ignore="xmupx")
    assert build_config(FAMILIES["llama"], values, where="here", ignore="mup").model_dim
