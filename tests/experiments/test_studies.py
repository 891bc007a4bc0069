"""Studies: variants, results that are kept, and what is said of them."""

import json
import operator
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ablate, report, rope_placement
from experiments.rope_placement import SETTINGS, RopePlacement
from experiments.studies import extra_metrics as measures
from experiments.studies import results as study_results
from experiments.studies import study
from experiments.studies.extra_metrics import (
    gradient_by_depth,
    layer_gradient_norms,
    loss_by_length,
    rope_scalings,
)
from experiments.studies.plots import has_matplotlib, plot_losses
from experiments.studies.results import StudyResults
from experiments.studies.sizes import ABLATION_SIZES, MIXER_SIZES, PLACEMENT_SIZES, study_run
from experiments.studies.tables import Column, difference_from, markdown, mean_and_interval
from experiments.studies.train_seeds import (
    SeedResults,
    StudyTraining,
    Variant,
    held_out_losses,
    num_sharing_devices,
    train_seeds,
)
from experiments.studies.variants import AXES, make_variants, named_variant
from jaxformer import Transformer, costs, data
from jaxformer import config as c
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata, put_batch
from jaxformer.run.pretraining import RUNS, prepare_corpus
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.schedules import Cosine
from jaxformer.training.skip_step import SkipStepConfig
from tests.small_models import jitted_forward

LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(90) for w in ("a", "b")]
MODEL = c.TransformerConfig(
    vocab_size=257,
    model_dim=8,
    num_layers=2,
    attention=c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=8),
    feed_forward=(c.GLU(hidden_dim=6),),
    head=c.LMHead(tied=True),
)
STEPS = 3


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Studies of a text of our own, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.txt").write_text("".join(LINES))
    run = study_run(MODEL, steps=STEPS, peak=1e-2, length=8, batch_size=2, held_out=0.05)
    corpus = data.TextFiles(path=str(tmp_path / "texts"))
    run = replace(run, tokenizer=data.ByteLevel(), corpus=corpus)
    for sizes in (ABLATION_SIZES, PLACEMENT_SIZES, MIXER_SIZES):
        monkeypatch.setitem(sizes, "smoke", run)
    return run


def variant(run, name="base", **changes):
    return Variant(name=name, model=replace(run.model, **changes), optimizer=run.optimizer)


@pytest.fixture
def canned(small, monkeypatch):
    """Variants that are not trained: losses near 5.5, another for each and its seed; speeds too."""
    drawn = np.random.default_rng(0)

    def train(variant, training, title):
        losses = 5.5 + 0.1 * drawn.normal(size=(training.run.steps, len(training.seeds)))
        return SeedResults(None, losses, 0, 1.0, 1.0)

    def held_out(model, params, rows, training):
        return (5.5 + 0.1 * drawn.normal(size=len(training.seeds))).tolist()

    def speeds(variants, training):
        return {variant.name: drawn.uniform(900, 1100, 5).tolist() for variant in variants}

    monkeypatch.setattr(study, "train_seeds", train)
    for module in (study, measures):
        monkeypatch.setattr(module, "held_out_losses", held_out)
    monkeypatch.setattr(study_results, "measure_throughput", speeds)


@pytest.fixture
def training(small):
    rows, mesh = prepare_corpus(small).train, make_mesh(MeshConfig(), jax.devices()[:2])
    return StudyTraining(replace(small, remat="none"), rows, (3, 5), mesh)


@pytest.mark.slow
def test_each_seed_on_two_devices_is_trained_as_alone_on_one(small, training):
    """Parameters, order of the data, and losses by update and seed."""
    trained = train_seeds(variant(small), training, "")
    model, mesh = Transformer(MODEL), make_mesh(MeshConfig(data=1), jax.devices()[:1])
    optimizer = make_optimizer(small.optimizer, STEPS, parameter_metadata(MODEL))
    for at, seed in enumerate(training.seeds):
        state = step.init_train_state(model, optimizer, jax.random.key(seed), mesh)
        update = step.make_train_step(
            model, optimizer, mesh, skip_step=SkipStepConfig(max_norm_ratio=None)
        )
        batches = data.Batches(training.rows, batch_size=2, seed=seed)
        losses = []
        for number in range(STEPS):
            state, metrics = update(state, put_batch(batches[number], mesh, 2))
            losses.append(float(metrics.loss))
        np.testing.assert_allclose(trained.losses[:, at], losses, rtol=2e-6)
        for one, other in zip(
            *map(jax.tree.leaves, (state.params, trained.params[at])), strict=True
        ):
            # A thousandth of an update: Adam enlarges the rounding of small gradients.
            np.testing.assert_allclose(other, one, atol=1e-3 * 1e-2)


