"""What looks like a model and is none: named, with the way to a model that can be merged."""

import argparse
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoint_files import in_folder
from safetensors.torch import save_file
from tiny import Add, Tensors
from torch import nn

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger


def refusal(source: Any) -> str:
    """The same sentence whichever side the model is given as."""
    messages = []
    for merge in (lambda: ContinualMerger(source), lambda: ContinualMerger(tiny.tower(), Add()).fold(source, "task")):
        with pytest.raises(CheckpointError) as caught:
            merge()
        messages.append(str(caught.value).removeprefix("task 'task': "))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


# quantised


def packed(*parts: str) -> Tensors:
    """A tower whose first feed-forward matrix is stored in the parts of a quantiser."""
    tensors = tiny.tower()
    weight = tensors.pop(tiny.FC1)
    stem = tiny.FC1.removesuffix("weight")
    for part in parts:
        tensors[stem + part] = weight.to(torch.int8) if part == "weight" else torch.zeros(4, 4, dtype=torch.int32)
    return tensors


QUANTISED = {
    "gptq": packed("qweight", "qzeros", "scales", "g_idx"),
    "awq": packed("qweight", "qzeros", "scales"),
    "bitsandbytes 8 bit": packed("weight", "SCB", "weight_format"),
    "bitsandbytes 4 bit": packed("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "hqq": packed("W_q", "meta"),
    "compressed-tensors": packed("weight_packed", "weight_scale", "weight_shape"),
    "fp8": packed("weight", "weight_scale_inv"),
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("told", [True, False])
def test_a_quantised_model_is_refused_by_name(kind: str, told: bool, tmp_path: Path) -> None:
    """By the names of its tensors, and by the name that its configuration gives the quantiser."""
    method = kind.split()[0]
    config = {"quantization_config": {"quant_method": method}} if told else {}
    message = refusal(tiny.folder_of(tmp_path / "model", QUANTISED[kind], config=config))
    assert str(tmp_path / "model") in message
    assert f"`{tiny.FC1.removesuffix('weight')}" in message
    assert "quantised weight" in message
    assert "float32, bfloat16 or float16" in message
    if told:
        assert f"({method})" in message


def test_a_model_with_a_stale_quantiser_in_its_configuration_is_read(tmp_path: Path) -> None:
    """What counts is what the tensors are."""
    config = {"quantization_config": {"quant_method": "gptq"}}
    folder = tiny.folder_of(tmp_path / "model", tiny.tuned(tiny.tower(), 1), config=config)
    assert ContinualMerger(tiny.tower(), Add()).fold(folder, "task").notes == ()


def test_a_quantised_text_tower_is_no_obstacle() -> None:
    """Only the vision tower is looked at."""
    tensors = tiny.renamed(tiny.tower(), "", "vision_model.") | {"text_model.fc1.qweight": torch.zeros(2, 2).int()}
    assert open_checkpoint(tensors)["text_model.fc1.qweight"].dtype == torch.int32


# cut into shards


def dcp(path: Path) -> Path:
    """As torch.distributed.checkpoint writes it."""
    import torch.distributed.checkpoint as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.save({"model": tiny.tower()}, checkpoint_id=path)
    return path


def fsdp_of_accelerate(path: Path) -> Path:
    """A trainer's folder with the shards one level down."""
    (path / "trainer_state.json").parent.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    dcp(path / "pytorch_model_fsdp_0")
    return path


def deepspeed(path: Path) -> Path:
    step = path / "global_step10"
    step.mkdir(parents=True)
    (path / "latest").write_text("global_step10")
    (path / "zero_to_fp32.py").write_text("")
    torch.save({"module": tiny.tower(), "ds_version": "0.15"}, step / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return path


def deepspeed_of_lightning(path: Path) -> Path:
    """The strategy's checkpoint is a folder with the name of a file."""
    inner = path.with_suffix(".ckpt") / "checkpoint"
    inner.mkdir(parents=True)
    torch.save({"module": tiny.tower()}, inner / "mp_rank_00_model_states.pt")
    return path.with_suffix(".ckpt")


def megatron(path: Path) -> Path:
    inner = path / "iter_0000100" / "mp_rank_00"
    inner.mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("100")
    torch.save({"args": argparse.Namespace(tp=2), "model": tiny.tower()}, inner / "model_optim_rng.pt")
    return path


def llama(path: Path) -> Path:
    path.mkdir()
    (path / "params.json").write_text("{}")
    for rank in range(2):
        torch.save(tiny.tower(), path / f"consolidated.0{rank}.pth")
    return path


SHARDED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "FSDP, DCP": (dcp, r"distributed checkpoint.*dcp_to_torch_save"),
    "FSDP by accelerate": (fsdp_of_accelerate, r"distributed checkpoint.*accelerate merge-weights"),
    "DeepSpeed": (deepspeed, r"DeepSpeed ZeRO.*zero_to_fp32\.py"),
    "DeepSpeed by Lightning": (deepspeed_of_lightning, r"DeepSpeed ZeRO.*zero_to_fp32\.py"),
    "Megatron": (megatron, r"Megatron.*Hugging Face folder"),
    "tensor parallel": (llama, r"tensor parallelism.*Hugging Face folder"),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_a_checkpoint_in_the_shards_of_a_framework_is_refused_with_the_way_to_gather_it(
    kind: str, tmp_path: Path
) -> None:
    """The folder, and each file of it that is given by its path."""
    make, remedy = SHARDED[kind]
    folder = make(tmp_path / "model")
    message = refusal(folder)
    assert message.startswith(f"{folder} holds ")
    assert re.search(remedy, message)
    shards = [path for path in folder.rglob("*") if path.suffix in (".pt", ".pth", ".distcp")]
    assert shards
    for path in shards:
        message = refusal(path)
        assert message.startswith(f"{path} is ")
        assert re.search(remedy, message)


def test_flat_parameters_are_called_slices() -> None:
    """A sharded state dict of FSDP that was saved as if it were whole."""
    tensors = tiny.tower() | {"_fsdp_wrapped_module._flat_param": torch.zeros(100)}
    assert "`_fsdp_wrapped_module._flat_param` is a slice of an FSDP model; save its full state dict" in refusal(
        tensors
    )


def test_the_names_of_wrapped_modules_are_no_obstacle() -> None:
    """FSDP and activation checkpointing in the middle of names of a full state dict."""
    expert = tiny.tuned(tiny.tower(), 1)
    wrapped = {
        "_fsdp_wrapped_module." + re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name): tensor
        for name, tensor in expert.items()
    }
    merger, expected = (ContinualMerger(tiny.tower(), Add()) for _ in range(2))
    merger.fold(wrapped, "task")
    expected.fold(expert, "task")
    assert merger.fingerprint() == expected.fingerprint()


# other frameworks


FILES = {
    "tf_model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "TensorFlow"),
    "weights.h5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5"),
    "flax_model.msgpack": (b"\x81\xa6params" + bytes(60), "Flax"),
    "model.onnx": (b"\x08\x08\x12\x07pytorch" + bytes(60), "graph for inference"),
    "openvino_model.xml": (b"<?xml version='1.0'?>", "graph for inference"),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
    "model.ckpt.index": (b"\0" * 60, "TensorFlow"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_framework_is_named(name: str, tmp_path: Path) -> None:
    content, kind = FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message
    assert kind in message


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"weights.h5"}))
def test_a_folder_of_another_framework_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(FILES[name][0])
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path} holds {name}, ")
    assert FILES[name][1] in message


