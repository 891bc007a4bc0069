"""One arm of a study, trained from several seeds side by side in one compiled program."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from experiments.training.memory import memory_per_device
from jaxformer import data
from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.layers import Transformer
from jaxformer.layers.mode import Remat
from jaxformer.parallel import declarations
from jaxformer.training import step
from jaxformer.training.gradient import Objective, apply_to, total_loss
from jaxformer.training.guard import Skipping, new_guard
from jaxformer.training.optimizers import OptimizerConfig, make_optimizer
from jaxformer.training.progress import Progress

AXIS = "seed"
ROUNDS, UPDATES = 5, 2  # of the turns in which arms are timed


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is trained.

    Attributes:
        name: In tables.
        model: The model.
        optimizer: How gradients become updates.
        objective: Terms of the loss beside the cross-entropy.
    """

    name: str
    model: TransformerConfig
    optimizer: OptimizerConfig
    objective: Objective = Objective()


class Training(NamedTuple):
    """How long arms are trained, and on what: the same for all of a study."""

    rows: data.AnyRows
    seeds: tuple[int, ...]
    steps: int
    batch_size: int
    dtype: str
    remat: Remat
    devices: int  # that share the seeds


class Trained(NamedTuple):
    """Parameters with an axis for seeds in front, the losses of all updates, and what it took."""

    params: Any
    losses: np.ndarray  # [steps, seeds]
    skipped: int  # updates left out, of all seeds, since they were not finite
    seconds: float  # without compilation
    compile_seconds: float


def train_seeds(arm: Arm, training: Training, title: str) -> Trained:
    """Train an arm from every seed: the same update, one program, other parameters and data.

    A seed draws its parameters and the order of its data, which are thus the same in every arm of
    equal parameters. Devices share the seeds; those of one device run under `jax.vmap` where
    memory allows, else one after the other. So they do on a CPU, where that is faster.

    Args:
        arm: What to train.
        training: For how long, on what.
        title: Shown above the progress.

    Returns:
        What came of it. A run whose loss is no longer finite stays where it was: such updates are
        left out, and its losses say so.

    Raises:
        ValueError: A device has not enough memory for one seed at a time.
    """
    place, batches = spread(training.devices), seed_batches(training)
    batch = place.put(next(batches))
    since = time.monotonic()
    begin, run = compile_arm(arm, training, place, batch)
    compiled = time.monotonic()
    state, losses = begin(), []
    with Progress(training.steps, title=title) as progress:
        for at in range(training.steps):
            state, metrics = run(state, batch)
            if at + 1 < training.steps:
                batch = place.put(next(batches))
            losses.append(np.asarray(metrics.loss))
            progress.update(at + 1, loss=float(np.mean(losses[-1])))
    took = time.monotonic() - compiled
    skipped = int(np.sum(state.guard.skipped))
    return Trained(state.params, np.stack(losses), skipped, took, compiled - since)


class Place(NamedTuple):
    """Where seeds are, and how functions of one seed become functions of all.

    `mapped` runs the seeds of a device one after the other, or side by side.
    """

    put: Callable[[Any], Any]
    mapped: Callable[..., Callable[..., Any]]


class Program(NamedTuple):
    """An arm ready to train: the state of all seeds before the first update, and the update."""

    begin: Callable[[], step.TrainState]
    update: Callable[[step.TrainState, data.Batch], tuple[step.TrainState, step.StepMetrics]]


def compile_arm(arm: Arm, training: Training, place: Place, batch: Any) -> Program:
    """Compile for batches like this one.

    Raises:
        ValueError: A device has not enough memory for one seed at a time.
    """
    model = Transformer(arm.model, dtype=jnp.dtype(training.dtype), remat=training.remat)
    optimizer = make_optimizer(arm.optimizer, training.steps, declarations(arm.model))
    keys = jax.vmap(jax.random.key)(jnp.asarray(training.seeds, jnp.uint32))
    first = jax.jit(jax.vmap(partial(start, model, optimizer)))

    def begin() -> step.TrainState:
        return place.put(first(keys))

    function = partial(update, model, optimizer, arm.objective)
    ways = (True,) if on_cpu() else (False, True)
    compiled = compiled_for_all(
        place, function, begin(), batch, ways=ways, room=memory_per_device()
    )
    return Program(begin, compiled)


