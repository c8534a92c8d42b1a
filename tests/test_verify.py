"""Verification on the CPU tape: engines that leak through any kind of slot are caught by name, and no others."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph.testing import check_runner
from devicegraph.verifying.differences import Result, first_difference, first_far
from engines import CountsSteps, ToyEngine, ToyPrefill, config
from leaks import FORMS, KINDS, USUAL, ZERO, Kind, WithSlots, captured, flat, leaky


def extra(name: str, *, leaks: bool = False) -> WithSlots:
    """An engine with one more slot, `extra`, of a kind, whose sum it adds to all logits if it leaks."""
    return WithSlots({"extra": KINDS[name]}, {"sum": lambda batch: batch.extra.float().sum()} if leaks else {})


def found(report: dg.VerifyReport, *proofs: str) -> set[tuple[str, ...]]:
    return {finding.slots for finding in report.findings if finding.proof in proofs}


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {"cache": engine.cache}


# Padding.


@pytest.fixture(scope="module")
def stage() -> Any:
    engine = leaky()
    with captured(engine) as runner:
        yield engine, runner


def test_rows_that_are_each_requests_own_leak_nothing_whatever_the_slot(stage: Any) -> None:
    engine, runner = stage
    engine.turn_on()
    report = dg.verify(runner, engine.batches(), state=engine.state())
    assert report, str(report)
    assert set(report.poisons) == {*KINDS, *USUAL, "state cache"}
    assert (report.held, report.padded) == ({}, (dg.ShapeKey(4),))


@pytest.mark.parametrize("name", [*KINDS, *USUAL])
def test_padding_that_reaches_real_rows_is_found_by_its_slot(name: str, stage: Any) -> None:
    engine, runner = stage
    engine.turn_on(name)
    report = dg.verify(runner, engine.batches()[:1], state=engine.state())
    assert found(report, "padding") == {(name,)}
    assert not report


@pytest.mark.parametrize("form", FORMS)
def test_two_poisons_show_what_one_would_not(form: str, stage: Any) -> None:
    engine, runner = stage
    engine.turn_on(form)
    report = dg.verify(runner, engine.batches()[:1], state=engine.state())
    assert found(report, "padding") == {("ZERO_float32",)}


def test_every_slot_that_leaks_is_named(stage: Any) -> None:
    engine, runner = stage
    engine.turn_on("planes", "seq_lens", "KEEP_PAD_bool")
    report = dg.verify(runner, engine.batches()[:1], state=engine.state())
    assert found(report, "padding") == {("planes",), ("seq_lens",), ("KEEP_PAD_bool",)}


def test_what_the_host_plans_from_padded_lengths_is_found_by_the_hosts_slot() -> None:
    class Planned(ToyEngine):
        def __init__(self) -> None:
            super().__init__(max_bs=4)
            self.longest = torch.zeros(1)

        def prepare_metadata(self, batch: Any, key: Any) -> None:
            self.longest.fill_(int(batch.seq_lens_cpu.sum()))

        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + self.longest

        def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
            batch = super().make_batch(views, key)
            batch.seq_lens_cpu = views["seq_lens_cpu"]
            return batch

        def batch(self, lengths: list[int], seed: int = 0, rows: list[int] | None = None) -> Any:
            batch = super().batch(lengths, seed, rows)
            batch.seq_lens_cpu = torch.tensor(lengths)
            return batch

    engine = Planned()
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    assert found(report, "padding") == {("seq_lens_cpu",)}


def test_a_padded_row_that_is_written_where_a_request_lies_is_found_in_the_state() -> None:
    registry = dg.CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4)
    for name in ("input_ids", "positions", "out_cache_loc"):
        registry.register_slot(dg.GraphSlot(name, lambda bs, tokens: (tokens,), torch.int64))
    for name in ("req_pool_indices", "seq_lens"):
        registry.register_slot(dg.GraphSlot(name, lambda bs, tokens: (bs,), torch.int64, axis="bs"))
    engine = ToyEngine(max_bs=4)
    engine.registry = registry
    with captured(engine) as runner:
        batches = [engine.batch([3, 5]), engine.batch([9, 2, 4], 2, rows=[4, 2, 3])]
        report = dg.verify(runner, batches, state=state_of(engine))
    assert ("out_cache_loc",) in found(report, "padding")
    assert any("state `cache` at [" in finding.place for finding in report.findings)


def test_real_rows_that_read_the_reserved_row_are_found_by_the_state() -> None:
    class ReadsReserved(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + self.cache[0].sum()

    engine = ReadsReserved(max_bs=4)
    engine.state_tensors = lambda: state_of(engine)
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])])
    assert ("state cache",) in found(report, "padding")


class Recurrent(ToyEngine):
    """Each request has a state of one row, which every step of it updates in place, as in a state-space model."""

    def __init__(self) -> None:
        super().__init__(max_bs=4)
        self.rows = torch.zeros(5, 32)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        new = self.rows[batch.req_pool_indices] + logits
        self.rows.index_copy_(0, batch.req_pool_indices, new)
        return new

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"cache": self.cache, "rows": self.rows}


def test_slots_that_point_into_the_state_stay_at_the_reserved_row_and_the_report_says_so() -> None:
    engine = Recurrent()
    with captured(engine) as runner:
        batches = [engine.batch([3, 5], 1), engine.batch([4, 4, 4], 2, rows=[2, 3, 4])]
        assert dg.verify(runner, batches), "rows of zeros do not show what is written to them in every batch"
        for seed in (0, 1, 29, 43):
            engine.cache.random_(-2, 3, generator=torch.Generator().manual_seed(seed))
            report = dg.verify(runner, batches)
            assert report, str(report)
            assert report.held == {"req_pool_indices": "its rows point into the state"}
            assert report.poisons["out_cache_loc"] == (0, 1), "that is a location of the reserved row too"


def test_integers_that_may_point_into_state_are_left_alone_where_no_state_is_given() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine) as runner:
        before = engine.cache.clone()
        batch = engine.batch([3, 5])
        report = dg.verify(runner, [batch])
        assert report
        assert set(report.held) == {"positions", "out_cache_loc", "req_pool_indices", "seq_lens"}
        assert list(report.poisons) == ["input_ids"]
        engine.forward(batch)
        written = batch.out_cache_loc
        live = engine.cache.flatten(0, 1)[written].clone()
        assert torch.equal(live, engine.cache.flatten(0, 1)[written])
        assert torch.equal(before[3:], engine.cache[3:]), "padding wrote nowhere"


def test_poison_can_be_given_and_a_slot_can_be_left_out() -> None:
    engine = extra("ZERO_int64", leaks=True)
    engine.turn_on("sum")
    with captured(engine) as runner:
        batches = [engine.batch([3, 5])]
        report = dg.verify(runner, batches, poisons={"extra": (0, 5)})
        assert (found(report, "padding"), report.poisons["extra"]) == ({("extra",)}, (0, 5))
        report = dg.verify(runner, batches, state=state_of(engine), poisons={"extra": ()})
        assert (found(report, "padding"), report.held["extra"]) == (set(), "left out")
        for wrong in ((1,), (1, 1), (1, 2, 3), (0, 0.5), (0, 2**70)):
            with pytest.raises(dg.SlotError, match="bad-value"):
                dg.verify(runner, batches, poisons={"extra": wrong})
        with pytest.raises(dg.SlotError, match="unknown-slot"):
            dg.verify(runner, batches, poisons={"none": ()})
        for wrong in (torch.tensor(1.0), torch.zeros(0, 2), [1]):
            with pytest.raises(dg.SlotError, match="bad-state"):
                dg.verify(runner, batches, state={"cache": wrong})


def test_slots_that_leak_together_only_are_named_together() -> None:
    class Both(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch)
            both = (batch.positions[-1] > 0) & (batch.seq_lens[-1] > 1)
            return logits + both

    engine = Both(max_bs=4)
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5]), engine.batch([9, 2, 4], 2)], state=state_of(engine))
    (slots,) = found(report, "padding")
    assert {"positions", "seq_lens"} <= set(slots)


# What is stale.


def test_a_field_that_a_batch_lacks_and_nothing_pads_is_found_where_it_is_read() -> None:
    engine = extra("KEEP_PAD_float32")
    with captured(engine) as runner:
        runner.run(engine.batch([3, 5]))
        batch = engine.batch([3, 5])
        batch.extra = None
        report = dg.verify(runner, [batch], state=state_of(engine))
    assert found(report, "stale") == {("extra",)}
    assert found(report, "eager") == {()}, "what the last batch left is there"


def test_rows_behind_the_bucket_are_found_where_they_are_read() -> None:
    engine = extra("ZERO_float32", leaks=True)
    whole = engine.registry.get_slot("extra").buffer
    engine.leaks["sum"] = lambda batch: whole[3]
    engine.turn_on("sum")
    with captured(engine, bs=[2]) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    assert found(report, "stale") == {("extra",)}


def test_a_hook_that_leaves_the_rows_of_its_slot_is_found() -> None:
    first_row = lambda buffer, batch, context: buffer[:1].fill_(3)  # noqa: E731
    kind = Kind(flat(ZERO, torch.float32, copy_from_fb=False, post_fill=first_row))
    engine = WithSlots({"extra": kind}, {})
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    assert found(report, "stale") == {("extra",)}


def test_a_fill_that_forgets_a_slot_is_found_whatever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = extra("ZERO_int64")
    with captured(engine) as runner:
        fill = runner.buffer_registry.fill_from
        buffer = engine.registry.get_slot("extra").buffer

        def forgetful(batch: Any, **sizes: Any) -> None:
            kept = buffer.clone()
            fill(batch, **sizes)
            buffer[1:2].copy_(kept[1:2])

        monkeypatch.setattr(runner.buffer_registry, "fill_from", forgetful)
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    stale = next(finding for finding in report.findings if finding.proof == "stale")
    assert stale.slots == ("extra",)
    assert str(stale).endswith("stale values of `extra` reach its own rows, which the fill has to write")


def test_rows_that_the_engine_writes_itself_before_the_fill_are_left_to_it() -> None:
    kind = Kind(
        flat(ZERO, torch.float32, copy_from_fb=False), computed=lambda batch: torch.arange(1.0, 1 + batch.batch_size)
    )
    engine = WithSlots({"extra": kind}, {})
    slot = engine.registry.get_slot("extra")
    with captured(engine) as runner:
        slot.buffer[:2] = torch.tensor([1.0, 2.0])
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
        assert report, report
        assert slot.buffer.tolist() == [1, 2, 0, 0]


# Against eager.


def test_what_python_computed_at_capture_is_not_what_eager_gives() -> None:
    engine = CountsSteps(max_bs=4)
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    assert [finding.proof for finding in report.findings] == ["eager"]
    assert "tensor 0 of the output at [0, 0]" in str(report)


def test_state_that_differs_between_a_replay_and_eager_is_found_beside_equal_outputs() -> None:
    class Writes(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch)
            self.cache[4, 0] += batch.batch_size
            return logits

    engine = Writes(max_bs=4)
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
    assert [(finding.proof, finding.place) for finding in report.findings] == [("eager", "state `cache` at [4, 0, 0]")]


def test_a_forward_with_a_memory_of_its_own_is_told_from_one_that_leaks() -> None:
    class Remembers(ToyEngine):
        def __init__(self) -> None:
            super().__init__(max_bs=4)
            self.count = torch.zeros(2, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            self.count[1] += 1
            return super().forward(batch) + self.count[1]

    engine = Remembers()
    with captured(engine) as runner:
        report = dg.verify(runner, [engine.batch([3, 5])], state=state_of(engine))
        assert {finding.proof for finding in report.findings} == {"eager", "repeat"}
        assert dg.verify(runner, [engine.batch([3, 5])], state={**state_of(engine), "count": engine.count})


@pytest.mark.parametrize(
    ("dtype", "off", "is_far"),
    [
        (torch.float32, 1e-6, False),
        (torch.float32, 1e-2, True),
        (torch.bfloat16, 1e-2, False),
        (torch.bfloat16, 0.2, True),
        (torch.int64, 1, True),
    ],
)
def test_how_far_is_too_far_depends_on_the_dtype(dtype: torch.dtype, off: float, is_far: bool) -> None:
    class Off(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            rows = super().forward(batch) * 0 + 1
            captured = batch.input_ids.shape[0] == 4
            return (rows + (off if captured else 0)).to(dtype)

    engine = Off(max_bs=4)
    with captured(engine) as runner:
        batches = [engine.batch([3, 5])]
        assert bool(dg.verify(runner, batches)) is not is_far
        assert dg.verify(runner, batches, tolerances={dtype: 2.0}).findings == () or not dtype.is_floating_point


values = st.sampled_from([0.0, -0.0, 1.0, -3.5, 1e-6, 1.00005, 1e9, float("inf"), float("-inf"), float("nan")])


def naive_far(want: list[float], got: list[float], tolerance: float) -> int | None:
    finite = [abs(value) for value in want if value == value and abs(value) != float("inf")]
    largest = max(finite, default=0.0)
    for position, (a, b) in enumerate(zip(want, got, strict=True)):
        if a != b and not (a != a and b != b) and not abs(a - b) <= tolerance * largest:
            return position
    return None


@settings(max_examples=200)
@given(st.lists(st.tuples(values, values), min_size=1, max_size=6), st.sampled_from([1e-4, 0.5]))
def test_the_first_element_that_is_too_far_is_that_of_the_naive_rule(
    pairs: list[tuple[float, float]], tolerance: float
) -> None:
    want, got = (torch.tensor(side, dtype=torch.float64)[:, None] for side in zip(*pairs, strict=True))
    expected = naive_far(want.flatten().tolist(), got.flatten().tolist(), tolerance)
    place = first_far(Result([want], {}), Result([got], {}), {torch.float64: tolerance})
    assert place == (None if expected is None else f"tensor 0 of the output at [{expected}, 0]")
    bits = [a.view(torch.int64).tolist() for a in (want.flatten(), got.flatten())]
    different = [position for position, (a, b) in enumerate(zip(*bits, strict=True)) if a != b]
    assert first_difference(want, got) == ([different[0], 0] if different else None)


def test_tensors_of_any_shape_and_dtype_are_compared() -> None:
    for dtype in (torch.bool, torch.uint8, torch.complex64, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ((), (0,), (2, 3), (2, 0, 3)):
            one = torch.zeros(shape, dtype=dtype)
            other = one.clone()
            result = Result([one], {})
            assert first_difference(one, other) is None
            assert first_far(result, Result([other], {}), {}) is None
            if one.numel():
                other.view(-1)[-1] = 1
                index = [size - 1 for size in shape]
                assert first_difference(one, other) == index
                assert first_far(result, Result([other], {}), {}) is not None
    shapes = first_far(Result([torch.zeros(2)], {}), Result([torch.zeros(3)], {}), {})
    assert shapes == "the output, whose tensors are [[2]] eagerly and [[3]] replayed"
    dtypes = first_far(Result([torch.zeros(2)], {}), Result([torch.zeros(2).double()], {}), {})
    assert dtypes == "the output, whose tensors are of ['float32'] eagerly and of ['float64'] replayed"


# What stays as it was, and what is reported.


def test_verification_leaves_state_buffers_batches_and_counts_as_they_were() -> None:
    engine = extra("KEEP_PAD_int64", leaks=True)
    engine.turn_on("sum")
    with captured(engine, bs=[2, 4]) as runner:
        runner.run(engine.batch([5, 6, 7, 8], 9))
        before = [engine.cache.clone(), *(slot.buffer.clone() for slot in runner.buffer_registry.slots)]
        batches = engine.batches()
        fields = [dict(vars(batch)) for batch in batches]
        metrics = runner.metrics()
        report = dg.verify(runner, batches, state=state_of(engine))
        assert report.findings
        after = [engine.cache, *(slot.buffer for slot in runner.buffer_registry.slots)]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert runner.metrics() == metrics
        for batch, had in zip(batches, fields, strict=True):
            assert all(vars(batch)[name] is value for name, value in had.items())


def test_no_copy_of_the_state_is_held_behind_a_verification_also_where_the_collector_is_off() -> None:
    engine = ToyEngine()
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4])) as runner:
        runner.capture()
        gc.collect()
        gc.disable()
        try:
            assert dg.verify(runner, [engine.batch([3, 1]), engine.batch([2])], state=state_of(engine))
            shapes = (engine.cache.shape, engine.cache[1:].shape)
            held = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape in shapes]
            assert {each.data_ptr() for each in held} == {engine.cache.data_ptr()}
        finally:
            gc.enable()


def test_state_and_buffers_are_put_back_where_a_hook_fails() -> None:
    class Fails(ToyEngine):
        fail = False

        def prepare_metadata(self, batch: Any, key: Any) -> None:
            if self.fail and key is not None:
                raise RuntimeError("no plan")

    engine = Fails(max_bs=4)
    with captured(engine) as runner:
        runner.run(engine.batch([3, 5, 2]))
        before = [engine.cache.clone(), *(slot.buffer.clone() for slot in runner.buffer_registry.slots)]
        engine.fail = True
        with pytest.raises(RuntimeError, match="no plan"):
            dg.verify(runner, [engine.batch([4])], state=state_of(engine))
        after = [engine.cache, *(slot.buffer for slot in runner.buffer_registry.slots)]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_each_batch_goes_through_every_graph_that_has_room_and_what_has_none_is_listed() -> None:
    engine = ToyEngine(max_bs=8)
    with captured(engine, bs=[1, 2, 4]) as runner:
        report = dg.verify(runner, [engine.batch([3, 5]), engine.batch([3] * 5)], state=state_of(engine))
        assert {key.size for key in report.verified} == {2, 4}
        assert {key.size for key in report.padded} == {4}
        assert report.missed == (dg.ShapeKey(1),)
        assert report.skipped == (dg.SkippedBatch(1, "above-largest"),)
        assert report
        nothing = dg.verify(runner, [])
        assert not nothing
        with pytest.raises(dg.ReplayError, match=r"^decode: nothing verified: there is no batch\n"):
            nothing.check()
        skipped = dg.verify(runner, [engine.batch([3] * 5)], state=state_of(engine))
        assert str(skipped).split("\n")[0] == "decode: nothing verified: no graph takes a batch"
        assert not skipped


def test_variants_are_verified_by_batches_that_need_them() -> None:
    class Variants(ToyEngine):
        variants = (None, "lora")

        def variant(self, batch: Any) -> str | None:
            return batch.extras.get("variant")

    engine = Variants(max_bs=4)
    with captured(engine) as runner:
        batch = engine.batch([3, 5])
        batch.extras["variant"] = "lora"
        report = dg.verify(runner, [batch], state=state_of(engine))
        assert report.verified == (dg.ShapeKey(4, variant_label="lora"),)
        assert report.missed == (dg.ShapeKey(4),)


@pytest.mark.parametrize("state", [None, {}])
def test_an_engine_that_says_it_writes_nothing_else_has_every_slot_proven(state: Any) -> None:
    class Summing:
        device, limits = torch.device("cpu"), dg.Limits(max_bs=4, max_num_tokens=4)

        def forward(self, batch: Any) -> torch.Tensor:
            mixed: torch.Tensor = batch.input_ids * 2 + batch.positions.sum()
            return mixed

    config = dg.CudaGraphConfig(decode={"bs": [4]})
    with dg.DecodeCudaGraphRunner(Summing(), config=config) as runner:
        runner.capture()
        rows = torch.tensor([3, 5, 2])
        batch = SimpleNamespace(batch_size=3, input_ids=rows, positions=rows + 1)
        report = dg.verify(runner, [batch], state=state)
    assert bool(report) is (state is None)
    assert ("positions" in report.held) is (state is None)
    assert [finding.slots for finding in report.findings] == ([] if state is None else [("positions",)])


def test_a_report_prints_and_exports_what_was_found() -> None:
    engine = extra("ZERO_float32", leaks=True)
    engine.turn_on("sum")
    with captured(engine, bs=[1, 4]) as runner:
        batches = [engine.batch([3, 5]), engine.batch([3] * 5), engine.batch([4, 4])]
        report = dg.verify(runner, batches[:2])
    assert str(report) == (
        "decode: 1 graph verified, 1 of them with padding: 1 finding\n"
        "  bucket 4, batch 0: padding leaks through `extra` into tensor 0 of the output at [0, 0]\n"
        "  not verified, as no batch fits: bucket 1\n"
        "  batch 1 runs eagerly: above-largest\n"
        "  padding of `positions` left as it is: its rows may point into state, and no state was given\n"
        "  padding of `out_cache_loc` left as it is: its rows may point into state, and no state was given\n"
        "  padding of `req_pool_indices` left as it is: its rows may point into state, and no state was given\n"
        "  padding of `seq_lens` left as it is: its rows may point into state, and no state was given"
    )
    exported = json.loads(report.to_json())
    assert exported == report.to_dict()
    assert exported["findings"] == [
        {
            "proof": "padding",
            "key": {"size": 4},
            "batch": 0,
            "slots": ["extra"],
            "place": "tensor 0 of the output at [0, 0]",
        }
    ]
    assert (exported["ok"], exported["missed"], exported["poisons"]["extra"]) == (False, [{"size": 1}], [-960.0, 832.0])
    with pytest.raises(dg.ReplayError) as caught:
        report.check()
    assert caught.value.code == "verify-failed"
    assert caught.value.message == str(report)


def test_a_closed_or_disabled_runner_has_nothing_to_verify() -> None:
    engine = ToyEngine(max_bs=4)
    disabled = dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"backend": "disabled"}))
    report = dg.verify(disabled, [engine.batch([3])])
    assert (bool(report), report.skipped) == (False, (dg.SkippedBatch(0, "disabled"),))
    disabled.close()
    for batches in ([engine.batch([3])], []):
        with pytest.raises(dg.ReplayError, match="closed"):
            dg.verify(disabled, batches)


# Prefill, and backends with breaks.


class LeakyPrefill(ToyPrefill):
    """Its last layer looks at all tokens of the bucket."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + batch.positions.float().mean()


