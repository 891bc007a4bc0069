import errno
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxformer import inspect
from jaxformer.config import GLU, Embedding, Learned, MultiHead, TransformerConfig
from jaxformer.data import (
    BPE,
    Batches,
    ByteLevel,
    Characters,
    Instructions,
    Packed,
    PretrainedTokenizer,
    TextFiles,
    load_tokenizer,
    loss_text,
)
from jaxformer.data.__main__ import main as tokenize_corpus
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run, readable_errors
from jaxformer.run.loading import load_run
from jaxformer.run.memory_advice import TooLargeError
from jaxformer.run.output_folder import open_output_folder
from jaxformer.run.plot import plot_run
from jaxformer.run.program import print_run, with_fixed_schedule
from jaxformer.run.run_config import flatten
from jaxformer.training import loop
from jaxformer.training import train_step as step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.optimizers import SGD, AdamW, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant, Cosine
from jaxformer.training.skip_step import SkipStepConfig

ROOT = Path(pretraining.__file__).parents[2]
MODEL = TransformerConfig(
    vocab_size=257,
    model_dim=16,
    num_layers=2,
    attention=MultiHead(num_heads=2, num_kv_heads=1, head_dim=6),
    feed_forward=(GLU(hidden_dim=11),),
)
LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(60) for w in ("a", "b")]
BASE = pretraining.Pretrain(
    model=MODEL,
    corpus=TextFiles(path="corpus.txt"),
    tokenizer=ByteLevel(),
    held_out=0.1,
    length=16,
    batch_size=4,
    steps=12,
    schedule_steps=12,
    optimizer=OptimizerConfig(
        schedule=Cosine(peak=0.01, warmup_steps=3), optimizer=AdamW(weight_decay=0.1)
    ),
    scan=True,
    devices=1,
    output=Path("out"),
    cache=Path("cache"),
    log_every=1,
    evaluate_every=4,
    evaluate_rows=3,
    save_every=3,
    keep=9,
    tensorboard=False,
    prompt="the ",
    sample_tokens=2,
)


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(LINES))
    monkeypatch.setattr(pretraining, "print_sample", lambda *_, **__: None)  # `whole` has one


def restored(folder, number=None, run=BASE):
    model = Transformer(run.model, scan=run.scan)
    optimizer = make_optimizer(run.optimizer, run.schedule_steps, parameter_metadata(run.model))
    abstract = step.abstract_train_state(
        model, optimizer, make_mesh(MeshConfig(), jax.devices()[:1])
    )
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        return jax.device_get(checkpoints.restore(number, abstract))


