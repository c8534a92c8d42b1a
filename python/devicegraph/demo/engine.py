"""The engine side: a Llama-family model over a static key-value cache, with a `ModelRunner` for each phase.

The cache has a row for each request that can run at once, and row 0 for padding: padded tokens are written there, and
no request reads them. All of it is preallocated, so that a captured graph finds it at the same addresses in every step.

Both phases give the model a list of tokens, whoever they belong to. Who sees what is attention's matter, and attention
asks the batch of the step: recorded in a full graph, anew in every step where a graph is broken or split at it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from devicegraph.backends.breaks import batch_in_use, current_batch, eager_on_graph
from devicegraph.backends.split_ops import register_split_op
from devicegraph.demo.checkpoint import import_transformers
from devicegraph.engine import Limits
from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from devicegraph.runners.shape_key import ShapeKey

#: Under this name transformers finds the attention of this engine.
ATTENTION = "devicegraph_demo"


def register_attention() -> None:
    """Teaches transformers the attention of this engine, and `tc_piecewise` to split forwards at it."""
    import_transformers().AttentionInterface.register(ATTENTION, _attention)
    register_split_op("devicegraph_demo::attend")


class Cache:
    """Keys and values: for each layer a tensor `[rows, max_length, heads, width]`.

    Tensors of their own for each layer make the layers alike for torch.compile, which compiles them once then.
    """

    def __init__(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        # ADDRESS: captured graphs hold all of them; the engine outlives its runners.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)
        )

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.keys[0].device

    @property
    def rows(self) -> int:
        """Its rows, the reserved one included."""
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        """Tokens that a row holds."""
        return self.keys[0].shape[1]

    def write(self, layer: int, where: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes `[heads, tokens, width]` to `where`, `row * max_length + position` of each token."""
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            cache.flatten(0, 1).index_copy_(0, where, new.transpose(0, 1))


@dataclass
class DecodeBatch:
    """One decode step of `batch_size` requests, a token each; all tensors `[batch_size]` int64 on the device.

    Attributes:
        input_ids: the tokens chosen last.
        positions: their positions in their requests.
        out_cache_loc: where keys and values of these tokens go: `row * max_length + position`.
        seq_lens: tokens of each request, this one included.
        req_pool_indices: the requests' rows of the cache.
        batch_size: requests.
        cache: the engine's.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    batch_size: int
    cache: Cache

    def attend(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attention of `[batch_size, heads, width]`, each over its request's row; the same shape."""
        keys, values = (held[layer][self.req_pool_indices] for held in (self.cache.keys, self.cache.values))
        steps = torch.arange(self.cache.max_length, device=query.device)
        visible = (steps < self.seq_lens[:, None])[:, None, None]
        return _attend_dense(query[:, None], keys, values, visible, scale)[:, 0]


class Chunk(NamedTuple):
    """Consecutive tokens of one prompt in a prefill batch: `length` of them from position `start` on."""

    row: int
    start: int
    length: int


@dataclass
class PrefillBatch:
    """One prefill step: prompts, or parts of them, one behind the other; all tensors `[tokens]` int64 on the device.

    Attributes:
        input_ids: the tokens.
        positions: their positions in their prompts.
        out_cache_loc: where their keys and values go.
        chunks: whose they are; under a graph there may be more tokens, which are padding.
        batch_size: requests.
        cache: the engine's.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    chunks: tuple[Chunk, ...]
    batch_size: int
    cache: Cache

    def last_tokens(self) -> list[int]:
        """Where the last token of each chunk is in the batch."""
        return [end - 1 for end in itertools.accumulate(chunk.length for chunk in self.chunks)]

    def attend(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attention of `[tokens, heads, width]`, each over what its prompt has up to it; zeros for padding."""
        output = torch.zeros_like(query)
        begin = 0
        for row, start, length in self.chunks:
            end = start + length
            keys, values = (held[layer][row, :end][None] for held in (self.cache.keys, self.cache.values))
            visible = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
            tokens = slice(begin, begin + length)
            output[tokens] = _attend_dense(query[None, tokens], keys, values, visible, scale)[0]
            begin += length
        return output


def _attend_dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """`[batch, tokens, heads, width]` all of them."""
    query, keys, values = (tensor.transpose(1, 2) for tensor in (query, keys, values))
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


