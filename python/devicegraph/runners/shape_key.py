"""What identifies a captured graph."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ShapeKey"]


class ShapeKey(NamedTuple):
    """The key of a captured graph, and of everything that is kept for each graph.

    A tuple, because it is hashed in every step and a tuple hashes four times as fast as a frozen dataclass.

    Attributes:
        size: the bucket: requests in decode, tokens in prefill.
        stream_idx: which of several streams the graph is for, where an engine multiplexes.
        variant_label: which variant of the forward was captured (`lora`, `nolora`), as the engine's `variants` name it.
        attention_variant: which form of attention was captured, where an engine has several.
    """

    size: int
    stream_idx: int | None = None
    variant_label: str | None = None
    attention_variant: str | None = None

    def to_dict(self) -> dict[str, int | str]:
        """What is set in the key, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        rest = ", ".join(
            f"{name}={value}" for name, value in zip(self._fields[1:], self[1:], strict=True) if value is not None
        )
        return f"bucket {self.size}" + (f" ({rest})" if rest else "")
