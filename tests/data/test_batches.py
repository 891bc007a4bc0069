import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer import data
from jaxformer.data import Batch, Batches, Document, PackedRows, evaluation_batches


def numbered(num_rows, row_length=5):
    """Rows whose every token is the row's number."""
    tokens = np.repeat(np.arange(num_rows, dtype=np.uint16), row_length)
    return PackedRows(
        tokens=np.append(tokens, np.uint16(num_rows)),
        starts=np.zeros(1, int),
        document_bytes=np.zeros(1, int),
        num_inputs=num_rows * row_length,
        row_length=row_length,
        end_of_text=999,
        num_documents=1,
        num_bytes=1,
        num_targets=num_rows * row_length,
    )


def drawn(batches, steps):
    """Numbers of the rows of each batch."""
    return [batches[step].tokens[:, 0].tolist() for step in steps]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def rows(pack, documents):
    return pack(documents)


def test_a_batch_is_its_rows_side_by_side(rows):
    batch = Batches(rows, batch_size=3, seed=0, shuffle=False)[1]
    assert isinstance(batch, Batch)
    for b, row in enumerate(rows[i] for i in (3, 4, 5)):
        assert np.array_equal(batch.tokens[b], row.tokens[:-1])
        assert np.array_equal(batch.targets[b], row.tokens[1:])
        assert np.array_equal(batch.segments[b], row.segments)
        assert np.array_equal(batch.positions[b], row.positions)
    assert {x.shape for x in batch} == {(3, 13)}
    assert [x.dtype.name for x in batch] == ["int32"] * 4 + ["bool"]
    assert {type(x) for x in batch} == {np.ndarray}


def test_the_mask_counts_every_target_that_is_not_padding(pack):
    rows = pack([Document("1", "aaa"), Document("2", "bb")], row_length=11)
    (batch,) = evaluation_batches(rows, batch_size=1)
    assert batch.targets[0, :7].tolist() == [*b"aaa", 256, *b"bb", 256]
    assert batch.loss_mask.tolist() == [[True] * 7 + [False] * 4]
    assert batch.segments.tolist() == [[1] * 4 + [2] * 3 + [0] * 4]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_rows", "batch_size"), [(17, 5), (17, 17), (12, 4), (3, 7), (1, 2)])
