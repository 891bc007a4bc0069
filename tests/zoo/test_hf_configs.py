"""Presets equal the released config.json, where transformers has the model class."""

import json
from pathlib import Path

import pytest

from jaxformer import zoo
from jaxformer.interop import load_config

FILES = json.loads((Path(__file__).parent / "golden" / "hugging_face.json").read_text())
# Baichuan's class comes with its weights, not with transformers.
BAICHUAN = {
    "model_type": "baichuan",
    "vocab_size": 125_696,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "z_loss_weight": 0,
}
FILES["baichuan-2-7b"] = BAICHUAN | {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
FILES["baichuan-2-13b"] = BAICHUAN | {
    "hidden_size": 5120,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "model_max_length": 4096,
}


@pytest.mark.parametrize("name", FILES)
def test_preset_is_what_its_folder_says(name, tmp_path):
    """golden/hugging_face.py wrote the files with transformers; we read them as a folder."""
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    assert load_config(tmp_path) == zoo.get(name)
