"""An incoming model under the pretrained model's names: matched once, and seen to fit tensor by tensor."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import counterparts
from safemerge_pl.checkpoints.adapted import BoundAdapter, bind
from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.checkpoints.common_names import respell
from safemerge_pl.checkpoints.differences import Cut, Mismatch, differences, is_resized, settings, tokenizers
from safemerge_pl.checkpoints.layouts import convert_layout, turn_alike
from safemerge_pl.checkpoints.names import names_alike
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, match_names
from safemerge_pl.checkpoints.tensors import is_floating, tied_names
from safemerge_pl.checkpoints.values import require_dtype, require_finite

__all__ = ["Fitted", "align", "bind_adapter", "fit"]


class Fitted(Checkpoint):
    """The tensors of an incoming model that are asked for, by the pretrained model's names.

    Args:
        incoming: the model, an adapter on its base.
        pretrained: the model whose names they are.
        names: each of its names -> the name in ``incoming``.
        on_mismatch: what was done about another image size or vocabulary.

    Attributes:
        incoming: see above.
        names: see above.
        beside: what else both models have in floating point and one shape, tied tensors once: pretrained name -> the
            name in ``incoming``.
    """

    def __init__(
        self, incoming: Checkpoint, pretrained: Checkpoint, names: Mapping[str, str], on_mismatch: Mismatch
    ) -> None:
        self.source, self.folder, self.notes = incoming.source, incoming.folder, incoming.notes
        self.names = dict(names)
        self.beside: dict[str, str] = {}
        self.incoming, self._pretrained, self._on_mismatch = incoming, pretrained, on_mismatch

    def __getitem__(self, name: str) -> Tensor:
        return self.incoming[self.names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self.incoming.shape(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self.incoming.dtype(self.names[name])

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter on the pretrained model."""
        return isinstance(self.incoming, BoundAdapter)

    def changed_beside(self) -> list[str]:
        """Names of the tensors beside that may differ; an adapter tells which it does not touch."""
        if isinstance(self.incoming, BoundAdapter):
            return [name for name, theirs in self.beside.items() if self.incoming.touches(theirs)]
        return list(self.beside)

    def was_made_for(self, pretrained: Checkpoint, parameters: Sequence[str], on_mismatch: Mismatch) -> bool:
        """Whether these are the parameters of this very model, so that it need not be matched again."""
        same = self._pretrained is pretrained and self._on_mismatch == on_mismatch
        return same and list(self.names) == list(parameters)

    def require_change(self) -> None:
        """Refuse an adapter whose products are all zero: it was never trained.

        Raises:
            CheckpointError: if it leaves all tensors as they are.
        """
        if isinstance(self.incoming, BoundAdapter):
            self.incoming.require_change(self.names)


def fit(
    pretrained: Checkpoint,
    parameters: Sequence[str],
    incoming: Checkpoint,
    *,
    values: bool = True,
    on_mismatch: Mismatch = "error",
) -> Fitted:
    """See that every parameter to merge is in an incoming model, with the right shape and a dtype that can be merged.

    Args:
        pretrained: the model all others were fine-tuned from; adapters are put on it.
        parameters: its names of the parameters to merge.
        incoming: the model to merge; what this function gave is taken as it is, but for its values.
        values: also read the tensors and look for NaN and Inf; otherwise headers only.
        on_mismatch: ``"pretrained"`` takes a model of another image size or vocabulary: its position table is left
            out, and of its embeddings only the rows that both models have are merged.

    Returns:
        The parameters under the pretrained model's names, with notes on what differs beside them.

    Raises:
        CheckpointError: naming the tensor and the remedy.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> pretrained = Memory({"encoder.fc1.weight": torch.zeros(2, 1), "head": torch.zeros(3)}, "a file")
        >>> incoming = Memory({"module.encoder.fc1.weight": torch.ones(2, 1)}, "another file")
        >>> fitted = fit(pretrained, ["encoder.fc1.weight"], incoming)
        >>> list(fitted), fitted["encoder.fc1.weight"].tolist()
        (['encoder.fc1.weight'], [[1.0], [1.0]])
    """
    if isinstance(incoming, Fitted) and incoming.was_made_for(pretrained, parameters, on_mismatch):
        fitted = incoming
    else:
        fitted = align(pretrained, parameters, incoming, on_mismatch=on_mismatch)
    if values:
        fitted.require_change()
    for name, theirs in fitted.names.items():
        _require_shape(pretrained, name, fitted)
        require_dtype(fitted, name, theirs)
        if values:
            require_finite(fitted[name], theirs, fitted.source)
    return fitted


