"""The decode runner on the CPU tape: what it decides, what a step does, and what it leaves behind."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph.devices.tape_memory import TapeMemory
from engines import Batch, ToyEngine, config, eager


def runner_for(engine: Any, **options: Any) -> dg.DecodeCudaGraphRunner:
    decode = {key: options.pop(key) for key in ("bs", "max_bs", "backend") if key in options}
    padding = options.pop("padding", True)
    options.setdefault("num_tokens_per_bs", getattr(engine, "tokens_per_request", 1))
    return dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode=decode, padding=padding), **options)


def captured(engine: Any, **options: Any) -> dg.DecodeCudaGraphRunner:
    runner = runner_for(engine, **options)
    runner.capture()
    return runner


# What comes out.


@pytest.mark.parametrize("tokens_per_request", [1, 2, 3, 5])
def test_replays_equal_eager_at_every_size_whatever_ran_before(tokens_per_request: int) -> None:
    engine = ToyEngine(max_bs=8, tokens_per_request=tokens_per_request)
    with captured(engine) as runner:
        for step, bs in enumerate([8, 1, 3, 8, 2, 5, 7, 4, 6, 1]):
            batch = engine.batch([tokens_per_request + (i + step) % 7 for i in range(bs)], seed=step)
            want = eager(engine, batch)
            assert torch.equal(runner.run(batch), want)
        assert runner.metrics().hit_rate == 1.0


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_any_sequence_of_batches_decodes_as_eager_does(steps: list[list[int]], descending: bool) -> None:
    engine, oracle = ToyEngine(max_bs=6), ToyEngine(max_bs=6)
    with captured(engine, order="descending" if descending else "ascending") as runner:
        for seed, lengths in enumerate(steps):
            want = oracle.forward(oracle.batch(lengths, seed))
            assert torch.equal(runner.run(engine.batch(lengths, seed)), want)
            # Beside the reserved row, the cache holds what eager steps leave there: padding wrote nowhere else.
            assert torch.equal(engine.cache[1:], oracle.cache[1:])


def test_padded_rows_touch_no_parked_request() -> None:
    engine = ToyEngine(max_bs=8)
    engine.cache.random_(-2, 3, generator=torch.Generator().manual_seed(1))
    parked = engine.cache[4:].clone()
    with captured(engine, bs=[8]) as runner:
        runner.run(engine.batch([3, 5, 2]))
    assert torch.equal(engine.cache[4:], parked)


def test_outputs_are_borrowed_until_the_next_replay_and_owned_with_clone_outputs() -> None:
    engine = ToyEngine(max_bs=4)
    first, second = engine.batch([3, 4], seed=1), engine.batch([3, 4], seed=2)
    with captured(engine) as runner:
        borrowed = runner.run(first)
        assert runner.run(second).data_ptr() == borrowed.data_ptr()
    with captured(engine, clone_outputs=True) as runner:
        owned = runner.run(first)
        kept = owned.clone()
        assert runner.run(second).data_ptr() != owned.data_ptr()
        assert torch.equal(owned, kept)


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor | None


@dataclass
class Nested:
    pair: Pair
    by_name: dict[str, torch.Tensor]
    label: str
    scores: list[torch.Tensor]


class NestedEngine(ToyEngine):
    def forward(self, batch: Any) -> Nested:
        logits = super().forward(batch)
        running = torch.cat([logits[:1, 0] * 0, logits[:, 0].cumsum(0)])
        return Nested(Pair(logits, None), {"twice": logits.t() * 2, "table": self.head * 1}, "x", [running])


@pytest.mark.parametrize("bs", [[1, 4, 8], [8]])
def test_nested_outputs_come_back_in_their_own_classes_with_the_real_rows(bs: list[int]) -> None:
    engine = NestedEngine(max_bs=8)
    with captured(engine, bs=bs) as runner:
        batch = engine.batch([3, 4, 5])
        want, got = eager(engine, batch), runner.run(batch)
        assert (type(got), type(got.pair), got.label, got.pair.hidden) == (Nested, Pair, "x", None)
        assert torch.equal(got.pair.logits, want.pair.logits)
        assert torch.equal(got.by_name["twice"], want.by_name["twice"])
        assert torch.equal(got.by_name["table"], want.by_name["table"])
        assert torch.equal(got.scores[0], want.scores[0])
        got.by_name["mine"] = torch.zeros(1)
        assert "mine" not in runner.run(batch).by_name


def test_rows_that_cannot_be_told_are_an_error_that_output_axes_resolves() -> None:
    class Square(ToyEngine):
        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            return logits @ logits.t()

    engine = Square(max_bs=4)
    with pytest.raises(dg.CaptureError) as caught:
        captured(engine)
    assert caught.value.code == "output-rows"
    with captured(engine, output_axes=[dg.RowAxis(0)]) as runner:
        assert runner.run(engine.batch([3, 4, 2])).shape == (3, 4)


# What is decided.


class Rounded(ToyEngine):
    """Gives rows for a multiple of four requests, as a kernel with tiles would."""

    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        return torch.nn.functional.pad(logits, (0, 0, 0, -logits.shape[0] % 4))


def test_rows_have_to_follow_every_size_in_one_way_unless_output_axes_tells() -> None:
    engine = Rounded(max_bs=8)
    with runner_for(engine, bs=[4, 5, 8]) as runner:
        with pytest.raises(dg.CaptureError, match="sizes 5, 4 and 8 have no rule in common") as caught:
            runner.capture()
        assert caught.value.code == "output-rows"
    with captured(engine, bs=[4, 5, 8], output_axes=[dg.RowAxis(0)]) as runner:
        assert runner.run(engine.batch([3] * 5)).shape == (5, 32)


@pytest.mark.parametrize("axes", [[], [dg.RowAxis(2)], [dg.RowAxis(0, 2)], [dg.RowAxis(0), None]])
def test_output_axes_that_the_output_has_no_place_for_are_refused_at_capture(axes: list[Any]) -> None:
    with runner_for(ToyEngine(), output_axes=axes) as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert caught.value.code == "output-rows"
        assert not runner.graphs


class Multiples(ToyEngine):
    """Runs at multiples of `step` only."""

    step = 4

    def forward(self, batch: Any) -> torch.Tensor:
        if batch.batch_size % self.step:
            raise ValueError(f"{batch.batch_size} requests")
        return super().forward(batch)


def test_a_single_bucket_is_compared_with_a_smaller_run_that_the_forward_allows() -> None:
    engine = Multiples(max_bs=8)
    with captured(engine, bs=[8]) as runner:
        assert runner.run(engine.batch([3] * 5)).shape == (5, 32)
    engine.step = 8
    said = "only size 8 is captured, and the forward fails at 4: 4 requests"
    with runner_for(engine, bs=[8]) as runner, pytest.raises(dg.CaptureError, match=said):
        runner.capture()
    with captured(engine, bs=[8], output_axes=[dg.RowAxis(0)]) as runner:
        assert runner.run(engine.batch([3] * 5)).shape == (5, 32)


def test_a_shape_that_is_captured_beside_others_has_its_rows_where_they_have_theirs() -> None:
    engine = Multiples(max_bs=8)
    with runner_for(engine, bs=[4, 8]) as runner, runner.backend.capture_session():
        runner.capture_one_shape(8)
        runner.capture_one_shape(4)  # the forward runs at no smaller size
        assert runner.run(engine.batch([3] * 3)).shape == (3, 32)


@pytest.mark.parametrize(
    ("size", "unit", "tried"), [(8, 1, [7, 4]), (2, 1, [1]), (20, 4, [16, 8]), (8, 4, [4]), (4, 4, [])]
)
def test_a_single_bucket_is_compared_with_the_next_smaller_size_or_with_half_of_it(
    size: int, unit: int, tried: list[int]
) -> None:
    smaller: list[int] = []

    class One(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            if batch.batch_size != size:
                smaller.append(batch.batch_size)
                raise ValueError("another size")
            return super().forward(batch)

    registry = dg.build_decode_registry(device="cpu", max_bs=size, max_num_token=size, seq_len_fill_value=1)
    registry.token_alignment = unit
    said = f"the forward fails at {tried[-1]}: another size" if tried else "no smaller one is a multiple of 4"
    with runner_for(One(max_bs=size), bs=[size], registry=registry) as runner:
        with pytest.raises(dg.CaptureError, match=f"only size {size} is captured, and {said}") as caught:
            runner.capture()
        assert caught.value.code == "output-rows"
    assert smaller == tried


def test_one_shape_can_be_captured_beside_the_others_or_alone() -> None:
    engine = ToyEngine(max_bs=8)
    for first in ((), (8, 4)):
        with runner_for(engine, bs=[2, 4, 8]) as runner, runner.backend.capture_session():
            for size in first:
                runner.capture_one_shape(size)
            assert runner.capture_one_shape(2).shape == (2, 32)
            batch = engine.batch([5])
            assert torch.equal(runner.run(batch), eager(engine, batch))


@pytest.mark.parametrize("form", [lambda rows: rows.squeeze(0), lambda rows: rows[:, 0].squeeze()])
def test_one_request_whose_output_loses_a_dimension_gets_all_of_it(form: Any) -> None:
    class Squeezing(ToyEngine):
        def forward(self, batch: Any) -> Any:
            return form(super().forward(batch))

    engine = Squeezing(max_bs=4)
    with runner_for(engine, bs=[1, 4]) as runner, runner.backend.capture_session():
        for size in (1, 4):
            runner.capture_one_shape(size)
        for bs in (1, 3, 1, 4):
            batch = engine.batch([3] * bs)
            assert torch.equal(runner.run(batch), eager(engine, batch))


def test_one_request_whose_output_has_other_parts_gets_all_of_it() -> None:
    class Alone(ToyEngine):
        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            return {"all": logits} if batch.batch_size == 1 else {"first": logits[:, :8], "rest": logits[:, 8:]}

    engine = Alone(max_bs=4)
    with runner_for(engine, bs=[1, 4]) as runner, runner.backend.capture_session():
        for size in (1, 4):
            runner.capture_one_shape(size)
        for bs in (1, 3):
            batch = engine.batch([3] * bs)
            output = runner.run(batch)
            assert list(output) == (["all"] if bs == 1 else ["first", "rest"])
            assert torch.equal(torch.cat(list(output.values()), 1), ToyEngine(max_bs=4).forward(batch))


def test_what_a_caller_does_to_the_form_of_an_output_is_not_there_in_the_next_step() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine) as runner:
        for bs in (1, 1, 3, 3):
            batch = engine.batch([3] * bs)
            output = runner.run(batch)
            assert torch.equal(output, eager(engine, batch))
            output.unsqueeze_(0).requires_grad_()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_share_of_the_buckets_tokens_is_given_whole(ranks: int) -> None:
    class Shares(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch)[: batch.batch_size // ranks]

    registry = dg.build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1)
    registry.token_alignment = ranks
    engine = Shares(max_bs=8)
    with captured(engine, bs=[4, 8], registry=registry) as runner:
        for live, bucket in ((3, 4), (5, 8)):
            assert runner.run(engine.batch([3] * live)).shape == (bucket // ranks, 32)


@pytest.mark.parametrize("order", [(1, 4, 8), (4, 1, 8), (8, 1, 4)])
@pytest.mark.parametrize("axes", [None, [dg.RowAxis(0)]])
def test_shapes_that_are_captured_one_by_one_are_all_cut_to_their_live_rows(order: tuple[int, ...], axes: Any) -> None:
    engine = ToyEngine(max_bs=8)
    with runner_for(engine, bs=[1, 4, 8], output_axes=axes) as runner, runner.backend.capture_session():
        for captures, size in enumerate(order):
            runner.capture_one_shape(size)
            largest = max(order[: captures + 1])
            for bs in range(1, largest + 1):
                batch = engine.batch([3] * bs)
                assert torch.equal(runner.run(batch), eager(engine, batch))


@pytest.mark.parametrize("hook", ["prepare", "in_graph"])
def test_a_shape_that_fails_when_it_is_captured_again_has_no_graph_and_its_batches_take_the_next_larger_one(
    hook: str,
) -> None:
    engine = Recorded(max_bs=4)
    with captured(engine, bs=[2, 4]) as runner, runner.backend.capture_session():
        engine.fail = hook
        with pytest.raises(dg.CaptureError, match=f"{hook} failed"):
            runner.capture_one_shape(2)
        engine.fail = None
        assert list(runner.graphs) == list(runner.backend.captured) == [dg.ShapeKey(4)]
        assert runner.can_run(engine.batch([3, 5])).key == dg.ShapeKey(4)
        runner.capture_one_shape(2)
        assert runner.can_run(engine.batch([3, 5])).key == dg.ShapeKey(2)


def test_a_shape_that_is_no_bucket_or_of_a_disabled_phase_is_refused() -> None:
    for options, said in (({"bs": [2, 4]}, "3 is not one of the buckets: 2, 4"), ({"backend": "disabled"}, "disabled")):
        with runner_for(ToyEngine(), **options) as runner, pytest.raises(dg.CaptureError, match=said) as caught:
            runner.capture_one_shape(3)
        assert caught.value.code == "bucket-unknown"


def test_a_phase_without_a_bucket_that_fits_captures_nothing_and_says_why() -> None:
    engine = ToyEngine(max_bs=4)
    with runner_for(engine, bs=[8], padding=False) as runner:
        assert runner.capture().note == "no bucket fits the engine's limits"
        assert runner.estimate_capture().graphs == 0
        for ask in (runner.audit, lambda: runner.capture_one_shape(8)):
            with pytest.raises(dg.CaptureError, match="none fits the engine's limits") as caught:
                ask()
            assert caught.value.code == "bucket-unknown"
        assert engine.forwards == []
        assert runner.can_run(engine.batch([3])).code == "nothing-captured"


def test_every_decision_has_its_code() -> None:
    engine = ToyEngine(max_bs=8)
    with runner_for(engine, bs=[2, 4]) as runner:
        assert runner.can_run(engine.batch([3])).code == "not-captured"
        runner.capture()
        decision = runner.can_run(engine.batch([3, 3, 3]))
        assert (bool(decision), decision.code, decision.key) == (True, "graph", dg.ShapeKey(4))
        assert runner.can_run(engine.batch([3] * 4)) is decision
        assert runner.can_run(engine.batch([])).code == "idle"
        # A list that the engine's limit exceeds gains nothing: it was asked for, and 5 to 8 requests run eagerly.
        assert runner.can_run(engine.batch([3] * 5)).code == "above-largest"
    with captured(engine, bs=[2, 4], padding=False) as runner:
        assert runner.can_run(engine.batch([3] * 3)).code == "no-exact-bucket"
        assert runner.can_run(engine.batch([3] * 4))
    with runner_for(engine, backend="disabled") as runner:
        assert "disabled" in str(runner.capture())
        assert runner.can_run(engine.batch([3])).code == "disabled"
        batch = engine.batch([3, 4])
        assert torch.equal(runner.run(batch), eager(engine, batch))
        assert (runner.metrics().eager, runner.metrics().recompiles) == ({"disabled": 1}, 0)


def test_requests_of_unequal_length_are_not_taken_for_a_uniform_batch() -> None:
    """Equal totals, other shapes: [3, 1] tokens must not run in a graph of two requests with two tokens each."""
    engine = ToyEngine(max_bs=4, tokens_per_request=2)
    batch = engine.batch([3, 4])
    with captured(engine) as runner:
        assert runner.can_run(batch)
        batch.batch_size = 3
        assert runner.can_run(batch).code == "not-uniform"


def test_all_codes_mean_something_and_eager_steps_are_counted_by_code() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine, bs=[2]) as runner:
        for lengths in ([3, 3, 3], [3, 3], [3, 3, 3, 3]):
            runner.run(engine.batch(lengths))
        metrics = runner.metrics()
        assert metrics.eager == {"above-largest": 2}
        assert metrics.replays == {dg.ShapeKey(2): 1}
        assert (metrics.raw_rows, metrics.padded_rows, metrics.steps) == (2, 0, 3)
    for code, meaning in dg.DECISION_CODES.items():
        assert dg.Decision(code, dg.ShapeKey(1) if code == "graph" else None).reason == meaning


class Fields(ToyEngine):
    """Exposes an optional field and a required one, both zero or more in the result."""

    def __init__(self, exposed: tuple[str, ...]) -> None:
        super().__init__(max_bs=4)
        self.exposed = exposed
        self.registry = dg.build_decode_registry(
            device=self.device, max_bs=4, max_num_token=4, seq_len_fill_value=1, cache_loc_dtype=torch.int64
        )
        for name, required in (("bias", False), ("scale", True)):
            self.registry.register_slot(
                dg.GraphSlot(
                    name,
                    lambda bs, tokens: (bs,),
                    torch.float32,
                    axis="bs",
                    padding_policy=dg.PaddingPolicy.ZERO,
                    required=required,
                )
            )

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        batch = super().make_batch(views, key)
        for name in self.exposed:
            setattr(batch, name, views[name])
        return batch

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        for name in self.exposed:
            value = getattr(batch, name, None)
            logits = logits if value is None else logits + value[:, None]
        return logits


def test_a_required_field_that_is_missing_and_one_that_is_unexpected_run_eagerly_by_name() -> None:
    engine = Fields(exposed=("scale",))
    with captured(engine, registry=engine.registry) as runner:
        batch = engine.batch([3, 4])
        decision = runner.can_run(batch)
        assert (decision.code, decision.fields) == ("field-missing", ("scale",))
        assert "`scale`" in decision.reason
        assert torch.equal(runner.run(batch), eager(engine, batch))
        batch.scale = torch.ones(2)
        assert torch.equal(runner.run(batch), eager(engine, batch))
        batch.bias = torch.ones(2)
        decision = runner.can_run(batch)
        assert (decision.code, decision.fields) == ("field-unexpected", ("bias",))
        assert runner.metrics().eager == {"field-missing": 1}


def test_an_optional_field_that_is_missing_is_padding_in_every_row() -> None:
    engine = Fields(exposed=("bias", "scale"))
    with captured(engine, registry=engine.registry) as runner:
        batch = engine.batch([3, 4])
        batch.scale, batch.bias = torch.ones(2), torch.full((2,), 5.0)
        assert torch.equal(runner.run(batch), eager(engine, batch))
        batch.bias = None
        want = eager(engine, batch)
        assert torch.equal(runner.run(batch), want)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_forward_whose_error_is_its_own_cause_fails_the_capture_and_nothing_else(backend: str) -> None:
    class Circular(ToyEngine):
        def forward(self, batch: Any) -> Any:
            try:
                raise ValueError("went wrong")
            except ValueError as error:
                raise error from error

    with runner_for(Circular(), bs=[2], backend=backend) as runner:
        with pytest.raises(dg.CaptureError, match="went wrong") as caught:
            runner.capture()
        assert caught.value.code == "forward-failed"


def test_a_field_that_the_static_batch_lacks_is_named_with_where_it_comes_from() -> None:
    class Reads(ToyEngine):
        make_batch = None

        def forward(self, batch: Any) -> Any:
            return batch.page_slots * 2

    with runner_for(Reads(), bs=[2]) as runner, pytest.raises(dg.CaptureError) as caught:
        runner.capture()
    assert str(caught.value) == (
        "decode: capturing bucket 2 failed: AttributeError: 'StaticBatch' object has no attribute 'page_slots' "
        "[forward-failed]\n\nhint: a static batch has what slots are registered for, and what `make_batch` adds: "
        "not `page_slots`"
    )


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_one_shape_is_captured_in_a_session_only_and_sessions_may_be_nested(backend: str) -> None:
    engine = ToyEngine()
    with runner_for(engine, bs=[2, 4], backend=backend) as runner:
        assert runner.backend is not None
        for _ in range(2):
            with pytest.raises(dg.CaptureError) as caught:
                runner.capture_one_shape(2)
            assert (caught.value.code, runner.graphs) == ("no-session", {})
            with runner.backend.capture_session():
                runner.capture_one_shape(4)
                with runner.backend.capture_session():
                    runner.capture_one_shape(2)
                runner.capture_one_shape(4)
            batch = engine.batch([3, 5])
            assert torch.equal(runner.run(batch), eager(engine, batch))
            for key in list(runner.graphs):
                runner.drop_graph(key)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("hook", ["forward", "after_warmup", "prepare_metadata", "progress"])
@pytest.mark.parametrize(
    "error", [StopIteration("no more"), UnprintableError()], ids=["StopIteration", "UnprintableError"]
)
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_an_error_of_any_class_fails_the_capture_as_a_capture_error(backend: str, error: Exception, hook: str) -> None:
    def fail(*args: Any) -> None:
        raise error

    engine = ToyEngine()
    options: dict[str, Any] = {"progress": fail} if hook == "progress" else {}
    if hook != "progress":
        setattr(engine, hook, fail)
    with runner_for(engine, bs=[2], backend=backend, **options) as runner:
        with pytest.raises(dg.CaptureError, match=type(error).__name__) as caught:
            runner.capture()
        assert caught.value.code == ("capture-failed" if hook == "progress" else "forward-failed")
        cause = caught.value.__cause__
        assert cause is error or (cause is not None and cause.__cause__ is error)


# Idle ranks and votes.


class Ranks:
    """Data-parallel ranks that vote in lockstep, one after the other in one thread."""

    def __init__(self, sizes: list[int], max_bs: int = 8, **options: Any) -> None:
        self.engines = [ToyEngine(max_bs=max_bs) for _ in sizes]
        self.proposals: list[dg.Proposal] = []
        self.answer: dg.Proposal | None = None
        for engine in self.engines:
            engine.vote = self.vote
        self.runners = [runner_for(engine, **options) for engine in self.engines]
        self.sizes = sizes

    def vote(self, proposal: dg.Proposal) -> dg.Proposal:
        self.proposals.append(proposal)
        return self.answer if self.answer is not None else proposal

    def decide(self) -> list[dg.Decision]:
        batches = [engine.batch([3] * size) for engine, size in zip(self.engines, self.sizes, strict=True)]
        self.proposals, self.answer = [], None
        for runner, batch in zip(self.runners, batches, strict=True):
            runner.can_run(batch)
        self.answer = dg.agree(self.proposals)
        return [runner.can_run(batch) for runner, batch in zip(self.runners, batches, strict=True)]


@pytest.mark.parametrize(
    ("sizes", "codes", "bucket"),
    [
        ([5, 0, 0, 2], {"graph"}, 8),
        ([0, 0, 0, 0], {"idle"}, None),
        ([1, 1], {"graph"}, 1),
        ([9, 1], {"above-largest", "voted-eager"}, None),
    ],
)
def test_ranks_of_different_sizes_choose_the_same_graph_or_all_run_eagerly(
    sizes: list[int], codes: set[str], bucket: int | None
) -> None:
    ranks = Ranks(sizes, max_bs=16, bs=[1, 4, 8])
    for runner in ranks.runners:
        runner.capture()
    decisions = ranks.decide()
    assert {decision.code for decision in decisions} == codes
    assert {decision.key.size if decision.key else None for decision in decisions} == {bucket}


def test_the_size_that_ranks_agree_on_is_the_largest_and_not_the_sum() -> None:
    assert dg.agree([dg.Proposal(True, 32)] * 16) == dg.Proposal(True, 32)
    assert dg.agree([dg.Proposal(True, 5), dg.Proposal(False, 0)]) == dg.Proposal(False, 5)
    assert dg.agree([]) == dg.Proposal(True, 0)


def test_ranks_in_different_phases_agree_on_no_graph() -> None:
    decode, prefill = (dg.Proposal(True, 4, phase=phase) for phase in ("decode", "prefill"))
    assert dg.agree([decode, prefill]) == dg.Proposal(False, 4)
    assert dg.agree([prefill, prefill, dg.Proposal(True, 2)]) == dg.Proposal(True, 4)
    phases: list[str] = []
    engine = ToyEngine(max_bs=4, tokens_per_request=2)
    engine.vote = lambda proposal: phases.append(proposal.phase) or proposal
    with captured(engine, bs=[1], mode="target_verify") as runner:
        runner.run(engine.batch([3]))
    assert phases == ["target_verify"] * 2


def test_an_idle_rank_joins_the_others_graph_with_no_row_of_its_own() -> None:
    ranks = Ranks([0], bs=[1, 4])
    (runner,), (engine,) = ranks.runners, ranks.engines
    runner.capture()
    ranks.answer = dg.Proposal(True, 3)
    engine.cache.fill_(7)
    output = runner.run(engine.batch([]))
    assert output.shape == (0, 32)
    assert torch.equal(engine.cache[1:], torch.full_like(engine.cache[1:], 7))
    batch = runner.replay_prepare(engine.batch([]))
    assert batch.seq_lens.tolist() == [1] * 4
    assert batch.out_cache_loc.tolist() == [0] * 4


@pytest.mark.parametrize("axes", [None, [dg.RowAxis(0)]])
def test_an_idle_rank_gets_no_row_of_the_only_bucket(axes: Any) -> None:
    ranks = Ranks([0], bs=[1], output_axes=axes)
    (runner,), (engine,) = ranks.runners, ranks.engines
    runner.capture()
    ranks.answer = dg.Proposal(True, 1)
    assert runner.run(engine.batch([])).shape == (0, 32)
    assert runner.run(engine.batch([3])).shape == (1, 32)


def test_an_idle_rank_gets_no_row_of_the_only_bucket_in_any_tensor_that_has_a_dimension_for_rows() -> None:
    class Three(ToyEngine):
        def vote(self, proposal: dg.Proposal) -> dg.Proposal:
            return dg.Proposal(True, 1)

        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            return logits, logits[:, 0], logits.sum()

    engine = Three(max_bs=1)
    with captured(engine) as runner:
        assert [tensor.shape for tensor in runner.run(engine.batch([]))] == [(0, 32), (0,), ()]
        assert [tensor.shape for tensor in runner.run(engine.batch([3]))] == [(1, 32), (1,), ()]


def test_an_idle_rank_gets_no_row_of_a_bucket_that_was_captured_before_there_was_another_to_tell_rows_by() -> None:
    class Wide(ToyEngine):
        joined = 0

        def vote(self, proposal: dg.Proposal) -> dg.Proposal:
            return dg.Proposal(True, self.joined)

        def forward(self, batch: Any) -> Any:
            return {"logits": super().forward(batch).t(), "head": self.head * 1}

    engine = Wide(max_bs=4)
    with runner_for(engine, bs=[1, 4]) as runner, runner.backend.capture_session():
        engine.joined = 1
        for size in (1, 4):
            runner.capture_one_shape(size)
            runner.run(engine.batch([]))
        for engine.joined in (1, 4):
            output = runner.run(engine.batch([]))
            assert output["logits"].shape == (32, 0)
            assert torch.equal(output["head"], engine.head)


def test_each_rank_replays_the_variant_of_its_own_batch_in_the_bucket_that_all_agreed_on() -> None:
    engine = ToyEngine(max_bs=8)
    engine.variants, engine.variant = ("a", "b"), lambda batch: "b" if batch.batch_size in (0, 3) else "a"
    engine.vote = lambda proposal: dg.agree([proposal, dg.Proposal(True, 5)])
    with captured(engine, bs=[4, 8]) as runner:
        keys = [runner.can_run(engine.batch([4] * requests)).key for requests in (0, 1, 3)]
    assert keys == [dg.ShapeKey(8, variant_label=label) for label in ("b", "a", "b")]


def test_an_idle_rank_joins_whatever_its_batch_lacks_and_not_with_a_variant_it_has_not_captured() -> None:
    ranks = Ranks([0], bs=[1, 4])
    (runner,) = ranks.runners
    runner.capture()
    for batch in ({}, {"batch_size": 0, "input_ids": torch.zeros(0, dtype=torch.int64)}):
        ranks.answer = None
        ranks.proposals.clear()
        assert runner.can_run(batch).code == "idle"
        assert ranks.proposals == [dg.Proposal(True, 0)]
        ranks.answer = dg.Proposal(True, 3)
        assert runner.can_run(batch).key == dg.ShapeKey(4)
        assert runner.run(batch).shape == (0, 32)
    engine = Variants(max_bs=4)
    engine.vote = ranks.vote
    with captured(engine, bs=[4]) as runner:
        ranks.proposals.clear()
        ranks.answer = dg.Proposal(False, 3)
        batch = engine.batch([])
        batch.extras["variant"] = "unheard-of"
        assert runner.can_run(batch).code == "variant-unknown"
        assert ranks.proposals == [dg.Proposal(False, 0)]


def test_an_idle_rank_joins_without_a_field_that_live_batches_need() -> None:
    engine = ToyEngine(max_bs=4)
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    registry.register_slot(dg.GraphSlot("needed", lambda bs, tokens: (bs,), torch.int64, axis="bs", required=True))
    engine.make_batch = lambda views, key: {**views, "batch_size": key.size}
    engine.forward = lambda batch: batch["input_ids"] * 2 + batch["needed"]
    engine.vote = lambda proposal: dg.Proposal(True, 3)
    with captured(engine, bs=[4], registry=registry) as runner:
        assert runner.can_run(vars(engine.batch([3, 3]))).code == "field-missing"
        assert runner.can_run({}).key == dg.ShapeKey(4)
        assert runner.run({}).shape == (0,)


def test_ranks_stop_together_when_one_of_them_fails_at_a_bucket() -> None:
    proposals = []

    def vote(proposal: dg.Proposal) -> dg.Proposal:
        proposals.append(proposal)
        others = dg.Proposal(proposal.size != 2, proposal.size, failed=proposal.size == 2)
        return dg.agree([proposal, others])

    engine = ToyEngine(max_bs=4)
    engine.vote = vote
    with runner_for(engine, bs=[1, 2, 4]) as runner:
        with pytest.raises(dg.CaptureError, match="capturing bucket 2 failed on another rank") as caught:
            runner.capture()
        assert caught.value.code == "other-rank-failed"
        assert [proposal.size for proposal in proposals] == [4, 2]
        assert not runner.graphs
    failing = FailsAt(2, ValueError("here"))
    failing.vote = lambda proposal: proposals.append(proposal) or proposal
    proposals.clear()
    with runner_for(failing, bs=[1, 2, 4]) as runner:
        with pytest.raises(dg.CaptureError, match="bucket 2"):
            runner.capture()
        assert proposals == [dg.Proposal(True, 4), dg.Proposal(False, 2, failed=True)]


def test_a_vote_is_cast_once_in_a_step_and_once_for_each_captured_bucket() -> None:
    ranks = Ranks([2], bs=[1, 4])
    (runner,), (engine,) = ranks.runners, ranks.engines
    runner.capture()
    assert ranks.proposals == [dg.Proposal(True, 4), dg.Proposal(True, 1)]
    ranks.proposals.clear()
    runner.run(engine.batch([3, 3]))
    assert ranks.proposals == [dg.Proposal(True, 2)]
    decision = runner.can_run(engine.batch([3, 3]))
    runner.replay(engine.batch([3, 3]), decision)
    assert ranks.proposals == [dg.Proposal(True, 2)] * 2


def test_a_rank_whose_batch_has_no_size_votes_for_no_graph_and_no_size() -> None:
    ranks = Ranks([2], bs=[4])
    (runner,), (engine,) = ranks.runners, ranks.engines
    runner.capture()
    ranks.proposals.clear()
    batch = engine.batch([3, 3])
    batch.batch_size = 1
    assert runner.can_run(batch).code == "not-uniform"
    assert ranks.proposals == [dg.Proposal(False, 0)]


def test_ranks_with_the_same_batches_vote_on_captures_alone_where_they_say_so() -> None:
    proposals: list[dg.Proposal] = []
    engine = ToyEngine(max_bs=4)
    engine.vote = lambda proposal: proposals.append(proposal) or proposal
    engine.votes_each_step = False
    with captured(engine, bs=[1, 4]) as runner:
        assert runner.can_run(engine.batch([3, 3])).key == dg.ShapeKey(4)
        runner.run(engine.batch([3]))
    assert proposals == [dg.Proposal(True, 4), dg.Proposal(True, 1)]


def test_a_bucket_that_another_rank_could_not_capture_is_dropped_here_too() -> None:
    engine = ToyEngine(max_bs=4)
    engine.vote = lambda proposal: dg.Proposal(proposal.size != 4, proposal.size)
    with runner_for(engine, bs=[1, 4]) as runner:
        report = runner.capture()
        assert [d.key.size for d in report.dropped] == [4]
        assert "another rank" in report.dropped[0].reason
        engine.vote = None
        runner.hooks.vote = None
        assert runner.can_run(engine.batch([3] * 3)).code == "bucket-dropped"


def test_a_bucket_that_a_variant_lacks_is_dropped_in_all_of_them_where_ranks_vote() -> None:
    """Ranks with requests of different variants agree on one bucket; each of them must have it."""

    class Lacking(Variants):
        def vote(self, proposal: dg.Proposal) -> dg.Proposal:
            return proposal

        def forward(self, batch: Any) -> torch.Tensor:
            if batch.batch_size == 2 and batch.extras["shift"]:
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return super().forward(batch)

    with runner_for(Lacking(max_bs=4), bs=[1, 2, 4]) as runner:
        report = runner.capture()
        assert {key.size for key in runner.graphs} == {bucket.key.size for bucket in report.captured} == {1, 4}
        assert {drop.key.variant_label: drop.reason.split(": ")[-1] for drop in report.dropped} == {
            None: "another variant of it could not be captured",
            "lora": "tried to allocate 2 GiB",
        }
        labels = runner.hooks.variants
        assert {key.variant_label for key in runner.graphs} == set(labels)
        batches = [runner.model_runner.batch([3, 3]) for _ in labels]
        for batch, label in zip(batches, labels, strict=True):
            batch.extras["variant"] = label
        assert {runner.can_run(batch).key.size for batch in batches} == {4}
    alone = Lacking(max_bs=4)
    alone.vote = None  # type: ignore[method-assign,assignment]
    with captured(alone, bs=[1, 2, 4]) as runner:
        assert [runner.can_run(batch).key.size for batch in batches] == [2, 4]


def test_an_error_that_ends_a_vote_is_raised_with_what_had_failed_here_before() -> None:
    late = TimeoutError("no answer")

    def vote(proposal: dg.Proposal) -> dg.Proposal:
        raise dg.RankError("rank 1 is gone", code="rank-late", ranks=(1,)) from late

    for failure in (ValueError("here"), torch.OutOfMemoryError("here")):
        engine = FailsAt(2, failure)
        engine.vote = vote
        with runner_for(engine, bs=[2]) as runner:
            with pytest.raises(dg.RankError, match="rank 1 is gone") as caught:
                runner.capture()
            assert isinstance(caught.value.__cause__, dg.CaptureError)
            assert not runner.graphs
    engine = ToyEngine(max_bs=2)
    engine.vote = vote
    with runner_for(engine, bs=[2]) as runner, pytest.raises(dg.RankError) as caught:
        runner.capture()
    assert caught.value.__cause__ is late


# Hooks.


class Recorded(ToyEngine):
    """Notes every hook with the sizes that it sees, and keeps metadata at fixed addresses for each graph."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[tuple[Any, ...]] = []
        self.metadata: dict[Any, dict[str, Any]] = {}
        self.fail: str | None = None

    def note(self, hook: str, *seen: Any) -> None:
        self.log.append((hook, *seen))
        if self.fail == hook:
            raise ValueError(f"{hook} failed")

    def pre_replay(self, batch: Any) -> None:
        self.note("pre_replay", batch.batch_size)

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        self.note("prepare", batch.batch_size, len(batch.seq_lens), key)
        plan = self.metadata.setdefault(key, {"lengths": torch.zeros(self.limits.max_bs, dtype=torch.int64)})
        plan["kind"] = "raw"
        plan["lengths"][: len(batch.seq_lens)].copy_(batch.seq_lens)
        batch.extras = plan

    def upgrade_metadata(self, batch: Any, key: Any) -> None:
        self.note("upgrade", key)
        batch.extras["kind"] = "full"

    def prepare_in_graph(self, batch: Any, key: Any) -> None:
        self.note("in_graph", key)
        self.doubled = batch.extras["lengths"][: len(batch.seq_lens)] * 2

    def after_warmup(self) -> None:
        self.note("after_warmup")

    def barrier(self) -> None:
        self.note("barrier")

    def forward(self, batch: Any) -> Any:
        assert batch.extras["kind"] == "full", "the layers met raw metadata"
        self.note("forward", batch.batch_size)
        return super().forward(batch) + self.doubled[:, None]


