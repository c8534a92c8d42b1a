"""One output for all buckets of a backend, at addresses that no capture order changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from devicegraph.outputs import outline_of, replace_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class SharedOutput:
    """Tensors that hold the largest output, and smaller ones as their first rows; for each form of output others.

    A replay overwrites what the one before left, whichever bucket it was.
    """

    def __init__(self) -> None:
        # Forms are few: one for each variant of a forward, as a rule the same.
        self._held: list[tuple[Any, list[torch.Tensor]]] = []

    def make_room(self, output: Any) -> None:
        """Makes the tensors large enough for an output. What was given out before stays where it is."""
        form, wanted = _form_of(output), tensors_of(output)
        held = self._tensors(form)
        if held is None or not _fits(held, wanted):
            # Graphs that were captured into the old tensors keep them.
            with torch.inference_mode(False):
                made = [torch.empty_like(tensor, requires_grad=False) for tensor in wanted]
            self._held = [(other, tensors) for other, tensors in self._held if other != form] + [(form, made)]

    def store(self, output: Any) -> Any:
        """Copies an output to where it is shared, and returns it there; captured, the copy is part of the graph."""
        wanted = tensors_of(output)
        held = self._tensors(_form_of(output))
        assert held is not None  # room was made for what the warm-ups gave
        places = [_first_rows(tensor, like.shape) for tensor, like in zip(held, wanted, strict=True)]
        for place, tensor in zip(places, wanted, strict=True):
            place.copy_(tensor)
        return replace_tensors(output, places)

    def clear(self) -> None:
        """Lets go of the tensors."""
        self._held = []

    def _tensors(self, form: Any) -> list[torch.Tensor] | None:
        return next((tensors for other, tensors in self._held if other == form), None)


def _form_of(output: Any) -> Any:
    return outline_of(output), [(tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors_of(output)]


def _fits(held: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(
        have >= need
        for mine, tensor in zip(held, wanted, strict=True)
        for have, need in zip(mine.shape, tensor.shape, strict=True)
    )


def _first_rows(held: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    for axis, size in enumerate(shape):
        held = held.narrow(axis, 0, size)
    return held
