"""Libraries only the ``train`` extra brings, imported where they are used."""

import importlib
from types import ModuleType


def import_extra(name: str) -> ModuleType:
    """Import a module of the ``train`` extra.

    Args:
        name: The module, such as ``"grain"``.

    Returns:
        The module.

    Raises:
        ImportError: It is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module missing inside an installed library is that library's own story.
        if error.name != name:
            raise
        raise ImportError(
            f"{name} is not installed; `pip install 'jaxformer[train]'` brings it."
        ) from error
