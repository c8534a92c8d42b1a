"""A draft model: the first layers of the same weights look several tokens ahead, all of it in one graph.

It needs no cache of its own. What its layers keep of a token is what the same layers of the whole model keep of it, so
that the two share theirs, and prompts and accepted tokens are there already.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

import devicegraph as dg
from devicegraph.demo.graphs import DecodeForward, decode_registry
from devicegraph.demo.model import Model

if TYPE_CHECKING:
    from devicegraph.demo.batches import DecodeBatch
    from devicegraph.demo.blocks import Cache


class DraftForward(DecodeForward):
    """The tokens that follow the last one of each request, each found from the one before."""

    def __init__(self, model: Model, cache: Cache, limits: dg.Limits, tokens: int) -> None:
        super().__init__(model, cache, limits)
        self._tokens = tokens

    def forward(self, batch: DecodeBatch) -> torch.Tensor:  # type: ignore[override]  # it needs no logits
        """`[batch_size, tokens]` int64."""
        given = vars(batch).copy()
        found = []
        try:
            for _ in range(self._tokens):
                batch.input_ids = super().forward(batch).token_ids
                found.append(batch.input_ids)
                # Attention looks at the batch of the step, which is this one, a token further.
                batch.positions = batch.positions + 1
                batch.seq_lens = batch.seq_lens + 1
                batch.out_cache_loc = self.cache.locations(batch.block_tables, batch.positions[:, None])[:, 0]
        finally:
            vars(batch).update(given)
        return torch.stack(found, 1)


class DraftRunner(dg.DecodeCudaGraphRunner):
    """A decode runner of another forward.

    Steps of one graph read lengths that only the graph knows, and a break would find those of the first one: what is
    captured is captured whole.

    Args:
        model: the whole one.
        cache: its cache.
        config: how to capture the model's own decode steps.
        max_bs: requests of a step.
        table_width: blocks that a request can hold.
        layers: the first of the model's that draft.
        tokens: drafted for each request.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        config: dg.CudaGraphConfig,
        max_bs: int,
        table_width: int,
        layers: int,
        tokens: int,
    ) -> None:
        if config.decode.backend != "disabled":
            config = config.with_phase("decode", backend="full")
        limits = dg.Limits(max_bs=max_bs, max_num_tokens=max_bs)
        super().__init__(
            DraftForward(cut(model, layers), cache, limits, tokens),
            config=config,
            registry=decode_registry(limits, model.device, table_width),
        )


def cut(model: Model, layers: int) -> Model:
    """The model without the layers behind the first ones; the weights are the same."""
    transformer = _copied(model.transformer)
    base = _copied(transformer.base_model)
    base.layers = base.layers[:layers]
    setattr(transformer, transformer.base_model_prefix, base)
    return Model(transformer)


def _copied(module: Any) -> Any:
    """A module that shares all parameters and submodules, until one of its submodules is replaced."""
    copied = copy.copy(module)
    copied._modules = module._modules.copy()
    return copied
