"""Merging under the Trainer of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils.data import Dataset

from safemerge_pl import ContinualMerger, LiveMerger

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and accelerate remark on many things

WIDE = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class Images(Dataset[Any]):
    def __init__(self, task: int) -> None:
        self.pixels, self.labels = tiny.randn(8, 3, 8, 8, seed=task), (torch.arange(8) + task) % 3

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def classifier() -> Any:
    from transformers import CLIPConfig, CLIPForImageClassification

    vision = WIDE | {"image_size": 8, "patch_size": 4}
    with tiny.seeded():
        return CLIPForImageClassification(CLIPConfig(vision_config=vision, text_config=tiny.TEXT, num_labels=3))


def trainer(model: Any, folder: Path, task: int, *callbacks: Any, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        seed=task,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=Images(task), callbacks=list(callbacks))


def test_one_trainer_a_task_equals_folding_what_each_trained(tmp_path: Path) -> None:
    from safemerge_pl.hf_trainer import MergeTrainerCallback

    model, alone = classifier(), []
    theta0 = tiny.copied(model.vision_model.state_dict())
    merge = MergeTrainerCallback(LiveMerger(model.vision_model, tiny.fast_method()), tasks=["a", "b"])
    other = ContinualMerger(theta0, tiny.fast_method())
    head = None
    for task, name in enumerate(("a", "b")):
        copy = classifier()  # the same task without merging, from the pretrained tower and the head as it is now
        copy.classifier.load_state_dict(model.classifier.state_dict())
        trainer(copy, tmp_path, task).train()
        alone.append(tiny.copied(copy.vision_model.state_dict()))
        trainer(model, tmp_path, task, merge).train()
        other.fold(alone[-1], name)
        tiny.assert_same(tiny.copied(model.vision_model.state_dict()), other.merged)
        assert torch.equal(model.classifier.weight, copy.classifier.weight)
        assert head is None or not torch.equal(head, model.classifier.weight)
        head = model.classifier.weight.detach().clone()
    assert merge.merger.tasks == ["a", "b"]
    assert merge.merger.reports[1].source == "trained until step 4"
    with pytest.raises(ValueError, match=r"all 2 tasks \(a, b\) are merged"):
        trainer(model, tmp_path, 2, merge).train()


def test_a_resumed_training_is_refused(tmp_path: Path) -> None:
    """The Trainer's checkpoint has no place for the merge."""
    from safemerge_pl.hf_trainer import MergeTrainerCallback

    model = classifier()
    first = trainer(model, tmp_path, 0)
    first.args.save_strategy = "steps"
    first.args.save_steps = 2
    first.train()
    merge = MergeTrainerCallback(LiveMerger(classifier().vision_model, tiny.fast_method()))
    with pytest.raises(ValueError, match="resumes at step 2"):
        trainer(model, tmp_path, 0, merge).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_trainer_that_makes_its_own_model(tmp_path: Path) -> None:
    """What it trains is then another model than the one that would be folded, unchanged."""
    from transformers import Trainer, TrainingArguments

    from safemerge_pl.hf_trainer import MergeTrainerCallback

    model = classifier()
    merge = MergeTrainerCallback(LiveMerger(model.vision_model, tiny.fast_method()))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, save_strategy="no")
    own = Trainer(model_init=classifier, args=arguments, train_dataset=Images(0), callbacks=[merge])
    with pytest.raises(ValueError, match=r"is no part of .`model_init` makes a new one each time"):
        own.train()
    assert merge.merger.tasks == []


def test_pruned_while_it_was_trained(tmp_path: Path) -> None:
    from torch.nn.utils import prune
    from transformers import TrainerCallback

    from safemerge_pl.hf_trainer import MergeTrainerCallback

    class Prunes(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                prune.l1_unstructured(kwargs["model"].vision_model.encoder.layers[0].mlp.fc1, "weight", 0.5)

    model = classifier()
    merge = MergeTrainerCallback(LiveMerger(model.vision_model, tiny.fast_method()))
    with pytest.raises(ValueError, match=r"fc1\.weight` is pruned .* since the merge began"):
        trainer(model, tmp_path, 0, Prunes(), merge).train()
    assert merge.merger.tasks == []


def test_the_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "hf_trainer" in block)
    arguments = TrainingArguments(
        "runs", report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=1
    )
    model = classifier()
    space = {"model": model, "datasets": {"a": Images(0), "b": Images(1)}, "Trainer": Trainer, "arguments": arguments}
    code = code.replace("LiveMerger(model.vision_model)", "LiveMerger(model.vision_model, fast)")
    exec(compile(code, "README.md", "exec"), space | {"fast": tiny.fast_method()})
    assert json.loads((tmp_path / "merged" / "merge_state.json").read_text())["tasks"] == ["a", "b"]