def test_prefill_graphs_are_verified_alike() -> None:
    for engine, slots in ((ToyPrefill(), set()), (LeakyPrefill(), {("positions",)})):
        buckets = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [8, 16]})
        with dg.PrefillCudaGraphRunner(engine, config=buckets) as runner:
            runner.capture()
            batches = [engine.chunks([(1, 0, 3), (2, 0, 2)]), engine.chunks([(3, 0, 9)], 1)]
            report = dg.verify(runner, batches, state=state_of(engine))
            assert found(report, "padding") == slots
            assert report.padded == (dg.ShapeKey(16), dg.ShapeKey(8))
            assert bool(report) is not slots or not slots


# At start.


def test_graphs_are_verified_at_capture_on_idle_batches() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine, verify_on_capture=True, bs=[1, 2, 4]) as runner:
        batch = engine.batch([3, 5])
        want = engine.forward(batch)
        assert torch.equal(runner.run(batch), want)
        assert runner.metrics().steps == 1


class LaterStage(ToyEngine):
    """Goes on from what it is sent, and adds what fills compute."""

    def __init__(self, *slots: dg.GraphSlot, **options: Any) -> None:
        super().__init__(max_bs=8)
        self.registry = dg.build_decode_registry(
            device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1, **options
        )
        for slot in slots:
            self.registry.register_slot(slot)
        self.computed = [slot.name for slot in self.registry.slots if slot.axis == "none"]

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        proxies = self.registry.group("pp_proxy_tensors", padded_bs=key.size, padded_num_tokens=key.size)
        return SimpleNamespace(**views, batch_size=key.size, pp_proxy_tensors=proxies or None)

    def forward(self, batch: Any) -> torch.Tensor:
        proxies = batch.pp_proxy_tensors
        rows = batch.positions[:, None] if proxies is None else proxies["hidden"] * 2
        for name in self.computed:
            rows = rows + getattr(batch, name)
        return rows


