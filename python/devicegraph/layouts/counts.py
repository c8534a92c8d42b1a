"""Counts that a fill computes for every step: of live tokens, and of the bucket's.

Each is a slot's `value_fn`. A count that comes from the host is written by the fill itself; one that the batch has only
on the device is computed there, which costs a launch or more and waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph._core import as_size
from devicegraph.batches import read_fields
from devicegraph.slots import fault, kind_of

if TYPE_CHECKING:
    from devicegraph.slots import FillContext

__all__ = ["NON_PADDED", "NonPaddedCount", "PaddedCount", "Share"]

NON_PADDED = "num_token_non_padded"


class Share(NamedTuple):
    """Which of how many ranks, each of which has an equal share of the tokens of a bucket."""

    rank: int
    ranks: int


class NonPaddedCount:
    """How many tokens of a step are no padding, as a `value_fn`.

    It is the batch's `num_token_non_padded` (a tensor of one element) or `num_token_non_padded_cpu` (a number), else
    the live tokens; nothing in an idle step. With shares, the number on the host comes first, and what counts is how
    many of the tokens lie in this rank's share of the bucket.
    """

    def __init__(self, share: Share | None) -> None:
        self._share = share

    def __call__(self, context: FillContext) -> Any:
        """The count of the whole bucket."""
        live, tokens = self._live(context), context.padded_num_tokens
        if self._share is None:
            return live
        if tokens % self._share.ranks:
            what = f"{tokens} tokens are no equal shares for {self._share.ranks} ranks"
            raise fault(NON_PADDED, "bucket-not-divisible", what, hint="capture multiples of `attn_tp_size` tokens")
        return self._within(live, 0, tokens)

    def halves(self, context: FillContext) -> Any:
        """The counts of the two halves of the bucket; where halves have no equal shares, nobody splits it."""
        live, middle = self._live(context), context.padded_num_tokens // 2
        counts = [self._within(live, start, middle) for start in (0, middle)]
        return torch.cat(counts) if isinstance(live, torch.Tensor) else counts

    def _live(self, context: FillContext) -> Any:
        tensor, number = read_fields(context.forward_batch, (NON_PADDED, f"{NON_PADDED}_cpu"))
        if number is not None and (tensor is None or self._share is not None):
            return as_size(f"{NON_PADDED}_cpu", number)
        if tensor is None:
            return context.raw_num_tokens
        if kind_of(tensor) is not None or tensor.numel() != 1:
            what = f"a `{kind_of(tensor)}`" if kind_of(tensor) else f"of shape {list(tensor.shape)}"
            raise fault(NON_PADDED, "wrong-shape", f"the source is {what}", hint="pass a tensor of one element")
        return tensor.reshape(1).to(torch.int32)

    def _within(self, live: Any, start: int, length: int) -> Any:
        """How many of the first `live` tokens lie in this rank's share of `length` tokens from `start` on."""
        rank, ranks = self._share or Share(0, 1)
        share = length // ranks
        start += rank * share
        if isinstance(live, torch.Tensor):
            return (live - start).clamp(0, share)
        return min(max(live - start, 0), share)


class PaddedCount:
    """The tokens of the bucket, as a `value_fn`: with a gathered buffer every rank takes part with all of them."""

    def __call__(self, context: FillContext) -> int:
        """The count of the whole bucket."""
        return context.padded_num_tokens

    def halves(self, context: FillContext) -> int:
        """The count of either half of the bucket."""
        return context.padded_num_tokens // 2
