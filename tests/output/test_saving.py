"""Merged models in their folders: tied tensors, templates, dtypes, and what the libraries load."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from folders import beside, clip_folder, loading_info
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FC1, Add, Tensors, assert_same, copied, folded, fresh, tower, tuned
from torch import nn

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge
from safemerge_pl.output.files import CARD_FILE, LEDGER_FILE, MASTER_FILE, STATE_FILE
from safemerge_pl.output.saving import output_size
from safemerge_pl.zoo import FILES


def test_a_tensor_with_two_names_is_merged_once_and_saved(tmp_path: Path) -> None:
    module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    base = copied(module.state_dict())
    merger = ContinualMerger(module, Add(), layers=["*.weight"])
    incoming = {name: tensor + 1 if name.endswith("weight") else tensor for name, tensor in base.items()}
    merger.fold(incoming, "ones")
    for name in ("a.weight", "b.weight"):
        torch.testing.assert_close(merger.merged[name], base[name] + 1)
    saved = load_file(merger.save(tmp_path / "out") / "model.safetensors")
    assert sorted(saved) == sorted(base)
    torch.testing.assert_close(saved["b.weight"], base["a.weight"] + 1)


def tied_t5(kind: str, tmp_path: Path) -> Any:
    model = tiny.hf_t5()
    assert model.shared.weight.data_ptr() == model.encoder.embed_tokens.weight.data_ptr()
    if kind == "module":
        return model
    if kind == "mapping":
        return model.state_dict()
    if kind == "file":
        torch.save(model.state_dict(), tmp_path / "t5.pt")
        return tmp_path / "t5.pt"
    (tmp_path / "t5").mkdir()
    if kind == "pickle in a folder":
        torch.save(model.state_dict(), tmp_path / "t5" / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path / "t5")
    else:
        model.save_pretrained(tmp_path / "t5")  # drops all names but one of a tied tensor
    return tmp_path / "t5"


@pytest.mark.parametrize("kind", ["module", "mapping", "file", "pickle in a folder", "save_pretrained"])
def test_tied_embeddings_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """Safetensors refuses aliases; whatever base holds them, the output can be written and read."""
    base = tied_t5(kind, tmp_path)
    model = tiny.hf_t5()
    merger = fresh(base)
    merger.fold(tuned(model.state_dict(), 1), "a")
    saved = load_file(merger.save(tmp_path / "out") / "model.safetensors")
    assert sorted(saved) == sorted(open_checkpoint(base))
    missing, unexpected = model.load_state_dict(saved, strict=False)
    assert not unexpected
    assert set(missing) <= {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert_same({n: t for n, t in model.state_dict().items() if n in saved}, {n: merger.merged[n] for n in saved})


def test_overlapping_views_in_memory_are_saved(tmp_path: Path) -> None:
    """One buffer, and the part of it that another name shows."""
    table = tiny.randn(8, 4)
    template = tower() | {"table": table, "head": table[:4], "row": table[0]}
    saved = load_file(folded(1).save(tmp_path / "out", template=template) / "model.safetensors")
    assert torch.equal(saved["head"], table[:4])
    assert torch.equal(saved["row"], table[0])


@pytest.mark.parametrize("where", ["pretrained", "incoming", "template"])
def test_tensors_that_are_not_contiguous_are_folded_and_saved(where: str, tmp_path: Path) -> None:

    def strided(tensors: Tensors) -> Tensors:
        found = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in tensors.items()}
        assert not found[FC1].is_contiguous()
        return found

    base, incoming = tower(), tuned(tower(), 1)
    merger = fresh(strided(base) if where == "pretrained" else base)
    merger.fold(strided(incoming) if where == "incoming" else incoming, "task1")
    merger.save(tmp_path / "out", template=strided(base) if where == "template" else None)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), folded(1).merged)


def headers(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118


def test_a_merged_clip_loads_whole_and_alone(tmp_path: Path) -> None:
    """No missing key; the vision model loads from the two-tower folder too."""
    from transformers import CLIPModel, CLIPVisionModel

    base = clip_folder(tmp_path / "base")
    merger = fresh(base)
    merger.fold(tuned(tiny.hf_clip().state_dict(), 1), "a")
    out = merger.save(tmp_path / "out")
    model, info = loading_info(CLIPModel, out)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(model.state_dict(), {name: t.half() for name, t in merger.merged.items()})
    vision, info = loading_info(CLIPVisionModel, out)
    assert not info["missing_keys"]
    for name, tensor in tiny.tower_of(vision).state_dict().items():
        assert torch.equal(tensor, merger.merged[f"vision_model.{name}"].half())


def test_a_merged_vision_model_loads(tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    merger = fresh(clip_folder(tmp_path / "base", "vision"))
    merger.fold(tuned(tiny.hf_vision().state_dict(), 1), "a")
    model, info = loading_info(CLIPVisionModel, merger.save(tmp_path / "out"))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    own = {name.removeprefix("vision_model."): tensor.half() for name, tensor in merger.merged.items()}
    assert_same(tiny.tower_of(model).state_dict(), own)


def test_a_vision_merge_completes_the_two_tower_template(tmp_path: Path) -> None:
    """Names with and without prefix; the text tower is the template's."""
    from transformers import CLIPModel

    base = clip_folder(tmp_path / "base")
    module, _ = loading_info(CLIPModel, base)
    merger = fresh(module.vision_model)
    merger.fold(tuned(module.vision_model.state_dict(), 1), "a")
    model, info = loading_info(CLIPModel, merger.save(tmp_path / "out", template=base))
    assert not info["missing_keys"]
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, module.state_dict()[name])
    }
    assert changed == {f"vision_model.{name}" for name in merger.merged_parameters()}
    for name, tensor in merger.merged_parameters().items():
        assert torch.equal(model.state_dict()[f"vision_model.{name}"], tensor.half())