@pytest.mark.slow
def test_held_out_losses_are_means_over_the_tokens_that_count(small, training):
    """In rows of other lengths the same tokens count."""
    text = prepare_corpus(small)
    params = train_seeds(variant(small), training, "").params
    actual = held_out_losses(MODEL, params, text.held_out, training)
    for at, seed_params in enumerate(params):
        nats, tokens = 0.0, 0
        for row in range(len(text.held_out)):
            tokens_, segments, positions = (np.int32(x) for x in text.held_out[row])
            logits = jitted_forward(MODEL)(
                seed_params, tokens_[:-1], positions=positions, segments=segments
            )
            chosen = np.asarray(jax.nn.log_softmax(logits))[np.arange(8), tokens_[1:]]
            nats, tokens = nats - chosen[segments > 0].sum(), tokens + (segments > 0).sum()
        assert actual[at] == pytest.approx(nats / tokens, rel=1e-5)
    assert tokens == text.held_out.num_targets


@pytest.mark.slow
def test_a_study_that_was_interrupted_repeats_no_finished_arm(canned, tmp_path, monkeypatch):
    made = []
    real = study.train_seeds

    def counted(variant, *more):
        made.append(variant.name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(variant, *more)

    monkeypatch.setattr(study, "train_seeds", counted)
    options = ablate.Ablation(axis="block", size="smoke", seeds=2, output=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        ablate.main(options)
    finished = {p.name: p.read_bytes() for p in (tmp_path / "out" / "variants").iterdir()}
    assert sorted(finished) == ["parallel__a_norm_each.json", "serial.json"]
    ablate.main(options)
    assert made == ["serial", "parallel, a norm each", *["parallel, one norm"] * 2]
    for name, content in finished.items():
        assert (tmp_path / "out" / "variants" / name).read_bytes() == content
    table = (tmp_path / "out" / "table.md").read_text()
    assert re.search(r"\| serial \| 5\.\d+ ± 0\.\d+ \| 0\.\d+ \| 0 \| 5\.\d\d \| [\d,]+ \|", table)
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, id="one variant"),
        pytest.param(True, marks=pytest.mark.exhaustive, id="all variants"),
    ],
)
@pytest.mark.parametrize(
    "axis",
    [
        pytest.param(axis, marks=pytest.mark.slow if axis == "block" else pytest.mark.exhaustive)
        for axis in AXES
    ],
)
def test_every_axis_is_trained_and_told(axis, whole, small, tmp_path):
    """Each variant has a row of finite numbers with intervals, and no update was left out."""
    variants = make_variants(axis, small)
    variants = variants if whole else [variants[0], variants[-1]]
    chosen = tuple(variant.name for variant in variants[1:])
    ablate.main(
        ablate.Ablation(axis=axis, size="smoke", seeds=2, variants=chosen, output=tmp_path / "out")
    )
    table = (tmp_path / "out" / "table.md").read_text()
    number = r"\d\.\d{3} ± \d\.\d{3}"
    for variant in variants:
        cells = [
            re.escape(variant.name),
            number,
            r"\d\.\d{3}",
            rf"(0|[+-]{number})",
            *([rf"(|[+-]{number})"] if axis == "placement" else []),  # beside warm-up
            r"\d\.\d\d",
            r"[\d,]+",
            r"([\d,]+ tokens/s|\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\))",
            "0",
        ]
        row = "^" + r"\| " + r" \| ".join(cells) + r" \|$"
        assert re.search(row, table, re.M), (variant.name, table)
    assert len(list((tmp_path / "out" / "variants").iterdir())) == len(variants)


