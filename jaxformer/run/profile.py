"""Profile of the steps of --profile-steps: a trace, and its tables by module."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxformer.training.profiling import profile, profile_tables


@contextlib.contextmanager
def write_profile(folder: Path, num_steps: int, report: Callable[[str], None]) -> Iterator[None]:
    """Trace a block and write its tables to profile.md, unless the block raises an exception."""
    with profile(folder) as profiles:
        yield
    tables = profile_tables(profiles[0], num_steps)
    (folder / "profile.md").write_text(tables, encoding="utf-8")
    report(f"{tables.splitlines()[0]} See {folder / 'profile.md'}.")
