"""What a runner decides about a batch, always with a code from one closed list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["DECISION_CODES", "Decision"]

#: Every code, with what it means.
DECISION_CODES: Final = {
    "graph": "a captured graph is replayed",
    "disabled": "the phase is configured without graphs",
    "not-captured": "`capture()` has not been called",
    "nothing-captured": "`capture()` left no graph: its report says why",
    "idle": "the batch is empty, and no other rank asks for a graph",
    "above-largest": "the batch is larger than the largest bucket",
    "too-many-requests": "the batch has more requests than the buffers were made for",
    "no-exact-bucket": "padding is off and no bucket has exactly this size",
    "padding-too-large": "padding would multiply the work beyond the limit",
    "bucket-dropped": "the bucket could not be captured, nor can a larger one take the batch",
    "variant-unknown": "the batch needs a variant that is not in the engine's `variants`",
    "not-uniform": "the requests do not have the number of tokens each that the graphs were captured for",
    "encoder-lens-mixed": "some requests of the batch have encoded tokens, and some have none",
    "encoder-lens-unknown": "the batch has its encoded lengths on the device only, and reading them would wait for it",
    "field-missing": "the batch lacks a field that the graph reads",
    "field-unexpected": "the batch carries a field that the graph was captured without",
    "backend-refused": "the backend refused the batch",
    "voted-eager": "another rank cannot replay a graph in this step",
}


class Decision:
    """Whether a batch is replayed through a graph, why, and through which.

    Truthy for a graph. Decisions are made ahead and shared: compare `code`, and keep no state on them.

    Attributes:
        code: one of `DECISION_CODES`.
        key: the graph's key; None for an eager step.
        fields: the slots that `field-missing` and `field-unexpected` speak of.
    """

    __slots__ = ("code", "fields", "key")

    def __init__(self, code: str, key: ShapeKey | None = None, fields: tuple[str, ...] = ()) -> None:
        self.code = code
        self.key = key
        self.fields = fields

    def __bool__(self) -> bool:
        return self.key is not None

    @property
    def reason(self) -> str:
        """The code's meaning, with the fields where there are any."""
        meaning = DECISION_CODES[self.code]
        return f"{meaning}: {', '.join(f'`{name}`' for name in self.fields)}" if self.fields else meaning

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        fields = f", fields={self.fields!r}" if self.fields else ""
        return f"Decision({self.code!r}{key}{fields})"


#: The eager decisions, made once.
EAGER: Final = {code: Decision(code) for code in DECISION_CODES if code != "graph"}
