"""Which tensors a forward may read: what it was given, what its modules hold, and what it made itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from devicegraph.auditing.sites import Site

#: How deep objects are looked into, from the one that is given; a cache on a batch has its layers' tensors at 3.
_DEPTH: Final = 5
#: What holds no tensors of a model, or too much else.
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes, int, float)


def storage_of(tensor: torch.Tensor) -> int:
    """What tells storages apart, as long as they live."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def plain_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers that have memory of their own to look at."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and has a storage, and no subclass carries out its operators."""
    return (
        tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def reachable(*roots: object, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Every tensor and module within objects, containers and their attributes, and the path to it.

    Modules are not looked into.
    """
    seen: dict[int, object] = {}  # kept, so that no other object gets the identity of one
    level: list[tuple[str, object]] = [("", root) for root in roots]
    for _ in range(depth + 1):
        below: list[tuple[str, object]] = []
        for path, value in level:
            if isinstance(value, _OPAQUE) or value is None or id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, (torch.Tensor, torch.nn.Module)):
                yield path, value
            else:
                below += _held(path, value)
        level = below


def attributes_of(owner: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are attributes of an object, or in containers that are; of a module those that are neither its
    parameters nor its buffers.
    """
    for path, value in _attributes("", owner, getattr(owner, "__dict__", {})):
        for inner, found in reachable(value, depth=1):
            if isinstance(found, torch.Tensor) and is_plain(found):
                yield path + inner, found


def _held(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        return items if not hasattr(value, "_fields") else _attributes(path, value, value._fields)
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return _attributes(path, value, [*getattr(value, "__dict__", {}), *slots])


def _attributes(path: str, value: object, names: Iterable[str]) -> list[tuple[str, object]]:
    found = [(name, getattr(value, name, None)) for name in names]
    return [(f"{path}.{name}" if path else name, item) for name, item in found]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def behind(function: Callable[..., Any]) -> list[object]:
    """What a callable works on: its object, its closure, its arguments, the modules among its globals."""
    if isinstance(function, functools.partial):
        return [*behind(function.func), function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__self__, *behind(function.__func__)]
    if not isinstance(function, types.FunctionType):
        return [function]
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    called = [item for item in held if isinstance(item, (types.FunctionType, types.MethodType, functools.partial))]
    return [
        *held,
        *(item for item in used if isinstance(item, torch.nn.Module)),
        *(item for inner in called for item in behind(inner)),
    ]


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not NotImplemented
    except ValueError:
        return False


class KnownTensors:
    """The memory that stays where it is for as long as a graph lives, as far as an engine says so."""

    def __init__(self) -> None:
        #: By storage; the tensor keeps the storage, so that the key stays its own.
        self._held: dict[int, torch.Tensor] = {}
        #: Where they lie: device, first byte, end.
        self._spans: list[tuple[torch.device, int, int]] = []
        #: The names of host tensors that are the batch's, by storage.
        self.host_inputs: dict[int, str] = {}
        #: Tensors of the batch that another batch has elsewhere, with their names, by storage.
        self.moving: dict[int, tuple[str, torch.Tensor]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds the memory of tensors."""
        for tensor in tensors:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._held:
                    self._held[storage._cdata] = tensor
                    self._spans.append((tensor.device, storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            elif hasattr(tensor, "__tensor_flatten__"):
                names, _ = tensor.__tensor_flatten__()
                self.add(getattr(tensor, name) for name in names)

    def add_inputs(self, inputs: Iterable[tuple[str, torch.Tensor]], others: KnownTensors | None) -> None:
        """Adds the tensors of a batch, those that another batch has at the same address where there is one."""
        for name, tensor in inputs:
            if others is None or not is_plain(tensor) or self.has(tensor) or others.has(tensor):
                self.add([tensor])
            else:
                self.moving[storage_of(tensor)] = name, tensor

    def add_module(self, module: torch.nn.Module, *, recurse: bool) -> None:
        """Adds a module's parameters and buffers."""
        self.add(module.parameters(recurse))
        self.add(module.buffers(recurse))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor lies in known memory, or is a parameter."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._held:
            return True
        # The same memory may have come another way, such as DLPack, as a storage of its own.
        start = storage.data_ptr()
        is_known = isinstance(tensor, torch.nn.Parameter) or any(
            begin <= start < end and device == tensor.device for device, begin, end in self._spans
        )
        if is_known:
            self.add([tensor])
        return is_known


class Made:
    """A storage that the forward made."""

    def __init__(self, tensor: torch.Tensor, operator: str, site: Site, *, is_host: bool) -> None:
        self.operator = operator
        self.site = site
        self.is_host = is_host
        # A weak reference keeps the address of the storage from being given to another one.
        self._storage = StorageWeakRef(tensor.untyped_storage())

    @property
    def is_alive(self) -> bool:
        """Whether anybody holds it."""
        return not self._storage.expired()
