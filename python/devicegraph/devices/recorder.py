"""Recording a forward onto a tape, operator by operator and without running it.

Only shapes are computed (fake propagation), so a capture changes no cache and no counter. What a device refuses inside
a capture is refused here: see `tape_rules`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from devicegraph.devices.tape import Call, Collective, FunctionalCollective, Tape
from devicegraph.devices.tape_rules import HostMemory, HostReads, Placement, refuse, written_arguments
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from devicegraph.devices.tape_memory import TapeMemory

#: Tensors of these classes are plain; another class gets to lower its operators to plain ones first.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

#: Operators that reserve memory and write nothing: a replay has nothing to do.
_ALLOCATIONS: Final = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
#: Operators that answer about tensors, not about their values.
_METADATA: Final = frozenset({"aten::is_pinned", "aten::is_same_size", "aten::is_set_to"})


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


class Recorder(TorchDispatchMode):
    """Records every operator that reaches the dispatcher, and gives the model tensors to go on with.

    Args:
        memory: where outputs are placed.
        host: which storages are host memory to the tape; see `HostMemory`.
        reads: the mode that watches what does not reach the dispatcher.
        in_capture: called for every operator; raises where the current stream does not belong to the capture.
        on_refusal: called with the error of each operator that is refused, before it is raised.
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(
        self,
        memory: TapeMemory,
        host: HostMemory,
        reads: HostReads,
        in_capture: Callable[[str], None],
        on_refusal: Callable[[CaptureError], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._memory = memory
        self._host = host
        self._reads = reads
        #: While it is not, operators run as if there were no recorder.
        self.active = True
        self._in_capture = in_capture
        self._on_refusal = on_refusal
        self._fake = FakeTensorMode()
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

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        try:
            return self._take_in(func, types, args, kwargs)
        except CaptureError as refusal:
            self._on_refusal(refusal)
            raise

    def _take_in(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            raise refuse("tape-limit", func.name(), "higher-order operators have no form on the tape")
        if not _PLAIN.issuperset(types):
            return NotImplemented
        # What composite operators and operators in Python consist of is what is checked and recorded: the former arrive
        # whole under inference mode, and the Python of the latter does not replay beside a GPU either.
        if _is_composite(func.name()):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        kernel = _python_kernel(func)
        if kernel is not None:
            with self._reads, self:
                # `redispatch` leaves the function mode to what the Python calls.
                return func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)
        # The function mode watches what the model calls, not what happens in here.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        if func.namespace == "c10d":
            return self._record_collective(func, args, kwargs)
        if name == "_c10d_functional::wait_tensor":
            return args[0]  # the collective itself is waited for
        _check_dense(name, (args, kwargs))
        placement = self._host.check(func, args, kwargs, self._reads.factory)
        if placement is Placement.HOST:
            result = func(*args, **kwargs)
            _check_dense(name, result)
            return tree_map_only(torch.Tensor, self._host.declare, result)
        if placement is Placement.NOWHERE:
            return func(*args, **kwargs)
        self._in_capture(name)
        if torch.Tag.inplace_view in func.tags or func._schema.name in _METADATA:
            # `set_`, `t_`, `squeeze_`: metadata of a tensor that exists, nothing for a replay to do.
            return func(*args, **kwargs)
        if placement is Placement.MIXED:
            args, kwargs = self._host.freeze_scalars(args, kwargs)
        if _says_view(func):
            result = func(*args, **kwargs)
            if _storages(result) <= _storages((args, kwargs)):
                return result  # metadata only, made for real and not recorded
        return self._record(func, args, kwargs)

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
                made.extend([None] * len(_tensors(written[position])))
            else:
                outputs.append(tree_map_only(torch.Tensor, lambda fake: self._output(fake, sources, made), value))
        if func._schema.name not in _ALLOCATIONS:
            kind = FunctionalCollective if func.namespace.startswith("_c10d_functional") else Call
            self._calls.append((kind(func.name(), func, *self._addresses(args, kwargs), outputs=()), made))
        if not func._schema.returns:
            return None
        return tuple(outputs) if len(func._schema.returns) > 1 else outputs[0]

    def _propagate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        try:
            with self._fake:
                result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise refuse("data-dependent-shape", name) from error
        except DataDependentOutputException as error:
            raise refuse("host-read", name) from error
        except UnsupportedOperatorException as error:
            raise refuse("no-fake-kernel", name) from error
        except Exception as error:
            # The forward ran in its warm-ups, so it is the fake kernel that cannot do this.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise refuse("tape-limit", name, f"torch's fake kernel of it fails: {reason[0]}") from error
        if any(not isinstance(leaf, torch.Tensor) and leaf is not None for leaf in tree_leaves(result)):
            raise refuse("host-read", name)  # a number or a boolean that depends on values
        _check_dense(name, result)
        return result

    def _fake_of(self, tensor: torch.Tensor, sources: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor without memory that has the form of `tensor`. By hand: torch's converter takes ten times as long."""
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.is_conj():
            form = form.conj()
        if tensor.is_neg():
            form = torch._neg_view(form)
        sources[form.untyped_storage()._cdata] = tensor
        return FakeTensor(self._fake, form, tensor.device)

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
        for storage in _storages((args, kwargs)):
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
        for tensor, fake in zip(_tensors(before), _tensors(after), strict=True):
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


@functools.cache
def _is_composite(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def _python_kernel(func: OpOverload) -> torch._C.DispatchKey | None:
    """The dispatch key under which an operator has a kernel that was registered from Python, if it has one."""
    name = func._schema.name.replace("::", "/")
    if func._overloadname != "default":
        name = f"{name}.{func._overloadname}"
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CompositeExplicitAutograd):
        if f"{name}/{key.name}" in torch.library._impls:
            return key
    return None


@functools.cache
def _says_view(func: OpOverload) -> bool:
    """Whether every return is noted as an alias of an argument that is not written.

    Among operators that are not composite the note is true, with `lift_fresh` and its like aside; it is checked all the
    same.
    """
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _check_dense(name: str, tree: Any) -> None:
    for tensor in _tensors(tree):
        if tensor.layout is not torch.strided:
            raise refuse("tape-limit", name, "sparse tensors have no form on it")


def _storages(tree: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(tree)}


def _written_returns(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """Which returns of an operator are arguments that it writes, by position."""
    written = written_arguments(func, args, kwargs)
    return {
        position: written[frozenset(returned.alias_info.before_set)]
        for position, returned in enumerate(func._schema.returns)
        if returned.alias_info is not None and returned.alias_info.is_write
    }
