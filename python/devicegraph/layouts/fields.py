"""The usual fields as slots, group by group: a field is one slot line.

Values that are read as indices (positions, locations, request rows) are `ZERO`: a padded row points at row 0, which the
engine reserves. Lengths are `FILL_SENTINEL` with the attention backend's own fill value. Token ids keep what an earlier
step left, or are `ZERO`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.batches import read_fields
from devicegraph.errors import SlotError
from devicegraph.layouts.counts import NON_PADDED, NonPaddedCount, PaddedCount, Share
from devicegraph.slots import GraphSlot, HostValue, PaddingPolicy, fault, shown, unmovable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from devicegraph.slots import FillContext

__all__ = [
    "decode_fields",
    "encoder_fields",
    "global_counts",
    "mamba_fields",
    "multimodal_fields",
    "non_padded_count",
    "prefill_fields",
    "proxy_fields",
    "proxy_rows",
    "proxy_tensors",
]

INT32, INT64 = torch.int32, torch.int64
ZERO, SENTINEL = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL


def decode_fields(
    token_padding: PaddingPolicy, seq_len_fill_value: int, cache_loc_dtype: torch.dtype
) -> Iterator[GraphSlot]:
    """What decode always has."""
    yield _by_token("input_ids", INT64, token_padding)
    yield _by_token("positions", INT64, ZERO)
    yield _by_token("out_cache_loc", cache_loc_dtype, ZERO)
    yield _planes("mrope_positions")
    yield _by_request("req_pool_indices", INT64, ZERO)
    yield _by_request("seq_lens", INT64, SENTINEL, seq_len_fill_value)
    yield _by_request("seq_lens_cpu", INT64, SENTINEL, seq_len_fill_value, device="cpu")


def prefill_fields(cache_loc_dtype: torch.dtype) -> Iterator[GraphSlot]:
    """What prefill always has."""
    yield _by_token("input_ids", INT64, ZERO)
    yield _by_token("positions", INT64, ZERO)
    yield _by_token("out_cache_loc", cache_loc_dtype, ZERO)


def encoder_fields(fill_value: int) -> Iterator[GraphSlot]:
    """What an encoder-decoder has besides: the encoded tokens of each request."""
    yield _by_request("encoder_lens", INT32, SENTINEL, fill_value)


def mamba_fields() -> Iterator[GraphSlot]:
    """Which states to keep of each request: where, whether, and of which length."""
    yield _by_request("mamba_track_indices", INT64, ZERO)
    yield _by_request("mamba_track_mask", torch.bool, ZERO)
    yield _by_request("mamba_track_seqlens", INT32, ZERO)


def multimodal_fields(hidden_size: int, embed_dtype: torch.dtype) -> Iterator[GraphSlot]:
    """Rotary positions in planes, and embeddings that come from outside of the model."""
    yield _planes("mrope_positions")
    # The engine computes embeddings into the buffer: a fill clears what is behind them and leaves them alone.
    yield GraphSlot(
        "input_embeds",
        lambda _, tokens: (tokens, hidden_size),
        embed_dtype,
        padding_policy=ZERO,
        copy_from_fb=False,
    )


def non_padded_count(share: Share | None) -> Iterator[GraphSlot]:
    """How many tokens of the bucket, or of this rank's share of it, are live."""
    yield _count(NON_PADDED, 1, value_fn=NonPaddedCount(share), source_device="any")


def global_counts(ranks: int, *, is_gathered: bool) -> Iterator[GraphSlot]:
    """The tokens of each rank: the bucket's with a gathered buffer, else the batch's own."""
    for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
        yield _count(name, ranks, **({"value_fn": PaddedCount()} if is_gathered else {}))


def proxy_fields(
    rows: Mapping[str, tuple[Sequence[int], torch.dtype]], ranks: int, buffers: Mapping[str, torch.Tensor]
) -> Iterator[GraphSlot]:
    """What the pipeline stage before sends, spread over `ranks` ranks: shape of a row and dtype by name."""
    for name, (shape, dtype) in rows.items():
        yield GraphSlot(
            f"pp_proxy_tensors.{name}",
            _rows_of_shape(tuple(shape), ranks),
            dtype,
            slice_fn=None if ranks == 1 else lambda buffer, size: buffer[: size // ranks],
            source_fn=_proxy(name),
            padding_policy=ZERO,
            buffer=buffers.get(name),
        )


def _rows_of_shape(shape: tuple[int, ...], ranks: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda _, tokens: (tokens // ranks, *shape)


def _proxy(name: str) -> Callable[[Any, FillContext], torch.Tensor | None]:
    def read(batch: Any, context: FillContext) -> torch.Tensor | None:
        proxies = context.pp_proxy_tensors
        if proxies is None:
            (proxies,) = read_fields(batch, ("pp_proxy_tensors",))
        if proxies is None:
            return None
        tensor: torch.Tensor | None = proxy_tensors(proxies).get(name)
        if tensor is None:
            what = f"the stage before did not send `{name}`"
            raise fault(f"pp_proxy_tensors.{name}", "field-missing", what, hint="send every tensor, or none at all")
        return tensor

    read.reads_proxies = True  # type: ignore[attr-defined]  # see `CudaGraphBufferRegistry.presence`
    return read


def proxy_tensors(proxies: Any) -> Mapping[str, Any]:
    """Proxy tensors by name: a mapping, or an object that has it as its `tensors`.

    Raises:
        SlotError: `not-a-tensor`: neither.
    """
    tensors = proxies if isinstance(proxies, Mapping) else getattr(proxies, "tensors", None)
    if not isinstance(tensors, Mapping):
        message = f"`pp_proxy_tensors`: `{shown(proxies)}` holds no tensors by name"
        raise SlotError(message, code="not-a-tensor", hint="pass a mapping, or an object whose `tensors` is one")
    return tensors


def proxy_rows(tensors: Mapping[str, Any]) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """The shape of a row, and the dtype, of an engine's own proxy buffers by name."""
    for name, tensor in tensors.items():
        if (kind := unmovable(tensor)) is not None or tensor.ndim == 0:
            what = f"a `{kind}` cannot be its buffer" if kind else "a tensor without rows cannot be its buffer"
            raise fault(f"pp_proxy_tensors.{name}", "not-a-tensor", what, hint="bind a dense tensor")
    return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in tensors.items()}


def _count(name: str, rows: int, **options: Any) -> GraphSlot:
    return GraphSlot(name, lambda _bs, _tokens: (rows,), INT32, axis="none", **options)


def _planes(name: str) -> GraphSlot:
    return GraphSlot(name, lambda _, tokens: (3, tokens), INT64, slice_fn=_columns, padding_policy=ZERO)


def _by_token(name: str, dtype: torch.dtype, policy: PaddingPolicy) -> GraphSlot:
    return GraphSlot(name, lambda _, tokens: (tokens,), dtype, axis="tokens", padding_policy=policy)


def _by_request(
    name: str, dtype: torch.dtype, policy: PaddingPolicy, pad_value: HostValue = 0, device: str | None = None
) -> GraphSlot:
    return GraphSlot(
        name, lambda bs, _: (bs,), dtype, axis="bs", device=device, padding_policy=policy, pad_value=pad_value
    )


def _columns(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer[:, :size]
