"""Builds the model and the train step, then trains, evaluates, logs and saves."""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from experiments.load_model import load_initial_params
from experiments.training import early_end
from experiments.training import object_store as stores
from experiments.training.memory_advice import memory_advice
from experiments.training.memory_checks import check_compiled_memory, check_memory
from experiments.training.output_folder import RUN_FILE, tokenizer_digest, write_beginning
from experiments.training.profile import write_profile
from experiments.training.resume import has_checkpoint, step_to_resume
from experiments.training.run_config import RunConfig, flatten, select_devices
from jaxformer import costs, parallel
from jaxformer.config import Decoder, TransformerConfig, to_json
from jaxformer.data import PretrainedTokenizer, Tokenizer
from jaxformer.extras import import_extra
from jaxformer.interop import fetch_folder
from jaxformer.interop.save import choose_family
from jaxformer.layers import Transformer
from jaxformer.parallel.chips import chip_from_device_kind
from jaxformer.parallel.plan_report import format_bytes
from jaxformer.training import loop, metrics, train_step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import AnyBatch
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.progress import Progress, format_count
from jaxformer.training.schedules import make_schedule
from jaxformer.training.signals import defer_signals, raise_on_signals

WAIT_SECONDS = 0.1  # between looks for signals while a batch is not ready
RATES_PER_BLOCK = 4096  # learning rates computed in one call
MIN_WINDOW_SECONDS, MIN_WINDOW_STEPS = (1.0, 8)  # shortest window of the mean throughput
# A resumed run may not change these fields, since they change its result. Devices, remat and scan
# may change; they change rounding, and devices the random bits of dropout.
FIXED_FIELDS = (
    "model", "tokenizer", "chat_template", "held_out", "held_out_bytes", "length",
    "source_lengths", "batch_size", "group", "gradient_accumulation_steps", "schedule_steps",
    "optimizer", "objective", "expert_capacity_factor", "dtype", "seed",
)  # fmt: skip


class TrainSetup(NamedTuple):
    """Output folders, mesh and model of a run."""

    local_folder: Path
    storage: epath.Path
    mesh: Mesh
    model: Transformer


def make_train_setup(
    run: RunConfig,
    output: Path,
    *,
    length: int,
    source_lengths: Sequence[int] = (),
    exact: bool = True,
) -> TrainSetup:
    """Build the mesh and the model of a run, before any text is read.

    Prints the estimated memory of a device, and whether the model cannot be exported.

    Args:
        run: The run.
        output: Local output folder.
        length: Row length in tokens; with an encoder, of the targets.
        source_lengths: Padded lengths of the sources, increasing.
        exact: Whether length and batch size are those of the run; else they may become smaller.

    Raises:
        ValueError: Model or batch do not divide evenly over the mesh or do not fit in memory, or
            this machine is not logged in to Weights & Biases.
        ImportError: tensorboardX is needed and not installed.
    """
    mesh = parallel.make_mesh(run.mesh, select_devices(run.devices))
    parallel.check_divisible(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        lengths=[*source_lengths, length],
        gradient_accumulation_steps=run.gradient_accumulation_steps,
    )
    source_length = max(source_lengths, default=0)
    check_memory(run, mesh, length=length, source_length=source_length, exact=exact)
    print_length_note(run.model, length)
    print_export_note(run.model)
    if run.tensorboard:
        import_extra("tensorboardX")
    if run.wandb is not None:
        parallel.broadcast_from_process_0(check_wandb)
    model = Transformer(
        run.model,
        dtype=run.dtype,
        remat=run.remat,
        scan=run.scan,
        expert_capacity_factor=run.expert_capacity_factor,
        attention_implementation=run.attention_implementation,
    )
    return TrainSetup(output, stores.storage_path(run.output or output), mesh, model)


def print_length_note(config: TransformerConfig, length: int) -> None:
    """Print that rows are longer than the context of the model, where its positions have no end."""
    known = config.max_position_embeddings
    if known is not None and length > known:
        print(
            f"Warning: rows have {length:,} tokens, but the model knows {known:,} positions "
            f"(max_position_embeddings). Pass --length {known}, or scale RoPE for a longer context "
            "by --model.attention.positions."
        )


