"""The command line: ``fit``, ``validate`` and ``test`` are LightningCLI; ``check``, ``fold`` and ``study`` are ours."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import lightning as L

__all__ = ["config_folder", "main"]

_HELP = """usage: safemerge VERB [options]

Fold fine-tuned models, one after another, into one merged model, without any task data.

  safemerge fit      --config quickstart.yaml   merge a stream of models and score it after each
  safemerge validate --config quickstart.yaml --ckpt_path FILE   score a checkpoint of a stream
  safemerge test     --config quickstart.yaml --ckpt_path FILE   the same on the test loaders
  safemerge check    --config quickstart.yaml   list every problem of a configuration, in seconds
  safemerge fold     --pretrained P --incoming T --output O   fold one more model, into an earlier merge with --merged
  safemerge study    --config study_methods.yaml   orders x methods x settings, to tables and figures

Options of a verb: safemerge VERB --help. A value of the configuration is changed by its path, for example
--trainer.callbacks.init_args.keep_ratio 0.3 or --data.order_seed 42. A stopped run goes on with --ckpt_path last.
Configurations that come along: {configs}.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point; exits with 1 and one clear message for anything the user can mend."""
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0] in ("-h", "--help"):
        names = ", ".join(sorted(path.name for path in config_folder().glob("*.yaml")))
        print(_HELP.format(configs=names), end="")
        return
    if argv[0] == "--version":
        from safemerge_pl import __version__

        print(__version__)
        return
    verbs = ("fit", "validate", "test", "check", "fold", "study")
    if argv[0] not in verbs:
        _fail(f"there is no verb '{argv[0]}'; use one of {', '.join(verbs)}, or --help.", code=2)
    argv = resolve_configs(argv)
    # threads that spin while they wait make a run a hundred times slower as soon as another program uses a core
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.argv = [sys.argv[0], *argv]  # what LightningCLI reads, also in the processes that DDP starts
    try:
        own = {"check": _check, "fold": _fold, "study": _study}
        if argv[0] in own:
            sys.argv = [sys.argv[0], *argv[1:]]
            own[argv[0]]()
        else:
            _lightning_cli()
    except Exception as error:
        if os.environ.get("SAFEMERGE_TRACEBACK") or not _is_for_the_user(error):
            raise
        _fail(str(error))


def config_folder() -> Path:
    """The configurations that come along: package data, or ``configs/`` of a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def resolve_configs(argv: Sequence[str]) -> list[str]:
    """Replace ``--config NAME`` by the packaged file of that name where there is no such file here.

    Example:
        >>> Path(resolve_configs(["fit", "--config", "quickstart.yaml"])[2]).parent.name
        'configs'
    """
    resolved = list(argv)
    for place, argument in enumerate(resolved):
        if argument in ("--config", "-c") and place + 1 < len(resolved):
            resolved[place + 1] = _find_config(resolved[place + 1])
        elif argument.startswith("--config="):
            resolved[place] = "--config=" + _find_config(argument.removeprefix("--config="))
    return resolved


def _find_config(name: str) -> str:
    packaged = config_folder() / name
    return str(packaged) if not Path(name).exists() and packaged.is_file() else name


def _lightning_cli(*, run: bool = True) -> Any:
    """Build (and run) the LightningCLI; heavy imports happen here, so that help does not wait for them."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    _import_named_classes()
    from safemerge_pl import callbacks
    from safemerge_pl.data import StreamDataModule
    from safemerge_pl.module import ContinualMergeModule

    class SafeMergeCLI(LightningCLI):
        """LightningCLI with the stream's callbacks as sections of their own."""

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
            return {"fit": skip, "validate": {*skip, "dataloaders"}, "test": {*skip, "dataloaders"}}

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_lightning_class_args(callbacks.ReferenceRows, "references")
            parser.add_lightning_class_args(callbacks.StreamReport, "report")
            parser.add_lightning_class_args(callbacks.MergedModelWriter, "output")
            parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
            parser.set_defaults(
                {
                    "checkpoint.save_top_k": -1,
                    "checkpoint.filename": "{epoch:02d}",
                    "checkpoint.save_on_train_epoch_end": True,
                }
            )

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            config = self._get(self.config_init, "trainer", default={})
            if config.get("max_epochs") is None and config.get("max_steps", -1) == -1:
                kwargs["max_epochs"] = len(self.datamodule.stream)  # one epoch a task
            trainer: L.Trainer = super().instantiate_trainer(**kwargs)
            _require_all_processes(trainer)
            return trainer

        def _instantiate_trainer(self, config: dict[str, Any], callbacks_: list[L.Callback]) -> L.Trainer:
            if config.get("enable_progress_bar") is not False:
                callbacks_ = [*callbacks_, callbacks.StreamProgress()]
            return super()._instantiate_trainer(config, callbacks_)

        def before_fit(self) -> None:
            config = self.config_init["fit"]
            if config.get("ckpt_path") == "last":
                config["ckpt_path"] = str(last_checkpoint(self.trainer))
                print(f"resuming from {config['ckpt_path']}")

    _silence_known_warnings()
    return SafeMergeCLI(
        ContinualMergeModule,
        StreamDataModule,
        subclass_mode_data=True,
        seed_everything_default=42,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "reload_dataloaders_every_n_epochs": 1,
            "use_distributed_sampler": False,
            "enable_model_summary": False,
        },
        run=run,
    )


