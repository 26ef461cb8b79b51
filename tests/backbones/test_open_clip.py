"""open_clip's models: built, scored, merged, loaded by open_clip itself, equal to transformers' of the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from small import CONTROLS, RANKS, SmallZoo
from tiny import folder_of, seeded, tuned
from torch import Tensor

from safemerge_pl.backbones import build_backbone
from safemerge_pl.backbones.open_clip import OpenCLIPBackbone
from safemerge_pl.callbacks import MergedModelWriter, SAFEMergeCallback
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, MergeMethod, SafeMerge, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import FileGauge
from safemerge_pl.scoring.drift import gauge_of

CONFIG: dict[str, Any] = {
    "embed_dim": 8,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "mlp_ratio": 2.0, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
TASKS = ["font_category", "weather"]


@pytest.fixture
def hf() -> Any:
    """A CLIP of transformers with the sizes of CONFIG."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "hidden_act": "quick_gelu"}
    vision = {**sizes, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    text = {**sizes, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 49408}
    text |= {"max_position_embeddings": 77, "bos_token_id": 49406, "eos_token_id": 49407}
    with seeded():
        return CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8)).eval()


@pytest.fixture
def folder(hf: Any, tmp_path: Path) -> Path:
    """The same model as a folder of open_clip."""
    return write(tmp_path / "base", to_open_clip(hf.state_dict()))


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "open_clip_model.safetensors")
    content = {"model_cfg": CONFIG | changes, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    return folder


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and layout of open_clip: q, k and v in one matrix, projections transposed."""
    found = {"logit_scale": state["logit_scale"]}
    for theirs, mine in (("text_model", ""), ("vision_model", "visual.")):
        layers = {name.split(".")[3] for name in state if name.startswith(f"{theirs}.encoder.layers.")}
        for layer in layers:
            old, new = f"{theirs}.encoder.layers.{layer}", f"{mine}transformer.resblocks.{layer}"
            for kind in ("weight", "bias"):
                parts = [state[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
                for a, b in (
                    ("self_attn.out_proj", "attn.out_proj"),
                    ("layer_norm1", "ln_1"),
                    ("layer_norm2", "ln_2"),
                    ("mlp.fc1", "mlp.c_fc"),
                    ("mlp.fc2", "mlp.c_proj"),
                ):
                    found[f"{new}.{b}.{kind}"] = state[f"{old}.{a}.{kind}"]
    vision, text = "vision_model", "text_model"
    for kind in ("weight", "bias"):
        found[f"visual.ln_pre.{kind}"] = state[f"{vision}.pre_layrnorm.{kind}"]
        found[f"visual.ln_post.{kind}"] = state[f"{vision}.post_layernorm.{kind}"]
        found[f"ln_final.{kind}"] = state[f"{text}.final_layer_norm.{kind}"]
    found["visual.conv1.weight"] = state[f"{vision}.embeddings.patch_embedding.weight"]
    found["visual.class_embedding"] = state[f"{vision}.embeddings.class_embedding"]
    found["visual.positional_embedding"] = state[f"{vision}.embeddings.position_embedding.weight"]
    found["visual.proj"] = state["visual_projection.weight"].T
    found["token_embedding.weight"] = state[f"{text}.embeddings.token_embedding.weight"]
    found["positional_embedding"] = state[f"{text}.embeddings.position_embedding.weight"]
    found["text_projection"] = state["text_projection.weight"].T
    return found


def test_features_equal_those_of_transformers(hf: Any, folder: Path) -> None:
    """The interface of the other backbone; the activation comes from the folder's configuration."""
    backbone = OpenCLIPBackbone(pretrained=str(folder))
    backbone.load()
    backbone.load()
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(backbone(pixels), hf.get_image_features(pixels).pooler_output, atol=1e-5, rtol=0)
        texts = ["a photo of a cat.", "a dog"]
        tokens = open_clip.get_tokenizer("ViT-B-32")(texts)
        theirs = hf.get_text_features(input_ids=tokens).pooler_output
        torch.testing.assert_close(backbone.encode_text(texts), theirs, atol=1e-5, rtol=0)
        other = OpenCLIPBackbone(pretrained=str(write(folder.parent / "gelu", load(folder), quick_gelu=False)))
        other.load()
        assert (other(pixels) - backbone(pixels)).abs().max() > 1e-5
    assert not any("text" in name or "logit" in name for name in backbone.state_dict())
    assert build_backbone(backbone.spec()).pretrained == str(folder)  # type: ignore[attr-defined]


def test_drift_over_pictures_of_noise(folder: Path) -> None:
    """Of the size that the model takes."""
    backbone = OpenCLIPBackbone(pretrained=str(folder))
    backbone.load()
    assert backbone.noise(2).shape == (2, 3, 16, 16)
    gauge = gauge_of(backbone, backbone.visual, count=4)
    assert gauge is not None
    assert gauge.measure() == 0
    changed = tuned(dict(backbone.visual.state_dict()), 1)
    assert gauge.measure(changed) > 0

    files = FileGauge(str(folder))
    plan = ContinualMerger(folder, TaskArithmetic()).plan
    files.require_sight(plan)
    whole = gauge_of(backbone, backbone.visual)
    assert whole is not None
    assert files({f"visual.{name}": tensor for name, tensor in changed.items()}) == whole.measure(changed)


def load(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "open_clip_model.safetensors")


@pytest.mark.parametrize("method", [SafeMerge(**RANKS), OPCM(), TaskArithmetic()])
def test_one_merge_in_both_layouts(method: MergeMethod, hf: Any, folder: Path) -> None:
    """Split in_proj, transposed projection: the merge does not depend on the library. The text tower stays."""
    import copy

    base = {name: value for name, value in hf.state_dict().items() if "vision_model" in name}
    whole = hf.state_dict()
    theirs = ContinualMerger(base, copy.deepcopy(method))
    mine = ContinualMerger(folder, copy.deepcopy(method))
    for seed in (1, 2, 3):
        expert = tuned(base, seed)
        theirs.fold(expert, f"t{seed}")
        mine.fold(to_open_clip(whole | expert), f"t{seed}")
    expected, found = to_open_clip(whole | theirs.merged), mine.merged
    assert sorted(expected) == sorted(found)
    assert (
        found["visual.transformer.resblocks.0.attn.in_proj_weight"]
        - load(folder)["visual.transformer.resblocks.0.attn.in_proj_weight"]
    ).abs().max() > 1e-3
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
    if isinstance(method, SafeMerge):
        torch.testing.assert_close(
            {layer.name: layer.view(mine.merged[layer.parameter]) for layer in mine.layers},
            {layer.name: layer.view(theirs.merged[layer.parameter]) for layer in theirs.layers},
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("form", ["folder", "file", "experts of transformers"])
def test_a_stream_and_what_it_writes(
    form: str, hf: Any, folder: Path, tmp_path: Path, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network; the merged folder and the file in it are loaded by open_clip and score the same."""
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", CONFIG)
    source = str(folder / "open_clip_model.safetensors" if form == "file" else folder)
    experts = {}
    for seed, task in enumerate(TASKS):
        if form == "experts of transformers":  # as they lie on the hub: the vision tower alone
            expert = tuned({n: v for n, v in hf.state_dict().items() if n.startswith("vision_model.")}, seed)
            experts[task] = str(folder_of(tmp_path / task, expert))
        else:
            experts[task] = str(write(tmp_path / task, tuned(load(folder), seed)))
    module = ContinualMergeModule(OpenCLIPBackbone("tiny", source))
    merge = SAFEMergeCallback(experts=experts, **RANKS)
    writer = MergedModelWriter(folder=str(tmp_path / "merged"))
    make_trainer(merge, writer, max_epochs=2).fit(module, SmallZoo(TASKS, CONTROLS, batch_size=16))
    assert set(module.last_scores) >= {*TASKS, *CONTROLS, "ACC", "Gen", "H", "BWT"}
    model = open_clip.create_model(f"local-dir:{tmp_path / 'merged'}", require_pretrained=True).eval()
    again = open_clip.create_model("tiny", pretrained=str(tmp_path / "merged" / "open_clip_model.safetensors")).eval()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = module.backbone(pixels)
        torch.testing.assert_close(model.encode_image(pixels), expected, atol=1e-6, rtol=0)
        assert torch.equal(model.encode_image(pixels), again.encode_image(pixels))
    merged, base = load_file(tmp_path / "merged" / "open_clip_model.safetensors"), load(folder)
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed
    assert all(name.startswith("visual.transformer.resblocks.") for name in changed)
    backbone = OpenCLIPBackbone(pretrained=str(tmp_path / "merged"))
    module = ContinualMergeModule(backbone)
    data = SmallZoo(TASKS, CONTROLS, batch_size=16)
    make_trainer().validate(module, data, verbose=False)
    assert 0 <= module.last_scores["ACC"] <= 1
    original = OpenCLIPBackbone(pretrained=str(folder))
    original.load()
    assert backbone.text_key() == original.text_key(), "the merged model's heads are the pretrained ones"


def test_preprocessing_is_open_clip_s(folder: Path) -> None:
    from PIL import Image

    backbone = OpenCLIPBackbone(pretrained=str(folder))
    pixels = backbone.preprocess([Image.new("L", (20, 30), 255), Image.new("RGBA", (16, 16))])
    assert pixels.shape == (2, 3, 16, 16)
    torch.testing.assert_close(pixels[0], torch.ones(3, 16, 16))
    torch.testing.assert_close(pixels[1], -torch.ones(3, 16, 16))


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        (
            "ViT-B-32-quickgelu",
            "laion2b_s34b_b79k",
            r"neither a folder nor a file nor a tag of 'ViT-B-32-quickgelu' .*openai",
        ),
        ("ViT-B-32", "weights/none.pt", "neither a folder nor a file nor a tag of 'ViT-B-32'"),
        ("ViT-Z-32", "openai", "open_clip has no model 'ViT-Z-32'"),
        (
            "ViT-B-32-quickgelu",
            "openai",
            r"are not in the local cache and cannot be fetched \(\w+\); give a local folder",
        ),
    ],
)
def test_what_cannot_be_loaded(
    model: str, pretrained: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is never looked up in the network; what the network would be needed for is said."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("open_clip.pretrained.download_pretrained_from_hf", refuse)
    with pytest.raises(CheckpointError, match=message):
        OpenCLIPBackbone(model, pretrained).load()


@pytest.mark.parametrize(("model", "other"), [("ViT-B-32", "ViT-B-32-quickgelu"), ("ViT-L-14", "ViT-L-14-quickgelu")])
def test_the_activation_of_openai_s_weights(
    model: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's weights in a model with the other activation have the same names and lose many points: refused."""
    monkeypatch.setattr(
        "open_clip.pretrained.download_pretrained", lambda tag: str(folder / "open_clip_model.safetensors")
    )
    with pytest.raises(CheckpointError, match=f"trained with QuickGELU, '{model}' .*use `model` '{other}'"):
        OpenCLIPBackbone(model, "openai").load()


def test_folders_that_are_no_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no open_clip_config\.json"):
        OpenCLIPBackbone(pretrained=str(tmp_path)).load()
    tensors = load(folder)
    tensors.pop("visual.proj")
    broken = write(tmp_path / "broken", tensors)
    with pytest.raises(CheckpointError, match=r"broken is no model that open_clip can load: .*visual\.proj"):
        OpenCLIPBackbone(pretrained=str(broken)).load()
    (broken / "open_clip_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is no model that open_clip can load"):
        OpenCLIPBackbone(pretrained=str(broken)).load()
