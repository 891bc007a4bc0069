"""Import optional dependencies; if one is missing, name the extra that installs it."""

import importlib
from types import ModuleType

# Modules by the extra that installs them: `pip install 'jaxformer[NAME]'`.
MODULES_BY_EXTRA = {
    "train": ("grain", "tokenizers", "tyro", "rich", "tensorboardX", "scipy", "jinja2"),
    "hub": ("huggingface_hub", "fsspec"),
    "data": ("pyarrow",),
    "eval": ("lm_eval",),
    "plots": ("matplotlib", "treescope"),
    "wandb": ("wandb",),
}


def missing_extra_message(error: ImportError) -> str:
    """Return the message for a failed import: which extra installs the module.

    Args:
        error: The exception.

    Returns:
        One sentence with the install command, or the exception's message if no extra installs the
        module.
    """
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES_BY_EXTRA.items():
        if isinstance(error, ModuleNotFoundError) and module in modules:
            return f"This needs {module}, which is not installed: pip install 'jaxformer[{extra}]'"
    return str(error)


def import_extra(name: str) -> ModuleType:
    """Import a module of an optional extra, or raise ImportError with the install command.

    Args:
        name: The module, such as ``"grain"``.

    Returns:
        The module.

    Raises:
        ImportError: The module is not installed; the message has the install command.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If an installed library lacks one of its own dependencies, no extra helps.
        if error.name != name.partition(".")[0]:
            raise
        raise ImportError(missing_extra_message(error)) from error
