"""Runs that Python starts do what their commands do, and leave the process as it was."""

import copy
import json
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer import data, run
from jaxformer.config import LoRA
from jaxformer.run import finetuning, preference_training, pretraining, text_generation
from jaxformer.run.beginning import begin
from jaxformer.run.command_line import parse_run
from jaxformer.run.program import print_run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines

TEXT = "".join(f"{n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(300))
ONCE = {"devices": 1, "tensorboard": False, "cache": Path("cache")}
FLAGS = ["--devices", "1", "--no-tensorboard", "--cache", "cache"]
ADAPTER = LoRA(rank=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, instructions, pairs, a pretrained run and its export."""
    place = tmp_path_factory.mktemp("functions")
    lines = [{"prompt": f"{n} times {n}?", "answer": f" {n * n}"} for n in range(60)]
    pairs = [{"prompt": f"{n}?", "chosen": f" {n}", "rejected": " No."} for n in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("my.txt").write_text(TEXT)
        Path("mine.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        Path("pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
        tiny = pretraining.RUNS["tiny"].model
        model = replace(tiny, model_dim=32, num_layers=1, vocab_size=384)
        folder = run.pretrain(
            run.Pretrain(
                model=model,
                corpus=data.TextFiles(path="my.txt"),
                tokenizer=data.BPE(vocab_size=300),
                output=Path("pretrained"),
                length=64,
                steps=6,
                sample_tokens=4,
                **ONCE,
            )
        )
        assert folder == Path("pretrained")
        run.export(run.Export(checkpoint=folder, output=Path("exported")))
    return place


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def first_model(folder):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.read_description()["run"]


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pretrained", "exported"])
def test_fine_tuning_from_python_is_fine_tuning_by_its_command(init, tmp_path):
    """Model, tokenizer, rate, rows and batches of --init; the same losses, to the bit."""
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    texts = data.Instructions(path="mine.jsonl")
    ours = run.finetune(
        run.Finetune(init=init, corpus=texts, output=tmp_path / "ours", sample_tokens=2, **ONCE)
    )
    flags = ["--init", init, "--corpus", 'Instructions(path="mine.jsonl")', "--sample-tokens", "2"]
    finetuning.main([*flags, *FLAGS, "--output", str(tmp_path / "theirs")])
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    settings = [json.loads((tmp_path / x / "run.json").read_text()) for x in ("ours", "theirs")]
    assert settings[0] | {"output": None} == settings[1] | {"output": None}
    assert settings[0]["optimizer"]["schedule"]["peak"] == 2e-5 * 1024 / 32
    assert settings[0]["tokenizer"]["path"] == init and settings[0]["model"]["model_dim"] == 32
    curves = [
        [line["loss"] for line in read_json_lines(tmp_path / x / "metrics.jsonl") if "loss" in line]
        for x in ("ours", "theirs")
    ]
    assert curves[0] and curves[0] == curves[1]
    theirs = run.load_run(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, run.load_run(ours).params, theirs.params)


PYTHON = {
    "init alone": ({}, []),
    "a default that is given": (
        {"optimizer": run.Finetune.optimizer, "tokenizer": run.Finetune.tokenizer},
        ["--learning-rate", "2e-5", "--tokenizer", "BPE(vocab_size=4096)"],
    ),
    "steps and a length": ({"steps": 9, "length": 8}, ["--steps", "9", "--length", "8"]),
}


@pytest.mark.parametrize("fields, flags", PYTHON.values(), ids=PYTHON)
def test_given_fields_are_flags_and_the_others_follow(fields, flags):
    ours = begin(run.Finetune(init="exported", **fields), finetuning.RUNS)
    assert ours == parse_run(finetuning.RUNS, "", ["--init", "exported", *flags])


def test_adapters_of_python_have_their_rate():
    model = replace(run.load_run(Path("exported")).config, adapter=ADAPTER)
    ours = begin(run.Finetune(init="exported", model=model), finetuning.RUNS)
    flags = ["--init", "exported", "--model.adapter", "LoRA(rank=2)"]
    theirs = parse_run(finetuning.RUNS, "", flags)
    assert ours.optimizer == theirs.optimizer and ours.optimizer.schedule.peak == 6.4e-3
    assert ours.model.adapter == theirs.model.adapter == ADAPTER


def test_the_vocabulary_of_python_is_that_of_its_tokenizer():
    ours = begin(run.Pretrain(tokenizer=data.BPE(vocab_size=700)), pretraining.RUNS)
    assert ours.model.vocab_size == 768
    assert ours == parse_run(pretraining.RUNS, "", ["--tokenizer", "BPE(vocab_size=700)"])


def test_a_replaced_run_begins_with_its_init():
    ours = replace(run.Finetune(init="exported"), epochs=3.0)
    flags = ["--init", "exported", "--epochs", "3"]
    assert begin(ours, finetuning.RUNS) == parse_run(finetuning.RUNS, "", flags)


@pytest.mark.slow
def test_a_resumed_run_of_python_has_its_saved_settings(tmp_path):
    output, text = tmp_path / "out", data.TextFiles(path="my.txt")
    fields = {"corpus": text, "output": output, "sample_tokens": None, **ONCE}
    init = {"init": "exported", "batch_size": 2, "length": 32}
    run.finetune(run.Finetune(**init, **fields, steps=3, schedule_steps=600))
    run.finetune(run.Finetune(output=output, resume=True, steps=600 // 120))
    assert run.load_run(output).step == 5
    settings = json.loads((output / "run.json").read_text())
    assert (settings["batch_size"], settings["init"], settings["steps"]) == (2, "exported", 5)


@pytest.mark.slow
def test_dpo_of_python_evaluates_and_exports(tmp_path, capsys):
    pairs = {"pairs": Path("pairs.jsonl"), "output": tmp_path / "out", "chat_template": "chatml"}
    folder = run.dpo(run.Dpo(init="exported", steps=4, **pairs, **ONCE))
    settings = json.loads((folder / "run.json").read_text())
    assert settings["optimizer"]["schedule"]["peak"] == 3.2e-5
    ours = begin(run.Dpo(init="exported", pairs=pairs["pairs"]), preference_training.RUNS)
    flags = ["--init", "exported", "--pairs", "pairs.jsonl"]
    assert ours == parse_run(preference_training.RUNS, "", flags)
    text = data.TextFiles(path="my.txt")
    evaluated = run.evaluate(run.Evaluate(checkpoint=folder, text=text))
    assert evaluated["text"]["bytes"] == len(TEXT) and evaluated["text"]["bits_per_byte"] > 0
    exported = run.export(run.Export(checkpoint=folder, output=tmp_path / "exported"))
    again = run.evaluate(run.Evaluate(checkpoint=exported, text=text, length=64))
    assert again["text"]["tokens"] == evaluated["text"]["tokens"]
    capsys.readouterr()
    said = run.generate(run.Generate(checkpoint=exported, prompt="1?", max_new_tokens=3))
    assert said.startswith("1?") and capsys.readouterr().out.startswith("1?")


def test_mistakes_of_python_are_exceptions(tmp_path):
    with pytest.raises(ValueError, match=r"needs a pretrained model: pass --init FOLDER\."):
        run.finetune(run.Finetune(output=tmp_path / "x"))
    with pytest.raises(ValueError, match="There is no folder 'nowhere'"):
        run.finetune(run.Finetune(init="nowhere"))
    with pytest.raises(ValueError, match=r"DPO needs a model and pairs of answers: pass --init"):
        run.dpo(run.Dpo(init="exported"))
    with pytest.raises(ValueError, match="has no checkpoints and no config.json"):
        run.load_run(tmp_path)


def test_mistakes_name_the_fields_beside_the_flags(tmp_path, capsys):
    earlier = run.Finetune(init="exported", output="pretrained", corpus="my.txt", **ONCE)
    for function, options, fields in (
        (run.finetune, earlier, "resume, resume_or_begin, output"),
        (run.dpo, run.Dpo(init="exported"), "init, pairs"),
        (run.load_run, "pretrained", "ignore"),
    ):
        with pytest.raises(ValueError) as ended:
            function(options, **({"ignore": ["x"]} if function is run.load_run else {}))
        assert ended.value.__notes__ == [f"(In Python: {fields}.)"]
    with pytest.raises(ValueError, match=r"push\. \(In Python: private, push\.\)"):
        run.Export(checkpoint="a", output="b", private=True)
    with pytest.raises(SystemExit):
        preference_training.main(["--init", "exported"])
    assert "pass --init FOLDER --pairs FILE.\n(Set" in capsys.readouterr().err


def test_paths_begin_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = data.Instructions(path="~/a")
    asked = run.Finetune(init="~/m", output="~/x", tokenizer="~/t", corpus=texts, cache=Path("~"))
    assert (asked.init, asked.output, asked.cache) == (f"{tmp_path}/m", tmp_path / "x", tmp_path)
    assert asked.tokenizer.path == f"{tmp_path}/t" and asked.corpus.path == f"{tmp_path}/a"
    for kind in (data.TextFiles, data.Packed, data.PretrainedTokenizer):
        assert kind(path="~/b").path == f"{tmp_path}/b"
    flags = ["--output", "~/x", "--cache", "~/c"]
    assert parse_run(pretraining.RUNS, "", flags).output == tmp_path / "x"
    (tmp_path / "mine").symlink_to(Path("exported").resolve())
    assert run.load_run("~/mine").config == run.load_run("exported").config


@pytest.mark.slow
def test_a_loaded_model_has_the_context_of_its_run(capsys):
    """So that a run with it prints no other."""
    model = run.load_run("pretrained").config
    assert model.max_position_embeddings == 64
    ours = begin(run.Finetune(init="pretrained", model=model), finetuning.RUNS)
    print_run(ours, finetuning.RUNS)
    assert "model" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("chat", [{}, {"chat": True, "chat_template": "chatml"}])
def test_texts_end_where_the_context_of_the_model_ends(chat, capsys, monkeypatch):
    counts = []

    def count(config, params, prompts, *, max_new_tokens, **_):
        counts.append(len(prompts[0]) + max_new_tokens)
        return iter(())

    monkeypatch.setattr(text_generation, "stream", count)
    run.generate(run.Generate(checkpoint="pretrained", prompt="12: the", **chat))
    assert counts == [64] and not capsys.readouterr().err
    run.generate(run.Generate(checkpoint="pretrained", prompt="1", max_new_tokens=160, **chat))
    assert counts[1] > 160 and "the model knows 64 positions" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupt_of_python_raises_with_what_resumes(tmp_path, monkeypatch):
    batch, output = data.Batches.__getitem__, tmp_path / "out"

    def interrupt(self, now):
        if now == 2:
            signal.raise_signal(signal.SIGINT)
        return batch(self, now)

    before = signal.getsignal(signal.SIGINT)
    text = {"corpus": data.TextFiles(path="my.txt"), "length": 32, "batch_size": 2, "steps": 8}
    tuned = run.Finetune(init="exported", output=output, sample_tokens=None, **text, **ONCE)
    monkeypatch.setattr(data.Batches, "__getitem__", interrupt)
    with pytest.raises(KeyboardInterrupt) as ended:
        run.finetune(tuned)
    assert signal.getsignal(signal.SIGINT) is before
    (note,) = ended.value.__notes__
    step = run.load_run(output).step
    assert note.startswith(f"The last good checkpoint is {step} in {output}.\nTo resume:\n  jaxfo")
    assert note.endswith(f" --resume --output {output}")


def test_paths_and_strings_are_taken_alike():
    asked = run.Finetune(init=Path("pretrained"), corpus="my.txt", tokenizer=Path("exported"))
    assert asked.init == "pretrained" and asked.corpus == data.TextFiles(path="my.txt")
    assert asked.tokenizer == data.PretrainedTokenizer(path="exported")
    assert run.Export(checkpoint="a", output="b").output == Path("b")
    assert run.Evaluate(checkpoint="a", text=Path("my.txt")).text == data.TextFiles(path="my.txt")


def test_a_loaded_model_prints_without_its_parameters():
    model = run.load_run("pretrained")
    count = sum(x.size for x in jax.tree.leaves(model.params))
    assert repr(model) == f"LoadedModel(folder='pretrained', step=6, {count:,} parameters)"
    with pytest.raises(ValueError, match="There is no folder absent"):
        run.load_run("absent")


def test_a_run_of_another_program_is_refused():
    for function, options in (
        (run.pretrain, run.Finetune(init="pretrained")),
        (run.finetune, run.Pretrain(init="pretrained")),
        (run.dpo, {"init": "pretrained"}),
        (run.finetune, run.Finetune),
    ):
        name = {run.pretrain: "Pretrain", run.finetune: "Finetune", run.dpo: "Dpo"}[function]
        with pytest.raises(ValueError, match=f"This program takes a {name}; got "):
            function(options)
    with pytest.raises(ValueError, match="There is no checkpoint in absent"):
        run.finetune(run.Finetune(resume=True, output="absent"))


@pytest.mark.parametrize("kind", [run.Pretrain, run.Finetune, run.Dpo])
def test_runs_are_copied_with_the_fields_that_were_given(kind):
    original = kind(steps=3)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert copied == original and copied.given == {"steps"}


@pytest.mark.slow
def test_the_same_replaced_call_begins_and_then_resumes():
    """A script that is started again: its run is complete, or goes on to more steps."""
    base = run.Finetune(
        init="exported", corpus="my.txt", output="again", resume_or_begin=True, epochs=None,
        steps=2, sample_tokens=None, **ONCE,
    )  # fmt: skip
    for steps in (2, 2, 4):
        run.finetune(replace(base, steps=steps))
        assert run.load_run("again").step == steps


@pytest.mark.slow
def test_a_run_may_train_in_a_thread():
    """Where no signal handler can be installed."""
    asked = run.Finetune(
        init="exported", corpus="my.txt", output="threaded", epochs=None, steps=2,
        sample_tokens=None, **ONCE,
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        assert pool.submit(run.finetune, asked).result() == Path("threaded")
