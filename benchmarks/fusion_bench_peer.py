"""Time merging methods of fusion_bench; run by ``benchmarks rivals`` in an interpreter that has it installed."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def main() -> None:
    """Arguments: path of the models, threads, steps of WUDI, and one method; prints a line of JSON at the end."""
    path, threads, steps, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    from fusion_bench import BaseModelPool
    from fusion_bench import method as methods
    from fusion_bench.method.opcm.opcm_general import OPCM

    states = torch.load(path, weights_only=True)
    models = {key: Model(state) for key, state in states.items()}
    start = {
        "Task Arithmetic": lambda: methods.TaskArithmeticAlgorithm(scaling_factor=0.3),
        "Ties-Merging": lambda: methods.TiesMergingAlgorithm(
            scaling_factor=0.3, threshold=20, remove_keys=[], merge_func="sum"
        ),
        "Iso-C": lambda: methods.IsotropicMergingInCommonSubspace(scaling_factor=1.0, exclude_keys=[]),
        "TSV-M": lambda: methods.TaskSingularVectorMerging(alpha=1.0, exclude_keys=[]),
        "OPCM": lambda: OPCM(alpha=0.5, shuffle_order=False, save_on_every_step=False),
        "WUDI-Merging": lambda: methods.WUDIMerging(iter_num=steps, exclude_keys=[]),
    }[name]
    algorithm: Any = start()
    pool = BaseModelPool(models)
    before = memory_mib("VmRSS")
    begin, cpu = time.perf_counter(), time.process_time()
    algorithm.run(pool)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print("\n" + json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_mib": memory_mib("VmHWM") - before}))


def memory_mib(key: str) -> float:
    """A line of this process's status (Linux): ``VmRSS``, what is resident, or ``VmHWM``, the most that ever was.

    What the module ``resource`` tells may be that of the process which started this one.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) / 1024


class Model(nn.Module):
    """Linear layers and loose parameters by the names of a state dict."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for depth, part in enumerate(path):
                if not hasattr(place, part):
                    linear = depth == len(path) - 1 and tensor.ndim == 2 and "embed" not in name
                    child = nn.Linear(*tensor.shape[::-1], bias=False) if linear else nn.Module()
                    place.add_module(part, child)
                place = getattr(place, part)
            setattr(place, last, nn.Parameter(tensor))


if __name__ == "__main__":
    main()
