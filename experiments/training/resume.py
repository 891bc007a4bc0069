"""Resuming a run: which fields must not change, where it starts, and the command to print."""

import contextlib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
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


def checkpoint_description(
    run: RunConfig, fixed: tuple[str, ...], tokenizer: Tokenizer, **data: Any
) -> dict[str, Any]:
    """Description saved with a checkpoint: every setting that affects the result.

    Args:
        run: The run.
        fixed: Its fields that a resumed run may not change.
        tokenizer: Of its texts.
        data: Digests of what it reads.
    """
    run_json = json.loads(to_json(run))
    return {
        "config": run_json["model"],
        "run": {name: run_json[name] for name in fixed},
        "tokenizer": tokenizer_digest(tokenizer),
        **data,
    }


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def load_resumed_run(run: AnyRunConfig, output: str | None) -> AnyRunConfig:
    """Load the saved run for --resume; the given run if no folder has one.

    What says where it runs, and not what it is, is that of the run given.
    """
    output_path = None if output is None else Path(output)
    folder = reached(choose_folder(replace(run, resume=True, output=output_path)))
    if not has_saved_run(folder):
        return run
    try:
        saved_run = from_json(type(run), (folder / RUN_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{folder / RUN_FILE} is of another program or version: {error} Name the run instead, "
            "as in `default`, with all of its flags."
        ) from error
    runtime_fields = ("output", "resume", "resume_or_begin", "distributed", "hosts", "show")
    return replace(saved_run, **{name: getattr(run, name) for name in runtime_fields})


def has_saved_run(folder: epath.Path) -> bool:
    """Whether the folder has a saved run.json."""
    return (folder / RUN_FILE).is_file() and any((folder / "checkpoints").glob("[0-9]*"))


def goes_on(run: RunConfig, output: Path) -> bool:
    """Whether it goes on where an earlier start of it ended."""
    return (run.resume or run.resume_or_begin) and has_saved_run(storage_path(run.output or output))


def own_beginning(run: AnyRunConfig, output: Path) -> AnyRunConfig:
    """A run that goes on as one that began with its own folder, which has all that it needs."""
    if not goes_on(run, output):
        return run
    changes: dict[str, Any] = {}
    if run.init is not None:
        changes["init"] = str(output)
    if isinstance(run.tokenizer, PretrainedTokenizer):
        changes["tokenizer"] = PretrainedTokenizer(path=str(output))
    if getattr(run, "chat_template", None) is not None:
        changes["chat_template"] = None  # it is beside the tokenizer
    return replace(run, **changes)


def with_fixed_schedule(run: AnyRunConfig, output: Path) -> AnyRunConfig:
    """The run with schedule_steps fixed to the first attempt's, and a warm-up that fits into it."""
    steps, schedule = run.planned_steps, run.optimizer.schedule
    if run.schedule_steps is None and goes_on(run, output):
        file = output / RUN_FILE
        steps = get_field(read_json(file), "schedule_steps", int, location=file)
    if schedule.warmup_steps >= steps:
        shorter = max(1, steps // 10)
        print(f"A warm-up of {schedule.warmup_steps} in {steps} updates is shortened to {shorter}.")
        schedule = replace(schedule, warmup_steps=shorter)
    if run.steps > steps:
        print(
            f"The schedule ends after {steps} updates; the learning rate then stays where it is. "
            "To train longer at a higher one, start with larger --schedule-steps."
        )
    optimizer = replace(run.optimizer, schedule=schedule)
    return replace(run, schedule_steps=steps, optimizer=optimizer)


def find_start_step(
    run: RunConfig, output: Path, checkpoints: Checkpoints, description: dict[str, Any]
) -> int | None:
    """Step to start from: 0 for a new run, None if the run is already complete.

    Raises:
        ValueError: A resumed run is another one, or has nothing left to do. Where it resumes or
            begins, as may be, having nothing left to do is no error.
    """
    parallel.check_equal_across_processes(flatten(description))
    should_resume = run.resume
    if run.resume_or_begin:
        should_resume = (
            parallel.broadcast_from_process_0(lambda: str(bool(checkpoints.all_steps()))) == "True"
        )
    if not should_resume:
        return 0
    step = checkpoints.latest_valid_step(lambda message: print(message, file=sys.stderr))
    check_unchanged(checkpoints.read_description(step), description)
    checkpoints.delete_old()
    if step > run.steps or (step == run.steps and has_final_evaluation(output, step)):
        if run.resume_or_begin and step == run.steps:
            print(f"{output} is finished: it has {step} steps.")
            return None
        raise ValueError(f"The checkpoint has {step} steps already; pass --steps N with N above.")
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
        raise ValueError("The checkpoint is of another run:\n" + "\n".join(changed))


def has_final_evaluation(output: Path, step: int) -> bool:
    """Whether the final evaluation of the run is in metrics.jsonl."""

    def check() -> str:
        file = output / "metrics.jsonl"
        lines = read_json_lines(file) if file.exists() else []
        last = (line for line in lines if line["step"] == step)
        return str(any(name.startswith("final_") for line in last for name in line))

    return parallel.broadcast_from_process_0(check) == "True"


@contextlib.contextmanager
def report_early_end(
    run: RunConfig, checkpoints: Checkpoints, output: epath.PathLike
) -> Iterator[None]:
    """If the run ends early, print the last checkpoint and the command to resume.

    Where it trains with other processes, it then ends at once: what it would wait for would not
    come. Which of them notices, and whether JAX aborts it before, is chance, so how to go on is
    said at the start.
    """
    is_distributed = jax.process_count() > 1
    if is_distributed:
        mode = "--resume-or-begin" if run.resume_or_begin else "--resume"
        words = "If a process ends, all do. To go on, start every one again:"
        print_error(f"{words}\n  {resume_command(run, mode, '--output', str(output))}")
    try:
        with raise_on_signals():
            yield
    except KeyboardInterrupt as error:
        with defer_signals():
            checkpoints.wait_until_finished()
        has_checkpoint = checkpoints.latest_step() is not None
        mode = "--resume" if has_checkpoint and not run.resume_or_begin else "--resume-or-begin"
        command = resume_command(run, mode, "--output", str(output))
        print_error(f"\nInterrupted. {last_checkpoint_text(checkpoints, output)}")
        print_error(f"To {'go on from there' if has_checkpoint else 'begin again'}:\n  {command}")
        raise SystemExit(getattr(error, "status", INTERRUPTED_STATUS)) from None
    except TooManySkipsError as error:
        checkpoints.wait_until_finished()
        exit_with_error(
            f"{error} {last_checkpoint_text(checkpoints, output)} "
            "--skip-step.max-consecutive-skips and --skip-step.max-norm-ratio may be changed with "
            "--resume; a new run with a lower peak of the learning rate usually helps."
        )
    except (TooLargeError, jax.errors.JaxRuntimeError, OSError) as error:
        checkpoint_text, reason = last_checkpoint_text(checkpoints, output), str(error)
        if isinstance(error, TooLargeError):
            exit_with_error(f"{error}\n{checkpoint_text}")
        if isinstance(error, jax.errors.JaxRuntimeError):
            reason = reason.splitlines()[0][:200]
        if is_out_of_memory(error):
            exit_with_error(
                f"A device has no memory left: {reason}\n{memory_advice(run)}\n{checkpoint_text}"
            )
        if not is_distributed:
            raise
        print_error(
            f"\nerror: The work with the other processes failed: {reason}\n{checkpoint_text}"
        )
        os._exit(1)


def print_error(message: str) -> None:
    """Print to stderr."""
    print(message, file=sys.stderr, flush=True)


def last_checkpoint_text(checkpoints: Checkpoints, output: epath.PathLike) -> str:
    """Text that names the last checkpoint, or says that there is none."""
    latest = checkpoints.latest_step()
    if latest is None:
        return "There is no checkpoint yet."
    return f"The last good checkpoint is {latest} in {output}."


def resume_command(run: RunConfig, *extra: str) -> str:
    """The command that resumes this process: its arguments, --resume and the folder."""
    arguments_kept, arguments = list[str](), iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--output":
            next(arguments, None)
        elif argument not in RESUME_ARGUMENTS and not argument.startswith("--output="):
            arguments_kept.append(argument)
    return shlex.join(["python", "-m", f"experiments.{run.name}", *arguments_kept, *extra])
