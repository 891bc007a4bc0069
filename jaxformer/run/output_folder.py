"""The output folder of a run: opened and locked, with copies of what the run began with."""

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from jaxformer import parallel
from jaxformer.data import (
    ChatTemplate,
    PretrainedTokenizer,
    Tokenizer,
    TokenizerConfig,
    load_chat_template,
    load_tokenizer,
)
from jaxformer.interop import fetch_folder
from jaxformer.run import object_store as stores
from jaxformer.run.run_config import RunConfig

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
RUN_FILE = "run.json"  # all fields of the run
# Tokenizer files of a Hugging Face folder, which are copied unchanged.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)


@contextlib.contextmanager
def open_output_folder(run: RunConfig) -> Iterator[Path]:
    """Open and lock the output folder, the same for all processes; see `choose_folder`.

    For a run in an object store, it is the local folder of its small files; see `stores`.

    Raises:
        ValueError: Another process has locked the folder, it has an earlier run, there is no run to
            resume, or its store cannot be reached.
    """
    with contextlib.ExitStack() as stack:

        def claim_folder() -> str:
            folder = choose_folder(run)
            there = stores.reached(folder, writes=True)
            stack.enter_context(lock_folder(stores.local_path(folder)))
            if run.resume and not any((there / "checkpoints").glob("[0-9]*")):
                raise ValueError(
                    f"There is no checkpoint in {there / 'checkpoints'}. Pass another --output, or "
                    "start a run without --resume."
                )
            run_files = ("checkpoints", "metrics.jsonl", "tokenizer.json", "tensorboard")
            existing = [name for name in run_files if (there / name).exists()]
            if existing and not (run.resume or run.resume_or_begin):
                raise ValueError(
                    f"{folder} already has {', '.join(existing)} of an earlier run. Pass --resume "
                    "to resume it (--resume-or-begin if it may have no checkpoint yet), or another "
                    "--output."
                )
            return str(folder)

        folder = Path(parallel.broadcast_from_process_0(claim_folder))
        yield stores.download(folder)
        if parallel.is_primary_process():
            stores.upload(folder)


def choose_folder(run: RunConfig) -> Path:
    """The folder of --output; else a new runs/NAME-N, or the newest one with --resume."""
    if run.output is not None:
        return run.output
    # A run without a checkpoint cannot be resumed.
    earlier = Path("runs").glob(f"{run.name}-*/checkpoints" if run.resume else f"{run.name}-*")
    names = [f.parts[1].removeprefix(f"{run.name}-") for f in earlier]
    newest = max((int(name) for name in names if name.isdigit()), default=0)
    if run.resume and not newest:
        raise ValueError(f"No runs/{run.name}-N has a checkpoint to resume; pass --output FOLDER.")
    if run.resume:
        return Path("runs") / f"{run.name}-{newest}"
    return new_folder(f"runs/{run.name}", newest + 1)


def new_folder(name: str, number: int) -> Path:
    """Create the first free folder NAME-N, counting up from `number`."""
    while True:
        folder = Path(f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # created by another run
            number += 1


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for the block; the operating system releases the lock if the process dies.

    Args:
        folder: Created if missing; removed at the end if it is empty.

    Raises:
        ValueError: Another process has locked it; or it is a file, or in an object store.
    """
    try:
        stores.here(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"output must name a folder; {folder} is a file, or in one.") from None
    with open(folder / LOCK_FILE, "a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is locked by process {file.read()}. Wait until it ends, stop it, or "
                "pass another --output."
            ) from None
        except OSError:  # this file system has no locks
            pass
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()
                folder.rmdir()


def has_saved_run(folder: epath.Path) -> bool:
    """Whether the folder has a saved run.json."""
    return (folder / RUN_FILE).is_file() and any((folder / "checkpoints").glob("[0-9]*"))


def folder_to_resume(run: RunConfig, output: Path) -> Path | None:
    """The output folder if the run resumes from a checkpoint; None if it begins."""
    resumes = (run.resume or run.resume_or_begin) and has_saved_run(
        stores.storage_path(run.output or output)
    )
    return output if resumes else None


def own_tokenizer(run: RunConfig, resumes_from: Path | None) -> TokenizerConfig:
    """The tokenizer of a run; of a resumed run the copy of a pretrained one in its folder."""
    if resumes_from is not None and isinstance(run.tokenizer, PretrainedTokenizer):
        return PretrainedTokenizer(path=str(resumes_from))
    return run.tokenizer


def own_chat_template(run: Any, resumes_from: Path | None) -> ChatTemplate | None:
    """The chat template of a run, if its tokenizer has one; a resumed run reads its copy."""
    tokenizer = own_tokenizer(run, resumes_from)
    if isinstance(tokenizer, PretrainedTokenizer):
        return load_chat_template(tokenizer.path, None if resumes_from else run.chat_template)
    return None


def write_beginning(run: RunConfig, tokenizer: Tokenizer, output: Path) -> None:
    """Write the tokenizer of a run and copies of the JSON files of --init.

    The output folder is then enough to resume, to generate and to export.
    """
    if isinstance(run.tokenizer, PretrainedTokenizer):
        path = Path(run.tokenizer.path)
        path = path if path.suffix == ".json" else path / "tokenizer.json"
        copy_files(path.parent, output, *TOKENIZER_FILES)
        shutil.copy(path, output / "tokenizer.json")
    else:
        tokenizer.save(output)
    if (source := origin(run, tokenizer)) is not None:
        copy_files(source, output, "config.json", "generation_config.json")


def origin(run: RunConfig, tokenizer: Tokenizer) -> Path | None:
    """The folder of --init; None if it has another tokenizer than the run."""
    if run.init is None:
        return None
    folder = fetch_folder(run.init)
    if not (folder / "tokenizer.json").is_file():
        return folder
    known = tokenizer_digest(load_tokenizer(folder))
    return folder if known == tokenizer_digest(tokenizer) else None


def copy_files(source: Path, folder: Path, *names: str) -> None:
    """Copy the files of these names that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copy(source / name, folder)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
