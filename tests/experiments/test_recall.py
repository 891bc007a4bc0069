"""Recall tasks: their answers can be read from the document, and accuracy counts them alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.studies.recall import (
    SEPARATOR,
    TASKS,
    answer_accuracies,
    associative_recall,
    copying,
    recall_by_length,
    recall_rows,
)
from experiments.studies.sizes import MIXER_SIZES, SMOKE
from experiments.studies.train_seeds import StudyTraining, Variant
from experiments.studies.variants import make_variants
from jaxformer import config as c
from jaxformer import data
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run.pretraining import RUNS
from tests.small_models import jitted_forward, random_params

MODEL = c.TransformerConfig(
    vocab_size=9,
    model_dim=8,
    num_layers=1,
    attention=c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=4),
    feed_forward=(c.GLU(hidden_dim=6),),
)


def test_every_key_is_asked_once_and_answered_by_its_value():
    documents, is_answered = associative_recall(np.random.default_rng(0), 50, 28, 11)
    for document, mask in zip(documents.tolist(), is_answered, strict=True):
        written = dict(zip(document[0:14:2], document[1:14:2], strict=True))
        questions = dict(zip(document[14::2], document[15::2], strict=True))
        assert len(written) == 7 and questions == written
        assert list(np.flatnonzero(mask)) == [14, 16, 18, 20, 22, 24, 26]
        assert set(written) <= set(range(1, 12)) and set(written.values()) <= set(range(12, 23))
    assert set(documents.ravel()) == set(range(1, 23))
    assert not (documents[:, 0:14:2] == documents[:, 14::2]).all(axis=1).any()  # other orders


def test_strings_are_repeated():
    documents, is_answered = copying(np.random.default_rng(0), 50, 12, 3)
    assert (documents[:, :6] == documents[:, 6:]).all()
    assert (documents[:, 0] == SEPARATOR).all() and set(documents[:, 1:6].ravel()) == {4, 5, 6}
    assert is_answered.tolist() == [[False] * 6 + [True] * 5 + [False]] * 50


def test_rows_have_all_tasks_and_lengths_and_are_a_function_of_the_seed():
    sizes = dict(num_rows=3, row_length=16, num_symbols=4)
    rows = recall_rows(list(TASKS), [4, 8, 16], **sizes, seed=5)
    assert len(rows) == 2 * 3 * 3
    batch = next(data.evaluation_batches(rows, batch_size=18))
    assert batch.segments.max(axis=1).tolist() == [4] * 3 + [2] * 3 + [1] * 3 + (
        [4] * 3 + [2] * 3 + [1] * 3
    )
    assert batch.positions[3].tolist() == [*range(8), *range(8)]
    is_last = np.diff(batch.segments, append=0) != 0
    assert not batch.loss_mask[is_last].any()  # its target is another document's
    assert batch.loss_mask.sum() == rows.num_targets
    assert batch.loss_mask.sum(axis=1).tolist() == [4] * 9 + [4] * 3 + [6] * 3 + [7] * 3
    again, other = (recall_rows(list(TASKS), [4, 8, 16], **sizes, seed=seed) for seed in (5, 6))
    assert (again.tokens == rows.tokens).all() and (other.tokens != rows.tokens).any()


@pytest.fixture
def training():
    rows = recall_rows(["copying"], [8], num_rows=20, row_length=8, num_symbols=4, seed=0)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    run = replace(SMOKE, steps=2, batch_size=4, remat="none")
    return StudyTraining(run, rows, (0, 1), mesh)


@pytest.mark.slow
def test_accuracy_is_the_share_of_answers_that_are_most_likely(training):
    rows = recall_rows(list(TASKS), [8], num_rows=7, row_length=16, num_symbols=4, seed=3)
    params = [random_params(MODEL, size=size) for size in (0.35, 0.7)]
    accuracies = answer_accuracies(MODEL, params, rows, training)
    batch = next(data.evaluation_batches(rows, batch_size=14))
    for seed_params, accuracy in zip(params, accuracies, strict=True):
        logits = jitted_forward(MODEL)(
            seed_params, batch.tokens, positions=batch.positions, segments=batch.segments
        )
        correct = np.argmax(np.asarray(logits), axis=-1) == batch.targets
        assert accuracy == pytest.approx(correct[batch.loss_mask].mean(), abs=1e-5)


@pytest.mark.slow
def test_recall_is_measured_at_lengths_that_were_trained_and_longer_ones(training):
    rows = recall_rows(["copying"], [16], num_rows=9, row_length=16, num_symbols=4, seed=0)
    variant = Variant(name="attention", model=MODEL, optimizer=MIXER_SIZES["smoke"].optimizer)
    result = recall_by_length(variant, None, None, training._replace(rows=rows))
    assert set(result["recall"]) == set(TASKS) and result["recall_trained_length"] == 8
    for accuracies in result["recall"].values():
        assert list(accuracies) == ["4", "8", "16", "32"]
        assert all(len(x) == 2 and 0 <= min(x) <= max(x) <= 1 for x in accuracies.values())
    assert result["cache_numbers"] == 32 * 2 * 8  # keys and values of the longest document


@pytest.mark.slow
def test_mixers_are_of_their_kinds_and_hybrids_end_in_attention():
    run = MIXER_SIZES["cpu"]
    attention, decay, delta, mamba, *hybrids = make_variants("mixer", run)
    assert attention.model == run.model
    assert decay.model.attention.slopes is not None and not decay.model.attention.delta_rule
    assert delta.model.attention.delta_rule and delta.model.attention.decay == c.StepDecay()
    assert mamba.model.attention.beta == "step" and not mamba.model.attention.delta_rule
    for hybrid, other in zip(hybrids, (delta, mamba), strict=True):
        kinds = [hybrid.model.layers[i].attention for i in range(4)]
        assert kinds == [other.model.attention] * 3 + [run.model.attention]
    shallow = replace(run, model=replace(run.model, num_layers=2))
    *_, hybrid = make_variants("mixer", shallow)
    assert hybrid.name == "Mamba 2, attention 1:1" and len(hybrid.model.attention) == 2
    assert len(make_variants("mixer", replace(run, model=replace(run.model, num_layers=1)))) == 4


def test_runs_without_attention_or_of_odd_lengths_have_no_mixers():
    decay = replace(RUNS["tiny"].model, attention=c.Decay(num_heads=4, head_dim=16))
    with pytest.raises(ValueError, match="axis mixer needs a run with MultiHead; got Decay"):
        make_variants("mixer", replace(RUNS["tiny"], model=decay))
    with pytest.raises(ValueError, match="needs a length that is a multiple of 8; got 60"):
        make_variants("mixer", replace(RUNS["tiny"], length=60))
