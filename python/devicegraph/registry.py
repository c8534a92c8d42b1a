"""The registry: the static input buffers of a set of graphs, filled from a batch on every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeAlias, get_args

import torch

from devicegraph._core import FillPlanner, as_size
from devicegraph.batches import is_mapping, read_fields, replaced
from devicegraph.errors import BackendError, SlotError
from devicegraph.fill import ForeachExecutor, HostValues
from devicegraph.native import NativeExecutor, why_not_native
from devicegraph.pool import input_buffer_pool
from devicegraph.registration import check_bound, find_shape, lay_out, numbered, row_unit
from devicegraph.slots import GraphSlot, PaddingPolicy, buffer_of, context_of, fault, layout_of, shown, unchecked
from devicegraph.steps import PreparedSteps, Sizes, Step, remember

if TYPE_CHECKING:
    from devicegraph._core import FillNode
    from devicegraph.slots import FillContext

__all__ = ["CudaGraphBufferRegistry", "reset_index_buffers"]

#: The ways to carry fills out that can be asked for.
Executor: TypeAlias = Literal["auto", "foreach", "native", "node"]
EXECUTORS: Final = get_args(Executor)


class CudaGraphBufferRegistry:
    """Static input buffers: declared as slots, filled from a batch, shown as views of a bucket.

    Buffers never move, are never written beyond the bucket, and have no gradient; they are ordinary tensors, in and out
    of `inference_mode`. Fills are queued on the current stream of each buffer's device and do not wait for it, but
    where a slot's `source_device` lets a source be on the other side of the host. Fills of one registry write the same
    memory: whoever fills on several streams, or threads, orders them.

    A size is an integer, or an object that stands for one (`__index__`), such as a scalar of an array library. A tensor
    stands for one too; reading one that is on a device waits for it.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | int,
        max_bs: SupportsIndex,
        max_num_tokens: SupportsIndex,
        share_pool: bool = False,
        executor: Executor = "auto",
    ) -> None:
        """A registry without slots.

        Args:
            device: of the slots that name none.
            max_bs: the most requests of any bucket.
            max_num_tokens: the most tokens of any bucket.
            share_pool: take buffers from the input-buffer pool, so that other registries use the same memory.
            executor: how fills are carried out. `auto` takes the fastest that fits; `foreach` is grouped copies, on any
                device; `native` is one launch of a kernel of our own on CUDA, a loop of our own in host memory; `node`
                is that kernel as the first node of a graph, where a runner can have it: see the report of a capture.
                What is named and cannot be had is an error.

        Raises:
            SlotError: `bad-device`, `bad-capacity` or `bad-option`.
        """
        if not isinstance(unchecked(share_pool), bool):
            message = f"`share_pool`: `{shown(share_pool)}` is no flag"
            raise SlotError(message, code="bad-option", hint="use True or False", given=shown(share_pool))
        if unchecked(executor) not in EXECUTORS:
            message = f"`executor`: `{shown(executor)}` is no way to fill"
            hint = f"use {', '.join(f'`{known}`' for known in EXECUTORS)}"
            raise SlotError(message, code="bad-option", hint=hint, given=shown(executor))
        self.max_bs = _capacity("max_bs", max_bs)
        self.max_num_tokens = _capacity("max_num_tokens", max_num_tokens)
        #: With its number: `cuda:0`.
        self.device = numbered(device)
        self.share_pool = share_pool
        #: What was asked for; `executor` says what there is.
        self.wanted_executor = executor
        #: Who this is in the printed pool; the factories put their phase here.
        self.label = f"registry of {self.max_bs} requests, {self.max_num_tokens} tokens"
        #: What the tokens of every bucket are a multiple of: the ranks that they are spread over. Runners keep to it.
        self.token_alignment = 1
        self._slots: dict[str, GraphSlot] = {}
        self._calls = ForeachExecutor()
        self._values = HostValues()
        self._reason: str | None = None
        self._changed()

    # Slots

    def register_slot(self, slot: GraphSlot, bind: torch.Tensor | None = None) -> GraphSlot:
        """Gives a slot its memory. Buffers that were there before stay where they are.

        Args:
            slot: not registered anywhere. One that is not enabled is left out.
            bind: a tensor to adopt as the buffer: of the slot's shape, dtype and device, no inference tensor, sharing
                no memory with other slots. It is not written.

        Returns:
            The slot itself.

        Raises:
            SlotError: `not-a-slot`; `duplicate-slot`; `already-registered`; a shape or `slice_fn` that cannot be
                (`bad-shape`, `slice-no-prefix`, `capacity-too-small`, `bucket-not-divisible`, `empty-shape`,
                `no-trailing-axis`, `unsupported-dtype`); a device that is not there (`bad-device`); a tensor that does
                not fit (`not-a-tensor`, `bound-shape`, `bound-dtype`, `bound-device`, `bound-inference`, `bound-grad`,
                `bound-overlap`, `shared-elements`). Nothing changed.
        """
        if not isinstance(unchecked(slot), GraphSlot):
            message = f"`{shown(slot)}` is no slot"
            raise SlotError(message, code="not-a-slot", hint="pass a `GraphSlot`", given=shown(slot))
        if not slot.enabled:
            return slot
        if slot.name in self._slots:
            raise fault(slot.name, "duplicate-slot", "is registered already", hint="give it another name")
        if slot._layout is not None:
            raise fault(slot.name, "already-registered", "belongs to another registry", hint="declare a slot for each")
        if bind is not None and slot.buffer is not None and bind is not slot.buffer:
            raise fault(slot.name, "bound-twice", "has a buffer of its own besides `bind`", hint="give one of them")
        bound = slot.buffer if bind is None else bind
        device = self.device if slot.device is None else numbered(slot.device)
        shape = find_shape(slot, self.max_bs, self.max_num_tokens)
        if bound is not None:
            check_bound(slot, bound, shape, device, self._slots.values())
        layout = lay_out(slot, shape, device, max_bs=self.max_bs, max_num_tokens=self.max_num_tokens, bound=bound)
        if bound is not None:
            buffer = bound
        elif self.share_pool:
            buffer = input_buffer_pool.allocate(slot, shape, device, owner=self, label=self.label)
        else:
            with torch.inference_mode(False), torch.no_grad():
                buffer = torch.full(shape, slot.start_value, dtype=slot.dtype, device=device)
        # The one place where a slot changes.
        object.__setattr__(slot, "buffer", buffer)
        object.__setattr__(slot, "_layout", layout)
        self._slots[slot.name] = slot
        self._changed()
        return slot

    def _changed(self) -> None:
        """Derives what depends on the slots."""
        slots = self.slots
        layouts = [layout_of(slot) for slot in slots]
        self._planner = FillPlanner(layouts, max_bs=self.max_bs, max_num_tokens=self.max_num_tokens)
        self._steps: PreparedSteps | None = None
        #: The steps of fills that have to be operators; few registries ever have one.
        self._recorded: PreparedSteps | None = None
        self._latest: dict[Sizes, Step] = {}
        #: Classes of batches whose fields the core can read, where they are all that a fill reads and does.
        self._direct_kinds: set[type] = set()
        self._views: dict[object, dict[str, torch.Tensor]] = {}
        self._fields = [slot.name if slot.is_plain else None for slot in slots]
        self._plain_names = [slot.name for slot in slots if slot.is_plain]
        self._required = sum(1 << bit for bit, name in enumerate(self._plain_names) if self._slots[name].required)
        #: Whether there are slots for what a pipeline stage before sends.
        self.has_proxies = any(slot.name.startswith("pp_proxy_tensors.") for slot in slots)
        #: What a batch can have, as `presence` counts it, and the bit there of proxies that a slot reads from it.
        are_read = any(getattr(slot.source_fn, "reads_proxies", False) for slot in slots)
        self._exposable = [*self._plain_names, *(["pp_proxy_tensors"] if are_read else [])]
        self._proxies = 1 << len(self._plain_names) if are_read else 0
        # A function may be any object that can be called, also one that is false.
        self._functions = [
            (index, slot) for index, slot in enumerate(slots) if slot.source_fn is not None or slot.value_fn is not None
        ]
        #: Whether a slot on a CUDA device may have its source on the host.
        self._is_staged = any(slot.source_device is not None and buffer_of(slot).is_cuda for slot in slots)
        self._hooks = [(slot.post_fill, buffer_of(slot)) for slot in slots if slot.post_fill is not None]

    @property
    def executor(self) -> str:
        """What carries fills out: `foreach` or `native`. Steps of a runner whose graphs fill themselves do without."""
        return "foreach" if self._prepared.native is None else "native"

    @property
    def executor_reason(self) -> str | None:
        """Why it is `foreach` where that was not asked for; None where it is not, or was."""
        if self.wanted_executor != "auto" or self._prepared.native is not None:
            return None
        return self._reason

    @property
    def _prepared(self) -> PreparedSteps:
        if self._steps is None:
            slots, native = self.slots, None
            self._reason = None if self.wanted_executor == "foreach" else why_not_native(slots)
            if self._reason is not None and self.wanted_executor != "auto":
                message = f"executor `{self.wanted_executor}` cannot be had: {self._reason}"
                raise BackendError(message, code="executor-unavailable", hint="use `auto`")
            if self._reason is None and self.wanted_executor != "foreach":
                native = NativeExecutor(slots, self._planner)
            self._steps = PreparedSteps(slots, self._planner, self._calls, native, self._values)
            self._latest = self._steps.latest
        return self._steps

    @property
    def calls_functions(self) -> bool:
        """Whether a fill calls functions of slots, or hooks."""
        return bool(self._functions or self._hooks)

    def get_slot(self, name: str) -> GraphSlot:
        """The slot of that name.

        Raises:
            SlotError: `unknown-slot`, with the names that there are.
        """
        slot = self._slots.get(name)
        if slot is None:
            names = ", ".join(f"`{name}`" for name in self._slots) or "none"
            raise fault(name, "unknown-slot", "is not registered", hint=f"registered: {names}")
        return slot

    def has_slot(self, name: str) -> bool:
        """Whether a slot of that name is registered."""
        return name in self._slots

    @property
    def slot_names(self) -> tuple[str, ...]:
        """All names, in order of registration."""
        return tuple(self._slots)

    @property
    def slots(self) -> tuple[GraphSlot, ...]:
        """All slots, in order of registration; disabled ones are not among them."""
        return tuple(self._slots.values())

    @property
    def alignment(self) -> tuple[int, int]:
        """What the requests and the tokens of every bucket are to be multiples of, so that all slots have whole rows.

        Beside the units of the slots, the ranks that the tokens are spread over (`token_alignment`).
        """
        units = {"bs": 1, "tokens": self.token_alignment}
        for slot in self.slots:
            if slot.slice_fn is not None:
                capacity = self.max_bs if slot.axis == "bs" else self.max_num_tokens
                units[slot.axis] = math.lcm(units[slot.axis], row_unit(slot, capacity))
        return units["bs"], units["tokens"]

    def __repr__(self) -> str:
        sizes = f"max_bs={self.max_bs}, max_num_tokens={self.max_num_tokens}"
        return f"<CudaGraphBufferRegistry on {self.device}, {sizes}: {', '.join(self._slots) or 'no slots'}>"

    # Every step

    def fill_from(
        self,
        forward_batch: Any,
        *,
        raw_bs: SupportsIndex,
        padded_bs: SupportsIndex,
        raw_num_tokens: SupportsIndex,
        padded_num_tokens: SupportsIndex,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """Copies a batch into the buffers and pads them up to the bucket.

        In this order: every source is read, every function of a slot called, and everything checked; padding is
        written; sources are copied, as few calls as their kinds allow; `post_fill` hooks run, in order of registration.
        Whatever is raised before the hooks leaves every buffer as it was. A hook that raises leaves all slots filled,
        the hooks before it done, and those after it not: nothing of it stays once a later fill succeeds.

        Args:
            forward_batch: any object with attributes, or a mapping. An empty mapping is the idle batch: no `source_fn`
                is called, and their slots are padded whole, like all whose field is absent. Hooks get it as it is.
            raw_bs: live requests.
            padded_bs: requests of the bucket.
            raw_num_tokens: live tokens.
            padded_num_tokens: tokens of the bucket.
            pp_proxy_tensors: handed to the slots' functions and hooks.

        Raises:
            SlotError: `not-a-tensor`, `wrong-rows`, `wrong-shape`, `too-many-rows`, `too-wide`, `wrong-device`,
                `narrowing-cast`, `unsupported-dtype`, `field-missing`, `source-overlap` or `bad-value` for a source;
                `not-a-size`, `negative-size`, `raw-above-padded`, `above-capacity` or `bucket-not-divisible` for a
                size.
        """
        if not type(raw_bs) is type(padded_bs) is type(raw_num_tokens) is type(padded_num_tokens) is int:
            # What is prepared is looked up by these, and there 1, True and 1.0 are one.
            raw_bs, padded_bs = as_size("raw_bs", raw_bs), as_size("padded_bs", padded_bs)
            raw_num_tokens = as_size("raw_num_tokens", raw_num_tokens)
            padded_num_tokens = as_size("padded_num_tokens", padded_num_tokens)
        sizes = (raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, False)
        step, fields = self._latest.get(sizes), None
        if step is not None and type(forward_batch) in self._direct_kinds:
            if step.check is not None:
                fields, is_alike = step.check.read_batch(forward_batch)
                if is_alike and not torch.is_grad_enabled():
                    step.program(fields)
                    return
            elif step.native is not None and step.native.whole is not None and not self._is_watched():
                fields = step.native.whole.attempt_batch(forward_batch)
                if fields is None:
                    return
        self._fill(forward_batch, sizes, pp_proxy_tensors, None, fields)

    def fill_in(
        self,
        node: FillNode,
        forward_batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """As `fill_from`, but what is to be written on the device is left to the next launch of a graph's node.

        What reads a device buffer before finds it as it was. Once the graph is launched, the node's `launched` lets go
        of the sources.

        Raises:
            SlotError: as `fill_from` does; nothing was written.
        """
        sizes = (raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, False)
        step, fields = self._latest.get(sizes), None
        if step is not None and step.native is not None and type(forward_batch) in self._direct_kinds:
            table = step.native.whole
            if table is not None and table.launches <= 1 and not self._is_watched():
                fields = table.attempt_batch_in(forward_batch, node)
                if fields is None:
                    return
        self._fill(forward_batch, sizes, pp_proxy_tensors, node, fields)

    def _fill(
        self, batch: Any, sizes: Sizes, pp_proxy_tensors: Any, node: FillNode | None, fields: list[Any] | None
    ) -> None:
        is_unread = is_mapping(batch) and not batch
        # Once a step: what a batch makes when it is read may be another thing the second time.
        sources = read_fields(batch, self._fields) if fields is None else fields
        context = None
        if self._functions or self._hooks:
            context = context_of(batch, (*sizes[:4], pp_proxy_tensors))
            for index, slot in self._functions:
                if slot.value_fn is not None:
                    sources[index] = slot.value_fn(context)
                elif slot.source_fn is not None and not is_unread:
                    sources[index] = slot.source_fn(batch, context)
        elif type(batch) is dict or not is_mapping(batch):
            self._direct_kinds.add(type(batch))
        if is_unread:
            sizes = (*sizes[:4], True)
        if torch.is_grad_enabled():
            # A source that requires grad would give the buffers a history.
            with torch.no_grad():
                self._carry_out(sizes, sources, node)
                self._call_hooks(batch, context)
        else:
            self._carry_out(sizes, sources, node)
            self._call_hooks(batch, context)

    def _is_watched(self) -> bool:
        """Whether fills have to be operators: somebody records them, or carries them out himself.

        The core's writes would pass him by, and a capture would keep the block of the ring that happened to be next.
        """
        if torch._C._len_torch_dispatch_stack() > 0:
            return True
        return self._is_staged and torch.cuda.is_current_stream_capturing()

    def _carry_out(self, sizes: Sizes, sources: list[Any], node: FillNode | None) -> None:
        prepared = self._prepared
        if self._is_watched():
            if node is not None:
                node.clear()
            if self._recorded is None:
                self._recorded = PreparedSteps(self.slots, self._planner, self._calls, None, self._values)
            self._recorded.run(sizes, sources)
        elif node is None:
            prepared.run(sizes, sources)
        else:
            prepared.run_in(node, sizes, sources)

    def _call_hooks(self, batch: Any, context: FillContext | None) -> None:
        if context is not None:
            for post_fill, buffer in self._hooks:
                post_fill(buffer, batch, context)

    # What a step and a graph are about

    def views(self, *, padded_bs: SupportsIndex, padded_num_tokens: SupportsIndex) -> dict[str, torch.Tensor]:
        """The rows of a bucket of every slot whose name is not dotted, by name.

        Returns:
            A new dictionary of the same tensors on each call: views that start where their buffers do.

        Raises:
            SlotError: `above-capacity`, `bucket-not-divisible`, `negative-size` or `not-a-size`.
        """
        key = (as_size("padded_bs", padded_bs), as_size("padded_num_tokens", padded_num_tokens))
        views = self._views.get(key)
        if views is None:
            self._planner.check_bucket(*key)
            views = {slot.name: slot.slice_for(*key) for slot in self.slots if "." not in slot.name}
            remember(self._views, key, views)
        return views.copy()

    def group(
        self, prefix: str, *, padded_bs: SupportsIndex, padded_num_tokens: SupportsIndex
    ) -> dict[str, torch.Tensor]:
        """The rows of a bucket of the slots whose names are dotted and begin so, by the rest of the name.

        Raises:
            SlotError: as for `views`.
        """
        slots = {name.removeprefix(f"{prefix}."): slot for name, slot in self._slots.items() if "." in name}
        slots = {name: slot for name, slot in slots.items() if slot.name == f"{prefix}.{name}"}
        return {name: slot.slice_for(padded_bs, padded_num_tokens) for name, slot in slots.items()}

    def extract_buffer(
        self, *, padded_bs: SupportsIndex, padded_num_tokens: SupportsIndex, forward_batch_template: Any
    ) -> Any:
        """A shallow copy of a batch that shows the buffers: what a graph of that bucket is captured and replayed with.

        Args:
            padded_bs: requests of the bucket; the copy's `batch_size`, where its type has a place for it.
            padded_num_tokens: tokens of the bucket.
            forward_batch_template: an object with attributes (frozen and slotted ones too), a named tuple, or a
                mapping; it is not changed. A plain slot that it lacks, or has as None, stays absent; slots that are
                computed always show; dotted ones never.

        Raises:
            SlotError: as for `views`; `field-not-settable` where the batch's type has no place for a computed slot.
        """
        padded_bs = as_size("padded_bs", padded_bs)
        absent = set(self._named(~self.presence(forward_batch_template)))
        views = self.views(padded_bs=padded_bs, padded_num_tokens=padded_num_tokens)
        fields = {name: view for name, view in views.items() if name not in absent}
        return replaced(forward_batch_template, fields, {"batch_size": padded_bs})

    def presence(self, forward_batch: Any) -> int:
        """Which plain slots a batch has a value for: bit i stands for the i-th plain slot, in order of registration.

        With slots that read what a pipeline stage before sends from the batch, as those of `layouts` do, the bit behind
        them stands for `pp_proxy_tensors`.
        """
        mask = 0
        for bit, value in enumerate(read_fields(forward_batch, self._exposable)):
            if value is not None:
                mask |= 1 << bit
        return mask

    def missing_required(self, mask: int, exposed_mask: int = 0) -> tuple[str, ...]:
        """The required slots that a batch of this presence lacks (`field-missing`).

        So are `pp_proxy_tensors` where the batch of a captured graph had them: nothing pads what is not sent.
        """
        return self._named((self._required | self._proxies & exposed_mask) & ~mask)

    def unexpected(self, mask: int, exposed_mask: int) -> tuple[str, ...]:
        """The slots that this batch has and the batch of a captured graph had not (`field-unexpected`)."""
        return self._named(mask & ~exposed_mask)

    def _named(self, mask: int) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(self._exposable) if mask >> bit & 1) if mask else ()

    def reset_index_buffers(self) -> None:
        """Writes zeros over the whole of each `ZERO` slot, and nothing else.

        Indices of earlier steps are valid for their buckets only: a larger bucket would read them as its own.
        """
        with torch.no_grad():
            for slot in self.slots:
                if slot.padding_policy is PaddingPolicy.ZERO:
                    buffer_of(slot).zero_()


def _capacity(argument: str, given: SupportsIndex) -> int:
    try:
        size = as_size(argument, given)
    except SlotError:
        size = 0
    if size < 1:
        message = f"`{argument}`: {shown(given)} is no size"
        raise SlotError(message, code="bad-capacity", hint="use an integer from 1 to 2**63 - 1", given=shown(given))
    return size


def reset_index_buffers(*registries: CudaGraphBufferRegistry) -> None:
    """`CudaGraphBufferRegistry.reset_index_buffers` of each: what a capture does before it warms up."""
    for registry in registries:
        registry.reset_index_buffers()
