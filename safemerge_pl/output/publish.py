"""Put an output on the hub, as it lies on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safemerge_pl.errors import CheckpointError
from safemerge_pl.output.files import STATE_FILE

__all__ = ["push_folder", "require_repo"]


def require_repo(repo: str) -> None:
    """Refuse a place on the hub that could not be written, before a long fold.

    Args:
        repo: ``owner/name``.

    Raises:
        CheckpointError: if it is no such name, nobody is logged in, or it holds something else than an earlier merge.
    """
    from huggingface_hub import HfApi

    owner, slash, name = repo.partition("/")
    with _told_in_a_sentence(repo):
        if not (owner and slash and name):
            raise ValueError("it must be owner/name")
        api = HfApi()
        api.whoami()
        if api.repo_exists(repo):
            files = set(api.list_repo_files(repo)) - {".gitattributes"}
            if files and STATE_FILE not in files:
                raise ValueError(f"it holds {min(files)} and no {STATE_FILE}, so it is no earlier merge; name another")


def push_folder(folder: Path, repo: str, *, private: bool = True, message: str = "Merged model") -> str:
    """Write a folder to the hub in one commit; files that it no longer has are deleted there.

    Args:
        folder: an output.
        repo: ``owner/name``; made if it is not there.
        private: whether nobody else sees it when it is made; the visibility of one that is there stays.
        message: of the commit.

    Returns:
        Its address.

    Raises:
        CheckpointError: as :func:`require_repo`, or if the hub does not take it; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    require_repo(repo)
    with _told_in_a_sentence(repo):
        api = HfApi()
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns="*")
    return address


@contextmanager
def _told_in_a_sentence(repo: str) -> Iterator[None]:
    """Errors of the hub and of the connection, without request, token or traceback."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise CheckpointError(f"{repo} cannot be written: log in with `hf auth login`.") from error
    except Exception as error:  # what means "no connection" differs by version of the client
        lines = str(error).splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        raise CheckpointError(f"{repo} cannot be written ({reason}).") from error
