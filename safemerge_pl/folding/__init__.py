"""One fold, stack by stack."""

from safemerge_pl.folding.engine import Folding as Folding

__all__ = [
    "Folding",
]
