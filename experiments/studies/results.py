"""Result folder of a study: one JSON file per finished variant."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.studies.seeds import Arm, Training, speeds_of
from experiments.training.run import LOCK, flatten
from jaxformer import json_files
from jaxformer.config import to_json

Numbers = dict[str, Any]
SPEEDS = "speeds.json"
STUDY = ("study", "size", "seeds", "steps", "arms")  # some of what every study says of itself


class Results:
    """Results folder of a study: study.json, and one JSON file for each finished variant.

    Args:
        folder: Made where it is missing.
        description: What the results depend on, beside the arm; and which arms there are to be,
            to which others may be added later.

    Raises:
        ValueError: The folder holds results of another study, or something else.
    """

    def __init__(self, folder: Path, description: Numbers):
        self.folder = folder
        file = folder / "study.json"
        arms = description["arms"]
        if not file.exists():
            if folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
                raise ValueError(
                    f"{folder} holds files but no study.json, so it is no study's; pass another "
                    "--output, or remove it."
                )
            (folder / "arms").mkdir(parents=True, exist_ok=True)
            write_json(file, description)
            return
        there = read_json(file, *STUDY)
        more = [arm for arm in arms if arm not in there["arms"]]
        arms = [*there["arms"], *more]
        before, now = (flatten({**study, "arms": None}) for study in (there, description))
        changed = [
            f"  {name}: {before.get(name)} there, {now.get(name)} now"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise ValueError(
                f"{folder} holds results of another study; pass another --output.\n"
                + "\n".join(changed)
            )
        if more:
            write_json(file, {**there, "arms": arms})

    def finished(self, arm: Arm) -> Numbers | None:
        """Load the result of a variant; None if it is not finished.

        Raises:
            ValueError: An arm of that name was another one.
        """
        file = self._file(arm)
        if not file.exists():
            return None
        found = read_json(file, "arm")
        if found["arm"] != json.loads(to_json(arm)):
            raise ValueError(f"{file} is of another arm of that name; pass another --output.")
        return found

    def save(self, arm: Arm, numbers: Numbers) -> Numbers:
        """Save the result of a variant atomically."""
        kept = {"arm": json.loads(to_json(arm)), **numbers}
        write_json(self._file(arm), kept)
        return kept

    def speeds(self, arms: Sequence[Arm], training: Training) -> list[list[float]]:
        """Tokens per second of every variant and round, measured once and saved."""
        file, names = self.folder / SPEEDS, [arm.name for arm in arms]
        kept = read_json(file) if file.exists() else {}
        if not kept.keys() >= set(names):
            print("How fast each arm is, in turns.", flush=True)
            kept = speeds_of(arms, training)
            write_json(file, kept)
        return [kept[name] for name in names]

    def _file(self, arm: Arm) -> Path:
        letters = [x if x.isalnum() or x in "-." else "_" for x in arm.name]
        return self.folder / "arms" / f"{''.join(letters)}.json"


def read_json(path: Path, *names: str) -> Numbers:
    """Read a JSON object written by `write_json` and check that it has these keys.

    Raises:
        ValueError: Something else stands there.
    """
    found = json_files.read_json(path)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"{path} does not say {', '.join(missing)}: it is of an earlier version, or of "
            "something else. Pass another --output, or remove it."
        )
    return found


def write_json(path: Path, content: Numbers) -> None:
    """Write a JSON file atomically; all numbers must be finite."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    os.replace(beside, path)
