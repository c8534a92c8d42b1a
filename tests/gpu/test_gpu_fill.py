"""Fills by our own kernel on a GPU: launched before a graph, and as the graph's first node."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import devicegraph as dg

DEVICE = "cuda"
MAX = 16


class Engine:
    """Sums what its slots hold, so that every element of every slot shows in the output."""

    device = torch.device(DEVICE)
    limits = dg.Limits(max_bs=MAX, max_num_tokens=MAX)

    def forward(self, batch: Any) -> torch.Tensor:
        planes = batch.mrope_positions.sum(0)
        return batch.input_ids + 10 * batch.positions + 100 * batch.seq_lens + 1000 * planes


def batch_of(lengths: list[int], **fields: Any) -> SimpleNamespace:
    rows = len(lengths)
    values = torch.tensor(lengths, device=DEVICE)
    known = {
        "batch_size": rows,
        "input_ids": values + 1,
        "positions": values - 1,
        "mrope_positions": torch.stack([values, values + 1, values + 2]),
        "out_cache_loc": values.clone(),
        "req_pool_indices": values.clone(),
        "seq_lens": values.clone(),
        "seq_lens_cpu": torch.tensor(lengths),
    }
    return SimpleNamespace(**known | fields)


def expected(lengths: list[int]) -> list[int]:
    return [(n + 1) + 10 * (n - 1) + 100 * n + 1000 * (3 * n + 3) for n in lengths]


def runner_of(engine: Any, *, executor: Any = "auto", registry: Any = None) -> dg.DecodeCudaGraphRunner:
    if registry is None:
        registry = dg.build_decode_registry(
            device=DEVICE, max_bs=MAX, max_num_token=MAX, seq_len_fill_value=1, executor=executor
        )
    config = dg.CudaGraphConfig.from_dict({"decode": {"bs": [2, 4, 8, 16]}})
    return dg.DecodeCudaGraphRunner(engine, config=config, registry=registry)


@pytest.mark.parametrize(
    ("wanted", "executor"), [("auto", "node"), ("node", "node"), ("native", "native"), ("foreach", "foreach")]
)
def test_steps_of_changing_sizes_see_their_own_rows(wanted: Any, executor: str) -> None:
    with runner_of(Engine(), executor=wanted) as runner:
        report = runner.capture()
        assert (report.executor, report.executor_reason) == (executor, None)
        generator = torch.Generator().manual_seed(0)
        outputs = []
        for _ in range(60):
            rows = int(torch.randint(1, MAX + 1, (), generator=generator))
            lengths = torch.randint(1, 1000, (rows,), generator=generator).tolist()
            batch = batch_of(lengths)
            outputs.append((runner.replay(batch).clone(), expected(lengths)))
            batch.input_ids.fill_(-1)  # queued behind the replay, which has to have read the rows by then
        assert all(output.tolist() == wanted for output, wanted in outputs)
        assert runner.metrics().hit_rate == 1


def test_padded_rows_of_a_graph_that_fills_itself_are_those_of_the_policies() -> None:
    with runner_of(Engine(), executor="node") as runner:
        runner.capture()
        runner.replay(batch_of([9] * 7))
        runner.replay(batch_of([5] * 5))
        registry = runner.buffer_registry
        assert registry.get_slot("seq_lens").buffer[:8].tolist() == [5] * 5 + [1] * 3
        assert registry.get_slot("positions").buffer[:8].tolist() == [4] * 5 + [0] * 3
        assert registry.get_slot("input_ids").buffer[:8].tolist() == [6] * 5 + [10] * 2 + [0]
        assert registry.get_slot("seq_lens_cpu").buffer[:8].tolist() == [5] * 5 + [1] * 3


def test_what_is_prepared_by_hand_is_what_a_replay_by_hand_sees() -> None:
    with runner_of(Engine(), executor="node") as runner:
        runner.capture()
        decision = runner.can_run(batch_of([3, 4]))
        runner.replay(batch_of([8, 9]))
        static = runner.replay_prepare(batch_of([3, 4]), decision)
        assert static.seq_lens.tolist() == [3, 4]
        assert runner.backend.replay(decision.key, static)[:2].tolist() == expected([3, 4])


def test_sources_that_nobody_else_keeps_live_until_the_replay_has_read_them() -> None:
    class Fleeting(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            if name != "input_ids":
                raise AttributeError(name)
            return torch.tensor(self.lengths, device=DEVICE) + 1

    class Preparing(Engine):
        @dg.hook(reads={"seq_lens_cpu"})
        def prepare_metadata(self, batch: Any, key: Any) -> None:
            # What is let go of is what the allocator gives out next.
            self.taken = [torch.full((2,), -7, device=DEVICE) for _ in range(64)]

    with runner_of(Preparing(), executor="node") as runner:
        runner.capture()
        for lengths in ([3, 4], [5, 6], [7, 8]):
            fields = vars(batch_of(lengths))
            del fields["input_ids"]
            assert runner.replay(Fleeting(**fields, lengths=lengths)).tolist() == expected(lengths)


@pytest.mark.parametrize(
    ("reads", "executor", "reason"),
    [
        (None, "native", "prepare_metadata does not declare what it reads (`@devicegraph.hook(reads=...)`)"),
        ({"seq_lens", "seq_lens_cpu"}, "native", "prepare_metadata reads `seq_lens` on the device"),
        ({"seq_len"}, "native", "prepare_metadata reads `seq_len`, which is no slot"),
        ({"seq_lens_cpu"}, "node", None),
    ],
)
def test_a_hook_that_reads_a_slot_on_the_device_finds_it_filled(reads: Any, executor: str, reason: str | None) -> None:
    seen: list[list[int]] = []

    class Preparing(Engine):
        def prepare_metadata(self, batch: Any, key: Any) -> None:
            seen.append((batch.seq_lens_cpu if executor == "node" else batch.seq_lens).tolist())

    if reads is not None:
        Preparing.prepare_metadata = dg.hook(reads=reads)(Preparing.prepare_metadata)
    if reason is not None:
        with (
            runner_of(Preparing(), executor="node") as runner,
            pytest.raises(dg.BackendError, match=re.escape(f"`node` cannot be had: {reason}")),
        ):
            runner.capture()
    with runner_of(Preparing()) as runner:
        report = runner.capture()
        assert (report.executor, report.executor_reason) == (executor, reason)
        assert runner.replay(batch_of([3, 4, 5])).tolist() == expected([3, 4, 5])
        assert seen[-1] == [3, 4, 5, 1]


def test_a_node_that_cannot_be_had_is_refused_where_it_was_asked_for() -> None:
    class Preparing(Engine):
        def prepare_metadata(self, batch: Any, key: Any) -> None:
            pass

    with runner_of(Preparing(), executor="node") as runner:
        with pytest.raises(dg.BackendError, match=r"does not declare what it reads.* \[executor-unavailable\]"):
            runner.capture()
        assert runner.run(batch_of([3])).tolist() == expected([3])


@pytest.mark.parametrize("executor", ["node", "native", "foreach"])
def test_sources_on_the_host_may_be_overwritten_while_steps_are_on_their_way(executor: Any) -> None:
    registry = dg.CudaGraphBufferRegistry(device=DEVICE, max_bs=MAX, max_num_tokens=MAX, executor=executor)
    for name in ("input_ids", "positions", "seq_lens"):
        registry.register_slot(
            dg.GraphSlot(
                name, lambda bs, n: (n,), torch.int64, source_device="cpu", padding_policy=dg.PaddingPolicy.ZERO
            )
        )

    class Summing(Engine):
        def forward(self, batch: Any) -> torch.Tensor:
            return batch.input_ids + 10 * batch.positions + 100 * batch.seq_lens

    pinned = [torch.empty(4, dtype=torch.int64).pin_memory() for _ in range(3)]
    with runner_of(Summing(), registry=registry) as runner:
        assert runner.capture().executor == executor
        outputs = []
        for step in range(20):
            if step == 4:
                torch.cuda._sleep(200_000_000)  # all that follows is queued behind this
            for position, source in enumerate(pinned):
                source.copy_(torch.arange(4) + step + position)
            batch = SimpleNamespace(batch_size=4, input_ids=pinned[0], positions=pinned[1], seq_lens=pinned[2])
            outputs.append(runner.replay(batch).clone())
        for step, output in enumerate(outputs):
            rows = torch.arange(4) + step
            assert output.tolist() == (rows + 10 * (rows + 1) + 100 * (rows + 2)).tolist()


def test_a_fill_from_the_host_in_a_capture_of_the_engines_own_reads_what_it_was_given() -> None:
    registry = dg.CudaGraphBufferRegistry(device=DEVICE, max_bs=MAX, max_num_tokens=MAX, executor="native")
    slot = registry.register_slot(
        dg.GraphSlot("ids", lambda bs, n: (n,), torch.int64, source_device="cpu", padding_policy=dg.PaddingPolicy.ZERO)
    )
    source = torch.tensor([3, 4]).pin_memory()
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    registry.fill_from({"ids": source}, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        registry.fill_from({"ids": source}, **sizes)
    for values in ([5, 6], [7, 8]):
        source.copy_(torch.tensor(values))
        graph.replay()
        torch.cuda.synchronize()
        assert slot.buffer[:4].tolist() == [*values, 0, 0]
        registry.fill_from({"ids": torch.tensor([1, 2])}, **sizes)  # the ring goes on
        assert slot.buffer[:4].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("executor", ["node", "native"])
def test_numbers_are_written_without_a_launch_of_their_own(executor: Any) -> None:
    registry = dg.build_decode_registry(
        device=DEVICE, max_bs=MAX, max_num_token=MAX, seq_len_fill_value=1, executor=executor
    )
    for name, dtype in (("count", torch.int32), ("scale", torch.float32)):
        registry.register_slot(
            dg.GraphSlot(name, lambda bs, n: (1,), dtype, axis="none", value_fn=lambda context: context.raw_num_tokens)
        )

    class Counting(Engine):
        def forward(self, batch: Any) -> torch.Tensor:
            return batch.count + batch.scale + batch.input_ids

    with runner_of(Counting(), registry=registry) as runner:
        runner.capture()
        for rows in (3, 4, 7, 3):
            assert runner.replay(batch_of([5] * rows)).tolist() == [6.0 + 2 * rows] * rows
        batch = batch_of([5] * 6)
        runner.replay(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            runner.replay(batch)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        fills = [name for name in names if "devicegraph_fill" in name]
        assert len(fills) == 1
        assert not [name for name in names if "Memcpy" in name or "Memset" in name]


def test_more_slots_than_a_launch_takes_are_filled_by_several() -> None:
    registry = dg.CudaGraphBufferRegistry(device=DEVICE, max_bs=MAX, max_num_tokens=MAX, executor="native")
    for index in range(130):
        registry.register_slot(
            dg.GraphSlot(f"slot{index}", lambda bs, n: (n,), torch.int32, padding_policy=dg.PaddingPolicy.ZERO)
        )
    batch = {f"slot{index}": torch.arange(5, dtype=torch.int32, device=DEVICE) + index for index in range(130)}
    for _ in range(2):
        registry.fill_from(batch, raw_bs=5, padded_bs=8, raw_num_tokens=5, padded_num_tokens=8)
    for index, slot in enumerate(registry.slots):
        assert slot.buffer[:8].tolist() == [*range(index, index + 5), 0, 0, 0]


def test_a_fill_goes_to_the_current_stream_of_its_own_device() -> None:
    registry = dg.build_decode_registry(
        device=DEVICE, max_bs=MAX, max_num_token=MAX, seq_len_fill_value=1, executor="native"
    )
    batch = batch_of([3, 4])
    stream = torch.cuda.Stream()
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    registry.fill_from(batch, **sizes)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        batch.seq_lens.fill_(9)  # on the stream, in front of the fill
        registry.fill_from(batch, **sizes)
    stream.synchronize()
    assert registry.get_slot("seq_lens").buffer[:4].tolist() == [9, 9, 1, 1]


def test_an_in_place_source_and_a_negated_one_leave_what_they_say() -> None:
    registry = dg.build_decode_registry(
        device=DEVICE, max_bs=MAX, max_num_token=MAX, seq_len_fill_value=1, executor="native"
    )
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    ids = registry.get_slot("input_ids").buffer
    for _ in range(2):
        registry.fill_from(batch_of([3, 4]), **sizes)
        registry.fill_from(batch_of([3, 4], input_ids=ids[:2]), **sizes)
        assert ids[:4].tolist() == [4, 5, 0, 0]
        with pytest.raises(dg.SlotError, match="negated"):
            registry.fill_from(batch_of([3, 4], input_ids=torch._neg_view(ids[:2].clone())), **sizes)
        with pytest.raises(dg.SlotError, match=r"\[source-overlap\]"):
            registry.fill_from(batch_of([3, 4], positions=ids[:2]), **sizes)