def test_a_capture_warms_up_twice_with_barrier_and_hook_and_runs_the_body_once() -> None:
    engine = Recorded(max_bs=4)
    with runner_for(engine, bs=[4], output_axes=[dg.RowAxis(0)]) as runner:
        runner.buffer_registry.slot_names
        engine.log.clear()
        key = dg.ShapeKey(4)
        with runner.backend.capture_session():
            runner.capture_one_shape(4)
        warmup = [("barrier",), ("in_graph", key), ("forward", 4), ("after_warmup",)]
        assert engine.log == [
            ("prepare", 4, 4, key),
            ("upgrade", key),
            *warmup,
            *warmup,
            ("in_graph", key),
            ("forward", 4),
        ]


def test_a_replayed_step_runs_its_hooks_in_order_on_padded_views_and_no_forward() -> None:
    engine = Recorded(max_bs=4)
    with captured(engine, bs=[1, 4]) as runner:
        engine.log.clear()
        batch = engine.batch([3, 5, 2])
        runner.run(batch)
        key = dg.ShapeKey(4)
        assert engine.log == [("pre_replay", 3), ("prepare", 4, 4, key), ("upgrade", key)]
        assert engine.metadata[key]["lengths"].tolist() == [3, 5, 2, 1]
        assert batch.extras == {}


