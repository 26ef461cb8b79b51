"""Files that several processes use together: seen to be the same ones before anything is read or written."""

import hashlib
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError
from safemerge_pl.folding.processes import Processes
from safemerge_pl.runtime.files import local_path

__all__ = ["require_same_model", "require_shared_files"]

_PATIENCE = 5.0
"""Seconds until a new file is seen on every machine of a shared file system."""


def require_shared_files(processes: Processes, output: Path, sources: Sequence[str]) -> None:
    """Refuse processes on machines that do not share the output's folder, or lack a model.

    Args:
        processes: all of which make this call.
        output: whose folder is made already; the first process leaves a file beside it that the others look for.
        sources: models as the user named them; those that are no path on any machine are left to the hub.

    Raises:
        CheckpointError: naming a machine and what it does not see.
    """
    if not processes.apart:
        return
    token = output.with_name(f".{output.name}.token-{secrets.token_hex(8)}")
    try:
        token = processes.lead(lambda: _make(token))
        processes.agree(lambda: _require_seen(token, output))
    finally:
        if processes.rank == 0:
            token.unlink(missing_ok=True)
    seen = processes.gather((socket.gethostname(), [source for source in sources if local_path(source).exists()]))
    for source in sources:
        having, lacking = ([host for host, there in seen if (source in there) == wanted] for wanted in (True, False))
        if having and lacking:
            raise CheckpointError(
                f"{source} is there on {having[0]} and not on {lacking[0]}; put it where all machines see it under one "
                "path."
            )


def require_same_model(processes: Processes, checkpoint: Checkpoint) -> None:
    """Refuse a path that stands for one model here and for another on another machine.

    Names and shapes are compared, without reading a tensor.

    Raises:
        CheckpointError: if they differ.
    """
    if not processes.apart:
        return
    text = "".join(f"{name} {shape}\n" for name, shape in checkpoint.shapes().items())
    found = processes.gather((socket.gethostname(), hashlib.sha256(text.encode()).hexdigest()))
    host, digest = found[0]
    for other, theirs in found[1:]:
        if theirs != digest:
            raise CheckpointError(
                f"{checkpoint.source} is one model on {host} and another on {other}; put one where all machines see it."
            )


def _make(token: Path) -> Path:
    token.touch()
    return token


def _require_seen(token: Path, output: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not token.exists():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{socket.gethostname()} does not see the file that the first process put beside the output {output}: "
                "processes on several machines need a file system that all of them share; name an output on it."
            )
        time.sleep(0.1)
