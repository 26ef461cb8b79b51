"""The paper's vision benchmarks: twenty image sets of the hub and three held-out ones."""

import dataclasses
from typing import Any

from safemerge_pl.data.image_files import open_rows
from safemerge_pl.data.image_sets import CONTROLS, SetSpec, find_spec, find_templates, stream_of
from safemerge_pl.data.images import ImageSet
from safemerge_pl.data.module import StreamDataModule

__all__ = ["CLIPBenchmarkData"]


class CLIPBenchmarkData(StreamDataModule):
    """Image sets described by the files in ``sets/``, read from the hub's cache, the hub, or a folder.

    Everything is opened and compared with its description before the stream starts. Images stay on disk until a batch
    needs them.

    Args:
        tasks: 8, 14 or 20 for the paper's streams, or names of sets.
        controls: held-out sets; the paper's three if left out.
        order_seed: 42 to 51 are the paper's ten orders; as given if left out.
        batch_size: images per batch.
        num_workers: processes that decode images.
        folder: with one sub-folder per set, in place of the hub: ``<name>/**/<split>-*.parquet``,
            ``<name>/<split>/*.tar`` or ``<name>/<split>/<class>/<image>``.
        cache_dir: where fetched and prepared files are kept; the libraries' own places if left out.
        prompts: templates by set, in place of the described ones: a list, or ``openai``, ``simple`` or ``single``.
        sets: folder with descriptions of more sets (see ``sets/mnist.yaml``); they win over those that come along.
        limit: score the first so many images of each set alone, to try things out.
        any_size: take splits of another size than described.
        published: name of the backbone whose right answers the descriptions know, such as ``clip-vit-base-patch32``;
            the scores that ``assert_scores`` compares with.

    Example:
        >>> CLIPBenchmarkData(tasks=8, order_seed=42).stream.names[:3]
        ('eurosat', 'svhn', 'mnist')
    """

    def __init__(
        self,
        tasks: int | list[str] | str = 8,
        controls: list[str] | str | None = None,
        order_seed: int | None = None,
        batch_size: int = 128,
        num_workers: int = 4,
        folder: str | None = None,
        cache_dir: str | None = None,
        prompts: dict[str, str | list[str]] | None = None,
        sets: str | None = None,
        limit: int | None = None,
        any_size: bool = False,
        published: str | None = None,
    ) -> None:
        held_out: str | list[str] = list(CONTROLS) if controls is None else controls
        super().__init__(stream_of(tasks), held_out, order_seed, batch_size, num_workers)
        if limit is not None and limit < 1:
            raise ValueError(f"`limit` must be at least 1, got {limit}.")
        self.folder, self.cache_dir, self.limit, self.any_size = folder, cache_dir, limit, any_size
        self.published = published
        self.specs: dict[str, SetSpec] = {name: find_spec(name, sets) for name in (*self.stream, *self.controls)}
        self.prompts = {name: find_templates(given, f"`prompts` of {name}") for name, given in (prompts or {}).items()}
        stray = [name for name in self.prompts if name not in self.specs]
        if stray:
            raise ValueError(f"`prompts` names {', '.join(stray)}, which is neither a task nor a control set.")

    def load_set(self, name: str) -> ImageSet:
        """Open a set and compare it with its description."""
        spec = self.specs[name]
        rows = open_rows(spec, self.folder, self.cache_dir, any_size=self.any_size)
        if self.limit is not None:
            rows = rows.select(range(min(self.limit, len(rows))))
        return ImageSet(name, rows, spec.classes, self.prompts.get(name, spec.templates))

    def settings(self) -> dict[str, Any]:
        """Descriptions, prompts and limit."""
        specs = {name: dataclasses.asdict(spec) for name, spec in self.specs.items()}
        return {"sets": specs, "prompts": self.prompts, "limit": self.limit, "folder": self.folder}

    @property
    def expected(self) -> dict[str, dict[str, float]]:
        """Scores of the pretrained model and of the experts, from right answers known to the image.

        Empty without ``published``; sets that are scored with other prompts or in part are left out.
        """
        scores: dict[str, dict[str, float]] = {"pretrained": {}, "individual": {}}
        for name, spec in self.specs.items() if self.published and self.limit is None else ():
            for kind, row in (("pretrained", "pretrained"), ("expert", "individual")):
                count = spec.count(self.published or "", kind)
                scored = row == "pretrained" or name in self.stream.names
                if count is not None and spec.size and scored and name not in self.prompts:
                    scores[row][name] = count / spec.size
        return {row: known for row, known in scores.items() if known}