def print_export_note(config: TransformerConfig) -> None:
    """Print why `experiments.export` cannot write this model, where it cannot."""
    try:
        choose_family(dataclasses.replace(config, adapter=None), {})
    except ValueError as error:
        print("Note: experiments.export cannot write this model.", *str(error).split()[:60])


def check_wandb() -> str:
    """Raise unless this machine is logged in to Weights & Biases."""
    try:
        metrics.check_wandb_login()
    except ImportError as error:
        raise ValueError(str(error)) from error
    return ""


def check_vocabulary(
    model: TransformerConfig,
    tokens: int,
    remedy: str = "pass --model.vocab-size",
    *,
    init: str | None = None,
) -> None:
    """Raise if the tokenizer has more tokens than the model's embedding."""
    if model.vocab_size >= tokens:
        return
    if init is not None:
        raise ValueError(
            f"The tokenizer has {tokens} tokens, but the model of {init} has {model.vocab_size}. "
            "Pass the tokenizer of that model as --tokenizer, or train a new model without --init."
        )
    raise ValueError(
        f"The tokenizer has {tokens} tokens, but model.vocab_size is {model.vocab_size}; {remedy} "
        f"{tokens}."
    )


class Evaluation(NamedTuple):
    """Metrics of an evaluation, and the loss by which the best checkpoint is selected."""

    metrics: dict[str, float]
    loss: float


TrainResult = tuple[Any, dict[str, float]]  # final parameters, metrics of their evaluation