def saved_steps(folder):
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        return checkpoints.all_steps()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def losses(folder):
    lines = read_json_lines(Path(folder) / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def run_main(run):
    with readable_errors():
        return pretraining.pretrain(run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of one uninterrupted run, what it printed, and the programs it compiled."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "corpus.txt").write_text("".join(LINES))
    names, before, shown = [], os.getcwd(), []
    handler = logging.Handler()
    handler.emit = lambda record: names.append(record.getMessage())
    logger = logging.getLogger("jax._src.interpreters.pxla")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("builtins.print", lambda *words, **_: shown.append(" ".join(map(str, words))))
        patch.setattr(logger, "propagate", False)
        logger.addHandler(handler)
        try:
            with jax.log_compiles():
                assert pretraining.pretrain(replace(BASE, profile_steps="5:7")) == Path("out")
        finally:
            logger.removeHandler(handler)
    assert os.getcwd() == before
    return folder / "out", "\n".join(shown), names


# One run from beginning to end


def test_a_run_prints_its_settings_first_and_its_results_last(whole):
    folder, shown, _ = whole
    settings = shown.split("Corpus:")[0]
    assert settings.startswith("Run: tiny\n  --model.vocab-size 257\n")
    assert "\n  --steps 12\n" in settings and "--seed" not in settings
    assert re.search(
        r"Corpus: corpus\.txt\n  training data: 1 documents, [\d.]+k? bytes and", shown
    )
    assert re.search(r"Compiled in [\d.]+ s\. Memory per device: [\d.]+ [kM]B for", shown)
    assert shown.count("Attention of ") == 1
    match = re.search(r"Held-out loss: ([\d.]+) bits per byte\.", shown)
    assert 0 < float(match[1]) < 12
    lines = read_json_lines(folder / "metrics.jsonl")
    assert f"{lines[-1]['final_held_out_bits_per_byte']:.3f}" == match[1]
    assert "gzip_bits_per_byte" not in lines[-1], "gzip of 400 bytes is no yardstick"
    assert 0 < lines[-1]["tokens_per_byte"] <= 1.1  # bytes are the tokens of this run
    assert "\nSample:\nthe " in shown
    repeat = shown.partition("Results are in out. To repeat the run:\n")[2]
    repeated = parse_run(pretraining.RUNS, "", shlex.split(repeat)[2:])
    assert repeated == replace(BASE, output=None, profile_steps="5:7")
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_of_some_steps_is_summed_by_module(whole):
    folder, shown, _ = whole
    tables = (folder / "profile" / "profile.md").read_text()
    assert "(mean of 2 steps)." in tables.splitlines()[0] and tables.splitlines()[0] in shown
    rows = {
        row[1].strip(): row[2:-1] for line in tables.splitlines() if (row := line.split("|"))[1:]
    }
    for name in ("gate", "up", "down"):
        forward, _, backward, other, *_ = rows[
            f"Transformer/decoder/layers/layer_*/feed_forward/{name}"
        ]
        assert forward.strip() and backward.strip() and not other.strip()
    forward, _, backward, other, *_ = rows["optimizer"]
    assert not (forward + backward).strip() and float(other) > 0


@pytest.mark.slow
def test_what_a_run_left_can_be_looked_into(whole):
    folder, _, _ = whole
    run = load_run(folder)
    tokens = jnp.asarray(run.tokenizer.encode("the fox"), jnp.int32)
    maps = inspect.attention_maps(run.config, run.params, tokens).decoder
    assert maps.shape == (2, 2, len(tokens), len(tokens))
    np.testing.assert_allclose(np.sum(maps, axis=-1), 1.0, atol=1e-6)
    losses = inspect.token_losses(run.config, run.params, tokens)
    assert 0 < float(losses.mean()) < 6


def test_a_run_is_drawn_in_bits_per_byte_and_ends_in_the_held_out_text(tmp_path, monkeypatch):
    """The training loss is smoothed; the last point is all of the held-out text, and labelled."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    lines = [{"step": i, "loss": 5.0 + (-1) ** i} for i in range(1, 41)]
    plot_run(tmp_path / "run.png", lines, gzip=1.9)
    ends = [
        {"step": 20, "held_out_bits_per_byte": 2.5},
        {"step": 40, "final_held_out_bits_per_byte": 2.0, "tokens_per_byte": 0.25},
    ]
    plot_run(tmp_path / "run.png", lines + ends, gzip=1.9)
    unfinished, (axes,) = drawn[0].axes[0], drawn[1].axes
    shown = {line.get_label(): line.get_xydata() for line in axes.lines}
    single, mean = shown["training, single batches"], shown["training, moving average"]
    np.testing.assert_allclose(single[:2], [[1, 1 / np.log(2)], [2, 1.5 / np.log(2)]])
    np.testing.assert_allclose(mean[5:-5, 1], 1.25 / np.log(2), rtol=0.05)
    assert shown["held-out text, sample"].tolist() == [[20, 2.5], [40, 2]]
    assert shown["held-out text, complete"].tolist() == [[40, 2]]
    assert [text.get_text() for text in axes.texts] == ["2.000"]
    assert axes.get_legend() is None and len(drawn[1].legends) == 1  # below the curves
    assert drawn[1].get_suptitle() and float(axes.lines[0].get_color()) <= 0.65  # seen on white
    assert shown["gzip -9: 1.900"].tolist() == [[0, 1.9], [1, 1.9]]
    assert not any("training" in line.get_label() for line in unfinished.lines)


def test_a_run_writes_the_numbers_of_every_step_and_of_every_evaluation(whole):
    folder, _, _ = whole
    lines = read_json_lines(folder / "metrics.jsonl")
    updates = [line for line in lines if "loss" in line]
    assert [line["step"] for line in updates] == list(range(1, 13))
    for line in updates:
        assert 0 < line["loss"] < 7 and 0 < line["gradient_norm"] < 100
        assert line["tokens_per_second"] > 0
    assert updates[2]["learning_rate"] == pytest.approx(0.01)
    assert updates[0]["learning_rate"] == pytest.approx(0.01 / 3)
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [4, 8, 12]
    assert updates[-1]["loss"] < updates[0]["loss"]


def test_the_update_is_compiled_once(whole):
    """The update and the evaluation, one program each."""
    _, _, names = whole
    for program in ("train_step", "summed_losses"):
        assert sum(name.startswith(f"Compiling jit({program})") for name in names) == 1


@pytest.mark.slow
def test_checkpoints_hold_what_is_needed_to_use_them(whole):
    folder, _, _ = whole
    assert saved_steps(folder) == [3, 4, 6, 8, 9, 12]  # every third, and the best of 4, 8 and 12
    assert load_tokenizer(folder).vocab_size == 257
    with Checkpoints(folder / "checkpoints") as checkpoints:
        description = checkpoints.read_description()
    assert description["config"]["model_dim"] == 16
    assert description["run"]["batch_size"] == 4
    assert int(restored(folder).step) == 12


@pytest.mark.slow
def test_held_out_bits_per_byte_are_those_of_the_whole_text(whole):
    """From the parameters: -sum of log2 p over the held-out text, over its bytes."""
    folder, _, _ = whole
    rows = pretraining.prepare_corpus(replace(BASE, cache=folder.parent / "cache")).held_out
    tokens, segments, positions = (jnp.asarray(x, jnp.int32) for x in rows[list(range(len(rows)))])
    params = jax.tree.map(jnp.asarray, restored(folder).params)
    logits = jax.jit(Transformer(MODEL).apply)(
        {"params": params}, tokens[:, :-1], positions=positions, segments=segments
    )
    log_probs = np.float64(jax.nn.log_softmax(logits))
    log_probs = np.take_along_axis(log_probs, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    counts = np.asarray(segments) > 0
    assert counts.sum() == rows.num_targets < counts.size
    lines = read_json_lines(folder / "metrics.jsonl")
    final = lines[-1]["final_held_out_bits_per_byte"]
    bits = -np.sum(log_probs[counts]) / np.log(2)
    assert final == pytest.approx(bits / rows.num_bytes, rel=1e-5)
    assert rows.num_bytes == rows.num_targets - 1 < 0.12 * len("".join(LINES))


def test_held_out_text_is_bounded(capsys):
    text = pretraining.prepare_corpus(replace(BASE, held_out_bytes=100))
    assert text.held_out.num_bytes == 100
    assert text.train.num_bytes == len("".join(LINES)) - 100
    assert "held out are at most 100 bytes, not 10.00% (--held" in capsys.readouterr().out
    pretraining.prepare_corpus(replace(BASE, held_out_bytes=None))
    assert "held out are" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_trains_from_tokens(capsys):
    """With their tokenizer, which its flags need not name; and it goes on without their text."""
    Path("texts").mkdir()
    for n in range(20):
        Path(f"texts/{n:02}.txt").write_text("".join(LINES[6 * n : 6 * n + 6]))
    for part in ("1/2", "2/2"):
        tokenize_corpus(
            ["texts", *("--tokenizer", "ByteLevel()", "--output", "tokens", "--part", part)]
        )
    flags = ["--corpus", "Packed(path='tokens')", "--output", "packed"]
    run = parse_run({"x": replace(BASE, tokenizer=BPE(vocab_size=257))}, "", flags)
    assert run.tokenizer == PretrainedTokenizer(path="tokens") and run.model.vocab_size == 384
    text = pretraining.prepare_corpus(run)
    assert text.train.num_bytes + text.held_out.num_bytes == len("".join(LINES))
    run_main(replace(run, steps=6))
    shutil.rmtree("texts"), shutil.rmtree("cache", ignore_errors=True)
    run_main(replace(run, resume=True))
    run_main(replace(run, output=Path("whole")))
    assert losses("packed") == losses("whole") and len(losses("whole")) == 12
    ids = np.fromfile("tokens/part-1-of-2/tokens.bin", np.uint16)
    Path("gpt").mkdir(), ids.tofile("gpt/train.bin")  # as nanoGPT's
    shards = replace(run, corpus=Packed(path="gpt"), steps=3, output=Path("gpt-run"))
    run_main(replace(shards, tokenizer=ByteLevel()))
    assert len(losses("gpt-run")) == 3
    message = "The text of tokens is tokenized; pass its tokenizer: --tokenizer FILE_OR_FOLDER"
    with pytest.raises(ValueError, match=message):
        pretraining.prepare_corpus(replace(run, tokenizer=Characters()))


def test_texts_and_instructions_are_mixed_by_weight(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(LINES))
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(100)]
    Path("sums.jsonl").write_text("\n".join(lines))
    parts = 'TextFiles(path="corpus.txt"), Instructions(path="sums.jsonl")'
    mixture = f"Mixture(parts=({parts}), weights=(3, 1))"
    text = pretraining.prepare_corpus(parse_run({"x": BASE}, "", ["--corpus", mixture]))
    assert "  sums.jsonl\n  training data: 89 documents" in capsys.readouterr().out
    batches = Batches(text.train, batch_size=8, seed=0)
    of_sums = [batches[i].loss_mask.sum(axis=1) < 16 for i in range(4)]
    assert [int(rows.sum()) for rows in of_sums] == [2, 2, 2, 2]
    names = {document.name.partition(".")[0] for document in text.held_out_documents}
    assert names == {"corpus", "sums"}
    sums = sum(len(loss_text(example, text.tokenizer)) for example in text.held_out_documents)
    assert text.held_out.num_bytes == sums


# Resuming


@pytest.mark.slow
def test_a_run_that_is_kept_in_a_store_goes_on_elsewhere(whole, tmp_path, monkeypatch):
    @epath.register_path_cls("shelf://")
    class Shelf(epath.gpath.PosixGPath):
        def __new__(cls, first, *rest):
            return super().__new__(cls, str(first).replace("shelf:/", str(tmp_path)), *rest)

    output, there = Path("shelf://bucket/run"), tmp_path / "bucket" / "run"
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(pretraining, "plot_run", None)  # it dies after its last checkpoint
        run_main(replace(BASE, steps=6, output=output, tensorboard=True))
    with pytest.raises(SystemExit):
        run_main(replace(BASE, output=output))  # it holds an earlier run
    shutil.rmtree("runs")  # all that the first machine has
    flags = ["--resume", "--output", str(output), "--steps", "12"]
    resumed = parse_run(pretraining.RUNS, "", flags)
    assert resumed == replace(BASE, output=output, resume=True, tensorboard=True)
    run_main(resumed)
    assert_same(restored(there), restored(whole[0]))
    assert losses(there) == losses(whole[0])
    names = {path.name for path in there.iterdir()}
    written = {"corpus.json", "metrics.jsonl", "run.json", "run.png", "tokenizer.json"}
    assert names == written | {"checkpoints", "tensorboard"}
    assert len(list((there / "tensorboard").iterdir())) == 2
    shutil.rmtree("runs")
    assert_same(load_run(output, layout="stacked").params, restored(there).params)
    assert not Path("runs/stores").exists()  # where a run would be writing


@pytest.fixture
def interruptible():
    """Ctrl-C as on a terminal, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "number, status, at, saved",
    [(signal.SIGINT, 130, 7, [3, 4, 6, 8]), (signal.SIGTERM, 143, 5, [3, 4, 6])],
    ids=["SIGINT between checkpoints", "SIGTERM where one is due"],
)
@pytest.mark.slow
def test_a_signal_saves_the_state_once_and_the_resumed_run_ends_bitwise_the_same(
    whole, monkeypatch, capfd, number, status, at, saved
):
    batch = pretraining.data.Batches.__getitem__

    def interrupt(self, now):
        if now == at:
            signal.raise_signal(number)
        return batch(self, now)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining.data.Batches, "__getitem__", interrupt)
        with pytest.raises(SystemExit) as ended:
            run_main(BASE)
    assert ended.value.code == status
    assert signal.getsignal(number) is before
    printed, _, command = capfd.readouterr().err.rpartition("\n  ")
    assert printed.endswith(
        f"\n{number.name}: exiting after the next save (2 more: exit at once).\n"
        f"\nInterrupted. The last good checkpoint is {saved[-1]} in out.\nTo resume:"
    )
    program, name, *flags = shlex.split(command)
    assert (program, name) == ("jaxformer", "pretrain")
    assert parse_run(pretraining.RUNS, "", flags) == replace(BASE, resume=True)
    assert saved_steps("out") == saved
    assert losses("out") == losses(whole[0])[: saved[-1]]
    run_main(replace(BASE, resume=True))
    assert_same(restored("out"), restored(whole[0]))
    assert losses("out") == losses(whole[0])


