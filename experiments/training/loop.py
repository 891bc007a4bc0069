"""Builds the model and the train step, then trains, evaluates, logs and saves."""

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from experiments.trained import load_trained, write_beginning
from experiments.training import stores
from experiments.training.memory import advice, check_memory, refuse_too_large
from experiments.training.resume import find_start
from experiments.training.run import RUN_FILE, Run, chosen_devices
from jaxformer import costs, parallel
from jaxformer.config import Decoder, TransformerConfig, to_json
from jaxformer.data import Saved, Tokenizer
from jaxformer.extras import import_extra
from jaxformer.interop import find_folder
from jaxformer.interop.save import choose_family
from jaxformer.layers import Transformer
from jaxformer.parallel.chips import chip_of
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import AnyBatch
from jaxformer.training.interruption import deferred
from jaxformer.training.metrics import (
    JsonLines,
    Metrics,
    TensorBoard,
    WeightsAndBiases,
    Writer,
    check_weights_and_biases,
)
from jaxformer.training.optimizers import learning_rate, make_optimizer
from jaxformer.training.progress import Progress, format_count

RATES = 4096  # learning rates that are computed together
SECONDS, UPDATES = 1.0, 8  # over which speed is a mean, or since the last restart


class Machinery(NamedTuple):
    """Output folders, mesh and model of a run."""

    output: Path
    kept: epath.Path
    mesh: Mesh
    model: Transformer


def machinery(
    run: Run, output: Path, *, length: int, source_lengths: Sequence[int] = ()
) -> Machinery:
    """Build the mesh and the model of a run, before any text is read.

    Says what memory a device will need, and what will not be possible later.

    Args:
        run: The run.
        output: Its folder.
        length: Tokens of a row, of its target where there is a source.
        source_lengths: Of sources, in rising order.

    Raises:
        ValueError: The devices cannot share the work or have no room, or nobody is logged in where
            the run would log to.
        ImportError: What would write for TensorBoard is not installed.
    """
    mesh = parallel.make_mesh(run.mesh, chosen_devices(run.devices))
    parallel.check_fits(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        lengths=[*source_lengths, length],
        accumulation=run.accumulation,
    )
    check_memory(run, mesh, length=length, source_length=max(source_lengths, default=0))
    print_export_note(run.model)
    if run.tensorboard:
        import_extra("tensorboardX")
    if run.wandb is not None:
        parallel.first_decides(check_login)
    model = Transformer(
        run.model,
        dtype=run.dtype,
        remat=run.remat,
        scan=run.scan,
        expert_room=run.expert_room,
        attention_implementation=run.attention_implementation,
    )
    return Machinery(output, stores.kept(run.output or output), mesh, model)


def print_export_note(config: TransformerConfig) -> None:
    """Print why `experiments.export` cannot write this model, where it cannot."""
    try:
        choose_family(config, {})
    except ValueError as error:
        first, *fields = str(error).splitlines()
        reason = " ".join([first, "; ".join(field.strip() for field in fields)]).rstrip()
        print(f"Note: experiments.export will not be able to write this model. {reason}")


def check_login() -> str:
    """Raise unless this machine is logged in to Weights & Biases."""
    try:
        check_weights_and_biases()
    except ImportError as error:
        raise ValueError(str(error)) from error
    return ""


def check_vocabulary(
    model: TransformerConfig,
    tokenizer: Tokenizer,
    remedy: str = "pass --model.vocab-size",
    *,
    init: str | None = None,
) -> None:
    """Raise if the tokenizer has more tokens than the model's embedding."""
    have, need = model.vocab_size, tokenizer.vocab_size
    if have >= need:
        return
    if init is not None:
        raise ValueError(
            f"The tokenizer has {need} tokens, the model of {init} {have}. Pass the tokenizer that "
            "the model was trained with as --tokenizer, or train a new model without --init."
        )
    raise ValueError(f"The tokenizer has {need} tokens, the model {have}; {remedy} {need}.")


