"""The everyday job: fold one more model, or several, into the deployed one."""

import inspect
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safemerge_pl.checkpoints.differences import Mismatch
from safemerge_pl.checkpoints.fit import Fitted
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, open_checkpoint
from safemerge_pl.checkpoints.refusals import WEIGHT_ENDINGS
from safemerge_pl.commands.method_options import put_under_method
from safemerge_pl.commands.parsers import HintingParser
from safemerge_pl.commands.recipe import read_recipes
from safemerge_pl.folding.bound import MaxDrift, MaxResponse, require_drift_bound, require_one_process
from safemerge_pl.folding.fates import in_words
from safemerge_pl.folding.launch import choose_device, join_processes
from safemerge_pl.folding.processes import Processes
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod
from safemerge_pl.output.files import STATE_FILE
from safemerge_pl.output.folders import check_output
from safemerge_pl.output.locks import output_lock
from safemerge_pl.output.publish import require_repo
from safemerge_pl.output.saving import read_merge, require_output
from safemerge_pl.output.shared_files import require_same_model, require_shared_files
from safemerge_pl.output.side_files import OutputDtype
from safemerge_pl.output.weights import parse_size
from safemerge_pl.runtime.console import fit_line
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import count_of, name_list
from safemerge_pl.runtime.progress import FoldProgress

if TYPE_CHECKING:
    from safemerge_pl.scoring.file_gauge import FileGauge

__all__ = ["fold_once", "make_parser", "run"]

_IN_MEMORY = 4 * 10**9
"""Bytes of a whole model in float32 up to which its merge is kept in memory."""


def fold_once(
    pretrained: str,
    incoming: list[str] | str,
    output: str,
    merged: str | None = None,
    method: MergeMethod | None = None,
    task: list[str] | str | None = None,
    layers: list[str] | str | None = None,
    dtype: OutputDtype = "same",
    device: str = "cpu",
    on_mismatch: Mismatch = "error",
    max_response: MaxResponse = "auto",
    max_drift: MaxDrift = "auto",
    max_shard_size: int | str = "5GB",
    copy_code: bool = False,
    low_memory: bool | None = None,
    push_to_hub: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    processes: Processes | None = None,
) -> ContinualMerger:
    """Fold a fine-tuned model into yesterday's merge (or start one) and write the new merge as a model folder.

    Args:
        pretrained: the model that all others were fine-tuned from: folder, file or hub id.
        incoming: the model to fold in: folder, file or hub id; or a list of them, folded in this order and written
            once, after the last.
        output: folder to write; new, empty, or an earlier merge, which is replaced in one step.
        merged: folder of an earlier merge to continue; it may be the output.
        method: how to merge; by default SAFE-Merge, or the method of the earlier merge with its settings.
        task: name of the task, or a list of names; by default those of the incoming folders or files.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        dtype: dtype of the written weights; float32 masters are kept beside in any case.
        device: where the arithmetic runs.
        on_mismatch: "pretrained" also takes models of another image size or vocabulary, with the pretrained rows.
        max_response: bounds how strongly the pretrained model reads what is merged, and so protects what it knows;
            0.015 is a careful value, 0.035 a fair one. "auto" takes the method's own or that of the earlier merge, null
            bounds nothing.
        max_drift: bounds how far the model's features of noise move, which tells what general knowledge was lost;
            0.01 is a careful value. The model is run for it: a whole CLIP or T5 of transformers, or a folder of
            open_clip. "auto" takes that of the earlier merge, null bounds nothing.
        max_shard_size: weights above this size are written in shards, with an index.
        copy_code: also copy the model's own Python files. They are never run here.
        low_memory: keep merged weights on disk beside the output instead of in memory, which then holds a few layers
            at a time; by default for models that take more than 4 GB in float32.
        push_to_hub: also put the output on the hub as ``owner/name``, which is private if it is made now. Whether
            it can be written is checked before the first fold.
        progress: called now and then with the task, and the merged and the total number of its weights.
        processes: that fold together, all of which make this call
            (:func:`~safemerge_pl.folding.launch.join_processes`); each reads, folds and writes its own layers, and a
            plain ``cuda`` is its own GPU.

    Returns:
        The merger after the fold; of one in low memory, or of several processes, the weights are in the output alone.

    Raises:
        CheckpointError: if anything does not fit; the output is then as it was.
    """
    processes = Processes(shared=False) if processes is None else processes
    sources = name_list(incoming, "incoming")
    tasks = _tasks(task, sources)
    parse_size(max_shard_size)
    if processes.apart:
        device = processes.agree(lambda: choose_device(device))
    options: dict[str, Any] = {"layers": layers, "device": device, "on_mismatch": on_mismatch}
    options |= {"max_response": max_response, "processes": processes}
    place = local_path(output).resolve()

    def begin() -> None:
        if push_to_hub is not None:
            require_repo(push_to_hub)
        check_output(local_path(output), _inputs(pretrained, sources, merged, output))
        held.enter_context(output_lock(place))
        shutil.rmtree(_work_folder(place), ignore_errors=True)  # of a process that was killed; nobody else has the lock

    with ExitStack() as held:
        # the lock of the first process holds from reading yesterday's merge to writing today's
        processes.lead(begin)
        require_shared_files(processes, place, [pretrained, *sources, *([] if merged is None else [merged])])
        gauge = processes.agree(lambda: bound_drift(pretrained, merged, max_drift, options))
        base, workspace = held.enter_context(_open_base(pretrained, place, low_memory, processes))
        if workspace is not None:
            options["workspace"] = workspace
        if merged is None:
            if (place / STATE_FILE).exists():
                raise CheckpointError(
                    f"the output {output} holds an earlier merge: continue it with --merged {output}, or name a new "
                    "folder."
                )
            merger = ContinualMerger(base, method, **options)
        else:
            merger = ContinualMerger.load(merged, base, method=method, **options)
        if gauge is not None:
            gauge.require_sight(merger.plan)
        written: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
        processes.lead(lambda: require_output(merger.plan, local_path(output), **written))
        checkpoints = processes.agree(
            lambda: [_check(merger, source, name) for source, name in zip(sources, tasks, strict=True)]
        )
        for checkpoint in checkpoints:
            require_same_model(processes, checkpoint)
        merger.progress = progress if processes.rank == 0 else None
        for checkpoint, name in zip(checkpoints, tasks, strict=True):
            merger.fold(checkpoint, name)
        merger.save(output, **written, copy_code=copy_code)
        if push_to_hub is not None:
            processes.lead(lambda: merger.push_to_hub(push_to_hub))
    merger.progress = None
    return merger


