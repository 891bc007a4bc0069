"""Resuming a run: its saved settings, which must not change, and the step to go on from."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxformer.config import from_json, to_json
from jaxformer.data import Tokenizer
from jaxformer.parallel import broadcast_from_process_0
from jaxformer.run.object_store import reached
from jaxformer.run.output_folder import RUN_FILE, choose_folder, has_saved_run, tokenizer_digest
from jaxformer.run.run_config import AnyRunConfig, RunConfig, flatten
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines

# A resumed run may not change these fields, since they change its result. Devices, remat and scan
# may change; they change rounding, and devices the random bits of dropout.
FIXED_FIELDS = (
    "model", "tokenizer", "chat_template", "held_out", "held_out_bytes", "length",
    "source_lengths", "batch_size", "group", "gradient_accumulation_steps", "schedule_steps",
    "optimizer", "objective", "expert_capacity_factor", "dtype", "seed",
)  # fmt: skip


def load_resumed_run(run: AnyRunConfig, output: Path | None) -> AnyRunConfig:
    """Load the saved run for --resume; returns `run` if no folder has one.

    The output folder and the fields for several processes always come from `run`.
    """
    folder = reached(choose_folder(replace(run, resume=True, output=output)))
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


def has_checkpoint(checkpoints: Checkpoints) -> bool:
    """Whether process 0 finds a checkpoint."""
    return broadcast_from_process_0(lambda: bool(checkpoints.all_steps()))


def step_to_resume(
    run: RunConfig, output: Path, checkpoints: Checkpoints, description: dict[str, Any]
) -> int | None:
    """Step after which the run resumes; None if it is already complete.

    Raises:
        ValueError: The checkpoint has other settings, or the run is already complete. With
            `resume_or_begin` a complete run is not an error.
    """
    step = checkpoints.latest_valid_step(lambda message: print(message, file=sys.stderr))
    check_unchanged(checkpoints.read_description(step), description)
    checkpoints.delete_old()
    if step > run.steps or (
        step == run.steps and broadcast_from_process_0(lambda: has_final_evaluation(output, step))
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
