"""Everything of an output but its weights: what the libraries need to use it, and what tells where it came from."""

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from folders import clip_folder
from safetensors.torch import save_file
from tiny import folded, fresh, tower, tuned

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output import saving
from safemerge_pl.output.ledger import LEDGER_FILE
from safemerge_pl.output.side_files import output_notes, side_files
from safemerge_pl.version import __version__
from safemerge_pl.zoo import FILES


def merged(base: Path, out: Path, **options: Any) -> Path:
    merger = fresh(base)
    merger.fold(tuned(dict(open_checkpoint(base)), 1), "a")
    return merger.save(out, **options)


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


# configuration


def test_what_no_longer_holds_is_taken_out_of_the_configuration(tmp_path: Path) -> None:
    """M5: a reader would try to de-quantise floating-point weights; also in the towers' configurations."""
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tower_config = {"hidden_size": 8, "quantization_config": quantised, "_name_or_path": "x/y"}
    config = {"model_type": "clip", "_name_or_path": "openai/clip", "vision_config": tower_config, "dtype": "float32"}
    base = tiny.folder_of(tmp_path / "base", tower(), config=config | {"quantization_config": quantised})
    out = merged(base, tmp_path / "out")
    assert config_of(out) == {"model_type": "clip", "vision_config": {"hidden_size": 8}, "dtype": "float32"}
    assert any("`quantization_config` was left out" in note for note in output_notes(open_checkpoint(base)))


def test_the_dtype_of_every_tower_is_that_of_the_weights(tmp_path: Path) -> None:
    """A2, A3: as older versions of transformers wrote it; a tower that named none gets none."""
    config = {
        "torch_dtype": "float16",
        "vision_config": {"torch_dtype": "float16", "x": 1},
        "text_config": {"dtype": "float16"},
        "other_config": {"y": {"dtype": "z"}},
    }
    base = tiny.folder_of(tmp_path / "base", tower(dtype=torch.float16), config=config)
    assert config_of(merged(base, tmp_path / "same")) == config
    assert config_of(merged(base, tmp_path / "out", dtype="bfloat16")) == {
        "dtype": "bfloat16",
        "vision_config": {"dtype": "bfloat16", "x": 1},
        "text_config": {"dtype": "bfloat16"},
        "other_config": {"y": {"dtype": "z"}},
    }


