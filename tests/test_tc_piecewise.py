"""Piecewise captures on the CPU tape: one trace for all buckets, pieces captured, operators in between run eagerly."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import split_ops, tc_piecewise
from engines import CompiledPrefill, attend_op

pytestmark = [
    pytest.mark.filterwarnings("default"),  # torch.compile and its compilers warn of things of their own
    pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer"),
]
COMPILERS = ["eager", "inductor"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op(torch.ops.devicegraph_tests.attend)
    torch._dynamo.reset()


def runner_for(engine: Any, compiler: str = "eager", **options: Any) -> dg.PrefillCudaGraphRunner:
    prefill = {"backend": "tc_piecewise", "tc_compiler": compiler}
    prefill |= {key: options.pop(key) for key in ("bs",) if key in options}
    return dg.PrefillCudaGraphRunner(engine, config=dg.CudaGraphConfig(prefill=prefill), **options)


def eager(engine: CompiledPrefill, batch: Any) -> torch.Tensor:
    kept = engine.cache.clone()
    config = dg.CudaGraphConfig(prefill={"backend": "disabled"})
    with dg.PrefillCudaGraphRunner(engine, config=config) as runner:
        output = runner.run(batch)
    engine.cache.copy_(kept)
    return output


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_trace_serves_all_buckets_and_replays_equal_eager(compiler: str) -> None:
    engine = CompiledPrefill()
    with runner_for(engine, compiler, bs=[1, 2, 8, 16, 64]) as runner:
        report = runner.capture()
        assert len(report.captured) == 5
        assert report.backend == "tc_piecewise"
        assert report.traces == report.to_dict()["traces"] == 1
        for seed, requests in enumerate(
            [[(1, 0, 5), (2, 0, 3)], [(3, 0, 1)], [(1, 0, 16), (2, 0, 16), (4, 0, 3)], [(5, 0, 2)], [(1, 0, 9)]]
        ):
            batch = engine.chunks(requests, seed)
            assert runner.can_run(batch)
            want = eager(engine, batch)
            assert torch.equal(runner.run(batch), want)
        assert runner.metrics().recompiles == 0
        assert runner.backend.traces == 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_nothing_of_torch_compile_runs_in_a_replay(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CompiledPrefill()
    with runner_for(engine, compiler, bs=[4, 8]) as runner:
        runner.capture()

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("compiled while serving")

        monkeypatch.setattr(runner, "_forward", refuse)
        monkeypatch.setattr(engine, "forward", refuse)
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in range(2, 9):
                runner.run(engine.chunks([(1, 0, length)]))
        assert runner.metrics().hit_rate == 1.0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_pieces_are_captured_and_operators_between_them_are_breaks(compiler: str) -> None:
    with runner_for(CompiledPrefill(), compiler, bs=[8]) as runner:
        runner.capture()
        coverage = runner.backend.coverage(dg.ShapeKey(8))
        # Three pieces, and the copy into the shared output.
        assert coverage == dg.Coverage(4, ("devicegraph_tests::attend",) * 2)


def test_a_compiled_piece_is_one_call_on_the_tape_and_a_traced_one_its_operators() -> None:
    recorded = {}
    for compiler in COMPILERS:
        with runner_for(CompiledPrefill(), compiler, bs=[8]) as runner:
            runner.capture()
            graphs = runner.backend.captured[dg.ShapeKey(8)].recording.graphs
            recorded[compiler] = [graph.tape.operators() for graph in graphs]
    assert recorded["inductor"][:3] == [["compiled piece"]] * 3
    assert "aten::index_copy_" in recorded["eager"][0]
    assert "aten::mm" in recorded["eager"][2]


class InGraph(CompiledPrefill):
    """Prepares a bias inside the graph, from what a slot holds."""

    def prepare_in_graph(self, batch: Any, key: Any) -> None:
        if key is None:
            batch.bias = batch.positions * 2
        else:
            self.held = getattr(self, "held", {})
            bias = self.held.setdefault(key, torch.zeros(key.size, dtype=torch.int64))
            bias.copy_(batch.positions * 2)
            batch.bias = bias

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + batch.bias[:, None]


def test_what_is_prepared_in_the_graph_is_captured_with_it() -> None:
    engine = InGraph()
    with runner_for(engine, bs=[4, 8]) as runner:
        runner.capture()
        for length in (7, 3, 8):
            batch = engine.chunks([(1, 0, length)], seed=length)
            want = eager(engine, batch)
            assert torch.equal(runner.run(batch), want)


def test_the_engine_is_told_when_its_operators_are_compiled() -> None:
    log: list[bool] = []

    class Toggled(CompiledPrefill):
        def compile_mode(self, entering: bool) -> None:
            log.append(entering)

    engine = Toggled()
    with runner_for(engine, bs=[4, 8]) as runner:
        runner.capture()
        assert log[:2] == [True, False]
        assert log == [True, False] * (len(log) // 2)
        log.clear()
        runner.run(engine.chunks([(1, 0, 3)]))
        assert log == []


def test_a_forward_that_cannot_be_traced_as_one_graph_is_refused_with_a_way_out() -> None:
    class Untraceable(CompiledPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(batch)

    with runner_for(Untraceable(), bs=[4]) as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert caught.value.code == "not-compilable"
        assert "register_split_op" in (caught.value.hint or "")
        assert "`breakable`" in (caught.value.hint or "")
        assert not runner.graphs


def test_a_torch_that_cannot_compile_at_all_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch.compile is not supported on this Python")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(dg.BackendError, match="not supported on this Python") as caught:
        runner_for(CompiledPrefill())
    assert (caught.value.code, caught.value.hint) == ("not-compilable", "use the backend `breakable`")


def test_a_second_runner_with_its_own_buffers_shares_no_graph_and_serves_alike() -> None:
    first, second = CompiledPrefill(), CompiledPrefill()
    with runner_for(first, bs=[8]) as one, runner_for(second, bs=[8]) as other:
        one.capture()
        other.capture()
        assert (one.backend.traces, other.backend.traces) == (1, 1)
        for seed in range(3):
            for engine, runner in ((first, one), (second, other)):
                batch = engine.chunks([(1, 0, 5)], seed)
                assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_process_may_have_more_runners_of_one_model_class_than_torch_compile_has_traces_for_one_code() -> None:
    runners = [runner_for(CompiledPrefill(), bs=[4]) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for runner in runners:
        with runner:
            runner.capture()
            assert runner.backend.traces == 1


def test_recapture_needs_no_new_trace() -> None:
    engine = CompiledPrefill()
    with runner_for(engine, bs=[8]) as runner:
        assert [runner.capture().traces for _ in range(2)] == [1, 0]
        batch = engine.chunks([(1, 0, 6)])
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_split_operators_are_named_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (
        "devicegraph_tests::attend",
        "devicegraph_tests.attend",
        torch.ops.devicegraph_tests.attend,
        torch.ops.devicegraph_tests.attend.default,
        attend_op,
    ):
        monkeypatch.setattr(split_ops, "_registered", {})
        dg.register_split_op(form)
        assert dg.split_operators() == ("devicegraph_tests::attend",)


@pytest.mark.parametrize("form", ["attention", "", 3, None, "a::", "::b", "a::b::c", torch.relu])
def test_what_is_no_operator_is_not_registered(form: Any) -> None:
    before = dg.split_operators()
    with pytest.raises(dg.BackendError) as caught:
        dg.register_split_op(form)
    assert caught.value.code == "split-op-invalid"
    assert dg.split_operators() == before


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_forward_that_calls_no_registered_operator_is_refused(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op("engine::attention")
    with runner_for(CompiledPrefill(), compiler, bs=[8]) as runner:
        with pytest.raises(
            dg.CaptureError, match="calls none of the split operators \\(engine::attention\\)"
        ) as caught:
            runner.capture()
        assert caught.value.code == "no-split-ops"


@torch.library.custom_op("devicegraph_tests::late", mutates_args=())
def late_op(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * dg.current_batch().engine.factor


@late_op.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


def test_an_operator_that_is_registered_later_splits_the_next_capture() -> None:
    class Late(CompiledPrefill):
        factor = 1

        def forward(self, batch: Any) -> torch.Tensor:
            return late_op(super().forward(batch))

    engine = Late()
    with runner_for(engine, bs=[8]) as runner:
        runner.capture()
        dg.register_split_op(late_op)
        assert runner.capture().traces == 1
        assert runner.backend.coverage(dg.ShapeKey(8)).breaks[-1] == "devicegraph_tests::late"
        engine.factor = 3
        batch = engine.chunks([(1, 0, 7)])
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_capture_while_torch_compile_is_switched_off_is_refused() -> None:
    with runner_for(CompiledPrefill(), bs=[8]) as runner:
        with torch.compiler.set_stance("force_eager"), pytest.raises(dg.CaptureError, match="switched off") as caught:
            runner.capture()
        assert caught.value.code == "not-compilable"
        assert runner.capture().traces == 1


def test_a_forward_that_enters_inference_mode_is_refused_for_inductor_and_leaves_torch_as_it_was() -> None:
    class Enters(CompiledPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            with torch.inference_mode():
                return super().forward(batch)

    with runner_for(Enters(), "inductor", bs=[8]) as runner:
        with pytest.raises(dg.CaptureError, match="inference_mode") as caught:
            runner.capture()
        assert caught.value.code == "not-compilable"
        assert not torch.is_inference_mode_enabled()
        assert torch.empty(1).add(1).shape == (1,)


def test_an_error_of_the_forward_is_in_what_is_said_of_it() -> None:
    class Fails(CompiledPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            raise ValueError("the adapter x is not loaded")

    with runner_for(Fails(), bs=[8]) as runner, pytest.raises(dg.CaptureError) as caught:
        runner.capture()
    assert caught.value.code == "not-compilable"
    assert "Explanation: " in str(caught.value)


def test_captures_of_single_shapes_trace_once_too() -> None:
    engine = CompiledPrefill()
    with runner_for(engine, bs=[1, 4, 8]) as runner:
        with runner.backend.capture_session():
            for size in (4, 1):
                runner.capture_one_shape(size)
        assert runner.backend.traces == 1
        assert runner.capture().traces == 0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_nothing_of_a_closed_runner_is_kept(compiler: str) -> None:
    class Hooked(CompiledPrefill):
        def barrier(self) -> None:
            pass

        def compile_mode(self, entering: bool) -> None:
            pass

    engine = Hooked()
    runner = runner_for(engine, compiler, bs=[8])
    runner.capture()
    runner.run(engine.chunks([(1, 0, 7)]))
    runner.close()
    seen = [weakref.ref(engine), weakref.ref(runner.backend), weakref.ref(engine.cache)]
    del engine, runner
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]


class Layers(CompiledPrefill):
    """Layers between split operators, each with weights and a bound of its own."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weights = (torch.randint(-1, 2, (8, 8), generator=generator).float() for _ in bounds)
        self.layers = list(zip(weights, bounds, strict=True))

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        for weight, bound in self.layers:
            hidden = (attend_op(hidden).clamp(-3, 3) @ weight).clamp(-bound, bound)
        return attend_op(hidden) @ self.head