def test_a_template_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lacks"):
        folded(1).save(tmp_path / "out", template={"other.weight": torch.zeros(2, 2)})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def zoo_merge(tmp_path_factory: pytest.TempPathFactory) -> tuple[ContinualMerger, Path]:
    """The zoo's CLIP with two experts folded in, and its folder."""
    merger = ContinualMerger(FILES / "model", SafeMerge(scoring_rank=21, recovery_rank=11, task_rank=2, num_steps=2))
    for task in ("mnist", "flags"):
        merger.fold(FILES / "experts" / task, task)
    return merger, merger.save(tmp_path_factory.mktemp("zoo") / "out")


def test_the_merged_zoo_loads_with_its_processor_and_tokenizer(zoo_merge: tuple[ContinualMerger, Path]) -> None:
    """Nothing but the folder is needed, offline."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, CLIPModel, CLIPVisionModel

    merger, out = zoo_merge
    model, info = loading_info(CLIPModel, out)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(model.state_dict(), {name: tensor.half() for name, tensor in merger.merged.items()})
    assert not loading_info(CLIPVisionModel, out)[1]["missing_keys"]
    with tiny.seeded():
        tokens = AutoTokenizer.from_pretrained(out)("a drawing of a cat").input_ids
        assert tokens == AutoTokenizer.from_pretrained(FILES / "model")("a drawing of a cat").input_ids
        assert AutoImageProcessor.from_pretrained(out).size == AutoImageProcessor.from_pretrained(FILES / "model").size
        assert AutoProcessor.from_pretrained(out).tokenizer("a cat").input_ids


def test_the_merged_zoo_is_as_large_as_its_base_plus_masters(zoo_merge: tuple[ContinualMerger, Path]) -> None:
    """No task vectors, no second copy."""
    merger, out = zoo_merge
    masters = sum(4 * tensor.numel() for tensor in merger.merged_parameters().values())
    size = sum(file.stat().st_size for file in out.rglob("*"))
    assert size < 1.02 * (sum(file.stat().st_size for file in (FILES / "model").iterdir()) + masters)
    assert headers(out / "model.safetensors") == headers(FILES / "model" / "model.safetensors")


def test_a_zoo_expert_is_a_base_as_well(tmp_path: Path) -> None:
    """A `CLIPVisionModel` folder with the older prefix."""
    from transformers import CLIPVisionModel

    merger = ContinualMerger(FILES / "experts" / "mnist", Add())
    merger.fold(FILES / "experts" / "flags", "flags")
    model, info = loading_info(CLIPVisionModel, merger.save(tmp_path / "out"))
    assert not info["missing_keys"]
    name = "encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(tiny.tower_of(model).state_dict()[name], merger.merged[f"vision_model.{name}"].half())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_the_dtype_asked_for_is_the_dtype_written(dtype: Any, stored: torch.dtype, tmp_path: Path) -> None:
    """Every float tensor, no integer, and the configuration agrees."""
    config = {"model_type": "clip_vision_model", "torch_dtype": "float16"}
    base = tower(dtype=stored)
    merger = fresh(tiny.folder_of(tmp_path / "base", base, config=config))
    merger.fold(tuned(base, 1), "a")
    out = merger.save(tmp_path / "out", dtype=dtype)
    code = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    found = headers(out / "model.safetensors")
    assert found.pop("embeddings.position_ids") == "I64"
    assert set(found.values()) == {code}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "clip_vision_model", "dtype": dtype}
    assert set(headers(out / MASTER_FILE).values()) == {"F32"}
    saved = load_file(out / "model.safetensors")
    assert torch.equal(saved[FC1], merger.merged[FC1].to(getattr(torch, dtype)))


def test_a_two_tower_model_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    """The nested configurations agree too."""
    from transformers import CLIPModel

    merger = fresh(clip_folder(tmp_path / "base"))
    merger.fold(tuned(tiny.hf_clip().state_dict(), 1), "a")
    out = merger.save(tmp_path / "out", dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    parts = [config, config["text_config"], config["vision_config"]]
    assert {part[key] for part in parts for key in ("dtype", "torch_dtype") if key in part} == {"bfloat16"}
    model, _ = loading_info(CLIPModel, out)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_same_dtype_means_that_of_each_tensor(tmp_path: Path) -> None:
    """Norms in float32 among float16 weights; the configuration is copied byte for byte."""
    base = tower(dtype=torch.float16) | {"pre_layrnorm.weight": torch.ones(8)}
    folder = tiny.folder_of(tmp_path / "base", base, config={"dtype": "float16", "x": [1, 2]})
    merger = fresh(folder)
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    assert headers(out / "model.safetensors") == headers(folder / "model.safetensors")
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_the_file_says_its_format(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    for file in ("model.safetensors", MASTER_FILE):
        with safe_open(out / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_small_updates_survive_in_the_masters(tmp_path: Path) -> None:
    """A bfloat16 output rounds them away, the float32 masters do not."""
    base = tower(dtype=torch.bfloat16)
    merger = ContinualMerger(base, Add())
    merger.fold({name: t.float() + 1e-6 if t.is_floating_point() else t for name, t in base.items()}, "tiny step")
    out = merger.save(tmp_path / "out")
    assert torch.equal(load_file(out / "model.safetensors")[FC1], base[FC1])
    torch.testing.assert_close(
        load_file(out / MASTER_FILE)[FC1] - base[FC1].float(), torch.full((16, 8), 1e-6), rtol=0.2, atol=0
    )


def test_a_sharded_base_becomes_one_file_without_a_stale_index(tmp_path: Path) -> None:
    """An index that points to shards that are not there would break every reader."""
    base = tower()
    names = list(base)
    where = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
    (tmp_path / "base").mkdir()
    for file in set(where.values()):
        save_file({name: base[name] for name in names if where[name] == file}, tmp_path / "base" / file)
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    merger = fresh(tmp_path / "base")
    merger.fold(tuned(base, 1), "task1")
    out = merger.save(tmp_path / "out")
    assert not list(out.glob("*.index.json"))
    assert_same(load_file(out / "model.safetensors"), folded(1).merged)


def test_a_base_of_symlinks_gives_a_folder_of_files(tmp_path: Path) -> None:
    """The snapshot folder of the hub's cache."""
    blobs = tiny.folder_of(tmp_path / "blobs", tower(), config={"model_type": "x"})
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    merger = fresh(snapshot)
    merger.fold(tuned(tower(), 1), "task1")
    out = merger.save(tmp_path / "out")
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "config.json").read_text() == (blobs / "config.json").read_text()
    assert_same(load_file(out / "model.safetensors"), folded(1).merged)


