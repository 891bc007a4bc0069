"""Presets equal the released config.json, where transformers has the model class."""

import json
from pathlib import Path

import pytest

from jaxformer import zoo
from jaxformer.interop import load_config

FILES = json.loads((Path(__file__).parent / "golden" / "hugging_face.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_preset_is_what_its_folder_says(name, tmp_path):
    """golden/hugging_face.py wrote the files with transformers; we read them as a folder."""
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    assert load_config(tmp_path) == zoo.get(name)