@pytest.fixture
def six(whole, tmp_path):
    """A copy of the uninterrupted run as if it had died before its checkpoint at step 9.

    Its metrics go on beyond step 6.
    """
    for name in ("out", "cache"):
        shutil.copytree(whole[0].parent / name, tmp_path / name)
    for number in ("8", "9", "12"):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / number)
    return tmp_path / "out"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 8}, "run.batch_size: 4 in the checkpoint, 8 now"),
        ({"seed": 5}, "run.seed: 0 in the checkpoint, 5 now"),
        ({"schedule_steps": 13}, "run.schedule_steps: 12 in the checkpoint, 13 now"),
        (
            {"model": replace(MODEL, num_layers=3)},
            "run.model.num_layers: 2 in the checkpoint, 3 now",
        ),
        (
            {"optimizer": replace(BASE.optimizer, clip_norm=None)},
            "run.optimizer.clip_norm: 1.0 in the checkpoint, None now",
        ),
        (
            {"tokenizer": BPE(vocab_size=257)},
            "run.tokenizer.type: ByteLevel in the checkpoint, BPE now",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_change_that_would_give_another_result_is_refused(six, changes, message):
    files = {p: p.read_bytes() for p in six.glob("*.json*")}
    assert {p.stem for p in files} == {"tokenizer", "metrics", "run", "corpus"}
    with pytest.raises(ValueError, match=f"checkpoint has other settings.*\n(.*\n)*  {message}"):
        pretraining.pretrain(replace(BASE, resume=True, **changes))
    assert {p: p.read_bytes() for p in six.glob("*.json*")} == files, "refused and yet changed"
    assert saved_steps(six) == [3, 4, 6]


@pytest.mark.slow
def test_a_resumed_run_reads_no_text_and_needs_none(whole, six, monkeypatch):
    """It has its tokenizer, and its rows are in the cache."""
    monkeypatch.setattr("jaxformer.data.corpus._read_documents", None)
    monkeypatch.setattr("jaxformer.data.corpus_cache.build_tokenizer", None)
    Path("corpus.txt").unlink()
    run_main(replace(BASE, resume=True))
    assert losses("out") == losses(whole[0])
    assert_same(restored("out"), restored(whole[0]))


def test_a_resumed_run_names_the_files_that_changed(six):
    Path("corpus.txt").write_text("".join(LINES[::-1]))
    message = r"corpus\.txt is not that of the run: corpus\.txt has changed\. Restore it"
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, resume=True))
    Path("corpus.txt").rename("other.txt")
    message = r"other\.txt is not that of the run: corpus\.txt is missing, other\.txt is new\."
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, resume=True, corpus=TextFiles(path="other.txt")))
    assert saved_steps(six) == [3, 4, 6]


