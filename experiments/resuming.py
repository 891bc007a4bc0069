"""How a run is stopped and gone on with: what must not change, and the commands to say."""

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.training_run import Run, name_of
from jaxformer.training.checkpoints import Checkpoints

OURS = ("--resume", "--no-resume", "--resume-or-begin", "--no-resume-or-begin")


def sha256(content: bytes | memoryview) -> str:
    """The digest that says whether text or tokenizer are the same."""
    return hashlib.sha256(content).hexdigest()


def refuse_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume what was another run, naming each difference."""
    old, new = flatten(before), flatten(now)
    changed = [
        f"  {name}: {old.get(name)} in the checkpoint, {new.get(name)} now"
        for name in sorted(old.keys() | new.keys())
        if name.startswith(("run.", "data.", "tokenizer")) and old.get(name) != new.get(name)
    ]
    if changed:
        raise ValueError("The checkpoint is of another run:\n" + "\n".join(changed))


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists by their path."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [flatten(value, f"{path}.{name}" if path else str(name)) for name, value in items]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {path: tree}


@contextlib.contextmanager
def ending_with_others(run: Run, checkpoints: Checkpoints, output: Path) -> Iterator[None]:
    """End this process where the others with which it trains are lost.

    At once: what a process waits for at its end would not come. Which of them notices, and whether
    JAX aborts it before, is chance, so how to go on is said at the start.
    """
    if jax.process_count() > 1:
        mode = "--resume-or-begin" if run.resume_or_begin else "--resume"
        command = command_line(name_of(run), mode, "--output", str(output))
        words = f"If a process ends, all do. To go on, start every one again:\n  {command}"
        print(words, file=sys.stderr, flush=True)
    try:
        yield
    except (jax.errors.JaxRuntimeError, OSError) as error:  # of the devices; of a checkpoint
        if jax.process_count() == 1:
            raise
        reason = str(error) if isinstance(error, OSError) else str(error).splitlines()[0][:200]
        found = last_checkpoint(checkpoints, output)
        message = f"\nerror: The work with the other processes failed: {reason}\n{found}"
        print(message, file=sys.stderr, flush=True)
        os._exit(1)


def last_checkpoint(checkpoints: Checkpoints, output: Path) -> str:
    """What is left of a run that ends early."""
    latest = checkpoints.latest()
    if latest is None:
        return "There is no checkpoint yet."
    return f"The last good checkpoint is {latest} in {output}."


def again(run: Run, checkpoints: Checkpoints, output: Path) -> str:
    """How to go on with a run that ended early, or how to begin it again."""
    found = checkpoints.latest() is not None
    mode = "--resume" if found and not run.resume_or_begin else "--resume-or-begin"
    command = command_line(name_of(run), mode, "--output", str(output))
    return f"To {'go on from there' if found else 'begin again'}:\n  {command}"


def command_line(name: str, *more: str) -> str:
    """The command that started this process, without what is said of its folder, with more."""
    kept, arguments = list[str](), iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--output":
            next(arguments, None)
        elif argument not in OURS and not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["python", "-m", f"experiments.{name}", *kept, *more])
