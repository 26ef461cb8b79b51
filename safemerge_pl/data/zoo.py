"""The embedded zoo's image sets as a stream."""

from safemerge_pl.data.images import ImageSet
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import name_list
from safemerge_pl.zoo import Zoo

__all__ = ["ZooData"]


class ZooData(StreamDataModule):
    """The embedded zoo's eight tasks and three probes.

    Args:
        tasks: names in the zoo; all eight if left out, or the length of one of the zoo's streams.
        controls: held-out sets; the zoo's three probes if left out.
        order_seed: see :class:`safemerge_pl.data.stream.TaskStream`.
        batch_size: images per batch.
        extra_zoo: folder with more tasks in the zoo's layout.

    Example:
        >>> ZooData(tasks=["flags", "mnist"]).stream.names
        ('flags', 'mnist')
    """

    def __init__(
        self,
        tasks: list[str] | int | str | None = None,
        controls: list[str] | str | None = None,
        order_seed: int | None = None,
        batch_size: int = 128,
        extra_zoo: str | None = None,
    ) -> None:
        self.zoo = Zoo(None if extra_zoo is None else local_path(extra_zoo))
        names = self.zoo.tasks(tasks) if tasks is None or isinstance(tasks, int) else name_list(tasks, "tasks")
        probes = self.zoo.controls if controls is None else name_list(controls, "controls")
        for name in (*names, *probes):
            self.zoo.describe(name)
        super().__init__(names, probes, order_seed, batch_size, keep_in_memory=True)

    def load_set(self, name: str) -> ImageSet:
        """Read a parquet file of the zoo."""
        import datasets
        from pyarrow import parquet

        about = self.zoo.describe(name)
        rows = datasets.Dataset(parquet.read_table(self.zoo.data(name)))  # no copy in the user's cache
        return ImageSet(name, rows, tuple(about["classes"]), tuple(about["templates"]))
