"""The command line in a process of its own, as a person starts it."""

import atexit
import functools
import os
import subprocess
import sys
from pathlib import Path

QUICK = ["--references.enabled", "false", "--data.init_args.controls", "[clipart_category]"]
QUICK += ["--data.init_args.tasks", "[font_category,weather]", "--trainer.callbacks.init_args.num_steps", "2"]

ROOT = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LT_", "WORLD_SIZE", "LOCAL_RANK"))}
    return {**clean, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default", "COLUMNS": "200"}


def safemerge(*args: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [*python(), "-m", "safemerge_pl", *args]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


@functools.cache
def python() -> tuple[str, ...]:
    """What starts Python for ``-m MODULE`` or ``-c CODE`` with the heavy libraries imported, see ``warm.py``."""
    if not hasattr(os, "fork"):
        return (sys.executable,)
    program = str(Path(__file__).with_name("warm.py"))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen(
        [sys.executable, program, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    atexit.register(server.communicate)  # it ends with its standard input
    assert server.stdout is not None
    path = server.stdout.readline().strip()
    assert path, "the server did not start"
    return (sys.executable, "-S", "-E", program, path)
