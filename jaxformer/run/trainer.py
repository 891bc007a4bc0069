"""The course of a run's updates: the train step compiled, the state made or restored, the steps."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import optax
from etils import epath
from jax.sharding import Mesh

from jaxformer import costs, parallel
from jaxformer.interop import fetch_folder
from jaxformer.layers import Transformer
from jaxformer.parallel.plan_report import format_bytes
from jaxformer.run import early_end
from jaxformer.run.loading import load_initial_params
from jaxformer.run.memory_advice import memory_advice
from jaxformer.run.memory_checks import check_compiled_memory
from jaxformer.run.profile import write_profile
from jaxformer.run.recorder import Recorder, TrainData, TrainResult, make_writers, write_run_files
from jaxformer.run.resume import checkpoint_description, has_checkpoint, step_to_resume
from jaxformer.run.run_config import RunConfig, flatten
from jaxformer.run.throughput import ThroughputMeter
from jaxformer.run.train_setup import TrainSetup
from jaxformer.training import loop, metrics, train_step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import AnyBatch
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.progress import Progress, format_count
from jaxformer.training.signals import defer_signals, raise_on_signals

WAIT_SECONDS = 0.1  # between looks for signals while a batch is not ready


def train_run(
    run: RunConfig, setup: TrainSetup, train_data: TrainData, rerun_command: str = ""
) -> TrainResult | None:
    """Train up to `run.steps`, with logging, evaluation and checkpoints.

    If the run ends early, the exception has the last checkpoint and how to resume as notes.

    Returns:
        The final parameters and the metrics of their evaluation; None if the run was already
        complete.

    Raises:
        ValueError: The checkpoint has other settings.
    """
    with (
        Checkpoints(setup.storage / "checkpoints", max_to_keep=run.keep) as checkpoints,
        explained_early_end(run, checkpoints, setup.storage, rerun_command),
    ):
        run.check_profiled_steps()
        description = checkpoint_description(run, train_data.tokenizer, train_data.fingerprint())
        parallel.check_equal_across_processes(flatten(description))
        start_step: int | None = 0
        if run.resume or (run.resume_or_begin and has_checkpoint(checkpoints)):
            start_step = step_to_resume(run, setup.local_folder, checkpoints, description)
        if start_step is None:
            return None
        optimizer = make_run_optimizer(run)
        batches = train_data.batch_of_each_shape(start_step)
        update = compile_train_step(run, setup.model, optimizer, setup.mesh, batches)
        # Python ends with a segmentation fault if it ends while a device computes the state.
        with defer_signals() as signals:
            state = init_or_restore_state(run, setup, optimizer, checkpoints, start_step)
            jax.block_until_ready(state)
            if signals.should_stop(start_step):
                raise signals.to_error()
        train_data.prepare(start_step, state.params)
        write_run_files(run, setup.local_folder, train_data, start_step)
        writers = make_writers(run, setup.local_folder, description, start_step)
        count = costs.num_parameters(run.model)
        title = f"{format_count(count)} parameters, {setup.mesh.size} device(s)"
        if run.model.adapter is not None:
            shapes = jax.tree.leaves(trained_parameters(run))
            num_trained = sum(math.prod(x.shape) for x in shapes)
            title += f"; {format_count(num_trained)} are trained ({num_trained / count:.2%})"
        meter = ThroughputMeter(run, setup.mesh, length=train_data.sequence_length)
        with (
            metrics.MultiWriter(writers) as writer,
            Progress(
                run.steps, start_step=start_step, title=title, log_every=run.log_every
            ) as progress,
        ):
            recorder = Recorder(
                run, setup, train_data, checkpoints, description, meter, writer, progress
            )
            state = run_steps(recorder, update, state, start_step)
            return state.params, recorder.evaluate(run.steps, state.params, final=True).metrics


@contextlib.contextmanager
def explained_early_end(
    run: RunConfig, checkpoints: Checkpoints, output: epath.PathLike, rerun_command: str
) -> Iterator[None]:
    """If the run ends early, add the last checkpoint and the command to resume to the exception.

    JAX may abort one of several processes before that, so with several the command is also printed
    at the start.
    """
    if jax.process_count() > 1:
        words = "If one process stops, all stop. To resume, start every process again with:"
        early_end.print_error(f"{words}\n  {early_end.resume_command(run, output, rerun_command)}")
    try:
        with raise_on_signals():
            yield
    except BaseException as error:
        early_end.explain(run, checkpoints, output, error, rerun_command)
        raise


def run_steps(
    recorder: Recorder, update: Any, state: train_step.TrainState, start_step: int
) -> train_step.TrainState:
    """Run the steps after `start_step`; returns the final state.

    Raises:
        Interrupted: A signal arrived; the state after the current step is being saved.
    """
    run, profiled = recorder.run, recorder.run.profiled_steps

    def should_pause(step: int) -> bool:
        pauses = step % run.evaluate_every == 0 or step % run.save_every == 0
        return pauses or step + 1 in (profiled.start, profiled.stop)

    def waits(step: int) -> bool:
        """Whether the next step must wait; processes stop at one step, so several do not ask."""
        is_last = step >= run.steps or jax.process_count() > 1
        return not is_last and not recorder.train_data.is_ready(step)

    with defer_signals() as signals, contextlib.ExitStack() as trace:

        def profile_from(step: int) -> None:
            if step == profiled.start and parallel.is_primary_process():
                folder = recorder.setup.local_folder / "profile"
                trace.enter_context(write_profile(folder, len(profiled), recorder.progress.print))

        if 0 < profiled.start <= start_step:
            recorder.progress.print(f"Not profiled: {run.profile_steps} starts before this start.")
        profile_from(start_step + 1)
        steps = loop.train_steps(
            state,
            update,
            recorder.train_data.get_batch,
            start_step=start_step,
            stop_step=run.steps,
            should_sync=lambda step: signals.should_stop(step) or should_pause(step) or waits(step),
            max_consecutive_skips=run.skip_step.max_consecutive_skips,
        )
        for step, state, results in steps:
            if step + 1 == profiled.stop:
                trace.close()
            recorder.log(results)
            loss, is_best = None, False
            if step % run.evaluate_every == 0 or step == run.steps:
                # Before saving, so that a run resumed from this checkpoint has its metrics.
                loss = recorder.evaluate(step, state.params).loss
                is_best = recorder.checkpoints.is_best(loss)
            saves = is_best or step % run.save_every == 0 or step == run.steps
            if saves or signals.stop_requested:
                recorder.save(step, state, loss)
            if signals.stop_requested:
                raise signals.to_error()
            if should_pause(step):
                recorder.meter.reset()
            while waits(step):
                time.sleep(WAIT_SECONDS)
                if signals.should_stop(step):
                    if not saves:
                        recorder.save(step, state, None)
                    raise signals.to_error()
            profile_from(step + 1)
        if signals.should_stop(run.steps + 1):  # received while the last state was saved
            raise signals.to_error()
    return state


def trained_parameters(run: RunConfig) -> Any:
    """The metadata of the parameters that a run trains: all, or its adapters."""
    metadata = parallel.parameter_metadata(run.model)
    return parallel.split_parameters(run.model.adapter, metadata).trained


def make_run_optimizer(run: RunConfig) -> optax.GradientTransformation:
    """The optimizer of a run, with its learning-rate schedule."""
    return make_optimizer(run.optimizer, run.planned_steps, trained_parameters(run))


def compile_train_step(
    run: RunConfig,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    batches: Iterable[AnyBatch],
    *,
    advice: Callable[[RunConfig], str] = memory_advice,
) -> Any:
    """Compile the train step for each batch shape and print the memory it needs.

    Raises:
        TooLargeError: A device has less; no state has been allocated yet. The message has the
            advice.
    """
    state = train_step.abstract_train_state(model, optimizer, mesh)
    update = train_step.make_train_step(
        model,
        optimizer,
        mesh,
        objective=run.objective,
        skip_step=run.skip_step,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        seed=run.seed,
        overlap_collectives=run.overlap,
    )
    programs = {}
    for batch in batches:
        started_at = time.monotonic()
        print("Compiling the train step ...", flush=True)
        with print_logged_choices():
            lowered = update.lower(state, batch)
        programs[batch_shapes(batch)] = compiled = lowered.compile()
        memory = compiled.memory_analysis()
        print(
            f"Compiled in {time.monotonic() - started_at:.1f} s. Memory per device: "
            f"{format_bytes(memory.argument_size_in_bytes)} for parameters, optimizer state and "
            f"batch, {format_bytes(memory.temp_size_in_bytes)} temporary.",
            flush=True,
        )
        check_compiled_memory(compiled, lambda: advice(run))
    return lambda state, batch: programs[batch_shapes(batch)](state, batch)


def batch_shapes(batch: AnyBatch) -> tuple[tuple[int, ...], ...]:
    """Shapes of a batch's arrays, the key of its compiled program."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