def last_checkpoint(trainer: "L.Trainer") -> Path:
    """The newest checkpoint that an earlier run of the same name wrote.

    Raises:
        MisconfigurationException: if there is none.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    logger = trainer.logger
    root = Path(getattr(logger, "root_dir", None) or trainer.default_root_dir)
    found = sorted(root.glob("**/*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MisconfigurationException(
            f"no checkpoint under {root}: leave out --ckpt_path to start from the beginning."
        )
    return found[-1]


def _check() -> None:
    """List facts and problems of a configuration; exits with 1 if there is a problem."""
    from safemerge_pl.callbacks import MergeCallback
    from safemerge_pl.commands.check import check_stream

    cli = _lightning_cli(run=False)
    merge = MergeCallback.of(cli.trainer)
    if merge is None:
        _fail("the configuration has no merge callback: add SAFEMergeCallback under trainer.callbacks.")
    facts, problems = check_stream(cli.model, cli.datamodule, merge, Path(cli.trainer.default_root_dir))
    for fact in facts:
        print(fact)
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    if problems:
        _fail(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} found.")
    print("no problem found")


def _fold() -> None:
    """Fold one model or several, from command line options."""
    from jsonargparse import ArgumentParser

    import safemerge_pl.methods  # noqa: F401  # short class paths work for imported classes only
    from safemerge_pl.commands.fold import fold_once
    from safemerge_pl.runtime.progress import FoldProgress

    parser = ArgumentParser(prog="safemerge fold", description="Fold one more model into the deployed one.")
    parser.add_argument("--config", "-c", action="config")
    parser.add_function_arguments(fold_once, skip={"progress"})
    arguments = sys.argv[1:]
    if any(given.startswith("--method.") for given in arguments) and not {"--method", "--config", "-c"} & {
        given.partition("=")[0] for given in arguments
    }:
        arguments = ["--method", "SafeMerge", *arguments]  # what is meant where only its settings are given
    config = parser.instantiate_classes(parser.parse_args(arguments))
    sys.argv = [Path(sys.argv[0]).name.replace("__main__.py", "safemerge"), "fold", *sys.argv[1:]]  # for the model card
    options = {key: value for key, value in vars(config).items() if key != "config"}
    before = time.perf_counter()
    with FoldProgress() as progress:
        merger = fold_once(**options, progress=progress)
    seconds = time.perf_counter() - before
    count = 1 if isinstance(options["incoming"], str) else len(options["incoming"])
    for report in merger.reports[-count:]:
        print(
            f"{merger.method.label}: folded '{report.task}' as task {report.index} in {report.seconds:.1f} s, "
            f"{report.kept_fraction:.0%} of its entries in {len(report.layers)} layers"
        )
        for note in report.notes:
            print(f"note: {note}")
    tasks = f"{len(merger.tasks)} task{'' if len(merger.tasks) == 1 else 's'}"
    print(f"merged model: {options['output']}, {tasks}, SHA-256 {report.merged}, {seconds:.1f} s")


def _study() -> None:
    """Run a study from its configuration."""
    from jsonargparse import ArgumentParser

    _import_named_classes()
    from safemerge_pl.study import Study

    _silence_known_warnings()
    parser = ArgumentParser(prog="safemerge study", description="Orders x methods x settings, to tables and figures.")
    parser.add_argument("--config", "-c", action="config")
    parser.add_class_arguments(Study)
    config = parser.instantiate_classes(parser.parse_args())
    config.pop("config", None)
    Study(**{key: value for key, value in vars(config).items() if not key.startswith("_")}).run()


def _import_named_classes() -> None:
    """Short class paths in a configuration work for imported classes only; these packages list their kinds."""
    import safemerge_pl.backbones
    import safemerge_pl.data
    import safemerge_pl.methods  # noqa: F401


def _require_all_processes(trainer: "L.Trainer") -> None:
    """Refuse a launch as n processes with a trainer that knows of one: it would be n runs into one folder."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    started = int(os.environ.get("LT_DEVICES") or os.environ.get("WORLD_SIZE") or 1)
    if os.environ.get("WORLD_SIZE") and started > trainer.world_size:
        raise MisconfigurationException(
            f"{started} processes were started, but the trainer uses {trainer.world_size}; add "
            f"--trainer.devices {started} --trainer.strategy ddp."
        )


def _silence_known_warnings() -> None:
    """Lightning's remarks on what is intended here."""
    for message in (
        ".*this fit will run with no optimizer.*",
        ".*does not have many workers.*",
        ".*Found .* module\\(s\\) in eval mode.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())


def _is_for_the_user(error: Exception) -> bool:
    """Errors that say what to mend; anything else is a bug and keeps its traceback."""
    if isinstance(error, (ValueError, FileNotFoundError, PermissionError)):
        return True  # without the seconds that it takes to import Lightning
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"safemerge: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