def _work_folder(output: Path) -> Path:
    """Where merged weights wait that stay out of memory: beside the output."""
    return output.with_name(f".{output.name}.work")


@contextmanager
def _open_base(
    pretrained: str, output: Path, low_memory: bool | None, processes: Processes
) -> Iterator[tuple[Checkpoint, Path | None]]:
    """The pretrained model, and a folder for a merge that stays out of memory, gone at the end."""
    base = processes.agree(lambda: open_checkpoint(pretrained))
    require_same_model(processes, base)
    if low_memory is None:
        low_memory = 4 * sum(map(math.prod, base.shapes().values())) > _IN_MEMORY
    folder = _work_folder(output)
    try:
        yield base, (folder / str(processes.rank) if processes.apart else folder) if low_memory else None
    finally:
        shutil.rmtree(folder / str(processes.rank) if processes.rank else folder, ignore_errors=True)


def bound_drift(pretrained: str, merged: str | None, asked: MaxDrift, options: dict[str, Any]) -> "FileGauge | None":
    """Enter the bound on the drift, and what measures it, into the options of a merger.

    Args:
        pretrained: the model.
        merged: folder of an earlier merge.
        asked: ``"auto"`` for the bound of the earlier merge.
        options: of the merger, with ``processes`` and ``device``.

    Returns:
        What measures the drift; ``None`` where it is not bounded.
    """
    bound = None if asked == "auto" else asked
    if merged is not None and asked == "auto":
        bound = read_merge(local_path(merged)).bounds()[1]
    require_drift_bound(bound)
    options["max_drift"] = bound
    if bound is None:
        return None
    require_one_process(options["processes"].count)
    from safemerge_pl.scoring.file_gauge import FileGauge  # it runs the model, and takes seconds to import

    options["gauge"] = gauge = FileGauge(pretrained, options["device"])
    return gauge


def _check(merger: ContinualMerger, source: str, task: str) -> Fitted:
    """Open a model and see from its headers that it can be folded, before the first of several is."""
    try:
        return merger.check(source, task, values=False)
    except CheckpointError as error:
        raise CheckpointError(f"task '{task}': {error}") from error


