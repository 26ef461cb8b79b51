"""A hub cache in small: models and data sets under the names, classes and schemas of the paper's, offline."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tiny import seeded, tuned

from safemerge_pl.data import CLIPBenchmarkData
from safemerge_pl.data.image_files import open_rows
from safemerge_pl.data.image_sets import SetSpec, find_spec
from safemerge_pl.zoo import Zoo

BACKBONES = {"b32": "clip-vit-base-patch32", "b16": "clip-vit-base-patch16", "l14": "clip-vit-large-patch14"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WIDTH = 16


def snapshot(cache: Path, repo: str, kind: str = "model") -> Path:
    """Folder of a repository in the layout of the hub's cache, ``main`` pointing to it."""
    root = cache / f"{kind}s--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clip_config(patch: int = 8, layers: int = 2) -> Any:
    """A CLIP that takes any prompt of the paper's sets through the zoo's tokenizer."""
    from transformers import AutoTokenizer, CLIPConfig

    tokenizer = AutoTokenizer.from_pretrained(Zoo().model)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "projection_dim": 8}
    vision = {**sizes, "num_hidden_layers": layers, "image_size": 16, "patch_size": patch}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 320}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return CLIPConfig(vision_config=vision, text_config=text, projection_dim=8)


def write_clip(folder: Path, **sizes: Any) -> Any:
    """A ``CLIPModel`` with tokenizer and processor, saved by transformers."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    with seeded():
        model = CLIPModel(clip_config(**sizes)).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(Zoo().model).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    return model


def write_expert(folder: Path, model: Any, seed: int) -> None:
    """A ``CLIPVisionModel`` tuned from a CLIP's vision tower, saved by transformers."""
    from transformers import CLIPVisionModel

    with seeded():
        vision = CLIPVisionModel(model.config.vision_config)
    state = model.vision_model.state_dict()
    prefix = next(iter(vision.state_dict())).partition("embeddings.")[0]
    vision.load_state_dict({prefix + name: value for name, value in tuned(state, seed).items()})
    vision.save_pretrained(folder)


def picture(number: int, size: int = 12) -> Any:
    from PIL import Image

    generator = torch.Generator().manual_seed(number)
    values = torch.randint(0, 256, (size, size + number % 3, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def labels_of(spec: SetSpec, count: int) -> list[int]:
    """Labels that span the classes, first and last included."""
    last = len(spec.classes) - 1
    return [last * index // max(1, count - 1) for index in range(count)]


def write_set(root: Path, name: str, count: int = 5, **changes: Any) -> Path:
    """The split of a set as it lies on the hub; ``changes`` spoil it."""
    import datasets

    spec = find_spec(name)
    labels: list[Any] = changes.get("labels", labels_of(spec, count))
    images = [picture(index) for index in range(len(labels))]
    if spec.label == "cls":
        return write_tar(root / spec.split / "0.tar", spec.image, images, labels)
    names = changes.get("names", [plain.replace(" ", "_") for plain in spec.classes])
    feature: Any = datasets.ClassLabel(names=names)
    if name == "pcam":
        labels, feature = [bool(label) for label in labels], datasets.Value("bool")
    feature = changes.get("feature", feature)
    columns = {changes.get("image", spec.image): datasets.Image(), changes.get("label", spec.label): feature}
    content = dict(zip(columns, (images, labels), strict=True))
    rows = datasets.Dataset.from_dict(content, features=datasets.Features(columns))
    place = root / (spec.config or "data")
    place.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(place / changes.get("file", f"{spec.split}-00000-of-00001.parquet"))
    return root


def rows_of(folder: Path, name: str = "eurosat", **kwargs: Any) -> Any:
    """The test split of a set that :func:`write_set` wrote, of pictures of any size."""
    return open_rows(find_spec(name), str(folder), str(folder / "cache"), any_size=True, **kwargs)


def write_tar(path: Path, suffix: str, images: Iterable[Any], labels: Iterable[Any]) -> Path:
    """A web data set: ``0001.jpg``, ``0001.cls``, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            buffer = io.BytesIO()
            image.save(buffer, "PNG" if suffix == "png" else "JPEG")
            for kind, content in ((suffix, buffer.getvalue()), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"s{index:07d}.{kind}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return path.parent.parent


def write_hub(cache: Path, backbone: str, tasks: Iterable[str], controls: Iterable[str], patch: int = 8) -> None:
    """Everything that a run of one of the paper's configurations reads."""
    model = write_clip(snapshot(cache, f"openai/{backbone}"), patch=patch)
    for seed, task in enumerate(tasks, start=1):
        write_expert(snapshot(cache, f"tanganke/{backbone}_{task}"), model, seed)
    for name in (*tasks, *controls):
        write_set(snapshot(cache, find_spec(name).hub, "dataset"), name)


def write_benchmark(root: Path) -> tuple[Path, Path]:
    """A tiny CLIP of a known name with two experts, and a folder with their sets and two held-out sets."""
    clip = write_clip(root / "models" / BACKBONES["b32"])
    for seed, task in enumerate(("mnist", "eurosat"), start=1):
        write_expert(root / "models" / task, clip, seed)
    for name in ("mnist", "eurosat", "fer2013", "pcam"):
        write_set(root / "sets" / name, name, 12)
    return root / "models" / BACKBONES["b32"], root / "sets"


def data_of(benchmark: tuple[Path, Path], **kwargs: Any) -> CLIPBenchmarkData:
    """The sets of :func:`write_benchmark`."""
    settings: dict[str, Any] = {"tasks": ["mnist", "eurosat"], "controls": ["fer2013"], "num_workers": 0}
    settings |= {"folder": str(benchmark[1]), "any_size": True, "batch_size": 5}
    return CLIPBenchmarkData(**{**settings, **kwargs})
