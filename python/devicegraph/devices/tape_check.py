"""Holding a forward to the rules of a capture, operator by operator: what records and what audits share.

Operators are taken apart into those that a device is given, and what a capture refuses of them is refused here; see
`tape_rules`.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

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
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from devicegraph.devices.host_reads import HostReads

#: Tensors of these classes are plain; another class gets to lower its operators to plain ones first.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

#: Operators that reserve memory and write nothing: a replay has nothing to do.
ALLOCATIONS: Final = frozenset(
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


class OperatorCheck(TorchDispatchMode):
    """Takes in every operator that reaches the dispatcher, and refuses what a capture refuses.

    Args:
        host: which storages are host memory; see `HostMemory`.
        reads: the mode that watches what does not reach the dispatcher.
        in_capture: called for every operator; raises where the current stream does not belong to the capture.
        on_refusal: called with the error of each operator that is refused, before it is raised.
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(
        self,
        host: HostMemory,
        reads: HostReads,
        in_capture: Callable[[str], None],
        on_refusal: Callable[[CaptureError], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._host = host
        self._reads = reads
        #: While it is not, operators run as if this mode were not there.
        self.active = True
        self._in_capture = in_capture
        self._on_refusal = on_refusal
        self._fake = FakeTensorMode()
        self._caches = self._fake.cache_enabled

    @abstractmethod
    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes an operator on device tensors that is not refused yet: `_propagate` is to be asked."""

    @abstractmethod
    def _record_collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes a collective of `torch.distributed`."""

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
        if _is_composite(func.name(), self._host.dispatch_key):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        kernel = _python_kernel(func, self._host.dispatch_key)
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
        if says_view(func):
            result = func(*args, **kwargs)
            if storages_in(result) <= storages_in((args, kwargs)):
                return result  # metadata only, made for real and not recorded
        return self._record(func, args, kwargs)

    def _propagate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        # The cache compares arguments, and not every object that is boxed for C++ can be compared.
        self._fake.cache_enabled = self._caches and not _takes_objects(func)
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
        if any(not _is_of_form(leaf) for leaf in tree_leaves(result)):
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


def _is_of_form(leaf: Any) -> bool:
    """Whether what an operator returns says nothing of values: tensors, and sizes.

    CUDA's flash attention returns the length of the longest sequence beside its output.
    """
    return isinstance(leaf, torch.Tensor) or leaf is None or type(leaf) is int


@functools.cache
def _takes_objects(func: OpOverload) -> bool:
    return any(isinstance(argument.type, torch.ClassType) for argument in func._schema.arguments)


@functools.cache
def _is_composite(name: str, device_key: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, device_key)


def _python_kernel(func: OpOverload, device_key: str) -> torch._C.DispatchKey | None:
    """The dispatch key under which an operator has a kernel that was registered from Python, if it has one."""
    name = func._schema.name.replace("::", "/")
    if func._overloadname != "default":
        name = f"{name}.{func._overloadname}"
    for key in (getattr(torch._C.DispatchKey, device_key), torch._C.DispatchKey.CompositeExplicitAutograd):
        if f"{name}/{key.name}" in torch.library._impls:
            return key
    return None


@functools.cache
def says_view(func: OpOverload) -> bool:
    """Whether every return is noted as an alias of an argument that is not written.

    Among operators that are not composite the note is true, with `lift_fresh` and its like aside; it is checked all the
    same.
    """
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _check_dense(name: str, tree: Any) -> None:
    for tensor in tensors_in(tree):
        if tensor.layout is not torch.strided:
            raise refuse("tape-limit", name, "sparse tensors have no form on it")


def storages_in(tree: Any) -> set[int]:
    """Their storages, by address."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(tree)}
