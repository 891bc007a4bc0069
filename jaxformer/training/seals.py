"""Digests of the files of a folder, so that every byte that changed later is noticed."""

import hashlib
from pathlib import Path

SEAL = "sha256.txt"


def seal(folder: Path) -> None:
    """Write the digest of every file of a folder into it, as `sha256sum --check` reads them."""
    (folder / SEAL).write_text("\n".join([*_lines(folder), ""]), encoding="utf-8")


def damage(folder: Path) -> list[str]:
    """What is no longer as it was sealed, file by file; nothing if all is well."""
    try:
        before, now = _sealed(folder), [*_lines(folder), ""]
        if before == now:
            return []
        names = {line.partition("  ")[2] for line in set(before) ^ set(now)} - {""}
        return [
            f"{name} {'has changed' if (folder / name).is_file() else 'is missing'}"
            for name in sorted(names or {SEAL})
        ]
    except OSError as error:  # no seal, or a disk that cannot read
        return [str(error)]


def is_sealed(file: Path, folder: Path) -> bool:
    """Whether one file is as it was sealed; far quicker than `damage` where others are large.

    Raises:
        OSError: It cannot be read, or there is no seal.
    """
    return _line(file, folder) in _sealed(folder)


def _sealed(folder: Path) -> list[str]:
    return (folder / SEAL).read_text(encoding="utf-8", errors="replace").split("\n")


def _lines(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL)
    return [_line(path, folder) for path in sorted(files)]


def _line(path: Path, folder: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}  {path.relative_to(folder).as_posix()}"
