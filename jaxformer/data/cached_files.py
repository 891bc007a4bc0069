"""Files of JSON and of arrays that are made once; a damaged one is made again."""

import contextlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.atomic_files import atomic_file
from jaxformer.json_files import json_digest, read_json_with_checksum, write_json_with_checksum


def cached_json(folder: Path, key: Any, make: Callable[[], Any]) -> Any:
    """Content of a JSON file, made and written if it is missing or damaged.

    Args:
        folder: Folder of the file.
        key: JSON of all that determines the content; its digest names the file.
        make: Makes the content.
    """
    path = folder / f"{json_digest(key)[:32]}.json"
    content = read_json_with_checksum(path)
    if content is None:
        content = make()
        write_json_with_checksum(path, content)
    return content


def cached_arrays(
    path: Path, names: Sequence[str], make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Arrays of an ``.npz`` file, made and written if it is missing or damaged.

    Args:
        path: The file.
        names: Names of the arrays.
        make: Makes the arrays.

    Returns:
        The arrays by name.

    Raises:
        OSError: The file cannot be written.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with open(path, "rb") as file, np.load(file) as saved:
            return {name: saved[name] for name in names}
    arrays = make()
    # Another process may have finished and removed the folder.
    with contextlib.suppress(FileNotFoundError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial, open(partial, "wb") as written:
            np.savez(written, **arrays)
    return arrays
