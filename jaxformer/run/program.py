"""The course of a run: print it, prepare model and data, train, report."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

from etils import epath

from jaxformer.config import python_source
from jaxformer.data import max_vocab_size
from jaxformer.errors import IMPORTED_MODULES
from jaxformer.json_files import get_field, read_json
from jaxformer.run.beginning import run_from_checkpoint
from jaxformer.run.command_line import RESUME_FLAGS, changed_flags
from jaxformer.run.output_folder import (
    RUN_FILE,
    folder_to_resume,
    open_output_folder,
    own_tokenizer,
)
from jaxformer.run.recorder import TrainData
from jaxformer.run.run_config import AnyRunConfig, EpochsConfig, setup_devices
from jaxformer.run.train_setup import TrainSetup, check_vocabulary, make_train_setup
from jaxformer.run.trainer import train_run
from jaxformer.training.checkpoints import Checkpoints

MAX_RISE = 0.02  # of the held-out loss since the best step
FEW_STEPS, ENOUGH_STEPS = 50, 200  # updates of fine-tuning


def train(
    run: AnyRunConfig,
    runs: Mapping[str, AnyRunConfig],
    make_data: Callable[[AnyRunConfig, TrainSetup], TrainData],
    *,
    length: int,
    source_lengths: Sequence[int] = (),
) -> Path:
    """Print the run, prepare model and data, train, report.

    Args:
        run: The run.
        runs: Named runs.
        make_data: Function that prepares the data.
        length: Maximum row length in tokens; with an encoder, of the targets.
        source_lengths: Padded lengths of the sources, increasing.

    Returns:
        The output folder.
    """
    with setup_devices(run), open_output_folder(run) as output:
        rerun_command = print_run(run, runs)
        resumes_from = folder_to_resume(run, output)
        run = run if resumes_from else with_one_length(run, runs)
        tokens = max_vocab_size(own_tokenizer(run, resumes_from)) or 0
        check_vocabulary(run.model, tokens, init=run.init)
        largest = run.largest()
        setup = make_train_setup(
            largest,
            output,
            resumes_from=resumes_from,
            length=length,
            source_lengths=source_lengths,
            exact=largest == run,
        )
        train_data = make_data(run, setup)
        check_vocabulary(run.model, train_data.tokenizer.vocab_size, init=run.init)
        run = replace(run, **train_data.fitted)
        run = with_epochs_as_steps(run, train_data.rows_per_epoch)
        run = with_fixed_schedule(run, resumes_from)
        train_data.report(train_run(run, setup, train_data, rerun_command))
        print_best_step(setup.storage)
        print(f"\nResults are in {setup.storage}. To repeat the run:\n  {rerun_command}")
    return output


def print_run(run: AnyRunConfig, runs: Mapping[str, AnyRunConfig]) -> str:
    """Print the run as a diff to the nearest named run, or in full.

    Returns:
        The command that repeats the run in a new folder.
    """
    init_flags = []
    if run.init is not None:
        init_flags = ["--init", run.init]
        runs = {name: _begun(named, run) for name, named in runs.items()}
    changes = {name: [*changed_flags(run, named).values()] for name, named in runs.items()}
    name = min(changes, key=lambda name: len(changes[name]))
    if run.show == "all":
        print(python_source(run, width=100), flush=True)
    else:
        lines = [shlex.join([name, *init_flags]), *map(shlex.join, changes[name])]
        print("Run: " + "\n  ".join(lines), flush=True)
    rerun_flags = [x for x in changes[name] if x[0] not in ("--output", *RESUME_FLAGS)]
    words = [name] * (name != next(iter(runs))) + init_flags
    words += chain(*(("--import", module) for module in IMPORTED_MODULES))
    return f"{run.command} {shlex.join([*words, *chain(*rerun_flags)])}".rstrip()


def _begun(named: AnyRunConfig, run: AnyRunConfig) -> AnyRunConfig:
    """A named run with the model of --init, or of `run` where a resumed run cannot read it."""
    try:
        return run_from_checkpoint(named, str(run.init))
    except (ValueError, OSError, ImportError):
        if not (run.resume or run.resume_or_begin):
            raise
        return replace(named, init=run.init, model=run.model, tokenizer=run.tokenizer)


def print_best_step(output: epath.Path) -> None:
    """Print the best step of a run whose held-out loss rose by more than `MAX_RISE` after it."""
    with Checkpoints(output / "checkpoints") as checkpoints:
        best, last = checkpoints.best_step(), checkpoints.latest_step()
        if best is None or last is None:
            return
        least, now = checkpoints.saved_loss(best), checkpoints.saved_loss(last)
    if least is not None and now is not None and now - least > MAX_RISE * abs(least):
        print(
            f"\nThe held-out loss rose from {least:.4g} at step {best} to {now:.4g} at step {last} "
            f"(overfitting). To use step {best}, pass --step best: jaxformer export "
            f"--checkpoint {output} --step best --output FOLDER"
        )


def with_one_length(run: AnyRunConfig, runs: Mapping[str, AnyRunConfig]) -> AnyRunConfig:
    """The run with steps or epochs: a number that no named run has replaces a default.

    Raises:
        ValueError: Both have such a number.
    """
    if not isinstance(run, EpochsConfig) or run.epochs is None:
        return run
    if run.steps in {named.steps for named in runs.values()}:
        return run
    if run.epochs not in {getattr(named, "epochs", None) for named in runs.values()}:
        raise ValueError(
            f"--steps {run.steps} and --epochs {run.epochs:g} cannot be combined; to train for "
            "--steps, pass --epochs None."
        )
    return replace(run, epochs=None)


def with_epochs_as_steps(run: AnyRunConfig, num_rows: int | None) -> AnyRunConfig:
    """Replace epochs, if there are any, by the steps for so many rows an epoch."""
    if not isinstance(run, EpochsConfig) or run.epochs is None:
        return run
    if num_rows is None:
        raise ValueError(
            f"--epochs {run.epochs:g} needs the number of rows, which a corpus of a store has only "
            "when all of it is tokenized; pass --epochs None --steps NUMBER."
        )
    # Exact in decimals: 0.7 epochs of 10 rows are 7 rows, not 8.
    steps = math.ceil(Fraction(str(run.epochs)) * num_rows / run.batch_size)
    print(f"Epochs: {run.epochs:g}, steps: {steps:,}.")
    if steps < FEW_STEPS:
        epochs = math.ceil(ENOUGH_STEPS * run.batch_size / num_rows)
        print(f"So few updates change a model little; {ENOUGH_STEPS} would be --epochs {epochs}.")
    return replace(run, steps=steps, epochs=None)


def with_fixed_schedule(run: AnyRunConfig, resumes_from: Path | None) -> AnyRunConfig:
    """The run with schedule_steps fixed to the first attempt's, and a warm-up that fits into it."""
    steps, schedule = run.planned_steps, run.optimizer.schedule
    if run.schedule_steps is None and resumes_from is not None:
        file = resumes_from / RUN_FILE
        steps = get_field(read_json(file), "schedule_steps", int, location=file)
    if schedule.warmup_steps >= steps:
        shorter = max(1, steps // 10)
        print(
            f"Warm-up shortened from {schedule.warmup_steps} to {shorter} steps, as the schedule "
            f"has {steps}."
        )
        schedule = replace(schedule, warmup_steps=shorter)
    if run.steps > steps:
        print(
            f"The learning-rate schedule ends after {steps} steps; after that the rate is "
            "constant. To train longer at a higher rate, start a new run with larger "
            "--schedule-steps."
        )
    optimizer = replace(run.optimizer, schedule=schedule)
    return replace(run, schedule_steps=steps, optimizer=optimizer)
