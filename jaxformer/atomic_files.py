"""Files that appear whole, or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path; its file replaces `path` if the block ends without an exception."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
