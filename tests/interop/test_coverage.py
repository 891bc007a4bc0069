"""Which types of transformers are read: the table, and the installed version."""

import json
from pathlib import Path

import pytest

from jaxformer.interop import load_config
from jaxformer.interop.coverage import decoders, describe, lacking_options, markdown, with_images
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.text_parts import ALIASES

ROOT = Path(__file__).parents[2]


def test_each_type_has_one_row():
    for rows in (decoders(), with_images()):
        kinds = [row.model_type for row in rows]
        assert len(kinds) == len(set(kinds))
        for row in rows:
            assert (row.lacks is None) == row.is_read, row


def test_what_is_read_lacks_nothing():
    assert lacking_options().keys().isdisjoint(FAMILIES)
    assert set(ALIASES.values()) <= set(FAMILIES)


def test_the_command_prints_the_numbers_that_the_guides_say():
    text = describe()
    for title, rows in (("continue a text", decoders()), ("read images and text", with_images())):
        count = sum(row.is_read for row in rows)
        assert f"{count} of {len(rows)} model types of transformers that {title} are read" in text
        for guide in ("README.md", "experiments/guides/models.md"):
            said = " ".join((ROOT / guide).read_text().split())
            assert f"{count} of {len(rows)}" in said or f"{count} of the {len(rows)}" in said, guide
    assert markdown() in (ROOT / "experiments/guides/models.md").read_text()
    assert "  mamba2                       read\n" in text
    assert "  llava                        its text part, llama, is read\n" in text
    assert "  whisper                      needs images or sound in the decoder\n" in text


def test_an_error_says_what_a_model_lacks(tmp_path):
    path = tmp_path / "config.json"
    for values in (
        {"model_type": "xlstm"},
        {"model_type": "xlstm_vl", "text_config": {"model_type": "xlstm"}},
    ):
        path.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="needs matrix and scalar LSTMs; `jaxformer zoo"):
            load_config(tmp_path)


@pytest.mark.parity
def test_the_rows_are_the_types_of_the_installed_transformers():
    """A type that is new there fails by name; those of 5.24 are known."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.auto import modeling_auto

    causal = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    images = {*modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert {row.model_type for row in decoders()} == causal
    assert {row.model_type for row in with_images()} == images
