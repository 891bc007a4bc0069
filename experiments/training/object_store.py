"""Runs in an object store such as gs://bucket/run.

Checkpoints go straight there. Nothing can be added to an object, so the small files of a run (its
settings, tokenizer, metrics, pictures) are written in a folder of this machine, `runs/stores`, and
copied after each checkpoint and at the end.
"""

import os
import re
from pathlib import Path

from etils import epath

ADDRESS = re.compile(r"(\w{2,}):(?:/(.*))?")  # what `Path` makes of gs://bucket/run
LOCAL_ROOT = Path("runs/stores")  # of a run
PROBE = ".probe"  # an object that is written and removed
READ_CACHE_ROOT = Path("runs/cache/stores")  # by other programs, which leave a run's alone


def storage_path(folder: Path) -> epath.Path:
    """Where a run is kept: the folder, or the store whose address it is.

    Raises:
        ValueError: No store has such an address.
    """
    address = ADDRESS.fullmatch(folder.as_posix())
    if address is None:
        return epath.Path(folder)
    scheme, rest = address.groups("")
    try:
        there = epath.Path(f"{scheme}://{rest}")
    except KeyError:
        raise ValueError(f"{scheme}:// is no store; there are gs://, s3:// and az://.") from None
    if not rest:
        raise ValueError(f"{scheme}:// names no bucket; write {scheme}://bucket/run.")
    return there


def reached(folder: Path, *, writes: bool = False) -> epath.Path:
    """Where a run is kept, which answers, and takes what is written.

    Raises:
        ValueError: The store does not, or a library that knows it is missing.
    """
    there = storage_path(folder)
    try:
        there.exists()
        if writes and local_path(folder) != folder:
            there.mkdir(parents=True, exist_ok=True)
            (there / PROBE).write_bytes(b"")
            (there / PROBE).unlink()
    except Exception as error:  # of whatever library knows it
        raise ValueError(f"{there} cannot be {'written' if writes else 'read'}: {error}") from error
    return there


def here(folder: Path) -> Path:
    """A folder of this machine.

    Raises:
        ValueError: It is the address of a store.
    """
    if ADDRESS.fullmatch(folder.as_posix()):
        raise ValueError(
            f"{storage_path(folder)} is in a store; this goes to a folder of this machine."
        )
    return folder


def local_path(folder: Path, root: Path = LOCAL_ROOT) -> Path:
    """Local folder for the small files of a run; the folder itself if it is local."""
    address = ADDRESS.fullmatch(folder.as_posix())
    return root / address[1] / (address[2] or "") if address else folder


def download(folder: Path, root: Path = LOCAL_ROOT) -> Path:
    """Download the small files of a run from object storage; returns the local folder."""
    local_folder, remote_folder = local_path(folder, root), storage_path(folder)
    if local_folder != folder and remote_folder.exists():
        local_folder.mkdir(parents=True, exist_ok=True)
        for file in remote_folder.iterdir():
            if file.is_file():
                # Others may be reading the old one
                temporary = local_folder / f".{file.name}.{os.getpid()}"
                temporary.write_bytes(file.read_bytes())
                temporary.replace(local_folder / file.name)
    return local_folder


def upload(folder: Path) -> None:
    """Upload the small files of a run, if it is kept in object storage."""
    local_folder = local_path(folder)
    for file in local_folder.rglob("[!.]*") if local_folder != folder else ():
        if file.is_file():
            remote_file = storage_path(folder) / file.relative_to(local_folder).as_posix()
            remote_file.parent.mkdir(parents=True, exist_ok=True)
            remote_file.write_bytes(file.read_bytes())
