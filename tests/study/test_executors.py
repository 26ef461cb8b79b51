"""Executors of studies: processes, threads and a Dask cluster measure what one process does, even if one is killed."""

import json
import signal
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import CONTROLS, RANKS, TASKS, KillingZoo

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.commands.study import run
from safemerge_pl.methods import SafeMerge, TaskArithmetic
from safemerge_pl.runtime.configs import config_folder
from safemerge_pl.study import DaskExecutor, LocalProcesses, Study, StudyRow
from safemerge_pl.study.executors import _call_on_worker, _take_place, own_gpu
from safemerge_pl.study.spread import spread


def study(folder: Path, killed: Path | None = None, **settings: Any) -> Study:
    """Three cells and the pretrained row; ``killed`` is the file that says that a process was."""
    data = KillingZoo(TASKS, CONTROLS, batch_size=40)
    data.killed = folder if killed is None else killed  # a folder that exists kills nobody
    folder.mkdir(exist_ok=True)
    safe = StudyRow("SAFE-Merge", SafeMerge(**RANKS), vary={"keep_ratio": [0.3, 0.7]})
    rows = [safe, StudyRow("Task Arithmetic", TaskArithmetic())]
    return Study(CLIPBackbone(), {"three": data}, rows, orders=[42], folder=str(folder), individual=False, **settings)


def kept(folder: Path) -> dict[str, Any]:
    """What was measured, by the file that it is kept in; without times and memory."""
    cells = {path.name: json.loads(path.read_text()) for path in (folder / "cells").iterdir()}
    times = ("seconds", "fold_seconds", "solve_seconds", "peak_memory_mib")
    return {name: {key: cell[key] for key in cell.keys() - set(times)} for name, cell in cells.items()}


def table(folder: Path) -> str:
    return (folder / "table.md").read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study that one process has measured."""
    folder = tmp_path_factory.mktemp("alone")
    study(folder).run()
    return folder


def test_two_processes_of_which_one_is_killed(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path / "two", tmp_path / "killed", jobs=2).run()
    assert (tmp_path / "killed").exists()
    printed = capsys.readouterr()
    assert printed.err == "a process of the study was killed; what it was at is measured again\n"
    assert printed.out.count("three tasks, order 42") == 3
    assert kept(tmp_path / "two") == kept(alone)
    assert table(tmp_path / "two") == table(alone)


def test_a_dask_cluster_of_which_a_worker_is_killed(alone: Path, tmp_path: Path) -> None:
    """With resources, so that every worker measures one cell at a time."""
    pytest.importorskip("distributed", reason="needs distributed, of the extra `cluster`")
    with DaskExecutor(workers=2, resources={"cell": 1}) as executor:
        study(tmp_path / "dask", tmp_path / "killed", executor=executor).run()
    assert (tmp_path / "killed").exists()
    assert kept(tmp_path / "dask") == kept(alone)
    assert table(tmp_path / "dask") == table(alone)


def test_an_interrupted_study_goes_on_with_another_executor(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What had begun is kept as well. Threads share the process's one backbone, so that cells wait for each other."""
    say, said = Study._say, threading.Event()

    def interrupt(self: Study, *args: Any) -> None:
        say(self, *args)
        if not said.is_set():
            said.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(Study, "_say", interrupt)
    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        study(tmp_path, executor=executor).run()
    assert len(kept(tmp_path)) == 3  # the pretrained row and two cells
    capsys.readouterr()
    with ThreadPoolExecutor(2) as executor:
        study(tmp_path, executor=executor).run()
    assert capsys.readouterr().out.count("(known)") == 2
    assert kept(tmp_path) == kept(alone)
    assert table(tmp_path) == table(alone)