@pytest.mark.slow
def test_a_resumed_run_needs_none_of_its_flags_again(six):
    """And what is given anew is compared."""

    def resumed(*flags):
        return parse_run(pretraining.RUNS, "", ["--resume", *flags])

    whole = replace(BASE, resume=True, output=six, profile_steps="5:7")
    assert resumed("--output", str(six)) == whole
    more = resumed("--output", str(six), "--steps", "9", "--log-every", "3")
    assert more == replace(whole, steps=9, log_every=3)
    with pytest.raises(ValueError, match="run.seed: 0 in the checkpoint, 4 now"):
        pretraining.pretrain(resumed("--output", str(six), "--seed", "4"))
    named = parse_run(pretraining.RUNS, "", ["tiny", "--resume", "--output", str(six)])
    assert named == replace(pretraining.RUNS["tiny"], resume=True, output=six)
    (six / "run.json").write_text('{"type": "Translate"}')
    with pytest.raises(
        ValueError, match="run.json cannot be read, .*version: .*, such as `default`"
    ):
        resumed("--output", str(six))


def test_the_schedule_is_as_long_as_the_run_that_began(six, capsys):
    run = replace(BASE, schedule_steps=None, steps=40)
    assert with_fixed_schedule(run, None).schedule_steps == 40
    assert with_fixed_schedule(run, six).schedule_steps == 12
    assert "The learning-rate schedule ends after 12 steps" in capsys.readouterr().out
    run_json = json.loads((six / "run.json").read_text()) | {"schedule_steps": None}
    (six / "run.json").write_text(json.dumps(run_json))
    with pytest.raises(ValueError, match=r"out/run\.json: schedule_steps is null, not an integer"):
        with_fixed_schedule(run, six)
    short = with_fixed_schedule(replace(run, steps=3), None)
    assert short.optimizer.schedule == Cosine(peak=0.01, warmup_steps=1)
    shortened = "Warm-up shortened from 3 to 1 steps, as the schedule has 3.\n"
    assert capsys.readouterr().out == shortened


