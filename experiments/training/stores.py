"""Runs that are kept in an object store, such as gs://bucket/run, as on any file system.

Checkpoints go straight there. Nothing can be added to an object, so the small files of a run (its
settings, tokenizer, metrics, pictures) are written in a folder of this machine, `runs/stores`, and
copied after each checkpoint and at the end.
"""

import os
import re
from pathlib import Path

from etils import epath

WORKING = Path("runs/stores")  # of a run
READ = Path("runs/cache/stores")  # by other programs, which leave a run's alone


def kept(folder: Path) -> epath.Path:
    """Where a run is kept: the folder, or the store of whose address `Path` made gs:/bucket/run."""
    return epath.Path(re.sub(r"^(\w{2,}):/", r"\1://", folder.as_posix()))


def working(folder: Path, root: Path = WORKING) -> Path:
    """Where its small files are on this machine: the folder itself if it is no store's."""
    address = re.fullmatch(r"(\w{2,}):/(.*)", folder.as_posix())
    return root / address[1] / address[2] if address else folder


def fetch(folder: Path, root: Path = WORKING) -> Path:
    """Bring the small files of a run that is kept in a store here; returns where they are."""
    here, there = working(folder, root), kept(folder)
    if here != folder and there.exists():
        here.mkdir(parents=True, exist_ok=True)
        for file in there.iterdir():
            if file.is_file():
                beside = here / f".{file.name}.{os.getpid()}"  # others may be reading the old one
                beside.write_bytes(file.read_bytes())
                beside.replace(here / file.name)
    return here


def store(folder: Path) -> None:
    """Copy the small files to the store, if the run is kept in one."""
    here = working(folder)
    for file in here.rglob("[!.]*") if here != folder else ():
        if file.is_file():
            there = kept(folder) / file.relative_to(here).as_posix()
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(file.read_bytes())