def test_a_merge_that_somebody_else_continued_is_not_overwritten(tmp_path: Path) -> None:
    """Two people load the same merge; the second to save would undo what the first has folded."""
    out = folded(1).save(tmp_path / "out")
    one, two = (ContinualMerger.load(out, tower()) for _ in range(2))
    one.fold(tuned(tower(), 2), "a")
    one.save(out)
    two.fold(tuned(tower(), 3), "b")
    with pytest.raises(CheckpointError, match="was continued by another process since it was read"):
        two.save(out)
    assert ContinualMerger.load(out, tower()).tasks == ["task1", "a"]
    one.fold(tuned(tower(), 3), "b")
    one.save(out)
    two.save(tmp_path / "elsewhere")
    assert beside(out) == ["elsewhere"]


def test_masters_that_wait_on_disk_follow_the_output(tmp_path: Path) -> None:
    """With a workspace they are read from the output itself, whose files get other names here."""
    out = folded(1).save(tmp_path / "out", max_shard_size=600)
    merger = ContinualMerger.load(out, tower(), workspace=tmp_path / "work")
    merger.save(out)
    assert not (out / f"{MASTER_FILE}.index.json").exists()
    merger.fold(tuned(tower(), 2), "task2")
    assert merger.fingerprint() == folded(1, 2).fingerprint()
    merger.save(out, max_shard_size=600)
    assert ContinualMerger.load(out, tower()).fingerprint() == merger.fingerprint()


@pytest.mark.parametrize("dtype", ["same", "float16", "float32"])
def test_the_size_of_an_output_is_known_before_it_is_written(dtype: Any, tmp_path: Path) -> None:
    """What the check of a stream says, what is refused on a full disk, and what is written: one number."""
    base = tiny.folder_of(tmp_path / "base", tower(dtype=torch.float16), config={"a": "b" * 1000})
    merger = ContinualMerger(base, Add())
    merger.fold(tuned(tower(), 1), "a")
    promised = output_size(merger.plan, merger.pretrained, dtype)
    out = merger.save(tmp_path / "out", dtype=dtype)
    written = sum(path.stat().st_size for path in out.iterdir())
    ours = sum((out / name).stat().st_size for name in (STATE_FILE, LEDGER_FILE, CARD_FILE))
    headers = sum(int.from_bytes((out / name).read_bytes()[:8], "little") + 8 for name in WEIGHTS)
    configuration = (out / "config.json").stat().st_size - (base / "config.json").stat().st_size
    assert promised == written - ours - headers - configuration + 2**20


WEIGHTS = ("model.safetensors", MASTER_FILE)