def _tasks(task: list[str] | str | None, sources: Sequence[str]) -> list[str]:
    """A name for each incoming model."""
    if not sources:
        raise CheckpointError("`incoming` is empty: name at least one model.")
    names = [_name(source) for source in sources] if task is None else name_list(task, "task")
    if len(names) != len(sources):
        raise CheckpointError(f"`task` has {len(names)} names for {len(sources)} incoming models; give one for each.")
    folded = [name.casefold() for name in names]
    twice = next((name for name in names if folded.count(name.casefold()) > 1), None)
    if twice is not None:
        raise CheckpointError(f"two incoming models have the name '{twice}'; give each its own with --task.")
    return names


def _name(source: str) -> str:
    """Name of a folder or hub model; of a file without its ending.

    Example:
        >>> _name("models/vit-b.16"), _name("models/mnist.safetensors"), _name("owner/flags@main")
        ('vit-b.16', 'mnist', 'flags')
    """
    path = local_path(source)
    if path.suffix in WEIGHT_ENDINGS and not path.is_dir():
        return path.stem
    name = path.name if path.name.strip(".") else path.resolve().name
    return name if path.exists() else name.partition("@")[0]  # a revision of the hub


def _inputs(pretrained: str, sources: Sequence[str], merged: str | None, output: str) -> tuple[Path, ...]:
    """Local places that the output must not touch; yesterday's merge may be replaced by today's."""
    places = [local_path(source) for source in (pretrained, *sources)]
    if merged is not None and local_path(merged).resolve() != local_path(output).resolve():
        places.append(local_path(merged))
    return tuple(place for place in places if place.exists())


def run() -> None:
    """Fold one model or several, from command line options; under torchrun several processes do it together."""
    with join_processes() as processes:
        options = _parse(processes)
        before = time.perf_counter()
        with FoldProgress() as progress:
            merger = fold_once(**options, progress=progress, processes=processes)
        if processes.rank == 0:
            _say_what_was_done(merger, options, time.perf_counter() - before)


def make_parser() -> HintingParser:
    """A parser of the options of this command."""
    parser = HintingParser(prog="safemerge fold", description="Fold one more model into the deployed one.")
    parser.add_argument("--config", "-c", action="config")
    parser.add_function_arguments(fold_once, skip={"progress", "processes"})
    return parser


def _parse(processes: Processes) -> dict[str, Any]:
    """The options of this command; help and errors are printed by the first process alone."""
    parser = make_parser()
    with ExitStack() as quiet:
        if processes.rank:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(nowhere))
            quiet.enter_context(redirect_stderr(nowhere))
        arguments, notes = read_recipes(sys.argv[2:])
        for note in notes:
            print(fit_line(f"note: {note}"))
        arguments = put_under_method(arguments, inspect.signature(fold_once).parameters)
        config = parser.instantiate(parser.parse_args(arguments))
    sys.argv[0] = Path(sys.argv[0]).name.replace("__main__.py", "safemerge")  # for the model card
    return {key: value for key, value in vars(config).items() if key != "config"}


def _say_what_was_done(merger: ContinualMerger, options: dict[str, Any], seconds: float) -> None:
    count = 1 if isinstance(options["incoming"], str) else len(options["incoming"])
    for report in merger.reports[-count:]:
        lines = [
            f"{merger.method.label}: folded '{report.task}' as task {report.index} in {report.seconds:.1f} s, "
            f"{report.kept_fraction:.0%} of its entries in {len(report.layers)} layers"
        ]
        if report.shares:
            lines.append(in_words(report.shares))
        if report.response is not None:
            told = [f"response {report.response:.4f}, at most {merger.max_response:g}"] if merger.max_response else []
            if merger.max_drift is not None and report.drift is not None:
                told.append(f"drift {report.drift:.2%}, at most {merger.max_drift:.2%}")
            lines.append(f"bound: {report.scale:.1%} of the accumulated vector is deployed ({'; '.join(told)})")
        for line in (*lines, *(f"note: {note}" for note in report.notes)):
            print(fit_line(line))
    tasks = count_of(len(merger.tasks), "task")
    # one line however narrow the terminal is: what programs look for
    print(f"merged model: {options['output']}, {tasks}, SHA-256 {report.merged}, {seconds:.1f} s")
    if options["push_to_hub"]:
        print(f"on the hub: {options['push_to_hub']}, private unless it was public before")