class TrainData(Protocol):
    """What a run trains with and is evaluated on.

    Attributes:
        tokenizer: Tokenizer, which is saved beside the checkpoints.
        sequence_length: Row length in tokens; with an encoder, of the targets.
        fitted: Fields of the run that follow from the data.
        rows_per_epoch: Rows of an epoch; None if they are not known.
        get_batch: Function of k that returns the sharded batch of step k + 1.
    """

    tokenizer: Tokenizer
    sequence_length: int
    fitted: Mapping[str, Any] = {}
    rows_per_epoch: int | None = None
    get_batch: Callable[[int], AnyBatch]

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of a resumed run, beside the settings of the run."""
        return {}

    def files(self) -> dict[str, str]:
        """Additional files for the output folder: their contents, by name."""
        return {}

    def is_ready(self, step: int) -> bool:
        """Whether `get_batch(step)` returns at once."""
        return True

    def batch_of_each_shape(self, step: int) -> Iterable[AnyBatch]:
        """One batch of each shape, for which the train step is compiled."""
        return [self.get_batch(step)]

    def prepare(self, step: int, params: Any) -> None:
        """Prepare for the steps after `step`, with the parameters after it."""
        return

    def evaluate(self, step: int, params: Any, recorder: "Recorder", *, final: bool) -> Evaluation:
        """Evaluate the parameters after a step, on all held-out data if the evaluation is final.

        Args:
            step: The step.
            params: The parameters.
            recorder: It has the progress and the checkpoints.
            final: Whether it is the result of the run; others choose the best checkpoint.
        """
        ...

    def report(self, result: TrainResult | None) -> None:
        """Print the result at the end of the run; there is None if it was already complete."""
        ...


def train_run(run: RunConfig, setup: TrainSetup, train_data: TrainData) -> TrainResult | None:
    """Train up to `run.steps`, with logging, evaluation and checkpoints.

    If the run ends early, the process ends with a message; see `report_early_end`.

    Returns:
        The final parameters and the metrics of their evaluation; None if the run was already
        complete.

    Raises:
        ValueError: The checkpoint has other settings.
    """
    with (
        Checkpoints(setup.storage / "checkpoints", max_to_keep=run.keep) as checkpoints,
        report_early_end(run, checkpoints, setup.storage),
    ):
        run.check_profiled_steps()
        description = checkpoint_description(run, train_data.tokenizer, train_data.fingerprint())
        parallel.check_equal_across_processes(flatten(description))
        start_step: int | None = 0
        if run.resume or (run.resume_or_begin and has_checkpoint(checkpoints)):
            start_step = step_to_resume(run, setup.local_folder, checkpoints, description)
        if start_step is None:
            return None
        metadata = parallel.parameter_metadata(run.model)
        trained = parallel.trained_parameters(run.model.adapter, metadata)
        optimizer = make_optimizer(run.optimizer, run.planned_steps, trained)
        batches = train_data.batch_of_each_shape(start_step)
        update = compile_train_step(run, setup, optimizer, batches)
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
            num_trained = sum(math.prod(x.shape) for x in jax.tree.leaves(trained))
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


def checkpoint_description(
    run: RunConfig, tokenizer: Tokenizer, fingerprint: dict[str, Any]
) -> dict[str, Any]:
    """Description saved with a checkpoint: every setting that affects the result, and the data."""
    run_json = json.loads(to_json(run))
    return {
        "config": run_json["model"],
        "run": {name: run_json[name] for name in FIXED_FIELDS if name in run_json},
        "tokenizer": tokenizer_digest(tokenizer),
        **fingerprint,
    }


@contextlib.contextmanager
def report_early_end(
    run: RunConfig, checkpoints: Checkpoints, output: epath.PathLike
) -> Iterator[None]:
    """If the run ends early, print the last checkpoint and the command to resume.

    JAX may abort one of several processes before that, so with several the command is also printed
    at the start.
    """
    if jax.process_count() > 1:
        words = "If one process stops, all stop. To resume, start every process again with:"
        early_end.print_error(f"{words}\n  {early_end.resume_command(run, output)}")
    try:
        with raise_on_signals():
            yield
    except BaseException as error:
        early_end.exit_if_explained(run, checkpoints, output, error)
        raise


class Recorder(NamedTuple):
    """Logs the steps of a run, evaluates its parameters and saves its state."""

    run: RunConfig
    setup: TrainSetup
    train_data: TrainData
    checkpoints: Checkpoints
    description: dict[str, Any]
    meter: "ThroughputMeter"
    writer: metrics.MultiWriter
    progress: Progress

    def log(self, results: list[loop.StepResult]) -> None:
        """Show the metrics of finished steps, and write those of every `log_every` steps."""
        for result, numbers in self.meter.step_metrics(results):
            seconds = self.meter.tokens / numbers["tokens_per_second"]
            self.progress.update(result.step, step_seconds=seconds, **numbers)
            if result.num_consecutive_skips:
                self.progress.print(
                    f"step {result.step:,}: update skipped (loss {result.loss:.4g}, gradient norm "
                    f"{result.gradient_norm:.4g}); {result.num_skipped} skipped so far"
                )
            if result.step % self.run.log_every == 0 or result.step == self.run.steps:
                skipped = {"skipped_updates": result.num_skipped} if result.num_skipped else {}
                numbers["gradient_norm"] = result.gradient_norm
                if result.max_expert_load is not None:
                    numbers["max_expert_load"] = result.max_expert_load
                self.writer.write(result.step, {**numbers, **skipped})

    def evaluate(self, step: int, params: Any, *, final: bool = False) -> Evaluation:
        """Evaluate the parameters and write the metrics."""
        evaluation = self.train_data.evaluate(step, params, self, final=final)
        if final or step % self.run.evaluate_every == 0:  # so that a longer run has no others
            self.writer.write(step, evaluation.metrics)
        return evaluation

    def save(self, step: int, state: train_step.TrainState, loss: float | None) -> None:
        """Save a checkpoint, and upload the small files of a run in an object store."""
        write_data_files(self.setup.local_folder, self.train_data)
        self.checkpoints.save(step, state, self.description, loss=loss)
        if parallel.is_primary_process() and self.run.output is not None:
            stores.upload(self.run.output)


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


def compile_train_step(
    run: RunConfig,
    setup: TrainSetup,
    optimizer: optax.GradientTransformation,
    batches: Iterable[AnyBatch],
) -> Any:
    """Compile the train step for each batch shape and print the memory it needs.

    Raises:
        TooLargeError: A device has less; no state has been allocated yet.
    """
    state = train_step.abstract_train_state(setup.model, optimizer, setup.mesh)
    update = train_step.make_train_step(
        setup.model,
        optimizer,
        setup.mesh,
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
        check_compiled_memory(compiled, lambda: memory_advice(run))
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


def write_run_files(run: RunConfig, folder: Path, train_data: TrainData, start_step: int) -> None:
    """Write run.json and the tokenizer; for a new run also the copies of the files of --init."""
    if not parallel.is_primary_process():
        return
    if start_step == 0:
        write_beginning(run, train_data.tokenizer, folder)
    elif not isinstance(run.tokenizer, PretrainedTokenizer):  # its file may be damaged
        train_data.tokenizer.save(folder)
    write_data_files(folder, train_data)
    (folder / RUN_FILE).write_text(to_json(run, indent=1), encoding="utf-8")


def write_data_files(folder: Path, train_data: TrainData) -> None:
    """Write the files of the data, such as the records of its sources."""
    if parallel.is_primary_process():
        for name, content in train_data.files().items():
            (folder / name).write_text(content, encoding="utf-8")


def make_writers(
    run: RunConfig, output: Path, description: dict[str, Any], start_step: int
) -> list[metrics.MetricWriter]:
    """Metric writers of process 0, resumed so that they drop lines after `start_step`."""
    if not parallel.is_primary_process():
        return []
    resume_from = start_step if run.resume or run.resume_or_begin else None
    file = output / "metrics.jsonl"
    writers: list[metrics.MetricWriter] = [metrics.JsonLinesWriter(file, resume_from=resume_from)]
    if start_step >= run.log_every and not file.stat().st_size:
        print(f"{file} has no metrics of the first {start_step} steps.", file=sys.stderr)
    if run.tensorboard:
        folder = output / "tensorboard"
        writers.append(metrics.TensorBoardWriter(folder, resume_from=resume_from))
    if run.wandb is not None:
        writers.append(metrics.WandbWriter(run.wandb, output.name, description))
    return writers


class ThroughputMeter:
    """Computes throughput, MFU and learning rate of finished steps.

    Model FLOPs utilization (MFU) needs a chip in `parallel.chips` and a decoder (Chowdhery et al.,
    PaLM, 2022. arXiv:2204.02311, section 4.1 and appendix B).
    """

    def __init__(self, run: RunConfig, mesh: Mesh, *, length: int):
        """Start the clock; `length` is the row length in tokens."""
        self.tokens, self.mfu_per_token = run.batch_size * length, None
        chip = chip_from_device_kind(mesh.devices.flat[0].device_kind)
        if chip is not None and isinstance(run.model.topology, Decoder):
            flops_per_token = costs.training_flops_per_token(run.model, length)
            self.mfu_per_token = flops_per_token / (chip.peak_flops * mesh.size)  # per second
        rates_from = jax.jit(jax.vmap(make_schedule(run.optimizer.schedule, run.planned_steps)))
        in_block = np.arange(RATES_PER_BLOCK, dtype=np.int32)
        # In blocks: single calls would queue behind the train steps on the device.
        self._rates = functools.cache(
            lambda block: jax.device_get(rates_from(block * RATES_PER_BLOCK + in_block))
        )
        self.reset()

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        block, index_in_block = divmod(step - 1, RATES_PER_BLOCK)
        return float(self._rates(block)[index_in_block])

    def reset(self) -> None:
        """Exclude the time since the last step (evaluation, checkpoints) from the throughput."""
        self.window: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def steps_per_second(self, num_steps: int) -> float:
        """Steps per second over a window of at least a few seconds and steps.

        The results of several finished steps may be read at once, the next only after a pause.
        """
        now, count = time.monotonic(), self.window[-1][1] + num_steps
        self.window.append((now, count))
        while (
            now - self.window[1][0] >= MIN_WINDOW_SECONDS
            and count - self.window[1][1] >= MIN_WINDOW_STEPS
        ):
            self.window.popleft()
        since, before = self.window[0]
        return (count - before) / (now - since)

    def step_metrics(
        self, results: list[loop.StepResult]
    ) -> list[tuple[loop.StepResult, dict[str, float]]]:
        """Metrics of each finished step: loss, learning rate, throughput, MFU."""
        if not results:
            return []
        speed = self.tokens * self.steps_per_second(len(results))
        shared = {"tokens_per_second": speed}
        if self.mfu_per_token is not None:
            shared["mfu"] = speed * self.mfu_per_token
        return [
            (x, {"loss": x.loss, "learning_rate": self.learning_rate(x.step), **shared})
            for x in results
        ]
