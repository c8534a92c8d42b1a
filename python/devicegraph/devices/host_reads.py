"""What a capture refuses that never reaches torch's dispatcher: the calls of Python, seen as they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from devicegraph.devices.tape_rules import Factory, refuse
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.devices.tape_rules import HostMemory

#: What reads a tensor's memory without passing the dispatcher.
READS: Final = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
    }
)
#: What may copy a tensor between host and device.
TRANSFERS: Final[frozenset[Callable[..., Any]]] = frozenset({torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda})
#: Makers of tensors that make host tensors where they are given no device.
_FACTORIES: Final = frozenset(
    {
        torch.arange,
        torch.bartlett_window,
        torch.blackman_window,
        torch.complex,
        torch.empty,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.fft.fftfreq,
        torch.fft.rfftfreq,
        torch.from_numpy,
        torch.frombuffer,
        torch.full,
        torch.hamming_window,
        torch.hann_window,
        torch.kaiser_window,
        torch.linspace,
        torch.logspace,
        torch.normal,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.range,
        torch.scalar_tensor,
        torch.tril_indices,
        torch.triu_indices,
        torch.zeros,
    }
)


class HostReads(TorchFunctionMode):
    """Catches what never reaches the dispatcher: reads of memory, literals, and where factories make their tensors.

    Args:
        host: which storages are host memory.
        on_refusal: called with the error of each call that is refused, before it is raised.
    """

    def __init__(self, host: HostMemory, on_refusal: Callable[[CaptureError], None]) -> None:
        super().__init__()
        #: While it is not, everything passes.
        self.active = True
        self._host = host
        self._on_refusal = on_refusal
        self.factory = Factory.NONE
        """What is being called."""
        # Inside `torch.device(...)` or after `torch.set_default_device`, a factory without a device makes device
        # tensors.
        self._default_is_device = any(
            isinstance(mode, DeviceContext) and not host.is_named(mode.device)
            for mode in torch.overrides._get_current_function_mode_stack()
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        try:
            return self._call(func, args, kwargs)
        except CaptureError as refusal:
            self._on_refusal(refusal)
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self._host, func, args, kwargs)
        if func in READS and not self._host.holds(args[0]):
            raise refuse("host-read", func.__name__)
        factory = Factory.NONE
        if self._host.is_named(kwargs.get("device")):
            factory = Factory.ON_HOST
        elif func in _FACTORIES and kwargs.get("device") is None and not self._default_is_device:
            factory = Factory.WITHOUT_DEVICE
        previous, self.factory = self.factory, factory
        try:
            return func(*args, **kwargs)
        finally:
            self.factory = previous


def _literal(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    source = args[0] if args else kwargs.get("data")
    from_device = isinstance(source, torch.Tensor) and not host.holds(source)
    if (device is not None and not host.is_named(device) and not from_device) or func is torch.Tensor.new_tensor:
        raise refuse("host-copy", func.__name__)
    return func(*args, **kwargs)


def _transfer(host: HostMemory, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`to`, `cpu` and `cuda`: between host and device they are a copy, which has to be asked not to wait."""
    tensor, *rest = args
    dtype: torch.dtype | None = None
    layout: torch.memory_format | None
    if func is torch.Tensor.to:
        named = kwargs.get("device", rest[0] if rest else None)
        other = kwargs.get("other", named)
        if isinstance(other, torch.Tensor):
            to_host = host.holds(other)
        elif isinstance(named, (str, torch.device)):
            to_host = host.is_named(named)
        else:
            return func(*args, **kwargs)  # another type on the same device
        if len(rest) > 1 and isinstance(rest[-1], bool) and isinstance(rest[-2], bool):
            rest.pop()  # `copy`, which makes no difference: there is a copy
        named_rest = {key: value for key, value in kwargs.items() if key != "copy"}
        _, dtype, non_blocking, layout = torch._C._nn._parse_to(*rest, **named_rest)
    else:
        to_host = func is torch.Tensor.cpu
        non_blocking = not to_host and kwargs.get("non_blocking", rest[1] if len(rest) > 1 else False)
        layout = kwargs.get("memory_format")
    if host.holds(tensor) == to_host:
        return func(*args, **kwargs)
    if not non_blocking or not (to_host or host.is_pinned(tensor)):
        raise refuse("host-read" if func is torch.Tensor.cpu else "host-copy", func.__name__)
    form = torch.empty_like(tensor, device="meta", dtype=dtype, memory_format=layout or torch.preserve_format)
    return host.transfer(func, args, kwargs, form)


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
    **dict.fromkeys(TRANSFERS, _transfer),
    torch.Tensor.tensor_split: _tensor_split,
    torch.tensor_split: _tensor_split,
    torch.nn.functional.one_hot: _one_hot,
}
