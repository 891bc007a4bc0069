"""A run as a folder of transformers: the same logits and ids, or a sentence that says why not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.translate import runs
from jaxformer import Transformer, data, load_pretrained, save_pretrained
from jaxformer.config import GatedNorm, HybridHeads, LinearAttention
from jaxformer.generation import Greedy
from jaxformer.interop.load import read_pretrained
from jaxformer.interop.safetensors_files import read_folder_headers
from jaxformer.run import exporting, pretraining, text_generation
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import LoadedModel, load_run
from jaxformer.run.train_setup import make_train_setup, print_export_note
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from tests.small_models import random_params

TEXT = "def hé(x):\n    return '→ 世界 🙂'\n"
TEXTS = ["", "def f", TEXT, "<|endoftext|>x<|endoftext|>", "\r\n\t \x00\u2028\ufeff e\u0301   if\n"]
TOKENIZERS = {
    "bytes": data.ByteTokenizer(),
    "bpe": data.train_bpe([TEXT] * 9, vocab_size=300),
    "characters": data.CharacterTokenizer("".join(sorted(set("".join([*TEXTS, TEXT]))))),
}


SMALL = pretraining.RUNS["tiny"].model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Output of the tiny run, shortened, on a text of its own; and what it printed."""
    path = tmp_path_factory.mktemp("run")
    (path / "corpus.txt").write_text(TEXT * 60)
    return pretraining.pretrain(
        replace(
            pretraining.RUNS["tiny"],
            corpus=data.TextFiles(path=str(path / "corpus.txt")),
            held_out=0.2,
            length=32,
            batch_size=2,
            steps=2,
            evaluate_every=1,
            save_every=1,
            devices=1,
            tensorboard=False,
            output=path / "out",
            cache=path / "cache",
            sample_tokens=1,
        )
    )


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("export") / "out"
    return exporting.export(exporting.Export(checkpoint=run, output=output))


def logits(config, params, tokens):
    return np.asarray(jax.jit(Transformer(config).apply)({"params": params}, tokens))


@pytest.mark.slow
def test_an_exported_run_has_the_same_logits_and_tokens(run, exported):
    model = load_run(run)
    config, params = load_pretrained(exported)
    assert config == model.config
    tokens = jnp.asarray([[0, 5, 300, 511, 7, 9, 40]])
    expected = logits(model.config, model.params, tokens)
    np.testing.assert_array_equal(logits(config, params, tokens), expected)
    again = load_run(exported)
    for text in TEXTS[1:]:
        assert again.tokenizer.encode(text).tolist() == model.tokenizer.encode(text).tolist()
        assert again.encode_prompt(text) == model.encode_prompt(text)
    assert (again.bos_tokens, again.stop_tokens) == (model.bos_tokens, model.stop_tokens)
    config_json = json.loads((exported / "config.json").read_text())
    assert (config_json["model_type"], config_json["max_position_embeddings"]) == ("qwen3", 32)
    ends = json.loads((exported / "generation_config.json").read_text())
    unused = ends.pop("suppress_tokens")
    assert ends == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert unused == list(range(model.tokenizer.vocab_size, 512))  # the corpus ran out of pairs


