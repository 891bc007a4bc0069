"""Preference training: a run that is killed, a mesh, adapters, and a reference that is kept."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer import data
from jaxformer.generation import log_likelihoods
from jaxformer.run import preference_training
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import load_run
from jaxformer.training.metrics import read_json_lines
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder

SETTINGS = LLAMA | {"vocab_size": 320, "hidden_size": 24, "intermediate_size": 22}
NAMES = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
PAIRS = [
    {"prompt": f"{n} and {m}:", "chosen": f" yes, {n}", "rejected": f" no, {m}"}
    for n in NAMES
    for m in NAMES
][:61]
FLAGS = ["--pairs", "pairs.jsonl", "--length", "32", "--batch-size", "16", "--cache", "cache"]
FLAGS += ["--held-out", "0.2", "--log-every", "1", "--evaluate-every", "2", "--no-tensorboard"]
FLAGS += ["--evaluate-pairs", "6", "--epochs", "None", "--steps", "6", "--scan"]
FLAGS += ["--optimizer.schedule", "Cosine(peak=3e-3, warmup_steps=0)"]
ADAPTER = ["--model.adapter", "LoRA(rank=3, base_dtype='bfloat16')"]
ONE = ["--devices", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(PAIRS)
    drawn = random_tensors(llama_shapes(SETTINGS))
    tensors = {name: x if x.ndim == 1 else 0.1 * x for name, x in drawn.items()}
    folder = write_folder(tmp_path / "base", SETTINGS, tensors)
    texts = [text for pair in PAIRS for text in pair.values()]
    data.export_tokenizer(data.train_bpe(texts, vocab_size=300), folder)
    return folder


def write_pairs(pairs):
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def train(*flags):
    preference_training.dpo(parse_run(preference_training.RUNS, "", [*flags]))


def metrics(output, name):
    lines = read_json_lines(Path(output) / "metrics.jsonl")
    return [line[name] for line in lines if name in line]


def held_out_margin(base, run):
    """The mean margin of held-out pairs, from `log_likelihoods` of both models."""
    options = {"template": None, "row_length": 32, "folder": Path("cache")}
    pairs = data.read_preferences("pairs.jsonl", data.load_tokenizer(base), **options)
    rows = pairs.rows((pairs.split(0.2)[1][:, None] * 2 + [0, 1]).ravel())
    requests = [
        (tokens[: mask.argmax() + 1].tolist(), targets[mask].tolist())
        for tokens, targets, mask in zip(rows.tokens, rows.targets, rows.loss_mask, strict=True)
    ]
    sums = []
    for folder in (base, run):
        config, params, *_ = load_run(Path(folder))
        results = log_likelihoods(config, params, requests, max_length=32, batch_size=24)
        sums.append(np.array([result.log_probability for result in results]).reshape(-1, 2))
    ratios = sums[1] - sums[0]
    return 0.1 * np.mean(ratios[:, 0] - ratios[:, 1])


@pytest.mark.slow
def test_held_out_pairs_are_told_apart(folder, capsys):
    write_pairs([*PAIRS, {**PAIRS[0], "rejected": ""}])
    train("--init", str(folder), *FLAGS, *ONE, "--output", "run")
    printed = capsys.readouterr().out
    assert "Pairs that are left out: 1 because an answer is empty." in printed
    assert "Pairs: 49 to train on, 12 held out." in printed
    assert "Log-likelihoods of 122 answers under the reference." in printed
    margins = metrics("run", "held_out_margin")
    (last,), (accuracy,) = (metrics("run", f"final_held_out_{x}") for x in ("margin", "accuracy"))
    assert 0 < margins[0] < margins[1] < last and accuracy == 1
    assert metrics("run", "loss")[0] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics("run", "final_held_out_loss")[0] < metrics("run", "held_out_loss")[0] < 0.6932
    assert "Held-out pairs: accuracy 100.0%" in printed
    assert printed.count(" held-out pairs") == printed.count(" of 6 held-out") == len(margins)
    assert last == pytest.approx(held_out_margin(folder, "run"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [[], ADAPTER], ids=["whole", "adapter"])
def test_a_run_resumes_bitwise_and_eight_devices_equal_one(adapter, folder, capsys, monkeypatch):
    flags = ["--init", str(folder), *FLAGS, *adapter]
    train(*flags, *ONE, "--output", "one")
    get_batch = preference_training.PreferenceData.get_batch
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        dying = lambda self, k: get_batch(self, k + 0 // (k != 4))  # noqa: E731
        patch.setattr(preference_training.PreferenceData, "get_batch", dying)
        train(*flags, *ONE, "--save-every", "3", "--output", "cut")
    with monkeypatch.context() as patch:
        patch.setattr(
            preference_training.PreferenceData, "_reference_of", None
        )  # it is not computed again
        train("--resume", "--output", "cut")
    assert "Resumed from step 4." in capsys.readouterr().out
    for name in ("loss", "gradient_norm", "held_out_margin", "final_held_out_loss"):
        assert metrics("cut", name) == metrics("one", name)
    pair = (load_run(Path(name)).params for name in ("cut", "one"))
    jax.tree.map(np.testing.assert_array_equal, *pair)
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2", "--devices", "8"]
    mesh += ["--gradient-accumulation-steps", "2"]
    train(*flags, *mesh, "--output", "eight")
    np.testing.assert_allclose(metrics("eight", "loss"), metrics("one", "loss"), rtol=1e-5)
    for name in ("held_out_margin", "final_held_out_margin"):
        np.testing.assert_allclose(metrics("eight", name), metrics("one", name), rtol=1e-3)
    context = ["--mesh.fsdp", "4", "--mesh.context", "2", "--devices", "8"]
    train(*flags, *context, "--output", "context")
    np.testing.assert_allclose(metrics("context", "loss"), metrics("one", "loss"), rtol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_needs_its_reference_and_its_pairs(folder):
    flags = ["--init", str(folder), *FLAGS, *ONE, "--schedule-steps", "6", "--output", "run"]
    train(*flags, "--steps", "2")
    file = Path("run/reference.npz")
    saved_bytes = file.read_bytes()
    for content in (saved_bytes[:-50], b"", None):
        file.write_bytes(content) if content is not None else file.unlink()
        with pytest.raises(ValueError, match="reference.npz must have the log-likelihoods of the"):
            train("--resume", "--output", "run", "--steps", "4")
    file.write_bytes(saved_bytes)
    write_pairs(PAIRS[1:])
    with pytest.raises(ValueError, match=r"other settings.*\n  data.pairs: .* in the checkpoint"):
        train("--resume", "--output", "run", "--steps", "4")
    write_pairs(PAIRS)
    train("--resume", "--output", "run", "--steps", "4")
    assert len(metrics("run", "loss")) == 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch-size", "8", "--gradient-accumulation-steps", "4", "--devices", "2"], "be a mul"),
        (["--batch-size", "3", *ONE], "batch_size 3 must be a multiple of 2: 2 rows of a pair x 1"),
        (["--epochs", "2", "--steps", "3"], "--steps 3 and --epochs 2 cannot be combined"),
        (
            ["--pairs", "bad.jsonl", *ONE],
            "bad.jsonl has no pair that a row of 32 tokens can use: 1",
        ),
    ],
)
def test_runs_that_are_refused(flags, message, folder):
    Path("bad.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}))
    with pytest.raises((ValueError, SystemExit), match=message):
        train("--init", str(folder), *FLAGS, *flags, "--output", "run")


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="held_out must lie between 0 and 1; got 1.0"):
        replace(preference_training.RUNS["default"], held_out=1.0)
    with pytest.raises(ValueError, match="pass --init FOLDER --pairs FILE"):
        preference_training.dpo(preference_training.RUNS["default"])