GATHERED = {"require_gathered_buffer": True, "attn_tp_size": 2, "attn_tp_rank": 1}
COUNTED = {"enable_num_token_non_padded": True}


@pytest.mark.parametrize(
    "options",
    [
        {"pp_proxy": {"hidden": (3,)}},
        {"pp_proxy": {"hidden": (3,)}, "attn_tp_size": 2},
        COUNTED,
        {**COUNTED, **GATHERED, "register_global_num_tokens": True},
        {**COUNTED, **GATHERED, "pp_proxy": {"hidden": (3,)}},
    ],
)
def test_idle_batches_prove_stages_that_are_sent_rows_and_counts_that_fills_compute(options: dict[str, Any]) -> None:
    count = dg.GraphSlot(
        "count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda context: context.raw_bs
    )
    with captured(LaterStage(count, **options), verify_on_capture=True, bs=[4, 8]) as runner:
        assert list(runner.graphs) == [dg.ShapeKey(8), dg.ShapeKey(4)]


def test_padded_rows_of_what_a_stage_is_sent_are_proven_at_capture() -> None:
    stage = LaterStage(pp_proxy={"hidden": (3,)})
    forward = stage.forward
    stage.forward = lambda batch: forward(batch) + batch.pp_proxy_tensors["hidden"].sum()  # type: ignore[method-assign]
    with pytest.raises(dg.CaptureError, match=r"padding leaks through `pp_proxy_tensors\.hidden`"):
        captured(stage, verify_on_capture=True)