@pytest.mark.slow
def test_generate_says_the_same_from_an_exported_run(run, exported):
    fields = {"prompt": "def", "max_new_tokens": 5, "sampler": Greedy()}
    texts = [
        text_generation.generate(text_generation.Generate(checkpoint=x, **fields))
        for x in (run, exported)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_best_checkpoint_or_one_by_its_number_is_exported(run, tmp_path):
    with Checkpoints(run / "checkpoints") as checkpoints:
        losses = {step: checkpoints.saved_loss(step) for step in checkpoints.all_steps()}
        assert checkpoints.best_step() == min(losses, key=losses.get) == 2
    for step in ("best", "1", "2"):
        arguments = ["--checkpoint", str(run), "--output", str(tmp_path / step), "--step", step]
        exporting.export(parse_run(exporting.RUNS, "Exports.", arguments))
    files = [(tmp_path / step / "model.safetensors").read_bytes() for step in ("best", "1", "2")]
    assert files[0] == files[2] != files[1]
    for step in ("1", "2"):
        exported, saved = load_pretrained(tmp_path / step).params, load_run(run, int(step)).params
        jax.tree.map(np.testing.assert_array_equal, exported, saved)


@pytest.mark.parametrize(
    "said, stop, expected",
    [
        (None, (256,), {"eos_token_id": 256}),
        ({"top_k": 3}, (256,), {"top_k": 3, "eos_token_id": 256}),
        ({"eos_token_id": [0, 9], "top_k": 3}, (0, 9), {"eos_token_id": [0, 9], "top_k": 3}),
        ({"eos_token_id": 256}, (256,), {"eos_token_id": 256}),
        ({"eos_token_id": 9}, (9, 256), {"eos_token_id": [9, 256]}),
    ],
)
def test_a_run_that_began_with_a_folder_says_what_ends_its_texts(said, stop, expected, tmp_path):
    """The folder itself, which may not say it, is written as it is."""
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    model = LoadedModel(SMALL, None, TOKENIZERS["bytes"], tmp_path, (256,), stop, step=2)
    assert exporting.generation_config(model, tmp_path, {}) == expected
    assert exporting.generation_config(model._replace(step=None), tmp_path, {}) == said


def test_a_token_that_the_model_lacks_is_told_of_the_tokenizer(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    model = LoadedModel(replace(SMALL, vocab_size=98), None, tokenizer, tmp_path, (0,), (0,))
    assert model.encode_prompt("a") == ([0, 97], None)
    with pytest.raises(ValueError, match=f"^The tokenizer in {tmp_path} gives token 98, .* 97:"):
        model.encode_prompt("ab")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_exported_tokenizer_gives_the_same_ids(name, tmp_path):
    tokenizer = TOKENIZERS[name]
    data.export_tokenizer(tokenizer, tmp_path)
    again = data.load_tokenizer(tmp_path)
    end = tokenizer.end_of_text
    assert (again.vocab_size, again.end_of_text) == (tokenizer.vocab_size, end)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert again.encode(text).tolist() == ids
        assert again.encode_with_special_tokens(text).tolist() == [end, *ids]
    rng = np.random.default_rng(0)
    for row in rng.integers(0, tokenizer.vocab_size, (50, 9)):  # mostly no UTF-8
        assert again.decode(row) == tokenizer.decode(row)


def test_an_encoders_texts_begin_with_nothing(tmp_path):
    data.export_tokenizer(TOKENIZERS["bytes"], tmp_path, add_bos=False)
    assert data.load_tokenizer(tmp_path).encode_with_special_tokens("a").tolist() == [97]


def test_an_unknown_character_is_an_error_after_export_too(tmp_path):
    data.export_tokenizer(data.CharacterTokenizer("ab\n"), tmp_path)
    with pytest.raises(Exception, match="Missing .* from the vocabulary"):
        data.load_tokenizer(tmp_path).encode("abc")


class Other:
    """A tokenizer from outside."""

    vocab_size, end_of_text = 3, 2
    encode = encode_batch = decode = to_json = save = str


def test_a_tokenizer_of_another_kind_is_not_exported(tmp_path):
    with pytest.raises(
        ValueError, match=r"^Other cannot be exported .*; ByteTokenizer, CharacterTok"
    ):
        data.export_tokenizer(Other(), tmp_path)


@pytest.mark.slow
def test_what_cannot_be_exported_is_said_and_nothing_is_left(run, exported, tmp_path):
    def refused(message, **fields):
        with pytest.raises(ValueError, match=message):
            exporting.export(
                exporting.Export(**{"checkpoint": run, "output": tmp_path / "x", **fields})
            )
        assert list(tmp_path.iterdir()) == []

    refused("out exists and is not empty; choose a new folder", output=exported)
    refused("has no checkpoints and no config.json; pass the output folder", checkpoint=run.parent)
    refused(r"There is no checkpoint 7 in .*; it has 1, 2\.", step=7)
    refused("family 'qwen9' is not supported; supported are .*qwen3", family="qwen9")
    refused(r"^The family llama cannot represent .*\n.*qk_norm", family="llama")
    refused("is a Hugging Face folder; it has no best checkpoint", checkpoint=exported, step="best")


# Orbax leaves reads behind that end when their event loop is closed, which nobody can catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for file in (copy / "checkpoints/2/state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"Checkpoint 2 in .* is damaged"):
        exporting.export(exporting.Export(checkpoint=copy, output=tmp_path / "x", step=2))
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_failed_export_leaves_no_folder(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(data, "export_tokenizer", full)
    with pytest.raises(OSError, match="no space left"):
        exporting.export(exporting.Export(checkpoint=run, output=tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_hugging_face_folder_is_written_again_with_its_tokenizer(exported, tmp_path):
    again = exporting.export(
        exporting.Export(checkpoint=exported, output=tmp_path / "x", dtype="bfloat16")
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (exported / name).read_bytes()
    configs = [json.loads((x / "config.json").read_text()) for x in (exported, again)]
    changed = {
        key: configs[1].get(key) for key in configs[0] if configs[0][key] != configs[1].get(key)
    }
    assert changed == {"torch_dtype": "bfloat16"}


@pytest.mark.slow
def test_a_folder_that_is_read_and_written_is_the_same_folder(exported, tmp_path):
    """Also what is said in words of its own, and tensors in the dtype that they had."""
    theirs = shutil.copytree(exported, tmp_path / "theirs")
    config_json = json.loads((theirs / "config.json").read_text()) | {
        "transformers_version": "5.0.0"
    }
    config_json["dtype"] = config_json.pop("torch_dtype")
    (theirs / "config.json").write_text(json.dumps(config_json))
    (theirs / "generation_config.json").unlink()
    again = exporting.export(exporting.Export(checkpoint=theirs, output=tmp_path / "x"))
    assert {p.name for p in again.iterdir()} == {p.name for p in theirs.iterdir()}
    for path in again.iterdir():
        if path.name == "config.json":
            assert json.loads(path.read_text()) == config_json
        else:
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path.name
    half = exporting.export(
        exporting.Export(checkpoint=theirs, output=tmp_path / "y", dtype="float16")
    )
    exporting.export(exporting.Export(checkpoint=half, output=half, overwrite=True))
    assert json.loads((half / "config.json").read_text()) == config_json | {"dtype": "float16"}
    dtypes = {stored.dtype for stored in read_folder_headers(half).values()}
    assert dtypes == {"F16"} and list(tmp_path.glob(".*")) == []


@pytest.mark.slow
def test_multipliers_that_weights_absorb_stay_in_config_json(exported, tmp_path):
    """Of Falcon-H1; powers of two, which change no bit of the weights but their exponents."""
    state = LinearAttention(
        num_heads=4,
        num_key_heads=2,
        key_dim=3,
        value_dim=8,
        delta_rule=False,
        beta="step",
        unit_vectors=False,
        scale=1.0,
        skip=True,
        output=GatedNorm(norm=None, over="group", placement="before_norm"),
    )
    plain, _ = load_pretrained(exported)
    heads = replace(plain.attention, qk_norm=None)
    config = replace(plain, attention=HybridHeads(kinds=(heads, state)))
    multipliers = {"ssm_out_multiplier": 0.5, "mlp_multipliers": [4.0, 0.25]}
    theirs = tmp_path / "theirs"
    save_pretrained(theirs, config, random_params(config), extra=multipliers)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / name, theirs)
    again = exporting.export(exporting.Export(checkpoint=theirs, output=tmp_path / "again"))
    values = json.loads((again / "config.json").read_text())
    assert values == json.loads((theirs / "config.json").read_text())
    assert values.items() >= multipliers.items()
    weights = [(x / "model.safetensors").read_bytes() for x in (theirs, again)]
    assert weights[0] == weights[1]
    _, params = read_pretrained(again, layout="stacked")
    assert all(map(np.array_equal, *map(jax.tree.leaves, (params, random_params(config)))))


@pytest.mark.slow
def test_the_card_of_an_exported_run_has_its_figures(run, exported):
    card = (exported / "README.md").read_text()
    figures = read_json_lines(run / "metrics.jsonl")[-1]
    for name, value in {
        "steps": 2,
        "text": run.parent / "corpus.txt",
        "sequence length": 32,
        "evaluated at step": 2,
        "final held out bits per byte": f"{figures['final_held_out_bits_per_byte']:.4g}",
    }.items():
        assert f"| {name} | {value} |" in card
    assert card.startswith("---\nlibrary_name: transformers\n") and "from scratch" in card
    assert 'AutoModelForCausalLM.from_pretrained("out")' in card


@pytest.mark.slow
def test_an_export_is_uploaded_with_its_card(run, tmp_path, monkeypatch, capsys):
    uploads = []
    monkeypatch.setattr(
        exporting, "push_folder", lambda *name, **private: uploads.append((name, private)) or "here"
    )
    folder = exporting.export(
        exporting.Export(checkpoint=run, output=tmp_path / "new", push="someone/mine")
    )
    assert uploads == [((folder, "someone/mine"), {"private": False})]
    assert (
        'AutoModelForCausalLM.from_pretrained("someone/mine")' in (folder / "README.md").read_text()
    )
    assert capsys.readouterr().out.endswith("Uploaded to here.\n")
    with pytest.raises(ValueError, match="--private needs --push"):
        exporting.Export(checkpoint=run, output=tmp_path / "other", private=True)


@pytest.mark.parametrize("name", pretraining.RUNS)
def test_every_named_pretraining_run_can_be_exported(name, capsys):
    print_export_note(pretraining.RUNS[name].model)
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_before_training_a_run_says_that_it_cannot_be_exported(capsys):
    """One line with the nearest family and the fields that stand in the way."""
    tiny = pretraining.RUNS["tiny"]
    odd = replace(tiny, model=replace(tiny.model, norm_placement="sandwich"), devices=1)
    make_train_setup(odd, Path(), length=odd.length)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Note: jaxformer export cannot write this model. No family can represent "
        "this configuration. As qwen3, it would change: norm_placement: pre instead of sandwich"
    )
    print_export_note(runs.RUNS["tiny"].model)
    assert "attention.biases" in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_transformers_loads_an_exported_run_with_the_same_logits_and_ids(run, exported):
    torch = pytest.importorskip("torch", reason="pip install 'jaxformer[parity]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'jaxformer[parity]'")
    model = load_run(run)
    theirs, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not {word: names for word, names in loading_info.items() if names}
    tokens = np.random.default_rng(0).integers(0, 512, (2, 21))
    with torch.no_grad():
        got = theirs.eval()(torch.asarray(tokens)).logits.numpy()
    expected = logits(model.config, model.params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for text in TEXTS:
        assert tokenizer(text).input_ids == model.encode_prompt(text)[0]
        plain = tokenizer(text, add_special_tokens=False).input_ids
        assert plain == model.tokenizer.encode(text).tolist()


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_reads_an_exported_tokenizer(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install 'jaxformer[parity]'")
    tokenizer = TOKENIZERS[name]
    data.export_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == theirs.eos_token_id == tokenizer.end_of_text
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == [tokenizer.end_of_text, *ids]
        assert theirs(text, add_special_tokens=False).input_ids == ids
    for row in np.random.default_rng(0).integers(0, tokenizer.vocab_size, (50, 9)).tolist():
        assert theirs.decode(row, skip_special_tokens=True) == tokenizer.decode(row)