class Answers(Executor):
    """Answers every call with the same text, or error."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        if isinstance(self.answer, Exception):
            done.set_exception(self.answer)
        else:
            done.set_result(self.answer)
        return done


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("nothing", "a worker of the study gave what is no result"),
        ('{"result": 3, "lines": []}', "a worker of the study gave what is no result"),
        ("[" * 100_000, "a worker of the study gave what is no result"),
        (BrokenExecutor("killed"), r"lost its workers \(BrokenExecutor: killed\). Results so far are kept"),
    ],
)
def test_what_is_no_result_ends_in_one_sentence(answer: str | Exception, message: str, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        study(tmp_path, executor=Answers(answer)).run()
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_kills_every_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safemerge_pl.study.executors.ProcessPoolExecutor", lambda *_: Answers(BrokenExecutor("again")))
    with LocalProcesses(1) as executor, pytest.raises(BrokenExecutor, match="3 processes in a row were killed"):
        executor.submit(pow, 2, 3).result()


def hang(bench: bytes, job: str) -> str:
    """In the place of a measurement: one that is done, and others that never end."""
    if job != "done":
        Path(job).touch()
        time.sleep(10_000)
    return json.dumps({"result": {}, "lines": []})


def test_an_interrupt_ends_the_processes_with_what_they_are_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops a study does not wait for cells that may take hours; what is known is kept."""
    monkeypatch.setattr("safemerge_pl.study.spread.measure_elsewhere", hang)
    began, known = tmp_path / "began", []

    def keep(job: Any, result: dict[str, Any]) -> None:
        known.append(job)
        while not began.exists():
            time.sleep(0.05)
        raise KeyboardInterrupt

    jobs: Any = [str(began), "done", str(tmp_path / "never")]
    with LocalProcesses(2) as executor:
        with pytest.raises(KeyboardInterrupt):
            spread(executor, b"", jobs, keep)
        assert known == ["done"]
        assert executor.submit(pow, 2, 3).result() == 8  # with new processes


def test_ctrl_c_is_left_to_whoever_started_the_processes() -> None:
    """A terminal gives it to all of them; one that imports libraries just then would end in a traceback."""
    with LocalProcesses(1) as executor:
        assert signal.SIGINT in executor.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LocalProcesses(0), "`processes` must be at least 1, got 0"),
        (lambda: DaskExecutor(workers=0), "`workers` must be at least 1, got 0"),
        (lambda: DaskExecutor("tcp://here:1", workers=2), "a scheduler with an `address` has its own"),
        (lambda: study(Path(), jobs=2, executor=Answers("")), "leave 2 out, the `executor` has its own workers"),
    ],
)
def test_bad_executors_are_refused(build: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        build()


def test_an_address_where_nobody_answers() -> None:
    distributed = pytest.importorskip("distributed", reason="needs distributed, of the extra `cluster`")
    dask = pytest.importorskip("dask")
    assert distributed
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "100ms"}),
        DaskExecutor("tcp://127.0.0.1:9") as executor,
        pytest.raises(MisconfigurationException, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
    ):
        executor.submit(pow, 2, 3)


@pytest.mark.parametrize(
    ("said", "message"),
    [("daemonic processes are not allowed to have children", "start it with DASK_DISTRIBUTED"), ("other", "other")],
)
def test_a_dask_worker_that_may_not_start_processes(said: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs distributed, of the extra `cluster`")
    monkeypatch.setattr("distributed.get_worker", lambda: SimpleNamespace(name="tcp://10.0.0.1:1"))

    def refuse() -> None:
        raise AssertionError(said)

    with pytest.raises((MisconfigurationException, AssertionError), match=message):
        _call_on_worker(None, refuse, (), {})


def test_workers_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("safemerge_pl.study.executors._number", 0)
    found = []
    for number in range(3):
        _take_place(None, number)
        found.append(own_gpu())
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert DaskExecutor(resources={"GPU": 1}).workers == 2


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"class_path": "concurrent.futures.ThreadPoolExecutor", "init_args": {"max_workers": 3}}, ThreadPoolExecutor),
        ({"class_path": "LocalProcesses", "init_args": {"processes": 3}}, LocalProcesses),
        ({"class_path": "DaskExecutor", "init_args": {"address": "tcp://10.0.0.1:8786"}}, DaskExecutor),
    ],
)
def test_an_executor_in_a_configuration(
    given: dict[str, Any], kind: type[Executor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed when the study is done."""
    content = yaml.safe_load((config_folder() / "study_ablation.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({key: content[key] for key in content if key != "jobs"} | {"executor": given}))
    monkeypatch.setattr("sys.argv", ["safemerge", "study", "--config", str(path)])
    seen: list[Any] = []
    monkeypatch.setattr(Study, "run", lambda self: seen.append(self.executor))
    monkeypatch.setattr(kind, "shutdown", lambda self, *_, **__: seen.append("closed"))
    run()
    assert type(seen[0]) is kind
    assert seen[1:] == ["closed"]
