"""Auditing a forward before it is captured: what a graph would refuse, and what it would silently get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from devicegraph.auditing.findings import AUDIT_CODES, AuditFinding, AuditReport
from devicegraph.auditing.sites import ModuleStack
from devicegraph.auditing.tensors import KnownTensors, behind, is_plain, reachable, storage_of
from devicegraph.auditing.watch import Watch
from devicegraph.backends.split_ops import split_operators
from devicegraph.config import Backend
from devicegraph.devices import get_device_adapter
from devicegraph.errors import ConfigError
from devicegraph.slots import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from devicegraph.devices import DeviceAdapter
    from devicegraph.registry import CudaGraphBufferRegistry
    from devicegraph.slots import GraphSlot

__all__ = ["AUDIT_CODES", "AuditFinding", "AuditReport", "audit"]

_Kind = TypeVar("_Kind")


def audit(
    forward: Callable[[Any], Any],
    batch: Any,
    *,
    constants: object = (),
    registry: CudaGraphBufferRegistry | None = None,
    other_batch: Any = None,
    backend: str = "full",
    device: torch.device | str | None = None,
) -> AuditReport:
    """Runs a forward twice on a batch, eagerly, and lists all in the second run that a graph would refuse or get wrong.

    The first run is what a capture's warm-ups are: what is loaded or made once is no finding. Both really run, so that
    caches are written and counters move; under `torch.no_grad()`, on the current stream. Compiled functions run as
    written. Synchronises where the forward does.

    Known to a graph, and no finding when read, are the tensors of the batch, parameters and buffers of the modules that
    run or that `forward` works on, the slots of `registry`, and `constants`.

    Args:
        forward: what is to be captured: a function, a method, or a module.
        batch: what it takes. Tensors are looked for in its attributes and containers, some levels deep.
        constants: tensors, or objects and containers that hold them, whose addresses stay for as long as graphs live: a
            key-value cache, a table that was made once.
        registry: the static input buffers. On the CPU its host slots are host memory, as in a capture.
        other_batch: the batch of another step. Where it is given, a tensor of `batch` is known only if it is a slot's,
            or lies at the same address in both: what is made anew for each batch is not.
        backend: the word for how it is to be captured. What is marked with `eager_on_graph` is left out for
            `breakable`, and the registered split operators besides for `tc_piecewise`.
        device: where; by default the registry's, else that of the tensors of the batch.

    Returns:
        The findings, each with the module, the line and what to do. A forward that raises is a finding, too, and ends
        the audit.

    Raises:
        BackendError: the device is not available here.
        ConfigError: `not-callable`: `forward` is an engine, or something else that cannot be called; nothing was run.
    """
    if not callable(unchecked(forward)):
        raise ConfigError(
            f"forward: a `{type(forward).__name__}` cannot be called",
            code="not-callable",
            hint="pass the engine's `forward`",
        )
    if device is None:
        device = _device_of(_values(batch, kind=torch.Tensor)) if registry is None else registry.device
    adapter = get_device_adapter(device)
    known = KnownTensors()
    stack = ModuleStack(lambda module: known.add_module(module, recurse=False))
    worked_on = behind(forward)
    for module in _values(batch, constants, *worked_on, kind=torch.nn.Module):
        stack.add_root(module)
        known.add_module(module, recurse=True)
    known.add(_values(constants, kind=torch.Tensor))
    _add_inputs(known, adapter, batch, other_batch, () if registry is None else registry.slots)
    owners = [(owner, type(owner).__name__) for owner in worked_on if not isinstance(owner, torch.nn.Module)]

    def watch(earlier: Watch | None) -> Watch:
        return Watch(
            adapter,
            known,
            stack,
            split_at=split_operators() if backend == Backend.TC_PIECEWISE else (),
            takes_breaks=backend in (Backend.BREAKABLE, Backend.TC_PIECEWISE),
            owners=owners,
            earlier=earlier,
        )

    with torch.no_grad():
        run = watch(None)
        if run.run(forward, batch):
            run = watch(run)
            run.run(forward, batch)
    return AuditReport(str(adapter.device), run.findings)


def _add_inputs(
    known: KnownTensors, adapter: DeviceAdapter, batch: Any, other_batch: Any, slots: Sequence[GraphSlot]
) -> None:
    buffers = [(slot.name, slot.buffer) for slot in slots if slot.buffer is not None]
    for slot in slots:
        if slot.is_host and slot.buffer is not None:
            adapter.declare_host(slot.buffer)
    known.add(buffer for _, buffer in buffers)
    others: KnownTensors | None = None
    if other_batch is not None:
        others = KnownTensors()
        others.add(_values(other_batch, kind=torch.Tensor))
    inputs = [(path, value) for path, value in reachable(batch) if isinstance(value, torch.Tensor)]
    known.add_inputs(inputs, others)
    host = adapter.host_memory()
    known.host_inputs = {
        storage_of(tensor): name for name, tensor in (*inputs, *buffers) if is_plain(tensor) and host.holds(tensor)
    }


def _values(*roots: object, kind: type[_Kind]) -> list[_Kind]:
    return [value for _, value in reachable(*roots) if isinstance(value, kind)]


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
