"""How a process ends that lost the others with which it trains."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments.resuming import command_line, last_checkpoint
from experiments.training_run import Run, name_of
from jaxformer.parallel import last_words
from jaxformer.training.checkpoints import Checkpoints


@contextlib.contextmanager
def together(run: Run, checkpoints: Checkpoints, output: Path) -> Iterator[None]:
    """Say of a run whose other processes end how to go on, and end this process too.

    At once, for what a process waits for at its end will not come: the others.
    """
    if jax.process_count() == 1:
        yield
        return
    mode = "--resume-or-begin" if run.resume_or_begin else "--resume"
    again = command_line(name_of(run), mode, "--output", str(output))
    words = (
        "\nerror: This process was ended: killed, or because another one ended or was silent for "
        f"{run.hosts.patience} seconds. To go on from the newest checkpoint in {output}, start "
        f"every process again:\n  {again}\n"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(last_words(words))
        try:
            yield
        except (jax.errors.JaxRuntimeError, OSError) as error:  # of the devices; of a checkpoint
            whole = isinstance(error, OSError)
            reason = str(error) if whole else str(error).splitlines()[0][:200]
            print(
                f"\nerror: The work with the other processes failed: {reason}\n"
                f"{last_checkpoint(checkpoints, output)}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        except Exception:  # if not all refuse alike, JAX ends this process as it waits for the rest
            atexit.register(stack.pop_all().close)
            atexit.register(jax.distributed.shutdown)  # before it
            raise
