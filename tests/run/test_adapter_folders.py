"""Folders of adapters beside their base model: tokenizer, template, and the base of the base."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxformer import Transformer, save_pretrained, zoo
from jaxformer.config import LoRA
from jaxformer.interop import save_adapter
from jaxformer.run import exporting
from jaxformer.run.loading import base_of_run, load_run, runs_of

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MESSAGES = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def write_tokenizer(folder, end, template):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": end, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    config = replace(zoo.get("llama-2-7b").tiny(), vocab_size=259, adapter=LoRA(rank=2))
    params = jax.jit(Transformer(config).init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    save_adapter(root / "adapters", config, params, base=str(root / "base"))
    base = replace(config, adapter=None)
    params = jax.jit(Transformer(base).init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    save_pretrained(root / "base", base, params, extra={"eos_token_id": 0})
    write_tokenizer(root / "base", SPECIAL[0], "USER {{ messages[0]['content'] }} BOT")
    write_tokenizer(root / "adapters", SPECIAL[2], CHATML)
    return root / "adapters"


@pytest.mark.slow
def test_the_tokenizer_and_the_template_of_the_adapters_training_are_used(adapters):
    model = load_run(adapters)
    h, i = model.tokenizer.encode("hi").tolist()
    assert model.encode_chat(MESSAGES) == [1, h, i, 2, 1]
    assert model.stop_tokens == (2, 0)  # and the base's
    assert model.base == str(adapters.parent / "base")


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.slow(but=["False"])
def test_the_tokenizer_of_the_adapters_is_exported(adapters, merge, tmp_path):
    exporting.export(exporting.Export(checkpoint=adapters, output=tmp_path / "out", merge=merge))
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings == {"eos_token": "<|im_end|>", "chat_template": CHATML}
    assert (tmp_path / "out/config.json").is_file() == merge


def test_the_card_of_adapters_is_theirs(adapters, tmp_path):
    (adapters.parent / "base/README.md").write_text("Base.")
    exporting.export(exporting.Export(checkpoint=adapters, output=tmp_path / "none"))
    assert not (tmp_path / "none/README.md").exists()
    (adapters / "README.md").write_text("Adapters.")
    exporting.export(exporting.Export(checkpoint=adapters, output=tmp_path / "out"))
    assert (tmp_path / "out/README.md").read_text() == "Adapters."


def test_the_base_of_a_run_is_that_of_the_first_run_with_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, init, adapter in (
        ("pretrained", None, None),
        ("sft", "pretrained", {"rank": 2}),
        ("dpo", "sft", {"rank": 2}),
        ("again", "org/base", {"rank": 2}),
    ):
        Path(name).mkdir()
        run = {"init": init, "model": {"adapter": adapter}, "length": len(name)}
        Path(name, "run.json").write_text(json.dumps(run))
    names = ["pretrained", "sft", "dpo", "again", "elsewhere"]
    expected = [None, "pretrained", "pretrained", "org/base", None]
    assert [base_of_run(Path(name)) for name in names] == expected
    lengths = [[run["length"] for run in runs_of(Path(name))] for name in names]
    assert lengths == [[10], [3, 10], [3, 3, 10], [5], []]


@pytest.mark.parametrize("prompt", ["hi", "<|endoftext|>hi", ""])
def test_a_prompt_begins_with_one_first_token(adapters, prompt):
    """Of a run, whose tokenizer adds none."""
    model = load_run(adapters.parent / "base")._replace(adds_special_tokens=False)
    ids, source = model.encode_prompt(prompt)
    assert (ids[0], ids.count(0), source) == (0, 1, None)
