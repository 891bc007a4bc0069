"""Leaves out the validation and test files of a dataset, which are not for training."""

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from jaxformer.data.records import RECORD_SUFFIXES, data_suffix

LOG = logging.getLogger("jaxformer.data")
# The words by which the library datasets recognizes splits.
TRAIN = frozenset({"train", "training"})
EVALUATION = frozenset(
    {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}
)
SOURCE_CODE = (".py",)  # test.py is no split
NUM_SHOWN = 3


def training_files(names: Sequence[str], where: str | Path, *, always: bool = False) -> list[str]:
    """The files of a dataset without those that its names reserve for evaluation.

    A word of the file's name says its split, as in ``test-00000-of-00001.parquet`` or
    ``wiki.valid.txt``, else one of its innermost folder with such a word, as in ``dev/a.jsonl``.
    Texts that are no records are left out only beside texts for training of the same suffix. What
    is left out is logged once. If all files are for evaluation, all are kept: they are asked for.

    Args:
        names: Paths relative to the folder, with ``/``.
        where: The folder, for the log.
        always: Whether the files are records whatever their suffix.

    Returns:
        The names to read, in order.
    """
    splits = {name: _split(name) for name in names}
    trained = {data_suffix(Path(name)) for name, split in splits.items() if split in TRAIN}
    left_out = list[str]()
    for name, split in splits.items():
        suffix = data_suffix(Path(name))
        is_data = always or suffix in RECORD_SUFFIXES
        if split in EVALUATION and (is_data or suffix in trained - {*SOURCE_CODE}):
            left_out.append(name)
    if not left_out or len(left_out) == len(splits):
        return list(names)
    shown = ", ".join(left_out[:NUM_SHOWN]) + ", ..." * (len(left_out) > NUM_SHOWN)
    _log_once(
        f"{len(left_out)} of the {len(splits)} files of {where} are for validation or testing and "
        f"are left out: {shown}. To read them, pass them alone."
    )
    return [name for name in names if name not in set(left_out)]


def _split(name: str) -> str | None:
    """The word of the innermost part of a path that names a split; one of training comes first."""
    for part in reversed(PurePosixPath(name.lower()).parts):
        words = re.split(r"[-._ 0-9]+", part)
        for known in (TRAIN, EVALUATION):
            if found := [word for word in words if word in known]:
                return found[0]
    return None


@cache
def _log_once(message: str) -> None:
    LOG.warning(message)
