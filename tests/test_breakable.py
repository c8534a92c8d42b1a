"""Breakable captures on the CPU tape: what runs in a break, what crosses it, and what lives as long as the graph."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import devicegraph as dg
from break_cases import CASES
from devicegraph.backends.breakable import BreakableCudaGraphBackend

ADAPTER = dg.get_device_adapter("cpu")
X = torch.zeros(8, 4)


def backend(**options: Any) -> BreakableCudaGraphBackend:
    options.setdefault("graph_pool", dg.GraphMemoryPool(ADAPTER))
    return BreakableCudaGraphBackend(ADAPTER, phase="prefill", **options)


def capture(of: BreakableCudaGraphBackend, key: Any, forward: Any) -> Any:
    with torch.no_grad(), of.capture_session():
        return of.capture_one(key, forward)


class Layers:
    """Segment, break, segment, break, segment: the breaks see how often they run and with what."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[int] = []
        self.bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.attend = dg.eager_on_graph(**options)(self._attend) if options else dg.eager_on_graph(self._attend)

    def _attend(self, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls.append(len(hidden))
        return hidden.cumsum(0) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.attend((x + self.bias) * 2, 0.5)
        return self.attend(hidden + x, 2.0) - 1


def test_marks_do_nothing_outside_of_a_breakable_capture() -> None:
    layers = Layers()
    want = Layers().forward(X)
    assert torch.equal(layers.forward(X), want)
    dg.break_graph()
    full = dg.FullCudaGraphBackend(ADAPTER, phase="decode")
    with full.capture_session():
        output = full.capture_one("x", lambda: layers.forward(X))
    calls = len(layers.calls)
    full.replay("x", None)
    assert torch.equal(output, want)
    assert len(layers.calls) == calls
    full.cleanup()


@pytest.mark.parametrize("case", CASES)
def test_the_cases_that_a_gpu_is_held_to_hold_on_the_tape(case: Any) -> None:
    case(ADAPTER)


def test_what_crosses_a_break_goes_with_its_graph_also_where_the_collector_is_off() -> None:
    layers, of = Layers(), backend()
    capture(of, "x", lambda: layers.forward(X))
    crossing = [weakref.ref(step) for step in of.captured["x"].recording.breaks]
    memory = of.graph_pool.handle
    assert memory.live_bytes > 0
    gc.disable()
    try:
        of.cleanup()
        assert [reference() for reference in crossing] == [None, None]
        assert memory.live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("order", [(1, 4, 8), (8, 4, 1), (4, 8, 1)])
def test_the_shared_output_is_as_large_as_the_largest_whatever_the_order(order: tuple[int, ...]) -> None:
    layers, of = Layers(), backend()
    of.size_outputs(layers.forward(X))
    outputs = {size: capture(of, size, lambda size=size: layers.forward(X[:size])) for size in order}
    assert len({output.data_ptr() for output in outputs.values()}) == 1
    addresses = {size: output.data_ptr() for size, output in outputs.items()}
    X.copy_(torch.randn(8, 4))
    for size in (1, 8, 4, 8):
        got = of.replay(size, None)
        assert got.data_ptr() == addresses[size]
        assert torch.equal(got, Layers().forward(X[:size]))
    of.cleanup()


def test_an_output_that_grows_beyond_what_was_told_leaves_earlier_graphs_where_they_are() -> None:
    layers, of = Layers(), backend()
    small = capture(of, 2, lambda: layers.forward(X[:2]))
    address = small.data_ptr()
    large = capture(of, 8, lambda: layers.forward(X))
    X.copy_(torch.randn(8, 4))
    assert torch.equal(of.replay(2, None), Layers().forward(X[:2]))
    assert small.data_ptr() == address != large.data_ptr()
    assert torch.equal(of.replay(8, None), Layers().forward(X))
    of.cleanup()


@dataclass
class Nested:
    logits: torch.Tensor
    rest: dict[str, Any]


def test_nested_outputs_are_shared_leaf_by_leaf() -> None:
    layers, of = Layers(), backend()

    def forward(size: int) -> Nested:
        hidden = layers.forward(X[:size])
        return Nested(hidden, {"sum": hidden.sum(1), "t": (hidden.t() * 2, None), "name": "x"})

    for size in (8, 3):
        capture(of, size, lambda size=size: forward(size))
    X.copy_(torch.randn(8, 4))
    for size in (3, 8, 3):
        got, want = of.replay(size, None), forward(size)
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.rest["sum"], want.rest["sum"])
        assert torch.equal(got.rest["t"][0], want.rest["t"][0])
        assert (got.rest["t"][1], got.rest["name"]) == (None, "x")
    of.cleanup()


