"""Methods beside each other and against fusion_bench's: ViT-B/32-sized experts, merging only, one process a method."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.models import vit

__all__ = ["rivals"]

_OURS = {
    "Task Arithmetic": "TaskArithmetic()",
    "Ties-Merging": "TiesMerging()",
    "Iso-C": "IsoC()",
    "TSV-M": "TSVM()",
    "OPCM": "OPCM()",
    "WUDI-Merging": "WUDIMerging(num_steps={steps})",
    "SAFE-Merge": "SafeMerge()",
    "SAFE-Share": "SafeShare(scoring_rank=1 / 6, shared_rank=1 / 4)",
}
_WITHOUT_PEER = ("SAFE-Merge", "SAFE-Share")


def rivals(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row a method: our seconds and memory for three folds, checks and hashes included, and fusion_bench's."""
    rows: list[dict[str, object]] = []
    threads, steps = str(torch.get_num_threads()), str(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "models.pt"
        base = vit(0, blocks=arguments.blocks, width=arguments.width)
        experts = {
            name: vit(seed, base, blocks=arguments.blocks, width=arguments.width) for seed, name in enumerate("abc", 1)
        }
        torch.save({"_pretrained_": base, **experts}, path)
        del base, experts
        for name in arguments.methods or _OURS:
            peer = Path(__file__).with_name("fusion_bench_peer.py")
            ours = _run([sys.executable, "-m", "benchmarks.rivals", str(path), threads, steps, name])
            row: dict[str, object] = {
                "method": name,
                "ours_s": ours["seconds"],
                "ours_cpu_s": ours["cpu_s"],  # of all cores together, for a machine that does other work too
                "ours_mib": ours["peak_mib"],
            }
            if arguments.peer and name not in _WITHOUT_PEER:
                theirs = _run([arguments.peer, str(peer), str(path), threads, steps, name])
                row |= {
                    "theirs_s": theirs["seconds"],
                    "theirs_cpu_s": theirs["cpu_s"],
                    "theirs_mib": theirs["peak_mib"],
                }
                row["ratio"] = theirs["seconds"] / ours["seconds"]
                row["cpu_ratio"] = theirs["cpu_s"] / ours["cpu_s"]
                row["memory_ratio"] = theirs["peak_mib"] / max(ours["peak_mib"], 1.0)
            print(
                "   ".join(
                    f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()
                ),
                flush=True,
            )
            rows.append(row)
    return rows


def _run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _ours() -> None:
    """One method of ours, in a process of its own."""
    import time

    import safemerge_pl.methods as methods
    from benchmarks.fusion_bench_peer import memory_mib
    from safemerge_pl.merger import ContinualMerger

    path, threads, steps, name = sys.argv[1:]
    torch.set_num_threads(int(threads))
    states = torch.load(path, weights_only=True)
    method = eval(_OURS[name].format(steps=steps), vars(methods))
    before = memory_mib("VmRSS")
    start, busy = time.perf_counter(), time.process_time()
    merger = ContinualMerger(states.pop("_pretrained_"), method)
    for task, state in states.items():
        merger.fold(state, task)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    print("\n" + json.dumps({"seconds": seconds, "cpu_s": busy, "peak_mib": memory_mib("VmHWM") - before}))


if __name__ == "__main__":
    _ours()