@eager_on_graph
def _attend(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    """Attention of `[tokens, heads, width]` in the batch of the step; the same shape."""
    output: torch.Tensor = current_batch().attend(query, layer, scale)
    return output


@torch.library.custom_op("devicegraph_demo::attend", mutates_args=())
def _attend_operator(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    return _attend(query, layer, scale).contiguous()


@_attend_operator.register_fake
def _(query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    return query.new_empty(query.shape)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cache: Cache,
    out_cache_loc: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with `[1, heads, tokens, width]` of the batch's tokens."""
    cache.write(module.layer_idx, out_cache_loc, key[0], value[0])
    # A compiled forward is split at the operator; any other one is broken at the function, where it is broken.
    attend = torch.ops.devicegraph_demo.attend if torch.compiler.is_compiling() else _attend
    return attend(query[0].transpose(0, 1), module.layer_idx, scaling)[None], None


class LlamaEngine:
    """A transformers model of the Llama family and its cache.

    Args:
        model: the model, loaded with the attention `ATTENTION`.
        device: where it lies.
        max_requests: how many requests run at once.
        max_length: tokens a request may have, prompt included.
        max_prefill_tokens: tokens of a prefill step.

    Attributes:
        decode: runs decode steps.
        prefill: runs prefill steps.

    Raises:
        BackendError: `checkpoint-unusable` for a model that is built in another way.
    """

    def __init__(
        self, model: Any, device: torch.device, *, max_requests: int, max_length: int, max_prefill_tokens: int
    ) -> None:
        config = model.config
        self.device = device
        self.model = model
        query_heads = getattr(config, "num_attention_heads", None)
        if not query_heads:
            raise self._unusable("it has no attention heads")
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
        shape = (max_requests + 1, max_length, heads, width)
        self.cache = Cache(config.num_hidden_layers, shape, model.dtype, device)
        self.decode = DecodeForward(self, Limits(max_bs=max_requests, max_num_tokens=max_requests))
        self.prefill = PrefillForward(self, Limits(max_bs=max_requests, max_num_tokens=max_prefill_tokens))
        self._check()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of what the last layer made of tokens, `[tokens, hidden_size]`."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def _check(self) -> None:
        """Runs one token through every layer, into the reserved row."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        batch: Any = PrefillBatch(zero, zero, zero, (Chunk(0, 0, 1),), 1, self.cache)
        problem = None
        try:
            with torch.no_grad(), batch_in_use(batch):
                same = torch.equal(self.logits(self.prefill.forward(batch)), self.decode.forward(batch))
        except Exception as error:
            problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        else:
            if not same:
                problem = "it does more between its last layer and its logits than one projection"
            if not all(keys[0, 0].any() for keys in self.cache.keys):
                problem = "not every layer asks for the attention it was given"
        if problem is not None:
            raise self._unusable(problem)

    def _unusable(self, problem: str) -> BackendError:
        return BackendError(
            f"the demo cannot serve a `{type(self.model).__name__}`: {problem}",
            code="checkpoint-unusable",
            hint="give `--model` a checkpoint of the Llama family",
        )


class _Forward:
    """What the runners of both phases ask of the engine."""

    def __init__(self, engine: LlamaEngine, limits: Limits) -> None:
        self.device = engine.device
        self.limits = limits
        self._engine = engine

    def _run(self, model: Any, batch: Any) -> Any:
        return model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            cache=batch.cache,
            out_cache_loc=batch.out_cache_loc,
        )


class DecodeForward(_Forward):
    """Decode steps: the next token of each request."""

    def make_batch(self, views: dict[str, torch.Tensor], key: ShapeKey) -> DecodeBatch:
        """The static batch: the fields that this engine's batches have."""
        tensors = {field.name: views[field.name] for field in fields(DecodeBatch) if field.name in views}
        return DecodeBatch(**tensors, batch_size=key.size, cache=self._engine.cache)

    def forward(self, batch: DecodeBatch) -> torch.Tensor:
        """Logits `[batch_size, vocabulary]` of the next token of each request."""
        logits: torch.Tensor = self._run(self._engine.model, batch).logits[0]
        return logits


class PrefillForward(_Forward):
    """Prefill steps: the tokens of prompts into the cache."""

    def make_batch(self, views: dict[str, torch.Tensor], key: ShapeKey) -> PrefillBatch:
        """The static batch: as many prompts into the reserved row as have the bucket's tokens."""
        cache = self._engine.cache
        lengths = [min(cache.max_length, key.size - begin) for begin in range(0, key.size, cache.max_length)]
        tensors = {field.name: views[field.name] for field in fields(PrefillBatch) if field.name in views}
        chunks = tuple(Chunk(0, 0, length) for length in lengths)
        return PrefillBatch(**tensors, chunks=chunks, batch_size=len(chunks), cache=cache)

    def forward(self, batch: PrefillBatch) -> torch.Tensor:
        """What the last layer makes of the tokens: `[tokens, hidden_size]`."""
        hidden: torch.Tensor = self._run(self._engine.model.base_model, batch).last_hidden_state[0]
        return hidden