def test_tensors_that_cross_a_break_live_as_long_as_the_capture_and_no_longer() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    @dg.eager_on_graph
    def attend(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(hidden))
        return hidden * 2

    def forward() -> torch.Tensor:
        crossing = attend(X + 1)
        seen.append(weakref.ref(crossing))
        return crossing + 1

    of = backend()
    capture(of, 8, forward)
    del seen[:-2]  # of the capture, not of the warm-ups
    capture(of, 4, lambda: (X[:4] + 1) * 3)
    gc.collect()
    assert all(tensor() is not None for tensor in seen)
    of.discard(8)
    gc.collect()
    assert all(tensor() is None for tensor in seen)
    of.cleanup()


def test_a_break_meets_real_values_while_it_is_captured() -> None:
    seen: list[torch.Tensor] = []

    @dg.eager_on_graph
    def attend(index: torch.Tensor) -> torch.Tensor:
        seen.append(index.clone())
        return torch.arange(100)[index]

    x = torch.arange(4)
    of = backend()
    capture(of, "x", lambda: attend(x * 3 + 1) * 2)
    assert [index.tolist() for index in seen] == [[1, 4, 7, 10]] * 3
    of.cleanup()


def test_a_stub_stands_for_the_function_at_capture_only() -> None:
    stubs: list[int] = []

    def stub(hidden: torch.Tensor, scale: float) -> torch.Tensor:
        stubs.append(len(hidden))
        return torch.empty_like(hidden)

    layers, of = Layers(capture_stub=stub), backend()
    output = capture(of, "x", lambda: layers.forward(X))
    assert (stubs, layers.calls) == ([8, 8], [8] * 4)
    X.copy_(torch.randn(8, 4))
    of.replay("x", None)
    assert torch.equal(output, Layers().forward(X))
    of.cleanup()


@pytest.mark.parametrize("enable", [False, lambda: False])
def test_a_mark_that_is_not_enabled_is_captured(enable: Any) -> None:
    layers, of = Layers(enable=enable), backend()
    capture(of, "x", lambda: layers.forward(X))
    assert of.coverage("x") == dg.Coverage(1, ())
    calls = len(layers.calls)
    of.replay("x", None)
    assert len(layers.calls) == calls
    of.cleanup()


def test_rows_that_a_break_does_not_return_are_zeroed() -> None:
    """What lies there must not be what an earlier step, or nobody, wrote: it may be NaN, and spread."""
    live = 8

    @dg.eager_on_graph
    def attend(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:live] * 2

    of = backend()
    output = capture(of, "x", lambda: attend(X + 1) + 0)
    X.fill_(float("nan"))
    of.replay("x", None)
    assert output.isnan().all()
    X.fill_(1)
    live = 3
    of.replay("x", None)
    assert torch.equal(output, torch.tensor([4.0] * 3 + [0.0] * 5)[:, None].expand(8, 4))
    of.cleanup()