def test_an_eager_step_runs_the_same_hooks_on_the_engines_own_batch() -> None:
    engine = Recorded(max_bs=4)
    with captured(engine, bs=[2]) as runner:
        engine.log.clear()
        runner.run(engine.batch([3, 5, 2]))
        assert engine.log == [
            ("pre_replay", 3),
            ("prepare", 3, 3, None),
            ("upgrade", None),
            ("in_graph", None),
            ("forward", 3),
        ]


@pytest.mark.parametrize("hook", ["prepare_metadata", "upgrade_metadata"])
def test_either_hook_of_metadata_runs_in_every_step_without_the_other(hook: str) -> None:
    engine, seen = ToyEngine(max_bs=4), []
    setattr(engine, hook, lambda batch, key: seen.append((batch.seq_lens.tolist(), key)))
    with captured(engine, bs=[2, 3]) as runner:
        assert seen == [([1, 1, 1], dg.ShapeKey(3)), ([1, 1], dg.ShapeKey(2))]
        seen.clear()
        runner.run(engine.batch([3]))
        runner.run(engine.batch([3, 4, 5, 6]))
        assert seen == [([3, 1], dg.ShapeKey(2)), ([3, 4, 5, 6], None)]


def test_metadata_is_prepared_with_the_lengths_of_the_step_and_keeps_its_address() -> None:
    engine, oracle = Recorded(max_bs=8), Recorded(max_bs=8)
    with captured(engine, bs=[4, 8]) as runner:
        addresses = {key: plan["lengths"].data_ptr() for key, plan in engine.metadata.items()}
        for seed, lengths in enumerate([[3], [3, 4], [3, 4, 5], [9] * 7, [2], [5] * 8]):
            batch = oracle.batch(lengths, seed)
            oracle.prepare_metadata(batch, None)
            oracle.upgrade_metadata(batch, None)
            oracle.prepare_in_graph(batch, None)
            assert torch.equal(runner.run(engine.batch(lengths, seed)), oracle.forward(batch))
        assert {key: plan["lengths"].data_ptr() for key, plan in engine.metadata.items()} == addresses