def test_results_of_another_study_are_refused(canned, tmp_path):
    options = ablate.Ablation(
        axis="block",
        size="smoke",
        seeds=2,
        output=tmp_path / "out",
        variants=("parallel, one norm",),
    )
    ablate.main(options)
    with pytest.raises(ValueError, match=r"another study; .*\n  seeds\.0: 0 saved, 1 now\n"):
        ablate.main(replace(options, seeds=2, first_seed=1))
    with pytest.raises(ValueError, match="  steps: 3 saved, 4 now"):
        ablate.main(replace(options, steps=4))
    with pytest.raises(ValueError, match="  study: ablate_block saved, ablate_qk_norm now"):
        ablate.main(replace(options, axis="qk_norm", variants=()))


def test_an_arm_of_another_design_is_refused(small, tmp_path):
    results = StudyResults(tmp_path / "out", {"study": "mine", "variants": ["base"]})
    first = variant(small)
    results.save(first, {"held_out": [1.0]})
    assert results.load(first)["held_out"] == [1.0]
    assert results.load(replace(first, name="new")) is None
    with pytest.raises(ValueError, match=r"base\.json is the result of another variant with the s"):
        results.load(replace(first, model=replace(MODEL, num_layers=3)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": 1}, "seeds must be at least 2, for an interval; got 1"),
        ({"first_seed": -1}, "first_seed must lie between 0 and 4294967295; got -1"),
        ({"steps": 0}, "steps must be positive; got 0"),
        ({"run": "huge"}, "There is no named run 'huge'. Named runs: default, tiny, small"),
    ],
)
def test_impossible_studies_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        study.Study(**changes)


def test_an_arm_that_cannot_be_trained_or_equals_the_baseline_is_refused(small):
    with pytest.raises(ValueError, match="Variant 'same' equals the baseline 'base'"):
        study.check_variants([variant(small), variant(small, "same")], small)
    with pytest.raises(ValueError, match="2 variants have the same name 'base'"):
        study.check_variants([variant(small), variant(small, num_layers=3)], small)
    with pytest.raises(ValueError, match=r"Variant 'e': Pretraining needs the topology Decode"):
        study.check_variants([variant(small), variant(small, "e", topology=c.Encoder())], small)
    table = c.Embedding(positions=c.Learned(max_length=5))
    with pytest.raises(
        ValueError, match="Variant 'e': length 8 is more than the 5 learned positions"
    ):
        study.check_variants([variant(small), variant(small, "e", embedding=table)], small)
    slow = replace(small.optimizer, schedule=Cosine(peak=1e-2, warmup_steps=9))
    with pytest.raises(ValueError, match="warmup_steps=9 and"):
        study.check_variants([replace(variant(small), optimizer=slow)], small)


def test_an_arm_without_rows_for_all_tokens_is_refused_before_any_is_trained(canned, monkeypatch):
    monkeypatch.setattr(study, "train_seeds", pytest.fail)
    message = "257 tokens, but model.vocab_size is 10; give variant '10' a vocab_size of 257"
    with pytest.raises(ValueError, match=message):
        ablate.main(ablate.Ablation(axis="model.vocab_size", size="smoke", variants=("300", "10")))


def test_another_number_of_updates_scales_the_warm_up():
    run = study.base_run(study.Study(size="cpu", steps=40), ABLATION_SIZES)
    assert (run.steps, run.schedule_steps, run.optimizer.schedule.warmup_steps) == (40, 40, 4)
    few = study.base_run(study.Study(size="cpu", steps=3), ABLATION_SIZES)
    assert few.optimizer.schedule.warmup_steps == 1


def test_an_unknown_arm_is_refused(small):
    with pytest.raises(
        ValueError, match="has no variant 'none'. Variants: parallel, a norm each; "
    ):
        ablate.main(ablate.Ablation(axis="block", size="smoke", variants=("none",)))
    with pytest.raises(ValueError, match="'serial' is the baseline, which is always trained"):
        ablate.main(ablate.Ablation(axis="block", size="smoke", variants=("serial",)))
    decay = replace(RUNS["tiny"].model, attention=c.Decay(num_heads=4, head_dim=16))
    with pytest.raises(ValueError, match="Decay has no field 'qk_norm'"):
        make_variants("qk_norm", replace(RUNS["tiny"], model=decay))


