"""Host memory and waits beside a device that has a memory of its own, where both can be seen."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.devices.tape_rules import Factory, HostMemory, Placement, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch._ops import OpOverload


class SeenHostMemory(HostMemory):
    """The rules of `HostMemory` for a device whose tensors say where they are.

    Args:
        device: the device.
    """

    is_tape = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.dispatch_key = torch._C._dispatch_key_for_device(device.type)
        index = device.index or 0
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        self.generators = (torch.default_generator, *generators[index : index + 1])

    def declare(self, tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Returns the tensor: it is seen where it is."""
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        return tensor.device.type == "cpu"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in pinned host memory."""
        return tensor.is_pinned()

    def is_named(self, device: object) -> bool:
        """Whether a device argument means the host."""
        return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"

    def transfer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: torch.Tensor
    ) -> torch.Tensor:
        """Makes the copy as it was asked for."""
        result: torch.Tensor = func(*args, **kwargs)
        return result

    def moved(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """What was made of it."""
        return result

    def check(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], factory: Factory) -> Placement:
        """Where the operator's tensors lie; raises `CaptureError` where the device refuses them."""
        name, target = func._schema.name, kwargs.get("device")
        if name == "aten::lift_fresh" and not self.holds(args[0]):
            raise refuse("host-copy", func.name())  # a literal on the device, such as the list in `x[[0, 2]]`
        if name == "aten::_to_copy" and target is not None and self.holds(args[0]) != self.is_named(target):
            # Called from below Python, or with the index of a device: the function mode did not see it.
            if not kwargs.get("non_blocking") or (self.holds(args[0]) and not self.is_pinned(args[0])):
                raise refuse("host-copy", func.name())
            return Placement.DEVICE
        return super().check(func, args, kwargs, factory)


def watched_waits(device_type: str, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
    """Calls `on_wait` with the name of each call in the block that makes the host wait for the device, or ask it.

    Seen are the functions of the torch module, and the methods of its streams and events.
    """
    module = torch.get_device_module(device_type)
    return watched_calls(
        [
            (owner, name, f"{place}.{name}")
            for owner, place, names in (
                (module, f"torch.{device_type}", ("synchronize",)),
                (getattr(module, "Stream", None), "Stream", ("synchronize", "query")),
                (getattr(module, "Event", None), "Event", ("synchronize", "query")),
                (getattr(torch, "accelerator", None), "torch.accelerator", ("synchronize",)),
            )
            for name in names
            if hasattr(owner, name)
        ],
        on_wait,
    )


@contextmanager
def watched_calls(calls: Iterable[tuple[Any, str, str]], on_call: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_call` before each call in the block of what is replaced for it.

    Args:
        calls: whose attribute it is, the attribute, and the name that it is told by.
        on_call: what to call.
    """
    with ExitStack() as restored:
        for owner, name, shown in calls:
            if name in vars(owner):
                restored.callback(setattr, owner, name, vars(owner)[name])
            else:
                restored.callback(delattr, owner, name)
            setattr(owner, name, _telling(getattr(owner, name), shown, on_call))
        yield


def _telling(function: Callable[..., Any], name: str, on_call: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_call(name)
        return function(*args, **kwargs)

    return call
