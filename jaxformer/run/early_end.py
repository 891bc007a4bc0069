"""What the exception of a run that ends early says: the last checkpoint, how to resume."""

import os
import shlex
import sys

import jax
from etils import epath

from jaxformer.run.memory_advice import TooLargeError, memory_advice
from jaxformer.run.run_config import RunConfig
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.loop import TooManySkipsError
from jaxformer.training.signals import defer_signals


def explain(
    run: RunConfig,
    checkpoints: Checkpoints,
    output: epath.PathLike,
    error: BaseException,
    rerun_command: str,
) -> None:
    """Add notes to an exception: signals, skipped steps, lack of memory.

    One of several processes exits at once, as it would wait for the others forever.

    Raises:
        TooLargeError: A device is out of memory.
    """
    if isinstance(error, KeyboardInterrupt):
        with defer_signals():
            checkpoints.wait_until_finished()
        has_checkpoint = checkpoints.latest_step() is not None
        command = resume_command(run, output, rerun_command, has_checkpoint=has_checkpoint)
        error.add_note(
            f"{last_checkpoint_text(checkpoints, output)}\n"
            f"To {'resume' if has_checkpoint else 'start again'}:\n  {command}"
        )
    elif isinstance(error, TooManySkipsError):
        checkpoints.wait_until_finished()
        error.add_note(
            f"{last_checkpoint_text(checkpoints, output)} "
            "With --resume you may change --skip-step.max-consecutive-skips and "
            "--skip-step.max-norm-ratio; a new run with a lower peak learning rate usually helps."
        )
    elif isinstance(error, TooLargeError):
        error.add_note(last_checkpoint_text(checkpoints, output))
    if not isinstance(error, jax.errors.JaxRuntimeError | OSError):
        return
    reason, checkpoint_text = str(error), last_checkpoint_text(checkpoints, output)
    if isinstance(error, jax.errors.JaxRuntimeError):
        is_out_of_memory = "RESOURCE_EXHAUSTED" in reason
        reason = reason.splitlines()[0][:200]
        if is_out_of_memory:
            raise TooLargeError(
                f"A device is out of memory: {reason}\n{memory_advice(run)}\n{checkpoint_text}"
            ) from error
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


def resume_command(
    run: RunConfig, output: epath.PathLike, rerun_command: str, *, has_checkpoint: bool = True
) -> str:
    """The command that resumes from the output folder, or starts there again."""
    mode = "--resume" if has_checkpoint and not run.resume_or_begin else "--resume-or-begin"
    return f"{rerun_command} {mode} --output {shlex.quote(str(output))}"
