"""The command line of studies: every field is a flag."""

import sys
from typing import TypeVar

import tyro

from experiments.command_line import fail, registry

AnyStudy = TypeVar("AnyStudy")


def read(kind: type[AnyStudy], description: str, arguments: list[str] | None = None) -> AnyStudy:
    """Read a study from the command line.

    Args:
        kind: A dataclass.
        description: Printed by --help.
        arguments: Instead of the process's own.

    Returns:
        It. Wrong arguments end the process with a message.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    try:
        with registry:
            return tyro.cli(
                kind,
                args=arguments,
                prog=f"python -m {spec.name if spec is not None else 'experiments'}",
                description=description,
            )
    except ValueError as error:
        fail(str(error))
