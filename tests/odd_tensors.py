"""Tensors that no byte can be copied from: what fills, buffers and the pool must refuse before they touch anything."""

from __future__ import annotations

import warnings

import torch
from torch._subclasses import FakeTensorMode


class Wrapping(torch.Tensor):
    """A tensor whose operators are its own affair."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        return NotImplemented


def not_dense() -> dict[str, tuple[torch.Tensor, str]]:
    """Tensors of three elements whose bytes are not their elements, or are not there, and what messages call them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some kinds are prototypes
        return {
            "negated": (torch._neg_view(torch.ones(3)), "`lazily negated view`"),
            "imaginary part": ((torch.ones(3) * 1j).conj().imag, "`lazily negated view`"),
            "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), "`lazily conjugated view`"),
            "nested": (torch.nested.nested_tensor([torch.ones(3)]), "`nested tensor`"),
            "jagged": (
                torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged), "`torch.jagged tensor`",
            ),
            "sparse": (torch.ones(3).to_sparse(), "`torch.sparse_coo tensor`"),
            "compressed sparse": (torch.ones(1, 3).to_sparse_csr(), "`torch.sparse_csr tensor`"),
            "fake": (FakeTensorMode().from_tensor(torch.ones(3)), "`FakeTensor`"),
            "wrapping": (torch.Tensor._make_subclass(Wrapping, torch.ones(3)), "`Wrapping`"),
            "opaque": (torch.ones(3).to_mkldnn(), "`torch._mkldnn tensor`"),
        }  # fmt: skip


def without_memory(like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that say they are like another, with nothing behind them."""
    freed = like.clone()
    freed.untyped_storage().resize_(0)
    return {
        "known to be zeros": torch._efficientzerotensor(like.shape, dtype=like.dtype),
        "freed": freed,
    }
