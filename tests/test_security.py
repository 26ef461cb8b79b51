"""Nothing that is read can run code: every place that a harmful word may stand in is tried, and nothing runs."""

import functools
import json
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import TASKS
from tiny import Add, folded, hf_vision, tower
from tiny_hub import write_clip

from safemerge_pl import LiveMerger
from safemerge_pl.backbones import Backbone, CLIPBackbone, OpenCLIPBackbone, T5Backbone, build_backbone
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.cli import main
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.data import ZooData
from safemerge_pl.data.image_sets import SetSpec
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.files import LEDGER_FILE, STATE_FILE
from safemerge_pl.runtime.classes import stored_class
from safemerge_pl.runtime.disk_cache import load_tensor
from safemerge_pl.scoring.disk_cache import read_score

HERE = Path(__file__).parent / "written_by_0_1"
MAKE = runpy.run_path(str(HERE / "make.py"))
HARMFUL = """
from pathlib import Path
from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.module import ContinualMergeModule

Path({ran!r}).touch()


def call(*args, **kwargs):
    Path({ran!r}).touch()


class Backbone(CLIPBackbone): ...


class Method(TaskArithmetic): ...


class Module(ContinualMergeModule): ...
"""
MODULE = "harmful_words_in_files"
PATHS = (
    *("os.system", "builtins.exec", "subprocess.Popen", f"{MODULE}.call", f"{MODULE}.Backbone", f"{MODULE}.Method", ""),
    *("safemerge_pl.backbones.clip.Path", "safemerge_pl.backbones.base.build_backbone", "safemerge_pl.backbones"),
    *("safemerge_pl.methods.saved.json.loads", "safemerge_pl.methods.base.MergeMethod", "safemerge_pl.methods.x.y.Z"),
    *("safemerge_pl.runtime.files.write_json", "safemerge_pl.backbones.Backbone", f"{MODULE}"),
)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once harmful code ran; a module that can be imported and must not be."""
    place, sentinel = tmp_path / "importable", tmp_path / "ran"
    place.mkdir()
    (place / f"{MODULE}.py").write_text(HARMFUL.format(ran=str(sentinel)))
    monkeypatch.syspath_prepend(str(place))
    yield sentinel
    assert not sentinel.exists(), "code that a file named was run"
    assert MODULE not in sys.modules


def described(path: Any, ran: Path) -> dict[str, Any]:
    return {"class_path": path, "init_args": {"command": f"touch {ran}", "args": ["touch", str(ran)]}}


class Touch:
    """Unpickled it touches a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_the_harmful_pickle_is_harmful(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


# a class path


@pytest.mark.parametrize("path", [*PATHS, None, 3, ["os.system"], {"class_path": "os.system"}])
def test_a_description_of_a_backbone(path: Any, ran: Path) -> None:
    for description in (described(path, ran), path):
        if isinstance(description, dict) or description is not None:
            with pytest.raises(CheckpointError, match="which is no Backbone that is imported; import"):
                build_backbone(description)
    if path is not None:
        with pytest.raises(CheckpointError, match="no Backbone"):
            ContinualMergeModule(described(path, ran))


@pytest.mark.parametrize("init_args", [None, [], "x", {"pretrained": "zoo", "evil": 1}, {"image_backend": {}, "x": 1}])
def test_arguments_that_a_backbone_does_not_take(init_args: Any) -> None:
    with pytest.raises(CheckpointError, match="CLIPBackbone"):
        build_backbone({"class_path": "safemerge_pl.backbones.CLIPBackbone", "init_args": init_args})


def test_a_backbone_of_the_user_s_is_found_once_it_is_imported() -> None:
    class Mine(CLIPBackbone):
        """Defined here, so imported."""

    path = f"{__name__}.{Mine.__qualname__}"
    assert type(build_backbone({"class_path": path, "init_args": {}})) is Mine
    assert stored_class(path, Backbone, "a file", remedy="") is Mine  # type: ignore[type-abstract]


@pytest.mark.parametrize("path", [*PATHS, None, 3, {"a": "b"}])
@pytest.mark.parametrize("place", ["merger", "live", "fold", "restored"])
def test_the_method_in_a_merge_folder(path: Any, place: str, ran: Path, tmp_path: Path) -> None:
    module = hf_vision()
    base = tmp_path / "base"
    merge = LiveMerger(module) if place == "live" else folded(1)
    if place == "live":
        merge.fold(module.state_dict(), "a")  # type: ignore[union-attr]
    out = merge.save(tmp_path / "out")
    torch.save(tower(), base.with_suffix(".pt"))
    state = json.loads((out / STATE_FILE).read_text())
    state["method"] |= described(path, ran)
    (out / STATE_FILE).write_text(json.dumps(state))
    weights = str(base.with_suffix(".pt"))
    take_up: dict[str, Callable[[], object]] = {
        "merger": lambda: ContinualMerger.load(out, tower()),
        "live": lambda: LiveMerger.load(out, hf_vision()),
        "fold": lambda: fold_once(weights, weights, str(tmp_path / "new"), merged=str(out)),
        "restored": lambda: ContinualMerger(tower(), Add()).restore(out),
    }
    with pytest.raises(CheckpointError, match=r"pass that method|is imported|does not say|was made with"):
        take_up[place]()


@pytest.mark.parametrize("path", PATHS)
def test_no_path_names_a_method(path: str, ran: Path) -> None:
    with pytest.raises(CheckpointError, match="which is no MergeMethod that is imported"):
        stored_class(path, MergeMethod, "a file", remedy="")  # type: ignore[type-abstract]


# the checkpoints of Lightning


def checkpoint(folder: Path, hyper_parameters: Any, **other: Any) -> Path:
    """That of a stream, with other hyper-parameters."""
    content = torch.load(HERE / "stream.ckpt", weights_only=True)
    torch.save(content | {"hyper_parameters": hyper_parameters} | other, folder / "harmful.ckpt")
    return folder / "harmful.ckpt"


def hyper_parameters(ran: Path) -> dict[str, Any]:
    harmful = described(f"{MODULE}.Backbone", ran)
    cli = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
    known = {"class_path": "safemerge_pl.backbones.CLIPBackbone"}
    return {
        "a function": {"backbone": described("os.system", ran)},
        "a class": {"backbone": harmful},
        "built by the command line": cli | {"backbone": harmful},
        "a bare word": cli | {"backbone": f"{MODULE}.Backbone"},
        "text that is YAML": cli | {"backbone": json.dumps(harmful)},
        "text further down": cli | {"backbone": known | {"init_args": {"pretrained": json.dumps(harmful)}}},
        "further down": cli | {"backbone": known | {"init_args": {"pretrained": harmful}}},
        "in a list": cli | {"backbone": known | {"init_args": {"pretrained": [harmful]}}},
        "keys of two parts": cli | {"backbone.class_path": f"{MODULE}.Backbone"},
        "keys of three parts": cli | {"backbone": known, "backbone.class_path.x": f"{MODULE}.Backbone"},
        "another module": cli | {"_class_path": f"{MODULE}.Module"},
        "another builder": {"_instantiator": f"{MODULE}.call"},
        "no mapping": [f"{MODULE}.Backbone"],
    }


KINDS = list(hyper_parameters(Path()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_hyper_parameters_of_a_module(kind: str, ran: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, hyper_parameters(ran)[kind])
    with pytest.raises(CheckpointError, match=r"harmful\.ckpt"):
        ContinualMergeModule.load_from_checkpoint(path)
    with path.open("rb") as file, pytest.raises(CheckpointError):
        ContinualMergeModule.load_from_checkpoint(file)


@pytest.mark.parametrize("key", ["hparams", "module_arguments"])
def test_the_hyper_parameters_of_earlier_versions(key: str, ran: Path, tmp_path: Path) -> None:
    for content in hyper_parameters(ran).values():
        path = checkpoint(tmp_path, {}, **{key: content})
        with pytest.raises(CheckpointError, match=r"harmful\.ckpt"):
            ContinualMergeModule.load_from_checkpoint(path)


def test_a_name_for_all_hyper_parameters(ran: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, described(f"{MODULE}.call", ran), hparams_name="backbone")
    with pytest.raises(CheckpointError, match=r"harmful\.ckpt names harmful_words_in_files\.call"):
        ContinualMergeModule.load_from_checkpoint(path)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_file_of_hyper_parameters(kind: str, ran: Path, tmp_path: Path) -> None:
    path, file = checkpoint(tmp_path, {}), tmp_path / "hparams.yaml"
    file.write_text(yaml.safe_dump(hyper_parameters(ran)[kind]))
    with pytest.raises(CheckpointError, match=r"hparams\.yaml"):
        ContinualMergeModule.load_from_checkpoint(path, hparams_file=file)


def test_a_backbone_that_is_passed_takes_the_place_of_a_harmful_one(ran: Path, tmp_path: Path) -> None:
    """The way out that the refusal names."""
    path = checkpoint(tmp_path, {"backbone": described(f"{MODULE}.Backbone", ran)})
    backbone = CLIPBackbone(str(write_small_clip(tmp_path / "clip")))
    assert ContinualMergeModule.load_from_checkpoint(path, backbone=backbone).backbone is backbone


def write_small_clip(folder: Path) -> Path:
    """The model that the stream's checkpoint was made with, in a folder of its own."""
    shutil.copytree(HERE / "clip", folder)
    return folder


def test_loading_on_an_object_is_still_an_error() -> None:
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        ContinualMergeModule().load_from_checkpoint("x.ckpt")
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        ZooData().load_from_checkpoint("x.ckpt")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hyper_parameters_of_a_data_module(kind: str, ran: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {}, datamodule_hyper_parameters=hyper_parameters(ran)[kind])
    with pytest.raises(CheckpointError, match=r"harmful\.ckpt"):
        ZooData.load_from_checkpoint(path)


@pytest.mark.parametrize(
    ("verb", "kind"), [*(("validate", kind) for kind in KINDS), ("fit", "a class"), ("test", "a bare word")]
)
def test_a_checkpoint_on_the_command_line(
    kind: str, verb: str, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path, hyper_parameters(ran)[kind])
    with pytest.raises(SystemExit) as ended:
        main([verb, "--config", "tiny.yaml", "--ckpt_path", str(path)])
    assert ended.value.code == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("safemerge: ")
    assert "harmful.ckpt" in said


@pytest.mark.parametrize("entry", ["hyper_parameters", "callbacks", "state_dict", "loops"])
def test_an_object_in_a_checkpoint(
    entry: str, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path, **{"hyper_parameters": {}, entry: {"x": Touch(ran)}})
    with pytest.raises(CheckpointError, match="plain"):
        ContinualMergeModule.load_from_checkpoint(path)
    with pytest.raises(SystemExit):
        main(["validate", "--config", "tiny.yaml", "--ckpt_path", str(path)])
    assert "plain tensors" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # those that the command line silences when it has parsed
def test_a_checkpoint_from_the_web_is_read_as_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own choice for an address is to run what is in it."""
    seen: list[Any] = []

    @functools.wraps(L.Trainer.validate)  # the command line reads its options from the signature
    def validate(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["weights_only"])

    monkeypatch.setattr(L.Trainer, "validate", validate)
    monkeypatch.chdir(tmp_path)
    main(["validate", "--config", "tiny.yaml", "--ckpt_path", "https://localhost/x.ckpt"])
    assert seen == [True]


@pytest.mark.parametrize("path", PATHS[:6])
def test_the_state_of_a_callback(path: str, ran: Path, make_trainer: Any, merge_callback: Any, small_data: Any) -> None:
    """From files, and in a training loop."""
    module, data = ContinualMergeModule(), small_data()
    merge = merge_callback()
    make_trainer(merge, max_epochs=1).fit(module, data)
    state = merge.state_dict()
    state["method"] |= described(path, ran)
    again = merge_callback()
    again.load_state_dict(state)
    with pytest.raises(Exception, match="was made with"):
        make_trainer(again, max_epochs=len(TASKS)).fit(ContinualMergeModule(), data)


def test_the_state_of_a_callback_in_a_training_loop(ran: Path, tmp_path: Path) -> None:
    content = torch.load(HERE / "live.ckpt", weights_only=True)
    (state,) = content["callbacks"].values()
    state["live"]["merger"]["method"] |= described(f"{MODULE}.Method", ran)
    torch.save(content, tmp_path / "live.ckpt")
    callback = MAKE["live_callback"]()
    with pytest.raises(MisconfigurationException, match=f"made with {MODULE}"):
        MAKE["trainer"](callback, 3).fit(MAKE["Loop"](), ckpt_path=tmp_path / "live.ckpt", weights_only=True)


# files of weights


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth", "x.ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"w": x}, lambda x: {"state_dict": tower(), "x": [x]}])
def test_a_file_of_weights(name: str, zipped: bool, wrap: Any, ran: Path, tmp_path: Path) -> None:
    torch.save(wrap(Touch(ran)), tmp_path / name, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="plain tensors"):
        open_checkpoint(tmp_path / name)


def test_shards_adapters_and_folders(ran: Path, tmp_path: Path) -> None:
    for name, extra in {
        "pytorch_model.bin": {},
        "open_clip_pytorch_model.bin": {},
        "adapter_model.bin": {"adapter_config.json": {"peft_type": "LORA", "r": 2, "megatron_core": MODULE}},
        "pytorch_model-00001-of-00001.bin": {
            "pytorch_model.bin.index.json": {"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}
        },
    }.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        torch.save({"w": Touch(ran)}, folder / name)
        for file, content in extra.items():
            (folder / file).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="plain tensors"):
            open_checkpoint(folder)


def test_what_is_kept_on_disk(ran: Path, tmp_path: Path) -> None:
    """Heads, bases and scores of earlier runs."""
    file = tmp_path / "kept"
    file.write_bytes(pickle.dumps(Touch(ran)))
    assert load_tensor(file) is None
    assert read_score(file) is None
    torch.save({"tensor": Touch(ran)}, file)
    assert load_tensor(file) is None
    assert read_score(file) is None


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['touch {}']", "!!python/name:{module}.call"])
def test_the_description_of_a_set(text: str, ran: Path, tmp_path: Path) -> None:
    harmful = text.format(ran, module=MODULE)
    for content in (harmful, f"hub: a/b\nsplit: test\nclasses: {harmful}\ntemplates: single\n"):
        (tmp_path / "set.yaml").write_text(content)
        with pytest.raises(ValueError, match=r"set\.yaml is no YAML file"):
            SetSpec.read(tmp_path / "set.yaml")


def test_a_ledger(ran: Path, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    line = json.dumps({"index": 1, "merged": described("os.system", ran)})
    (out / LEDGER_FILE).write_text(f"!!python/object/apply:os.system ['touch {ran}']\n{line}\n")
    assert len(ContinualMerger.load(out, tower()).ledger) == 1


def test_the_cells_of_a_study(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MAKE["experts"](Path("experts"))
    shutil.copytree(HERE / "cells", tmp_path / "study" / "cells")
    cells = sorted((tmp_path / "study" / "cells").glob("*.json"))
    for cell in cells:
        change(cell, settings=described(f"{MODULE}.call", ran), merged=described("os.system", ran))
    MAKE["small_study"]("study").run()
    for content in ("{", "[1]", "!!python/object/apply:os.system ['touch x']", "[" * 5000):
        cells[0].write_text(content)
        with pytest.raises(MisconfigurationException, match=r"is damaged .* measured again"):
            MAKE["small_study"]("study").run()


# models in the libraries' own formats


def code(folder: Path, ran: Path) -> None:
    """Python files beside a model, which its configurations may refer to."""
    text = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nfrom transformers import CLIPTokenizerFast as Own\n"
    for name in ("own.py", "modeling.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_the_own_code_of_a_model(config: str, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "clip")
    code(tmp_path / "clip", ran)
    kinds = ("AutoModel", "AutoConfig", "AutoImageProcessor", "AutoProcessor")
    own = dict.fromkeys(kinds, "own.Own") | {"AutoTokenizer": ["own.Own", "own.Own"]}
    change(tmp_path / "clip" / config, auto_map=own)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a user who presses the wrong key
    backbone = CLIPBackbone(str(tmp_path / "clip"))
    backbone.load()
    backbone.preprocessor()
    backbone.encode_text(["a photo of a cat"])


def test_a_tokenizer_that_is_code(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "clip")
    code(tmp_path / "clip", ran)
    change(
        tmp_path / "clip" / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    change(tmp_path / "clip" / "config.json", model_type="own")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(CheckpointError, match="the tokenizer is code of the model's own, which is never run"):
        CLIPBackbone(str(tmp_path / "clip")).load()


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel@main:flash"},
        {"vision_config": {"attn_implementation": "evil/kernel"}},
        {"experts_implementation": "evil/kernel"},
        {"trust_remote_code": True},
    ],
)
def test_a_configuration_that_asks_for_code(entries: dict[str, Any], tmp_path: Path) -> None:
    write_clip(tmp_path / "clip")
    change(tmp_path / "clip" / "config.json", **entries)
    with pytest.raises(CheckpointError, match=r"config\.json: `\w+` is .*, which would fetch and run code"):
        CLIPBackbone(str(tmp_path / "clip")).load()
    change(tmp_path / "clip" / "config.json", model_type="t5", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="which would fetch and run code"):
        T5Backbone(str(tmp_path / "clip")).load()


@pytest.mark.parametrize("kind", [CLIPBackbone, T5Backbone])
def test_an_adapter_in_the_place_of_a_model(kind: Any, ran: Path, tmp_path: Path) -> None:
    """peft would import the module that its settings name."""
    folder = tmp_path / "model"
    write_clip(folder)
    change(folder / "config.json", model_type="t5" if kind is T5Backbone else "clip", tie_word_embeddings=True)
    change(folder / "adapter_config.json", peft_type="LORA", megatron_core=MODULE, megatron_config={"a": 1})
    with pytest.raises(CheckpointError, match="is an adapter"):
        kind(str(folder)).load()


def test_the_tokenizer_of_open_clip(ran: Path, tmp_path: Path) -> None:
    folder = tmp_path / "open_clip"
    folder.mkdir()
    code(folder, ran)
    text = {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    change(folder / "open_clip_config.json", model_cfg={"embed_dim": 8, "text_cfg": text}, preprocess_cfg={})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    with pytest.raises(CheckpointError, match="`trust_remote_code` is True"):
        OpenCLIPBackbone(pretrained=str(folder)).load()


@pytest.mark.parametrize("kind", ["clip", "open_clip"])
def test_a_pickle_in_the_place_of_a_model(kind: str, ran: Path, tmp_path: Path) -> None:
    folder = tmp_path / kind
    if kind == "clip":
        write_clip(folder)
        (folder / "model.safetensors").unlink()
        torch.save({"w": Touch(ran)}, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="no CLIP model"):
            CLIPBackbone(str(folder)).load()
    else:
        folder.mkdir()
        torch.save({"w": Touch(ran)}, folder / "weights.pt")
        with pytest.raises(CheckpointError, match="no model that open_clip can load"):
            OpenCLIPBackbone("ViT-S-32", str(folder / "weights.pt")).load()
