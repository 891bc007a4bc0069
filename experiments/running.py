"""What every training run does: its program, its loop, how it ends."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from experiments.command_line import fail
from experiments.devices import chosen_devices
from experiments.meter import Meter
from experiments.out_of_memory import (
    TooLargeError,
    advice,
    is_out_of_memory,
    refuse_too_large,
)
from experiments.resuming import again, command_line, last_checkpoint
from experiments.starting import INTERRUPTED
from experiments.training_run import Run, name_of
from jaxformer import costs, parallel
from jaxformer.layers import Transformer
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import AnyBatch
from jaxformer.training.interruption import deferred, raised
from jaxformer.training.metrics import (
    JsonLines,
    Metrics,
    TensorBoard,
    WeightsAndBiases,
    Writer,
)
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.progress import Progress, format_count


class Machinery(NamedTuple):
    """What a run trains with, and where its results go."""

    output: Path
    mesh: Mesh
    model: Transformer
    optimizer: optax.GradientTransformation


def machinery(run: Run, output: Path, *, lengths: Sequence[int]) -> Machinery:
    """The mesh, the model and the optimizer that a run asks for, if they fit."""
    mesh = parallel.make_mesh(run.mesh, chosen_devices(run.devices))
    parallel.check_fits(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        lengths=lengths,
        accumulation=run.accumulation,
    )
    model = Transformer(
        run.model,
        dtype=run.dtype,
        remat=run.remat,
        scan=run.scan,
        expert_room=run.expert_room,
        attention_implementation=run.attention_implementation,
    )
    return Machinery(output, mesh, model, make_optimizer(run.optimizer, run.schedule_steps))


@contextlib.contextmanager
def explained_end(run: Run, checkpoints: Checkpoints, output: Path) -> Iterator[None]:
    """Say of a run that ends early what is left of it, and how to go on."""
    try:
        with raised():
            yield
    except loop.TooManySkipsError as error:
        checkpoints.wait()
        fail(
            f"{error} {last_checkpoint(checkpoints, output)} --skipping.patience and "
            "--skipping.spike may be changed with --resume; a new run with a lower peak of the "
            "learning rate usually helps."
        )
    except (TooLargeError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, TooLargeError):
            fail(f"{error}\n{last_checkpoint(checkpoints, output)}")
        if not is_out_of_memory(error):
            raise
        fail(
            f"A device has no memory left: {str(error).splitlines()[0][:200]}\n{advice(run)}\n"
            f"{last_checkpoint(checkpoints, output)}"
        )
    except KeyboardInterrupt as error:
        with deferred():
            checkpoints.wait()
        print(f"\nInterrupted. {last_checkpoint(checkpoints, output)}", file=sys.stderr)
        print(again(run, checkpoints, output), file=sys.stderr)
        raise SystemExit(getattr(error, "status", INTERRUPTED)) from None


def print_end(run: Run, output: Path) -> None:
    """Say where everything is, and how to repeat it."""
    print(f"\nEverything is in {output}. To repeat the run:\n  {command_line(name_of(run))}")


def compile_update(run: Run, using: Machinery, batch: AnyBatch) -> Any:
    """Compile the update for exactly these shapes, and say what memory it will take.

    Raises:
        TooLargeError: A device has less, which is said before it has to hold any state.
    """
    state = step.abstract_state(using.model, using.optimizer, using.mesh)
    update = step.make_update(
        using.model,
        using.optimizer,
        using.mesh,
        objective=run.objective,
        skipping=run.skipping,
        accumulation=run.accumulation,
        seed=run.seed,
        overlap=run.overlap,
    )
    since = time.monotonic()
    with choices_said():
        lowered = update.lower(state, batch)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    print(
        f"Compiled in {time.monotonic() - since:.1f} s. Memory per device: "
        f"{memory.argument_size_in_bytes / 2**20:.0f} MiB of parameters, optimizer state and "
        f"batch, {memory.temp_size_in_bytes / 2**20:.0f} MiB of working space.",
        flush=True,
    )
    refuse_too_large(run, compiled)
    return compiled


@contextlib.contextmanager
def choices_said() -> Iterator[None]:
    """Print what the package logs of its choices, each line once."""
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


def writers(run: Run, output: Path, description: dict[str, Any], start: int) -> list[Writer]:
    """Where the first process writes; what an earlier attempt wrote after `start` is dropped."""
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


def norms(done: loop.Finished) -> dict[str, float]:
    """What is written of an update beside what is shown."""
    skipped = {"skipped_updates": done.skipped} if done.skipped else {}
    return {"gradient_norm": done.gradient_norm, **skipped}


def make_updates(
    run: Run,
    using: Machinery,
    state: step.TrainState,
    update: Callable[[step.TrainState, Any], tuple[step.TrainState, step.StepMetrics]],
    fetch: Callable[[int], AnyBatch],
    *,
    meter: Meter,
    checkpoints: Checkpoints,
    description: dict[str, Any],
    evaluate: Callable[[int, Any, Progress], dict[str, float]],
    loss: Callable[[dict[str, float]], float],
) -> tuple[step.TrainState, dict[str, float]]:
    """Bring the state to `run.steps` updates, reporting, evaluating and saving on the way.

    Args:
        run: The run.
        using: What it trains with.
        state: Where to begin.
        update: Compiled.
        fetch: The batch of each step, on the devices.
        meter: Measures the updates.
        checkpoints: Where states go.
        description: What goes with them.
        evaluate: Numbers to write, from the updates made, the parameters and the display; called
            every `run.evaluate_every` updates and at the end.
        loss: What of these numbers says which checkpoint is the best, the lowest.

    Returns:
        The last state and the last numbers of `evaluate`.

    Raises:
        Interrupted: A signal came; the state after the update it fell into is being saved.
    """
    start = int(state.step)

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
                        metrics.write(done.step, {**numbers, **norms(done)})
                rank = None
                if at % run.evaluate_every == 0 and at < run.steps:
                    # Before saving, so that a run resumed from here lacks no evaluation.
                    numbers = evaluate(at, state.params, progress)
                    metrics.write(at, numbers)
                    rank = loss(numbers)
                if at % run.save_every == 0 or at == run.steps or signals.stopping:
                    checkpoints.save(at, state, description, loss=rank)
                if signals.stopping:
                    raise signals.interrupted()
                if due(at):
                    meter.restart()
            if signals.stops(run.steps + 1):  # one that came while the last state was saved
                raise signals.interrupted()
        last = evaluate(run.steps, state.params, progress)
        metrics.write(run.steps, last)
    return state, last
