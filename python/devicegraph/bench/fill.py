"""`devicegraph bench fill`: a step's inputs into the static buffers, against what a runner would write by hand.

The same slots, batches and sizes for all ways, in one run:

- `fill_from (EXECUTOR)`: the registry, by each executor that works here: checks, padding and copies;
- `copy_ by field`: a copy for each slot and a call for each tail;
- `bare grouped copy`: one `torch._foreach_copy_` of ready views for each device, with padding: no check, no look-up.

Eight slots are decode's usual ones, `[3, T]` positions and lengths on the host among them, and adapter ids; more slots
are more of their kind.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.bench.measuring import (
    Result,
    Spread,
    Table,
    device_microseconds,
    host_microseconds,
    rows_of,
    take_turns,
)
from devicegraph.devices import GraphMemoryPool
from devicegraph.errors import DeviceGraphError
from devicegraph.registry import CudaGraphBufferRegistry
from devicegraph.runners.capture_mode import freeze_gc
from devicegraph.slots import GraphSlot, PaddingPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Literal

    from devicegraph.devices import DeviceAdapter

    #: Makes the way of a peer: from the slots, the batch and the case to a call that fills.
    Peer = Callable[["Sequence[Field]", "dict[str, torch.Tensor]", "Case", torch.device], Callable[[], None]]

#: The executors to try; those that a device lacks are left out with the reason.
EXECUTORS: Final = ("foreach", "native")
BY_FIELD: Final = "copy_ by field"
BARE: Final = "bare grouped copy"
MOST_TOKENS: Final = 8192


@dataclass(frozen=True)
class Case:
    """One fill: how many slots, and live sizes and those of the bucket."""

    slots: int
    bs: int
    num_tokens: int

    @property
    def raw_bs(self) -> int:
        """Three quarters of the bucket live, so that there is something to pad where it has four rows."""
        return self.bs - self.bs // 4

    @property
    def raw_num_tokens(self) -> int:
        """See `raw_bs`."""
        return self.num_tokens - self.num_tokens // 4

    def sizes(self) -> dict[str, int]:
        """As a fill takes them."""
        return {
            "raw_bs": self.raw_bs,
            "padded_bs": self.bs,
            "raw_num_tokens": self.raw_num_tokens,
            "padded_num_tokens": self.num_tokens,
        }


#: Sizes at eight slots; numbers of slots at one size; tokens of prefill.
CASES: Final = (
    *(Case(8, bs, bs) for bs in (1, 8, 64, 256, 512)),
    *(Case(slots, 64, 64) for slots in (16, 32, 64)),
    *(Case(8, 8, tokens) for tokens in (1024, MOST_TOKENS)),
)
SMALL: Final = (Case(8, 4, 4), Case(16, 4, 4))


@dataclass(frozen=True)
class Field:
    """One slot, in terms that every registry has."""

    name: str
    axis: Literal["bs", "tokens"] = "bs"
    policy: PaddingPolicy = PaddingPolicy.ZERO
    pad_value: int = 0
    is_host: bool = False
    is_planes: bool = False

    def shape(self, bs: int, num_tokens: int) -> tuple[int, ...]:
        """Of the buffer, or of a source."""
        if self.is_planes:
            return (3, num_tokens)
        return (bs,) if self.axis == "bs" else (num_tokens,)


USUAL: Final = (
    Field("input_ids", "tokens", PaddingPolicy.FOREACH_COPY),
    Field("positions", "tokens"),
    Field("out_cache_loc", "tokens"),
    Field("mrope_positions", "tokens", is_planes=True),
    Field("req_pool_indices"),
    Field("seq_lens", policy=PaddingPolicy.FILL_SENTINEL, pad_value=1),
    Field("seq_lens_cpu", policy=PaddingPolicy.FILL_SENTINEL, pad_value=1, is_host=True),
    Field("lora_ids"),
)


def fields_of(case: Case) -> list[Field]:
    """The slots of a case: the usual ones, and more of their kind that are on the device."""
    more = [field for field in USUAL if not field.is_host]
    extra = (replace(more[i % len(more)], name=f"{more[i % len(more)].name}_{i}") for i in range(case.slots - 8))
    return [*USUAL, *extra]


def registry_of(
    fields: Sequence[Field],
    case: Case,
    device: torch.device,
    *,
    source_device: Literal["cpu"] | None = None,
    **options: Any,
) -> CudaGraphBufferRegistry:
    """This package's registry of these slots."""
    registry = CudaGraphBufferRegistry(device=device, max_bs=512, max_num_tokens=max(512, case.num_tokens), **options)
    for field in fields:
        registry.register_slot(
            GraphSlot(
                field.name,
                field.shape,
                torch.int64,
                axis=field.axis,
                device="cpu" if field.is_host else None,
                padding_policy=field.policy,
                pad_value=field.pad_value,
                slice_fn=(lambda buffer, size: buffer[:, :size]) if field.is_planes else None,
                source_device=source_device,
            )
        )
    return registry