def test_a_pre_replay_hook_that_raises_prevents_the_step() -> None:
    engine = Recorded(max_bs=4)
    with captured(engine, bs=[4]) as runner:
        before = runner.buffer_registry.get_slot("seq_lens").buffer.clone()
        engine.fail = "pre_replay"
        with pytest.raises(ValueError, match="pre_replay failed"):
            runner.run(engine.batch([3, 5]))
        assert torch.equal(runner.buffer_registry.get_slot("seq_lens").buffer, before)
        assert runner.metrics().steps == 0


class Shifting(ToyEngine):
    """Its `pre_replay` sets fields of the batch; where told it fails, there or behind."""

    fails: str | None = None

    def pre_replay(self, batch: Any) -> None:
        batch.positions = batch.positions - 1
        batch.was_shifted = True
        if self.fails == "pre_replay":
            raise ValueError("pre_replay failed")

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        if self.fails == "prepare":
            raise ValueError("prepare failed")


@pytest.mark.parametrize("hook", ["pre_replay", "prepare"])
@pytest.mark.parametrize(("step", "requests"), [("run", 3), ("replay", 3), ("run", 5)])
def test_what_a_hook_before_a_step_did_to_a_batch_is_undone_where_the_step_fails(
    hook: str, step: str, requests: int
) -> None:
    engine = Shifting(max_bs=8)
    with captured(engine, bs=[4]) as runner:
        batch = engine.batch([4] * requests)
        given = vars(batch).copy()
        engine.fails = hook
        with pytest.raises(ValueError, match=f"{hook} failed"):
            getattr(runner, step)(batch)
        assert vars(batch).keys() == given.keys()
        assert all(vars(batch)[name] is value for name, value in given.items())
        engine.fails = None
        again = getattr(runner, step)(batch).clone()
        assert batch.was_shifted
        assert torch.equal(again, runner.run(engine.batch([4] * requests)))