def test_a_configuration_that_is_no_json_is_named_before_anything_is_written(tmp_path: Path) -> None:
    base = tiny.folder_of(tmp_path / "base", tower())
    (base / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON .* fetch it again"):
        merged(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("copy_code", [False, True])
def test_the_models_own_code_is_copied_only_when_asked_for(copy_code: bool, tmp_path: Path) -> None:
    """N8, H6: and never run; references to code that is not there go too."""
    auto = {"AutoModel": "modeling_x.X"}
    base = tiny.folder_of(
        tmp_path / "base", tower(), config={"model_type": "x", "auto_map": auto}, tokenizer_config={"auto_map": auto}
    )
    (base / "modeling_x.py").write_text("raise SystemExit('it was run')")
    out = merged(base, tmp_path / "out", copy_code=copy_code)
    assert (out / "modeling_x.py").exists() == copy_code
    for name in ("config.json", "tokenizer_config.json"):
        assert ("auto_map" in config_of(out, name)) == copy_code
    card = (out / "README.md").read_text()
    assert ("own code (modeling_x.py) was not copied" in card) == (not copy_code)


# other files


def test_generation_settings_are_copied_and_their_fault_is_told(tmp_path: Path) -> None:
    """N6: transformers itself would refuse to save these; valid ones cause no remark."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={}, generation_config={"do_sample": True, "top_k": 3})
    assert not output_notes(open_checkpoint(base))
    wrong = '{"do_sample": false, "temperature": 0.1}'
    (base / "generation_config.json").write_text(wrong)
    out = merged(base, tmp_path / "out")
    assert (out / "generation_config.json").read_text() == wrong
    assert "generation_config.json was copied as it is, but" in (out / "README.md").read_text()


def test_chat_templates_reach_the_tokenizer_of_the_output(tmp_path: Path) -> None:
    """N5, N7: the default one and the further ones in their sub-folder, as the library reads them."""
    from transformers import AutoTokenizer

    base = clip_folder(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((FILES / "model" / name).read_bytes())
    (base / "chat_template.jinja").write_text("one {{ messages }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("two {{ messages }}")
    out = merged(base, tmp_path / "out")
    with tiny.seeded():
        found, theirs = (AutoTokenizer.from_pretrained(place, local_files_only=True) for place in (out, base))
    assert found.chat_template == theirs.chat_template
    assert found.chat_template == {"default": "one {{ messages }}", "tools": "two {{ messages }}"}


def test_sub_folders_of_text_belong_to_the_model_and_others_do_not(tmp_path: Path) -> None:
    """N5: a pooling layer's configuration; no other weights, caches, logs or data."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={}, modules=[])
    files = ["1_Pooling/config.json", "onnx/model.onnx", ".git/config.txt", "data/a.parquet", "spiece.model"]
    files += ["checkpoint-5/optimizer.pt", "checkpoint-5/config.json", "deep/er/x.json", "training_args.bin"]
    for file in (*files, ".gitattributes", "merge_ledger.jsonl", "README.md", "flax_model.msgpack"):
        (base / file).parent.mkdir(parents=True, exist_ok=True)
        (base / file).write_text("{}")
    assert [str(path) for path in side_files(base)] == [
        ".gitattributes",
        "1_Pooling/config.json",
        "config.json",
        "deep/er/x.json",
        "modules.json",
        "spiece.model",
    ]
    out = merged(base, tmp_path / "out")
    assert (out / "deep" / "er" / "x.json").exists()
    (out / "1_Pooling" / "config.json").unlink()
    assert (merged(base, out) / "1_Pooling" / "config.json").exists()
    note = next(note for note in output_notes(open_checkpoint(base)) if "sub-folders" in note)
    assert "checkpoint-5, data, onnx" in note


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """N2, C10: an incomplete snapshot; not an output without its tokenizer."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    (base / "tokenizer.json").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to a file that is gone"):
        merged(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mapping", "module", "file"])
def test_an_output_without_a_configuration_says_so(kind: str, tmp_path: Path, caplog: Any) -> None:
    """N5: in the log and in the card."""
    save_file(tower(), tmp_path / "base.safetensors")
    base = {"mapping": tower(), "module": tiny.hf_vision(), "file": tmp_path / "base.safetensors"}[kind]
    merger = fresh(base)  # type: ignore[arg-type]
    out = merger.save(tmp_path / "out")
    assert "so the output holds weights alone: add config.json" in caplog.text
    assert "so the output holds weights alone: add config.json" in (out / "README.md").read_text()
    caplog.clear()
    if kind == "module":
        merger.save(out, template=clip_folder(tmp_path / "clip", "vision"))
        assert "weights alone" not in caplog.text
        assert (out / "config.json").exists()


# card and ledger


def front_matter(out: Path) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    text = (out / "README.md").read_text()
    parsed: dict[str, Any] = yaml.safe_load(text.split("---")[1])
    assert ModelCard(text).data.to_dict() == parsed
    return parsed


def test_the_card_has_a_front_matter_that_the_hub_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N9: the hub's name of the base where it has one; a local path means nothing to others."""
    base = clip_folder(tmp_path / "base")
    merger = fresh(base)
    merger.fold(tuned(tiny.hf_clip().state_dict(), 1), "a | b\nc")
    found = front_matter(merger.save(tmp_path / "out"))
    assert found["library_name"] == "transformers"
    assert "merge" in found["tags"]
    assert "base_model" not in found
    merger.pretrained.source = "openai/clip-vit-base-patch32"
    out = merger.save(tmp_path / "out")
    assert front_matter(out)["base_model"] == "openai/clip-vit-base-patch32"
    row = next(line for line in (out / "README.md").read_text().splitlines() if "a \\| b c" in line)
    assert row.replace("\\|", "").count("|") == 9


def test_the_card_tells_how_to_make_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/safemerge", "fold", "--task", "two words"])
    out = folded(1).save(tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "command: `safemerge fold --task 'two words'`" in card
    assert f"safemerge_pl {__version__}" in card
    assert torch.__version__.split("+")[0] in card
    assert f"`{folded(1).fingerprint()}`" in card


def strict(line: str) -> dict[str, Any]:
    """Refuses NaN and Infinity, which Python's reader lets pass."""

    def never(constant: str) -> None:
        raise AssertionError(constant)

    content: dict[str, Any] = json.loads(line, parse_constant=never)
    return content


def test_the_ledger_has_a_line_a_fold(tmp_path: Path) -> None:
    """N9: resolved path and hash, settings, losses, time."""
    expert = tiny.folder_of(tmp_path / "snapshots" / "0123abc", tuned(tower(), 1))
    before = datetime.now(timezone.utc).replace(microsecond=0)
    merger = fresh()
    for task, source in (("one", expert), ("two", tower())):
        merger.fold(source, task)
    lines = (merger.save(tmp_path / "out") / LEDGER_FILE).read_text().splitlines()
    one, two = map(strict, lines)
    report = merger.reports[0]
    assert one["index"] == 1
    assert one["task"] == "one"
    assert one["source"] == str(expert)
    assert one["path"] == str(expert.resolve())
    assert one["revision"] == "0123abc"
    assert (one["incoming"], one["merged"]) == (report.incoming, report.merged)
    assert one["settings"] == merger.method.settings()
    assert (one["loss_first"], one["loss_last"]) == (report.losses[0], report.losses[-1])
    assert one["kept_fraction"] == report.kept_fraction
    assert one["version"] == __version__
    assert before <= datetime.fromisoformat(one["time"]) <= datetime.now(timezone.utc)
    assert two["path"] is None
    assert two["notes"] == ["its merged layers equal the pretrained model's: nothing was added"]


def test_yesterdays_lines_stay_as_they_are(tmp_path: Path) -> None:
    """Also with a remark in them, and through other processes' folds; an output from before the ledger gets one."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    for seed in (1, 2, 3):
        tiny.folder_of(tmp_path / f"task{seed}", tuned(tower(), seed))
    out = str(tmp_path / "out")
    fold_once(str(base), str(tmp_path / "task1"), out)
    file = tmp_path / "out" / LEDGER_FILE
    line = file.read_text().replace('"notes"', '"by": "hand",   "notes"')
    file.write_text(line)
    fold_once(str(base), [str(tmp_path / "task2"), str(tmp_path / "task3")], out, merged=out)
    lines = file.read_text().splitlines(keepends=True)
    assert lines[0] == line
    assert [strict(line)["task"] for line in lines] == ["task1", "task2", "task3"]
    file.unlink()
    merger = ContinualMerger.load(out, base)
    merger.save(out)
    assert file.read_text().splitlines() == merger.ledger
    assert [strict(line)["index"] for line in merger.ledger] == [1, 2, 3]


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Format 1 as it was before reports knew where and when; and with something that only a later version knows."""
    out = folded(1).save(tmp_path / "out")
    (out / LEDGER_FILE).unlink()
    state = json.loads((out / "merge_state.json").read_text())
    for name in ("path", "revision", "time", "version"):
        del state["reports"][0][name]
    state["reports"][0]["of tomorrow"] = 1
    (out / "merge_state.json").write_text(json.dumps(state))
    merger = ContinualMerger.load(out, tower())
    assert merger.fingerprint() == folded(1).fingerprint()
    merger.save(out)
    assert strict((out / LEDGER_FILE).read_text())["time"] is None


# several models at once


def test_several_models_are_folded_in_order_or_not_at_all(tmp_path: Path) -> None:
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    sources = []
    for seed in (1, 2):
        sources.append(str(tiny.folder_of(tmp_path / f"v{seed}.task{seed}", tuned(tower(), seed))))
    broken = tuned(tower(), 3)
    broken[tiny.FC1][0, 0] = float("nan")
    bad = str(tiny.folder_of(tmp_path / "bad", broken))
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"task 'bad': .* NaN"):
        fold_once(str(base), [*sources, bad], str(out))
    assert not out.exists()
    merger = fold_once(str(base), sources, str(out))
    assert merger.tasks == ["v1.task1", "v2.task2"]
    twin = ContinualMerger(base)
    for source in sources:
        twin.fold(source, source)
    assert merger.fingerprint() == twin.fingerprint()


@pytest.mark.parametrize(
    ("incoming", "task", "message"),
    [
        ([], None, "`incoming` is empty"),
        (["a/x", "b/X"], None, "two incoming models have the name 'x'"),
        (["a", "b"], "one", "`task` has 1 names for 2 incoming models"),
        (["a"], ["one", "two"], "`task` has 2 names for 1 incoming models"),
    ],
)
def test_lists_that_do_not_fit_are_refused_first(incoming: list[str], task: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        fold_once("no/such", incoming, str(tmp_path / "out"), task=task)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_output_is_refused_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    tiny.refuse_to_read(monkeypatch)
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file", base, base / "in", tmp_path):
        with pytest.raises(CheckpointError, match="name a"):
            fold_once(str(base), str(base), str(output))


def test_lists_on_the_command_line(tmp_path: Path) -> None:
    """One line of result with the hash, the model's name in the card, no trace of a failed attempt."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    for seed in (1, 2):
        tiny.folder_of(tmp_path / f"task{seed}", tuned(tower(), seed))
    command = [sys.executable, "-m", "safemerge_pl", "fold", "--pretrained", "base", "--output", "out"]
    args = ["--incoming", "[task1,task2]", "--task", "[a,b]", "--max_shard_size", "1KB", "--dtype", "bfloat16"]
    run = subprocess.run([*command, *args], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["tasks"] == ["a", "b"]
    assert f"merged model: out, 2 tasks, SHA-256 {state['merged']}" in run.stdout.splitlines()[-1]
    assert "command: `safemerge fold --pretrained base --output out" in (tmp_path / "out" / "README.md").read_text()
    index = saving.MASTER_FILE + ".index.json"
    assert (tmp_path / "out" / index).exists()
    assert ContinualMerger.load(tmp_path / "out", base).fingerprint() == state["merged"]
    assert base.exists()