def test_all_of_a_run_is_shown_where_that_is_asked_for(capsys):
    print_run(replace(BASE, show="all"), pretraining.RUNS)
    output = capsys.readouterr().out
    assert output.startswith("Pretrain(\n    model=TransformerConfig(\n        vocab_size=257,\n")
    assert "\n    seed=0,\n" in output


def test_resuming_what_is_done_is_refused(six):
    message = r"The checkpoint already has 6 steps; pass a larger --steps\."
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, resume=True, steps=5))


@pytest.mark.slow
def test_a_run_that_is_cut_short_at_its_checkpoint_is_evaluated_there(six):
    pretraining.pretrain(replace(BASE, resume=True, steps=6))
    last = read_json_lines(six / "metrics.jsonl")[-1]
    assert last["step"] == 6 and last["final_held_out_bits_per_byte"] > 0


def test_resuming_where_there_is_nothing_is_refused():
    with pytest.raises(ValueError, match=r"There is no checkpoint in .*out/checkpoints\."):
        pretraining.pretrain(replace(BASE, resume=True))
    assert not Path("out").exists()
    message = r"No runs/pretrain-N has a checkpoint to resume; pass --output FOLDER\."
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, resume=True, output=None))


# Folders


def test_the_output_of_an_earlier_run_is_refused(six):
    message = "out already has checkpoints, metrics.jsonl, .* of an earlier run. Pass --resume to"
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(BASE)


@pytest.mark.parametrize("name", ["tokenizer.json", "metrics.jsonl"])
def test_a_folder_with_files_of_those_names_is_refused(name):
    Path("out").mkdir()
    (Path("out") / name).write_text("somebody's")
    with pytest.raises(ValueError, match=f"out already has {name} of an earlier run"):
        pretraining.pretrain(BASE)
    assert (Path("out") / name).read_text() == "somebody's"


def test_folders_are_numbered_and_the_newest_with_a_checkpoint_is_resumed():
    def folder(**fields):
        with open_output_folder(replace(BASE, output=None, **fields)) as path:
            return str(path)

    assert folder() == "runs/pretrain-1"
    assert not list(Path("runs").iterdir()), "nothing came into it"
    for name in ("2/checkpoints/3", "10/checkpoints/3", "11", "old/checkpoints/3"):
        Path(f"runs/pretrain-{name}").mkdir(parents=True)
    assert folder() == "runs/pretrain-12"
    assert folder(resume=True) == "runs/pretrain-10"


