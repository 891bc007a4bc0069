"""A folder of folders by step, each whole or absent. Knows nothing of what is in them."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from jaxformer.json_files import read_json
from jaxformer.training.seals import damage, is_sealed, seal

UNFINISHED, DAMAGED = ".unfinished", ".damaged"
DESCRIPTION = "description.json"
STEP = r"(0|[1-9]\d{0,17})"  # as we write it: 007 is somebody else's
LISTED = 10  # lines of a message before the rest is only counted
ATTEMPTS = 50  # to remove a folder in which something is still being written, 0.1 seconds apart


class Folder:
    """Finds, completes and removes checkpoints.

    One is written beside its place, sealed with the digests of its files, and moved there in the
    end; it is moved away before it is removed. So a folder whose name is a step is complete, and
    what happens to it later is noticed.

    What has another name, or is a file, is of others and is left alone.

    Args:
        path: Made at the first `prepare`.
        keep: How many of the newest stay, beside the best.

    Attributes:
        passed_over: Steps of damaged checkpoints that no longer count.
    """

    def __init__(self, path: Path, *, keep: int):
        self.path, self.keep = path, keep
        self.passed_over: list[int] = []

    def at(self, step: int) -> Path:
        """Where a complete checkpoint is."""
        return self.path / str(step)

    def beside(self, step: int) -> Path:
        """Where one is written: where no file of others is."""
        path = self.path / f"{step}{UNFINISHED}"
        while path.is_file():
            path = path.with_name(path.name + UNFINISHED)
        return path

    def steps(self) -> list[int]:
        """Of all complete checkpoints that count, in order."""
        found = {int(path.name) for path in self._folders(STEP)}
        return sorted(found.difference(self.passed_over))

    def listing(self) -> str:
        """The same, for messages."""
        return ", ".join(map(str, self.steps())) or "none"

    def best(self) -> int | None:
        """The step whose description has the lowest "loss", the later of two; None if none has."""
        losses = {step: self._loss(step) for step in self.steps()}
        rated = [(loss, -step) for step, loss in losses.items() if loss is not None]
        return -min(rated)[1] if rated else None

    def damage(self, step: int) -> str:
        """What of a checkpoint is no longer as it was saved; empty if all is well."""
        return ", ".join(shortened(damage(self.at(step))))

    def damaged(self, step: int, reason: object) -> ValueError:
        """The error that says so."""
        return ValueError(
            f"Checkpoint {step} in {self.path} is damaged: {str(reason)[:200]}. "
            f"The folder holds {self.listing()}."
        )

    def description(self, step: int) -> dict[str, Any]:
        """What `complete` was given.

        Raises:
            ValueError: It has changed since.
        """
        file = self.at(step) / DESCRIPTION
        try:
            if is_sealed(file, self.at(step)):
                return read_json(file)
        except (OSError, ValueError) as error:
            raise self.damaged(step, error) from error
        raise self.damaged(step, f"{DESCRIPTION} has changed")

    def prepare(self) -> None:
        """Make the folder, and remove what is unfinished."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.drop_unfinished()

    def drop_unfinished(self) -> None:
        """Remove what a process that was killed was writing, or was about to remove."""
        for left in self._folders(rf"{STEP}({re.escape(UNFINISHED)})+"):
            shutil.rmtree(left)

    def complete(self, step: int, description: dict[str, Any]) -> None:
        """Make a checkpoint of what was written beside; then drop what need not stay.

        Those that were passed over keep their files under another name.
        """
        beside = self.beside(step)
        (beside / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        seal(beside)
        for old in self.passed_over:
            aside = self.path / f"{old}{DAMAGED}"
            shutil.rmtree(aside, ignore_errors=True)
            self.at(old).rename(aside)
        self.passed_over = []
        beside.rename(self.at(step))
        self.drop_old()

    def drop_old(self) -> None:
        """Remove all but the newest and the best."""
        steps = self.steps()
        for old in set(steps) - {*steps[-self.keep :], self.best()}:
            shutil.rmtree(self.at(old).rename(self.beside(old)))

    def abandon(self, step: int) -> None:
        """Remove what was written beside.

        When one file cannot be written, others may still be on their way: then it is removed again.
        """
        beside = self.beside(step)
        for _ in range(ATTEMPTS):
            shutil.rmtree(beside, ignore_errors=True)
            time.sleep(0.1)
            if not beside.exists():
                break

    def _folders(self, pattern: str) -> list[Path]:
        inside = self.path.iterdir() if self.path.is_dir() else ()
        named = re.compile(pattern, re.ASCII)
        return [path for path in inside if named.fullmatch(path.name) and path.is_dir()]

    def _loss(self, step: int) -> float | None:
        try:
            return read_json(self.at(step) / DESCRIPTION, "loss")["loss"]
        except (OSError, ValueError):  # damaged, as whoever reads it will be told
            return None


def shortened(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(lines) - LISTED
    return lines if more <= 0 else [*lines[:LISTED], f"  and {more} more"]
