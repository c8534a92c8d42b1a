"""The step of transformers' continuous batching as an engine: its batch, its slots, its mask, its runner.

A batch is a row of query tokens, of any requests, and the keys that they attend to. Where one request ends and the next
begins is told by cumulative lengths alone, so that prompts and decode steps are one form. The bucket counts query
tokens; what a graph has room for in keys is its variant.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.engine import Limits
from devicegraph.registry import CudaGraphBufferRegistry
from devicegraph.runners.decode import DecodeCudaGraphRunner
from devicegraph.slots import GraphSlot, PaddingPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["PagedBatch", "PagedEngine", "PagedRunner", "attention_mask", "build_paged_registry", "register_carry_over"]

#: More than any place among query tokens and keys.
BEHIND_ALL: Final = 2**31 - 1


@dataclass
class PagedBatch:
    """The inputs of one step.

    Attributes:
        input_ids: `[queries]` int32.
        position_ids: `[queries]` int32, from the start of each request.
        write_index: `[queries]` int64, where in the cache the keys and values of each query token go.
        cu_seq_lens_q: `[requests + 1]` int32, where the query tokens of each request begin.
        cu_seq_lens_k: `[requests + 1]` int32, where its keys begin.
        logits_indices: `[requests]` int32, or `[queries]` if these are fewer: the query tokens whose logits are wanted,
            and then 0.
        read_index: `[keys]` int64, where in the cache the keys are; empty where all keys are the query tokens' own.
        carry_over_ids: `[max_batch_tokens]` int32, for each query token the one of `prev_output_ids` that it is, or -1;
            None where the host knows all tokens.
        prev_output_ids: `[rows, max_batch_tokens + 1]` int32, what the last step gave; None likewise.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write_index: torch.Tensor
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    logits_indices: torch.Tensor
    read_index: torch.Tensor
    carry_over_ids: torch.Tensor | None = None
    prev_output_ids: torch.Tensor | None = None

    def copy(self, keys: int) -> PagedBatch:
        """A batch that nobody else writes, with a row of logits for each query token, as graphs have it.

        Args:
            keys: how many of its places to read are keys of its own.
        """
        own: dict[str, Any] = {name: None if value is None else value.clone() for name, value in vars(self).items()}
        own["read_index"] = self.read_index[:keys].clone()
        missing = self.input_ids.shape[0] - self.logits_indices.shape[0]
        own["logits_indices"] = torch.nn.functional.pad(self.logits_indices, (0, missing))
        return PagedBatch(**own)


def build_paged_registry(
    buffers: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    max_queries: int,
    max_keys: int,
    read_trash: int,
    write_trash: int,
) -> CudaGraphBufferRegistry:
    """The slots of a `PagedBatch`: rows of `bs` are query tokens, rows of `tokens` are keys.

    Args:
        buffers: static tensors to adopt, by slot; what is not among them gets memory of its own.
        device: of all slots.
        max_queries: the most query tokens of a batch.
        max_keys: the most keys of a graph.
        read_trash: the place in the cache that is always 0, for padded keys.
        write_trash: the place in the cache that nobody reads, for padded query tokens.
    """
    registry = CudaGraphBufferRegistry(device=device, max_bs=max_queries, max_num_tokens=max_keys)
    registry.label = "continuous batching"
    zero, sentinel = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL
    slots = [
        GraphSlot("input_ids", _by_query, torch.int32, "bs", padding_policy=zero),
        GraphSlot("position_ids", _by_query, torch.int32, "bs", padding_policy=zero),
        GraphSlot("write_index", _by_query, torch.int64, "bs", padding_policy=sentinel, pad_value=write_trash),
        # These have a row for each request, of which there may be fewer than query tokens.
        _cumulative("cu_seq_lens_q", lambda batch, _: batch.cu_seq_lens_q),
        _cumulative("cu_seq_lens_k", lambda batch, _: batch.cu_seq_lens_k),
        GraphSlot(
            "logits_indices",
            _by_query,
            torch.int32,
            "bs",
            padding_policy=zero,
            source_fn=lambda batch, _: batch.logits_indices,
        ),
        GraphSlot("read_index", lambda _, keys: (keys,), torch.int64, padding_policy=sentinel, pad_value=read_trash),
    ]
    for slot in slots:
        registry.register_slot(slot, bind=buffers.get(slot.name))
    return registry


def register_carry_over(registry: CudaGraphBufferRegistry, output_rows: int) -> None:
    """Adds the slots by which a step takes tokens from the one before it."""
    tokens = registry.max_bs
    for name, shape in (("carry_over_ids", (tokens,)), ("prev_output_ids", (output_rows, tokens + 1))):
        registry.register_slot(GraphSlot(name, lambda *_, shape=shape: shape, torch.int32, "none"))


def _by_query(max_queries: int, max_keys: int) -> tuple[int]:
    return (max_queries,)


