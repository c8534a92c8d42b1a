"""The CPU tape: records a forward operator by operator without running it, and replays the record on the same storages.

Recording computes shapes only (fake propagation), so a capture changes no cache and no counter. What the record holds
is addresses, as a device graph does: Python does not run again on replay, a tensor that was replaced after the capture
is not seen, random operators advance. What a device refuses inside a capture is refused here: see `tape_rules`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from devicegraph.devices.tape_rules import HostMemory, Placement, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from devicegraph.devices.tape_memory import TapeMemory

#: Composite operators that are recorded whole: one call on replay, and the path that an eager forward takes.
_RECORDED_WHOLE = frozenset({"aten::linear", "aten::matmul"})
#: Tensors of these classes are plain; another class gets to lower its operators to plain ones first.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class _Call(NamedTuple):
    """One recorded operator: what to call, with which addresses, and where its fresh outputs go."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor | None, ...]
    """One entry for each tensor that the operator returns; None where it is one of the arguments."""
    is_collective: bool = False
    """Whether it is one of `torch.distributed`: it returns a handle of asynchronous work and writes its arguments."""


class Tape:
    """A recorded program on fixed addresses."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._inference = torch.is_inference_mode_enabled()

    def __len__(self) -> int:
        return len(self._calls)

    def operators(self) -> list[str]:
        """The names of the recorded operators, in order."""
        return [call.operator.name() for call in self._calls]

    def append(self, call: _Call) -> None:
        """Adds a call at the end."""
        self._calls.append(call)

    def replay(self) -> None:
        """Runs the record once; returns when it is done.

        Operators were recorded below autograd and autocast, and are called there again, whatever mode the caller is in.
        """
        with torch.inference_mode(self._inference), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            for operator, args, kwargs, outputs, is_collective in self._calls:
                if is_collective:
                    _run_collective(operator, args, kwargs)
                    continue
                result = operator(*args, **kwargs)
                if outputs:
                    for output, value in zip(outputs, tree_leaves(result), strict=True):
                        if output is not None:
                            output.copy_(value)


class Recorder(TorchDispatchMode):
    """Records every operator that reaches the dispatcher onto a tape, and gives the model tensors to go on with.

    Args:
        memory: where outputs are placed.
        host: which storages are host memory to the tape; see `HostMemory`.
        in_capture: called for every operator; raises where the current stream does not belong to the capture.
    """

    def __init__(self, memory: TapeMemory, host: HostMemory, in_capture: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.tape = Tape()
        self._memory = memory
        self._host = host
        self._in_capture = in_capture
        self._fake = FakeTensorMode()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            return NotImplemented
        # The function mode watches what the model calls, not what happens in here.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        if func.namespace == "c10d":
            return self._record_collective(func, args, kwargs)
        # Under inference mode composite operators arrive whole; their parts are what is checked and recorded.
        if _is_composite(name):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        kernel = _python_kernel(func)
        if kernel is not None:
            # A custom operator written in Python is what it calls: beside a GPU its Python does not replay either.
            with self:
                return func._op_dk(kernel, *args, **kwargs)
        placement = self._host.check(func, args, kwargs)
        if placement is Placement.HOST:
            return self._host.run(func, args, kwargs)
        self._in_capture(name)
        if torch.Tag.inplace_view in func.tags:
            # `set_`, `t_`, `squeeze_`: metadata of a tensor that exists, nothing for a replay to do.
            return func(*args, **kwargs)
        if placement is Placement.MIXED:
            args, kwargs = self._host.freeze_scalars(args, kwargs)
        if _says_view(func):
            result = func(*args, **kwargs)
            if _storages(result) <= _storages((args, kwargs)):
                return result  # metadata only, made for real and not recorded
        return self._record(func, args, kwargs)

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources: dict[int, torch.Tensor] = {}
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, lambda t: self._fake_of(t, sources), (args, kwargs))
        result = self._propagate(func, fake_args, fake_kwargs)
        written = _written_arguments(func, args, kwargs)
        made: list[torch.Tensor | None] = []
        returns = result if isinstance(result, (tuple, list)) and len(func._schema.returns) > 1 else (result,)
        outputs: list[Any] = []
        for position, value in enumerate(returns):
            if position in written:
                outputs.append(written[position])
                made.extend([None] * len(tree_leaves(written[position])))
            else:
                outputs.append(tree_map_only(torch.Tensor, lambda fake: self._output(fake, sources, made), value))
        args, kwargs = tree_map_only(torch.Tensor, self._memory.alias, (args, kwargs))
        self.tape.append(_Call(func, args, kwargs, tuple(made)))
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
        if any(not isinstance(leaf, torch.Tensor) and leaf is not None for leaf in tree_leaves(result)):
            raise refuse("host-read", name)  # a number or a boolean that depends on values
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

    def _output(
        self, fake: torch.Tensor, sources: dict[int, torch.Tensor], made: list[torch.Tensor | None]
    ) -> torch.Tensor:
        source = sources.get(fake.untyped_storage()._cdata)
        if source is not None:
            # A view of an argument without saying so, such as `_unsafe_view`'s.
            made.append(None)
            view = source if fake.dtype == source.dtype else source.view(fake.dtype)
            return view.as_strided(fake.shape, fake.stride(), view.storage_offset() + fake.storage_offset())
        output = self._memory.new(fake.shape, fake.stride(), fake.dtype)
        made.append(self._memory.alias(output))
        return output

    def _record_collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collectives of `torch.distributed` write their first argument and return it beside a handle to wait on."""
        self._in_capture(func.name())
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
        aliased = tree_map_only(torch.Tensor, self._memory.alias, (args, kwargs))
        kept = tree_map_only(torch.ScriptObject, _unboxed, aliased)
        self.tape.append(_Call(func, kept[0], kept[1], (), is_collective=True))
        return (args[0], work) if len(func._schema.returns) > 1 else work


@functools.cache
def _is_composite(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
    return composite and name not in _RECORDED_WHOLE


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


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def _written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """Which returns of an operator are arguments that it writes, by position."""
    schema = func._schema
    if not schema.is_mutable:
        return {}
    by_alias: dict[frozenset[str], Any] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            by_alias[frozenset(argument.alias_info.before_set)] = value
    return {
        position: by_alias[frozenset(returned.alias_info.before_set)]
        for position, returned in enumerate(schema.returns)
        if returned.alias_info is not None and returned.alias_info.is_write
    }


def _unboxed(value: torch.ScriptObject) -> Any:
    """A process group as Python's own object, anything else as it is.

    Whoever drops the last reference to a group joins its threads, and one of those may be waiting for the interpreter
    lock: Python's object lets go of the lock first, a boxed one does not.
    """
    name = value._type().qualified_name()  # type: ignore[attr-defined, unused-ignore]
    group = torch._C._distributed_c10d.ProcessGroup
    return group.unbox(value) if name.endswith(".c10d.ProcessGroup") else value


def _run_collective(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    group, work = torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Work
    args, kwargs = tree_map_only(group, lambda value: value.boxed(), (args, kwargs))
    for leaf in tree_leaves(operator(*args, **kwargs)):
        if isinstance(leaf, torch.ScriptObject):
            work.unbox(leaf).wait()