def test_two_runs_at_once_take_two_folders_and_one_that_is_named_only_once(capsys):
    run = replace(BASE, output=None)
    with open_output_folder(run) as first, open_output_folder(run) as second:
        assert (str(first), str(second)) == ("runs/pretrain-1", "runs/pretrain-2")
        held = rf"runs/pretrain-1 is locked by process {os.getpid()} on \S+\. Wait until"
        for fields in ({}, {"resume": True}, {"resume_or_begin": True}):
            with pytest.raises(ValueError, match=held):
                pretraining.pretrain(replace(BASE, output=first, **fields))


@pytest.mark.slow
def test_the_same_command_begins_goes_on_and_ends_when_it_is_done(whole, capsys):
    run = replace(BASE, resume_or_begin=True)
    Path("out").mkdir()
    line = {"step": 1, "time": 1.0, "loss": 9.0}
    Path("out/metrics.jsonl").write_text(json.dumps(line) + "\n")  # of one that was killed
    pretraining.pretrain(replace(run, steps=6))
    assert saved_steps("out") == [3, 4, 6]
    assert losses("out") == losses(whole[0])[:6]
    pretraining.pretrain(run)
    assert "Resumed from step 6." in capsys.readouterr().out
    assert_same(restored("out"), restored(whole[0]))
    assert losses("out") == losses(whole[0])
    before = Path("out/metrics.jsonl").read_bytes()
    Path("out/run.png").unlink()
    pretraining.pretrain(run)
    assert "out is already complete: it has 12 steps." in capsys.readouterr().out
    assert Path("out/metrics.jsonl").read_bytes() == before
    assert Path("out/run.png").exists()


def test_going_on_or_beginning_needs_a_folder_that_is_found_again():
    with pytest.raises(ValueError, match="--resume-or-begin needs --output FOLDER"):
        replace(BASE, output=None, resume_or_begin=True)


@pytest.mark.slow
def test_small_files_of_a_run_that_were_damaged_are_written_again(six, capsys):
    tokenizer = (six / "tokenizer.json").read_bytes()
    (six / "tokenizer.json").write_bytes(tokenizer[:-3])
    (six / "metrics.jsonl").write_text("")
    pretraining.pretrain(replace(BASE, resume=True))
    output = capsys.readouterr().err
    assert "out/metrics.jsonl has no metrics of the first 6 steps." in output
    assert (six / "tokenizer.json").read_bytes() == tokenizer
    assert [number for number, _ in losses(six)] == list(range(7, 13))