@pytest.mark.parametrize("run", ["cpu", "gpu", "smoke", "default"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.slow(but=[f"{axis}-smoke" for axis in AXES])
def test_the_arms_of_every_axis_differ_in_that_axis_alone(axis, run):
    """The first is the run itself; no two are alike; parameters are equal where they can be."""
    base = ABLATION_SIZES[run] if run in ABLATION_SIZES else RUNS[run]
    variants = make_variants(axis, base)
    assert len(variants) >= 3
    study.check_variants(variants, base)
    assert (variants[0].model, variants[0].optimizer) == (base.model, base.optimizer)
    assert len({repr(replace(a, name="")) for a in variants}) == len(variants)
    sizes = {a.name: costs.num_parameters(a.model) for a in variants}
    if axis not in ("position", "qk_norm"):  # tables and gains: said in the report
        near = [abs(n / sizes[variants[0].name] - 1) < 0.01 for n in sizes.values()]
        assert all(near), sizes


@pytest.mark.parametrize(
    "path, text, value",
    [
        ("model.norm", "RMSNorm(eps=0.1)", c.RMSNorm(eps=0.1)),
        ("model.block", "parallel", "parallel"),
        ("model.feed_forward", "MLP(hidden_dim=9)", (c.MLP(hidden_dim=9),)),
        ("model.attention.positions", "(Rope(), None)", (c.Rope(), None)),
        ("optimizer.schedule.peak", "0.5", 0.5),
        ("objective.z_loss", "0.1", 0.1),
    ],
)
def test_any_field_of_a_run_is_an_axis(small, path, text, value):
    baseline, other = make_variants(path.replace("_", "-"), small, [text])  # as in flags
    assert other.name == text and operator.attrgetter(path)(other) == value
    default = operator.attrgetter(path)(baseline)
    assert default != value and named_variant(other, path, default, baseline.name) == baseline


@pytest.mark.parametrize(
    "axis, asked, message",
    [
        ("norms", [], "There is no axis 'norms'. Axes: norm, block, .*, or a field, such as model"),
        (
            "model.norm",
            [],
            "The axis model.norm is a field: pass the values .*, as --variants VALUE VALUE",
        ),
        ("model.nrm", ["LayerNorm()"], "TransformerConfig has no field 'nrm'"),
        ("model.x.y", ["1"], "TransformerConfig has no field 'x'"),
        ("model.norm", ["3"], "TransformerConfig.norm must be .*; got 3"),
        (
            "model.norm",
            ["LaterNorm()"],
            r"Cannot parse 'LaterNorm\(\)': expected .* Options are LayerN",
        ),
    ],
)
def test_what_is_no_axis_or_value_is_refused(small, axis, asked, message):
    with pytest.raises(ValueError, match=message):
        make_variants(axis, small, asked)


def test_rotary_placements_are_the_nine_of_the_document():
    """inventory row 69, with the losses of row 71 and their order, rows 71 and 72."""
    assert [("".join(s.targets), s.published_loss, s.published_group) for s in SETTINGS] == [
        ("qk", 2.712, 1), ("qkvo", 2.719, 1), ("k", 2.769, 2), ("vo", 2.770, 2), ("qkv", 2.783, 3),
        ("", 2.795, 4), ("o", 2.841, 5), ("q", 2.851, 5), ("v", 2.856, 5),
    ]  # fmt: skip
    names = {s.name: "".join(s.targets).upper() or "none" for s in SETTINGS}
    assert all(name == targets for name, targets in names.items())


@pytest.mark.slow
def test_a_study_of_placements_reports_orders_and_their_correlation(canned, tmp_path, capsys):
    """inventory rows 71 and 72: the published losses stand beside ours."""
    options = RopePlacement(size="smoke", seeds=2, output=tmp_path / "out")
    rope_placement.main(options)
    output = capsys.readouterr().out
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in output
    assert len(re.findall(r"^\| (?:QK|K|VO|QKVO|QKV|none|O|Q|V) \| \d", table, re.M)) == 9
    assert re.search(
        r"\| VO \| \d\.\d{3} ± \d\.\d{3} \| \d\.\d{3} \| [+-]\d\.\d{3} ± .* \| 2\.770 \| \+0\.058",
        table,
    )
    assert re.search(
        r"of the two: -?\d\.\d\d \(p = 0\.\d{3}, .*\); of single seeds -?\d\.\d\d to -?\d", table
    )
    assert len(re.findall(r"\} (holds|is reversed|is not significant)[;.]", table)) == 4
    variants = [json.loads(p.read_text()) for p in (tmp_path / "out" / "variants").iterdir()]
    assert len(variants) == 9 and all(len(a["held_out"]) == 2 for a in variants)


@pytest.mark.slow
def test_the_readme_of_studies_is_made_from_what_they_kept(canned, tmp_path):
    """Command, seeds, tokens, table and pictures; what is in a table is in the JSON."""
    results = tmp_path / "results"
    options = ablate.Ablation(axis="position", size="smoke", seeds=2, variants=("none",))
    ablate.main(replace(options, output=results / "a"))
    options = replace(options, axis="model.norm", variants=("LayerNorm()", "RMSNorm(eps=0.1)"))
    ablate.main(replace(options, output=results / "b"))
    table = (results / "a" / "table.md").read_text()
    for name in ("table.md", "plot.png", "more.png"):
        (results / "a" / name).unlink()
    report.main(results, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert (results / "a" / "table.md").read_text() == table and table in text
    flags = "--axis position --size smoke --steps 3 --batch-size 2 --length 8 --seeds 2"
    where = f"--first-seed 0 --variants none --output {tmp_path.name}/results/a"
    assert f"`python -m experiments.ablate {flags} {where}`" in text
    assert (
        f"--variants 'LayerNorm()' 'RMSNorm(eps=0.1)' --output {tmp_path.name}/results/b`" in text
    )
    assert "Each run: 48 tokens (3 steps of 2 x 8; " in text
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert text.count("![") == 3


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(small, tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    (output / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not empty and has no study\.json; pass another --outpu"):
        ablate.main(ablate.Ablation(axis="block", size="smoke", seeds=2, output=output))
    assert {file.name for file in output.iterdir()} == {"config.json", ".lock"}


@pytest.mark.slow
def test_an_unfinished_study_is_not_reported(canned, tmp_path):
    options = RopePlacement(size="smoke", seeds=2, output=tmp_path / "results" / "a")
    rope_placement.main(options)
    (tmp_path / "results" / "a" / "variants" / "V.json").unlink()
    with pytest.raises(
        ValueError, match=r"of 8 of 9 variants; missing: V\. Finish it with\n  python -m"
    ):
        report.main(tmp_path / "results", tmp_path / "README.md")
    assert not (tmp_path / "README.md").exists()
    rope_placement.main(options)
    ablate.main(
        ablate.Ablation(axis="block", size="smoke", seeds=2, output=tmp_path / "results" / "b")
    )
    (tmp_path / "results" / "b" / "variants" / "parallel__one_norm.json").unlink()
    with pytest.raises(
        ValueError, match=r"2 of 3 variants; missing: parallel, one norm\.(.|\n)*--output"
    ):
        report.main(tmp_path / "results", tmp_path / "README.md")
    turns = tmp_path / "results" / "a" / "speeds.json"
    speeds = json.loads(turns.read_text())
    turns.write_text(json.dumps({name: x for name, x in speeds.items() if name != "V"}))
    shutil.rmtree(tmp_path / "results" / "b")
    with pytest.raises(
        ValueError, match=r"speeds\.json has no measurements of V\. .*\n  python -m"
    ):
        report.main(tmp_path / "results", tmp_path / "README.md")
    (tmp_path / "results" / "a" / "variants" / "V.json").write_text("[]")
    with pytest.raises(ValueError, match=r"V\.json is a list, not an object"):
        rope_placement.main(options)
    (tmp_path / "results" / "a" / "study.json").write_text('{"study": "rope_placement"}')
    with pytest.raises(ValueError, match=r"study\.json has no size, seeds, steps, variants: "):
        rope_placement.main(options)
    (tmp_path / "results" / "a" / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json is not JSON: "):
        rope_placement.main(options)


def names_of(axis, sizes):
    return [variant.name for variant in make_variants(axis, sizes["cpu"])]


KEPT = {
    "rope_placement-cpu": lambda: [setting.name for setting in SETTINGS],
    **{
        f"ablate_{axis}-cpu": partial(names_of, axis, ABLATION_SIZES)
        for axis in ("placement", "activation", "position", "block")
    },
    "ablate_mixer-cpu": partial(names_of, "mixer", MIXER_SIZES),
    # Whether it was the start that told activations apart; it was.
    "ablate_activation-untied": lambda: [
        *("silu, gated", "sigmoid, gated", "identity, gated", "relu_squared")
    ],
}


@pytest.mark.parametrize("name, variants", KEPT.items(), ids=KEPT)
@pytest.mark.slow(but=["ablate_block-cpu", "ablate_activation-untied"])
def test_the_tables_that_are_committed_are_those_of_the_json(name, variants, tmp_path):
    """And the README of experiments holds them; every variant is there, of three seeds or more."""
    path = Path(report.RESULTS) / name / "table.md"
    description = json.loads((path.parent / "study.json").read_text())
    assert description["variants"] == variants() and len(description["seeds"]) >= 3
    copied = tmp_path / "results" / path.parent.name
    shutil.copytree(path.parent, copied)
    report.main(tmp_path / "results", tmp_path / "README.md")
    table = (copied / "table.md").read_text()
    assert table == path.read_text()
    assert table in (report.HERE / "README.md").read_text()


def result_of(name, losses):
    return {
        "variant": {"name": name},
        "held_out": losses,
        "train": [[7.0, loss] for loss in losses],
    }


def test_a_report_knows_the_published_order_again():
    """Losses that are the published ones agree fully; a reversed order does not."""
    same = [result_of(s.name, [s.published_loss, s.published_loss + 0.001]) for s in SETTINGS]
    text = rope_placement.format_report(same)
    assert "correlation of the two: 1.00 (p = 0.000, two-sided); of single seeds 1.00 to" in text
    assert text.count(" holds") == 4 and "reversed" not in text and "not significant" not in text
    assert "| -0.083 ± 0.000 | 7.00 | 2.712 | +0.000 |" in text
    other = [result_of(s.name, [-s.published_loss, 0.001 - s.published_loss]) for s in SETTINGS]
    text = rope_placement.format_report(other)
    assert "correlation of the two: -1.00" in text
    assert text.count(" is reversed") == 4
    noise = {"QKV": [0.0, 0.05], "none": [0.05, 0.0]}  # by more than what is between their groups
    near = [
        result_of(s.name, [s.published_loss + x for x in noise.get(s.name, [0.0, 0.0])])
        for s in SETTINGS
    ]
    text = rope_placement.format_report(near)
    assert "{QKV} < {none} is not significant" in text and "{QK, QKVO} < {K, VO} holds" in text


def test_tables_by_hand():
    variants = [result_of("a", [1.0, 3.0]), result_of("b", [1.5, 3.7]), result_of("c", [None, 1.0])]
    columns = [
        Column("variant", lambda numbers: numbers["variant"]["name"]),
        Column("loss", mean_and_interval("held_out", 1)),
        Column("minus a", difference_from("held_out", variants[0], 1)),
    ]
    assert markdown(columns, variants).splitlines() == [
        "| variant | loss | minus a |",
        "| :--- | ---: | ---: |",
        "| a | 2.0 ± 12.7 | 0 |",  # t of one degree of freedom: 12.706
        "| b | 2.6 ± 14.0 | +0.6 ± 1.3 |",
        "| c | — | — |",
    ]


@pytest.mark.slow
def test_lengths_are_measured_for_every_way_of_stretching(small, training):
    """Dynamic scalings leave the trained length as it is; others are compared from twice on."""
    text = prepare_corpus(small)
    base = variant(small, num_layers=1)
    params = train_seeds(base, training, "").params
    lengths = loss_by_length(base, params, text, training)["at_lengths"]
    assert set(lengths) == {"as trained", *rope_scalings(MODEL, 8, 2)}
    assert (
        len(lengths) == 7
        and set(lengths["linear"]) == {"2", "4", "8"}
        and set(lengths["as trained"]) == {"1", "2", "4", "8"}
    )
    trained_losses = held_out_losses(base.model, params, text.held_out, training)
    np.testing.assert_allclose(lengths["as trained"]["1"], trained_losses, atol=1e-5)
    doubled = base.model.with_rope_scaling(c.LinearScaling(factor=2.0))
    rows = data.pack(text.held_out_documents, text.tokenizer, row_length=16, folder=text.cache)
    expected = held_out_losses(doubled, params, rows, training)
    np.testing.assert_allclose(lengths["linear"]["2"], expected, atol=1e-5)


@pytest.mark.slow
def test_every_way_stretches_the_slowest_pair_as_far_as_it_says():
    """What NTK, linear, YaRN and the others do to a text of so many times the length."""
    model = PLACEMENT_SIZES["cpu"].model
    frequencies = jax.jit(c.Rope.frequencies, static_argnums=(0, 1))
    for times in (2, 4, 8):
        length = jnp.int32(times * 64)
        plain = frequencies(c.Rope(), 32, length)
        for name, scaling in rope_scalings(model, 64, times).items():
            stretched = frequencies(c.Rope(scaling=scaling), 32, length)
            stretch = float(plain[-1] / stretched[-1])
            assert stretch == pytest.approx(times, rel=1e-3), (name, times)
    ways = rope_scalings(model, 64, 8)
    pairs = {n: frequencies(c.Rope(scaling=s), 32, jnp.int32(512)) for n, s in ways.items()}
    alike = [{a, b} for a in pairs for b in pairs if a < b and np.allclose(pairs[a], pairs[b])]
    assert alike == [{"NTK", "dynamic NTK"}]  # in rows of just that length


@pytest.mark.slow
def test_learned_positions_reach_no_further_than_their_table(small, training):
    text = prepare_corpus(small)
    table = c.Embedding(positions=c.Learned(max_length=16))
    attention = replace(MODEL.attention, positions=(None,))
    other = variant(small, embedding=table, attention=attention)
    params = train_seeds(other, training, "").params
    lengths = loss_by_length(other, params, text, training)["at_lengths"]
    assert {way: set(losses) for way, losses in lengths.items()} == {"as trained": {"1", "2"}}


@pytest.mark.slow
def test_gradients_by_depth_are_one_for_each_layer_in_order(small, training):
    """inventory row 5: before the first update the first of 24 layers has several times the
    gradient of the last with norms before branches, or before and after; not so with norms after
    sums. (The row has 3.75, 5.1 and 0.30; here it is 4, 5 and 1.3.)"""
    text = prepare_corpus(small)
    start = c.Initialisation(residual="plain", embedding=c.Normal(std=1.0))
    same = dict(
        model_dim=64,
        norm=c.LayerNorm(),
        feed_forward=(c.MLP(hidden_dim=256, activation="relu"),),
        initialisation=start,
    )
    ratios = {}
    for placement in ("pre", "sandwich", "post"):
        base = variant(small, norm_placement=placement, final_norm=placement != "post", **same)
        layers = np.asarray(gradient_by_depth(base, None, text, training)["gradient_by_depth"])
        assert layers.shape == (2, 24)
        ratios[placement] = layers[:, 0] / layers[:, -1]
    assert (ratios["pre"] > 2).all() and (ratios["sandwich"] > 2).all()
    assert (ratios["post"] < ratios["pre"] / 1.5).all()


def test_layers_are_in_order_where_a_pattern_leaves_some_over():
    """Two repetitions of a pattern of two, and one layer more."""
    kernel = lambda *values: {"mlp": {"kernel": np.asarray(values, float)}}  # noqa: E731
    gradient = {
        "decoder": {
            "layers": {"layer_0": kernel([1.0], [3.0]), "layer_1": kernel([2.0], [4.0])},
            "tail": {"layer_0": kernel(5.0)},
        },
        "head": {"kernel": np.ones(3)},
    }
    np.testing.assert_allclose(layer_gradient_norms(gradient), [1, 2, 3, 4, 5])


def test_rows_are_shared_out_evenly():
    devices = [None] * 8
    assert [num_sharing_devices(n, devices) for n in (1, 2, 3, 4, 6, 9)] == [1, 2, 3, 4, 6, 3]
    assert num_sharing_devices(4, devices[:2]) == 2 and num_sharing_devices(3, devices[:2]) == 1


def test_without_matplotlib_one_line_says_what_brings_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    has_matplotlib.cache_clear()
    try:
        for _ in range(2):
            plot_losses(tmp_path / "plot.png", [], title="none")
    finally:
        has_matplotlib.cache_clear()
    assert (
        capsys.readouterr().err
        == "No plots without matplotlib: `pip install 'jaxformer[plots]'`.\n"
    )
    assert not list(tmp_path.iterdir())
