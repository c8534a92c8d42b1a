"""What the comparison of backends adds to the reference decoder: attention as an operator, and prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.bench.decoder import Batch, Engine, attend

if TYPE_CHECKING:
    import devicegraph as dg


def attend_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Instead of `attend`: what a model makes of tokens that see nothing."""
    out.zero_()


# Defined piece by piece: what `custom_op` puts around a function takes longer than a launch.
_LIBRARY = torch.library.Library("devicegraph_bench", "DEF")
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", attend, _key)
torch.library.register_fake("devicegraph_bench::attend", lambda q, k, v, out, layer: None, lib=_LIBRARY)
ATTEND: Final[Any] = torch.ops.devicegraph_bench.attend.default


class PrefillEngine(Engine):
    """Its output is the hidden states: an engine runs the head on the last token of each prompt, outside the graph."""

    phase = "prefill"

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Batch:
        """The static batch of a bucket: one prompt has all of its tokens."""
        batch = super().make_batch(views, key)
        batch.batch_size, batch.lengths = 1, [key.size]
        return batch

    def batch(self, size: int, seed: int) -> Batch:
        """Three whole prompts of different lengths."""
        lengths = [size // 2, size * 5 // 16, size * 3 // 16]
        places = [(row, step) for row, length in enumerate(lengths, start=1) for step in range(length)]
        return self._batch(places, seed, batch_size=len(lengths), lengths=lengths)