def test_pytorch_weights_win_over_those_of_other_frameworks(tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / "model", tiny.tower())
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    assert len(open_checkpoint(folder)) == len(tiny.tower())


def test_a_pipeline_of_several_models_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    for part in ("unet", "vae", "text_encoder"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
        save_file({"x": torch.zeros(1)}, tmp_path / part / "diffusion_pytorch_model.safetensors")
    assert "diffusers pipeline" in refusal(tmp_path)
    assert "(text_encoder, unet, vae)" in refusal(tmp_path)
    assert list(open_checkpoint(tmp_path / "unet")) == ["x"]


def test_a_numpy_file_under_the_name_of_weights_is_named(tmp_path: Path) -> None:
    import numpy as np

    with (tmp_path / "model.bin").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "is a NumPy array" in refusal(tmp_path / "model.bin")


def test_an_exported_program_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)), tmp_path / "model.pt2")
    assert "exported program" in refusal(tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_factors_without_their_settings_are_named(tmp_path: Path) -> None:
    """A PEFT model's whole state dict, a lone adapter file, and a file of another LoRA trainer."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.hf_vision(), LoraConfig(target_modules=["q_proj"]))
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    assert "lora_A.default.weight` is a factor of an adapter" in refusal(tmp_path / "whole.pt")
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    assert "merge_and_unload" in refusal(tmp_path / "adapter" / "adapter_model.safetensors")
    kohya = {"lora_unet_down_blocks_0.lora_down.weight": torch.zeros(2, 4)}
    assert "is a factor of an adapter" in refusal(kohya)


# no weights at all

LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"4d7a214614ab2935c943f9e0ff69d22e" * 2
    + b"\nsize 1234\n"
)

HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>not found</body></html>\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_recognised(name: str, tmp_path: Path) -> None:
    folder = in_folder(tmp_path, name, LFS)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*git-lfs pointer of {len(LFS)} bytes.*git lfs pull"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [HTML, HTML * 40, b"", b"\0", b"GGUF\x03\0\0\0" + bytes(60)], ids=repr)
def test_no_weights_under_the_name_of_weights(name: str, content: bytes, tmp_path: Path) -> None:
    """A web page, an empty file, another format; the file is named."""
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "broken" / name))):
        open_checkpoint(in_folder(tmp_path, name, content))


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(60))
    with pytest.raises(CheckpointError, match=r"model\.gguf.*GGUF.*float32, bfloat16 or float16"):
        open_checkpoint(tmp_path / "model.gguf")
