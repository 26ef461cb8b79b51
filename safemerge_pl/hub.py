"""Models of the hub, from the local cache where it has them."""

import re
from pathlib import Path

from safemerge_pl.errors import CheckpointError
from safemerge_pl.foreign import WEIGHT_ENDINGS

__all__ = ["download"]


def download(source: str, revision: str | None) -> Path:
    """Folder of a hub model in the local cache, fetched if the hub is reachable."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith(".") or source.endswith(WEIGHT_ENDINGS):
        raise CheckpointError(f"{source} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.bin"]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{source} is neither a local path nor a hub model that can be fetched ({reason}); give a local folder."
        ) from error
