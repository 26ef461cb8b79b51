"""The everyday job: fold one more model into the deployed one."""

from pathlib import Path

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.differences import Mismatch
from safemerge_pl.folders import OutputDtype, check_output
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod

__all__ = ["fold_once"]


def fold_once(
    pretrained: str,
    incoming: str,
    output: str,
    merged: str | None = None,
    method: MergeMethod | None = None,
    task: str | None = None,
    layers: list[str] | None = None,
    dtype: OutputDtype = "same",
    device: str = "cpu",
    on_mismatch: Mismatch = "error",
) -> ContinualMerger:
    """Fold a fine-tuned model into yesterday's merge (or start one) and write the new merge as a model folder.

    Args:
        pretrained: the model that all others were fine-tuned from: folder, file or hub id.
        incoming: the model to fold in: folder, file or hub id.
        output: folder to write; new, empty, or an earlier merge, which is replaced in one step.
        merged: folder of an earlier merge to continue; it may be the output.
        method: how to merge; by default SAFE-Merge, or the method of the earlier merge with its settings.
        task: name of the task; by default the name of the incoming folder or file.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        dtype: dtype of the written weights; float32 masters are kept beside in any case.
        device: where the arithmetic runs.
        on_mismatch: "pretrained" also takes models of another image size or vocabulary, with the pretrained rows.

    Returns:
        The merger after the fold.

    Raises:
        CheckpointError: if anything does not fit; the output is then as it was.
    """
    inputs = tuple(path for path in (Path(pretrained), Path(incoming)) if path.is_dir())
    check_output(Path(output), inputs)
    if merged is None and (Path(output) / "merge_state.json").exists():
        raise CheckpointError(
            f"the output {output} holds an earlier merge: continue it with --merged {output}, or name a new folder."
        )
    if merged is None:
        merger = ContinualMerger(pretrained, method, layers=layers, device=device, on_mismatch=on_mismatch)
    else:
        merger = ContinualMerger.load(
            merged, pretrained, method=method, layers=layers, device=device, on_mismatch=on_mismatch
        )
    merger.fold(open_checkpoint(incoming), task or Path(incoming).stem)
    merger.save(output, dtype=dtype)
    return merger
