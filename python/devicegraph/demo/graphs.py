"""All that this engine asks of devicegraph: read it as the guide to embedding the package in an engine.

Beside it the engine is what it would be without graphs: batches made on the host, a scheduler, a model. Here is what
graphs need: attention marked as the place where a step's own lengths matter (1), the step's inputs declared as slots
(2), what to run (3), and runners that are captured once and run every step (4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

import devicegraph as dg
from devicegraph.demo.batches import DecodeBatch, PrefillBatch

if TYPE_CHECKING:
    from devicegraph.demo.blocks import Cache
    from devicegraph.demo.model import Model

# 1. Attention. `full` records it like everything else. `breakable` ends a segment where the marked function is called,
# and `tc_piecewise` a piece where the operator is: there it runs in every step, on the batch of that step.


@dg.eager_on_graph
def _attend(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    output: torch.Tensor = dg.current_batch().attend(query, layer, scale)
    return output


@torch.library.custom_op("devicegraph_demo::attend", mutates_args=())
def _attend_operator(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    return _attend(query, layer, scale).contiguous()


@_attend_operator.register_fake
def _(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    return query.new_empty(query.shape)


def attend_in_step(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    """Attention of `[tokens, heads, width]` in the batch of the step; the same shape."""
    attend = torch.ops.devicegraph_demo.attend if torch.compiler.is_compiling() else _attend
    output: torch.Tensor = attend(query, layer, scale)
    return output


# 2. Slots. Batches are made on the host (`source_device="cpu"`): a fill brings all of them over at once, and pads them
# up to the bucket. A padded token is written to the reserved block 0, and a padded request reads that block alone.

_TOKENS = ("input_ids", "positions", "out_cache_loc")


def _registry(limits: dg.Limits, device: torch.device, *slots: dg.GraphSlot) -> dg.CudaGraphBufferRegistry:
    registry = dg.CudaGraphBufferRegistry(device=device, max_bs=limits.max_bs, max_num_tokens=limits.max_num_tokens)
    for slot in (*(_slot(name, "tokens", torch.int64, ()) for name in _TOKENS), *slots):
        registry.register_slot(slot)
    return registry


def decode_registry(limits: dg.Limits, device: torch.device, table_width: int) -> dg.CudaGraphBufferRegistry:
    """The slots of decode steps: a padded request has the step's tokens and no others."""
    lengths = _slot("seq_lens", "bs", torch.int64, (), pad_value=limits.max_num_tokens // limits.max_bs)
    return _registry(limits, device, lengths, _slot("block_tables", "bs", torch.int32, (table_width,)))


def _slot(
    name: str, axis: Literal["bs", "tokens"], dtype: torch.dtype, width: tuple[int, ...], pad_value: int = 0
) -> dg.GraphSlot:
    policy = dg.PaddingPolicy.FILL_SENTINEL if pad_value else dg.PaddingPolicy.ZERO
    shape_of = {"bs": lambda bs, _: (bs, *width), "tokens": lambda _, tokens: (tokens, *width)}[axis]
    return dg.GraphSlot(name, shape_of, dtype, axis, None, policy, pad_value, source_device="cpu")


# 3. What to run: a device, limits, a forward, and a static batch made of the slots' views. An eager step gets the batch
# as the engine made it, and brings it over itself.


class DecodeOutput(NamedTuple):
    """Of each token of a step: the likeliest next one, `[tokens]` int64, and the logits `[tokens, vocabulary]`."""

    token_ids: torch.Tensor
    logits: torch.Tensor


class _Forward:
    def __init__(self, model: Model, cache: Cache, limits: dg.Limits) -> None:
        self.device, self.limits, self.model, self.cache = model.device, limits, model, cache
        dg.register_split_op("devicegraph_demo::attend")


class DecodeForward(_Forward):
    """Steps with the same number of tokens for each request."""

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> DecodeBatch:
        """What a graph is captured with."""
        return DecodeBatch(**views, batch_size=key.size, cache=self.cache)

    def forward(self, batch: DecodeBatch) -> DecodeOutput:
        """What a graph holds, and an eager step runs."""
        batch.move(*_TOKENS, "seq_lens", "block_tables")
        logits = self.model.logits(batch)
        return DecodeOutput(logits.argmax(-1), logits)


class PrefillForward(_Forward):
    """Steps of prompts of any lengths: what attention needs of them is prepared for each step, outside of graphs."""

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> PrefillBatch:
        """What a graph is captured with: one prompt of the bucket's tokens, in the reserved block."""
        tables = torch.zeros(1, -(-key.size // self.cache.block_size), dtype=torch.int32)
        tokens = views["input_ids"], views["positions"], views["out_cache_loc"]
        return PrefillBatch(*tokens, tables, [(0, key.size)], batch_size=1, cache=self.cache)

    def prepare_metadata(self, batch: PrefillBatch, key: dg.ShapeKey | None) -> None:
        """Before every step, graph or eager."""
        batch.prepare()

    def forward(self, batch: PrefillBatch) -> torch.Tensor:
        """What the last layer makes of the tokens, `[tokens, hidden_size]`."""
        batch.move(*_TOKENS)
        return self.model.hidden(batch)


# 4. Runners. `capture()` each before its first step; from then on `run(batch)` decides between graph and eager.


def prefill_runner(
    model: Model, cache: Cache, config: dg.CudaGraphConfig, limits: dg.Limits
) -> dg.PrefillCudaGraphRunner:
    """Runs prefill steps within the limits."""
    forward, registry = PrefillForward(model, cache, limits), _registry(limits, model.device)
    return dg.PrefillCudaGraphRunner(forward, config=config, registry=registry)


def decode_runner(
    model: Model, cache: Cache, config: dg.CudaGraphConfig, max_bs: int, table_width: int, tokens: int = 1
) -> dg.DecodeCudaGraphRunner:
    """Runs steps of up to `max_bs` requests, of up to `table_width` blocks: one token each, or several to verify."""
    limits = dg.Limits(max_bs, max_bs * tokens)
    return dg.DecodeCudaGraphRunner(
        DecodeForward(model, cache, limits),
        config=config,
        registry=decode_registry(limits, model.device, table_width),
        mode="decode" if tokens == 1 else "target_verify",
        num_tokens_per_bs=tokens,
    )
