"""Downloads a model folder from the Hugging Face hub."""

import re
from pathlib import Path

from jaxformer.extras import missing_extra_message

# What a model is made of here; other libraries' copies of its weights stay there.
DOWNLOAD_PATTERNS = ("*.json", "model*.safetensors", "*.jinja")


def fetch_folder(name: str | Path) -> Path:
    """A local folder, or a hub model downloaded to the cache.

    Args:
        name: A path, or a name of the hub such as ``Qwen/Qwen3-0.6B``. What exists here comes
            first.

    Returns:
        The folder. A path that does not exist is returned as it is.

    Raises:
        ImportError: huggingface_hub is not installed.
        ValueError: The hub cannot be reached, or has no such model.
    """
    folder = Path(name).expanduser()
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(missing_extra_message(error)) from error
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(DOWNLOAD_PATTERNS)))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{name} is no folder here, and the Hugging Face hub did not give it: {reason}. Where "
            f"there is a network, `hf download {name}` prints the folder to pass instead."
        ) from error