@pytest.mark.parametrize("hook", ["prepare", "upgrade"])
def test_a_failure_while_preparing_leaves_batch_and_runner_usable(hook: str) -> None:
    engine = Recorded(max_bs=4)
    with captured(engine, bs=[4]) as runner:
        batch = engine.batch([3, 5])
        given = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        engine.fail = hook
        with pytest.raises(ValueError, match=f"{hook} failed"):
            runner.run(batch)
        engine.fail = None
        assert all(torch.equal(getattr(batch, name), value) for name, value in given.items())
        assert runner.metrics().steps == 0
        assert runner.run(batch).shape == (2, 32)


class Variants(ToyEngine):
    variants = (None, "lora")

    def variant(self, batch: Any) -> str | None:
        return batch.extras.get("variant")

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        label = self.variant(batch) if key is None else key.variant_label
        batch.extras = {**batch.extras, "shift": 100.0 if label == "lora" else 0.0}

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) + batch.extras["shift"]


def test_variants_of_a_bucket_are_graphs_of_their_own() -> None:
    engine = Variants(max_bs=4)
    with captured(engine, bs=[2, 4]) as runner:
        assert set(runner.graphs) == {dg.ShapeKey(size, None, label) for size in (2, 4) for label in (None, "lora")}
        for label in (None, "lora", None, "lora"):
            batch = engine.batch([3, 4])
            batch.extras["variant"] = label
            want = ToyEngine(max_bs=4).forward(batch) + (100.0 if label else 0.0)
            assert torch.equal(runner.run(batch), want)
        batch.extras["variant"] = "other"
        assert runner.can_run(batch).code == "variant-unknown"


@pytest.mark.parametrize("variants", ["lora", [1], 5, [None, b"x"]])
def test_variants_that_are_no_sequence_of_labels_are_refused(variants: Any) -> None:
    engine = ToyEngine()
    engine.variants = variants
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(engine)
    assert caught.value.code == "variants-invalid"


def test_a_variant_that_is_named_twice_is_captured_once() -> None:
    engine = Variants(max_bs=2)
    engine.variants = ["lora", None, "lora"]
    with runner_for(engine, bs=[2]) as runner:
        assert [bucket.key.variant_label for bucket in runner.capture().captured] == ["lora", None]


def test_a_variant_hook_without_variants_is_refused() -> None:
    class Wrong(ToyEngine):
        def variant(self, batch: Any) -> str | None:
            return None

    with pytest.raises(dg.ConfigError, match="no `variants`"):
        runner_for(Wrong())


# Bad input and failures.


def test_a_field_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine, bs=[4]) as runner:
        runner.run(engine.batch([3, 5, 2, 4]))
        before = {slot.name: slot.buffer.clone() for slot in runner.buffer_registry.slots}
        batch = engine.batch([3, 5])
        batch.seq_lens = batch.seq_lens[:1]
        with pytest.raises(dg.SlotError) as caught:
            runner.run(batch)
        assert caught.value.slot == "seq_lens"
        for slot in runner.buffer_registry.slots:
            assert torch.equal(slot.buffer, before[slot.name]), slot.name


def test_a_forward_that_reads_a_value_on_the_host_is_refused_by_name_and_place() -> None:
    class Reads(ToyEngine):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)[: batch.seq_lens.max().item()]

    with pytest.raises(dg.CaptureError) as caught:
        captured(Reads(max_bs=4), bs=[2, 4])
    error = caught.value
    assert (error.code, error.phase, error.shape_key) == ("host-read", "decode", dg.ShapeKey(4))
    assert error.operator == "aten::_local_scalar_dense"
    assert isinstance(error.__cause__, dg.CaptureError)


class FailsAt(ToyEngine):
    def __init__(self, bucket: int, error: Exception, in_capture_only: bool = False) -> None:
        super().__init__(max_bs=8)
        self.bucket, self.error, self.in_capture_only, self.armed = bucket, error, in_capture_only, True

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        capturing = dg.get_device_adapter("cpu").is_capturing()
        if self.armed and batch.batch_size == self.bucket and (capturing or not self.in_capture_only):
            raise self.error
        return output


