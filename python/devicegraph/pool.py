"""The input-buffer pool: buffers of one name, size, dtype and device are one memory, for as long as anybody uses it.

The ledger in the core decides who can share; this module holds the memory. A buffer never moves: whoever comes later
gets a view of what is there. Users are held weakly, and a memory is dropped with its last user.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from devicegraph._core import PoolLedger
from devicegraph.errors import SlotError
from devicegraph.slots import GraphSlot, PaddingPolicy, fault, has_memory, name_of, row_major, shown, unmovable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["ForwardInputBuffers", "InputBufferPool", "input_buffer_pool", "share_input_buffer"]


class InputBufferPool:
    """Input buffers that several runners use, each with the memory that it shares.

    Two users share where neither can tell: both write all rows that they read before each use, or both keep rows of the
    same kind (same policy, pad value and shape). What `FILL_ONCE` or `KEEP_PAD` left in place is therefore never
    written over by a policy that does not keep it.

    Printing the pool shows each memory, its bytes, and who shares it.
    """

    def __init__(self, *, private_devices: Collection[str] = ("npu",)) -> None:
        """An empty pool.

        Args:
            private_devices: kinds of device on which every buffer stays private. On an NPU, graphs that share memory
                need an ordering between their streams that this pool does not make.
        """
        self.private_devices = frozenset(private_devices)
        self._ledger = PoolLedger()
        self._memories: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._lock = threading.RLock()

    def share(self, name: str, new_buffer: torch.Tensor, *, owner: str = "share_input_buffer") -> torch.Tensor:
        """The buffer to use in place of `new_buffer`: itself where it is the first of its kind.

        Args:
            name: of the input; other names are other memory.
            new_buffer: contiguous, without gradient. What it holds is dropped where there is a memory already. It
                counts as a buffer whose rows are written before each use.
            owner: who uses it, as the printed pool shows.

        Returns:
            A tensor of the same shape, dtype and device, which may be written in and out of `inference_mode`. The pool
            holds its memory until this tensor and all views of it are gone.

        Raises:
            SlotError: `bad-name`, `not-a-tensor`, `not-contiguous`, `requires-grad` or `unsupported-dtype`.
        """
        _check_poolable(name, new_buffer)
        with torch.inference_mode(False), torch.no_grad():
            if new_buffer.is_inference():
                new_buffer = new_buffer.clone()  # an inference tensor could not be written outside that mode
            if new_buffer.device.type in self.private_devices:
                return new_buffer
            with self._lock:
                memory, user, is_new = self._ledger.join(
                    name,
                    dtype=name_of(new_buffer.dtype),
                    device=str(new_buffer.device),
                    current_index=_index(new_buffer),
                    shape=new_buffer.shape,
                    policy=PaddingPolicy.ZERO.value,
                    pad=b"",
                    rewrites=True,
                    fed=True,
                    owner=owner,
                )
                here = _memory(new_buffer)
                if is_new:
                    self._memories[memory] = here
                elif _is_same(here, self._memories[memory]):
                    self._leave(user)  # it is the pool's own already, and counted
                    return new_buffer
                else:
                    new_buffer = _view(self._memories[memory], new_buffer.shape, new_buffer.dtype)
                self._leave_with(new_buffer, user)
                return new_buffer

    def allocate(
        self, slot: GraphSlot, shape: Sequence[int], device: torch.device, *, owner: object, label: str
    ) -> torch.Tensor:
        """A buffer for a slot, shared where its policy allows.

        Rows that the slot's policy writes on every fill hold its start value afterwards, whatever others left there. A
        memory that is shared by slots that keep rows is not written.

        Args:
            slot: not registered yet.
            shape: of the whole buffer.
            device: where it is to be.
            owner: held weakly; the slot uses the memory until this is gone.
            label: the owner, as the printed pool shows.

        Returns:
            A tensor of the slot's dtype, on `device`, which may be written in and out of `inference_mode`.
        """
        with torch.inference_mode(False), torch.no_grad():
            if device.type in self.private_devices:
                return _fresh(slot, shape, device)
            always_padded = slot.padding_policy in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)
            pad = torch.full((1,), slot.pad_value, dtype=slot.dtype, device="cpu").view(torch.uint8)
            with self._lock:
                memory, user, is_new = self._ledger.join(
                    slot.name,
                    dtype=name_of(slot.dtype),
                    device=str(device),
                    current_index=_index(torch.empty(0, device=device)),
                    shape=shape,
                    policy=slot.padding_policy.value,
                    pad=bytes(pad.tolist()),
                    # A function may leave its slot as it is, and where the model writes the rows, no fill does.
                    rewrites=always_padded and slot.is_plain,
                    fed=slot.copy_from_fb,
                    owner=label,
                )
                self._leave_with(owner, user)
                try:
                    if is_new:
                        buffer = _fresh(slot, shape, device)
                        self._memories[memory] = _memory(buffer)
                        return buffer
                    buffer = _view(self._memories[memory], shape, slot.dtype)
                    if always_padded and slot.is_plain:
                        buffer.fill_(slot.start_value)
                    return buffer
                except BaseException:
                    self._leave(user)
                    raise

    def users(self, buffer: torch.Tensor) -> tuple[str, ...]:
        """Who uses the memory that a buffer is on, the buffer's own user among them, in the order in which they came.

        Empty where the memory is not the pool's. Does not synchronise.
        """
        with self._lock:
            here = _memory(buffer)
            found = next((memory for memory, held in self._memories.items() if _is_same(held, here)), None)
            return () if found is None else tuple(self._ledger.owners(found))

    def _leave_with(self, owner: object, user: int) -> None:
        weakref.finalize(owner, self._leave, user).atexit = False

    def _leave(self, user: int) -> None:
        # No lock: a finalizer may run anywhere, also in a thread that holds it. The ledger has its own.
        memory = self._ledger.leave(user)
        if memory is not None:
            self._memories.pop(memory, None)

    @property
    def total_bytes(self) -> int:
        """Bytes of all memories."""
        return self._ledger.total_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the users would take besides, if each had its own."""
        return self._ledger.saved_bytes

    def __len__(self) -> int:
        return len(self._ledger)

    def __str__(self) -> str:
        return str(self._ledger)

    def __repr__(self) -> str:
        return f"<InputBufferPool of {len(self)} buffers, {self.total_bytes} bytes>"


