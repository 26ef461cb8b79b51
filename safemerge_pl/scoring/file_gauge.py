"""The drift of a merge of files: the model that they belong to is run beside them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from safemerge_pl.backbones.choose import choose_backbone
from safemerge_pl.checkpoints.open import CheckpointError, match_names, open_checkpoint
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.scoring.drift import gauge_of

__all__ = ["FileGauge"]


class FileGauge:
    """Measure how far features of noise move with merged parameters, given by the names that the files have.

    Args:
        pretrained: folder or hub id of a whole CLIP or T5 of transformers, or a folder of open_clip.
        device: where the model runs.

    Raises:
        CheckpointError: for another model, or one that cannot be loaded.

    Example:
        >>> from safemerge_pl.zoo import FILES
        >>> gauge = FileGauge(str(FILES / "model"))
        >>> gauge({}), gauge({"vision_model.post_layernorm.weight": torch.zeros(128)}) > 0.1
        (0.0, True)
    """

    def __init__(self, pretrained: str, device: str | torch.device = "cpu") -> None:
        backbone = choose_backbone(pretrained)
        backbone.load()
        tower = getattr(backbone.to(device), backbone.merged_attr)
        gauge = gauge_of(backbone, tower)
        assert gauge is not None, "every kind that is chosen knows its noise"
        self._gauge = gauge
        own = [name for name, _ in tower.named_parameters()]  # each once, also where two are tied
        self._names = match_names(own, open_checkpoint(pretrained))

    def __call__(self, weights: Mapping[str, Tensor]) -> float:
        """The drift with these parameters in the place of the pretrained ones."""
        return self._gauge.measure({own: weights[name] for own, name in self._names.items() if name in weights})

    def require_sight(self, plan: MergePlan) -> None:
        """Refuse a merge of parameters that the features do not depend on.

        Args:
            plan: what is merged.

        Raises:
            CheckpointError: naming the first of them.
        """
        seen = {plan.aliases.get(name, name) for name in self._names.values()}
        unseen = [name for name in plan.parameters if name not in seen]
        if unseen:
            raise CheckpointError(
                f"`max_drift` would not see {len(unseen)} of the merged parameters, first `{unseen[0]}`: choose others "
                "with `layers`, or bound by `max_response`."
            )
