"""What a capture refuses, and why: the rules of a CUDA capture, kept on the CPU tape.

Everything lies in host memory on the tape, so that what would be host memory beside a GPU has to be known by other
means: tensors that were declared (`DeviceAdapter.declare_host`), literals (`torch.tensor([1, 2])`), factories called
without a device, and whatever is computed from these alone. Operators on host memory run while the capture is made, as
they do on CUDA, and are not recorded. All other tensors are the device's, and reading their values is refused.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

#: For each code: what happened, for the operator's name to be put into, and what to do instead.
REFUSALS: Final[dict[str, tuple[str, str]]] = {
    "host-read": (
        "`{operator}` reads a device tensor's value on the host, which a capture cannot do",
        "keep the value on the device, or compute it in `prepare_metadata`, which runs outside the graph",
    ),
    "host-copy": (
        "`{operator}` copies between host and device and waits for it, which a capture cannot do",
        "register the tensor as a slot, or copy from pinned memory with `non_blocking=True`",
    ),
    "data-dependent-shape": (
        "`{operator}` gives a shape that depends on values, which a capture cannot do",
        "use a form of fixed size: `torch.where` with three arguments, `masked_fill`, `index_put_` with a scalar",
    ),
    "device-mismatch": (
        "`{operator}` mixes a host tensor with device tensors",
        "create the tensor with `device=`; only a host tensor without dimensions may meet device tensors",
    ),
    "unregistered-generator": (
        "`{operator}` draws from a generator that the graph does not know",
        "use the device's default generator inside the graph",
    ),
    "synchronize": (
        "`{operator}` waits for the device inside a capture",
        "move the wait to `pre_replay` or `prepare_metadata`, which run outside the graph",
    ),
    "foreign-stream": (
        "`{operator}` runs on a stream that does not take part in the capture",
        "fork it from the capturing stream with `wait_stream` first, and join it before the capture ends",
    ),
    "unjoined-stream": (
        "the capture ended with work on a stream that was not joined",
        "call `wait_stream` on the capturing stream for every side stream that was forked",
    ),
    "uncaptured-event": (
        "`{operator}` waits inside a capture for an event recorded outside of it",
        "wait for it before the capture, in `pre_replay`",
    ),
    "nested-capture": (
        "a capture was begun inside another capture of this thread",
        "capture one graph after the other",
    ),
    "no-fake-kernel": (
        "`{operator}` cannot be recorded: torch does not know the shape of its result without running it",
        "register one with `torch.library.register_fake`",
    ),
    "tape-limit": (
        "`{operator}` cannot be put on the CPU tape: {detail}",
        "this is a limit of the tape, not of a device: capture this forward on a device, or without the operator",
    ),
}

#: Operators that check values on the host, or copy through it, inside CUDA's implementation.
_CHECKED_ON_THE_HOST: Final = {
    "aten::_linalg_check_errors": "host-read",
    "aten::_linalg_svd": "host-copy",
    "aten::bincount": "host-copy",
    "aten::equal": "host-read",
    "aten::_local_scalar_dense": "host-read",
}
_INDEX_WRITES: Final = frozenset({"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})


def refuse(code: str, operator: str, detail: str = "") -> CaptureError:
    """The error for an operator that a capture refuses."""
    message, hint = REFUSALS[code]
    return CaptureError(message.format(operator=operator, detail=detail), code=code, hint=hint, operator=operator)


def written_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[frozenset[str], Any]:
    """The arguments that an operator writes, by the alias set that its schema names them with."""
    if not func._schema.is_mutable:
        return {}
    return {
        frozenset(argument.alias_info.before_set): args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }


class Placement(enum.Enum):
    """Where an operator's tensors lie."""

    DEVICE = enum.auto()
    HOST = enum.auto()
    MIXED = enum.auto()
    """Device tensors, and host tensors without dimensions that stand for numbers."""
    NOWHERE = enum.auto()
    """The operator neither takes tensors nor makes any."""


