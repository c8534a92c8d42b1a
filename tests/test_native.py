"""Fills that the core carries out: when it does, what it refuses, and what it leaves to others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import devicegraph as dg
from devicegraph import native
from devicegraph._core import FillKernel, FillNode
from devicegraph.devices import get_device_adapter

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}


def registry_of(*slots: dg.GraphSlot, **options: Any) -> dg.CudaGraphBufferRegistry:
    registry = dg.CudaGraphBufferRegistry(**{"device": "cpu", "max_bs": 8, "max_num_tokens": 8, **options})
    for slot in slots or [ids()]:
        registry.register_slot(slot)
    return registry


def ids(name: str = "ids", dtype: torch.dtype = torch.int64, **options: Any) -> dg.GraphSlot:
    return dg.GraphSlot(
        name, lambda bs, tokens: (tokens,), dtype, **{"padding_policy": dg.PaddingPolicy.ZERO, **options}
    )


@pytest.mark.parametrize(("wanted", "executor"), [("auto", "native"), ("native", "native"), ("foreach", "foreach")])
def test_host_memory_is_filled_by_the_core_unless_told_otherwise(wanted: Any, executor: str) -> None:
    registry = registry_of(executor=wanted)
    assert (registry.executor, registry.executor_reason) == (executor, None)


def test_a_device_without_a_kernel_is_filled_by_calls_and_says_why() -> None:
    assert registry_of(device="meta").executor_reason == "there is no fill kernel for `meta`"
    registry = registry_of(device="meta")
    assert (registry.executor, registry.executor_reason) == ("foreach", "there is no fill kernel for `meta`")


@pytest.mark.parametrize("wanted", ["native", "node"])
def test_an_executor_that_was_asked_for_and_cannot_be_had_is_an_error(wanted: Any) -> None:
    with pytest.raises(dg.BackendError) as caught:
        registry_of(device="meta", executor=wanted).fill_from({}, **SIZES)
    assert str(caught.value) == (
        f"executor `{wanted}` cannot be had: there is no fill kernel for `meta` [executor-unavailable]\n\n"
        "hint: use `auto`"
    )


def test_an_executor_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(dg.SlotError) as caught:
        registry_of(executor="magic")
    assert str(caught.value) == (
        "`executor`: `'magic'` is no way to fill [bad-option]\n\nhint: use `auto`, `foreach`, `native`, `node`"
    )


def test_a_driver_that_is_not_there_is_an_error_and_no_crash() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(dg.BackendError, match=r"^the CUDA driver cannot be used: .* \[cuda-driver\]"):
        FillKernel(0)


def test_slots_on_two_devices_are_filled_by_calls() -> None:
    registry = registry_of(ids("a", device="meta"), ids("b"))
    with mock.patch.object(native, "why_no_kernel", return_value=None):
        assert native.why_not_native(registry.slots) is None
    assert native.why_not_native(registry.slots) == "there is no fill kernel for `meta`"


class Tagged(torch.Tensor):
    """A subclass whose operators are those of plain tensors."""


def freed() -> torch.Tensor:
    tensor = torch.arange(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (lambda slot: torch._neg_view(torch.arange(2)), "not-a-tensor"),
        (lambda slot: freed(), "not-a-tensor"),
        (lambda slot: torch.arange(3), "wrong-rows"),
        (lambda slot: torch.arange(2, device="meta"), "wrong-device"),
        (lambda slot: torch.arange(2).to(torch.float32), "narrowing-cast"),
        (lambda slot: slot.buffer[1:3], "source-overlap"),
        (lambda slot: [1, 2], "not-a-tensor"),
        (lambda slot: 1, "not-a-tensor"),
        (lambda slot: torch.arange(2).to_sparse(), "not-a-tensor"),
    ],
)
def test_what_a_prepared_step_was_not_made_for_is_refused_before_a_byte_is_written(
    source: Callable[[dg.GraphSlot], Any], code: str
) -> None:
    slot, other = ids(), ids("other")
    registry = registry_of(other, slot, executor="native")
    good = {"ids": torch.tensor([5, 6]), "other": torch.tensor([7, 8])}
    for _ in range(2):
        registry.fill_from(good, **SIZES)
    with pytest.raises(dg.SlotError) as caught:
        registry.fill_from({"ids": source(slot), "other": torch.tensor([1, 1])}, **SIZES)
    assert caught.value.code == code
    assert (slot.buffer[:4].tolist(), other.buffer[:4].tolist()) == ([5, 6, 0, 0], [7, 8, 0, 0])


def test_sources_of_other_forms_are_prepared_anew_and_the_first_ones_are_still_known() -> None:
    slot = ids()
    registry = registry_of(slot, executor="native")
    forms = [
        torch.tensor([1, 2]), torch.tensor([3, 4], dtype=torch.int32), torch.arange(8)[::4],
        torch.nn.Parameter(torch.tensor([9, 8]), False), torch.tensor([6, 7]).as_subclass(Tagged), slot.buffer[:2],
    ]  # fmt: skip
    for _ in range(3):
        for form in forms:
            expected = [*form.tolist(), 0, 0]
            registry.fill_from({"ids": form}, **SIZES)
            assert slot.buffer[:4].tolist() == expected


def test_batches_of_every_kind_are_read() -> None:
    class Slotted:
        __slots__ = ("ids",)

    class Mapped(dict):  # type: ignore[type-arg]
        ids = torch.tensor([0, 0])  # no item

    slotted = Slotted()
    slotted.ids = torch.tensor([1, 2])
    mapped = Mapped(ids=torch.tensor([3, 4]))
    lacking = mock.NonCallableMock(spec=[])
    slot = ids(padding_policy=dg.PaddingPolicy.FILL_SENTINEL, pad_value=9)
    registry = registry_of(slot, executor="native")
    for _ in range(3):
        for batch, rows in (
            (slotted, [1, 2]),
            (mapped, [3, 4]),
            ({"ids": torch.tensor([5, 6])}, [5, 6]),
            (lacking, [9, 9]),
        ):
            registry.fill_from(batch, **SIZES)
            assert slot.buffer[:4].tolist() == [*rows, 9, 9]


def test_fields_that_a_batch_makes_when_they_are_read_live_until_they_are_copied() -> None:
    class Made:
        @property
        def a(self) -> torch.Tensor:
            return torch.full((2048,), 1)

        @property
        def b(self) -> torch.Tensor:
            return torch.full((2048,), 2)

    slots = ids("a"), ids("b")
    registry = registry_of(*slots, executor="native", max_num_tokens=2048)
    for _ in range(3):
        registry.fill_from(Made(), raw_bs=2, padded_bs=2, raw_num_tokens=2048, padded_num_tokens=2048)
        assert [slot.buffer.unique().tolist() for slot in slots if slot.buffer is not None] == [[1], [2]]


def test_each_field_is_read_once_a_step_whether_or_not_the_step_was_seen_before() -> None:
    class Counted:
        reads = 0

        @property
        def ids(self) -> torch.Tensor:
            self.reads += 1
            return torch.full((2,), self.reads, dtype=(torch.int32, torch.int64)[self.reads % 2])

    slot, batch = ids(), Counted()
    registry = registry_of(slot, executor="native")
    for step in range(1, 6):
        registry.fill_from(batch, **SIZES)
        assert slot.buffer is not None
        assert (batch.reads, slot.buffer[:4].tolist()) == (step, [step, step, 0, 0])


class LyingAddress(torch.Tensor):
    def data_ptr(self) -> int:
        return 1 << 12


class LyingShape(torch.Tensor):
    shape = property(lambda self: torch.Size([2]))  # type: ignore[assignment]

    def stride(self, *args: Any) -> Any:
        return (2,)


class RefusesFunctions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise AssertionError("asked")


@pytest.mark.parametrize("executor", ["native", "foreach"])
@pytest.mark.parametrize("kind", [LyingAddress, LyingShape, RefusesFunctions])
def test_memory_is_read_where_it_is_whatever_a_subclass_says(kind: type[torch.Tensor], executor: Any) -> None:
    slot = ids()
    registry = registry_of(slot, executor=executor)
    assert slot.buffer is not None
    for _ in range(2):
        registry.fill_from({"ids": torch.tensor([5, 6, 7])[:2].as_subclass(kind)}, **SIZES)
        assert slot.buffer[:4].tolist() == [5, 6, 0, 0]
        with pytest.raises(dg.SlotError, match="the source has 3 rows, the batch 2"):
            registry.fill_from({"ids": torch.tensor([7, 8, 9]).as_subclass(kind)}, **SIZES)
        assert slot.buffer[:4].tolist() == [5, 6, 0, 0]


def test_a_field_whose_reading_frees_another_is_no_crash() -> None:
    class Freeing:
        def __init__(self) -> None:
            self.a = torch.tensor([5, 6])

        @property
        def b(self) -> torch.Tensor:
            self.a.untyped_storage().resize_(0)
            return torch.tensor([7, 8])

    slots = ids("a"), ids("b")
    registry = registry_of(*slots, executor="native")
    freeing = Freeing()
    with mock.patch.object(torch.UntypedStorage, "resize_"):
        registry.fill_from(freeing, **SIZES)
    with pytest.raises(dg.SlotError, match=r"^slot `a`: the source has no memory"):
        registry.fill_from(freeing, **SIZES)
    assert [slot.buffer[:2].tolist() for slot in slots if slot.buffer is not None] == [[5, 6], [7, 8]]


def test_a_buffer_that_is_given_other_memory_leaves_the_memory_it_had_to_the_fill() -> None:
    slot = ids()
    registry = registry_of(slot, executor="native", max_num_tokens=4096)
    batch = {"ids": torch.full((4096,), 7)}
    sizes = {"raw_bs": 1, "padded_bs": 1, "raw_num_tokens": 4096, "padded_num_tokens": 4096}
    registry.fill_from(batch, **sizes)
    assert slot.buffer is not None
    before = slot.buffer.detach()
    slot.buffer.data = torch.zeros(4096, dtype=torch.int64)
    address = before.data_ptr()
    del before
    others = [torch.zeros(4096, dtype=torch.int64) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    registry.fill_from(batch, **sizes)
    assert not any(other.any() for other in others)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.uint64, 2**63), (torch.uint64, 2**64 - 1), (torch.float32, 2**64), (torch.float64, 10**300)],
)
def test_numbers_beyond_64_bits_with_a_sign_are_written_where_the_dtype_holds_them(
    dtype: torch.dtype, number: int
) -> None:
    slot = dg.GraphSlot("number", lambda bs, n: (1,), dtype, axis="none", value_fn=lambda context: number)
    registry = registry_of(slot, executor="native")
    for _ in range(2):
        registry.fill_from({"none": 1}, **SIZES)
        assert slot.buffer is not None
        assert slot.buffer.tolist() == torch.tensor([number], dtype=dtype).tolist()


def test_numbers_outside_of_a_slots_dtype_are_refused_after_ones_inside() -> None:
    values = iter([5, 6, 1 << 40, 7, "x", 8])
    count = dg.GraphSlot("count", lambda bs, n: (1,), torch.int32, axis="none", value_fn=lambda context: next(values))
    registry = registry_of(count, executor="native")
    for expected in (5, 6, None, 7, None, 8):
        if expected is None:
            with pytest.raises(dg.SlotError, match=r"\[bad-value\]"):
                registry.fill_from({"none": 1}, **SIZES)
        else:
            registry.fill_from({"none": 1}, **SIZES)
            assert count.buffer.item() == expected


def test_a_fill_inside_a_capture_is_recorded() -> None:
    adapter = get_device_adapter("cpu")
    slot = ids()
    registry = registry_of(slot, executor="native")
    batch = {"ids": torch.tensor([5, 6])}
    for _ in range(2):
        registry.fill_from(batch, **SIZES)
    graph, pool = adapter.graph(), dg.GraphMemoryPool(adapter)
    with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        registry.fill_from(batch, **SIZES)
    batch["ids"].copy_(torch.tensor([7, 8]))
    slot.buffer.fill_(3)
    graph.replay()
    assert slot.buffer.tolist() == [7, 8, 0, 0, 3, 3, 3, 3]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_fill_that_a_graphs_node_cannot_do_is_done_at_once_and_leaves_the_node_nothing(is_recorded: bool) -> None:
    adapter = get_device_adapter("cpu")
    slot = ids()
    registry = registry_of(slot, executor="foreach")
    node = mock.Mock(spec=FillNode)
    graph, pool = adapter.graph(), dg.GraphMemoryPool(adapter)
    for numbers in ([5, 6], [7, 8], [9, 9]):
        node.clear.reset_mock()
        batch = {"ids": torch.tensor(numbers)}
        recording = (
            adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local")
            if is_recorded and numbers == [7, 8]
            else contextlib.nullcontext()
        )
        with recording:
            registry.fill_in(node, batch, **SIZES)
        if is_recorded and numbers == [7, 8]:
            graph.replay()
        assert slot.buffer.tolist() == [*numbers, 0, 0, 0, 0, 0, 0]
        node.clear.assert_called_once_with()


def test_a_function_that_gives_a_graphs_node_nothing_leaves_its_slot_alone() -> None:
    given = ids("given", source_fn=lambda batch, context: None)
    registry = registry_of(ids(), given, executor="foreach")
    given.buffer.fill_(5)
    registry.fill_in(mock.Mock(spec=FillNode), {"ids": torch.tensor([1, 2])}, **SIZES)
    assert registry.get_slot("ids").buffer.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert given.buffer.tolist() == [5] * 8


@pytest.mark.parametrize("executor", ["foreach", "native"])
def test_where_the_core_cannot_read_tensors_every_step_is_filled_all_the_same(executor: str) -> None:
    with mock.patch.object(native, "EXCHANGE", None):
        registry = registry_of(executor=executor)
        for first in (1, 2, 3):
            registry.fill_from({"ids": torch.tensor([first, 6])}, **SIZES)
            assert registry.get_slot("ids").buffer.tolist()[:4] == [first, 6, 0, 0]


def test_a_step_that_the_core_does_in_part_is_done_whole_every_time() -> None:
    scale = ids("scale", dtype=torch.float8_e4m3fn, allow_narrowing=True)
    registry = registry_of(ids(), scale, executor="native")
    for first in (1, 2, 3):
        batch = {"ids": torch.tensor([first, 6]), "scale": torch.tensor([0.5, first])}
        registry.fill_from(batch, **SIZES)
        assert registry.get_slot("ids").buffer.tolist()[:4] == [first, 6, 0, 0]
        assert scale.buffer.float().tolist()[:4] == [0.5, first, 0, 0]


@pytest.mark.parametrize("executor", ["foreach", "native"])
def test_a_registry_whose_first_fills_are_recorded_pads_right_ever_after(executor: Any) -> None:
    adapter = get_device_adapter("cpu")

    def computed(value: int, **options: Any) -> dg.GraphSlot:
        return dg.GraphSlot("n", lambda bs, tokens: (tokens,), torch.int32, value_fn=lambda context: value, **options)

    slot = dg.GraphSlot(
        "ids", lambda bs, tokens: (tokens,), torch.int64, padding_policy=dg.PaddingPolicy.FILL_SENTINEL, pad_value=7
    )
    counts = computed(5, padding_policy=dg.PaddingPolicy.FILL_SENTINEL, pad_value=9)
    registry = registry_of(slot, counts, executor=executor)
    batch = {"ids": torch.tensor([1, 2])}
    pool, graphs = dg.GraphMemoryPool(adapter), []
    for _ in range(2):
        graphs.append(adapter.graph())
        with adapter.capture(graphs[-1], pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
            registry.fill_from(batch, **SIZES)
    other, x = adapter.graph(), torch.zeros(64, dtype=torch.int64)
    with adapter.capture(other, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        held = [x + i for i in range(100, 140)]
    for fill in (other.replay, lambda: registry.fill_from(batch, **SIZES), graphs[0].replay, graphs[1].replay):
        for buffer in (slot.buffer, counts.buffer):
            buffer.fill_(3)
        fill()
        if fill != other.replay:
            assert slot.buffer.tolist() == [1, 2, 7, 7, 3, 3, 3, 3]
            assert counts.buffer.tolist() == [5, 5, 9, 9, 3, 3, 3, 3]
    assert len(held) == 40


@pytest.mark.parametrize("executor", ["foreach", "native"])
def test_numbers_that_a_warm_up_has_made_are_known_to_the_capture(executor: Any) -> None:
    adapter = get_device_adapter("cpu")
    counts = dg.GraphSlot("n", lambda bs, tokens: (tokens,), torch.int32, value_fn=lambda context: [5, 6])
    registry = registry_of(counts, executor=executor)
    registry.fill_from({}, **SIZES)
    graph, pool = adapter.graph(), dg.GraphMemoryPool(adapter)
    with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        registry.fill_from({}, **SIZES)
    counts.buffer.fill_(3)
    graph.replay()
    assert counts.buffer.tolist()[:2] == [5, 6]


class Doubling:
    device = torch.device("cpu")
    limits = dg.Limits(max_bs=2, max_num_tokens=2)

    def forward(self, batch: Any) -> torch.Tensor:
        doubled: torch.Tensor = batch.input_ids * 2
        return doubled


@pytest.mark.parametrize(
    ("wanted", "executor", "reason"),
    [
        ("auto", "native", "graphs of `cpu` cannot be looked into here"),
        ("native", "native", None),
        ("foreach", "foreach", None),
    ],
)
def test_a_report_says_how_a_step_is_filled_and_why(wanted: Any, executor: str, reason: str | None) -> None:
    engine = Doubling()
    registry = dg.build_decode_registry(device="cpu", max_bs=2, max_num_token=2, seq_len_fill_value=1, executor=wanted)
    config = dg.CudaGraphConfig.from_dict({"decode": {"bs": [2]}})
    with dg.DecodeCudaGraphRunner(engine, config=config, registry=registry) as runner:
        report = runner.capture()
    assert (report.executor, report.executor_reason) == (executor, reason)
    assert f"filled by `{executor}`" + (f": {reason}" if reason else "") in str(report).splitlines()


@pytest.mark.parametrize(
    ("hook", "reads", "reason"),
    [
        ("prepare_metadata", None, "{} does not declare what it reads (`@devicegraph.hook(reads=...)`)"),
        ("upgrade_metadata", None, "{} does not declare what it reads (`@devicegraph.hook(reads=...)`)"),
        ("post_fill of slot `marks`", None, "{} does not declare what it reads (`@devicegraph.hook(reads=...)`)"),
        ("prepare_metadata", {"seq_lens", "lengths", "ids"}, "{} reads `ids`, `lengths`, which is no slot"),
        ("prepare_metadata", {"seq_lens"}, "the fill cannot be told apart in the captured graph"),
        ("forward", None, "the fill cannot be told apart in the captured graph"),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "node"])
def test_graphs_on_a_device_that_fills_in_them_begin_with_the_fill_unless_something_speaks_against_it(
    hook: str, reads: Any, reason: str, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(get_device_adapter("cpu")), "fills_in_graphs", True)
    engine = Doubling()
    registry = dg.build_decode_registry(device="cpu", max_bs=2, max_num_token=2, seq_len_fill_value=1, executor=wanted)
    function: Any = lambda *given: None  # noqa: E731
    if reads is not None:
        function = dg.hook(reads=reads)(function)
    if hook.startswith("post_fill"):
        registry.register_slot(ids("marks", post_fill=function))
    elif hook != "forward":
        setattr(engine, hook, function)
    config = dg.CudaGraphConfig.from_dict({"decode": {"bs": [2]}})
    with dg.DecodeCudaGraphRunner(engine, config=config, registry=registry) as runner:
        if wanted == "auto":
            report = runner.capture()
            assert (report.executor, report.executor_reason) == ("native", reason.format(hook))
        else:
            with pytest.raises(dg.BackendError) as caught:
                runner.capture()
            assert caught.value.message == f"executor `node` cannot be had: {reason.format(hook)}"
            assert not runner.graphs


def test_graphs_of_parts_of_a_forward_do_not_begin_with_the_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_device_adapter("cpu")), "fills_in_graphs", True)
    config = dg.CudaGraphConfig.from_dict({"decode": {"bs": [2], "backend": "breakable"}})
    with dg.DecodeCudaGraphRunner(Doubling(), config=config) as runner:
        reason = runner.capture().executor_reason
    assert reason == "only a graph of the whole forward, with nothing done about its replay, can begin with the fill"


def test_a_replay_by_hand_takes_what_the_buffers_hold_and_not_what_the_last_step_pointed_its_fill_at() -> None:
    adapter = get_device_adapter("cpu")
    backend = dg.FullCudaGraphBackend(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter))
    node, x = mock.Mock(), torch.ones(2)
    with mock.patch.object(adapter, "fill_node", return_value=node, create=True), backend.capture_session():
        backend.capture_one("key", lambda: x * 2)
        assert backend.fill_node("key") is None
        backend.fills = True
        assert backend.fill_node("key") is node
    assert backend.can_fill
    assert backend.replay("key", None).tolist() == [2, 2]
    node.clear.assert_called_once_with()
    backend.cleanup()
    assert not backend._nodes


def test_a_backend_that_may_look_at_a_batch_before_its_replay_is_filled_before_it() -> None:
    class Looking(dg.FullCudaGraphBackend):
        def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
            assert static_forward_batch is not None
            return super().replay(shape_key, static_forward_batch, **kwargs)

    adapter = get_device_adapter("cpu")
    assert not Looking(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter)).can_fill


def test_reads_that_are_no_names_are_refused() -> None:
    for reads in ("seq_lens", [1]):
        with pytest.raises(dg.ConfigError, match=r"\[reads-invalid\]"):
            dg.hook(reads=reads)  # type: ignore[arg-type]