def test_rows_written_in_place_and_returned_in_part_are_zeroed_beyond() -> None:
    live = 8

    @dg.eager_on_graph
    def attend(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out[:live] = hidden[:live] * 2
        return out[:live]

    of = backend()
    X.fill_(1)
    output = capture(of, "x", lambda: attend(X + 1, torch.empty_like(X)) + 0)
    live = 2
    of.replay("x", None)
    assert output[:, 0].tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    of.cleanup()


def test_a_break_may_write_its_arguments_and_return_nothing() -> None:
    cache = torch.zeros(8, 4)

    @dg.eager_on_graph
    def write(hidden: torch.Tensor, out: torch.Tensor) -> None:
        cache.add_(hidden)
        out.copy_(cache)

    def forward() -> torch.Tensor:
        out = torch.empty_like(X)
        write(X * 2, out)
        return out + 1

    of = backend()
    X.fill_(1)
    output = capture(of, "x", forward)
    cache.zero_()
    of.replay("x", None)
    of.replay("x", None)
    assert torch.equal(output, torch.full((8, 4), 5.0))
    of.cleanup()


@pytest.mark.parametrize(
    "result",
    [lambda h: h.repeat(2, 1), lambda h: h[0], lambda h: (h, h), lambda h: h[:2, :2]],
    ids=["more rows", "fewer dimensions", "more tensors", "less in two axes"],
)
def test_a_break_that_returns_something_else_than_at_capture_is_named(result: Any) -> None:
    changed = False

    @dg.eager_on_graph
    def attend(hidden: torch.Tensor) -> Any:
        return result(hidden) if changed else hidden * 1

    of = backend()
    capture(of, "x", lambda: attend(X + 1) + 1)
    changed = True
    with pytest.raises(dg.ReplayError, match="attend") as caught:
        of.replay("x", None)
    assert caught.value.code == "break-output"
    of.cleanup()


def test_the_graph_can_be_cut_without_running_anything_in_between() -> None:
    def forward() -> torch.Tensor:
        y = X + 1
        dg.break_graph()
        dg.break_graph()
        return y * 2

    of = backend()
    output = capture(of, "x", forward)
    assert of.coverage("x") == dg.Coverage(2, ())
    X.fill_(3)
    of.replay("x", None)
    assert torch.equal(output, torch.full((8, 4), 8.0))
    of.cleanup()


def test_breaks_inside_of_breaks_are_part_of_the_outer_one() -> None:
    inner = dg.eager_on_graph(lambda x: x + 1)

    @dg.eager_on_graph
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    of = backend()
    output = capture(of, "x", lambda: outer(X * 1) + 1)
    assert len(of.coverage("x").breaks) == 1
    X.fill_(2)
    of.replay("x", None)
    assert torch.equal(output, torch.full((8, 4), 7.0))
    of.cleanup()


def test_coverage_tells_segments_and_breaks() -> None:
    layers, of = Layers(), backend()
    capture(of, "x", lambda: layers.forward(X))
    coverage = of.coverage("x")
    assert (coverage.segments, len(coverage.breaks)) == (3, 2)
    assert str(coverage) == "3 captured segments, 2 breaks\n  2 x test_breakable.Layers._attend"
    of.cleanup()


def test_an_operator_that_is_marked_is_covered_by_its_own_name() -> None:
    of, x = backend(), torch.ones(3)
    for marked in (torch.ops.aten.sin, torch.ops.aten.sin.default):
        forward = dg.eager_on_graph(marked)
        with of.capture_session():
            of.capture_one("x", lambda forward=forward: forward(x) + 1)
        assert of.coverage("x").breaks == (str(marked),)


def test_debug_runs_the_whole_forward_as_one_break() -> None:
    runs: list[int] = []

    def forward() -> torch.Tensor:
        runs.append(1)
        return Layers().forward(X)

    of = backend(debug=True)
    output = capture(of, "x", forward)
    assert of.coverage("x").segments == 0
    X.copy_(torch.randn(8, 4))
    before = len(runs)
    of.replay("x", None)
    assert len(runs) == before + 1
    assert torch.equal(output, Layers().forward(X))
    of.cleanup()


def test_what_is_debugged_meets_the_rows_that_a_graph_would_meet() -> None:
    """Breaks that return live rows only: what is behind them computes with padded ones."""
    live = 8

    def part(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:live] * 2

    def stub(hidden: torch.Tensor) -> torch.Tensor:
        return torch.full_like(hidden, 7)

    marked = dg.eager_on_graph(capture_stub=stub)(part)

    def forward() -> torch.Tensor:
        hidden = marked(X + 1) + X
        dg.break_graph()
        return marked(hidden) + hidden

    outputs = []
    for debug in (False, True):
        of, live = backend(debug=debug), 8
        X.zero_()
        output = capture(of, "x", forward)
        assert output.unique().tolist() == [14]  # the stub's
        steps = []
        for live in (3, 8, 1):
            X.fill_(live)
            of.replay("x", None)
            steps.append(output.clone())
        outputs.append(torch.stack(steps))
        of.cleanup()
    assert torch.equal(*outputs)
    assert outputs[0][:, :, 0].tolist() == [[33.0] * 3 + [3.0] * 5, [78.0] * 8, [15.0] + [1.0] * 7]


def test_whatever_can_be_called_can_be_a_break_and_has_a_name() -> None:
    linear = torch.nn.Linear(4, 4).requires_grad_(False)
    scaled = functools.partial(torch.nn.functional.hardtanh, max_val=2.0)
    of = backend()
    marks = [dg.eager_on_graph(call) for call in (linear, scaled)]
    output = capture(of, "x", lambda: marks[1](marks[0](X + 1)) * 1)
    names = of.coverage("x").breaks
    assert names == ("torch.nn.modules.linear.Linear", "torch.nn.functional.hardtanh")
    X.fill_(3)
    of.replay("x", None)
    assert torch.equal(output, scaled(linear(X + 1)))
    of.cleanup()


def test_the_barrier_comes_after_each_captured_segment_and_never_on_replay() -> None:
    log: list[str] = []
    attend = dg.eager_on_graph(lambda x: (log.append("break"), x * 2)[1])
    of = backend(barrier_fn=lambda: log.append("barrier"))
    capture(of, "x", lambda: attend(attend(X + 1) + 1))
    assert log[-4:] == ["break", "barrier", "break", "barrier"]
    log.clear()
    of.replay("x", None)
    assert log == ["break", "break"]
    of.cleanup()


@pytest.mark.parametrize("where", ["segment", "break"])
def test_a_failure_in_a_segment_or_a_break_leaves_nothing(where: str) -> None:
    armed = True
    seen: list[weakref.ref[torch.Tensor]] = []

    @dg.eager_on_graph
    def attend(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(hidden))
        if armed and where == "break" and len(seen) > 4:
            raise ValueError("in the break")
        return hidden * 2

    def forward() -> torch.Tensor:
        hidden = attend(attend(X + 1) + 1)
        return hidden.sum().item() if armed and where == "segment" and ADAPTER.is_capturing() else hidden + 1

    of = backend()
    with pytest.raises(dg.CaptureError) as caught:
        capture(of, "x", forward)
    assert caught.value.code == ("host-read" if where == "segment" else "forward-failed")
    assert not of.captured
    assert of.graph_pool.graphs == 0
    assert not ADAPTER.is_capturing()
    gc.collect()
    assert of.graph_pool.handle.live_bytes == 0
    armed = False
    output = capture(of, "x", forward)
    of.replay("x", None)
    assert torch.equal(output, ((X + 1) * 2 + 1) * 2 + 1)
    of.cleanup()


def test_the_current_batch_is_that_of_the_step_and_only_while_it_runs() -> None:
    with pytest.raises(RuntimeError, match="outside of a step"):
        dg.current_batch()


def test_what_breaks_make_in_inference_mode_is_refreshed_for_callers_outside_of_it() -> None:
    layers, of = Layers(), backend()
    written: list[bool] = []

    @dg.eager_on_graph
    def write(hidden: torch.Tensor) -> None:
        hidden.mul_(2)
        written.append(hidden.is_inference())

    @torch.inference_mode()
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty_like(x)
        dg.break_graph()
        hidden = layers.attend(x, 1.0) + hidden * 0
        write(hidden)
        return layers.forward(hidden)

    capture(of, 8, lambda: forward(X))
    for values in torch.randn(2, 8, 4):
        X.copy_(values)
        assert torch.equal(of.replay(8, None), Layers().forward(values.cumsum(0) * 2))
    assert not torch.is_inference_mode_enabled()
    of.cleanup()


def test_breaks_compute_no_gradients_whatever_the_mode_of_the_caller() -> None:
    """Parameters in a break would tie what crosses it to a history that every replay makes longer."""
    modes: list[bool] = []
    weight = torch.nn.Parameter(torch.ones(4, 4))

    @dg.eager_on_graph
    def project(hidden: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return hidden @ weight

    of = backend()
    output = capture(of, 8, lambda: project(X + 1) + 1)
    assert torch.is_grad_enabled()
    of.replay(8, None)
    assert not any(modes)
    assert not output.requires_grad
    of.cleanup()


@pytest.mark.parametrize("captured_in", ["the forward", "the caller", "neither"])
@pytest.mark.parametrize("replayed_in", [False, True])
def test_breaks_run_under_the_autocast_of_their_capture(captured_in: str, replayed_in: bool) -> None:
    weight = torch.eye(4) * 3
    project = dg.eager_on_graph(lambda hidden: hidden @ weight)

    def autocast(enabled: bool) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)

    def forward() -> torch.Tensor:
        if captured_in == "the forward":
            with autocast(True):
                return project(X @ weight) + 1
        return project(X @ weight) + 1

    of = backend()
    with autocast(captured_in == "the caller"):
        output = capture(of, 8, forward)
    for values in torch.randn(2, 8, 4):
        X.copy_(values)
        with autocast(captured_in == "the caller"):
            want = forward()
        with autocast(replayed_in):
            of.replay(8, None)
        assert output.dtype == want.dtype
        assert torch.equal(output, want)
    of.cleanup()


# What a break returns, where it is not memory of its own.


def replayed(forward: Any, *, between: Any = lambda: None, want: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a replay gives on other values than those of the capture, and what the forward, or `want`, gives there."""
    of = backend()
    X.fill_(0)
    capture(of, 8, forward)
    X.copy_(torch.arange(float(X.numel())).view_as(X))
    between()
    got = of.replay(8, None).clone()
    of.cleanup()
    with torch.no_grad():
        return got, (want or forward)()


def test_the_rows_of_a_table_of_the_model_are_read_and_never_written() -> None:
    table, start, rows = torch.arange(40.0).view(10, 4), [1], [8]
    kept = table.clone()

    @dg.eager_on_graph
    def part() -> torch.Tensor:
        return table[start[0] : start[0] + rows[0]]

    def padded() -> torch.Tensor:
        out = torch.zeros(8, 4)
        out[: rows[0]] = part()
        return out + X

    for start[0], rows[0] in ((2, 8), (0, 8), (1, 3), (0, 1)):
        chosen = (start[0], rows[0])
        start[0], rows[0] = 1, 8

        def choose(chosen: tuple[int, int] = chosen) -> None:
            start[0], rows[0] = chosen

        got, want = replayed(lambda: part() + X, between=choose, want=padded)
        assert torch.equal(got, want)
        assert torch.equal(table, kept)


def test_a_slice_of_an_argument_leaves_the_argument_alone() -> None:
    live = [0, 2]

    @dg.eager_on_graph
    def last(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[live[0] : live[1]]

    def forward() -> torch.Tensor:
        hidden = X + 1
        return hidden * 100 + last(hidden).sum()

    got, want = replayed(forward, between=lambda: live.__setitem__(slice(None), [3, 5]))
    assert torch.equal(got, want)


def test_an_argument_that_is_returned_stays_the_same_tensor() -> None:
    @dg.eager_on_graph
    def double(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mul_(2)

    def forward() -> torch.Tensor:
        hidden = X + 1
        result = double(hidden)
        result.add_(1)
        return hidden + result

    got, want = replayed(forward)
    assert torch.equal(got, want)


def test_a_stub_that_returns_its_argument_is_found_out() -> None:
    attend = dg.eager_on_graph(capture_stub=lambda hidden: hidden)(lambda hidden: hidden * 10)
    of = backend()
    capture(of, 8, lambda: attend(X + 1))
    with pytest.raises(dg.ReplayError, match="returned a tensor of its own, and one of its arguments when") as caught:
        of.replay(8, None)
    assert caught.value.code == "break-output"


def test_results_on_an_inner_axis_of_one_workspace_are_whole() -> None:
    workspace, rows = torch.zeros(64), [8]

    @dg.eager_on_graph
    def heads(hidden: torch.Tensor) -> torch.Tensor:
        out = workspace[: 2 * rows[0] * 4].view(2, rows[0], 4)
        out.copy_(torch.stack([hidden[: rows[0]], hidden[: rows[0]] * 2]))
        return out

    of = backend()
    capture(of, 8, lambda: heads(X + 1) + 0)
    X.copy_(torch.arange(32.0).view(8, 4))
    for rows[0] in (3, 8, 1):
        got = of.replay(8, None)
        assert torch.equal(got[:, : rows[0]], torch.stack([X + 1, (X + 1) * 2])[:, : rows[0]])
        assert not got[:, rows[0] :].any()


def test_an_expanded_result_is_bridged() -> None:
    expand = dg.eager_on_graph(lambda hidden: hidden[:1].expand(8, 4))
    got, want = replayed(lambda: expand(X + 1) + X)
    assert torch.equal(got, want)


def test_one_tensor_returned_twice_may_be_two_in_a_replay() -> None:
    twice = [True]

    @dg.eager_on_graph
    def pair(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = hidden + 1
        return (result, result) if twice[0] else (result, hidden * 3)

    def forward() -> torch.Tensor:
        first, second = pair(X + 1)
        return first * 10 + second

    got, want = replayed(forward, between=lambda: twice.__setitem__(0, False))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("at_capture", "later"),
    [
        (lambda h: {"k": h, "v": h * 2}, lambda h: {"v": h, "k": h * 2}),
        (lambda h: (h * 1, None), lambda h: (None, h * 1)),
        (lambda h: [h * 1], lambda h: (h * 1,)),
        (lambda h: (h * 1).long(), lambda h: h * 1),
        (lambda h: h * 1, lambda h: None),
        (lambda h: h * 1, lambda h: (h * 1, h * 2)),
    ],
)
def test_a_result_of_another_structure_or_type_is_refused(at_capture: Any, later: Any) -> None:
    chosen = [at_capture]
    part = dg.eager_on_graph(lambda hidden: chosen[0](hidden))

    def forward() -> torch.Tensor:
        result = part(X + 1)
        tensors = result.values() if isinstance(result, dict) else result
        return sum((t for t in tensors if t is not None), X) if not isinstance(result, torch.Tensor) else result + 1

    of = backend()
    capture(of, 8, forward)
    chosen[0] = later
    with pytest.raises(dg.ReplayError) as caught:
        of.replay(8, None)
    assert caught.value.code == "break-output"


@pytest.mark.parametrize("keep", [lambda seen: seen, lambda seen: {"all": seen}])
def test_lists_that_a_forward_goes_on_filling_are_those_of_the_call(keep: Any) -> None:
    @dg.eager_on_graph
    def mix(given: Any) -> torch.Tensor:
        return sum(given["all"] if isinstance(given, dict) else given, torch.zeros(8, 4))

    def forward() -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hidden = X + 0
        for _ in range(3):
            seen.append(hidden)
            hidden = mix(keep(seen)) + 1
        return hidden

    got, want = replayed(forward)
    assert torch.equal(got, want)


def test_a_forward_that_goes_on_after_a_break_has_failed_is_refused() -> None:
    @dg.eager_on_graph
    def fails(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    def forward() -> torch.Tensor:
        try:
            return fails(X + 1)
        except RuntimeError:
            return X * 2

    of = backend()
    with pytest.raises(dg.CaptureError, match="a break raised RuntimeError, and the forward went on") as caught:
        capture(of, 8, forward)
    assert caught.value.code == "break-failed"
    capture(of, 8, lambda: X + 1)
    assert of.coverage(8).segments == 1


@pytest.mark.parametrize(
    "mark",
    [
        lambda: dg.eager_on_graph(3),
        lambda: dg.eager_on_graph(classmethod(lambda cls: None)),
        lambda: dg.eager_on_graph(generator),
        lambda: dg.eager_on_graph(enable="no"),
        lambda: dg.eager_on_graph(capture_stub=torch.zeros(1)),
    ],
)
def test_marks_that_would_do_nothing_are_refused(mark: Any) -> None:
    with pytest.raises(dg.BackendError) as caught:
        mark()
    assert caught.value.code == "mark-invalid"


def generator() -> Any:
    yield 1


def test_debug_takes_the_way_that_the_forward_takes() -> None:
    plus, times, first = dg.eager_on_graph(lambda h: h + 1), dg.eager_on_graph(lambda h: h[:2] * 2), [True]

    def forward() -> torch.Tensor:
        return plus(X) if first[0] else torch.cat([times(X), X])

    of = backend(debug=True)
    capture(of, 8, lambda: torch.nn.functional.pad(forward(), (0, 0, 0, 2 if first[0] else 0)))
    first[0] = False
    X.copy_(torch.arange(32.0).view(8, 4))
    assert torch.equal(of.replay(8, None), forward())
