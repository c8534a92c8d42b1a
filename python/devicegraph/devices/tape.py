"""The CPU tape: a recorded program on fixed addresses.

What it holds is addresses, as a device graph does: Python does not run again on replay, a tensor that was replaced
after the capture is not seen, random operators advance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from devicegraph.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Call:
    """One recorded operator: what to call, with which addresses, and where its fresh outputs go.

    Attributes:
        name: the operator's name.
        outputs: one entry for each tensor that the operator returns; None where it is one of the arguments, or nobody
            reads it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        self.name = name
        self.outputs = outputs
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def run(self) -> None:
        """Calls the operator and puts its results where the recorded program has them."""
        self._store(self._function(*self._args, **self._kwargs))

    def _store(self, result: Any) -> None:
        if not any(output is not None for output in self.outputs):
            return
        values = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for output, value in zip(self.outputs, values, strict=True):
            if output is None:
                continue
            if value.shape != output.shape or value.dtype != output.dtype:
                raise ReplayError(
                    f"`{self.name}` gave {list(value.shape)} of {value.dtype}, and torch's fake kernel of it had said "
                    f"{list(output.shape)} of {output.dtype}",
                    code="fake-kernel-wrong",
                    hint="this is a fault of the operator's fake kernel; a GPU replays the operator without it",
                )
            output.copy_(value)


class FunctionalCollective(Call):
    """A collective that returns tensors whose data may still be on its way."""

    def run(self) -> None:
        """Calls the operator, waits for its data, and stores it."""
        result = self._function(*self._args, **self._kwargs)
        self._store(tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, result))


class Collective(Call):
    """A collective of `torch.distributed`: it writes its arguments and returns a handle of asynchronous work."""

    def __init__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Whoever drops the last reference to a process group joins its threads, and one of those may be waiting for the
        # interpreter lock: Python's own object lets go of the lock first, a boxed one does not.
        args, kwargs = tree_map_only(torch.ScriptObject, _unboxed, (args, kwargs))
        super().__init__(name, function, args, kwargs, outputs=())

    def run(self) -> None:
        """Calls the operator and waits for it."""
        group, work = torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Work
        args, kwargs = tree_map_only(group, lambda value: value.boxed(), (self._args, self._kwargs))
        for leaf in tree_leaves(self._function(*args, **kwargs)):
            if isinstance(leaf, torch.ScriptObject):
                work.unbox(leaf).wait()


def _unboxed(value: torch.ScriptObject) -> Any:
    name = value._type().qualified_name()  # type: ignore[attr-defined, unused-ignore]
    group = torch._C._distributed_c10d.ProcessGroup
    return group.unbox(value) if name.endswith(".c10d.ProcessGroup") else value


class Tape:
    """A recorded program."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        # What operators make of integers is of this dtype, unless they are told.
        self._default_dtype = torch.get_default_dtype()

    def __len__(self) -> int:
        return len(self._calls)

    def operators(self) -> list[str]:
        """The names of the recorded operators, in order."""
        return [call.name for call in self._calls]

    def replay(self) -> None:
        """Runs the record once; returns when it is done.

        Operators were recorded below autograd and autocast, and are called there again, whatever mode the caller is in.
        Inference mode allows all that any mode of a capture allowed, writes to inference tensors among it. The default
        dtype is the capture's meanwhile.

        Raises:
            ReplayError: `fake-kernel-wrong` for an operator whose result is not what its capture was told.
        """
        dtype, own = torch.get_default_dtype(), self._default_dtype
        if dtype is not own:
            torch.set_default_dtype(own)
        try:
            with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                for call in self._calls:
                    call.run()
        finally:
            if dtype is not own:
                torch.set_default_dtype(dtype)