@pytest.mark.slow
def test_a_line_of_metrics_without_a_number_is_refused(six):
    lines = (six / "metrics.jsonl").read_text().splitlines(keepends=True)
    (six / "metrics.jsonl").write_text("".join([*lines[:2], "null\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"out/metrics\.jsonl, line 3 is not a line .* b'null'\."):
        pretraining.pretrain(replace(BASE, resume=True))


def test_what_a_device_has_no_room_for_is_refused_before_text_is_read(monkeypatch):
    monkeypatch.setattr(pretraining, "prepare_corpus", lambda run: pytest.fail("text was read"))
    monkeypatch.setattr("jaxformer.run.memory_checks.device_memory_limit", lambda: 1 << 14)
    message = r"need [\d.]+ kB per device, but a device has [\d.]+ k?B\.\nTo reduce memory:"
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(BASE)
    assert not Path("out").exists()


@pytest.mark.slow
def test_the_update_is_compiled_before_there_is_a_state(monkeypatch, capsys):
    monkeypatch.setattr("jaxformer.run.memory_checks.device_memory_limit", lambda: 2_200_000)
    monkeypatch.setattr(
        "jaxformer.run.trainer.init_or_restore_state", lambda *_: pytest.fail("memory was taken")
    )
    with pytest.raises(TooLargeError, match=r"The train step needs [\d.]+ MB per device") as ended:
        pretraining.pretrain(replace(BASE, length=128))
    fields = "(In Python: remat, scan, gradient_accumulation_steps, batch_size.)"
    assert ended.value.__notes__ == ["No checkpoint was saved yet.", fields]


def test_a_run_that_cannot_log_is_refused_before_text_is_read(monkeypatch):
    class UsageError(Exception):
        pass

    def login(**_):
        raise UsageError("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(login=login, Error=UsageError))
    monkeypatch.setattr(pretraining, "prepare_corpus", lambda run: pytest.fail("text was read"))
    message = r"Cannot log to Weights & Biases: No API key configured\. Run `wandb login`, "
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, wandb="project"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"needs wandb, .* pip install 'jaxformer\[wandb\]'"):
        pretraining.pretrain(replace(BASE, wandb="project"))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="needs tensorboardX, which is not installed: pip inst"):
        pretraining.pretrain(replace(BASE, tensorboard=True))
    assert not Path("out").exists()


# What cannot be


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model": replace(MODEL, vocab_size=256)},
            r"257 tokens, but model\.vocab_size is 256; pass --model\.vocab-size 257\.",
        ),
        (
            {"devices": 8, "batch_size": 12},
            r"batch_size 12 must be a multiple of data 8 x gradient_accumulation_steps 1 = 8\.",
        ),
        (
            {"batch_size": 9, "gradient_accumulation_steps": 2},
            r"batch_size 9 must be a multiple of data 1 x gradient_accumulation_steps 2 = 2\.",
        ),
        ({"devices": 9}, r"devices must lie between 1 and 8 on this machine; got 9\."),
        ({"corpus": TextFiles(path="")}, r"corpus must name a file or folder; got ''\."),
        ({"corpus": TextFiles(path="nowhere.txt")}, r"nowhere\.txt does not exist\."),
        ({"corpus": TextFiles(path="empty.txt")}, r"empty\.txt has no text"),
        (
            {"corpus": TextFiles(path="latin.txt")},
            r"latin\.txt is not UTF-8: byte 0xe4 at offset 2 of 5, in line 1\.",
        ),
        (
            {"held_out": 0.001},
            r"held_out=0\.001 of \d+ bytes leaves 6 tokens of held-out data, less than one row",
        ),
        (
            {"prompt": "seventeen letters"},
            r"prompt has 18 tokens, special tokens included, .* context of 16; shorten it",
        ),
        (
            {"prompt": "→", "tokenizer": Characters()},
            r"prompt '.u2192' cannot be encoded: Character '.u2192' \(U\+2192\) at 0, in line 1",
        ),
        (
            {"corpus": Instructions(path="long.jsonl")},
            r"long\.jsonl, training data: The prompts of 18 instructions fill rows of 16 "
            r"tokens without an answer; use longer rows\.",
        ),
        (
            {"corpus": Instructions(path="half.jsonl")},
            r"half\.jsonl, held-out data: The answers of 2 instructions are empty\.",
        ),
        ({"held_out": 1.5}, r"held_out must lie between 0 and 1; got 1\.5\."),
        ({"init": ""}, r"init must name a folder, a hub name or the output of a run; got ''\."),
        ({"profile_steps": "5"}, r"must be FIRST:STOP with 1 <= FIRST < STOP, .* got '5'\."),
        ({"profile_steps": "0:2"}, r"with 1 <= FIRST < STOP, .* got '0:2'\."),
        ({"profile_steps": "5:5"}, r"with 1 <= FIRST < STOP, .* got '5:5'\."),
        ({"profile_steps": "5:14"}, r"profile_steps 5:14 ends after the last step, 12\."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_written(changes, message):
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"Ba\xe4r\n")
    instruction = {"prompt": "a prompt as long as a row", "answer": "b"}
    Path("long.jsonl").write_text("\n".join([json.dumps(instruction)] * 20))
    answers = ["" if line in (5, 12) else "b" * 3 for line in range(1, 21)]  # those are held out
    lines = (json.dumps({"prompt": "?" * (4 - len(a)), "answer": a}) for a in answers)
    Path("half.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(BASE, **changes))
    assert not Path("out").exists()


def test_rows_longer_than_the_learned_positions_are_refused():
    model = replace(MODEL, embedding=Embedding(positions=Learned(max_length=15)))
    message = r"length 16 is more than the 15 learned positions of the model\."
    with pytest.raises(ValueError, match=message):
        replace(BASE, model=model)
    assert replace(BASE, model=model, length=15).length == 15


# Runs that end early


WILD = OptimizerConfig(schedule=Constant(peak=1e30), optimizer=SGD(momentum=0.0), clip_norm=None)


@pytest.mark.slow
def test_losses_that_are_not_finite_make_no_update_and_end_the_run_in_the_end(capsys):
    run = replace(
        BASE, optimizer=WILD, save_every=1, skip_step=SkipStepConfig(max_consecutive_skips=2)
    )
    with pytest.raises(SystemExit) as ended:
        run_main(run)
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert re.search(
        r"error: 3 consecutive updates were skipped, the last at step 4 \(loss (nan|inf), gradient "
        r"norm \S+\)\.\nThe last good checkpoint is 3 in out\. With --res",
        shown.err,
    )
    for step_, so_far in ((2, 1), (3, 2)):
        assert re.search(
            rf"step {step_}: update skipped \(loss (nan|inf), gradient norm \S+\); "
            rf"{so_far} skipped so far",
            shown.out + shown.err,
        )
    states = [restored("out", at, run) for at in (1, 3)]
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states[1]))
    assert (int(states[1].step), int(states[1].skip_state.num_skipped)) == (3, 2)
    lines = [line for line in read_json_lines(Path("out/metrics.jsonl")) if "loss" in line]
    assert [line.get("skipped_updates", 0) for line in lines] == [0, 1, 2]


