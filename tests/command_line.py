"""The command line in a process of its own, as a person starts it."""

import os
import subprocess
import sys
from pathlib import Path

QUICK = ["--references.enabled", "false", "--data.init_args.controls", "[clipart_category]"]
QUICK += ["--data.init_args.tasks", "[font_category,weather]", "--trainer.callbacks.init_args.num_steps", "2"]


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LT_", "WORLD_SIZE", "LOCAL_RANK"))}
    return {**clean, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default", "COLUMNS": "200"}


def safemerge(*args: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "safemerge_pl", *args]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)
