"""What the extras of the package bring, for errors that say which one is missing."""

# Modules by the extra that brings them; `pip install 'jaxformer[NAME]'`.
EXTRAS = {
    "train": ("grain", "tokenizers", "tyro", "rich", "tensorboardX", "scipy", "jinja2"),
    "hub": ("huggingface_hub",),
    "plots": ("matplotlib", "treescope"),
    "wandb": ("wandb",),
}


def missing(error: ImportError) -> str:
    """Say of a failed import which extra brings the module.

    Args:
        error: What was raised.

    Returns:
        One sentence with the command that installs it; what the error says, where its module is of
        no extra.
    """
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and module in modules:
            return f"This needs {module}, which is not installed: pip install 'jaxformer[{extra}]'"
    return str(error)
