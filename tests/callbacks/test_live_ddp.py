"""A training loop on two processes: the same merge on both, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from safemerge_pl.merger import ContinualMerger


@pytest.mark.slow
def test_two_processes_end_with_the_same_bits(tmp_path: Path) -> None:
    """Weights and scores equal on both; a rank that trains on its own is found out on both."""
    script = Path(__file__).parent.with_name("ddp_live.py")
    root = str(script.parent.parent)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    run = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    one, two = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    tiny.assert_same(one["encoder"], two["encoder"])
    assert one["rows"] == two["rows"] == [{"a": 0.25}, {"a": 0.25, "b": 0.25}, dict.fromkeys("abc", 0.25)]
    assert all(torch.equal(one["encoder"][name], tensor) for name, tensor in two["merged"].items())
    merged = ContinualMerger.load(tmp_path / "out", tiny.timm_vit())
    assert all(torch.equal(tensor, one["merged"][name]) for name, tensor in merged.merged_parameters().items())
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]
    assert any("live" in value for value in state.values())
    tiny.assert_same(*(torch.load(tmp_path / f"fit{rank}.pt", weights_only=True)["encoder"] for rank in (0, 1)))
    for rank in (0, 1):
        message = (tmp_path / f"error{rank}.txt").read_text()
        assert message.startswith("task 'task1': the processes hold different weights after training")