def test_a_capture_that_does_not_pass_leaves_no_graph() -> None:
    engine = extra("ZERO_float32", leaks=True)
    engine.turn_on("sum")
    runner = dg.DecodeCudaGraphRunner(
        engine, config=config(bs=[2, 4]), registry=engine.registry, verify_on_capture=True
    )
    with pytest.raises(dg.CaptureError, match="padding leaks through `extra`") as caught:
        runner.capture()
    assert (caught.value.code, caught.value.phase, runner.graphs) == ("verify-failed", "decode", {})
    assert runner.can_run(engine.batch([3])).code == "not-captured"
    engine.turn_on()
    runner.capture()
    assert runner.can_run(engine.batch([3]))


def test_an_estimate_leaves_the_proof_to_the_capture() -> None:
    engine = extra("ZERO_float32", leaks=True)
    engine.turn_on("sum")
    runner = dg.DecodeCudaGraphRunner(
        engine, config=config(bs=[2, 4]), registry=engine.registry, verify_on_capture=True
    )
    assert runner.estimate_capture().graphs == 2
    with pytest.raises(dg.CaptureError, match="verify-failed"):
        runner.capture()


def test_a_rank_has_no_graphs_where_those_of_another_do_not_pass() -> None:
    engine = ToyEngine(max_bs=4)
    votes: list[dg.Proposal] = []

    def vote(proposal: dg.Proposal) -> dg.Proposal:
        votes.append(proposal)
        return dg.agree([proposal, dg.Proposal(len(votes) == 1, 4, failed=len(votes) > 1)])

    engine.vote = vote
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), verify_on_capture=True)
    with pytest.raises(dg.CaptureError, match="verifying the graphs failed on another rank") as caught:
        runner.capture()
    assert (caught.value.code, runner.graphs, len(votes)) == ("other-rank-failed", {}, 2)
    assert votes[1] == dg.Proposal(True, 4), "one for the bucket, one for the verification"


