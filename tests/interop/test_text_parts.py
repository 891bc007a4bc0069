"""The text part of a folder whose model reads images too, against the text model alone."""

import json
import logging

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxformer.interop import load_config, load_pretrained, save_pretrained
from tests.interop.golden_files import read_golden, write_folder

VISION = {"vision_config": {"hidden_size": 4}, "image_token_id": 5, "projector_hidden_act": "gelu"}


def text_folder(name, kind, prefix, folder, *, text_type=None, head=None, **outer):
    """The golden model as the text part of a folder with these names."""
    golden, tensors = read_golden(name), {}
    for key, x in golden.tensors.items():
        if key.startswith("lm_head"):
            key = (head or "") + key
        else:
            key = key.replace("model.", prefix, 1)
        tensors[key] = np.ascontiguousarray(x)
    tensors |= {"model.visual.patch.weight": np.zeros((3, 5), np.float32)}
    tensors |= {"multi_modal_projector.linear.bias": np.zeros(7, np.float32)}
    text = {**golden.config, "model_type": text_type or golden.config["model_type"]}
    values = {"model_type": kind, "text_config": text, **VISION, **outer}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "prefix", "options"),
    [
        ("llama", "llava", "language_model.model.", {"head": "language_model."}),
        ("mistral", "idefics2", "model.text_model.", {}),
        ("qwen3", "qwen3_vl", "model.language_model.", {"text_type": "qwen3_vl_text"}),
        ("muse_glimmer_text", "muse_glimmer", "model.language_model.", {}),
        ("gemma3n", "gemma3n", "model.language_model.", {}),
        ("qwen2", "qwen2_5_vl", "model.", {"text_type": "qwen2_5_vl_text"}),
        ("llama4_text", "llama4", "language_model.model.", {"head": "language_model."}),
        ("granite", "somebodys_own", "language_model.model.", {"head": "language_model."}),
    ],
)
def test_the_text_part_is_the_text_model(name, kind, prefix, options, tmp_path, caplog):
    expected, text = load_pretrained(write_folder(read_golden(name), tmp_path / "text"))
    with caplog.at_level(logging.INFO, logger="jaxformer"):
        config, params = load_pretrained(
            text_folder(name, kind, prefix, tmp_path / "all", **options)
        )
    assert config == expected
    jax.tree.map(np.testing.assert_array_equal, params, text)
    assert "visual (60 B), multi_modal_projector (28 B)" in caplog.text
    save_pretrained(tmp_path / "saved", config, params)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["model_type"] == expected.model_type


def test_the_whole_model_says_whether_the_head_is_tied(tmp_path):
    folder = text_folder("llama", "llava", "model.language_model.", tmp_path / "x")
    assert not load_config(folder).head.tied
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    assert load_config(folder).head.tied


@pytest.mark.slow
def test_a_class_that_leaves_out_a_multiplier(tmp_path):
    plain, _ = load_pretrained(write_folder(read_golden("cohere2"), tmp_path / "text"))
    folder = text_folder("cohere2", "aya_vision", "model.language_model.", tmp_path / "x")
    config, _ = load_pretrained(folder)
    assert plain.head.multiplier != 1.0
    assert config.head.multiplier == 1.0


def test_sizes_that_the_file_leaves_out_are_those_of_the_class(tmp_path):
    folder = text_folder("llama", "llava", "model.language_model.", tmp_path / "x")
    values = json.loads((folder / "config.json").read_text())
    del values["text_config"]["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"tensors are missing: .*layers\.2\."):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"text_config": {"model_type": "llama"}, "llm_config": {"model_type": "qwen2"}},
            "the file describes two text models, as text_config and llm_config",
        ),
        ({"text_config": {"model_type": "unheard_of"}}, "model_type 'new_vl' is not supported"),
        ({"vision_config": {}}, "model_type 'new_vl' is not supported"),
        (
            {"text_config": {**read_golden("llama").config, "new_option": 3}},
            "text_config.new_option = 3: unknown attribute",
        ),
    ],
)
def test_what_is_refused(values, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new_vl", **values}))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)