def speeds_of(
    arms: Sequence[Arm], training: Training, *, rounds: int = ROUNDS, updates: int = UPDATES
) -> dict[str, list[float]]:
    """Time a few updates of every arm, in turns: what else a machine does falls on all alike.

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


def on_cpu() -> bool:
    """Whether seeds are faster one after the other."""
    return jax.devices()[0].platform == "cpu"


def start(model: Transformer, optimizer: optax.GradientTransformation, key: Any) -> step.TrainState:
    """The state of one seed before its first update."""
    params = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]
    return step.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), new_guard())


def update(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    state: step.TrainState,
    batch: data.Batch,
) -> tuple[step.TrainState, step.StepMetrics]:
    """One update of one seed, on one device."""
    tokens = jnp.maximum(jnp.sum(batch.mask).astype(jnp.float32), 1)

    def loss(params: Any):
        key = jax.random.fold_in(jax.random.key(0), state.step)
        return total_loss(model, objective, params, batch, key, over=()) / tokens

    value, gradients = jax.value_and_grad(loss)(state.params)
    norm = optax.tree.norm(gradients)
    # Only what is not finite is left out: how an arm fares without mercy is what is asked.
    kept = Skipping(spike=None)
    return step.finish_update(optimizer, kept, state, value, gradients, norm)


def seed_batches(training: Training) -> Iterator[data.Batch]:
    """Batches of all seeds, each with its own order of the rows."""
    each = [
        data.Batches(training.rows, batch_size=training.batch_size, seed=seed)
        for seed in training.seeds
    ]
    for at in range(training.steps):
        yield data.Batch(*map(np.stack, zip(*(batches[at] for batches in each), strict=True)))


def compiled_for_all(
    place: Place,
    function: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    ways: Sequence[bool],
    room: int | None,
) -> Any:
    """An update of all seeds.

    Args:
        place: Where they are.
        function: The update of one.
        state: Of all.
        batch: Of all.
        ways: Whether a device runs its seeds one by one, or side by side: the first that fits.
        room: Bytes of a device; None is not known, and everything fits.

    Raises:
        ValueError: Nothing fits.
    """
    needed = 0
    for one_by_one in ways:
        each = jax.jit(place.mapped(function, one_by_one=one_by_one), donate_argnums=0)
        compiled = each.lower(state, batch).compile()
        memory = compiled.memory_analysis()
        if room is None or memory is None:
            return compiled
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        if needed <= room:
            return compiled
    raise ValueError(
        f"A device has {(room or 0) / 2**30:.1f} GiB; a seed at a time needs "
        f"{needed / 2**30:.1f} GiB. "
        "Pass a smaller --batch-size or --length, or --run with a run that has remat."
    )


def spread(devices: int) -> Place:
    """Seeds shared out over the first devices, in order."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    where = jax.sharding.NamedSharding(mesh, P(AXIS))

    def mapped(function: Callable[..., Any], *, one_by_one: bool) -> Callable[..., Any]:
        def here(*arguments: Any) -> Any:
            if one_by_one:
                return jax.lax.map(lambda given: function(*given), arguments)
            return jax.vmap(function)(*arguments)

        return jax.shard_map(here, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))

    return Place(partial(jax.device_put, device=where), mapped)


def held_out_nats(
    model: TransformerConfig, params: Any, rows: data.AnyRows, training: Training
) -> list[float]:
    """Nats per token of held-out rows, of each seed; the rows may have any length.

    Args:
        model: The model; it may read positions otherwise than in training.
        params: Of all seeds, from `train_seeds`.
        rows: The text.
        training: As the parameters were trained.

    Returns:
        One number for each seed.
    """
    place, count = spread(training.devices), len(training.seeds)
    # As many tokens at a time as in training.
    size = max(1, training.batch_size * training.rows.row_length // rows.row_length)
    layers = Transformer(model, dtype=jnp.dtype(training.dtype))

    def tally(params: Any, batch: data.Batch):
        scores = apply_to(batch, layers, params, targets=jnp.asarray(batch.targets))
        losses = F.score_cross_entropy(scores)
        return jnp.sum(jnp.where(batch.mask, losses, 0.0))

    program = jax.jit(place.mapped(tally, one_by_one=True))  # what a seed alone needs is there
    total = np.zeros(count)
    for batch in data.evaluation_batches(rows, batch_size=size):
        same = data.Batch(*(np.broadcast_to(x, (count, *x.shape)) for x in batch))
        total += np.asarray(program(params, place.put(same)), np.float64)
    return [float(x) for x in total / rows.num_targets]


def shared_by(seeds: int, devices: Sequence[Any]) -> int:
    """The largest number of devices that can share so many seeds evenly."""
    return max(n for n in range(1, len(devices) + 1) if seeds % n == 0)
