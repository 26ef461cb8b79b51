"""Which library loads an output, where it looks for the weights, and with which call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safemerge_pl.checkpoints.open import Checkpoint, weight_file
from safemerge_pl.checkpoints.refusals import read_config
from safemerge_pl.output.base_folder import module_paths
from safemerge_pl.output.files import DIFFUSERS_STEM, MISTRAL_STEM, OPEN_CLIP_STEM, WEIGHTS_STEM, weights_stem
from safemerge_pl.runtime.files import read_object

__all__ = ["Loader", "find_loader"]


class Loader(NamedTuple):
    """How an output is loaded.

    Attributes:
        stem: name of the weight file without its ending.
        shards: whether the library reads weights in shards.
        library: its name on the hub; ``None`` if it is not known.
        use: a sentence that says how to load it; empty if it is not known.
    """

    stem: str
    shards: bool
    library: str | None = None
    use: str = ""


def find_loader(base: Checkpoint, *, code: bool = False) -> Loader:
    """The loader of an output that is completed with the files of a base model: that of the base.

    Args:
        base: the model.
        code: the model's own Python files are in the output.

    Example:
        >>> from safemerge_pl.checkpoints.open import open_checkpoint
        >>> from safemerge_pl.zoo import Zoo
        >>> find_loader(open_checkpoint(Zoo().model)).library
        'transformers'
    """
    if base.folder is None:
        return Loader(WEIGHTS_STEM, shards=True)
    file = weight_file(base.folder)
    stem = WEIGHTS_STEM if file is None else weights_stem(file.name)
    return _BY_STEM[stem](base.folder, code)


def _diffusers(folder: Path, code: bool) -> Loader:
    kind = read_config(folder).get("_class_name")
    use = f"`diffusers.{kind}.from_pretrained(folder)` loads it." if isinstance(kind, str) else ""
    return Loader(DIFFUSERS_STEM, True, "diffusers", use)


def _mistral(folder: Path, code: bool) -> Loader:
    file = weight_file(folder)
    sharded = file is not None and file.name.endswith(".index.json")
    if file is not None and file.suffix == ".pth":
        use = "Meta's own code reads pickles: load these tensors and `torch.save` them as `consolidated.00.pth`."
        return Loader(MISTRAL_STEM, False, None, use)
    if not (folder / "params.json").exists():
        return Loader(MISTRAL_STEM, sharded)
    if sharded:  # as vLLM reads it; mistral-inference takes one file
        return Loader(MISTRAL_STEM, True, "vllm", "`vllm.LLM(folder, load_format='mistral', ...)` loads it.")
    use = "`mistral_inference.transformer.Transformer.from_folder(folder)` loads it."
    return Loader(MISTRAL_STEM, False, "mistral-inference", use)


def _open_clip(folder: Path, code: bool) -> Loader:
    use = "`open_clip.create_model_and_transforms('local-dir:' + folder)` loads it."
    known = (folder / "open_clip_config.json").exists()
    return Loader(OPEN_CLIP_STEM, False, "open_clip" if known else None, use if known else "")


def _plain(folder: Path, code: bool) -> Loader:
    """Libraries that look for ``model.safetensors``, the ones that wrap a model of another before that one."""
    config = read_config(folder)
    if (folder / "modules.json").exists():
        return _sentence_transformers(folder)
    if (folder / "artifact.metadata").exists():
        use = "`colbert.modeling.checkpoint.Checkpoint(folder, colbert_config=...)` loads it, with its head."
        return Loader(WEIGHTS_STEM, False, "colbert", use)
    if "architecture" in config and "model_type" not in config:
        return Loader(
            WEIGHTS_STEM, False, "timm", "`timm.create_model('local-dir:' + folder, pretrained=True)` loads it."
        )
    if config:
        return Loader(WEIGHTS_STEM, True, "transformers" if _known(config) else None, _auto_model(config, code))
    only_open_clip = (folder / "open_clip_config.json").exists()
    return _open_clip(folder, code)._replace(stem=WEIGHTS_STEM) if only_open_clip else Loader(WEIGHTS_STEM, True)


def _known(config: dict[str, Any]) -> bool:
    return "model_type" in config or "architectures" in config


def _auto_model(config: dict[str, Any], code: bool) -> str:
    if not _known(config):
        return ""
    if "auto_map" not in config:
        return "`AutoModel.from_pretrained(folder)` (or the model's own class) loads it."
    if code:
        return "`AutoModel.from_pretrained(folder, trust_remote_code=True)` loads it, and runs the model's own code."
    return "The model's own code is not here: copy it from the base, or load it with the class that you have."


def _sentence_transformers(folder: Path) -> Loader:
    """Sentence-transformers, and the libraries that put a head of their own behind its models."""
    loads, library = "sentence_transformers.SentenceTransformer(folder)", "sentence-transformers"
    kind = read_object(folder / "config_sentence_transformers.json").get("model_type")
    if (folder / "config_setfit.json").exists() or any(folder.glob("model_head.*")):
        loads, library = "setfit.SetFitModel.from_pretrained(folder)", "setfit"
    elif kind == "ColBERT":
        loads, library = "pylate.models.ColBERT(folder)", "PyLate"
    elif kind in ("SparseEncoder", "CrossEncoder"):
        loads = f"sentence_transformers.{kind}(folder)"
    parts = f", with the layers in {', '.join(module_paths(folder))}" if module_paths(folder) else ""
    return Loader(WEIGHTS_STEM, True, library, f"`{loads}` loads it{parts}.")


_BY_STEM: dict[str, Callable[[Path, bool], Loader]] = {
    DIFFUSERS_STEM: _diffusers,
    MISTRAL_STEM: _mistral,
    OPEN_CLIP_STEM: _open_clip,
    WEIGHTS_STEM: _plain,
}
