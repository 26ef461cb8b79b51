"""Open any checkpoint lazily: one mapping from tensor name to tensor, whatever it was stored in.

Shapes and dtypes come from headers, tensors are read one at a time, and no code from a checkpoint is ever run.
"""

import hashlib
import json
import re
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from safemerge_pl.layers import vision_only

__all__ = ["Checkpoint", "CheckpointError", "Source", "fingerprint", "match_names", "open_checkpoint"]

Source = Mapping[str, Tensor] | nn.Module | str | Path
"""What a model can be given as: tensors by name, a module, or a file, folder or hub id."""

_WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
"""Looked for in a folder in this order: safetensors win over pickles."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence with the file, the tensor and the remedy."""


class Checkpoint(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for.

    Attributes:
        source: where it came from, for messages and reports.
        folder: the folder it was found in, ``None`` for anything else.
    """

    source: str
    folder: Path | None = None

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: self.shape(name) for name in self}


class _Memory(Checkpoint):
    """Tensors that are in memory (or memory-mapped) already."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str, folder: Path | None = None) -> None:
        self._tensors, self.source, self.folder = dict(tensors), source, folder

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype


class _Safetensors(Checkpoint):
    """One or more safetensors files; each header is read once, each tensor when asked for."""

    def __init__(self, files: Sequence[Path], source: str, folder: Path | None = None) -> None:
        self.source, self.folder = source, folder
        self._entries: dict[str, tuple[Path, dict[str, Any]]] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: tensor `{name}` also stands in {self._entries[name][0].name}.")
                self._entries[name] = (file, entry)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self._entries[name][0]
        with safe_open(file, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][1]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        code = self._entries[name][1]["dtype"]
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self._entries[name][0]}: tensor `{name}` is stored as {code}, which cannot be merged; "
                "give the model in float32, bfloat16 or float16."
            )
        return _DTYPES[code]


def open_checkpoint(source: Source, *, revision: str | None = None) -> Checkpoint:
    """Open a model given as tensors, module, file, folder or hub id.

    Args:
        source: a mapping from name to tensor, an ``nn.Module``, the path of a ``.safetensors`` file, of a ``.bin``,
            ``.pt``, ``.pth`` or ``.ckpt`` file (read with ``weights_only=True``), of a folder that holds weights (one
            file, or sharded with an index), or a hub id ``owner/name``. An existing path wins over a hub id.
        revision: branch, tag or commit, for a hub id.

    Raises:
        CheckpointError: if nothing usable is there.

    Example:
        >>> checkpoint = open_checkpoint({"fc1.weight": torch.zeros(3, 2)})
        >>> list(checkpoint), checkpoint.shape("fc1.weight")
        (['fc1.weight'], (3, 2))
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, nn.Module):
        return _Memory(source.state_dict(), f"a {type(source).__name__} in memory")
    if isinstance(source, Mapping):
        return _Memory(_tensors_of(source, "a mapping in memory"), "a mapping in memory")
    path = Path(source).expanduser()
    if not path.exists():
        path = _download(str(source), revision)
    return _open_folder(path, str(source)) if path.is_dir() else _open_file(path, str(source), None)


def match_names(wanted: Sequence[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Find each wanted tensor in a checkpoint whose names may carry or lack wrapper and tower prefixes.

    ``_orig_mod.`` and ``module.`` are ignored anywhere; beyond that one prefix on either side may differ
    (``vision_model.``, ``model.visual.``, ...), the same for all tensors. Nothing is matched partly.

    Args:
        wanted: names in the pretrained model.
        checkpoint: the incoming model.

    Returns:
        wanted name -> name in the checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, or there are two ways to match.

    Example:
        >>> incoming = open_checkpoint({"module.encoder.fc1.weight": torch.zeros(1, 1)})
        >>> match_names(["vision_model.encoder.fc1.weight"], incoming)
        {'vision_model.encoder.fc1.weight': 'module.encoder.fc1.weight'}
    """
    available: dict[str, str] = {}
    for name in vision_only(checkpoint):
        bare = _unwrapped(name)
        if bare in available:
            raise CheckpointError(f"{checkpoint.source}: `{available[bare]}` and `{name}` are the same tensor's name.")
        available[bare] = name
    targets = {name: _unwrapped(name) for name in wanted}
    best: dict[str, str] = {}
    for mine, theirs in _prefix_pairs(list(targets.values()), available):
        matched = {
            name: available[theirs + bare[len(mine) :]]
            for name, bare in targets.items()
            if theirs + bare[len(mine) :] in available
        }
        if len(matched) == len(targets) == len(best) and matched != best:
            raise CheckpointError(
                f"{checkpoint.source} holds the model twice, as `{next(iter(best.values()))}` and as "
                f"`{next(iter(matched.values()))}`; give the tensors of one of them."
            )
        if len(matched) > len(best):
            best = matched
    missing = [name for name in wanted if name not in best]
    if missing:
        found = f"; it has, for example, `{next(iter(checkpoint))}`" if not best and len(checkpoint) else ""
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} of {len(wanted)} tensors to merge, first `{missing[0]}`{found}: "
            "is it a fine-tune of this pretrained model?"
        )
    return best


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, as 64 hexadecimal digits.

    Example:
        >>> fingerprint([("a", torch.zeros(2))]) == fingerprint([("a", torch.zeros(2))])
        True
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unwrapped(name: str) -> str:
    """A name without the marks that torch.compile and DistributedDataParallel leave."""
    return re.sub(r"(?:^|(?<=\.))(?:_orig_mod|module)\.", "", name)


