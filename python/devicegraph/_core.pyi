"""The Rust core: configuration rules, buckets, planning and memory layout. Torch-free."""

from collections.abc import Sequence
from typing import Final, final

__all__ = [
    "LARGE_PAD_BYTES",
    "Arena",
    "CopyGroup",
    "FillPlan",
    "FillPlanner",
    "PoolLedger",
    "SlotLayout",
    "__version__",
    "is_slot_dtype",
]

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

LARGE_PAD_BYTES: Final[int]
"""The bytes below which padding is copied from a constant rather than written by a call of its own."""

def is_slot_dtype(name: str, /) -> bool:
    """Whether a slot can have elements of that dtype: torch's name, or an alias, with or without `torch.`."""

@final
class SlotLayout:
    """A registered slot as plain values: what planning has to know of it."""

    def __new__(
        cls,
        name: str,
        *,
        axis: str,
        policy: str,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        dim: int,
        rows: tuple[int, int, int],
        capacity: int,
        feed: str,
        device: str,
        source_device: str,
        required: bool,
        allow_narrowing: bool,
        prefix: bool,
    ) -> SlotLayout:
        """A slot that is known to be possible.

        Args:
            name: as messages have it.
            axis: `bs`, `tokens` or `none`.
            policy: the value of a `PaddingPolicy`.
            dtype: torch's name, with or without `torch.`; aliases such as `long` count as what they stand for.
            shape: of the whole buffer.
            strides: of the whole buffer, in elements.
            dim: the dimension that has the rows; of no meaning where the axis is none.
            rows: `(base, step, unit)`: there are `base + step * (size // unit)` rows at a size.
            capacity: the largest size along the axis.
            feed: where the live rows come from: a `field` of the batch, a `function`, or `elsewhere`.
            device: where the buffer is, in full: `cuda:0`, `cpu`.
            source_device: where a source may be: `own`, `cpu` or `any`.
            required: refuse a step without the field, unless it is idle.
            allow_narrowing: cast sources whose dtype holds values that this one does not.
            prefix: accept sources that are shorter along the last dimension.

        Raises:
            SlotError: `unknown-word`, `unsupported-dtype`, `empty-shape`, `shared-elements`, `capacity-too-small` or
                `no-trailing-axis`.
        """
    def padded_rows(self, padded_bs: int, padded_num_tokens: int, /) -> int:
        """The rows of a bucket; 0 where the axis is none.

        Raises:
            SlotError: `not-a-size`, `negative-size`, `above-capacity` or `bucket-not-divisible`.
        """
    def live_rows(self, raw_bs: int, raw_num_tokens: int, /) -> int:
        """The rows of a live size, whole units only; 0 where the axis is none.

        Raises:
            SlotError: `not-a-size` or `negative-size`.
        """

@final
class FillPlanner:
    """The slots of a registry, ready to be planned for."""

    def __new__(cls, slots: Sequence[SlotLayout], *, max_bs: int, max_num_tokens: int) -> FillPlanner:
        """A planner for these slots, whose buffers hold that many requests and tokens."""
    def check_bucket(self, padded_bs: int, padded_num_tokens: int, /) -> None:
        """Refuses a bucket that the buffers, or the rows of some slot, do not allow.

        Raises:
            SlotError: `not-a-size`, `negative-size`, `above-capacity` or `bucket-not-divisible`.
        """
    def plan(
        self,
        sources: Sequence[tuple[str, Sequence[int], str, bool] | None],
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        unread: bool,
    ) -> FillPlan:
        """Checks a step and says what to carry out, in the fewest calls.

        A source fits where it has the live rows and otherwise the slot's shape (a length of 1 is not repeated), is
        where the slot allows, and has a dtype whose values the slot's holds: integers in wider integers and in floats
        with enough digits, booleans in everything but bare exponents, floats in floats with no fewer digits and no
        smaller range.

        Args:
            sources: for each slot None, or (dtype, shape, device in full, whether it is contiguous).
            raw_bs: live requests.
            padded_bs: requests of the bucket.
            raw_num_tokens: live tokens.
            padded_num_tokens: tokens of the bucket.
            unread: there was no batch to read: slots with a function are padded whole, not left alone.

        Raises:
            SlotError: a size (`not-a-size`, `negative-size`, `raw-above-padded`, `above-capacity`,
                `bucket-not-divisible`) or the first slot whose source does not fit (`field-missing`, `wrong-rows`,
                `wrong-shape`, `too-many-rows`, `too-wide`, `wrong-device`, `narrowing-cast`, `unsupported-dtype`).
        """

