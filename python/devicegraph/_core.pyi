"""The Rust core: configuration rules, buckets, planning and memory layout. Torch-free."""

from typing import Final, final

__all__ = ["Arena", "__version__"]

__version__: Final[str]

@final
class Arena:
    """Places of blocks in segments that never move: best fit, neighbours joined on release.

    It hands out offsets and holds no memory itself. Safe to use from several threads and from finalizers.
    """

    def __new__(cls, *, alignment: int, segment_bytes: int) -> Arena:
        """An empty arena.

        Args:
            alignment: bytes; every offset and size is a multiple of it. A power of two.
            segment_bytes: the least size of a segment that a request opens.

        Raises:
            ValueError: the alignment is not a power of two.
        """
    def allocate(self, bytes: int, /) -> tuple[int, int, int]:
        """Reserves a block in the tightest free span and returns (segment, offset, bytes reserved).

        Raises:
            MemoryError: the request is larger than any arena can be.
        """
    def release(self, segment: int, offset: int, bytes: int, /) -> None:
        """Gives a block back, exactly as `allocate` returned it.

        Raises:
            ValueError: no such block is live; nothing changes.
        """
    @property
    def segments(self) -> list[int]:
        """Bytes of each segment, in the order in which they were opened."""
    @property
    def reserved_bytes(self) -> int:
        """Bytes in all segments."""
    @property
    def live_bytes(self) -> int:
        """Bytes that blocks reserve now."""
    @property
    def peak_bytes(self) -> int:
        """The most bytes that blocks reserved at once; no layout could do with less."""