def _prefix_pairs(targets: list[str], available: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs (prefix to drop from the wanted names, prefix to put instead) that fit the first wanted name."""
    first, pairs = targets[0], []
    cuts = [0, *(match.end() for match in re.finditer(r"\.", first))]
    for cut in cuts:
        mine, core = first[:cut], first[cut:]
        if not all(target.startswith(mine) for target in targets):
            break
        theirs = [name[: -len(core)] for name in available if name == core or name.endswith("." + core)]
        pairs += [(mine, prefix) for prefix in theirs if not cut or not prefix.endswith(mine)]
    return pairs


def _open_folder(folder: Path, source: str) -> Checkpoint:
    for candidate in _WEIGHT_FILES:
        if (folder / candidate).exists():
            return _open_file(folder / candidate, source, folder)
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} is a PEFT adapter; merge it into its base model first (merge_and_unload).")
    loose = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(loose) == 1:
        return _open_file(folder / loose[0], source, folder)
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(_WEIGHT_FILES)}.")


def _open_file(path: Path, source: str, folder: Path | None) -> Checkpoint:
    if path.name.endswith(".index.json"):
        shards = _shards(path)
        if path.name == "model.safetensors.index.json":
            return _Safetensors(shards, source, folder)
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors |= _load_pickle(shard)
        return _Memory(tensors, source, folder)
    if path.suffix == ".safetensors":
        return _Safetensors([path], source, folder)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return _Memory(_load_pickle(path), source, folder)
    raise CheckpointError(f"{path} is not a checkpoint: expected .safetensors, .bin, .pt, .pth or .ckpt.")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a shard index: {error}.") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} points outside its folder: {outside[0]!r}.")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(f"{index}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}.")
    return [index.parent / name for name in names]


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Header of a safetensors file, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            if start.startswith(b"version"):
                raise CheckpointError(
                    f"{path} is a git-lfs pointer of {size} bytes, not the weights: run `git lfs pull`."
                )
            raise CheckpointError(f"{path} ({size} bytes) is truncated or no safetensors file: fetch it again.")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} ({size} bytes) is no safetensors file: its header is not readable."
            ) from error
    if max(ends, default=0) + length + 8 != size:
        raise CheckpointError(
            f"{path} ({size} bytes) is truncated: its header promises {max(ends, default=0)} bytes of data."
        )
    header.pop("__metadata__", None)
    return header


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a torch file, by the weights-only loader alone."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # every refusal of the loader is the same to the user: it is not plain tensors
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({reason}); load it where you trust it and save its state dict "
            "as safetensors."
        ) from error
    return _tensors_of(content, str(path))


def _tensors_of(content: Any, source: str) -> dict[str, Tensor]:
    """The tensors of a state dict, or of the ``state_dict`` or ``model`` inside a training checkpoint."""
    if isinstance(content, Mapping):
        inner = [key for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)]
        if inner:
            return _tensors_of(content[inner[0]], source)
        tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise CheckpointError(f"{source} holds no tensors by name: expected a state dict.")


def _download(source: str, revision: str | None) -> Path:
    """Folder of a hub model in the local cache, fetched if the hub is reachable."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        raise CheckpointError(f"{source} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.bin"]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{source} is neither a local path nor a hub model that can be fetched ({reason}); give a local folder."
        ) from error
