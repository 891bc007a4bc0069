"""Runs in an object store such as gs://bucket/run.

Checkpoints are written directly to the store. Objects cannot be appended to, so the small files of
a run (settings, tokenizer, metrics, plots) are written to the local folder `runs/stores` and
uploaded after each checkpoint and at the end.
"""

import re
from pathlib import Path

from etils import epath

from jaxformer.atomic_files import atomic_file

ADDRESS = re.compile(r"(\w{2,}):(?:/(.*))?")  # what `Path` makes of gs://bucket/run
LOCAL_ROOT = Path("runs/stores")  # small files of runs that write
PROBE = ".probe"  # an object that is written and removed
READ_CACHE_ROOT = Path("runs/cache/stores")  # for programs that only read


def storage_path(folder: Path) -> epath.Path:
    """Path of a run: a local folder, or an address in an object store.

    Raises:
        ValueError: The address is not one of a supported store.
    """
    address = ADDRESS.fullmatch(folder.as_posix())
    if address is None:
        return epath.Path(folder)
    scheme, rest = address.groups("")
    try:
        there = epath.Path(f"{scheme}://{rest}")
    except KeyError:
        raise ValueError(
            f"{scheme}:// is not a supported store; use gs://, s3:// or az://."
        ) from None
    if not rest:
        raise ValueError(f"{scheme}:// has no bucket; pass {scheme}://bucket/run.")
    return there


def reached(folder: Path, *, writes: bool = False) -> epath.Path:
    """Path of a run in a store that can be read, and written if `writes` is set.

    Raises:
        ValueError: It cannot, or the library for this store is not installed.
    """
    there = storage_path(folder)
    try:
        there.exists()
        if writes and local_path(folder) != folder:
            there.mkdir(parents=True, exist_ok=True)
            (there / PROBE).write_bytes(b"")
            (there / PROBE).unlink()
    except Exception as error:  # each store's library has its own errors
        raise ValueError(f"{there} cannot be {'written' if writes else 'read'}: {error}") from error
    return there


def here(folder: Path) -> Path:
    """Return the folder if it is local.

    Raises:
        ValueError: It is an address in an object store.
    """
    if ADDRESS.fullmatch(folder.as_posix()):
        raise ValueError(
            f"{storage_path(folder)} is in an object store; pass a local folder instead."
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
                # Another process may be reading the old file
                with atomic_file(local_folder / file.name) as temporary:
                    temporary.write_bytes(file.read_bytes())
    return local_folder


def upload(folder: Path) -> None:
    """Upload the small files of a run, if it is kept in object storage."""
    local_folder = local_path(folder)
    for file in local_folder.rglob("[!.]*") if local_folder != folder else ():
        if file.is_file():
            remote_file = storage_path(folder) / file.relative_to(local_folder).as_posix()
            remote_file.parent.mkdir(parents=True, exist_ok=True)
            remote_file.write_bytes(file.read_bytes())