def _cumulative(name: str, source: Any) -> GraphSlot:
    return GraphSlot(
        name,
        lambda queries, _: (queries + 1,),
        torch.int32,
        "bs",
        slice_fn=lambda buffer, size: buffer[: size + 1],
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=BEHIND_ALL,
        source_fn=source,
    )


def attention_mask(batch: PagedBatch, dtype: torch.dtype) -> torch.Tensor:
    """Which keys each query token sees: from the first of its own request up to its own position.

    Padded query tokens see the key behind all, which is padding, too.

    Returns:
        `[1, 1, queries, keys]` of the dtype, to be added to scores: 0, or the least number that it holds.
    """
    queries, keys = batch.input_ids.shape[0], batch.read_index.shape[0] or batch.input_ids.shape[0]
    device = batch.input_ids.device
    order = torch.arange(max(queries, keys), dtype=torch.int32, device=device)
    owner = torch.searchsorted(batch.cu_seq_lens_q[1:], order[:queries], right=True)
    first = batch.cu_seq_lens_k[owner][:, None]
    last = first + batch.position_ids[:, None]
    # These are as large as the mask, which may be most of what is free: so in place.
    is_hidden = order[:keys] < first
    is_hidden.logical_or_(order[:keys] > last)
    mask = torch.zeros(queries, keys, dtype=dtype, device=device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]


class PagedEngine:
    """The engine behind the runner: transformers' own forward and choice of tokens, on one batch."""

    def __init__(
        self,
        model: Any,
        steps: Any,
        *,
        max_queries: int,
        key_sizes: Sequence[int],
    ) -> None:
        """An engine.

        Args:
            model: the language model.
            steps: the `ModelRunner` of the batch processor.
            max_queries: the most query tokens of a batch.
            key_sizes: ascending: what graphs have room for.
        """
        self.model = model
        self.steps = steps
        self.cache = steps.cache
        self.device = model.device
        self.limits = Limits(max_bs=max_queries, max_num_tokens=max(key_sizes[-1], max_queries))
        self._key_sizes = key_sizes
        self._labels: dict[str | None, int] = {label_of(keys): keys for keys in key_sizes}
        #: Largest first, so that the others fit into its memory.
        self.variants = tuple(reversed(self._labels))
        self._output_rows = 2 if steps.return_logprobs else 1

    def sizes(self, batch: PagedBatch) -> tuple[int, int]:
        """Query tokens and keys."""
        return batch.input_ids.shape[0], batch.read_index.shape[0]

    def variant(self, batch: PagedBatch) -> str | None:
        """The least room for the keys of a batch; None where there is not enough, or none for its requests.

        A request that is about to be forked may have no query token, so that there may be more requests than those.
        """
        room = self.room(batch.read_index.shape[0])
        if room is None or batch.cu_seq_lens_q.shape[0] - 1 > batch.input_ids.shape[0]:
            return None
        return label_of(room)

    def room(self, keys: int) -> int | None:
        """The least room for so many keys; None where there is not enough."""
        position = bisect_left(self._key_sizes, keys)
        return self._key_sizes[position] if position < len(self._key_sizes) else None

    def make_batch(self, views: dict[str, torch.Tensor], key: ShapeKey) -> PagedBatch:
        """The batch of a graph, with as many keys as its variant has room for; without one, with the most."""
        keys = self._labels.get(key.variant_label, self._key_sizes[-1])
        return PagedBatch(**{**views, "read_index": views["read_index"][:keys]})

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """The next tokens, `[1, logits]` int32, with a second row for the bits of their log probabilities.

        In a graph there is a column for each query token of the bucket.
        """
        logits_indices = batch.logits_indices
        kwargs = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
            "attention_mask": attention_mask(batch, self.model.dtype),
            "read_index": [batch.read_index],
            "write_index": [batch.write_index],
            "cache": self.cache,
            "block_table": None,
            "use_cache": False,
            "logits_indices": logits_indices,
            "logits_processor_args": logits_indices.new_empty(0, logits_indices.shape[0]),
        }
        if self.steps.supports_logits_to_keep(self.model):
            kwargs["logits_to_keep"] = logits_indices
        output = logits_indices.new_zeros(self._output_rows, logits_indices.shape[0])
        self.steps._forward_process_and_sample(self.model, kwargs, batch.carry_over_ids, batch.prev_output_ids, output)
        return output

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The part of the cache that padding writes; what real rows write, every launch writes alike."""
        places = self.cache.write_trash_index
        caches = {"key": self.cache.key_cache, "value": self.cache.value_cache}
        return {
            f"{kind}.{layer}": each[places:] for kind, layers in caches.items() for layer, each in enumerate(layers)
        }


def label_of(keys: int) -> str:
    """The variant with room for so many keys."""
    return f"keys {keys}"


class PagedRunner(DecodeCudaGraphRunner):
    """The decode runner where rows are query tokens and keys are filled up to the most that any graph has room for."""

    def _padded_sizes(self, size: int, bs: int) -> tuple[int, int]:
        return size, self.buffer_registry.max_num_tokens

    def _live_size(self, bs: int, num_tokens: int) -> int | str:
        return bs