@pytest.mark.slow(but=["17-5-True", "17-5-False"])
def test_every_epoch_has_every_row_once(num_rows, batch_size, shuffle):
    batches = Batches(numbered(num_rows), batch_size=batch_size, seed=3, shuffle=shuffle)
    seen = sum(drawn(batches, range(4 * num_rows)), [])
    epochs = [seen[i : i + num_rows] for i in range(0, 4 * num_rows, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if not shuffle:
        assert all(epoch == list(range(num_rows)) for epoch in epochs)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        drawn(Batches(numbered(50), batch_size=50, seed=seed), [epoch])[0]
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 9
    assert tuple(range(50)) not in map(tuple, orders)


def test_seeking_is_iterating(rows):
    batches = Batches(rows, batch_size=4, seed=5)
    walked = [batch for _, batch in zip(range(40), batches, strict=False)]
    for step in (39, 0, 17, 17, 3):
        assert equal(batches[step], walked[step])
        assert equal(Batches(rows, batch_size=4, seed=5)[np.int64(step)], walked[step])
    assert Counter(len(batch.tokens) for batch in walked) == {4: 40}


def test_a_far_step_costs_no_more_than_a_near_one():
    batches = Batches(numbered(17), batch_size=5, seed=0)
    begin = time.perf_counter()
    far = drawn(batches, [10**12])
    assert time.perf_counter() - begin < 1
    assert far == drawn(Batches(numbered(17), batch_size=5, seed=0), [10**12])


@pytest.mark.slow
def test_the_batch_does_not_depend_on_the_process(tmp_path):
    script = (
        "import numpy as np\n"
        "from tests.data.test_batches import *\n"
        "print(drawn(Batches(numbered(101), batch_size=7, seed=11), [0, 20, 999]))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(data.__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = drawn(Batches(numbered(101), batch_size=7, seed=11), [0, 20, 999])
    assert seen == {str(here)}


def test_the_hosts_together_have_the_global_batch(rows):
    whole = Batches(rows, batch_size=8, seed=2)
    parts = [Batches(rows, batch_size=8, seed=2, local_rows=slice(i, i + 2)) for i in (0, 2, 4, 6)]
    for step in (0, 5, 23):
        joined = Batch(*map(np.concatenate, zip(*(part[step] for part in parts), strict=True)))
        assert equal(joined, whole[step])


@pytest.mark.parametrize(("num_rows", "batch_size"), [(11, 4), (12, 4), (3, 8), (1, 1)])
def test_evaluation_has_every_row_once_in_batches_of_one_shape(num_rows, batch_size):
    batches = list(evaluation_batches(numbered(num_rows), batch_size=batch_size))
    assert len(batches) == -(-num_rows // batch_size)
    assert {x.shape for batch in batches for x in batch} == {(batch_size, 5)}
    whole = Batch(*map(np.concatenate, zip(*batches, strict=True)))
    assert [x.dtype.name for x in whole] == ["int32"] * 4 + ["bool"]
    assert whole.tokens[:num_rows, 0].tolist() == list(range(num_rows))
    assert whole.loss_mask[:num_rows].all() and not whole.loss_mask[num_rows:].any()
    assert (whole.tokens[num_rows:] == 999).all() and (whole.targets[num_rows:] == 999).all()
    assert not whole.segments[num_rows:].any() and not whole.positions[num_rows:].any()


@pytest.mark.parametrize("row_length", [1, 7, 64])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_evaluation_counts_every_token_once(pack, documents, tokenizer, row_length, batch_size):
    rows = pack(documents, row_length=row_length)
    counted = [b.targets[b.loss_mask] for b in evaluation_batches(rows, batch_size=batch_size)]
    expected = [[*tokenizer.encode(d.text), tokenizer.end_of_text] for d in documents]
    assert np.concatenate(counted).tolist() == sum(expected, [])
    assert len(np.concatenate(counted)) == rows.num_targets


def test_changing_a_batch_leaves_the_rows_alone(rows):
    batches = Batches(rows, batch_size=2, seed=0)
    before = [x.copy() for x in batches[0]]
    for array in batches[0]:
        array[...] = 0
    assert equal(batches[0], before)


def test_drawing_is_faster_than_a_million_tokens_per_second():
    """On one idle core it was 18 million; the bound leaves room for a busy machine."""
    batches = Batches(numbered(1000, row_length=256), batch_size=16, seed=0)
    batches[0]
    begin = time.process_time()
    for step in range(100):
        batches[step]
    assert 100 * 16 * 256 / (time.process_time() - begin) > 1e6


def test_numbers_out_of_range_are_refused():
    rows = numbered(3)
    for draw in (lambda **k: Batches(rows, seed=0, **k), lambda **k: evaluation_batches(rows, **k)):
        with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
            draw(batch_size=0)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed must lie between 0 and 4294967295; got {seed}"):
            Batches(rows, batch_size=1, seed=seed)
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        Batches(rows, batch_size=1, seed=0)[-1]
    with pytest.raises(ValueError, match="There are no rows to draw batches from"):
        Batches(numbered(0), batch_size=1, seed=0)
    with pytest.raises(ValueError, match="There are no rows to draw batches from"):
        evaluation_batches(numbered(0), batch_size=1)


def test_without_grain_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(
        ImportError, match=r"grain, which is not installed: pip install 'jaxformer\[train"
    ):
        Batches(numbered(3), batch_size=1, seed=0)
    assert len(list(evaluation_batches(numbered(3), batch_size=2))) == 2


def test_a_module_missing_inside_a_library_is_its_own_story(tmp_path, monkeypatch):
    (tmp_path / "grain.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grain", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        Batches(numbered(3), batch_size=1, seed=0)


@pytest.mark.slow
def test_importing_the_package_needs_no_extra():
    script = (
        "import sys; sys.modules['grain'] = sys.modules['tokenizers'] = None\n"
        "import jaxformer.data\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    root = Path(data.__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=root, check=True)


MIXED = data.mix_rows(
    [numbered(9), replace(numbered(40), tokens=100 + numbered(40).tokens)], (3, 1)
)


def test_rows_are_drawn_by_weight_and_each_part_goes_through_epochs_of_its_own():
    batches = Batches(MIXED, batch_size=12, seed=5)
    rows = sum(drawn(batches, range(12)), [])
    assert {sum(n < 100 for n in rows[i : i + 4]) for i in range(0, 144, 4)} == {3}
    first_part = [n for n in rows if n < 100]
    assert all(sorted(first_part[i : i + 9]) == list(range(9)) for i in range(0, 108, 9))
    assert len({n for n in rows if n >= 100}) == 36  # of forty, each once
    assert drawn(batches, [7]) == [rows[84:96]]  # in any order
    halves = [Batches(MIXED, batch_size=12, seed=5, local_rows=slice(a, a + 6)) for a in (0, 6)]
    assert sum(drawn(halves[0], [3]) + drawn(halves[1], [3]), []) == rows[36:48]
    assert drawn(Batches(MIXED, batch_size=12, seed=6), [0]) != [rows[:12]]


@pytest.mark.parametrize(("weights", "epoch"), [((3, 1), 160), ((0.1, 0.7), 72)])
def test_an_epoch_draws_every_row_of_every_part(weights, epoch):
    mixed = data.mix_rows(MIXED.parts, weights)
    assert mixed.epoch == epoch
    rows = sum(drawn(Batches(mixed, batch_size=1, seed=5), range(epoch)), [])
    assert len(set(rows)) == 49 > len(set(rows[: epoch - 8]))
    assert (numbered(9).epoch, data.mix_rows(MIXED.parts).epoch) == (9, 49)


def test_mixed_rows_are_those_of_their_parts(pack, documents):
    parts = pack(documents[:9]), pack(documents[9:])
    mixed, first = data.mix_rows(parts), len(parts[0])
    assert mixed.weights == (len(parts[0]), len(parts[1])) and len(mixed) == sum(mixed.weights)
    index = [first + 1, 0, first, 2]
    for of_mixed, of_parts in (
        (mixed[index], [parts[1][1], parts[0][0], parts[1][0], parts[0][2]]),
        (
            [mixed.loss_mask_at(index)],
            [[parts[i].loss_mask_at(j)] for i, j in ((1, 1), (0, 0), (1, 0), (0, 2))],
        ),
    ):
        assert equal(of_mixed, [np.stack(arrays) for arrays in zip(*of_parts, strict=True)])
    for name in ("num_documents", "num_bytes", "num_targets"):
        assert getattr(mixed, name) == sum(getattr(part, name) for part in parts)
    (some,) = evaluation_batches(mixed, batch_size=4, index=np.array(index))
    assert np.array_equal(some.segments, mixed[index].segments)
    batches = list(evaluation_batches(mixed, batch_size=4))
    assert sum(batch.loss_mask.sum() for batch in batches) == mixed.num_targets
    assert len({rows.digest for rows in (mixed, data.mix_rows(parts, (1, 2)), *parts)}) == 4
    assert data.mix_rows(parts[:1]) is parts[0]
    with pytest.raises(ValueError, match=r"have one row_length; got \[5, 13\]"):
        data.mix_rows([parts[0], numbered(3)])