def batch_of(fields: Sequence[Field], case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """A live batch on the slots' devices."""
    return {
        field.name: torch.randint(
            1, 1000, field.shape(case.raw_bs, case.raw_num_tokens), device="cpu" if field.is_host else device
        )
        for field in fields
    }


def registries(
    fields: Sequence[Field], case: Case, device: torch.device
) -> Iterator[tuple[str, CudaGraphBufferRegistry | DeviceGraphError]]:
    """A registry for each executor, or why there is none."""
    if "executor" not in inspect.signature(CudaGraphBufferRegistry).parameters:
        yield "foreach", registry_of(fields, case, device)
        return
    for executor in EXECUTORS:
        try:
            registry = registry_of(fields, case, device, executor=executor)
            registry.fill_from({}, raw_bs=0, padded_bs=1, raw_num_tokens=0, padded_num_tokens=1)
        except DeviceGraphError as error:
            yield executor, error
        else:
            yield executor, registry


def by_registry(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor], case: Case) -> Callable[[], None]:
    """The registry's own way."""
    sizes = case.sizes()
    return lambda: registry.fill_from(batch, **sizes)


def by_field(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor], case: Case) -> Callable[[], None]:
    """What a runner writes by hand; it makes its views, as runners do."""
    slots = []
    for slot in registry.slots:
        live, padded = (case.raw_bs, case.bs) if slot.axis == "bs" else (case.raw_num_tokens, case.num_tokens)
        slots.append((slot.name, slot.buffer, slot.padding_policy, slot.pad_value, live, padded))

    def fill() -> None:
        for name, buffer, policy, pad_value, live, padded in slots:
            assert buffer is not None  # it is registered
            buffer[..., :live].copy_(batch[name])
            if live == padded:
                continue
            if policy is PaddingPolicy.ZERO:
                buffer[..., live:padded].zero_()
            elif policy is PaddingPolicy.FILL_SENTINEL:
                buffer[..., live:padded].fill_(pad_value)

    return fill


def bare(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor], case: Case) -> Callable[[], None]:
    """The floor of anything that ends in a grouped copy: with all views there, and padding copied from constants."""
    groups: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for slot in registry.slots:
        buffer, source = slot.buffer, batch[slot.name]
        assert buffer is not None  # it is registered
        live, padded = (case.raw_bs, case.bs) if slot.axis == "bs" else (case.raw_num_tokens, case.num_tokens)
        dsts, srcs = groups.setdefault(buffer.device, ([], []))
        rows = zip(buffer, source, strict=True) if source.ndim > 1 else [(buffer, source)]
        for dst, src in rows:
            dsts.append(dst[:live])
            srcs.append(src)
            if live < padded and slot.padding_policy in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL):
                dsts.append(dst[live:padded])
                srcs.append(torch.full_like(dsts[-1], slot.pad_value))

    def copy() -> None:
        for dsts, srcs in groups.values():
            torch._foreach_copy_(dsts, srcs)

    return copy


