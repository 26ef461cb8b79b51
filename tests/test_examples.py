"""Every example runs and ends with both matrices."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import python

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOPS = ["continual_finetune", "plain_loop", "timm_heads"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])}
    command = [*python(), str(EXAMPLES / f"{name}.py"), "--quick"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    titles = [line for line in run.stdout.splitlines() if line.endswith("(accuracy in %)")]
    assert len(titles) == 2
    assert titles[0].startswith("Sequential fine-tuning")
    rows = re.findall(r"^after \w+((?: +\d+\.\d){4})$", run.stdout, re.MULTILINE)
    assert len(rows) == 6
    assert all(0 <= float(value) <= 100 for row in rows for value in row.split())
    assert rows[:3] != rows[3:]
    if name == "continual_finetune":
        assert list(tmp_path.glob("runs/continual_finetune/lightning_logs/version_0/matrix.png"))
    if name == "plain_loop":
        assert (tmp_path / "runs/plain_loop/model.safetensors").exists()


def test_no_example_is_forgotten() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(
        [*LOOPS, "llama_lora", "sentence_embeddings", "zoo_halves"]
    )


def run_quick(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example as a person starts it, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_llama_by_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_quick("llama_lora", tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert "Task Arithmetic: folded 'step4' as task 1" in shown
    assert len(re.findall(r"^(?:pretrained|merged) +(?: +\d+\.\d){8}$", shown, re.MULTILINE)) == 2
    assert len(re.findall(r"^merged, [+-]\d from 3: 3(?: \d+){5}$", shown, re.MULTILINE)) == 3
    assert (tmp_path / "runs/llama_lora/merged/model.safetensors").exists()


@pytest.mark.filterwarnings("ignore")
def test_sentence_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    run_quick("sentence_embeddings", tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert len(re.findall(r"^(?:pretrained|tuned on \w+|merged) +(?: +\d+\.\d){3}$", shown, re.MULTILINE)) == 4
    assert (tmp_path / "runs/sentence_embeddings/merged/1_Pooling").is_dir()
