import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data import Batch
from jaxformer.training import loop
from jaxformer.training.train_step import EvalSums, StepMetrics, TrainState

STATE = TrainState(0, {}, None, None, None)


class Number:
    """A metric on the devices that notes when it is read."""

    def __init__(self, value, at, reads):
        self.value, self.at, self.reads = value, at, reads

    def __array__(self, dtype=None, copy=None):
        self.reads.append(self.at)
        return np.asarray(self.value, dtype)


class Fake:
    """Updates that count themselves; the loss of update n is `losses[n]`, or n."""

    def __init__(self, losses=None, skipped=()):
        self.losses, self.skipped, self.num_consecutive_skips = losses or {}, set(skipped), 0
        self.num_updates, self.fetched, self.read = [], [], []

    def fetch(self, at):
        self.fetched.append(at)
        return Batch(at, None, None, None, None)

    def update(self, state, batch):
        n = batch.tokens + 1
        assert state.step == batch.tokens, "the state of another update"
        self.num_updates.append(n)
        loss = Number(self.losses.get(n, float(n)), n, self.read)
        self.num_consecutive_skips = self.num_consecutive_skips + 1 if n in self.skipped else 0
        so_far = len([s for s in self.skipped if s <= n])
        return STATE._replace(step=n), StepMetrics(
            loss, 10.0 * n, so_far, self.num_consecutive_skips
        )

    def train(
        self, *, start_step=0, stop_step, should_sync=lambda step: False, max_consecutive_skips=3
    ):
        return loop.train_steps(
            STATE._replace(step=start_step),
            self.update,
            self.fetch,
            start_step=start_step,
            stop_step=stop_step,
            should_sync=should_sync,
            max_consecutive_skips=max_consecutive_skips,
        )


@pytest.mark.parametrize("start, stop", [(0, 1), (0, 2), (0, 9), (4, 9), (8, 9)])
def test_every_step_is_made_and_reported_once_in_order(start, stop):
    fake = Fake()
    items = list(fake.train(start_step=start, stop_step=stop))
    steps = list(range(start + 1, stop + 1))
    assert fake.num_updates == steps
    assert fake.fetched == [n - 1 for n in steps]
    assert [at for at, _, _ in items] == steps
    assert [state.step for _, state, _ in items] == steps
    numbers = [done for _, _, finished in items for done in finished]
    assert numbers == [loop.StepResult(n, float(n), 10.0 * n) for n in steps]


def test_nothing_is_left_to_do_when_the_run_is_over():
    fake = Fake()
    assert list(fake.train(start_step=5, stop_step=5)) == []
    assert fake.num_updates == []


def test_updates_are_dispatched_before_earlier_numbers_are_read():
    fake, seen = Fake(), []
    for at, _, finished in fake.train(stop_step=6):
        seen.append([done.step for done in finished])
        assert fake.num_updates[-1] == at
        # The first step may be long; then each item reads what lies two updates back.
        assert fake.read == list(range(1, {1: 1, 2: 2, 6: 7}.get(at, at - 1)))
    assert seen == [[], [1], [], [2], [3], [4, 5, 6]]


def test_one_update_is_ahead_where_updates_are_long(monkeypatch):
    fake, seen, clock = Fake(), [], iter(0.6 * n for n in range(99))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    for _, _, finished in fake.train(stop_step=5):
        seen.append([done.step for done in finished])
    assert seen == [[], [1], [2], [3], [4, 5]]


def test_a_signal_while_an_update_is_awaited_stops_at_what_is_dispatched():
    fake = Fake()
    stops = lambda at: 2 in fake.read  # noqa: E731  # it arrives during update 2
    seen = [
        (at, [done.step for done in finished])
        for at, _, finished in fake.train(stop_step=9, should_sync=stops)
    ]
    assert seen[3] == (4, [2, 3, 4])


