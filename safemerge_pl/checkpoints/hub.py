"""Fetch models from the hub, or from the local cache if they are there."""

import re
from pathlib import Path

from safemerge_pl.checkpoints.refusals import WEIGHT_ENDINGS
from safemerge_pl.errors import CheckpointError

__all__ = ["HEAD_FILES", "download"]

_HUB_ID = re.compile(r"(?P<name>(?!\.)[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")
_SIDE_FILES = ["*.json", "README.md", "*.txt", "*.model", "*.jinja", "*.model.v[0-9]*", "*.tiktoken", "*.metadata"]
HEAD_FILES = ("*_linear.pt", "model_head.*")
"""Small weights beside those of a model: the heads of BGE-M3 and SetFit."""
_LAYERS = "[0-9]_*/*.bin"
"""Weights in the sub-folders of sentence-transformers."""


def download(source: str, revision: str | None = None) -> Path:
    """Fetch a hub model and give its folder in the local cache; all files are of one revision.

    Without a connection the cache alone is looked at.

    Args:
        source: ``owner/name``, or ``owner/name@revision``.
        revision: branch, tag or commit, if it is not in ``source``.

    Raises:
        CheckpointError: if it is no hub id, or cannot be had; in one line, without request or token.
    """
    found = _HUB_ID.fullmatch(source)
    if found is None or source.endswith(WEIGHT_ENDINGS):
        raise CheckpointError(f"{source} does not exist.")
    if found["revision"] and revision not in (None, found["revision"]):
        raise CheckpointError(f"{source} names a revision and `revision` is {revision}; give one of them.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    def fetch(weights: str) -> Path:
        patterns = [*_SIDE_FILES, *HEAD_FILES, _LAYERS, weights]
        revised = revision or found["revision"]
        return Path(snapshot_download(found["name"], revision=revised, allow_patterns=patterns))

    try:
        folder = fetch("*.safetensors")
        return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "give a local folder"
        if isinstance(error, GatedRepoError):
            remedy = "ask for access on its page and log in with `hf auth login`, or give a local folder"
        raise CheckpointError(
            f"{source} is neither a local path nor a hub model that can be fetched ({reason}); {remedy}."
        ) from error