def test_a_forward_may_read_in_a_capture_what_a_slot_holds_on_the_host() -> None:
    class Planned(ToyEngine):
        def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
            batch = super().make_batch(views, key)
            batch.extras["lengths"] = views["seq_lens_cpu"]
            return batch

        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) * int(batch.extras["lengths"].max())

    with runner_for(Planned(max_bs=4), bs=[2, 4]) as runner:
        assert len(runner.capture().captured) == 2


@pytest.mark.parametrize("in_capture_only", [False, True])
def test_a_failure_at_one_bucket_is_named_and_chained_and_leaves_no_graph(in_capture_only: bool) -> None:
    error = ValueError("from the model")
    engine = FailsAt(4, error, in_capture_only)
    adapter = dg.get_device_adapter("cpu")
    with runner_for(engine, bs=[2, 4, 8]) as runner:
        enabled, stream = gc.isenabled(), adapter.current_stream()
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert (caught.value.code, caught.value.shape_key) == ("forward-failed", dg.ShapeKey(4))
        assert "bucket 4" in str(caught.value)
        assert "from the model" in str(caught.value)
        assert caught.value.__cause__ is error
        assert not runner.graphs
        assert not runner.backend.captured
        assert (gc.isenabled(), adapter.current_stream(), adapter.is_capturing()) == (enabled, stream, False)
        assert not dg.get_is_capture_mode()
        batch = engine.batch([3, 3])
        assert torch.equal(runner.run(batch), eager(engine, batch))
        engine.armed = False
        assert len(runner.capture().captured) == 3
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_kept_error_of_a_failed_capture_keeps_no_memory_of_the_pool() -> None:
    engine = FailsAt(4, ValueError("from the model"), in_capture_only=True)
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    with runner_for(engine, bs=[4], graph_pool=pool) as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        gc.collect()
        assert pool.handle.live_bytes == 0
        assert "raise self.error" in "".join(__import__("traceback").format_exception(caught.value))


def test_a_bucket_that_runs_out_of_memory_is_dropped_and_the_others_serve() -> None:
    engine = FailsAt(8, torch.OutOfMemoryError("out of memory"))
    with runner_for(engine, bs=[2, 4, 8]) as runner:
        report = runner.capture()
        assert [b.key.size for b in report.captured] == [4, 2]
        assert [(d.key.size, "out of memory" in d.reason) for d in report.dropped] == [(8, True)]
        assert runner.can_run(engine.batch([3] * 3)).key == dg.ShapeKey(4)
        assert runner.can_run(engine.batch([3] * 5)).code == "bucket-dropped"
    with runner_for(engine, bs=[2, 4, 8], on_error="raise") as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert caught.value.code == "out-of-memory"
        assert not runner.graphs


def test_the_batches_of_a_dropped_bucket_go_to_the_next_larger_graph_where_they_may_be_padded() -> None:
    engine = ToyEngine(max_bs=8)
    with captured(engine, bs=[2, 4, 8]) as runner:
        runner.drop_graph(dg.ShapeKey(4))
        batch = engine.batch([3, 5, 4])
        assert runner.can_run(batch).key == dg.ShapeKey(8)
        assert torch.equal(runner.run(batch), eager(engine, batch))
        runner.drop_graph(dg.ShapeKey(8))
        assert runner.can_run(batch).code == "bucket-dropped"
    with captured(engine, bs=[2, 4, 8], padding=False) as runner:
        runner.drop_graph(dg.ShapeKey(4))
        assert runner.can_run(engine.batch([3] * 4)).code == "bucket-dropped"


def test_closing_the_runner_in_the_middle_of_a_capture_ends_it() -> None:
    engine = ToyEngine(max_bs=4)
    runner = runner_for(engine, progress=lambda event: runner.close())
    with pytest.raises(dg.ReplayError) as caught:
        runner.capture()
    assert caught.value.code == "closed"
    assert not runner.graphs
    assert not runner.backend.captured


def test_a_capture_that_left_nothing_is_not_called_no_capture() -> None:
    engine = FailsAt(4, torch.OutOfMemoryError("out of memory"))
    with runner_for(engine, bs=[4]) as runner:
        assert runner.can_run(engine.batch([3])).code == "not-captured"
        assert len(runner.capture().dropped) == 1
        assert runner.can_run(engine.batch([3])).code == "nothing-captured"


def test_an_interrupt_in_a_capture_passes_through_and_leaves_no_graph() -> None:
    class Interrupted(ToyEngine):
        def forward(self, batch: Any) -> Any:
            if batch.batch_size == 2:
                raise KeyboardInterrupt
            return super().forward(batch)

    with runner_for(Interrupted(max_bs=4), bs=[2, 4]) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.capture()
        assert not runner.graphs
        assert gc.isenabled()


def test_what_fails_between_graphs_is_a_capture_error_with_its_cause() -> None:
    error = ValueError("from the hook")

    def fail(event: dg.CaptureProgress) -> None:
        raise error

    with runner_for(ToyEngine(max_bs=4), progress=fail) as runner:
        with pytest.raises(dg.CaptureError, match="from the hook") as caught:
            runner.capture()
        assert (caught.value.code, caught.value.__cause__) == ("capture-failed", error)
        assert not runner.graphs


def test_metadata_that_fails_in_capture_is_a_capture_error() -> None:
    engine = Recorded(max_bs=4)
    engine.fail = "prepare"
    with runner_for(engine) as runner:
        with pytest.raises(dg.CaptureError, match="prepare failed") as caught:
            runner.capture()
        assert isinstance(caught.value.__cause__, ValueError)


def test_replay_before_capture_and_after_close_and_while_paused_is_refused() -> None:
    engine = ToyEngine(max_bs=4)
    runner = runner_for(engine)
    batch = engine.batch([3])
    with pytest.raises(dg.ReplayError) as caught:
        runner.replay(batch)
    assert caught.value.code == "not-captured"
    runner.capture()
    runner.pause()
    runner.pause()
    for step in (runner.run, runner.replay, runner.can_run, runner.replay_prepare):
        with pytest.raises(dg.ReplayError) as caught:
            step(batch)
        assert caught.value.code == "paused"
    runner.resume()
    assert torch.equal(runner.run(batch), eager(engine, batch))
    runner.close()
    runner.close()
    anew = (
        lambda _: runner.capture(),
        lambda _: runner.resume(),
        lambda _: runner.pause(),
        lambda _: runner.__enter__(),
    )
    for step in (runner.run, runner.replay, runner.can_run, *anew):
        with pytest.raises(dg.ReplayError) as caught:
            step(batch)
        assert caught.value.code == "closed"


@pytest.mark.parametrize("backend", ["full", "disabled"])
def test_a_closed_runner_captures_estimates_and_audits_nothing_whatever_its_backend(backend: str) -> None:
    engine = ToyEngine(max_bs=4)
    runner = runner_for(engine, backend=backend)
    runner.close()
    for ask in (runner.capture, runner.estimate_capture, runner.audit, lambda: runner.capture_one_shape(4)):
        with pytest.raises(dg.ReplayError, match="closed"):
            ask()
    assert engine.forwards == []


def test_a_decision_for_a_graph_that_was_dropped_since_is_refused() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine, bs=[2, 4]) as runner:
        batch = engine.batch([3, 5])
        decision = runner.can_run(batch)
        runner.drop_graph(decision.key)
        for step in (runner.replay, runner.replay_prepare):
            with pytest.raises(dg.ReplayError) as caught:
                step(batch, decision)
            assert caught.value.code == "bucket-dropped"
        assert runner.can_run(batch).key == dg.ShapeKey(4)


def test_functions_of_slots_get_what_the_stage_before_has_sent_in_every_step() -> None:
    engine, seen = ToyEngine(max_bs=4), []
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    registry.register_slot(
        dg.GraphSlot(
            "given", lambda bs, tokens: (bs,), torch.int64, axis="bs",
            source_fn=lambda batch, context: seen.append(context.pp_proxy_tensors),
        )
    )  # fmt: skip
    batches = [engine.batch([3, 5]) for _ in range(2)]
    for sent, batch in enumerate(batches):
        batch.pp_proxy_tensors = {"sent": sent}
    with captured(engine, bs=[4], registry=registry) as runner:
        seen.clear()
        for batch in batches:
            runner.run(batch)
    assert seen == [{"sent": 0}, {"sent": 1}]


def test_a_pause_waits_for_the_work_in_flight() -> None:
    with captured(ToyEngine(max_bs=4)) as runner:
        with mock.patch.object(runner.adapter, "synchronize", wraps=runner.adapter.synchronize) as waits:
            runner.pause()
        assert waits.call_count == 1


def test_static_buffers_can_be_filled_by_hand() -> None:
    engine, proxies, seen = ToyEngine(max_bs=4), object(), []
    with captured(engine) as runner:
        slot = dg.GraphSlot("given", lambda bs, tokens: (bs,), torch.int64, axis="bs",
                            source_fn=lambda batch, context: seen.append(context.pp_proxy_tensors))  # fmt: skip
        runner.buffer_registry.register_slot(slot)
        batch = engine.batch([3, 5, 2])
        sizes = {"raw_bs": 3, "padded_bs": 4, "raw_num_tokens": 3, "padded_num_tokens": 4}
        runner.populate_from_forward_batch(batch, **sizes, pp_proxy_tensors=proxies)
        assert runner.buffer_registry.get_slot("seq_lens").buffer.tolist() == [3, 5, 2, 1]
        assert torch.equal(runner.buffer_registry.get_slot("input_ids").buffer[:3], batch.input_ids)
        assert seen == [proxies]