def test_settling_reads_everything_before_the_state_is_given():
    fake = Fake()
    for at, _, _ in fake.train(stop_step=9, should_sync=lambda at: at in (1, 4, 5)):
        if at in (1, 4, 5):
            assert fake.read == list(range(1, at + 1))
        elif at < 9:
            assert len(fake.read) < at


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_updates_left_out_are_reported_and_end_the_run_once_patience_is_over(bad):
    fake, numbers = Fake(losses={n: bad for n in (2, 4, 5, 6)}, skipped={2, 4, 5, 6}), []
    message = rf"^3 consecutive updates were skipped, the last at step 6 \(loss {bad}, "
    message += r"gradient norm 60\.0\)\.$"
    with pytest.raises(loop.TooManySkipsError, match=message) as caught:
        for _, _, finished in fake.train(stop_step=12, max_consecutive_skips=2):
            numbers += finished
    assert caught.value.step == 6
    assert [(done.num_skipped, done.num_consecutive_skips) for done in numbers] == [
        (0, 0),
        (1, 1),
        (1, 0),
    ] + [(2, 1), (3, 2)][: len(numbers) - 3]
    assert len(fake.num_updates) <= 6 + loop.MAX_IN_FLIGHT


def test_patience_is_for_updates_in_a_row():
    fake = Fake(skipped={1, 2, 4, 5, 7})
    done = [
        result
        for _, _, finished in fake.train(stop_step=8, max_consecutive_skips=2)
        for result in finished
    ]
    assert [result.num_consecutive_skips for result in done] == [1, 2, 0, 1, 2, 0, 1, 0]
    assert done[-1].num_skipped == 5


def test_an_implicit_transfer_is_an_error():
    """Of an update that would copy its batch to the devices by itself, or make a constant there."""
    state = TrainState(*jax.device_put((np.int32(0), {}, np.zeros(3, np.float32), None, None)))

    @jax.jit
    def compiled(state, batch):
        sums = StepMetrics(jnp.sum(batch.tokens), jnp.sum(state.trained), state.step, state.step)
        return state._replace(trained=state.trained + batch.tokens), sums

    def constant(state, batch):
        return state, StepMetrics(jnp.asarray(np.float32(1)), *[state.step] * 3)

    rows = Batch(np.ones(3, np.float32), None, None, None, None)
    arguments = {
        "start_step": 0,
        "stop_step": 2,
        "should_sync": lambda step: False,
        "max_consecutive_skips": 1,
    }
    for update, fetch in [(compiled, lambda at: rows), (constant, lambda at: jax.device_put(rows))]:
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            list(loop.train_steps(state, update, fetch, **arguments))
    done = list(loop.train_steps(state, compiled, lambda at: jax.device_put(rows), **arguments))
    np.testing.assert_array_equal(done[-1][1].params, [2.0, 2.0, 2.0])


def test_transfers_are_free_again_between_the_items():
    updates = Fake().train(stop_step=3)
    for _ in updates:
        assert float(jnp.asarray(np.float32(2)) + np.float32(1)) == 3


def evaluate(parts):
    batches = (Batch(at, None, None, None, None) for at in range(len(parts)))
    return loop.evaluate(lambda params, batch: params[batch.tokens], parts, batches)


def test_evaluation_sums_over_batches():
    """Weighted by tokens: 35 nats over 11 tokens, not the mean of the batches' means."""
    parts = [EvalSums(jnp.float32(3), jnp.int32(3)), EvalSums(jnp.float32(32), jnp.int32(8))]
    assert evaluate(parts) == (35.0, 11)
    assert evaluate([]) == (0.0, 0)


def test_evaluation_keeps_counting_where_float32_would_stop():
    """2 ** 24 + 1 tokens and nats: the sum over batches is not float32."""
    parts = [EvalSums(jnp.float32(2**24), jnp.int32(2**24)), EvalSums(jnp.float32(1), jnp.int32(1))]
    assert evaluate(parts) == (2.0**24 + 1, 2**24 + 1)