def test_the_engines_own_batches_show_at_capture_what_idle_ones_cannot() -> None:
    class Leaky(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + batch.positions.sum()

        def state_tensors(self) -> dict[str, torch.Tensor]:
            return {"cache": self.cache}

    engine = Leaky(max_bs=4)
    captured(engine, verify_on_capture=True)
    engine.verify_batches = lambda: [engine.batch([3, 5])]
    with pytest.raises(dg.CaptureError, match="padding leaks through `positions`"):
        captured(engine, verify_on_capture=True)


def test_a_forward_that_does_not_run_at_half_a_bucket_is_verified_at_the_whole() -> None:
    class Fours(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            if batch.batch_size % 4:
                raise ValueError(f"{batch.batch_size} requests")
            return super().forward(batch)

    with captured(Fours(max_bs=4), verify_on_capture=True, output_axes=[dg.RowAxis(0)]) as runner:
        assert list(runner.graphs) == [dg.ShapeKey(4)]


def test_batches_without_attributes_are_verified_too() -> None:
    class Maps:
        device, limits = torch.device("cpu"), dg.Limits(max_bs=4, max_num_tokens=4)

        def forward(self, batch: Any) -> torch.Tensor:
            batch = SimpleNamespace(**batch) if isinstance(batch, dict) else batch
            return batch.positions * 2 + batch.input_ids

    ids = torch.arange(3)
    batch = {"batch_size": 3, "input_ids": ids, "positions": ids + 5}
    with captured(Maps(), verify_on_capture=True) as runner:
        assert dg.verify(runner, [batch], state={})


def test_an_engines_own_tests_check_a_runner_in_one_call(stage: Any) -> None:
    engine, runner = stage
    engine.turn_on()
    assert check_runner(runner, engine.batches(), state=engine.state())
    engine.turn_on("planes")
    with pytest.raises(AssertionError, match="padding leaks through `planes`"):
        check_runner(runner, engine.batches()[:1], state=engine.state())
    with pytest.raises(AssertionError, match="batch 0 runs eagerly: idle"):
        check_runner(runner, [engine.batch([])], state=engine.state())
