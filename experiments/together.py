"""How a process ends that lost the others with which it trains."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments.out_of_memory import is_out_of_memory
from experiments.resuming import command_line, last_checkpoint
from experiments.training_run import Run, name_of
from jaxformer.parallel import last_words
from jaxformer.training.checkpoints import Checkpoints


@contextlib.contextmanager
def together(run: Run, checkpoints: Checkpoints, output: Path) -> Iterator[None]:
    """Say of a run whose other processes end how to go on, and end this process too.

    It ends at once, for what a process waits for at its end will not come: the others.
    """
    if jax.process_count() == 1:
        yield
        return
    again = command_line(name_of(run), "--resume", "--output", str(output))
    try:
        with last_words(
            "\nerror: This process was ended, as JAX does when another one ends or is not heard of "
            f"for {run.hosts.patience} seconds. To go on from the newest checkpoint in {output}, "
            f"start every process again:\n  {again}\n"
        ):
            yield
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason, found = str(error).splitlines()[0][:200], last_checkpoint(checkpoints, output)
        lines = [
            "\nerror: The work with the other processes failed, as it does when one of them ends: "
            f"{reason}\n{found}"
        ]
        if checkpoints.latest() is not None:
            lines.append(f"To go on from there, start every process again:\n  {again}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        os._exit(1)
