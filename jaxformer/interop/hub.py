"""Download a model folder from the Hugging Face hub."""

import re
from pathlib import Path

from jaxformer.extras import missing_extra_message

# Files to download; weights in other formats are not needed.
DOWNLOAD_PATTERNS = ("*.json", "model*.safetensors", "*.jinja")


def fetch_folder(name: str | Path) -> Path:
    """Return a local folder, or download a hub model to the cache and return its folder.

    Args:
        name: A path, or a hub name such as ``Qwen/Qwen3-0.6B``. An existing path takes precedence.

    Returns:
        The folder. A path that does not exist and is no hub name is returned unchanged.

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
            f"{name} is not a local folder, and could not be downloaded from the Hugging Face hub: "
            f"{reason}. With network access, `hf download {name}` prints the folder to pass "
            "instead."
        ) from error