def train(
    run: Run,
    using: Machinery,
    tokenizer: Tokenizer,
    checkpoints: Checkpoints,
    description: dict[str, Any],
    *,
    fetch: Callable[[int], AnyBatch],
    shaped: Callable[[int], Iterable[AnyBatch]] | None = None,
    length: int,
    evaluate: Callable[[int, Any, Progress], dict[str, float]],
    loss: Callable[[dict[str, float]], float],
) -> tuple[step.TrainState, dict[str, float]] | None:
    """Train up to `run.steps`, with logging, evaluation and checkpoints.

    Args:
        run: The run.
        using: What it trains with.
        tokenizer: Written beside the checkpoints, for those who read them.
        checkpoints: Where states go, and where the run begins if it is resumed.
        description: What goes with them; see `describe`.
        fetch: The batch, on the devices, of update k + 1, given k.
        shaped: One batch of each shape that there is, given k; None: all are shaped alike.
        length: Tokens of a row.
        evaluate: Numbers to write, from the updates made, the parameters and the display; called
            every `run.evaluate_every` updates and at the end.
        loss: What of these numbers says which checkpoint is the best, the lowest.

    Returns:
        The last state and the last numbers of `evaluate`; None where all of it was done before.

    Raises:
        Interrupted: A signal came; the state after the update it fell into is being saved.
        ValueError: What is to be resumed is another run, or the devices have no room.
    """
    start = find_start(run, using.output, checkpoints, description)
    if start is None:
        return None
    optimizer = make_optimizer(
        run.optimizer, run.planned_steps, parallel.declarations(using.model.config)
    )
    batches = [fetch(start)] if shaped is None else shaped(start)
    update = compile_updates(run, using, optimizer, batches)
    state = begin(run, using, optimizer, checkpoints, start)
    if parallel.is_first():
        if start == 0:
            write_beginning(run, tokenizer, using.output)
        elif not isinstance(run.tokenizer, Saved):  # its file may be damaged
            tokenizer.save(using.output)
        (using.output / RUN_FILE).write_text(to_json(run, indent=1), encoding="utf-8")
    meter = Meter(run, using.mesh, length=length)

    def due(at: int) -> bool:
        return at % run.evaluate_every == 0 or at % run.save_every == 0

    title = f"{format_count(costs.parameters(run.model))} parameters, {using.mesh.size} device(s)"
    with (
        Metrics(writers(run, using.output, description, start)) as metrics,
        Progress(run.steps, start_step=start, title=title) as progress,
    ):
        with deferred() as signals:
            updates = loop.train(
                state,
                update,
                fetch,
                start=start,
                stop=run.steps,
                settle=lambda at: signals.stops(at) or due(at),
                patience=run.skipping.patience,
            )
            for at, state, finished in updates:
                for done, numbers in meter.read(finished):
                    progress.update(done.step, **numbers)
                    if done.in_a_row:
                        progress.note(
                            f"step {done.step:,}: no update, for the loss is {done.loss:.4g} and "
                            f"the gradient's norm {done.gradient_norm:.4g}; {done.skipped} so far"
                        )
                    if done.step % run.log_every == 0 or done.step == run.steps:
                        skipped = {"skipped_updates": done.skipped} if done.skipped else {}
                        numbers["gradient_norm"] = done.gradient_norm
                        metrics.write(done.step, {**numbers, **skipped})
                rank = None
                if at % run.evaluate_every == 0 and at < run.steps:
                    # Before saving, so that a run resumed from here lacks no evaluation.
                    numbers = evaluate(at, state.params, progress)
                    metrics.write(at, numbers)
                    rank = loss(numbers)
                if at % run.save_every == 0 or at == run.steps or signals.stopping:
                    checkpoints.save(at, state, description, loss=rank)
                    if parallel.is_first() and run.output is not None:
                        stores.store(run.output)
                if signals.stopping:
                    raise signals.interrupted()
                if due(at):
                    meter.restart()
            if signals.stops(run.steps + 1):  # one that came while the last state was saved
                raise signals.interrupted()
        last = evaluate(run.steps, state.params, progress)
        metrics.write(run.steps, last)
    return state, last


def compile_updates(
    run: Run, using: Machinery, optimizer: optax.GradientTransformation, batches: Iterable[AnyBatch]
) -> Any:
    """Compile the train step for each batch shape and print the memory it needs.

    Raises:
        TooLargeError: A device has less, which is said before it has to hold any state.
    """
    state = step.abstract_state(using.model, optimizer, using.mesh)
    update = step.make_update(
        using.model,
        optimizer,
        using.mesh,
        objective=run.objective,
        skipping=run.skipping,
        accumulation=run.accumulation,
        seed=run.seed,
        overlap=run.overlap,
    )
    programs = {}
    for batch in batches:
        since = time.monotonic()
        with choices_said():
            lowered = update.lower(state, batch)
        programs[shapes(batch)] = compiled = lowered.compile()
        memory = compiled.memory_analysis()
        print(
            f"Compiled in {time.monotonic() - since:.1f} s. Memory per device: "
            f"{memory.argument_size_in_bytes / 2**20:.0f} MiB of parameters, optimizer state and "
            f"batch, {memory.temp_size_in_bytes / 2**20:.0f} MiB of working space.",
            flush=True,
        )
        refuse_too_large(compiled, lambda: advice(run))
    return lambda state, batch: programs[shapes(batch)](state, batch)