@contextlib.contextmanager
def print_logged_choices() -> Iterator[None]:
    """Print what the library logs about its choices, each line once."""
    log, lines = logging.getLogger("jaxformer"), dict[str, bool]()
    level = log.level

    def catch(record: logging.LogRecord) -> bool:
        return lines.setdefault(record.getMessage(), False)  # it is not passed on

    log.addFilter(catch)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(catch)
    for line in lines:
        print(line)


def init_or_restore_state(
    run: RunConfig,
    setup: TrainSetup,
    optimizer: optax.GradientTransformation,
    checkpoints: Checkpoints,
    start_step: int,
) -> train_step.TrainState:
    """Initialize the train state, from pretrained weights if given, or restore a checkpoint."""
    if start_step == 0:
        params = None
        if run.init is not None:
            folder, adapter = fetch_folder(run.init), run.model.adapter
            dtype = "float32" if adapter is None else adapter.base_dtype
            params = load_initial_params(folder, setup.mesh, dtype, adapter)
            print(f"Initialized from the weights of {run.init}.")
        key = jax.random.key(run.seed)
        return train_step.init_train_state(setup.model, optimizer, key, setup.mesh, params=params)
    state: Any = train_step.abstract_train_state(setup.model, optimizer, setup.mesh)
    state = checkpoints.restore(start_step, state)
    print(f"Resumed from step {start_step}.")
    return state
