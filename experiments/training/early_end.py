"""What a run that ends early prints: the reason, the last checkpoint, the command to resume."""

import os
import shlex
import sys

import jax
from etils import epath

from experiments.command_line import RESUME_FLAGS
from experiments.training.memory_advice import TooLargeError, memory_advice
from experiments.training.run_config import RunConfig
from jaxformer.errors import INTERRUPTED_STATUS, exit_with_error
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.loop import TooManySkipsError
from jaxformer.training.signals import defer_signals

RESUME_ARGUMENTS = (*RESUME_FLAGS, "--no-resume", "--no-resume-or-begin")


def exit_if_explained(
    run: RunConfig, checkpoints: Checkpoints, output: epath.PathLike, error: BaseException
) -> None:
    """End the process with a message on signals, skipped steps, lack of memory, lost processes.

    One of several processes exits at once, as it would wait for the others forever.
    """
    if isinstance(error, KeyboardInterrupt):
        with defer_signals():
            checkpoints.wait_until_finished()
        has_checkpoint = checkpoints.latest_step() is not None
        print_error(
            f"\nInterrupted. {last_checkpoint_text(checkpoints, output)}\n"
            f"To {'resume' if has_checkpoint else 'start again'}:\n"
            f"  {resume_command(run, output, has_checkpoint=has_checkpoint)}"
        )
        raise SystemExit(getattr(error, "status", INTERRUPTED_STATUS)) from None
    if isinstance(error, TooManySkipsError):
        checkpoints.wait_until_finished()
        exit_with_error(
            f"{error} {last_checkpoint_text(checkpoints, output)} "
            "With --resume you may change --skip-step.max-consecutive-skips and "
            "--skip-step.max-norm-ratio; a new run with a lower peak learning rate usually helps."
        )
    if isinstance(error, TooLargeError):
        exit_with_error(f"{error}\n{last_checkpoint_text(checkpoints, output)}")
    if not isinstance(error, jax.errors.JaxRuntimeError | OSError):
        return
    reason, checkpoint_text = str(error), last_checkpoint_text(checkpoints, output)
    if isinstance(error, jax.errors.JaxRuntimeError):
        is_out_of_memory = "RESOURCE_EXHAUSTED" in reason
        reason = reason.splitlines()[0][:200]
        if is_out_of_memory:
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
