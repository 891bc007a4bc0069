"""Where a run begins: fresh, or at a checkpoint of the same run."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from experiments.resuming import flatten, refuse_changes
from experiments.running import Machinery
from experiments.training_run import Run, going_on
from jaxformer import parallel
from jaxformer.data import Tokenizer
from jaxformer.training import step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines


def find_start(
    run: Run, using: Machinery, checkpoints: Checkpoints, description: dict[str, Any]
) -> int | None:
    """After how many updates a run goes on: 0 is from the beginning, None is not at all.

    Raises:
        ValueError: A resumed run is another one, or has nothing left to do. Where it resumes or
            begins, as may be, having nothing left to do is no error.
    """
    parallel.refuse_differences(flatten(description))
    if not going_on(run, using.output):
        return 0
    newest = checkpoints.newest(lambda message: print(message, file=sys.stderr))
    refuse_changes(checkpoints.describe(newest), description)
    checkpoints.drop_old()
    if newest > run.steps or (newest == run.steps and is_evaluated(using.output, newest)):
        if run.resume_or_begin and newest == run.steps:
            print(f"{using.output} is finished: it has {newest} steps.")
            return None
        raise ValueError(f"The checkpoint has {newest} steps already; pass --steps N with N above.")
    return newest


def begin(
    run: Run, using: Machinery, tokenizer: Tokenizer, checkpoints: Checkpoints, start: int
) -> step.TrainState:
    """A fresh state, or that of a checkpoint, beside its tokenizer."""
    if parallel.is_first():
        keep_tokenizer(tokenizer, using.output, made=start > 0)
    if start == 0:
        key = jax.random.key(run.seed)
        return step.init_state(using.model, using.optimizer, key, using.mesh)
    abstract = step.abstract_state(using.model, using.optimizer, using.mesh)
    state = checkpoints.restore(start, abstract)
    print(f"Resuming after step {start}.")
    return state


def keep_tokenizer(tokenizer: Tokenizer, output: Path, *, made: bool) -> None:
    """Write the tokenizer, or say that what was made of it has changed, and write it anew.

    A resumed run trains with the tokenizer that its text gives, which is that of its checkpoint;
    its file is for those who read the checkpoint later.
    """
    with tempfile.TemporaryDirectory() as fresh:
        tokenizer.save(fresh)
        changed = [
            file.name
            for file in sorted(Path(fresh).iterdir())
            if not (output / file.name).is_file()
            or (output / file.name).read_bytes() != file.read_bytes()
        ]
    if not changed:
        return
    if made:
        were, are = ("was", "is") if len(changed) == 1 else ("were", "are")
        print(
            f"{', '.join(changed)} in {output} {were} missing or damaged, and {are} written again "
            "from the tokenizer that this run trains with.",
            file=sys.stderr,
        )
    tokenizer.save(output)


def is_evaluated(output: Path, step: int) -> bool:
    """Whether the evaluation that ends a run was written."""

    def found() -> str:
        file = output / "metrics.jsonl"
        lines = read_json_lines(file) if file.exists() else []
        return str(any(line["step"] == step and is_final(line) for line in lines))

    return parallel.first_decides(found) == "True"


def is_final(numbers: dict[str, Any]) -> bool:
    """Whether these are of the evaluation that ends a run."""
    return any(name.startswith("final_") for name in numbers)
