"""Resuming a run: which fields must not change, where it starts, and the command to print."""

import contextlib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from etils import epath

from experiments.command_line import RESUME_FLAGS
from experiments.training.memory_checks import TooLargeError, is_out_of_memory, memory_advice
from experiments.training.object_store import reached, storage_path
from experiments.training.run_config import (
    RUN_FILE,
    AnyRunConfig,
    RunConfig,
    choose_folder,
    flatten,
)
from jaxformer import parallel
from jaxformer.config import from_json, to_json
from jaxformer.data import PretrainedTokenizer, Tokenizer
from jaxformer.errors import INTERRUPTED_STATUS, exit_with_error
from jaxformer.json_files import get_field, read_json
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.loop import TooManySkipsError
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.signals import defer_signals, raise_on_signals

RESUME_ARGUMENTS = (*RESUME_FLAGS, "--no-resume", "--no-resume-or-begin")

# A resumed run may not change these fields, since they change its result. Devices, remat and scan
# may change; they change rounding, and devices the random bits of dropout.
FIXED_FIELDS = (
    "model", "tokenizer", "chat_template", "held_out", "held_out_bytes", "length",
    "source_lengths", "batch_size", "group", "gradient_accumulation_steps", "schedule_steps",
    "optimizer", "objective", "expert_capacity_factor", "dtype", "seed",
)  # fmt: skip


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


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def load_resumed_run(run: AnyRunConfig, output: str | None) -> AnyRunConfig:
    """Load the saved run for --resume; returns `run` if no folder has one.

    The output folder and the fields for several processes are always those of `run`.
    """
    output_path = None if output is None else Path(output)
    folder = reached(choose_folder(replace(run, resume=True, output=output_path)))
    if not has_saved_run(folder):
        return run
    try:
        saved_run = from_json(type(run), (folder / RUN_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{folder / RUN_FILE} cannot be read, as it is from another program or version: "
            f"{error} Pass the named run, such as `default`, and all flags beside --resume."
        ) from error
    runtime_fields = ("output", "resume", "resume_or_begin", "distributed", "hosts", "show")
    return replace(saved_run, **{name: getattr(run, name) for name in runtime_fields})


def has_saved_run(folder: epath.Path) -> bool:
    """Whether the folder has a saved run.json."""
    return (folder / RUN_FILE).is_file() and any((folder / "checkpoints").glob("[0-9]*"))


def goes_on(run: RunConfig, output: Path) -> bool:
    """Whether the run resumes from a checkpoint."""
    return (run.resume or run.resume_or_begin) and has_saved_run(storage_path(run.output or output))


def own_beginning(run: AnyRunConfig, output: Path) -> AnyRunConfig:
    """The run to resume, with --init and tokenizer read from the copies in its output folder."""
    if not goes_on(run, output):
        return run
    changes: dict[str, Any] = {}
    if run.init is not None:
        changes["init"] = str(output)
    if isinstance(run.tokenizer, PretrainedTokenizer):
        changes["tokenizer"] = PretrainedTokenizer(path=str(output))
    if getattr(run, "chat_template", None) is not None:
        changes["chat_template"] = None  # its copy is beside the tokenizer
    return replace(run, **changes)


def with_fixed_schedule(run: AnyRunConfig, output: Path) -> AnyRunConfig:
    """The run with schedule_steps fixed to the first attempt's, and a warm-up that fits into it."""
    steps, schedule = run.planned_steps, run.optimizer.schedule
    if run.schedule_steps is None and goes_on(run, output):
        file = output / RUN_FILE
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


def find_start_step(
    run: RunConfig, output: Path, checkpoints: Checkpoints, description: dict[str, Any]
) -> int | None:
    """Step to start from: 0 for a new run, None if the run is already complete.

    Raises:
        ValueError: The checkpoint has other settings, or the run is already complete. With
            `resume_or_begin` a complete run is not an error.
    """
    parallel.check_equal_across_processes(flatten(description))
    should_resume = run.resume
    if run.resume_or_begin:
        should_resume = process_0_decides(lambda: bool(checkpoints.all_steps()))
    if not should_resume:
        return 0
    step = checkpoints.latest_valid_step(lambda message: print(message, file=sys.stderr))
    check_unchanged(checkpoints.read_description(step), description)
    checkpoints.delete_old()
    if step > run.steps or (
        step == run.steps and process_0_decides(lambda: has_final_evaluation(output, step))
    ):
        if run.resume_or_begin and step == run.steps:
            print(f"{output} is already complete: it has {step} steps.")
            return None
        raise ValueError(f"The checkpoint already has {step} steps; pass a larger --steps.")
    return step


def check_unchanged(saved_description: dict[str, Any], description: dict[str, Any]) -> None:
    """Raise if a checkpoint belongs to a different run, naming each difference."""
    old, new = flatten(saved_description), flatten(description)
    changed = [
        f"  {name}: {old.get(name)} in the checkpoint, {new.get(name)} now"
        for name in sorted(old.keys() | new.keys())
        if name.startswith(("run.", "data.", "tokenizer")) and old.get(name) != new.get(name)
    ]
    if changed:
        raise ValueError(
            "The checkpoint has other settings; restore them, or pass another --output:\n"
            + "\n".join(changed)
        )


def has_final_evaluation(output: Path, step: int) -> bool:
    """Whether the final evaluation of the run is in metrics.jsonl."""
    file = output / "metrics.jsonl"
    lines = read_json_lines(file) if file.exists() else []
    last = (line for line in lines if line["step"] == step)
    return any(name.startswith("final_") for line in last for name in line)


def process_0_decides(condition: Callable[[], bool]) -> bool:
    """The condition on process 0, which all processes follow."""
    return parallel.broadcast_from_process_0(lambda: str(condition())) == "True"


@contextlib.contextmanager
def report_early_end(
    run: RunConfig, checkpoints: Checkpoints, output: epath.PathLike
) -> Iterator[None]:
    """If the run ends early, print the last checkpoint and the command to resume.

    One of several processes exits at once, as it would wait for the others forever. JAX may abort
    it before that, so with several processes the command is also printed at the start.
    """
    if jax.process_count() > 1:
        words = "If one process stops, all stop. To resume, start every process again with:"
        print_error(f"{words}\n  {resume_command(run, output)}")
    try:
        with raise_on_signals():
            yield
    except KeyboardInterrupt as error:
        with defer_signals():
            checkpoints.wait_until_finished()
        has_checkpoint = checkpoints.latest_step() is not None
        print_error(
            f"\nInterrupted. {last_checkpoint_text(checkpoints, output)}\n"
            f"To {'resume' if has_checkpoint else 'start again'}:\n"
            f"  {resume_command(run, output, has_checkpoint=has_checkpoint)}"
        )
        raise SystemExit(getattr(error, "status", INTERRUPTED_STATUS)) from None
    except TooManySkipsError as error:
        checkpoints.wait_until_finished()
        exit_with_error(
            f"{error} {last_checkpoint_text(checkpoints, output)} "
            "With --resume you may change --skip-step.max-consecutive-skips and "
            "--skip-step.max-norm-ratio; a new run with a lower peak learning rate usually helps."
        )
    except (TooLargeError, jax.errors.JaxRuntimeError, OSError) as error:
        exit_if_explained(run, error, last_checkpoint_text(checkpoints, output))
        raise


def exit_if_explained(run: RunConfig, error: Exception, checkpoint_text: str) -> None:
    """End the process with a message if memory or the other processes may be the cause."""
    if isinstance(error, TooLargeError):
        exit_with_error(f"{error}\n{checkpoint_text}")
    reason = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        reason = reason.splitlines()[0][:200]
    if is_out_of_memory(error):
        exit_with_error(
            f"A device is out of memory: {reason}\n{memory_advice(run)}\n{checkpoint_text}"
        )
    if jax.process_count() > 1:
        print_error(
            f"\nerror: Communication with the other processes failed: {reason}\n{checkpoint_text}"
        )
        os._exit(1)


def print_error(message: str) -> None:
    """Print to stderr."""
    print(message, file=sys.stderr, flush=True)


def last_checkpoint_text(checkpoints: Checkpoints, output: epath.PathLike) -> str:
    """Text that names the last checkpoint, or says that there is none."""
    latest = checkpoints.latest_step()
    if latest is None:
        return "No checkpoint was saved yet."
    return f"The last good checkpoint is {latest} in {output}."


def resume_command(run: RunConfig, output: epath.PathLike, *, has_checkpoint: bool = True) -> str:
    """The command of this process, which resumes from the output folder or starts there again."""
    mode = "--resume" if has_checkpoint and not run.resume_or_begin else "--resume-or-begin"
    words, arguments = ["python", "-m", f"experiments.{run.name}"], iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--output":
            next(arguments, None)
        elif argument not in RESUME_ARGUMENTS and not argument.startswith("--output="):
            words.append(argument)
    return shlex.join([*words, mode, "--output", str(output)])
