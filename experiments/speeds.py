"""How fast arms train: in turns, so that what else a machine does falls on all of them alike."""

import time
from collections.abc import Sequence

import jax

from experiments.seeds import Arm, Training, compile_arm, seed_batches, spread

ROUNDS, UPDATES = 5, 2


def speeds_of(
    arms: Sequence[Arm], training: Training, *, rounds: int = ROUNDS, updates: int = UPDATES
) -> dict[str, list[float]]:
    """Time a few updates of every arm, round by round.

        tokens/s = updates * batch_size * row_length * seeds / seconds

    Args:
        arms: In the order of their turns.
        training: As they are trained.
        rounds: Turns of each arm.
        updates: Of a turn, after one that is not timed.

    Returns:
        For each arm the tokens per second of its turns, of all seeds together.
    """
    place, batches = spread(training.devices), seed_batches(training)
    batch = place.put(next(batches))
    programs = {arm.name: compile_arm(arm, training, place, batch) for arm in arms}
    tokens = training.batch_size * training.rows.row_length * len(training.seeds) * updates
    found: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for name, (begin, update) in programs.items():
            state, _ = jax.block_until_ready(update(begin(), batch))
            since = time.monotonic()
            for _ in range(updates):
                state, metrics = update(state, batch)
            jax.block_until_ready(metrics)
            found[name].append(round(tokens / (time.monotonic() - since), 1))
    return found
