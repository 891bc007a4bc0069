"""Fine-tuning on a small file: rows, batches, learning rate and number of steps follow from it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer import data
from jaxformer.generation import Greedy
from jaxformer.run import finetuning, preference_training, pretraining, text_generation
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import load_run
from jaxformer.run.program import with_epochs_as_steps, with_one_length
from jaxformer.run.recorder import Evaluation
from jaxformer.run.train_setup import make_train_setup
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder

SETTINGS = LLAMA | {"vocab_size": 320, "hidden_size": 24, "intermediate_size": 22}
NAMES = ["Ada", "Bob", "Cid", "Dee", "Eve", "Fay"]
RECORDS = [
    {"prompt": f"What does {n} do {k} times?", "answer": f" {n} sleeps {k * 'well and '}well."}
    for n in NAMES
    for k in range(5)
]
INSTRUCTIONS = ["--corpus", 'Instructions(path="mine.jsonl")']
FLAGS = ["--devices", "1", "--cache", "cache", "--no-tensorboard", "--sample-tokens", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    drawn = random_tensors(llama_shapes(SETTINGS))
    tensors = {name: x if x.ndim == 1 else 0.1 * x for name, x in drawn.items()}
    folder = write_folder(tmp_path / "base", SETTINGS, tensors)
    texts = [record["prompt"] + record["answer"] for record in RECORDS]
    Path("my.txt").write_text("\n".join(texts))
    data.export_tokenizer(data.train_bpe(texts, vocab_size=300), folder)
    return folder


def parse(folder, *flags, program=finetuning):
    flags = ["--init", str(folder), "--devices", "1", "--cache", "cache", *flags]
    return parse_run(program.RUNS, "", flags)


def fitted(run, kind=pretraining.LanguageModelingData):
    return kind(run, make_train_setup(run.largest(), Path("out"), length=run.largest().length))


def test_rows_of_a_small_file_are_as_long_as_its_longest_instruction(folder):
    train_data = fitted(parse(folder, *INSTRUCTIONS))
    encode = data.load_tokenizer(folder).encode
    longest = max(len(encode(x["prompt"] + x["answer"])) for x in RECORDS)
    length = train_data.sequence_length
    assert length % 16 == 0 and longest + 1 <= length <= longest + 18 < 512
    rows = train_data.rows_per_epoch
    assert train_data.fitted == {"length": length, "batch_size": max(1, rows // 10)}
    assert train_data.get_batch(0).tokens.shape == (train_data.fitted["batch_size"], length)
    run = with_epochs_as_steps(replace(parse(folder), **train_data.fitted), rows)
    assert run.steps >= 10


def test_the_sample_without_a_prompt_is_of_the_first_held_out_instruction(folder):
    run = parse(folder, *INSTRUCTIONS)
    corpus = pretraining.prepare_corpus(run)
    first = next(iter(corpus.held_out_documents))
    (asked,) = (x["prompt"] for x in RECORDS if x["prompt"] + x["answer"] == first.text)
    expected = [corpus.tokenizer.end_of_text, *corpus.tokenizer.encode(asked)]
    assert pretraining.encode_prompt(run, corpus) == expected
    given = pretraining.encode_prompt(replace(run, prompt="ab"), corpus)
    assert given == [expected[0], *corpus.tokenizer.encode("ab")]


def test_rows_of_a_small_text_are_ten_and_of_a_large_one_as_long_as_ever(folder):
    run = parse(folder, "--corpus", "my.txt")
    small = fitted(run)
    assert 10 <= small.rows_per_epoch < 80 and small.sequence_length < 512
    Path("my.txt").write_text("".join(f"{n} sleeps {k}.\n" for n in NAMES for k in range(3000)))
    assert fitted(run).fitted == {"length": 512, "batch_size": 8}


def test_rows_and_batches_that_are_given_stay(folder):
    flags = (*INSTRUCTIONS, "--length", "512", "--batch-size", "8")
    assert fitted(parse(folder, *flags)).fitted == {"length": 512, "batch_size": 8}
    assert fitted(parse(folder, *flags[:4])).fitted["length"] == 512
    assert fitted(parse(folder, *INSTRUCTIONS, *flags[4:])).fitted["batch_size"] == 8


def test_batches_of_a_few_pairs_are_as_small_as_ten_updates_need(folder):
    pairs = [{"prompt": x["prompt"], "chosen": x["answer"], "rejected": " No."} for x in RECORDS]
    Path("pairs.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, pairs))))
    run = parse(folder, "--pairs", "pairs.jsonl", program=preference_training)
    train_data = fitted(run, preference_training.PreferenceData)
    encode = data.load_tokenizer(folder).encode
    longest = max(len(encode(x["prompt"] + x["chosen"])) + 1 for x in pairs)
    assert train_data.fitted == {"length": -(-longest // 16) * 16, "batch_size": 4}
    assert train_data.get_batch(0).chosen.tokens.shape == (2, train_data.sequence_length)
    given = replace(run, batch_size=16, length=512)
    expected = {"length": 512, "batch_size": 16}
    assert fitted(given, preference_training.PreferenceData).fitted == expected


@pytest.mark.parametrize(
    "flags, epochs, steps",
    [([], 1.0, None), (["--steps", "7"], None, 7), (["--epochs", "3"], 3.0, None)],
)
def test_steps_replace_default_epochs(folder, flags, epochs, steps):
    run = with_one_length(parse(folder, *flags), finetuning.RUNS)
    assert (run.epochs, run.steps) == (epochs, steps)


def test_a_run_without_epochs_needs_steps(folder):
    with pytest.raises(ValueError, match="--epochs None needs --steps NUMBER"):
        replace(parse(folder), epochs=None)


def test_few_updates_are_named_with_the_epochs_that_make_enough(capsys):
    run = replace(finetuning.RUNS["default"], batch_size=2)
    with_epochs_as_steps(run, 21)
    assert capsys.readouterr().out == (
        "Epochs: 1, steps: 11.\nSo few updates change a model little; 200 would be --epochs 20.\n"
    )
    with_epochs_as_steps(replace(run, epochs=5.0), 21)
    assert capsys.readouterr().out == "Epochs: 5, steps: 53.\n"


def test_the_learning_rate_follows_from_the_width_where_none_is_given(folder):
    run = parse(folder, *INSTRUCTIONS)
    assert run.optimizer.schedule.peak == pytest.approx(2e-5 * 1024 / 24, rel=2e-3)
    adapter = *INSTRUCTIONS, "--model.adapter", "LoRA(rank=2)"
    run = parse(folder, *adapter)
    assert run.optimizer.schedule.peak == pytest.approx(2e-4 * 1024 / 24, rel=2e-3)
    for flags in (("--lr", "2e-5"), ("--optimizer.schedule", "Cosine(peak=2e-5)")):
        run = parse(folder, *adapter, *flags)
        assert run.optimizer.schedule.peak == 2e-5
    given = ["--optimizer.schedule", "Cosine(peak=2e-5, warmup_steps=20)"]
    assert parse(folder, *given).optimizer.schedule.peak == 2e-5


@pytest.mark.slow
def test_a_small_file_is_learned_with_the_flags_of_the_readme(folder):
    flags = [*INSTRUCTIONS, *FLAGS, "--epochs", "20", "--log-every", "1", "--output", "out"]
    finetuning.finetune(parse(folder, *flags))
    losses = [line["loss"] for line in read_json_lines(Path("out/metrics.jsonl")) if "loss" in line]
    assert np.mean(losses[-10:]) < losses[0] / 2


@pytest.mark.slow
def test_the_best_step_is_kept_and_used_and_a_rise_of_the_loss_is_named(
    folder, monkeypatch, capsys
):
    losses = iter([3.0, 1.5, 2.0, 2.5, 2.5])  # after steps 2, 4, 6, 7, and the final one

    def evaluate(self, step, params, recorder, *, final):
        loss = next(losses)
        named = {"final_held_out_bits_per_byte": loss, "tokens_per_byte": 1.0}
        return Evaluation(named if final else {"held_out_bits_per_byte": loss}, loss=loss)

    monkeypatch.setattr(pretraining.LanguageModelingData, "evaluate", evaluate)
    flags = [*INSTRUCTIONS, *FLAGS, "--steps", "7", "--evaluate-every", "2", "--save-every", "5"]
    finetuning.finetune(parse(folder, *flags, "--keep", "1", "--output", "out"))
    with Checkpoints("out/checkpoints") as checkpoints:
        assert (checkpoints.all_steps(), checkpoints.best_step()) == ([4, 7], 4)
    assert (
        "The held-out loss rose from 1.5 at step 4 to 2.5 at step 7 (overfitting). To use step 4, "
        "pass --step best: jaxformer export --checkpoint out --step best --output"
    ) in capsys.readouterr().out
    assert load_run(Path("out"), "best").step == 4
    texts = [
        text_generation.generate(
            text_generation.Generate(checkpoint=Path("out"), step=step, sampler=Greedy())
        )
        for step in ("best", 4)
    ]
    assert texts[0] == texts[1]
