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
        variants = description["arms"]
        if not file.exists():
            if folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
                raise ValueError(
                    f"{folder} holds files but no study.json, so it is no study's; pass another "
                    "--output, or remove it."
                )
            (folder / "arms").mkdir(parents=True, exist_ok=True)
            write_json(file, description)
            return
        saved_description = read_json(file, *STUDY)
        new_variants = [arm for arm in variants if arm not in saved_description["arms"]]
        variants = [*saved_description["arms"], *new_variants]
        before, now = (
            flatten({**study, "arms": None}) for study in (saved_description, description)
        )
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
        if new_variants:
            write_json(file, {**saved_description, "arms": variants})

    def finished(self, arm: Arm) -> Numbers | None:
        """Load the result of a variant; None if it is not finished.

        Raises:
            ValueError: An arm of that name was another one.
        """
        file = self._file(arm)
        if not file.exists():
            return None
        result = read_json(file, "arm")
        if result["arm"] != json.loads(to_json(arm)):
            raise ValueError(f"{file} is of another arm of that name; pass another --output.")
        return result

    def save(self, arm: Arm, numbers: Numbers) -> Numbers:
        """Save the result of a variant atomically."""
        result = {"arm": json.loads(to_json(arm)), **numbers}
        write_json(self._file(arm), result)
        return result

    def speeds(self, arms: Sequence[Arm], training: Training) -> list[list[float]]:
        """Tokens per second of every variant and round, measured once and saved."""
        file, names = self.folder / SPEEDS, [arm.name for arm in arms]
        throughput_by_name = read_json(file) if file.exists() else {}
        if not throughput_by_name.keys() >= set(names):
            print("How fast each arm is, in turns.", flush=True)
            throughput_by_name = speeds_of(arms, training)
            write_json(file, throughput_by_name)
        return [throughput_by_name[name] for name in names]

    def _file(self, arm: Arm) -> Path:
        letters = [x if x.isalnum() or x in "-." else "_" for x in arm.name]
        return self.folder / "arms" / f"{''.join(letters)}.json"


def read_json(path: Path, *names: str) -> Numbers:
    """Read a JSON object written by `write_json` and check that it has these keys.

    Raises:
        ValueError: Something else stands there.
    """
    content = json_files.read_json(path)
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(
            f"{path} does not say {', '.join(missing)}: it is of an earlier version, or of "
            "something else. Pass another --output, or remove it."
        )
    return content


def write_json(path: Path, content: Numbers) -> None:
    """Write a JSON file atomically; all numbers must be finite."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    os.replace(temporary, path)
