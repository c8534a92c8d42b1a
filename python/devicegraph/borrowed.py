"""Outputs that notice when they are read too late: the debug mode of borrowed views."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from devicegraph.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = ["BorrowedTensor", "Loan", "lent", "outputs_are_debugged"]

#: Says without an argument that outputs are debugged.
VARIABLE = "DEVICEGRAPH_DEBUG"


def outputs_are_debugged() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


class _Pool(Protocol):
    @property
    def generation(self) -> int: ...


class _Graph(Protocol):
    key: Any
    is_dropped: bool


class Loan:
    """The time for which an output may be read."""

    __slots__ = ("generation", "graph", "phase", "pool")

    def __init__(self, phase: str, pool: _Pool, graph: _Graph) -> None:
        """From now on, until anything else runs in the pool."""
        self.phase = phase
        self.pool = pool
        self.graph = graph
        self.generation = pool.generation

    def check(self) -> None:
        """Refuses a read that comes too late.

        Raises:
            ReplayError: `stale-output`.
        """
        now = self.pool.generation
        if self.graph.is_dropped:
            what = "the graph was dropped since, and its memory with it"
        elif now != self.generation:
            what = f"the pool is at {now}: a later replay or capture there has overwritten it"
        else:
            return
        raise ReplayError(
            f"{self.phase}: an output of {self.graph.key} is read too late: it is of generation {self.generation} of "
            f"its graph memory pool, and {what}",
            code="stale-output",
            hint="read it before the next step, copy it, or make the runner with `clone_outputs=True`",
        )


#: What is read of a tensor without reading its elements.
_METADATA = frozenset(
    getattr(torch.Tensor, name)
    for name in ("size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point",
                 "is_complex", "is_signed", "storage_offset", "data_ptr", "untyped_storage", "get_device", "__len__",
                 "ndimension", "is_inference")
)  # fmt: skip


class BorrowedTensor(torch.Tensor):
    """A view of a graph's output: an ordinary tensor, but for reads after its time, which are refused.

    Views of it are borrowed too, results are not. Code outside of torch that is given its address is not seen.
    """

    _loan: Loan

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy that the caller owns, as `clone` gives it: loans are not copied."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the copy that the caller owns."""
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Checks every borrowed argument, and lends what shares memory with one on the same terms."""
        kwargs = kwargs or {}
        borrowed = [each for each in tree_iter((args, kwargs)) if isinstance(each, BorrowedTensor)]
        # An attribute is read by a function named so; those that are tensors are views, checked when they are read.
        if func not in _METADATA and getattr(func, "__name__", None) != "__get__":
            for tensor in borrowed:
                tensor._loan.check()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            memory = {tensor.untyped_storage().data_ptr(): tensor._loan for tensor in borrowed if tensor.numel()}

            def lend_again(tensor: torch.Tensor) -> torch.Tensor:
                # What has no storage, such as a sparse copy, shares none.
                if isinstance(tensor, BorrowedTensor) or not torch._C._has_storage(tensor):
                    return tensor
                loan = memory.get(tensor.untyped_storage().data_ptr())
                return tensor if loan is None else lent(tensor, loan)

            return tree_map_only(torch.Tensor, lend_again, result)


def lent(tensor: torch.Tensor, loan: Loan) -> BorrowedTensor:
    """The same memory, to be read while the loan runs."""
    with torch._C.DisableTorchFunctionSubclass():
        borrowed = tensor.as_subclass(BorrowedTensor)
        borrowed._loan = loan
    return borrowed
