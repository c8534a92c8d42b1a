"""What a capture refuses, and why: the rules of a CUDA capture, kept on the CPU tape.

Everything lies in host memory on the tape, so that what would be host memory beside a GPU has to be known by other
means: tensors that were declared (`DeviceAdapter.declare_host`), literals (`torch.tensor([1, 2])`), factories called
without a device, and whatever is computed from these alone. Operators on host memory run while the capture is made, as
they do on CUDA, and are not recorded. All other tensors are the device's, and reading their values is refused.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
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

#: What reads a tensor's memory without passing the dispatcher.
_READS: Final = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
    }
)
_FACTORIES: Final = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.zeros,
    }
)


def refuse(code: str, operator: str) -> CaptureError:
    """The error for an operator that a capture refuses."""
    message, hint = REFUSALS[code]
    return CaptureError(message.format(operator=operator), code=code, hint=hint, operator=operator)


class Placement(enum.Enum):
    """Where an operator's tensors lie."""

    DEVICE = enum.auto()
    HOST = enum.auto()
    MIXED = enum.auto()
    """Device tensors, and host tensors without dimensions that stand for numbers."""


class HostMemory:
    """Which storages are host memory to the tape, and whether they are pinned.

    Storages are told apart by address, and an address is given to another storage once its owner is gone. So an entry
    lives exactly as long as something here owns it or hears of its end.
    """

    def __init__(self) -> None:
        self._pinned: dict[int, bool] = {}
        self._owners: dict[int, torch.UntypedStorage | weakref.ref[torch.Tensor]] = {}
        self.by_factory = False
        """Whether the factory being called was given no device."""

    def declare(self, tensor: torch.Tensor, *, pinned: bool) -> None:
        """Declares `tensor`'s memory host memory for as long as the tensor lives."""
        key = tensor.untyped_storage()._cdata

        def forget(_: object) -> None:
            del self._pinned[key], self._owners[key]

        self._pinned[key] = pinned
        self._owners[key] = weakref.ref(tensor, forget)

    def adopt(self, tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Declares `tensor`'s memory host memory and keeps the memory."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = pinned
        self._owners[storage._cdata] = storage
        return tensor

    def for_capture(self) -> HostMemory:
        """What is declared now, kept alive: a capture must not mistake a new tensor for one that died meanwhile."""
        kept = HostMemory()
        for owner in list(self._owners.values()):
            tensor = owner() if isinstance(owner, weakref.ref) else None
            if tensor is not None:
                kept.adopt(tensor, pinned=self.is_pinned(tensor))
        return kept

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in pinned host memory."""
        return self._pinned.get(tensor.untyped_storage()._cdata, False)

    def check(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Placement:
        """Where the operator's tensors lie; raises `CaptureError` where a device would refuse them."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = [tensor for tensor in tensors if self.holds(tensor)]
        name = func._schema.name
        if name == "aten::lift_fresh" or (not tensors and self.by_factory):
            return Placement.HOST
        if tensors and len(on_host) == len(tensors):
            return Placement.HOST
        if kwargs.get("generator") is not None:
            raise refuse("unregistered-generator", func.name())
        if name in _CHECKED_ON_THE_HOST:
            raise refuse(_CHECKED_ON_THE_HOST[name], func.name())
        if name in _INDEX_WRITES:
            self._check_index_write(func, args)
        if name == "aten::copy_" and on_host:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if not (non_blocking and self.is_pinned(on_host[0])):
                raise refuse("host-copy", func.name())
            return Placement.DEVICE
        if any(tensor.dim() for tensor in on_host):
            is_index = name in _INDEX_WRITES or name == "aten::index"
            raise refuse("host-copy" if is_index else "device-mismatch", func.name())
        return Placement.MIXED if on_host else Placement.DEVICE

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on host memory now; what it makes is host memory too."""
        return tree_map_only(torch.Tensor, self.adopt, func(*args, **kwargs))

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


class HostReads(TorchFunctionMode):
    """Catches what never reaches the dispatcher: reads of memory, literals, factories without a device."""

    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self._host = host
        # Inside `torch.device(...)` or after `torch.set_default_device`, a factory without a device makes device
        # tensors.
        self._default_is_device = any(
            isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack()
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self._host, func, args, kwargs)
        if func in _READS and not self._host.holds(args[0]):
            raise refuse("host-read", func.__name__)
        if func in _FACTORIES and kwargs.get("device") is None and not self._default_is_device:
            self._host.by_factory = True
            try:
                return func(*args, **kwargs)
            finally:
                self._host.by_factory = False
        return func(*args, **kwargs)


def _names_host(device: object) -> bool:
    """Whether a device argument means the host: on the tape `torch.device("cpu")` is the device, the word is not."""
    return isinstance(device, str) and device.split(":")[0] == "cpu"


def _literal(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    source = args[0] if args else kwargs.get("data")
    from_device = isinstance(source, torch.Tensor) and not host.holds(source)
    if (device is not None and not _names_host(device) and not from_device) or func is torch.Tensor.new_tensor:
        raise refuse("host-copy", func.__name__)
    return func(*args, **kwargs)


def _transfer(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if func is torch.Tensor.cpu:
        target: Any = "cpu"
    elif func is torch.Tensor.cuda:
        target = torch.device("cpu")
    else:
        target = kwargs.get("device", args[1] if len(args) > 1 and isinstance(args[1], (str, torch.device)) else None)
        if target is None:
            return func(*args, **kwargs)
    if host.holds(tensor) == _names_host(target):
        return func(*args, **kwargs)
    # The layout of `to(device, dtype, non_blocking)` and `to(dtype, ...)` is left to torch: only the flag matters here.
    non_blocking = kwargs.get("non_blocking", any(argument is True for argument in args[1:]))
    to_host = _names_host(target)
    if not non_blocking or not (to_host or host.is_pinned(tensor)):
        raise refuse("host-copy" if func is not torch.Tensor.cpu else "host-read", func.__name__)
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu"))
    if to_host:
        host.adopt(result, pinned=True)  # torch makes the target of such a copy pinned
    return result.copy_(tensor, non_blocking=True)


def _tensor_split(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
    if isinstance(where, torch.Tensor) and not host.holds(where):
        raise refuse("host-read", "tensor_split")
    return func(*args, **kwargs)


def _one_hot(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if classes < 0 or host.holds(args[0]):
        return func(*args, **kwargs)
    # torch checks the values on the host, but on the CPU only; beside a GPU it does not.
    rows = torch.zeros((*args[0].shape, classes), dtype=torch.int64, device=args[0].device)
    return rows.scatter_(-1, args[0].unsqueeze(-1), 1)


_SPECIAL: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    torch.tensor: _literal,
    torch.as_tensor: _literal,
    torch.asarray: _literal,
    torch.Tensor.new_tensor: _literal,
    torch.Tensor.to: _transfer,
    torch.Tensor.cpu: _transfer,
    torch.Tensor.cuda: _transfer,
    torch.Tensor.tensor_split: _tensor_split,
    torch.tensor_split: _tensor_split,
    torch.nn.functional.one_hot: _one_hot,
}
