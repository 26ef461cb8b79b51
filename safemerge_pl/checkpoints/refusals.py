"""Recognise files that are not mergeable weights, and say what to do instead."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.files import read_object

__all__ = [
    "META_FILE",
    "WEIGHT_ENDINGS",
    "is_whole",
    "read_config",
    "refuse_folder",
    "refuse_impostor",
    "refuse_packed",
]

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

META_FILE = "consolidated.00.pth"
"""Meta's own file of a model, or of its first part."""

_PLAIN = "give the model in float32, bfloat16 or float16"
_BY_START = {
    b"version https://git-lfs": "a git-lfs pointer of {size} bytes, not the weights; run `git lfs pull`",
    b"GGUF": f"a quantised GGUF file; {_PLAIN}",
    b"\x89HDF\r\n": "an HDF5 file (Keras, TensorFlow); load it with its library and save it as safetensors",
    b"\x93NUMPY": "a NumPy array; save the model as safetensors",
}
_GATHER_DCP = (
    "gather it first: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`, or `accelerate merge-weights`"
)
_GATHER_ZERO = "gather it first with the `zero_to_fp32.py` that lies in the checkpoint's folder"
_GATHER_MEGATRON = "convert it to a Hugging Face folder with the converter of its training framework"
_FLAX = "load it with `from_pretrained(..., from_flax=True)` of a transformers 4 release and save it as safetensors"
_TENSORFLOW = "load it with `from_pretrained(..., from_tf=True)` of a transformers 4 release and save it as safetensors"
_RUNTIME = "a graph for inference; give the PyTorch model that it was exported from"

_BY_NAME = (
    (r".*zero_pp_rank_\d+_mp_rank_\d+_\w+_states\.pt|mp_rank_\d+_model_states\.pt", f"DeepSpeed ZeRO; {_GATHER_ZERO}"),
    (r"model_optim_rng\.pt|distrib_optim\.pt", f"Megatron; {_GATHER_MEGATRON}"),
    (r".*\.distcp|\.metadata", f"a distributed checkpoint (FSDP, DCP); {_GATHER_DCP}"),
    (r".*\.gguf", f"a quantised GGUF file; {_PLAIN}"),
    (r"flax_model(?:-\d+-of-\d+)?\.msgpack", f"Flax; {_FLAX}"),
    (r"tf_model(?:-\d+-of-\d+)?\.h5|.*\.ckpt\.index|saved_model\.pb", f"TensorFlow; {_TENSORFLOW}"),
    (r".*\.(?:onnx|tflite|engine|mlmodel)|openvino_model\.xml", _RUNTIME),
    (r"consolidated\.\d+\.pth", "a model cut for tensor parallelism; convert it to a Hugging Face folder"),
    (r".*\.pt2", "an exported program; save the module's state dict instead"),
)

_PACKED = {
    r"qweight|qzeros|g_idx": "GPTQ or AWQ",
    r"absmax|quant_map|nested_absmax|quant_state\.bitsandbytes__\w+|SCB": "bitsandbytes",
    r"W_q": "HQQ",
    r"weight_packed|weight_zero_point|weight_scale(?:_inv)?": "compressed-tensors or FP8",
}
"""Last parts of tensor names that only quantised models have."""

_SPLIT = re.compile(r"(?:^|\.)(?:_?flat_param(?:_\d+)?)$")
_UNMERGED = re.compile(r"\.(?:lora_(?:A|B|down|up)|lora_embedding_[AB])(?:\.|$)|^lora_(?:unet|te)\w*\.")


def refuse_impostor(path: Path) -> None:
    """Refuse a file that has the name of a weight file and is none, or is one of another framework.

    Raises:
        CheckpointError: with what it is, and the remedy.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to a file that is gone; fetch it again.")
    for pattern, what in _BY_NAME:
        if re.fullmatch(pattern, path.name) and not is_whole(path):
            raise CheckpointError(f"{path} is {what}.")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, where a file of weights should be; fetch it again.")
    size = path.stat().st_size
    if not size:
        raise CheckpointError(f"{path} is empty; fetch it again.")
    with path.open("rb") as file:
        start = file.read(64)
    for magic, what in _BY_START.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path} is {what.format(size=size)}.")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page of {size} bytes, not the weights; fetch it again.")


def is_whole(path: Path) -> bool:
    """Whether a file is a model of Meta's that was not cut: the first part, and there is no second."""
    return path.name == META_FILE and not path.with_name("consolidated.01.pth").exists()


def refuse_folder(folder: Path) -> None:
    """Refuse a folder without readable weights by what it holds instead, if that is known.

    Raises:
        CheckpointError: with what it is, and the remedy.
    """
    if (folder / "model_index.json").exists():
        parts = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise CheckpointError(
            f"{folder} is a diffusers pipeline of several models; give the folder of one ({', '.join(parts)})."
        )
    for pattern, what in _BY_NAME:
        for depth in ("*", "*/*", "*/*/*"):
            for path in sorted(folder.glob(depth)):
                if re.fullmatch(pattern, path.name) and not is_whole(path):
                    raise CheckpointError(f"{folder} holds {path.relative_to(folder)}, {what}.")


def refuse_packed(names: Iterable[str], source: str, config: dict[str, Any]) -> None:
    """Refuse tensors that are quantised, cut into shards, or factors of an adapter, by their names.

    Args:
        names: of the tensors that may be merged.
        source: for the message.
        config: of the folder, which may name the quantiser.

    Raises:
        CheckpointError: naming the format and a tensor.
    """
    for name in names:
        for pattern, kind in _PACKED.items():
            if re.search(rf"(?:^|\.)(?:{pattern})$", name):
                method = (config.get("quantization_config") or {}).get("quant_method", kind)
                raise CheckpointError(f"{source}: `{name}` is a part of a quantised weight ({method}); {_PLAIN}.")
        if _SPLIT.search(name):
            raise CheckpointError(f"{source}: `{name}` is a slice of an FSDP model; save its full state dict.")
        if _UNMERGED.search(name):
            raise CheckpointError(
                f"{source}: `{name}` is a factor of an adapter that was saved without its settings; merge it into its "
                "base model (merge_and_unload), or give the folder that peft saved."
            )


def read_config(folder: Path | None) -> dict[str, Any]:
    """Read ``config.json`` of a model folder; empty if there is none or it is damaged."""
    return read_object(folder / "config.json") if folder else {}