@pytest.mark.slow
def test_a_run_that_ends_before_its_first_checkpoint_says_so(monkeypatch, capsys):
    def stop(at):
        raise at

    for error, code, message in [
        (
            KeyboardInterrupt(),
            130,
            "\nInterrupted. No checkpoint was saved yet.\nTo start again:\n"
            "  jaxformer pretrain tiny --resume-or-begin --output out\n",
        ),
        (
            loop.TooManySkipsError(loop.StepResult(7, float("nan"), 3.5, 9, 3)),
            1,
            "error: 3 consecutive updates were skipped, the last at step 7 (loss nan, gradient "
            "norm 3.5).\nNo checkpoint was saved yet. With --resume you may change "
            "--skip-step.max-consecutive-skips and --skip-step.max-norm-ratio; a new run with a "
            "lower peak learning rate usually helps.\n"
            "(Set JAXFORMER_TRACEBACK=1 for the traceback.)\n",
        ),
    ]:
        monkeypatch.setattr("jaxformer.errors.IMPORTED_MODULES", ["tests.mine"])  # raise is ours
        monkeypatch.setattr("jaxformer.run.program.print_run", lambda *_: "jaxformer pretrain tiny")
        monkeypatch.setattr(
            "jaxformer.run.trainer.init_or_restore_state", lambda *_, error=error: stop(error)
        )
        with pytest.raises(SystemExit) as ended:
            run_main(BASE)
        assert ended.value.code == code
        assert capsys.readouterr().err == message


@pytest.mark.slow
def test_a_full_disk_is_a_message_and_leaves_the_earlier_checkpoint(
    whole, six, monkeypatch, capsys
):
    before = restored(six, 6)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, "serialize", full)
    with pytest.raises(SystemExit) as ended:
        run_main(replace(BASE, resume=True))
    assert ended.value.code == 1
    output = capsys.readouterr().err
    assert re.search(
        r"error: Saving checkpoint 8 in .*out/checkpoints failed: .*No space left on device.*"
        r"The last good checkpoint is 6\.\n",
        output,
    )
    monkeypatch.undo()
    assert saved_steps(six) == [3, 4, 6]
    assert_same(restored(six), before)
    numbers = [number for number, _ in losses(six)]
    assert numbers == list(range(1, len(numbers) + 1)) and 7 <= len(numbers) <= 9
    assert losses(six) == losses(whole[0])[: len(numbers)]


# Orbax leaves reads behind that end when their event loop is closed, which nobody can catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(whole, six, capsys):
    """And saves the damaged one's step again."""
    for file in (six / "checkpoints" / "6" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    run_main(replace(BASE, resume=True))
    shown = capsys.readouterr()
    assert re.search(
        r"Checkpoint 6 in .*out/checkpoints is damaged: .*"
        r"The folder has 3, 4, 6\. An earlier one is used\.\n",
        shown.err,
    )
    assert "Resumed from step 4." in shown.out
    assert_same(restored(six), restored(whole[0]))
    assert losses(six) == losses(whole[0])
    names = sorted(path.name for path in (six / "checkpoints").iterdir())
    assert names == ["12", "3", "4", "6", "6.damaged", "8", "9"]


# Parts


def test_flatten_names_leaves_by_their_path():
    tree = {"a": [{"b": 1}, 2], "c": None, "d": {}}
    assert flatten(tree) == {"a.0.b": 1, "a.1": 2, "c": None}


# As a process


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.run(
        [sys.executable, "-m", "experiments.pretrain", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_module_runs_and_says_how_to_repeat_it():
    Path("corpus.txt").write_text("".join(40 * LINES))
    arguments = [
        *("tiny", "--steps", "4", "--batch-size", "2", "--devices", "1", "--scan"),
        *("--corpus", "TextFiles(path='corpus.txt')", "--length", "16", "--output", "my run"),
        *("--cache", "cache", "--sample-tokens", "2"),
    ]
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(r"bits per byte \(gzip -9: \d\.\d{3}\)\.", done.stdout)
    assert re.search(
        r"Estimated memory per device: [\d.]+ MB \(parameters [\d.]+ [kM]B, [^_]*\);", done.stdout
    )
    printed = done.stdout.splitlines()[-1]
    assert printed.startswith("  python -m experiments.pretrain tiny --batch-size 2 --steps 4")
    again = parse_run(pretraining.RUNS, "", shlex.split(printed)[3:])
    assert again == replace(parse_run(pretraining.RUNS, "", arguments), output=None)
    assert saved_steps("my run") == [4]
    assert list(Path("my run/tensorboard").iterdir())
    assert json.loads(Path("my run/metrics.jsonl").read_text().splitlines()[0])["step"] == 4


@pytest.mark.slow
def test_wrong_flags_end_the_module_with_a_message():
    done = start("tiny", "--corpus", "TextFiles(path='nowhere.txt')")
    assert done.returncode == 1
    assert "error: nowhere.txt does not exist.\n(Set JAXFORMER_TRACEBACK=1 for" in done.stderr
    assert "Traceback" not in done.stderr
