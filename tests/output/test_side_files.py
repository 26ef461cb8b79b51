"""The other files of a model in its output: what the libraries need to use it."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from folders import clip_folder
from safetensors.torch import save_file
from tiny import fresh, tower, tuned

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.output.files import LEDGER_FILE, MASTER_FILE, STATE_FILE
from safemerge_pl.output.side_files import output_notes, side_files
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
    """A reader would try to de-quantise floating-point weights; also in the towers' configurations."""
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tower_config = {"hidden_size": 8, "quantization_config": quantised, "_name_or_path": "x/y"}
    config = {"model_type": "clip", "_name_or_path": "openai/clip", "vision_config": tower_config, "dtype": "float32"}
    base = tiny.folder_of(tmp_path / "base", tower(), config=config | {"quantization_config": quantised})
    out = merged(base, tmp_path / "out")
    assert config_of(out) == {"model_type": "clip", "vision_config": {"hidden_size": 8}, "dtype": "float32"}
    assert any("`quantization_config` was left out" in note for note in output_notes(open_checkpoint(base)))


def test_the_dtype_of_every_tower_is_that_of_the_weights(tmp_path: Path) -> None:
    """As older versions of transformers wrote it; a tower that named none gets none."""
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
    """They are never run; references to code that is not there go too."""
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
    """Transformers itself would refuse to save these; valid ones cause no remark."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={}, generation_config={"do_sample": True, "top_k": 3})
    assert not output_notes(open_checkpoint(base))
    wrong = '{"do_sample": false, "temperature": 0.1}'
    (base / "generation_config.json").write_text(wrong)
    out = merged(base, tmp_path / "out")
    assert (out / "generation_config.json").read_text() == wrong
    assert "generation_config.json was copied as it is, but" in (out / "README.md").read_text()


def test_chat_templates_reach_the_tokenizer_of_the_output(tmp_path: Path) -> None:
    """The default one and the further ones in their sub-folder, as the library reads them."""
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
    """A pooling layer's configuration; no other weights, caches, logs or data."""
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
    """An incomplete snapshot; not an output without its tokenizer."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    (base / "tokenizer.json").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to a file that is gone"):
        merged(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mapping", "module", "file"])
def test_an_output_without_a_configuration_says_so(kind: str, tmp_path: Path, caplog: Any) -> None:
    """In the log and in the card."""
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


def test_every_other_file_of_the_base_is_copied_as_it_is(tmp_path: Path) -> None:
    """Also a generation_config that transformers would not save; no code, no other weights."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={"model_type": "x"}, tokenizer={"a": 1})
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.1}')
    (base / "chat_template.jinja").write_text("{{ x }}")
    (base / "merges.txt").write_text("a b\n")
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "tf_model.h5", "modeling_x.py"):
        (base / name).write_text("{}")
    (base / "model.safetensors.index.json").unlink()
    merger = fresh(base)
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    ours = {"model.safetensors", MASTER_FILE, STATE_FILE, LEDGER_FILE, "README.md"}
    others = {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt"}
    assert {path.name for path in out.iterdir()} == ours | others
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in others)
