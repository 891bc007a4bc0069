"""Download a model folder from the Hugging Face hub, and upload one."""

import re
from pathlib import Path
from typing import Any

from jaxformer.extras import missing_extra_message

# Files to download; weights in other formats are not needed.
DOWNLOAD_PATTERNS = ("*.json", "model*.safetensors", "*.jinja")
HUB_NAME = r"[\w.-]+/[\w.-]+"
STALL_SECONDS = 60.0  # huggingface_hub retries after so long without a byte


def fetch_folder(name: str | Path) -> Path:
    """Return a local folder, or download a hub model to the cache and return its folder.

    Args:
        name: A path, or a hub name such as ``Qwen/Qwen3-0.6B``. An existing path takes precedence.

    Returns:
        The folder. A path that neither exists nor is a hub name is returned too.

    Raises:
        ImportError: huggingface_hub is not installed.
        ValueError: The hub cannot be reached, or has no such model.
    """
    folder = Path(name).expanduser()
    if folder.exists() or not re.fullmatch(HUB_NAME, str(name)):
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


def check_hub_name(name: str) -> None:
    """Raise ValueError unless a name has the form OWNER/NAME."""
    if not re.fullmatch(HUB_NAME, name):
        raise ValueError(f"A name on the hub is OWNER/NAME; got {name!r}.")


def push_folder(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Upload a folder to the Hugging Face hub in one commit, to a new or an existing repository.

    huggingface_hub retries requests that stall or fail on the hub's side.

    Args:
        folder: The folder.
        name: OWNER/NAME.
        private: Whether a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        ImportError: huggingface_hub is not installed.
        ValueError: The name is not OWNER/NAME, there is no folder, or the upload failed, as without
            a login.
    """
    check_hub_name(name)
    if not Path(folder).is_dir():
        raise ValueError(f"There is no folder {folder} to upload.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(missing_extra_message(error)) from error
    session: Any = huggingface_hub.get_session()
    session.timeout = STALL_SECONDS
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export by jaxformer")
    except Exception as error:  # huggingface_hub's HTTP library varies by version
        status = getattr(getattr(error, "response", None), "status_code", None)
        login = " `hf auth login` logs in." if status in (401, 403) else ""
        reason = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder} was not uploaded to {name}: {reason}.{login} The folder is complete; "
            f"`hf upload {name} {folder}` uploads it."
        ) from error
    return str(address)
