"""Result folder of a study: one JSON file per finished variant."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.studies.train_seeds import StudyTraining, Variant, measure_throughput
from experiments.training.run_config import LOCK_FILE, flatten
from jaxformer import json_files
from jaxformer.config import to_json

ResultDict = dict[str, Any]
THROUGHPUT_FILE = "speeds.json"
STUDY_KEYS = (
    "study",
    "size",
    "seeds",
    "steps",
    "variants",
)  # some of what every study says of itself


class StudyResults:
    """Results folder of a study: study.json, and one JSON file for each finished variant.

    Args:
        folder: Made where it is missing.
        description: What the results depend on, beside the variant; and which variants there are
            to be, to which others may be added later.

    Raises:
        ValueError: The folder holds results of another study, or something else.
    """

    def __init__(self, folder: Path, description: ResultDict):
        self.folder = folder
        file = folder / "study.json"
        variants = description["variants"]
        if not file.exists():
            if folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
                raise ValueError(
                    f"{folder} holds files but no study.json, so it is no study's; pass another "
                    "--output, or remove it."
                )
            (folder / "variants").mkdir(parents=True, exist_ok=True)
            write_json(file, description)
            return
        saved_description = read_json(file, *STUDY_KEYS)
        new_variants = [
            variant for variant in variants if variant not in saved_description["variants"]
        ]
        variants = [*saved_description["variants"], *new_variants]
        before, now = (
            flatten({**study, "variants": None}) for study in (saved_description, description)
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
            write_json(file, {**saved_description, "variants": variants})

    def load(self, variant: Variant) -> ResultDict | None:
        """Load the result of a variant; None if it is not finished.

        Raises:
            ValueError: A variant of that name was another one.
        """
        file = self._file(variant)
        if not file.exists():
            return None
        result = read_json(file, "variant")
        if result["variant"] != json.loads(to_json(variant)):
            raise ValueError(f"{file} is of another variant of that name; pass another --output.")
        return result

    def save(self, variant: Variant, numbers: ResultDict) -> ResultDict:
        """Save the result of a variant atomically."""
        result = {"variant": json.loads(to_json(variant)), **numbers}
        write_json(self._file(variant), result)
        return result

    def throughputs(
        self, variants: Sequence[Variant], training: StudyTraining
    ) -> list[list[float]]:
        """Tokens per second of every variant and round, measured once and saved."""
        file, names = self.folder / THROUGHPUT_FILE, [variant.name for variant in variants]
        throughput_by_name = read_json(file) if file.exists() else {}
        if not throughput_by_name.keys() >= set(names):
            print("How fast each variant is, in turns.", flush=True)
            throughput_by_name = measure_throughput(variants, training)
            write_json(file, throughput_by_name)
        return [throughput_by_name[name] for name in names]

    def _file(self, variant: Variant) -> Path:
        letters = [x if x.isalnum() or x in "-." else "_" for x in variant.name]
        return self.folder / "variants" / f"{''.join(letters)}.json"


def read_json(path: Path, *names: str) -> ResultDict:
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


def write_json(path: Path, content: ResultDict) -> None:
    """Write a JSON file atomically; all numbers must be finite."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    os.replace(temporary, path)