def _require_shape(pretrained: Checkpoint, name: str, fitted: Fitted) -> None:
    """Refuse a tensor of another shape, with what it may come from."""
    ours, found = pretrained.shape(name), fitted.shape(name)
    if found == ours:
        return
    if 0 in found:
        hint = "it is partitioned (ZeRO-3, FSDP); gather the checkpoint first"
    elif is_resized(pretrained, name, fitted, name):
        hint = (
            "resize its embeddings to the pretrained model's, or merge the rows that both have with `on_mismatch` "
            "'pretrained'"
        )
    else:
        hint = "is it a fine-tune of this model?"
    raise CheckpointError(
        f"{fitted.source}: `{fitted.names[name]}` has shape {found}, the pretrained model's `{name}` has {ours}: {hint}"
    )


def align(
    pretrained: Checkpoint,
    parameters: Sequence[str],
    incoming: Checkpoint,
    *,
    on_mismatch: Mismatch = "error",
) -> Fitted:
    """An incoming model under the pretrained model's names: an adapter on its base, another layout converted.

    Args:
        pretrained: the model all others were fine-tuned from; adapters are put on it.
        parameters: its names of the tensors that are wanted.
        incoming: the model.
        on_mismatch: see :func:`fit`.

    Returns:
        The wanted tensors, whose shapes and dtypes may still be others; with notes on what differs beside them.

    Raises:
        CheckpointError: if a tensor is missing, an adapter changes nothing that is wanted, or image sizes differ.
    """
    whole = incoming.incoming if isinstance(incoming, Fitted) else incoming  # it was fitted to another model
    checkpoint, names = _match(pretrained, parameters, bind_adapter(pretrained, parameters, whole))
    rest = [name for name in counterparts(pretrained, parameters, pretrained) if name not in names]
    others = names_alike(names, rest, checkpoint)
    notes = [
        *differences(pretrained, others, checkpoint, on_mismatch),
        *settings(pretrained, checkpoint),
        *tokenizers(pretrained, parameters, checkpoint),
    ]
    cut = {theirs: name for name, theirs in names.items() if is_resized(pretrained, name, checkpoint, theirs)}
    if cut and on_mismatch == "pretrained":
        checkpoint = Cut(checkpoint, pretrained, cut)
        notes += [f"`{theirs}` is merged in the rows that both models have" for theirs in cut]
    fitted = Fitted(checkpoint, pretrained, names, on_mismatch)
    fitted.beside = _find_beside(pretrained, names, checkpoint)
    fitted.notes = tuple(dict.fromkeys((*checkpoint.notes, *notes)))
    return fitted


def _find_beside(pretrained: Checkpoint, names: Mapping[str, str], checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors that both models have and that are not wanted: pretrained name -> the name in the other."""
    aliases = tied_names(pretrained)
    wanted = {aliases.get(name, name) for name in names}
    unwanted = (name for name in pretrained if name not in aliases and name not in wanted)
    # running statistics are no weights: nobody trains them
    rest = [n for n in unwanted if is_floating(pretrained, n) and not n.endswith(("running_mean", "running_var"))]
    found = names_alike(names, rest, checkpoint)
    taken, beside = set(names.values()), dict[str, str]()
    for name, theirs in found.items():
        same = pretrained.shape(name) == checkpoint.shape(theirs) and is_floating(checkpoint, theirs)
        if same and theirs not in taken:
            beside[name] = theirs
            taken.add(theirs)
    return beside


def bind_adapter(
    pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint, *, values: bool = False
) -> Checkpoint:
    """An adapter on its base; any other model as it is.

    Args:
        pretrained: the base.
        parameters: names of which the adapter has to change one at least.
        incoming: the model.
        values: also look whether the adapter's products are zero; otherwise at names only.

    Raises:
        CheckpointError: if an adapter does not fit, or changes none of the parameters.
    """
    if not isinstance(incoming, Adapter):
        return incoming
    bound = bind(incoming, pretrained)
    bound.require_change(parameters, values=values)
    return bound


def _match(
    pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint
) -> tuple[Checkpoint, dict[str, str]]:
    """A model that holds all parameters, converted from another library's layout if need be, and their names in it."""
    if isinstance(incoming, BoundAdapter) and set(parameters) <= incoming.keys():  # it has the base's names
        return incoming, {name: name for name in parameters}
    try:
        names = match_names(parameters, incoming, pretrained)
        return turn_alike(pretrained, incoming, names), names
    except CheckpointError as error:
        other, reason = None, error
    try:
        other = convert_layout(pretrained, parameters, incoming)
    except CheckpointError as error:
        reason = error
    other = other or respell(pretrained, parameters, incoming)
    if other is None:
        raise reason
    return other, {name: name for name in parameters}
