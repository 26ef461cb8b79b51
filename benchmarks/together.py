"""One fold under torchrun, from disk to disk, by one process with one thread and by two."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.out_of_core import make

__all__ = ["together"]


def together(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one row per number of processes.

    Seconds of the command, start included; of its processes, processor seconds of the busiest and largest resident
    memory. On a machine that does other work the ratio of processor seconds tells more than that of seconds.
    """
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        base, expert = Path(place) / "base", Path(place) / "expert"
        make(base, arguments.llama_layers[0], 0)
        make(expert, arguments.llama_layers[0], 1)
        for count in arguments.processes:
            output, notes = Path(place) / f"out{count}", Path(place) / f"notes{count}"
            notes.mkdir()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
            command += ["-m", "benchmarks.together", str(notes), "--pretrained", str(base), "--incoming", str(expert)]
            command += ["--output", str(output), "--low_memory", "true", *arguments.fold_options]
            start = time.perf_counter()
            settings = {"OMP_NUM_THREADS": "1", "SAFEMERGE_CACHE": ""}  # no run finds the bases of an earlier one
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)
            seconds = time.perf_counter() - start
            if done.returncode:
                raise SystemExit(f"the fold failed:\n{done.stderr[:2000]}")
            found = [json.loads(path.read_text()) for path in notes.iterdir()]
            row: dict[str, object] = {"layers": arguments.llama_layers[0], "processes": count, "seconds": seconds}
            row["busiest_cpu_seconds"] = max(entry["cpu"] for entry in found)
            row["peak_rss_gib"] = max(entry["peak"] for entry in found) / 2**10
            row["merged"] = json.loads((output / "merge_state.json").read_text())["merged"][:12]
            for ratio, of in (("times_faster", "seconds"), ("times_less_cpu", "busiest_cpu_seconds")):
                row[ratio] = float(str(({**row} if not rows else rows[0])[of])) / float(str(row[of]))
            print(row, flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    from safemerge_pl.cli import main
    from safemerge_pl.runtime.memory import peak_memory_mib

    notes, options = Path(sys.argv[1]), sys.argv[2:]
    main(["fold", *options])
    note = {"cpu": time.process_time(), "peak": peak_memory_mib()}
    (notes / os.environ["RANK"]).write_text(json.dumps(note))