@final
class FillPlan:
    """What a fill carries out: fills, then groups, then copies. Slots are named by position.

    Regions do not overlap, but for one case: rows that are padded whole because their source is narrower than the slot
    are then copied into, which is why copies come last.
    """

    @property
    def fills(self) -> list[tuple[tuple[int, int, list[int], list[int]], bool]]:
        """Regions written with one value: (slot, offset, shape, strides) in elements; True for zeros, False for the
        slot's pad value.
        """
    @property
    def groups(self) -> list[CopyGroup]:
        """Grouped copies, one call each."""
    @property
    def copies(self) -> list[tuple[int, int, list[int], list[int]]]:
        """Regions that take a whole source by a call of their own: (slot, offset, shape, strides) in elements."""
    @property
    def calls(self) -> int:
        """How many calls all of it takes."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class CopyGroup:
    """One grouped copy call. Where it casts, `writes` and `reads` differ; else they are a type to move bytes in."""

    @property
    def device(self) -> str:
        """Where all of it is."""
    @property
    def writes(self) -> str:
        """The dtype to write as."""
    @property
    def reads(self) -> str:
        """The dtype to read as."""
    @property
    def tails(self) -> list[tuple[int, list[int], int, bool]]:
        """Padding: (slot, where each run starts, elements of a run, zeros or the slot's pad value), in elements."""
    @property
    def heads(self) -> list[tuple[int, list[int], list[int], int]]:
        """Live rows: (slot, the source's shape, where each run starts, elements of a run), in the slot's elements.

        The runs take the source's elements in row-major order.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PoolLedger:
    """Who shares which input buffer. It holds no memory; safe to use from several threads and from finalizers."""

    def __new__(cls) -> PoolLedger:
        """An empty ledger."""
    def join(
        self,
        name: str,
        *,
        dtype: str,
        device: str,
        current_index: int,
        shape: Sequence[int],
        policy: str,
        pad: bytes,
        rewrites: bool,
        fed: bool,
        owner: str,
    ) -> tuple[int, int, bool]:
        """Adds a user: to the first memory of this name, size, dtype and device that it can share, else to a new one.

        Two users can share where both rewrite what they read; where they keep rows by the same policy, pad value and
        shape; or where one is `foreach_copy` and the other rewrites rows of the same shape and pads with zeros.

        Args:
            name: of the input.
            dtype: torch's name, or an alias.
            device: with or without its number.
            current_index: the number that a device without one means.
            shape: of the buffer.
            policy: the value of a `PaddingPolicy`.
            pad: the bytes of the pad value.
            rewrites: each fill writes all rows that are then read.
            fed: fills write live rows.
            owner: who it is, for the printed ledger.

        Returns:
            The memory, the user, and whether the memory is new. Numbers are never used again.

        Raises:
            SlotError: `unsupported-dtype`, `bad-device` or `unknown-word`; nothing changed.
        """
    def leave(self, user: int, /) -> int | None:
        """Removes a user, and returns its memory where that has no other. An unknown user is nobody's last."""
    @property
    def total_bytes(self) -> int:
        """Bytes of all memories."""
    @property
    def saved_bytes(self) -> int:
        """Bytes that the users would take besides, if each had its own."""
    def __len__(self) -> int:
        """How many memories there are."""