def _check_poolable(name: object, buffer: torch.Tensor) -> None:
    # Lone surrogates are no text outside of Python.
    if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise SlotError(f"`{shown(name)}` is no name of an input", code="bad-name", hint="use text, as `input_ids`")
    kind = unmovable(buffer)
    if kind is not None:
        raise fault(name, "not-a-tensor", f"a `{kind}` cannot be pooled", hint="pass a dense tensor")
    if not buffer.is_meta and not has_memory(buffer):
        raise fault(name, "not-a-tensor", "the buffer has no memory", hint="pass a dense tensor")
    if not buffer.is_contiguous():
        raise fault(name, "not-contiguous", "a pooled buffer must be contiguous", hint="pass a contiguous tensor")
    if buffer.requires_grad:
        raise fault(name, "requires-grad", "an input buffer has no gradient", hint="pass `tensor.detach()`")


def _fresh(slot: GraphSlot, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.full(tuple(shape), slot.start_value, dtype=slot.dtype, device=device)


def _index(tensor: torch.Tensor) -> int:
    """The number of the device that the tensor is on, which is the current one where none was asked for."""
    return tensor.device.index or 0


def _memory(buffer: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    return buffer.untyped_storage(), int(buffer.storage_offset())


def _is_same(one: tuple[torch.UntypedStorage, int], other: tuple[torch.UntypedStorage, int]) -> bool:
    return (one[0].data_ptr(), one[1]) == (other[0].data_ptr(), other[1])


def _view(memory: tuple[torch.UntypedStorage, int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own on a memory. It has no base: it lives for as long as somebody uses it, and no longer."""
    storage, offset = memory
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, row_major(shape))


#: The pool of this process.
input_buffer_pool = InputBufferPool()


def share_input_buffer(name: str, new_buffer: torch.Tensor) -> torch.Tensor:
    """`InputBufferPool.share` of the process's pool.

    Args:
        name: of the input; other names are other memory.
        new_buffer: contiguous, without gradient; what it holds is dropped where there is a memory already.

    Returns:
        The buffer to use from now on: `new_buffer` itself, or a view of its shape on the memory that is there.

    Raises:
        SlotError: `bad-name`, `not-a-tensor`, `not-contiguous`, `requires-grad` or `unsupported-dtype`.
    """
    return input_buffer_pool.share(name, new_buffer)


class ForwardInputBuffers:
    """A mixin for dataclasses of input buffers.

    Example:
        >>> @dataclass
        ... class DecodeInputBuffers(ForwardInputBuffers):
        ...     input_ids: torch.Tensor
        >>> buffers = DecodeInputBuffers(torch.zeros(8, dtype=torch.int64))
        >>> buffers.share_buffers()
    """

    def share_buffers(self) -> None:
        """Replaces each tensor by the pool's of that name; those of a mapping are named `field.key`.

        Raises:
            SlotError: a tensor that cannot be pooled; then nothing is replaced.
        """
        owner = type(self).__name__
        declared = getattr(self, "__dataclass_fields__", None)
        if declared is None:
            raise SlotError(f"`{owner}` is no dataclass", code="not-a-dataclass", hint="decorate it with `@dataclass`")
        fields = {name: getattr(self, name) for name in declared}
        tensors = dict(_tensors(fields))
        for name, tensor in tensors.items():
            _check_poolable(name, tensor)
        shared = {name: input_buffer_pool.share(name, tensor, owner=owner) for name, tensor in tensors.items()}
        for name, value in fields.items():
            if isinstance(value, dict):
                value = {key: shared.get(f"{name}.{key}", item) for key, item in value.items()}
            # The dataclass may be frozen; what is replaced is memory, not a value.
            object.__setattr__(self, name, shared.get(name, value))


def _tensors(fields: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, torch.Tensor))