# The first piece and the last one are of forms of their own.
@pytest.mark.parametrize(("bounds", "forms"), [((3, 3, 3, 3), 3), ((3, 2, 3, 2), 4), ((1,), 3)])
def test_pieces_of_one_form_are_compiled_once_and_keep_their_own_weights(
    bounds: tuple[int, ...], forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    compile_piece = tc_piecewise._compile_piece
    monkeypatch.setattr(tc_piecewise, "_compile_piece", lambda piece: compiled.append(0) or compile_piece(piece))
    engine = Layers(bounds)
    with runner_for(engine, "inductor", bs=[4, 8]) as runner:
        runner.capture()
        assert len(compiled) == forms
        for seed, length in enumerate((7, 3, 8)):
            batch = engine.chunks([(1, 0, length)], seed)
            assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_trace_while_serving_is_counted() -> None:
    engine = CompiledPrefill()
    with runner_for(engine, bs=[8]) as runner:
        runner.capture()
        torch._dynamo.reset()
        with runner.backend.capture_session():
            runner.capture_one_shape(8)
        assert runner.metrics().recompiles == 1


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(dg.BackendError) as caught:
        dg.TcPiecewiseCudaGraphBackend(dg.get_device_adapter("cpu"), phase="prefill", tc_compiler="nvfuser")
    assert caught.value.code == "tc-compiler-unknown"
