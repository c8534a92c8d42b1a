"""The reference model: a plain decoder over a cache of rows, with random weights, and its decode engine.

Attention is one function, which writes its output in place; how it is marked (as a break, as an operator) is given to
an engine, so that one model serves every backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from devicegraph.backends.breaks import current_batch
from devicegraph.engine import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.runners.shape_key import ShapeKey


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, of its cache, and of the batches that are measured."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 3072
    vocabulary: int = 32000
    row_length: int = 1024
    """Of the cache: the longest prompt."""
    context: int = 256
    """Of decode: what attention reads of a row."""
    decode: tuple[int, ...] = (1, 8, 64)
    """Requests."""
    prefill: tuple[int, ...] = (128, 512, 2048)
    """Tokens."""
    fp32_logits: bool = False
    """Whether decode widens its bfloat16 logits, as engines do that sample in float32."""

    @property
    def width(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads


SMALL: Final = Shape(3, 64, 4, 2, 128, 256, 64, 32, decode=(1, 2, 4), prefill=(16, 32, 128))
#: The least that has everything in it, for runs that only show that they run.
TINY: Final = Shape(1, 32, 2, 1, 32, 64, 16, 16, decode=(1, 2, 4), prefill=(16,))


class Layer(nn.Module):
    """Norm, attention, norm, gated MLP."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.index, self.width = index, shape.width
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.norm, self.mlp_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.width, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Any) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` to the next layer's."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.width))
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        a, b = qk.chunk(2, dim=-1)
        q, k = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).split([self.heads, self.kv_heads], dim=1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attention(q, k, v, out, self.index)
        x = x + self.o(out.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers, norm; the head is apart, since prefill runs it on a few rows only."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, shape.width, 2) / shape.width)
        angles = torch.arange(shape.row_length)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        """Hidden states `[tokens, hidden]`."""
        x, cos, sin = self.embedding(input_ids), self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)  # type: ignore[no-any-return]


class Cache:
    """Keys and values, a row for each request, row 0 for padding; and the mask of decode, at one address."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows = max(shape.decode) + 1
        size = (shape.layers, rows, shape.row_length, shape.kv_heads, shape.width)
        self.keys = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)
        self.steps = torch.arange(shape.context, device=device)
        self.mask = torch.zeros(rows - 1, 1, 1, shape.context, dtype=torch.bfloat16, device=device)

    def write_history(self) -> None:
        """Fills all rows with random values: what earlier steps would have left."""
        for tensor in (self.keys, self.values):
            tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(0))


@dataclass
class Batch:
    """A decode step of `batch_size` requests, a token each; or prompts of `lengths` tokens, one behind the other.

    `seq_lens`, `req_pool_indices` and `mask` are of decode, `lengths` are of prefill.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    batch_size: int
    cache: Cache
    lengths: list[int] = field(default_factory=list)
    seq_lens: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Attention over the batch of the step: writes keys and values to the cache, and the result to `out`.

    Args:
        q: `[tokens, heads, width]` bfloat16, like `out`.
        k: `[tokens, kv_heads, width]` bfloat16, like `v`.
        v: see `k`.
        out: see `q`; contiguous.
        layer: whose cache.
    """
    batch = current_batch()
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys.flatten(0, 1).index_copy_(0, batch.out_cache_loc, k)
    values.flatten(0, 1).index_copy_(0, batch.out_cache_loc, v)
    if batch.lengths:
        parts = (tensor.split(batch.lengths) for tensor in (q, k, v, out))
        for *prompt, place in zip(*parts, strict=True):
            queries, mine, theirs = (tensor.transpose(0, 1)[None] for tensor in prompt)
            result = F.scaled_dot_product_attention(queries, mine, theirs, is_causal=True, enable_gqa=True)
            place.copy_(result[0].transpose(0, 1))
        return
    # The query heads of a group, as rows of one head, share its keys and values: every kernel can do that.
    grouped = (q.shape[0], k.shape[1], -1, q.shape[2])
    context = batch.mask.shape[-1]
    mine, theirs = (cache[:, :context][batch.req_pool_indices].transpose(1, 2) for cache in (keys, values))
    out.view(grouped).copy_(F.scaled_dot_product_attention(q.reshape(grouped), mine, theirs, attn_mask=batch.mask))


class Engine:
    """What both phases do alike.

    Args:
        shape: the sizes.
        model: on the device.
        cache: on the device.
        attention: `attend`, or a form of it that a backend breaks or splits at.
    """

    phase: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ("input_ids", "positions", "out_cache_loc")

    def __init__(self, shape: Shape, model: Decoder, cache: Cache, attention: Callable[..., None]) -> None:
        self.shape, self.model, self.cache, self.attention = shape, model, cache, attention
        self.device = cache.keys.device
        self.limits = Limits(max_bs=max(shape.decode), max_num_tokens=max(self.buckets))

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets, and the sizes that are measured."""
        return self.shape.decode if self.phase == "decode" else self.shape.prefill

    def make_batch(self, views: dict[str, torch.Tensor], key: ShapeKey) -> Batch:
        """The static batch of a bucket."""
        tensors: dict[str, Any] = {name: views[name] for name in self.fields}
        return Batch(**tensors, batch_size=key.size, cache=self.cache)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states `[tokens, hidden]`."""
        return self.model(batch.input_ids, batch.positions, self.attention)  # type: ignore[no-any-return]

    def prepare_metadata(self, batch: Batch, key: ShapeKey | None) -> None:
        """What attention needs beside the slots."""

    def batch(self, size: int, seed: int) -> Batch:
        """A live batch with random tokens."""
        raise NotImplementedError

    def _batch(self, places: list[tuple[int, int]], seed: int, **fields: Any) -> Batch:
        """A batch of one token at each (row of the cache, position)."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.shape.vocabulary, (len(places),), generator=generator).to(self.device)
        rows, positions = torch.tensor(places, device=self.device).unbind(1)
        return Batch(
            tokens, positions.contiguous(), rows * self.shape.row_length + positions, cache=self.cache, **fields
        )


class DecodeEngine(Engine):
    """Its output is the logits `[requests, vocabulary]`."""

    phase = "decode"
    fields = (*Engine.fields, "seq_lens", "req_pool_indices")

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the next tokens."""
        logits: torch.Tensor = self.model.head(super().forward(batch))
        return logits.float() if self.shape.fp32_logits else logits

    def prepare_metadata(self, batch: Batch, key: ShapeKey | None) -> None:
        """The mask of what each request sees."""
        assert batch.seq_lens is not None
        batch.mask = self.cache.mask[: batch.batch_size]
        batch.mask[:, 0, 0].zero_().masked_fill_(self.cache.steps >= batch.seq_lens[:, None], float("-inf"))

    def batch(self, size: int, seed: int) -> Batch:
        """Requests that have used between half and all of the context; the same ones in every batch."""
        half = self.shape.context // 2
        lengths = [half + 37 * row % half for row in range(1, size + 1)]
        places = [(row, length - 1) for row, length in enumerate(lengths, start=1)]
        return self._batch(
            places,
            seed,
            batch_size=size,
            seq_lens=torch.tensor(lengths, device=self.device),
            req_pool_indices=torch.arange(1, size + 1, device=self.device),
        )
