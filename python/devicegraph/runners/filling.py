"""How the graphs of a runner are filled: by a node of their own where that fits, else by the registry before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from devicegraph.runners.capturing import CapturingRunner


class Filling(NamedTuple):
    """How graphs are filled, and why not in a faster way.

    Attributes:
        executor: `node`, `native` or `foreach`.
        reason: why it is no faster one where nothing was asked for; None otherwise.
    """

    executor: str
    reason: str | None


def choose_filling(runner: CapturingRunner) -> Filling:
    """How the graphs that are captured next are to be filled.

    Raises:
        BackendError: `executor-unavailable`: the registry was made with an executor that cannot be had.
    """
    registry = runner.buffer_registry
    if registry.wanted_executor not in ("auto", "node"):
        return Filling(registry.executor, None)
    reason = registry.executor_reason or _why_not_node(runner)
    if reason is None:
        return Filling("node", None)
    if registry.wanted_executor == "node":
        raise no_node(reason)
    return Filling(registry.executor, reason)


#: Why a graph that was captured with its fill at the head cannot be pointed.
NOT_FOUND: Final = "the fill cannot be told apart in the captured graph"


def no_node(reason: str) -> BackendError:
    """The error where a node was asked for and cannot be had."""
    message = f"executor `node` cannot be had: {reason}"
    return BackendError(message, code="executor-unavailable", hint="use `auto`")


def _why_not_node(runner: CapturingRunner) -> str | None:
    backend = runner.backend
    if backend is None or not backend.can_fill:
        return "only a graph of the whole forward, with nothing done about its replay, can begin with the fill"
    if not runner.adapter.fills_in_graphs:
        return f"graphs of `{runner.adapter.device.type}` cannot be looked into here"
    slots = runner.buffer_registry.slots
    on_host = {slot.name for slot in slots if slot.buffer is not None and slot.buffer.device.type == "cpu"}
    on_device = {slot.name for slot in slots} - on_host
    readers = [
        ("prepare_metadata", runner.hooks.prepare_metadata),
        ("upgrade_metadata", runner.hooks.upgrade_metadata),
        *((f"post_fill of slot `{slot.name}`", slot.post_fill) for slot in slots),
    ]
    return next(filter(None, (_why_reads(name, reader, on_device, on_host) for name, reader in readers)), None)


def _why_reads(name: str, reader: Any, on_device: set[str], on_host: set[str]) -> str | None:
    """Why a hook has to come after the fill; None where it reads no slot on the device."""
    if reader is None:
        return None
    reads: Iterable[str] | None = getattr(reader, "reads", None)
    if reads is None:
        return f"{name} does not declare what it reads (`@devicegraph.hook(reads=...)`)"
    if unknown := set(reads) - on_device - on_host:
        return f"{name} reads {_listed(unknown)}, which is no slot"
    return f"{name} reads {_listed(on_device & set(reads))} on the device" if on_device & set(reads) else None


def _listed(slots: set[str]) -> str:
    return ", ".join(f"`{slot}`" for slot in sorted(slots))