def shapes(batch: AnyBatch) -> tuple[tuple[int, ...], ...]:
    """Shapes and dtypes of a batch, the key of its compiled program."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


@contextlib.contextmanager
def choices_said() -> Iterator[None]:
    """Print what the library logs about its choices, each line once."""
    log, said = logging.getLogger("jaxformer"), dict[str, None]()
    level = log.level

    def catch(record: logging.LogRecord) -> bool:
        said[record.getMessage()] = None
        return False

    log.addFilter(catch)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(catch)
    for line in said:
        print(line)


def begin(
    run: Run,
    using: Machinery,
    optimizer: optax.GradientTransformation,
    checkpoints: Checkpoints,
    start: int,
) -> step.TrainState:
    """Initialize the train state, from pretrained weights if given, or restore a checkpoint."""
    if start == 0:
        params = None
        if run.init is not None:
            params = load_trained(find_folder(run.init), mesh=using.mesh).params
            print(f"Beginning with the weights of {run.init}.")
        key = jax.random.key(run.seed)
        return step.init_state(using.model, optimizer, key, using.mesh, params=params)
    abstract = step.abstract_state(using.model, optimizer, using.mesh)
    state = checkpoints.restore(start, abstract)
    print(f"Resuming after step {start}.")
    return state


def writers(run: Run, output: Path, description: dict[str, Any], start: int) -> list[Writer]:
    """Metric writers of process 0, resumed so that they drop lines after `start_step`."""
    if not parallel.is_first():
        return []
    earlier = start if run.resume or run.resume_or_begin else None
    file = output / "metrics.jsonl"
    chosen: list[Writer] = [JsonLines(file, resume_from=earlier)]
    if start >= run.log_every and not file.stat().st_size:
        print(f"{file} has lost the lines of the first {start} steps.", file=sys.stderr)
    if run.tensorboard:
        chosen.append(TensorBoard(output / "tensorboard", resume_from=earlier))
    if run.wandb is not None:
        chosen.append(WeightsAndBiases(run.wandb, output.name, description))
    return chosen


class Meter:
    """Computes throughput, MFU and learning rate of finished steps.

    Model FLOP utilisation is known where `parallel.chips` has the devices and the model is a
    decoder (Chowdhery et al., PaLM, 2022. arXiv:2204.02311, section 4.1 and appendix B).
    """

    def __init__(self, run: Run, mesh: Mesh, *, length: int):
        """Start the clock.

        Args:
            run: The run.
            mesh: The devices.
            length: Tokens of a row.
        """
        self.tokens, self.share = run.batch_size * length, None
        chip = chip_of(mesh.devices.flat[0].device_kind)
        if chip is not None and isinstance(run.model.topology, Decoder):
            work = costs.training_flops_per_token(run.model, length)
            self.share = work / (chip.peak_flops * mesh.size)  # of the peak, for a token a second
        self._rates_from = jax.jit(jax.vmap(learning_rate(run.optimizer, run.planned_steps)))
        self._rates: tuple[int, Any] = -1, None
        self.restart()

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        # Many at once: computed one by one they would wait in line behind the updates.
        block, at = divmod(step - 1, RATES)
        if block != self._rates[0]:
            steps = block * RATES + np.arange(RATES, dtype=np.int32)
            self._rates = block, jax.device_get(self._rates_from(steps))
        return float(self._rates[1][at])

    def restart(self) -> None:
        """Exclude the time since the last step (evaluation, checkpoints) from the throughput."""
        self.marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def speed(self, updates: int) -> float:
        """Steps per second over a window of at least a few seconds and steps.

        Several that the devices have made may be read within a moment, and the next after a while.
        """
        now, count = time.monotonic(), self.marks[-1][1] + updates
        self.marks.append((now, count))
        while now - self.marks[1][0] >= SECONDS and count - self.marks[1][1] >= UPDATES:
            self.marks.popleft()
        since, before = self.marks[0]
        return (count - before) / (now - since)

    def read(self, finished: list[loop.Finished]) -> list[tuple[loop.Finished, dict[str, float]]]:
        """Metrics of each finished step: loss, learning rate, throughput, MFU."""
        if not finished:
            return []
        speed = self.tokens * self.speed(len(finished))
        shared = {"tokens_per_second": speed}
        if self.share is not None:
            shared["utilisation"] = speed * self.share
        return [
            (done, {"loss": done.loss, "learning_rate": self.rate(done.step), **shared})
            for done in finished
        ]
