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


_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


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

    def storage(self, name: str) -> int | None:
        """Address of a tensor, the same for tied ones; ``None`` where none can be tied."""
        return None

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

    def storage(self, name: str) -> int | None:
        tensor = self._tensors[name]
        return None if tensor.is_meta or not tensor.numel() else tensor.data_ptr()


class _Safetensors(Checkpoint):
    """One or more safetensors files; each header is read once, each tensor when asked for."""

    def __init__(self, files: Sequence[Path], source: str, folder: Path | None = None) -> None:
        self.source, self.folder = source, folder
        self._entries: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        for file in files:
            for name, (shape, code) in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: tensor `{name}` also stands in {self._entries[name][0].name}.")
                self._entries[name] = (file, shape, code)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        self.dtype(name)
        with safe_open(self._entries[name][0], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def dtype(self, name: str) -> torch.dtype:
        file, _, code = self._entries[name]
        if code not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor `{name}` is stored as {code}, a quantised or packed weight; give the model in "
                "float32, bfloat16 or float16."
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


_TOWERS = {"vision_model", "visual", "model", "backbone", "base_model", "transformer"}
"""What a wanted name may lack in a checkpoint. Anything else at its start tells layers and towers apart."""


def _prefix_pairs(targets: list[str], available: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs (prefix to drop from the wanted names, prefix to put instead) that fit the first wanted name."""
    first, pairs = targets[0], []
    for match in re.finditer(r"^|\.", first):
        mine, core = first[: match.end()], first[match.end() :]
        if not set(mine.split(".")[:-1]) <= _TOWERS or not all(target.startswith(mine) for target in targets):
            break
        theirs = [name[: -len(core)] for name in available if name == core or name.endswith("." + core)]
        pairs += [(mine, prefix) for prefix in theirs if not mine or not prefix.endswith(mine)]
    return pairs


def _open_folder(folder: Path, source: str) -> Checkpoint:
    for candidate in _WEIGHT_FILES:
        if (folder / candidate).exists() or (folder / candidate).is_symlink():
            return _open_file(folder / candidate, source, folder)
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} is a PEFT adapter; merge it into its base model first (merge_and_unload).")
    loose = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(loose) == 1:
        return _open_file(folder / loose[0], source, folder)
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(_WEIGHT_FILES)}.")


def _open_file(path: Path, source: str, folder: Path | None) -> Checkpoint:
    if path.name.endswith(".index.json"):
        entries = _read_index(path)
        shards = [path.parent / name for name in sorted(set(entries.values()))]
        tensors: dict[str, Tensor] = {}
        if path.name.endswith(".safetensors.index.json"):
            opened: Checkpoint = _Safetensors(shards, source, folder)
        else:
            for shard in shards:
                tensors |= _load_pickle(shard)
            opened = _Memory(tensors, source, folder)
        absent = [name for name in entries if name not in opened]
        if absent:
            raise CheckpointError(f"{path} promises `{absent[0]}`, which is in no shard; fetch the checkpoint again.")
        return opened
    _refuse_impostor(path)
    if path.suffix == ".safetensors":
        return _Safetensors([path], source, folder)
    if path.suffix in _ENDINGS:
        return _Memory(_load_pickle(path), source, folder)
    raise CheckpointError(f"{path} is not a checkpoint: expected .safetensors, .bin, .pt, .pth or .ckpt.")


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name of an index, with every missing shard named at once."""
    try:
        entries: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted({Path(name).name for name in entries.values() if name})
        outside = [name for name in entries.values() if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a shard index ({error}); fetch it again.") from error
    if outside or not names:
        raise CheckpointError(f"{index} points outside its folder or nowhere: {(outside or [''])[0]!r}.")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(f"{index}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}.")
    return entries


def _refuse_impostor(path: Path) -> None:
    """Name what is not a weight file at all but has the name of one."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to a file that is gone; fetch it again.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer of {size} bytes, not the weights; run `git lfs pull`.")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page of {size} bytes, not the weights; fetch it again.")
    if start.startswith(b"GGUF"):
        raise CheckpointError(f"{path} is a quantised GGUF file; give the model in float32, bfloat16 or float16.")
    if not size:
        raise CheckpointError(f"{path} is empty; fetch it again.")


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype code of every tensor of a safetensors file; the library checks the header against the size."""
    from safetensors import SafetensorError, safe_open

    _refuse_impostor(path)
    try:
        with safe_open(path, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # no mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}); fetch it again."
        ) from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a torch file, by the weights-only loader alone."""
    _refuse_impostor(path)
    entries = _zip_entries(path)
    if any("/code/" in name for name in entries):
        raise CheckpointError(f"{path} is a TorchScript archive, a program; save the module's state dict instead.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=bool(entries))
    except Exception as error:  # every refusal of the loader is the same to the user: it is not plain tensors
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it holds a {kind[1]}" if kind else f"damaged, or not written by torch.save: {type(error).__name__}"
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({reason}); load it where you trust it and save its state dict "
            "as safetensors."
        ) from error
    return _tensors_of(content, str(path))


def _zip_entries(path: Path) -> list[str]:
    """Names inside a zip archive; none for anything else, and for a damaged one, which the loader refuses."""
    try:
        return zipfile.ZipFile(path).namelist()
    except (ValueError, NotImplementedError, OSError, zipfile.BadZipFile):
        return []


def _tensors_of(content: Any, source: str) -> dict[str, Tensor]:
    """The tensors of a state dict, or of the ``state_dict`` or ``model`` inside a training checkpoint."""
    if isinstance(content, Mapping):
        inner = [str(key) for key, value in content.items() if isinstance(value, Mapping) and _is_model(str(key))]
        if len(inner) > 1:
            raise CheckpointError(
                f"{source} holds several models ({', '.join(inner)}); save the one to merge as a state dict of its own."
            )
        if inner:
            return _tensors_of(content[inner[0]], source)
        tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise CheckpointError(f"{source} holds no tensors by name: expected a state dict.")


def _is_model(key: str) -> bool:
    """Keys under which training scripts keep a model's weights."""
    return re.fullmatch(r"(?:model|state_dict|ema)(?:_ema|_state_dict)*|model_state", key) is not None


def _download(source: str, revision: str | None) -> Path:
    """Folder of a hub model in the local cache, fetched if the hub is reachable."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith(".") or source.endswith(_ENDINGS):
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
