"""Recording a forward onto a tape, operator by operator and without running it.

Only shapes are computed (fake propagation), so a capture changes no cache and no counter. What a device refuses inside
a capture is refused here: see `tape_rules`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from devicegraph.devices.tape import Call, Collective, FunctionalCollective, Tape
from devicegraph.devices.tape_check import ALLOCATIONS, OperatorCheck, storages_in, tensors_in
from devicegraph.devices.tape_rules import written_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from devicegraph.devices.host_reads import HostReads
    from devicegraph.devices.tape_memory import TapeMemory
    from devicegraph.devices.tape_rules import HostMemory
    from devicegraph.errors import CaptureError


class _Made:
    """A tensor that a recorded operator makes, and whether anybody has use for it."""

    def __init__(self, output: torch.Tensor, alias: torch.Tensor) -> None:
        self.alias = alias
        self.is_read = False
        self._storage = StorageWeakRef(output.untyped_storage())

    @property
    def is_alive(self) -> bool:
        """Whether a tensor on it is left."""
        return not self._storage.expired()


class Recorder(OperatorCheck):
    """Records every operator that reaches the dispatcher, and gives the model tensors to go on with.

    Args:
        memory: where outputs are placed.

    The other arguments are those of `OperatorCheck`.
    """

    def __init__(
        self,
        memory: TapeMemory,
        host: HostMemory,
        reads: HostReads,
        in_capture: Callable[[str], None],
        on_refusal: Callable[[CaptureError], None],
    ) -> None:
        super().__init__(host, reads, in_capture, on_refusal)
        self._memory = memory
        self._calls: list[tuple[Call, Sequence[_Made | None]]] = []
        #: By address of the storage; an entry of a dead storage is replaced when its address is given away again.
        self._made: dict[int, _Made] = {}

    def take(self) -> Tape:
        """What was recorded so far; what comes goes onto another tape.

        Results that nobody read and nobody holds are not stored on replay.
        """
        calls, self._calls = self._calls, []
        for call, made in calls:
            call.outputs = [m.alias if m is not None and (m.is_read or m.is_alive) else None for m in made]
        return Tape([call for call, _ in calls])

    def record_opaque(self, function: Callable[..., Any], args: Sequence[Any], shapes: Callable[..., Any]) -> Any:
        """Records a function as one call; see `DeviceAdapter.opaque_call`."""
        name = "compiled piece"
        self._in_capture(name)
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            sources: dict[int, torch.Tensor] = {}
            fakes = tree_map_only(torch.Tensor, lambda t: self._fake_of(t, sources), tuple(args))
            with self._fake:
                result = shapes(*fakes)
            made: list[_Made | None] = []
            place = functools.partial(self._opaque_output, sources=sources, given=frozenset(sources), made=made)
            output = tree_map_only(torch.Tensor, place, result)
            self._calls.append((Call(name, function, *self._addresses(tuple(args), {}), outputs=()), made))
        return output

    def _opaque_output(
        self, fake: torch.Tensor, *, sources: dict[int, torch.Tensor], given: frozenset[int], made: list[_Made | None]
    ) -> torch.Tensor:
        """Views of arguments, and of one another, stay what they are: what one is written with is read from another."""
        storage = fake.untyped_storage()
        if storage._cdata not in sources:
            sources[storage._cdata] = self._memory.new((storage.nbytes() // fake.itemsize,), (1,), fake.dtype)
        output = self._output(fake, sources, made)
        if storage._cdata not in given:
            made[-1] = fresh = _Made(output, self._memory.alias(output))
            fresh.is_read = True
        return output

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources: dict[int, torch.Tensor] = {}
        fakes = tree_map_only(torch.Tensor, lambda t: self._fake_of(t, sources), (args, kwargs))
        result = self._propagate(func, *fakes)
        self._resize_written(func, (args, kwargs), fakes)
        written = _written_returns(func, args, kwargs)
        made: list[_Made | None] = []
        returns = result if isinstance(result, (tuple, list)) and len(func._schema.returns) > 1 else (result,)
        outputs: list[Any] = []
        for position, value in enumerate(returns):
            if position in written:
                outputs.append(written[position])
                made.extend([None] * len(tensors_in(written[position])))
            else:
                outputs.append(tree_map_only(torch.Tensor, lambda fake: self._output(fake, sources, made), value))
        if func._schema.name not in ALLOCATIONS:
            kind = FunctionalCollective if func.namespace.startswith("_c10d_functional") else Call
            self._calls.append((kind(func.name(), func, *self._addresses(args, kwargs), outputs=()), made))
        if not func._schema.returns:
            return None
        return tuple(outputs) if len(func._schema.returns) > 1 else outputs[0]

    def _output(self, fake: torch.Tensor, sources: dict[int, torch.Tensor], made: list[_Made | None]) -> torch.Tensor:
        source = sources.get(fake.untyped_storage()._cdata)
        if source is not None:
            # A view of an argument without saying so, such as `_unsafe_view`'s.
            made.append(None)
            view = source if fake.dtype == source.dtype else source.view(fake.dtype)
            return view.as_strided(fake.shape, fake.stride(), view.storage_offset() + fake.storage_offset())
        output = self._memory.new(fake.shape, fake.stride(), fake.dtype)
        made.append(_Made(output, self._memory.alias(output)))
        self._made[output.untyped_storage()._cdata] = made[-1]  # type: ignore[assignment]
        return output

    def _addresses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as addresses, which keep no block; what was made for them is needed from now on."""
        for storage in storages_in((args, kwargs)):
            made = self._made.get(storage)
            if made is not None and made.is_alive:
                made.is_read = True
        addresses: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, self._memory.alias, (args, kwargs)
        )
        return addresses

    def _resize_written(self, func: OpOverload, given: Any, fakes: Any) -> None:
        """Gives `out=` tensors that the operator resizes the form that they have behind it."""
        before, after = written_arguments(func, *given), written_arguments(func, *fakes)
        for tensor, fake in zip(tensors_in(before), tensors_in(after), strict=True):
            if tensor.shape != fake.shape:
                fresh = self._memory.new(fake.shape, fake.stride(), tensor.dtype)
                tensor.set_(fresh.untyped_storage(), 0, fake.shape, fake.stride())

    def _record_collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collectives of `torch.distributed` write their first argument and return it beside a handle to wait on."""
        self._in_capture(func.name())
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
        self._calls.append((Collective(func.name(), func, *self._addresses(args, kwargs)), ()))
        return (args[0], work) if len(func._schema.returns) > 1 else work


def _written_returns(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """Which returns of an operator are arguments that it writes, by position."""
    written = written_arguments(func, args, kwargs)
    return {
        position: written[frozenset(returned.alias_info.before_set)]
        for position, returned in enumerate(func._schema.returns)
        if returned.alias_info is not None and returned.alias_info.is_write
    }