class HostMemory:
    """Which storages are host memory to the tape, and whether they are pinned.

    Storages are told apart by address. A weak reference keeps the address from being given to another storage, so that
    an entry is right as long as it stands; entries of dead storages are dropped now and then.
    """

    #: Whether the device is the tape.
    is_tape = True
    #: The device's own key of torch's dispatcher.
    dispatch_key = "CPU"
    #: The generators that a graph may draw from.
    generators: tuple[torch.Generator, ...] = (torch.default_generator,)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._sweep_at = 64

    def declare(self, tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Declares `tensor`'s memory host memory for as long as the memory lives, and returns the tensor."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = StorageWeakRef(storage), pinned
        if len(self._entries) >= self._sweep_at:
            for key, (reference, _) in list(self._entries.items()):
                if reference.expired():
                    self._entries.pop(key, None)
            self._sweep_at = 2 * len(self._entries) + 64
        return tensor

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        return tensor.untyped_storage()._cdata in self._entries

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in pinned host memory."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[1]

    def is_named(self, device: object) -> bool:
        """Whether a device argument means the host: the word does on the tape, `torch.device("cpu")` is the device."""
        return isinstance(device, str) and device.split(":")[0] == "cpu"

    def knows(self, generator: torch.Generator) -> bool:
        """Whether a graph may draw from the generator."""
        return any(
            generator._cdata == known._cdata  # type: ignore[attr-defined, unused-ignore]
            for known in self.generators
        )

    def transfer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: torch.Tensor
    ) -> torch.Tensor:
        """Makes a copy between host and device that does not wait; `form` has the shape and type of its result."""
        tensor = args[0]
        result = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=torch.device("cpu"))
        if not self.holds(tensor):
            self.declare(result, pinned=True)  # torch makes the target of such a copy pinned
        return result.copy_(tensor, non_blocking=True)

    def moved(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """What a copy of `tensor` to the other side is, where one was made all the same: here they share memory."""
        copied = result.clone()
        return copied if self.holds(tensor) else self.declare(copied)

    def check(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], factory: Factory) -> Placement:
        """Where the operator's tensors lie; raises `CaptureError` where a device would refuse them."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = [tensor for tensor in tensors if self.holds(tensor)]
        name = func._schema.name
        if name == "aten::lift_fresh" or factory.makes_host_tensor(func, tensors):
            return Placement.HOST
        if tensors and len(on_host) == len(tensors):
            return Placement.HOST
        if not tensors and not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            return Placement.NOWHERE
        generator = kwargs.get("generator")
        if generator is not None and not self.knows(generator):
            raise refuse("unregistered-generator", func.name())
        if name in _CHECKED_ON_THE_HOST:
            raise refuse(_CHECKED_ON_THE_HOST[name], func.name())
        if name in _INDEX_WRITES:
            self._check_index_write(func, args)
        if name == "aten::copy_" and on_host:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            # A strided host tensor is gathered into pageable memory first.
            if not (non_blocking and self.is_pinned(on_host[0]) and on_host[0].is_contiguous()):
                raise refuse("host-copy", func.name())
            return Placement.DEVICE
        written = tree_leaves(list(written_arguments(func, args, kwargs).values()))
        if any(tensor.dim() or any(tensor is other for other in written) for tensor in on_host):
            is_index = name in _INDEX_WRITES or name == "aten::index"
            raise refuse("host-copy" if is_index else "device-mismatch", func.name())
        return Placement.MIXED if on_host else Placement.DEVICE

    def freeze_scalars(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces host tensors by copies: a device takes their value into the graph when it is captured."""
        frozen = tree_map_only(torch.Tensor, lambda t: t.clone() if self.holds(t) else t, (args, kwargs))
        return frozen[0], frozen[1]

    def _check_index_write(self, func: OpOverload, args: Sequence[Any]) -> None:
        """A boolean mask picks a number of rows that depends on values, unless what is written is one number."""
        _, indices, value = args[:3]
        masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
        if masks and not (value.numel() == 1 and self.holds(value)):
            raise refuse("data-dependent-shape", func.name())


class Factory(enum.Enum):
    """The maker of tensors that the model is calling, by what it was told of devices."""

    NONE = enum.auto()
    """None is being called, or one that makes device tensors."""
    WITHOUT_DEVICE = enum.auto()
    ON_HOST = enum.auto()
    """The host was named."""

    def makes_host_tensor(self, func: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an operator that is called meanwhile makes a host tensor."""
        if self is Factory.WITHOUT_DEVICE:
            return not tensors
        return self is Factory.ON_HOST and any(argument.name == "device" for argument in func._schema.arguments)
