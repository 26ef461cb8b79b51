"""One fold in several processes: the files of one process to the bit, each tensor read once, wholly or not at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open
from tiny import tower, tuned

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.folding import launch
from safemerge_pl.folding.launch import choose_device, join_processes
from safemerge_pl.merger import ContinualMerger


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All that is folded in several processes, disturbed or not; see ``together.py``."""
    folder = tmp_path_factory.mktemp("together")
    base = tower(layers=1, dtype=torch.float16)
    tiny.folder_of(folder / "base", base, config={"model_type": "x"}, tokenizer={})
    for seed in (1, 2):
        tiny.folder_of(folder / f"task{seed}", tuned(base, seed))
    broken = tuned(base, 3)
    broken[tiny.FC1][0, 0] = float("nan")
    tiny.folder_of(folder / "broken", broken)
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(Path(launch.__file__).parents[2]), str(tests)])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SAFEMERGE_CACHE": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(tests / "together.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_and_three_processes_write_the_files_of_one(run: tuple[Path, dict[str, Any]]) -> None:
    """Every method; with and without masters in memory, a bound, other dtypes and shards; also continued."""
    folder, found = run
    names = sorted(path.name for path in (folder / "1").iterdir())
    assert len(names) == 13
    for count in ("2", "3"):
        assert sorted(path.name for path in (folder / count).iterdir()) == names  # and nothing is left beside them
        for name in names:
            assert found["content"][count][name] == found["content"]["1"][name], (count, name)
    assert len(list((folder / "3" / "task_arithmetic").glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.slow
def test_each_process_reads_its_own_tensors_alone(run: tuple[Path, dict[str, Any]]) -> None:
    """Also of what is copied unmerged; so bytes are shared out as well."""
    folder, _ = run
    shares = [{tuple(entry) for entry in json.loads((folder / f"read-{rank}.json").read_text())} for rank in range(3)]
    assert not any(shares[a] & shares[b] for a, b in ((0, 1), (0, 2), (1, 2)))
    for model in ("base", "task1", "task2"):
        with safe_open(folder / model / "model.safetensors", "pt") as handle:
            sizes = {name: handle.get_tensor(name).nbytes for name in handle.keys()}  # noqa: SIM118
            kinds = {name: handle.get_tensor(name).is_floating_point() for name in sizes}
        wanted = set(sizes) if model == "base" else {name for name in sizes if kinds[name]}
        assert {name for share in shares for source, name in share if source == model} == wanted
        read = [sum(sizes[name] for source, name in share if source == model) for share in shares]
        assert max(read) < 0.6 * sum(sizes[name] for name in wanted)


@pytest.mark.slow
def test_one_process_speaks_for_all(run: tuple[Path, dict[str, Any]]) -> None:
    found = run[1]
    whole = found["undisturbed"]
    assert (whole["codes"], whole["said"], whole["output"], whole["beside"]) == ([0] * 3, [""] * 3, "today", [])
    assert re.fullmatch(r"(?s)SAFE-Merge: folded 'task2' as task 2 .*\nmerged model: .*\n", found["printed"][0])
    assert found["printed"][1:] == ["", ""]
    for case, code, message in (
        ("full disk", 1, r"out could not be written .*No space left on device.* untouched"),
        ("interrupt", 130, r"(interrupted|stopped by Ctrl-C); the output is as it was"),
        ("terminated", 1, r"another process of this fold is gone \(process 0 was told to stop\); the output is whole"),
        ("no shared files", 1, r"does not see the file .* beside the output .* a file system that all of them share"),
        ("no task", 1, r"task2 is there on .* and not on .*; put it where all machines see it"),
        ("wrong option", 1, r"`max_shard_size` must be a number of bytes"),
        ("no option", 2, r"there is no option --outputs\.\n  Did you mean .--output."),
        ("not finite", 1, r"task 'broken': .*broken: `encoder.layers.0.mlp.fc1.weight` has 1 NaN or Inf"),
    ):
        happened = found[case]
        assert (happened["output"], happened["beside"]) == ("yesterday", []), case
        (said,) = [words for words in happened["said"] if words]
        assert re.search(message, said), case
        assert len(said.strip().splitlines()) == 1 or code == 2, case
        assert 0 not in happened["codes"], case
        assert code in happened["codes"], case


@pytest.mark.slow
def test_a_killed_process_stops_all_and_the_next_start_gives_the_same_bits(run: tuple[Path, dict[str, Any]]) -> None:
    """At random points; the script has seen that the output is whole and the next run's is undisturbed."""
    kills = run[1]["kills"]
    assert kills["killed"] >= 3
    assert kills["yesterday"] >= 1
    for codes, said in zip(kills["codes"], kills["said"], strict=True):
        spoken = [words for words in said if words]
        assert len(spoken) <= 1
        if -9 in codes and 0 not in codes and len(codes) == 2:
            assert "another process of this fold is gone" in spoken[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "1"}, "has RANK but not WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and MASTER_PORT: start several"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "but not MASTER_ADDR and MASTER_PORT"),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK is 'x', no number",
        ),
    ],
)
def test_half_an_environment_is_refused(given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch._NEEDED:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=message), join_processes():
        pass


def test_a_cluster_that_only_names_its_first_machine_means_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch._TELLING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with join_processes() as processes:
        assert (processes.count, processes.apart) == (1, False)


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert (choose_device("cuda"), choose_device("cuda:0"), choose_device("cpu")) == ("cuda:1", "cuda:0", "cpu")
    assert taken == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(CheckpointError, match="process 3 of this machine has no GPU, for it has 2"):
        choose_device("cuda")


def test_a_template_in_another_layout_is_for_one_process(tmp_path: Path) -> None:
    """Its tensors would be made of parts that different processes have."""
    import dataclasses

    from safemerge_pl.output.saving import _writers

    merger = ContinualMerger(tower(), tiny.fast_method())
    processes = dataclasses.make_dataclass("Two", ["count"])(2)
    owners = dict.fromkeys(merger.plan.parameters, 0)
    state: Any = dataclasses.make_dataclass("State", ["processes", "owners", "plan"])(processes, owners, merger.plan)
    with pytest.raises(CheckpointError, match="in another layout than a mapping in memory, which one process alone"):
        _writers(state, merger.pretrained, {"in_proj_weight": "in_proj_weight"}, {})