def launches(step: Callable[[], None], device: torch.device) -> int | None:
    """What one call launches: kernels, copies and clears on CUDA; elsewhere nothing is launched."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    # Calls of the runtime (`cudaLaunchKernel`) and of the driver (`cuLaunchKernel`) alike.
    names = [str(event.key) for event in profiler.events() or () if str(event.key).startswith("cu")]
    return sum(any(word in name for word in ("LaunchKernel", "MemcpyAsync", "MemsetAsync")) for name in names)


def measure_case(
    case: Case,
    adapter: DeviceAdapter,
    rounds: int,
    steps: int,
    *,
    peers: dict[str, Peer],
    count: bool,
    notes: list[str],
) -> Table:
    """All ways of one case."""
    device = adapter.device
    fields = fields_of(case)
    batch = batch_of(fields, case, device)
    ways: dict[str, Callable[[], None]] = {}
    plain = registry_of(fields, case, device)
    for executor, registry in registries(fields, case, device):
        if isinstance(registry, DeviceGraphError):
            note = f"`{executor}` is left out: {registry.message}"
            if note not in notes:
                notes.append(note)
        else:
            ways[f"fill_from ({executor})"] = by_registry(registry, batch, case)
    ways[BY_FIELD] = by_field(plain, batch, case)
    ways[BARE] = bare(plain, batch, case)
    ways |= {name: peer(fields, batch, case, device) for name, peer in peers.items()}
    times = take_turns(
        {name: partial(host_microseconds, adapter, step, steps) for name, step in ways.items()},
        rounds,
    )
    on_device = {}
    if device.type == "cuda":
        # No more than the device's queue holds, or the host would wait for it inside the events.
        few = max(256 // case.slots, 1)
        on_device = take_turns(
            {name: partial(device_microseconds, step, few) for name, step in ways.items()},
            max(rounds // 3, 1),
        )
    title = f"{case.slots} slots, bucket of {case.bs} requests and {case.num_tokens} tokens"
    table = Table(title, case={"slots": case.slots, "requests": case.bs, "tokens": case.num_tokens})
    for name, median, ratio in rows_of(times, next(iter(ways))):
        row: dict[str, Any] = {"way": name, "host us": median, "ratio to the first": ratio}
        if on_device:
            row["device us"] = Spread.of(on_device[name]).median
        if count:
            row["launches"] = launches(ways[name], device)
        table.rows.append(row)
    return table


def by_node(
    adapter: DeviceAdapter, registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor], case: Case
) -> Callable[[], None]:
    """What a step does to fill where its graph begins with the fill, but for the launch that a step has anyway."""
    graph = adapter.graph()
    pool, stream = GraphMemoryPool(adapter), adapter.stream()
    with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        adapter.record_fill()
    node = adapter.fill_node(graph)
    assert node is not None  # nothing else was recorded
    sizes = case.sizes()

    def fill() -> None:
        registry.fill_in(node, batch, **sizes)
        node.launched()
        graph  # noqa: B018 - what the node belongs to lives as long as this

    return fill


def measure_host_sources(adapter: DeviceAdapter, rounds: int, steps: int) -> Table:
    """Eight slots whose sources are on the host, against one copy of as many bytes from pinned memory."""
    case, device = Case(8, 64, 64), adapter.device
    fields = [field for field in fields_of(case) if not field.is_host]
    is_cuda = device.type == "cuda"
    batch = {
        field.name: torch.randint(1, 1000, field.shape(case.raw_bs, case.raw_num_tokens), pin_memory=is_cuda)
        for field in fields
    }
    registry = registry_of(fields, case, device, source_device="cpu")
    numbers = sum(source.numel() for source in batch.values())
    packed = torch.zeros(numbers, dtype=torch.int64, pin_memory=is_cuda)
    target = torch.zeros(numbers, dtype=torch.int64, device=device)
    ways: dict[str, Callable[[], Any]] = {
        "one copy": lambda: target.copy_(packed, non_blocking=True),
        "fill_from": by_registry(registry, batch, case),
    }
    if adapter.fills_in_graphs:
        ways["by a graph's node"] = by_node(adapter, registry, batch, case)
    times = take_turns(
        {name: partial(host_microseconds, adapter, step, steps) for name, step in ways.items()},
        rounds,
    )
    table = Table(f"{len(fields)} slots from host memory, {numbers * 8} bytes, against one copy of them")
    table.rows = [
        {"way": name, "host us": median, "ratio to the first": ratio}
        for name, median, ratio in rows_of(times, "one copy")
    ]
    return table


def _call_next(turns: Iterator[Callable[[], None]]) -> None:
    next(turns)()


def measure_sizes(adapter: DeviceAdapter, rounds: int, steps: int, counts: Sequence[int]) -> Table:
    """Eight slots filled for so many live sizes in turn, as traffic has them, against one size over and over.

    All of them are in one bucket, so that what differs is what is looked up, and not what is copied.
    """
    case, device = Case(8, 512, 512), adapter.device
    ways: dict[str, Callable[[], Any]] = {}
    for count in counts:
        fields = fields_of(case)
        registry = registry_of(fields, case, device)
        calls = []
        for live in range(512, 512 - count, -1):
            batch = {
                field.name: torch.ones(
                    field.shape(live, live), dtype=torch.int64, device="cpu" if field.is_host else device
                )
                for field in fields
            }
            sizes = {"raw_bs": live, "padded_bs": 512, "raw_num_tokens": live, "padded_num_tokens": 512}
            calls.append(partial(registry.fill_from, batch, **sizes))
        turns = cycle(calls)
        for call in calls:
            call()
        ways[f"live sizes: {count}"] = partial(_call_next, turns)
    times = take_turns({name: partial(host_microseconds, adapter, way, steps) for name, way in ways.items()}, rounds)
    table = Table("8 slots in a bucket of 512, by how many live sizes take turns")
    table.rows = [
        {"way": name, "host us": median, "ratio to the first": ratio}
        for name, median, ratio in rows_of(times, next(iter(ways)))
    ]
    return table


def measure(
    adapter: DeviceAdapter,
    *,
    small: bool = False,
    count: bool = False,
    rounds: int | None = None,
    peers: dict[str, Peer] | None = None,
) -> Result:
    """All cases, and fills from the host.

    Args:
        adapter: the device.
        small: two small cases and few rounds: to see that all of it runs.
        count: count launches, too.
        rounds: of each case; 15 by default.
        peers: ways of others, by name.
    """
    rounds, steps = rounds or (2 if small else 15), 5 if small else 100
    result = Result("fill", str(adapter.device))
    tables: dict[Case, Table] = {}
    with torch.inference_mode(), freeze_gc():
        for case in SMALL if small else CASES:
            tables[case] = measure_case(
                case, adapter, rounds, steps, peers=peers or {}, count=count, notes=result.notes
            )
        result.tables = [
            *tables.values(),
            measure_host_sources(adapter, rounds, steps),
            measure_sizes(adapter, rounds, steps, (1, 4) if small else (1, 8, 64, 512)),
        ]
    by_slots = {case.slots: table for case, table in tables.items() if (case.bs, case.num_tokens) == (64, 64)}
    if len(by_slots) > 1:
        least, most = min(by_slots), max(by_slots)
        first, last = by_slots[least].rows[0], by_slots[most].rows[0]
        grown = (last["host us"] - first["host us"]) / (most - least)
        result.notes.append(f"{first['way']}: {grown:.2f} us for each further slot, from {least} to {most}")
    return result
