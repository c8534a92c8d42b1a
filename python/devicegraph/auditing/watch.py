"""Watching one run of a forward: the rules of a capture are held to it, and it goes on whatever they say."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import threading
import types
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_map_only

from devicegraph.auditing.findings import AUDIT_CODES, AuditFinding
from devicegraph.auditing.tensors import Made, attributes_of, is_plain, plain_in, reachable, storage_of
from devicegraph.backends.breaks import CalledBreaks, MarkedCall, recording_breaks
from devicegraph.devices.host_memory import watched_calls
from devicegraph.devices.host_reads import READS, TRANSFERS, HostReads
from devicegraph.devices.tape_check import ALLOCATIONS, OperatorCheck, says_view
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._ops import OpOverload

    from devicegraph.auditing.sites import ModuleStack, Site
    from devicegraph.auditing.tensors import KnownTensors
    from devicegraph.devices import DeviceAdapter

    #: Code, operator, detail and place of a finding.
    _Key = tuple[str, str, str, Site]

#: What the modules of random numbers have besides draws.
_SETTINGS: Final = frozenset({"seed", "getstate", "setstate", "get_state", "set_state"})
#: Marks an error that a finding explains.
_FOUND: Final = "_devicegraph_found"
#: Codes that say what the tape cannot do, and another device may.
_OF_THE_TAPE: Final = ("tape-limit", "no-fake-kernel")


class Watch:
    """One run of a forward under watch.

    Args:
        adapter: the device.
        known: what it may read.
        stack: where it is.
        split_at: operators that run outside of the graph.
        takes_breaks: whether marked functions run outside of the graph.
        owners: objects that the forward works on, with names, whose attributes unknown tensors may be.
        earlier: an earlier run.
    """

    def __init__(
        self,
        adapter: DeviceAdapter,
        known: KnownTensors,
        stack: ModuleStack,
        *,
        split_at: Sequence[str] = (),
        takes_breaks: bool = False,
        owners: Sequence[tuple[object, str]] = (),
        earlier: Watch | None = None,
    ) -> None:
        self.known = known
        self.stack = stack
        self.split_at = frozenset(split_at)
        self.host = adapter.host_memory()
        self.made: dict[int, Made] = {}
        self._adapter = adapter
        self._takes_breaks = takes_breaks
        self._owners = owners
        self._earlier = earlier
        self._found: dict[_Key, AuditFinding] = {}
        self._unknown: dict[int, _Key] = {}
        self._kept: list[torch.Tensor] = []
        self._calls = _Calls(self)
        self._operators = _Operators(self, self._calls)
        self._thread = threading.get_ident()

    @property
    def findings(self) -> tuple[AuditFinding, ...]:
        """What was found, in the order in which it was met."""
        return tuple(self._found.values())

    def run(self, forward: Callable[[Any], Any], batch: Any) -> bool:
        """Runs the forward; whether it came to its end."""
        torch.clear_autocast_cache()  # casts of weights that a surrounding block keeps are no business of the forward
        with ExitStack() as watching:
            watching.enter_context(torch.compiler.set_stance("force_eager"))
            watching.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            watching.enter_context(self.stack.watched())
            watching.enter_context(self._adapter.watch_waits(lambda what: self._on_call("synchronize", what)))
            watching.enter_context(watched_calls(_draws_of_python(), lambda what: self._on_call("random", what)))
            if self._takes_breaks:
                watching.enter_context(recording_breaks(_PassedBreaks(self)))
            watching.enter_context(self._calls)
            watching.enter_context(self._operators)
            try:
                output = forward(batch)
            except Exception as error:
                self._note_failure(error)
                return False
        if self._earlier is not None:  # what the first run of all leaves may be made once
            self._note_survivors(output)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the block does is not watched."""
        before = self._operators.active, self._calls.active
        self._operators.active = self._calls.active = False
        try:
            yield
        finally:
            self._operators.active, self._calls.active = before

    def note(self, code: str, operator: str, *, detail: str = "", site: Site | None = None) -> _Key:
        """Takes a finding; what it says names the function that the model called."""
        site = self.stack.here() if site is None else site
        key = (code, operator, detail, site)
        known = self._found.get(key)
        if known is not None:
            self._found[key] = dataclasses.replace(known, count=known.count + 1)
            return key
        message, hint = AUDIT_CODES[code]
        shown = self._calls.name or operator
        self._found[key] = AuditFinding(code, message.format(operator=shown, detail=detail), hint, operator, *site)
        return key

    def refused(self, refusal: CaptureError) -> None:
        """Takes what a capture refuses."""
        if refusal.code in _OF_THE_TAPE and not self.host.is_tape:
            return
        operator, detail = refusal.operator or "", ""
        if refusal.code == "tape-limit":
            detail = refusal.message.partition(": ")[2]
        self.note(refusal.code, operator, detail=detail)

    def take_in(self, tree: Any, given: Any, operator: str) -> None:
        """Takes the tensors that a call returned; what lies in none of its arguments is new."""
        returned = plain_in(tree)
        before = {storage_of(tensor) for tensor in plain_in(given)} if returned else ()
        for tensor in returned:
            storage, is_host = storage_of(tensor), self.host.holds(tensor)
            if storage in self.made:
                self.made[storage].is_host = is_host
            elif storage not in before and not self.known.has(tensor):
                self.made[storage] = Made(tensor, operator, self.stack.here(), is_host=is_host)

    def look_at(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at the arguments of an operator that reads or writes them."""
        name = func._schema.name
        if says_view(func) or name in ALLOCATIONS or name.endswith("_like") or name.startswith("aten::new_"):
            return
        given = plain_in((args, kwargs))
        # What moves values to the device, and what asks where they lie, takes none of them on the host.
        is_copy = name in ("aten::copy_", "aten::_to_copy", "aten::to", "aten::is_pinned")
        on_host = all(self.host.holds(tensor) for tensor in given)
        for tensor in given:
            if (on_host or tensor.dim() == 0) and not is_copy:
                self.look_at_host(tensor, func.name())
            if storage_of(tensor) not in self.made and not self.known.has(tensor):
                self._note_unknown(tensor, func.name())

    def look_at_host(self, tensor: torch.Tensor, operator: str) -> None:
        """Looks at a tensor whose values may be taken on the host."""
        name = self.known.host_inputs.get(storage_of(tensor))
        if name is not None:
            self.note("frozen-value", operator, detail=f"the batch's host tensor `{name}`")

    def _note_unknown(self, tensor: torch.Tensor, operator: str) -> None:
        storage = storage_of(tensor)
        if storage in self._unknown:
            key = self._unknown[storage]  # told where it was met first
            self._found[key] = dataclasses.replace(self._found[key], count=self._found[key].count + 1)
            return
        self._kept.append(tensor)  # so that the key stays its own
        earlier = self._earlier is not None and storage in self._earlier.made
        name, named = self.known.moving.get(storage) or self._name_of(storage) or ("", tensor)
        detail = f"`{name}`, " if name else ""
        detail += f"{list(named.shape)} of {named.dtype}".replace("torch.", "")
        if storage in self.known.moving:
            detail += " at another address in another batch"
        if earlier:
            detail += " that an earlier run of the forward made"
        self._unknown[storage] = self.note("unknown-tensor", operator, detail=detail)

    def _name_of(self, storage: int) -> tuple[str, torch.Tensor] | None:
        for owner, name in (*self.stack.named.values(), *self._owners):
            for path, tensor in attributes_of(owner):
                if storage_of(tensor) == storage:
                    return f"{name}.{path}", tensor
        return None

    def _note_survivors(self, output: Any) -> None:
        torch.clear_autocast_cache()
        returned = {
            storage_of(value) for _, value in reachable(output) if isinstance(value, torch.Tensor) and is_plain(value)
        }
        kept = [made for storage, made in self.made.items() if not made.is_host and storage not in returned]
        if any(made.is_alive for made in kept):
            gc.collect()  # what only a cycle holds is kept by nobody
        for made in kept:
            if made.is_alive:
                self.note("outlives-step", made.operator, site=made.site)

    def _note_failure(self, error: Exception) -> None:
        if getattr(error, _FOUND, False):
            return
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        self.note("forward-failed", "", detail=f"{type(error).__name__}: {reason}", site=self.stack.of_failure(error))

    def _on_call(self, code: str, what: str) -> None:
        if self._operators.active and threading.get_ident() == self._thread:
            self.note(code, what)


class _Calls(HostReads):
    """The calls of a forward that are watched before the dispatcher sees them.

    Attributes:
        name: of the function that is being called.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch.host, on_refusal=lambda refusal: None)
        self._watch = watch
        self._function: Any = None

    @property
    def name(self) -> str | None:
        """The function that is being called, as a model writes it."""
        if self._function is None:
            return None
        name = torch.overrides.resolve_name(self._function)  # type: ignore[no-untyped-call, unused-ignore]
        return name if name is not None else getattr(self._function, "__name__", None)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._function = self._function, func
        try:
            if func in READS and self._host.holds(args[0]):
                self._watch.look_at_host(args[0], func.__name__)
            try:
                result = super()._call(func, args, kwargs)
            except CaptureError as refusal:
                self._watch.refused(refusal)
                result = self._go_on(func, args, kwargs)
            self._watch.take_in(result, (args, kwargs), func.__name__)
            return result
        finally:
            self._function = outer

    def _go_on(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out what was refused."""
        with self._watch.paused():
            result = _carried_out(func, args, kwargs)
            if isinstance(result, torch.Tensor) and func in TRANSFERS:
                result = self._host.moved(args[0], result)
        return result


class _Operators(OperatorCheck):
    """The operators of a forward: held to the rules, and run."""

    def __init__(self, watch: Watch, calls: _Calls) -> None:
        super().__init__(watch.host, calls, in_capture=lambda name: None, on_refusal=lambda refusal: None)
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        is_operator = isinstance(func, torch._ops.OpOverload)
        if not is_operator or func._schema.name not in self._watch.split_at:
            try:
                return self._take_in(func, types, args, kwargs)
            except CaptureError as refusal:
                if is_operator:
                    raise
                self._watch.refused(refusal)
        with self._watch.paused():
            result = func(*args, **kwargs)
        self._watch.take_in(result, (args, kwargs), func.name())
        return result

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self._watch, func.name()
        if name == "_c10d_functional::wait_tensor":
            return func(*args, **kwargs)
        is_new = func._schema.name in ("aten::lift_fresh", "aten::lift")
        if not is_new:
            watch.look_at(func, args, kwargs)
        generators = [*self._watch.host.generators, *([kwargs["generator"]] if kwargs.get("generator") else [])]
        states = [generator.get_state() for generator in generators]
        try:
            result = super()._dispatch(func, args, kwargs)
        except CaptureError as refusal:
            watch.refused(refusal)
            result = _carried_out(func, args, kwargs)
        else:
            # By what is drawn, not by what the operator says of itself: attention says that it may draw.
            if any(not torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True)):
                watch.note("random", name)
        watch.take_in(result, () if is_new else (args, kwargs), name)
        return result

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources: dict[int, torch.Tensor] = {}
        fakes = tree_map_only(torch.Tensor, lambda t: self._fake_of(t, sources), (args, kwargs))
        result = func(*args, **kwargs)  # first, since what fails for real fails without memory, too
        try:
            self._propagate(func, *fakes)
        except CaptureError as refusal:
            self._watch.refused(refusal)
        return result

    def _record_collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def _carried_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls what was refused. A device may refuse it as well, which is no other finding then."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        setattr(error, _FOUND, True)  # the error itself is not kept: it would keep the tensors of the forward
        raise


def _draws_of_python() -> list[tuple[Any, str, str]]:
    """The functions of `random`, and of `numpy.random` if it is loaded, that draw from a generator of the process."""
    modules = [random, *filter(None, [sys.modules.get("numpy.random")])]
    return [
        (module, name, f"{module.__name__}.{name}")
        for module in modules
        for name, function in vars(module).items()
        if not isinstance(getattr(function, "__self__", module), types.ModuleType) and name not in _SETTINGS
    ]


class _PassedBreaks(CalledBreaks):
    """Breaks of a forward under watch: they are no part of a graph."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def call(self, marked: MarkedCall) -> Any:
        """Runs a marked function unwatched."""
        function, args, kwargs, _ = marked
        with self._watch.paused(), recording_breaks(None):
            result = function(*args, **kwargs)
        self._watch.take_in(result, (args, kwargs), getattr(function, "__name__", "a break"))
        return result