def test_replay_of_a_batch_that_the_decision_was_not_made_for_is_refused_and_not_counted() -> None:
    class Sized(ToyEngine):
        def sizes(self, batch: Any) -> tuple[int, int]:
            return batch.batch_size, batch.input_ids.shape[0]

    registry = dg.CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4)
    registry.register_slot(dg.GraphSlot("input_ids", lambda bs, tokens: (tokens,), torch.int64))
    engine = Sized()
    engine.forward = lambda batch: batch.input_ids * 2  # type: ignore[method-assign]
    engine.make_batch = lambda views, key: dg.StaticBatch(**views, batch_size=key.size)  # type: ignore[method-assign]
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]), registry=registry) as runner:
        runner.capture()
        decision = runner.can_run(dg.StaticBatch(input_ids=torch.arange(2), batch_size=2))
        with pytest.raises(dg.ReplayError, match=r"\[not-uniform\]"):
            runner.replay(dg.StaticBatch(input_ids=torch.arange(1), batch_size=2), decision)
        assert runner.metrics().steps == 0


def test_replay_of_a_batch_above_the_largest_bucket_says_so() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine, bs=[2]) as runner:
        with pytest.raises(dg.ReplayError) as caught:
            runner.replay(engine.batch([3] * 3))
        assert caught.value.code == "above-largest"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"backend": "full", "bs": [1], "graph_pool": 5}, "wrong-type"),
        ({"registry": {}}, "wrong-type"),
        ({"output_axes": [0]}, "wrong-type"),
        ({"num_tokens_per_bs": 9}, "limit-invalid"),
        ({"order": "sideways"}, "choice-unknown"),
        ({"on_error": "ignore"}, "choice-unknown"),
        ({"mode": "prefill"}, "choice-unknown"),
        ({"num_tokens_per_bs": 0}, "limit-invalid"),
        ({"num_tokens_per_bs": True}, "limit-invalid"),
    ],
)
def test_an_argument_that_is_none_of_its_choices_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(ToyEngine(), **options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"config": {"decode": {"backend": "full"}}},
            "config: {'decode': {'backend': 'full'}} is no `CudaGraphConfig`",
        ),
        ({"config": None}, "config: None is no `CudaGraphConfig`"),
        ({"backend": "full"}, "backend: 'full' is no `BaseCudaGraphBackend`"),
    ],
)
def test_an_argument_of_another_class_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        dg.DecodeCudaGraphRunner(ToyEngine(), **{"config": dg.CudaGraphConfig(), **options})
    assert (caught.value.code, caught.value.message) == ("wrong-type", said)


@pytest.mark.parametrize("missing", ["device", "limits", "forward"])
def test_an_engine_that_lacks_what_is_needed_is_refused_by_name(missing: str) -> None:
    members = {"device": "cpu", "limits": dg.Limits(4, 4), "forward": lambda batch: batch.input_ids}
    del members[missing]
    with pytest.raises(dg.ConfigError, match=f"has no `{missing}`") as caught:
        runner_for(SimpleNamespace(**members))
    assert caught.value.code == "engine-incomplete"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", None, 2**20 + 1, 10**400])
def test_a_limit_that_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(dg.ConfigError, match=r"limits\.max_bs: .* is not an integer from 1 to 1048576") as caught:
        dg.Limits(max_bs=value, max_num_tokens=4)
    assert caught.value.code == "limit-invalid"


def test_sizes_may_be_the_integers_of_other_libraries() -> None:
    engine = ToyEngine(max_bs=4)
    engine.limits = dg.Limits(torch.tensor(4), torch.tensor(4))
    assert engine.limits == dg.Limits(4, 4)
    batch = engine.batch([3, 5])
    want = eager(engine, batch)
    batch.batch_size = torch.tensor(2)
    with captured(engine) as runner:
        assert torch.equal(runner.run(batch), want)
        batch.batch_size = 2.0
        with pytest.raises(dg.SlotError) as caught:
            runner.run(batch)
        assert caught.value.code == "not-a-size"
        batch.batch_size, count = 2, torch.tensor(2)
        runner.hooks.sizes = lambda batch: (batch.batch_size, count)
        assert torch.equal(runner.run(batch), want)
        count = 2.0
        with pytest.raises(dg.SlotError) as caught:
            runner.can_run(batch)
        assert caught.value.code == "not-a-size"


def test_a_batch_whose_size_is_not_known_is_refused() -> None:
    with captured(ToyEngine()) as runner:
        for batch in ({"batch_size": 1}, SimpleNamespace(), None):
            with pytest.raises(dg.ReplayError) as caught:
                runner.run(batch)
            assert caught.value.code == "sizes-unknown"


@pytest.mark.parametrize("given", [3, None, (3,), (3, 3, 3), (-1, -1), (3, -1)], ids=str)
def test_sizes_that_are_no_pair_are_refused_as_the_hook_gave_them(given: Any) -> None:
    engine: Any = ToyEngine()
    engine.sizes = lambda batch: given
    with captured(engine) as runner, pytest.raises(dg.ReplayError) as caught:
        runner.can_run(engine.batch([3]))
    assert str(caught.value).startswith(
        f"the engine's `sizes` gave `{given}`, no pair of sizes [sizes-unknown]\n\nhint: "
    )


def test_batches_may_be_mappings() -> None:
    engine = ToyEngine(max_bs=4)
    forward = engine.forward
    engine.forward = lambda batch: forward(SimpleNamespace(**batch) if isinstance(batch, dict) else batch)
    batch = engine.batch([3, 5])
    want = eager(engine, batch)
    with captured(engine) as runner:
        assert torch.equal(runner.run(vars(batch)), want)


def test_a_registry_that_is_too_small_for_the_largest_bucket_is_refused() -> None:
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(ToyEngine(max_bs=8), registry=registry)
    assert caught.value.code == "registry-too-small"
    assert "the largest bucket has 8 and 8" in str(caught.value)
    runner_for(ToyEngine(max_bs=8), registry=registry, max_bs=4).close()


def test_an_unknown_capture_error_mode_is_refused() -> None:
    with pytest.raises(dg.BackendError) as caught:
        runner_for(ToyEngine(), capture_error_mode="lax")
    assert caught.value.code == "capture-error-mode-unknown"


# Memory and life.


def test_recapture_reads_no_live_row_and_serves_again() -> None:
    engine = ToyEngine(max_bs=4)
    with captured(engine) as runner:
        batch = engine.batch([3, 5, 2])
        want = runner.run(batch).clone()
        live = engine.cache[1:].clone()
        addresses = {slot.name: slot.buffer.data_ptr() for slot in runner.buffer_registry.slots}
        runner.capture()
        assert torch.equal(engine.cache[1:], live)
        assert {slot.name: slot.buffer.data_ptr() for slot in runner.buffer_registry.slots} == addresses
        assert torch.equal(runner.run(batch), want)


def test_indices_of_earlier_steps_are_gone_in_a_capture_also_beyond_its_bucket() -> None:
    seen: list[bool] = []

    class WholeTable(ToyEngine):
        def prepare_metadata(self, batch: Any, key: Any) -> None:
            seen.append(bool(registry.get_slot("req_pool_indices").buffer.any()))

    engine = WholeTable(max_bs=4)
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    with captured(engine, bs=[1, 4], registry=registry, order="ascending") as runner:
        seen.clear()
        runner.run(engine.batch([3, 5, 2]))
        runner.capture()
    assert seen == [True, False, False]


def test_the_batch_of_a_capture_is_nobodys_whatever_the_last_step_has_left() -> None:
    seen: list[list[int]] = []

    class Planned(ToyEngine):
        def prepare_metadata(self, batch: Any, key: Any) -> None:
            seen.append(batch.seq_lens.tolist())

    engine = Planned(max_bs=4)
    with captured(engine, bs=[2, 4]) as runner:
        runner.run(engine.batch([3, 5, 2]))
        assert seen[-1] == [3, 5, 2, 1]
        seen.clear()
        runner.capture()
        assert seen == [[1] * 4, [1] * 2]


def test_a_capture_begins_without_the_graphs_of_the_one_before() -> None:
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    graphs: list[int] = []
    with runner_for(ToyEngine(max_bs=4), graph_pool=pool, progress=lambda event: graphs.append(pool.graphs)) as runner:
        runner.capture()
        runner.capture()
    assert graphs == [1, 2, 3] * 2


@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_buckets_are_captured_in_the_order_asked_for(order: str) -> None:
    engine = ToyEngine(max_bs=8)
    with runner_for(engine, order=order) as runner:
        sizes = [bucket.key.size for bucket in runner.capture().captured]
        assert sizes == sorted([1, 2, 4, 8], reverse=order == "descending")


def test_smaller_buckets_take_no_memory_beside_the_largest() -> None:
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    with captured(ToyEngine(max_bs=64), graph_pool=pool, bs=[64]):
        alone = pool.handle.peak_bytes
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    with captured(ToyEngine(max_bs=64), graph_pool=pool) as runner:
        assert len(runner.graphs) > 8
        assert pool.handle.peak_bytes == alone


