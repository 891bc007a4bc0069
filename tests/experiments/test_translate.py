import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.translate import __main__ as translate
from experiments.translate.date_forms import FORMS
from experiments.translate.dates import written_date
from experiments.translate.runs import RUNS, Translate
from jaxformer import data
from jaxformer.config import Decoder, from_json, to_json
from jaxformer.generation import Greedy
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata
from jaxformer.run.command_line import parse_run
from jaxformer.run.train_setup import make_train_setup
from jaxformer.run.trainer import compile_train_step
from jaxformer.training import train_step as step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.optimizers import make_optimizer

BASE = replace(
    RUNS["tiny"],
    source_lengths=(56,),
    batch_size=8,
    group=2,
    steps=4,
    schedule_steps=4,
    scan=True,
    devices=1,
    held_out_texts=20,
    evaluate_texts=8,
    evaluate_every=2,
    save_every=2,
    log_every=1,
    output=Path("out"),
    tensorboard=False,
)
LINE = re.compile(r"^ *([\d.]+)% +([\d.]+)% +(\d+)  (.+)$", flags=re.M)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of one uninterrupted run, and what it printed."""
    folder, shown = tmp_path_factory.mktemp("whole"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("builtins.print", lambda *words, **_: shown.append(" ".join(map(str, words))))
        patch.setattr(sys, "argv", ["translate", "tiny", "--seed", "0", "--output", "out"])
        assert translate.main(BASE) == Path("out")
    return folder / "out", "\n".join(shown)


def params_of(folder, at=None):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        model, mesh = Transformer(BASE.model, scan=True), make_mesh(MeshConfig(), jax.devices()[:1])
        abstract = step.abstract_train_state(
            model,
            make_optimizer(BASE.optimizer, BASE.schedule_steps, parameter_metadata(BASE.model)),
            mesh,
        )
        return checkpoints.restore(at, abstract).params


# One run from beginning to end


@pytest.mark.slow
def test_a_run_reports_every_form_and_language_greedily_and_with_beams(whole):
    _, shown = whole
    assert shown.startswith("Run: tiny\n  --batch-size 8\n  --steps 4\n")
    assert "Dates: 19 forms, 120 tokens, 32 training texts, for example" in shown
    assert shown.count("Compiled in ") == len(BASE.source_lengths)
    assert "step 2: exact match greedy 0.00% of 8 held-out texts" in shown
    table = shown.partition("greedy      beam  texts  form\n")[2]
    rows = {name: int(count) for _, _, count, name in LINE.findall(table)}
    assert list(rows) == [*FORMS, "English", "Chinese", "all"]
    assert rows["all"] == rows["English"] + rows["Chinese"] == 20
    assert rows["day first"] == 2 and rows["全角"] == 1
    assert re.search(r"\nExamples:\n  .+  ->  .+", shown)
    assert re.search(r"\n20 of 20 texts were wrong with greedy decoding or beam search\.\n", shown)
    assert re.search(r"\nWall time: [\dms. ]+\.\n", shown)
    repeat = shown.partition("Results are in out. To repeat the run:\n")[2]
    assert repeat.startswith("  python -m experiments.translate tiny --")
    assert parse_run(RUNS, "", shlex.split(repeat)[3:]) == replace(BASE, output=None)


@pytest.mark.slow
def test_a_run_writes_its_numbers_its_tokenizer_and_its_checkpoints(whole):
    folder, _ = whole
    lines = read_json_lines(folder / "metrics.jsonl")
    updates = [line for line in lines if "loss" in line]
    assert [line["step"] for line in updates] == [1, 2, 3, 4]
    assert all(0 < line["loss"] < 8 and line["tokens_per_second"] > 0 for line in updates)
    actual = [(line["step"], set(line) - {"step", "time"}) for line in lines if "loss" not in line]
    last = [(4, {"final_exact_greedy", "final_exact_beam"})]
    assert actual == [(2, {"exact_greedy"}), (4, {"exact_greedy"}), *last]
    assert data.load_tokenizer(folder).vocab_size == 120
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.all_steps() == [2, 4]
        assert checkpoints.read_description()["run"]["batch_size"] == 8


@pytest.mark.slow
def test_a_resumed_run_ends_bitwise_where_an_uninterrupted_one_does(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        translate, "decode_dates", lambda run, params, mesh, tokenizer, dates, _: [""] * len(dates)
    )
    translate.main(replace(BASE, steps=2))
    for _ in range(2):  # the second finds nothing left to do
        translate.main(replace(BASE, steps=4, resume_or_begin=True))
    for at in (2, 4):
        jax.tree.map(
            np.testing.assert_array_equal, params_of(tmp_path / "out", at), params_of(whole[0], at)
        )
    with pytest.raises(ValueError, match="run.group: 2 in the checkpoint, 4 now"):
        translate.main(replace(BASE, steps=6, resume=True, group=4))


def test_every_length_of_sources_has_a_program_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(step, "abstract_train_state", lambda *_: jnp.zeros(()))
    update = jax.jit(lambda state, batch: state + batch.source.shape[1])
    monkeypatch.setattr(step, "make_train_step", lambda *_, **__: update)

    def batch(length):
        source, tokens = (
            np.zeros((8, length), np.int32),
            np.zeros((8, translate.TARGET_LENGTH), np.int32),
        )
        return data.PairBatch(source, source, tokens, tokens, tokens > 0)

    using = make_train_setup(BASE, Path("out"), length=translate.TARGET_LENGTH)
    updates = compile_train_step(
        BASE, using.model, optax.identity(), using.mesh, map(batch, (3, 7))
    )
    assert capsys.readouterr().out.count("Compiled in ") == 2
    assert [int(updates(jnp.ones(()), batch(length))) for length in (7, 3)] == [8, 4]


# Decoding


@pytest.mark.slow
def test_what_is_decoded_is_what_the_model_finds_most_likely(whole):
    """Token by token, by the whole model without a cache and without padding."""
    tokenizer, params = data.load_tokenizer(whole[0]), params_of(whole[0])
    dates = translate.held_out_dates(BASE, 3)
    model = jax.jit(Transformer(BASE.model).apply)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    texts = list(translate.decode_dates(BASE, params, mesh, tokenizer, dates, Greedy()))
    assert len(texts) == len(dates)
    length = max(len(date.text) for date in dates)
    for date, text in zip(dates, texts, strict=True):
        ids = tokenizer.encode(text)
        source = np.pad(tokenizer.encode(date.text), (0, length - len(date.text)))
        logits = model(
            {"params": params},
            jnp.asarray([tokenizer.end_of_text, *ids, *[0] * (translate.TARGET_LENGTH - len(ids))]),
            source=jnp.asarray(source),
            source_segments=jnp.int32(np.arange(length) < len(date.text)),
        )
        chosen = np.argmax(logits[: translate.TARGET_LENGTH], axis=-1)
        assert chosen[: len(ids)].tolist() == ids.tolist()
        if len(ids) < translate.TARGET_LENGTH:
            assert chosen[len(ids)] == tokenizer.end_of_text


@pytest.mark.slow
def test_parameters_are_averaged_over_the_last_and_the_newest_regular_checkpoints(tmp_path):
    def state(value):
        params = {"a": jnp.full(3, value), "b": {"c": jnp.full((1, 2), -value)}}
        return step.TrainState(jnp.int32(0), {}, params, {"count": jnp.zeros(2)}, None)

    values = [1.0, 5.0, 2.0, 8.0]
    with Checkpoints(tmp_path, max_to_keep=9) as checkpoints:
        for at, value in enumerate(values):
            checkpoints.save(at, state(value), {})
        for count, mean in ((1, 8.0), (2, 5.0), (5, 11 / 3)):  # step 1 was the best, or interrupted
            run = replace(translate.RUNS["tiny"], average=count, keep=9, save_every=2, steps=3)
            averages = translate.average_checkpoints(checkpoints, state(0.0).params, run)
            np.testing.assert_allclose(averages["a"], np.full(3, mean), rtol=1e-6)
            np.testing.assert_allclose(averages["b"]["c"], np.full((1, 2), -mean), rtol=1e-6)


# The data of a run


def test_the_tokenizer_knows_every_character_that_is_written_and_the_models_have_its_size():
    tokenizer = translate.make_tokenizer(BASE)
    for name in FORMS:
        for part in ("train", "held_out"):
            texts = [written_date(i, seed=4, split=part, form=name).text for i in range(60)]
            assert max(map(len, texts)) <= RUNS["default"].source_lengths[-1]
            tokenizer.encode_batch(texts)
    assert {run.model.vocab_size for run in RUNS.values()} == {tokenizer.vocab_size}


def test_held_out_texts_take_each_form_in_turn_and_no_day_of_training():
    dates = translate.held_out_dates(BASE, 40)
    assert [date.form for date in dates] == [*FORMS, *FORMS, "day first", "month first"]
    trained = {written_date(i, seed=0).date for i in range(1000)}
    assert not trained & {date.date for date in dates}


# The report


def test_the_report_counts_what_is_exactly_right():
    dates = translate.held_out_dates(BASE, 38)
    right = [date.pair.target for date in dates]
    greedy = [*right[:-1], right[-1] + "0"]
    lines = "\n".join(translate.format_report(dates, {"greedy": greedy, "beam": right}))
    rows = {name: row for *row, name in LINE.findall(lines)}
    assert rows["全角"] == ["50.00", "100.00", "2"]
    assert rows["English"] == ["100.00", "100.00", "22"]
    assert rows["Chinese"] == ["93.75", "100.00", "16"]
    assert rows["all"] == ["97.37", "100.00", "38"]
    last = dates[-1].text
    assert (
        f"Errors:\n  {last}  ->  greedy '{right[-1]}0', beam '{right[-1]}'  ✗ {right[-1]}" in lines
    )
    assert f"  {dates[0].text}  ->  {right[0]}\n" in lines
    assert lines.endswith("\n1 of 38 texts were wrong with greedy decoding or beam search.")


def test_exactly_right_means_the_whole_text():
    dates = translate.held_out_dates(BASE, 4)
    right = [date.pair.target for date in dates]
    wrong = [right[0][:-1], right[1] + " ", right[3], right[3]]
    assert translate.exact_match(dates, right) == 1
    assert translate.exact_match(dates, wrong) == 0.25


# What cannot be


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 0}, "batch_size must be positive; got 0"),
        ({"average": 0}, "average must be positive; got 0"),
        ({"average": 6, "keep": 5}, "average=6 needs as many checkpoints, but only keep=5 are"),
        ({"source_lengths": ()}, r"source_lengths must have at least one entry; got \(\)"),
        ({"seed": -1}, "seed must lie between 0 and 4294967295; got -1"),
        (
            {"model": replace(BASE.model, topology=Decoder())},
            r"Translation needs the topology EncoderDecoder; got Decoder\(\)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_run_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


def test_a_vocabulary_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = r"has 120 tokens, but model\.vocab_size is 99; pass --model\.vocab-size 120"
    with pytest.raises(ValueError, match=message):
        translate.main(replace(BASE, model=replace(BASE.model, vocab_size=99)))
    assert not Path("out").exists()


def test_every_named_run_goes_to_flags_and_to_json_and_back():
    for name, run in RUNS.items():
        assert parse_run(RUNS, "", [name]) == run
        assert from_json(Translate, to_json(run)) == run
    assert parse_run(RUNS, "", ["--beam.num-beams", "7"]).beam.num_beams == 7
