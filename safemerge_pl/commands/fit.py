"""``fit``, ``validate`` and ``test``: a merge stream under LightningCLI."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from safemerge_pl.backbones.hyper_parameters import require_known_classes
from safemerge_pl.callbacks import MergedModelWriter, MethodComparison, ReferenceRows, StreamProgress, StreamReport
from safemerge_pl.checkpoints.pickles import read_pickle
from safemerge_pl.commands.merge_section import add_merge_section, take_merge_section
from safemerge_pl.commands.parsers import Hints
from safemerge_pl.commands.plain_values import write_plain_values
from safemerge_pl.commands.remarks import silence_known_warnings
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.runtime.console import is_quiet
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.stopping import Resumable

__all__ = ["SafeMergeCLI", "build_cli", "last_checkpoint", "make_parsers", "run"]


def run() -> None:
    """Do what the command line says; its first word is the verb."""
    build_cli()


_DOES = {
    "fit": "Merge a stream of models and score it after each.",
    "validate": "Score a checkpoint of a stream.",
    "test": "Score a checkpoint of a stream on the test loaders.",
}


class _Parser(Hints, LightningArgumentParser):
    """LightningCLI's, with the name that was meant."""


class SafeMergeCLI(LightningCLI):
    """LightningCLI with the stream's callbacks as sections of their own."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verbs, with the arguments of the Trainer's methods that are not options."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        scored = {*skip, "dataloaders", "verbose"}
        return {"fit": skip, "validate": scored, "test": scored}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add a section for each callback that a stream always has."""
        add_merge_section(parser)
        parser.add_lightning_class_args(ReferenceRows, "references")
        parser.add_lightning_class_args(MethodComparison, "compare")
        parser.add_lightning_class_args(StreamReport, "report")
        parser.add_lightning_class_args(MergedModelWriter, "output")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_top_k": -1,
                "checkpoint.filename": "{epoch:02d}",
                "checkpoint.save_on_train_epoch_end": True,
            }
        )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Give the stream one epoch per task, unless the configuration says otherwise."""
        config = self._get(self.config_init, "trainer", default={})
        if config.get("max_epochs") is None and config.get("max_steps", -1) == -1:
            kwargs["max_epochs"] = len(self.datamodule.stream)
        trainer: L.Trainer = super().instantiate_trainer(**kwargs)
        _require_all_processes(trainer)
        return trainer

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        if is_quiet():
            config = {**config, "enable_progress_bar": False}
        if config.get("enable_progress_bar") is not False:
            callbacks = [*callbacks, StreamProgress()]
        return super()._instantiate_trainer(config, callbacks)

    def before_instantiate_classes(self) -> None:
        """Put the section ``merge`` where the trainer looks; expand ``~`` also where classes leave it as it is."""
        take_merge_section(self.config[self.config["subcommand"]] if "subcommand" in self.config else self.config)
        expand_home(self.config)

    def _parse_ckpt_path(self) -> None:
        """Lightning parses the hyper-parameters of a checkpoint as configuration, which imports what they name."""
        verb = self.config.get("subcommand")
        path = self.config[verb].get("ckpt_path") if verb else None
        if path and Path(path).is_file():
            require_known_classes(read_pickle(Path(path)), str(path), ContinualMergeModule)
        super()._parse_ckpt_path()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Left to itself Lightning runs what is in a checkpoint from the web."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand != "fit":  # the table of the progress bar is enough
            kwargs["verbose"] = self.trainer.progress_bar_callback is None and not is_quiet()
        return kwargs | {"weights_only": kwargs.get("weights_only") is not False}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except (KeyboardInterrupt, SystemExit) as stop:  # Lightning makes an exit of an interrupt
            interrupted = KeyboardInterrupt in (type(stop), type(stop.__context__))
            if subcommand == "fit" and interrupted and _has_checkpoint(self.trainer):
                how = "repeat the command with --ckpt_path last to go on after the last whole task."
                raise Resumable(how) from stop
            raise

    def before_fit(self) -> None:
        """Find the checkpoint that ``--ckpt_path last`` means."""
        config = self.config_init["fit"]
        if config.get("ckpt_path") == "last":
            config["ckpt_path"] = str(last_checkpoint(self.trainer))
            print(f"resuming from {config['ckpt_path']}")


class _OnlyBuilt(SafeMergeCLI):
    """Reads the same options and configurations, builds the same objects, and does nothing with them."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Leave it at that."""


class _UnreadError(Exception):
    """Holds the parsers of the verbs, which have not read anything."""


class _OnlyParsers(SafeMergeCLI):
    """Makes its parsers and stops there; LightningCLI makes and uses them in one go."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Give the parsers to who asked for them."""
        raise _UnreadError(self._subcommand_parsers)


def make_parsers() -> dict[str, LightningArgumentParser]:
    """The parsers of ``fit``, ``validate`` and ``test``, by verb."""
    try:
        _build(_OnlyParsers)
    except _UnreadError as unread:
        parsers: dict[str, LightningArgumentParser] = unread.args[0]
    return parsers


def build_cli(*, run: bool = True) -> SafeMergeCLI:
    """Read the command line, whose first word is a verb.

    Args:
        run: do what the verb says; else only build module, data and trainer.
    """
    return _build(SafeMergeCLI if run else _OnlyBuilt)


def _build(kind: type[SafeMergeCLI]) -> SafeMergeCLI:
    silence_known_warnings()
    write_plain_values()
    return kind(
        ContinualMergeModule,
        StreamDataModule,
        subclass_mode_data=True,
        seed_everything_default=42,
        auto_configure_optimizers=False,
        parser_class=_Parser,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={verb: {"description": told} for verb, told in _DOES.items()},
        trainer_defaults={
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "reload_dataloaders_every_n_epochs": 1,
            "use_distributed_sampler": False,
            "enable_model_summary": False,
        },
    )


def last_checkpoint(trainer: L.Trainer) -> Path:
    """The newest checkpoint that an earlier run of the same name wrote.

    Raises:
        MisconfigurationException: if there is none.
    """
    root = _root(trainer)
    found = sorted(root.glob("**/*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MisconfigurationException(
            f"no checkpoint under {root}: leave out --ckpt_path to start from the beginning."
        )
    return found[-1]


def _root(trainer: L.Trainer) -> Path:
    """Folder of all runs of this name."""
    return Path(getattr(trainer.logger, "root_dir", None) or trainer.default_root_dir)


def _has_checkpoint(trainer: L.Trainer) -> bool:
    """Whether the run has written a checkpoint that :func:`last_checkpoint` finds."""
    written = [Path(each.best_model_path) for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    return any(path.is_file() and _root(trainer).resolve() in path.resolve().parents for path in written)


def expand_home(config: Any) -> None:
    """Expand ``~`` in every string of a configuration that starts with ``~/``, wherever it stands.

    Args:
        config: namespaces, mappings and lists in each other; changed in place.
    """
    content = vars(config) if isinstance(config, Namespace) else config
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        if isinstance(value, str) and value.startswith("~/"):
            content[key] = str(local_path(value))
        else:
            expand_home(value)


def _require_all_processes(trainer: L.Trainer) -> None:
    """Refuse a launch as n processes with a trainer that knows of one: it would be n runs into one folder."""
    started = int(os.environ.get("LT_DEVICES") or os.environ.get("WORLD_SIZE") or 1)
    if os.environ.get("WORLD_SIZE") and started > trainer.world_size:
        raise MisconfigurationException(
            f"{started} processes were started, but the trainer uses {trainer.world_size}; add "
            f"--trainer.devices {started} --trainer.strategy ddp."
        )