def test_what_a_graph_reads_stays_alive_when_an_eager_step_replaces_it() -> None:
    """A workspace that grows in a large eager step must not take the old one from the graphs that hold its address."""

    class Workspace(ToyEngine):
        def __init__(self) -> None:
            super().__init__(max_bs=8)
            self.workspace = torch.zeros(4, 32)

        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            if len(logits) > len(self.workspace):
                self.workspace = torch.zeros(len(logits), 32)
            return self.workspace[: len(logits)].copy_(logits) + 1

    engine = Workspace()
    with captured(engine, bs=[4], graph_pool=dg.GraphMemoryPool(dg.get_device_adapter("cpu"))) as runner:
        old = weakref.ref(engine.workspace.untyped_storage())
        small = engine.batch([3, 5, 2])
        want = eager(ToyEngine(max_bs=8), small) + 1
        assert torch.equal(runner.run(small), want)
        assert runner.can_run(engine.batch([3] * 8)).code == "above-largest"
        runner.run(engine.batch([3] * 8))
        assert old() is not None
        engine.cache.zero_()
        assert torch.equal(runner.run(small), want)
    gc.collect()
    assert old() is None


def test_close_lets_go_of_graphs_outputs_and_buffers() -> None:
    engine = ToyEngine(max_bs=4)
    gc.collect()
    before = len(TapeMemory.all())
    runner = captured(engine, graph_pool=dg.GraphMemoryPool(dg.get_device_adapter("cpu")))
    runner.run(engine.batch([3]))
    output = weakref.ref(runner.backend.captured[dg.ShapeKey(1)].output)
    buffer = weakref.ref(runner.buffer_registry.get_slot("input_ids").buffer)
    assert output() is not None
    assert buffer() is not None
    runner.close()
    del runner
    gc.collect()
    assert output() is None
    assert buffer() is None
    assert len(TapeMemory.all()) == before


def test_a_closed_runner_that_somebody_keeps_holds_none_of_the_graphs_that_it_replayed() -> None:
    engine = ToyEngine(max_bs=4)
    runner = captured(engine)
    runner.run(engine.batch([3]))
    graphs = [weakref.ref(graph) for graph in runner.graphs.values()]
    runner.close()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3


def test_two_runners_of_one_pool_take_turns_and_closing_one_leaves_the_other() -> None:
    engine, other = ToyEngine(max_bs=4), ToyEngine(max_bs=4, tokens_per_request=2)
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    first, second = captured(engine, graph_pool=pool), captured(other, graph_pool=pool)
    for seed in range(3):
        batch, wide = engine.batch([3, 5, 2], seed), other.batch([3, 5, 2], seed)
        assert torch.equal(first.run(batch), eager(engine, batch))
        assert torch.equal(second.run(wide), eager(other, wide))
    first.close()
    assert torch.equal(second.run(wide), eager(other, wide))
    second.close()
    assert pool.graphs == 0


def test_capture_runs_no_garbage_collection_inside() -> None:
    seen: list[bool] = []

    class Watches(ToyEngine):
        def forward(self, batch: Any) -> Any:
            seen.append(gc.isenabled())
            return super().forward(batch)

    collections: list[str] = []
    callback = lambda phase, info: collections.append(phase)  # noqa: E731
    with runner_for(Watches(max_bs=8)) as runner:
        gc.callbacks.append(callback)
        try:
            report = runner.capture()
        finally:
            gc.callbacks.remove(callback)
    assert not any(seen)
    assert len(report.captured) > 2
    assert collections.count("start") == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_on_or_off_after_nested_freezes_as_it_was_before(enabled: bool) -> None:
    frozen = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with dg.freeze_gc():
            with pytest.raises(ZeroDivisionError), dg.freeze_gc():
                _ = 1 / 0
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with dg.freeze_gc(enable_cudagraph_gc=True):
            assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen


def test_what_became_garbage_in_a_freeze_goes_with_it_also_where_the_collector_is_off() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    try:
        with dg.freeze_gc():
            garbage = weakref.ref(Node())
        assert garbage() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_set_aside", [False, True])
def test_what_was_there_before_a_freeze_is_set_aside_in_it_but_for_what_others_set_aside(is_set_aside: bool) -> None:
    gc.unfreeze()
    gc.collect()  # sets aside what is immortal
    if is_set_aside:
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        with dg.freeze_gc():
            within = gc.get_freeze_count()
        gc.collect()
        assert (within == before) is is_set_aside
        assert gc.get_freeze_count() == before
    finally:
        gc.freeze()  # as tests/conftest.py did


def test_the_forward_can_ask_whether_it_is_captured() -> None:
    modes: list[bool] = []

    class Asks(ToyEngine):
        def forward(self, batch: Any) -> Any:
            modes.append(dg.get_is_capture_mode())
            return super().forward(batch)

    engine = Asks(max_bs=2)
    with runner_for(engine, bs=[1]) as runner:
        runner.capture()
        runner.run(engine.batch([3, 3]))
    assert modes == [True, True, True, False]


def test_progress_is_told_of_every_graph() -> None:
    events: list[Any] = []
    with runner_for(ToyEngine(max_bs=4), progress=events.append) as runner:
        runner.capture()
    assert [(e.phase, e.key.size, e.done, e.total) for e in events] == [
        ("decode", 4, 1, 3),
        ("decode", 2, 2, 3),
        ("decode", 1, 3, 3),
    ]


def test_sizes_to_capture_follow_configuration_and_limits() -> None:
    engine = ToyEngine(max_bs=6)
    assert dg.get_batch_sizes_to_capture(engine, config=config()) == ([1, 2, 4, 6], [])
    assert dg.get_batch_sizes_to_capture(engine, config=config(max_bs=4)) == ([1, 2, 4], [])
    assert dg.get_batch_sizes_to_capture(engine, config=config(bs=[8, 1, 4, 4, 2, 64])) == ([1, 2, 4, 6], [])
    assert dg.get_batch_sizes_to_capture(engine, config=config(bs=[3], backend="tc_piecewise")) == ([3], [3])
    engine.limits = dg.Limits(max_bs=6, max_num_tokens=9)
    assert dg.get_batch_sizes_to_capture(engine, config=config(), num_tokens_per_bs=3) == ([1, 2, 3], [])
    assert dg.get_batch_sizes_to_capture(engine, config=config(), num_tokens_per_bs=9) == ([1], [])
    assert isinstance(engine.batch([3]), Batch)


@pytest.mark.parametrize(("streams", "count"), [(12, 3), (15, 3), (16, 4), (3, 1)])
def test_no_more_buckets_are_captured_than_the_device_has_streams_for(
    streams: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(dg.get_device_adapter("cpu")), "stream_limit", streams)
    engine = Variants(max_bs=8)
    engine.variants, engine.streams_per_graph = ("one", "other"), 2
    sizes, _ = dg.get_batch_sizes_to_capture(engine, config=config(bs=[1, 2, 3, 4, 8]))
    assert len(sizes) == count
    assert max(sizes) == 8


def test_a_bucket_is_a_multiple_of_what_gives_each_rank_its_tokens() -> None:
    for tokens, unit in ((1, 4), (2, 2), (4, 1), (6, 2), (8, 1)):
        engine = ToyEngine(max_bs=12, tokens_per_request=tokens)
        registry = dg.build_decode_registry(
            device="cpu", max_bs=12, max_num_token=12 * tokens, seq_len_fill_value=1, num_tokens_per_bs=tokens
        )
        registry.token_alignment = 4
        runner = runner_for(engine, registry=registry, bs=[4, 12])
        assert runner.bucket_unit == unit
        registry.register_slot(
            dg.GraphSlot(
                "pairs", lambda bs, tokens: (bs // 2,), torch.int64, axis="bs",
                slice_fn=lambda buffer, size: buffer[: size // 2],
            )
        )  # fmt: skip
        halved = runner_for(engine, registry=registry, bs=[4, 12], tbo=dg.TboCudaGraphRunnerPlugin())
        assert (halved.alignment, halved.bucket_unit) == ((4, 8), math.lcm(4, 2 * unit))


def test_buffers_are_as_large_as_the_largest_bucket() -> None:
    for largest in (1, 3):
        registry = runner_for(ToyEngine(max_bs=4, tokens_per_request=2), bs=[1, largest]).buffer_registry
        assert (registry.max_bs, registry.max_num_tokens) == (largest, 2 * largest)


def test_an_engine_with_nothing_but_a_forward_and_a_batch_works() -> None:
    class Minimal:
        device = torch.device("cpu")
        limits = dg.Limits(max_bs=4, max_num_tokens=4)

        def forward(self, batch: Any) -> torch.Tensor:
            return batch.input_ids[:, None] * 10 + batch.positions[:, None]

    batch = dg.StaticBatch(batch_size=3, input_ids=torch.tensor([1, 2, 3]), positions=torch.tensor([4, 5, 6]))
    with dg.DecodeCudaGraphRunner(Minimal(), config=dg.CudaGraphConfig()) as runner:
        runner.capture()
        assert runner.run(batch).tolist() == [[14], [25], [36]]
        assert runner.metrics().hit_rate == 1.0
