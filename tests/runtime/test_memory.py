"""How much memory a piece of work takes."""

from safemerge_pl.runtime.memory import PeakMemory


def test_peak_memory_sees_what_is_allocated() -> None:
    """Also where it is memory that was freed before and is still resident."""

    def blocks() -> list[bytearray]:
        return [bytearray(b"x" * 2**16) for _ in range(80 * 2**4)]

    freed, kept = blocks(), bytearray(b"x" * 2**16)  # the latter behind, so that what is freed is not at the end
    del freed
    with PeakMemory() as peak:
        again = blocks()
    del again, kept
    assert peak.mib is None or 70 < peak.mib < 200
