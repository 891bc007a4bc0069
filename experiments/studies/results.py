"""Result folder of a study: one JSON file per finished variant."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.studies.train_seeds import StudyTraining, Variant, measure_throughput
from jaxformer import json_files
from jaxformer.atomic_files import atomic_file
from jaxformer.config import to_json
from jaxformer.run.output_folder import LOCK_FILE
from jaxformer.run.run_config import flatten

ResultDict = dict[str, Any]
THROUGHPUT_FILE = "speeds.json"
STUDY_KEYS = ("study", "size", "seeds", "steps", "variants")  # that readers of study.json need


class StudyResults:
    """Results folder of a study: study.json, and one JSON file for each finished variant.

    Args:
        folder: Created if missing.
        description: All settings that the results depend on, except a variant's settings; and the
            names of the variants, to which later calls may add others.

    Raises:
        ValueError: The folder has results of another study, or other files.
    """

    def __init__(self, folder: Path, description: ResultDict):
        self.folder = folder
        file = folder / "study.json"
        variants = description["variants"]
        if not file.exists():
            if folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
                raise ValueError(
                    f"{folder} is not empty and has no study.json; pass another --output, or "
                    "remove the folder."
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
            f"  {name}: {before.get(name)} saved, {now.get(name)} now"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise ValueError(
                f"{folder} has results of another study; pass another --output.\n"
                + "\n".join(changed)
            )
        if new_variants:
            write_json(file, {**saved_description, "variants": variants})

    def load(self, variant: Variant) -> ResultDict | None:
        """Load the result of a variant; None if it is not finished.

        Raises:
            ValueError: The result is of another variant with the same name.
        """
        file = self._file(variant)
        if not file.exists():
            return None
        result = read_json(file, "variant")
        if result["variant"] != json.loads(to_json(variant)):
            raise ValueError(
                f"{file} is the result of another variant with the same name; pass another "
                "--output."
            )
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
            print("Measuring the throughput of all variants, interleaved.", flush=True)
            throughput_by_name = measure_throughput(variants, training)
            write_json(file, throughput_by_name)
        return [throughput_by_name[name] for name in names]

    def _file(self, variant: Variant) -> Path:
        letters = [x if x.isalnum() or x in "-." else "_" for x in variant.name]
        return self.folder / "variants" / f"{''.join(letters)}.json"


def read_json(path: Path, *names: str) -> ResultDict:
    """Read a JSON object written by `write_json` and check that it has these keys.

    Raises:
        ValueError: It is not such an object.
    """
    content = json_files.read_json(path)
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}: an earlier version or another program wrote it. "
            "Pass another --output, or remove the file."
        )
    return content


def write_json(path: Path, content: ResultDict) -> None:
    """Write a JSON file atomically; all numbers must be finite."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text)
