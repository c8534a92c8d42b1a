"""Updates of host arguments: what torch_npu does with a wrong one, shown first, and what the backend says to it."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from lengths import WIDTH, fault, lengths_scale_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# torch_npu copies host tensors of a call with `deepcopy`, and torch warns of the way it does so.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

npu: Any = getattr(torch, "npu", None)
LENGTHS = dg.InputUpdate("lengths")
#: Whether the simulated device carries updates out in the order of their stream; else it does so at once.
IN_ORDER = "SIMULATED_CANN_ORDERED_UPDATES" in os.environ


def _hangs() -> int:
    """How often the simulated device has waited for something that nobody does."""
    return int(ctypes.CDLL("libascendcl.so").simulated_count(b"hang"))


@pytest.fixture
def never_hangs(where: str) -> Iterator[None]:
    before = _hangs() if where == "simulated" else 0
    yield
    npu.synchronize()
    assert (_hangs() if where == "simulated" else 0) == before


@contextmanager
def _expect_hang() -> Iterator[None]:
    """Expects the simulated device to wait for what nobody does; until the block ends, the stream is busy."""
    library = ctypes.CDLL("libascendcl.so")
    library.simulated_hang_limit.restype = ctypes.c_double
    before = _hangs()
    library.simulated_hold(ctypes.c_void_p(npu.current_stream().npu_stream))
    limit = library.simulated_hang_limit(ctypes.c_double(0.5))
    yield
    library.simulated_release()
    with pytest.raises(RuntimeError):
        npu.synchronize()
    library.simulated_hang_limit(ctypes.c_double(limit))
    assert _hangs() > before


@pytest.fixture
def only_simulated(where: str) -> None:
    if where != "simulated":
        pytest.skip("a device would wait for ever")


class Rows:
    """A forward of `calls` calls in a row on `[bs, WIDTH]`, whose result is a product of their lengths."""

    def __init__(self, calls: int = 1, bs: int = 2, as_tensor: bool = False) -> None:
        self.calls, self.bs, self.as_tensor = calls, bs, as_tensor
        self.x = torch.ones(bs, WIDTH, device="npu")
        self.slow = torch.zeros(1 << 20, device="npu")

    def __call__(self) -> torch.Tensor:
        x = self.x
        for _ in range(self.calls):
            out, lengths = torch.zeros_like(x), [1] * self.bs
            if self.as_tensor:
                torch.ops.devicegraph_tests.tensor_scale(out, x, torch.tensor(lengths, dtype=torch.int32))
            else:
                torch.ops.devicegraph_tests.lengths_scale(out, x, lengths)
            x = out
        return x * 1


def _raw(forward: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    graph = npu.NPUGraph()
    with npu.graph(graph, stream=npu.Stream(), auto_dispatch_capture=True):
        output = forward()
    return graph, output


@pytest.fixture
def make_backend(adapter: dg.DeviceAdapter) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(forward: Callable[[], Any], *updates: dg.InputUpdate, **options: Any) -> Any:
        backend = dg.NPUCudaGraphBackend(
            adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter), input_updates=updates, **options
        )
        made.append(backend)
        with torch.no_grad(), backend.capture_session():
            backend.capture_one(1, forward, capture_inputs=forward)
        return backend

    yield make
    for backend in made:
        backend.cleanup()


def _batch(*lengths: int) -> dict[str, Any]:
    return {"seq_lens_cpu": torch.tensor(lengths)}


def _column(output: torch.Tensor) -> list[float]:
    return output[:, 0].tolist()


@pytest.mark.usefixtures("never_hangs")
def test_each_replay_has_the_lengths_of_its_batch(make_backend: Any) -> None:
    backend = make_backend(Rows(2), LENGTHS)
    for lengths in ([3, 4], [7, 1], [3, 4]):
        assert _column(backend.replay(1, _batch(*lengths))) == [length**2 for length in lengths]


@pytest.mark.usefixtures("never_hangs")
def test_lengths_can_be_a_tensor_in_host_memory(make_backend: Any) -> None:
    backend = make_backend(Rows(as_tensor=True), dg.InputUpdate("context_lens", as_tensor=True))
    for lengths in ([3, 4], [7, 1]):
        assert _column(backend.replay(1, _batch(*lengths))) == lengths


@pytest.mark.usefixtures("never_hangs")
def test_single_calls_can_have_values_of_their_own(make_backend: Any) -> None:
    draft = dg.InputUpdate("lengths", operator="lengths_scale", calls=(2,), values=lambda batch: batch["draft"])
    backend = make_backend(Rows(3), LENGTHS, draft)
    output = backend.replay(1, {**_batch(3, 4), "draft": [10, 100]})
    assert _column(output) == [3 * 3 * 10, 4 * 4 * 100]


@pytest.mark.usefixtures("only_simulated")
def test_a_replay_without_an_update_is_refused_where_it_would_hang(make_backend: Any) -> None:
    graph, _ = _raw(Rows())
    with _expect_hang():
        graph.replay()

    backend = make_backend(Rows())
    before = _hangs()
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay(1, _batch(3, 4))
    assert str(caught.value) == (
        "decode: the graph of 1 has 1 calls that wait for an input update, and none was given [update-missing]\n\n"
        "hint: declare the engine's `input_updates`, or call `replay_with_input_update`"
    )
    npu.synchronize()
    assert _hangs() == before
    assert _column(backend.replay_with_input_update(1, [3, 4], "lengths", list)) == [3, 4]


@pytest.mark.usefixtures("only_simulated")
def test_steps_without_a_wait_in_between_are_right_where_torch_npus_own_hang(make_backend: Any) -> None:
    rows = Rows()
    graph, _ = _raw(rows)
    with _expect_hang():
        for _ in range(2):
            graph.update(cpu_update_input=[{"lengths": [5, 5]}])
            graph.replay()
        # Both updates have come before the first replay takes one.
        graph.graph_dispatch_mode.update_stream.synchronize()

    backend = make_backend(rows, LENGTHS)
    before, seen = _hangs(), []
    for step in range(20):
        rows.slow.add_(1)
        seen.append(backend.replay(1, _batch(step, step + 1)).clone())
    assert [_column(output) for output in seen] == [[step, step + 1] for step in range(20)]
    assert _hangs() == before


@pytest.mark.usefixtures("never_hangs")
def test_overlapping_steps_are_right_too(make_backend: Any) -> None:
    rows = Rows(3)
    backend = make_backend(rows, LENGTHS, overlap_input_updates=True)
    seen = []
    for step in range(20):
        rows.slow.add_(1)
        seen.append(backend.replay(1, _batch(step, 2)).clone())
    assert [_column(output) for output in seen] == [[step**3, 8] for step in range(20)]


@pytest.mark.usefixtures("only_simulated", "never_hangs")
def test_queued_updates_need_a_device_that_keeps_their_order_and_then_no_wait(make_backend: Any) -> None:
    backend = make_backend(Rows(2), LENGTHS, queue_input_updates=True)
    library = ctypes.CDLL("libascendcl.so")
    library.simulated_hold(ctypes.c_void_p(npu.current_stream().npu_stream))
    # While the stream is busy, the host goes on: none of these is carried out yet.
    seen = [backend.replay(1, _batch(step, 2)).clone() for step in range(5)]
    library.simulated_release()
    first = [_column(output)[0] for output in seen]
    if IN_ORDER:
        assert first == [0, 1, 4, 9, 16]
    else:
        assert first == [16] * 5


@pytest.mark.usefixtures("never_hangs")
def test_a_step_on_the_stream_of_the_updates_does_not_overlap_where_it_would_hang(make_backend: Any) -> None:
    backend = make_backend(Rows(2), LENGTHS, overlap_input_updates=True)
    stream = npu.NPUGraph().graph_dispatch_mode.update_stream
    with npu.stream(stream):
        for lengths in ([3, 4], [5, 6]):
            assert _column(backend.replay(1, _batch(*lengths))) == [length**2 for length in lengths]


def test_the_stream_of_the_updates_is_not_handed_out_where_torch_npu_does_it(adapter: dg.DeviceAdapter) -> None:
    reserved = npu.NPUGraph().graph_dispatch_mode.update_stream
    assert reserved in [npu.Stream() for _ in range(32)]
    assert reserved not in [adapter.stream() for _ in range(64)]


@pytest.mark.usefixtures("never_hangs")
def test_a_key_that_no_call_has_is_an_error_where_old_lengths_would_stay(make_backend: Any) -> None:
    graph, output = _raw(Rows())
    for key, lengths in (("lengths", [5, 5]), ("lenghts", [9, 9])):
        graph.update(cpu_update_input=[{key: lengths}])
        graph.replay()
        npu.synchronize()
    assert _column(output) == [5, 5]

    backend = make_backend(Rows())
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay_with_input_update(1, [9, 9], "lenghts", list)
    assert str(caught.value) == (
        "input update `lenghts`: no such host argument was captured for `lengths_scale` [update-unknown-key]\n\n"
        "hint: captured were `lengths`"
    )
    # A keyword argument that the capture did not give is as unknown.
    with pytest.raises(dg.ReplayError, match="`extra`"):
        backend.replay_with_input_update(1, [9], "extra", list)
    assert _column(backend.replay_with_input_update(1, [9, 8], "lengths", [])) == [9, 8]


@pytest.mark.parametrize(
    ("given", "code", "numbers"),
    [
        pytest.param([{"lengths": [1, 2]}] * 3, "update-count", ("3", "2"), id="a call too many"),
        pytest.param([], "update-count", ("0", "2"), id="none"),
        pytest.param([{"lengths": [1, 2, 3]}], "update-length", ("2 values", "3 were"), id="too long"),
        pytest.param([{"lengths": [1]}], "update-length", ("2 values", "1 were"), id="too short"),
        pytest.param([{"lengths": [1, 2]}, {}], "update-missing", ("call 1 of 2",), id="a call left out"),
        pytest.param({"lengths": [1, 2]}, "update-type", ("a list of mappings",), id="no list"),
        pytest.param([[1, 2]], "update-type", ("a list of mappings",), id="no mapping"),
        pytest.param([{"lengths": torch.tensor([1, 2])}], "update-type", ("`list`", "`Tensor`"), id="a tensor"),
    ],
)
@pytest.mark.usefixtures("never_hangs")
def test_updates_that_do_not_fit_are_errors_with_both_sides_and_change_nothing(
    make_backend: Any, given: Any, code: str, numbers: tuple[str, ...]
) -> None:
    backend = make_backend(Rows(2))
    assert _column(backend.replay_with_input_update(1, [3, 4], "lengths", list)) == [9, 16]
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay_with_input_update(1, [], "", list, cpu_update_input=given)
    assert caught.value.code == code
    for number in numbers:
        assert number in str(caught.value)
    assert _column(backend.replay_with_input_update(1, [5, 6], "lengths", torch.Tensor([]).tolist())) == [25, 36]


@pytest.mark.parametrize("lengths", [[1.5, 2], None, "12", torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])])
def test_lengths_that_are_no_integers_on_the_host_are_refused(make_backend: Any, lengths: Any) -> None:
    backend = make_backend(Rows())
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay_with_input_update(1, lengths, "lengths", list)
    assert caught.value.code == "update-type"
    assert _column(backend.replay_with_input_update(1, torch.tensor([5, 6]), "lengths", list)) == [5, 6]


def test_a_form_that_no_operator_takes_is_refused(make_backend: Any) -> None:
    backend = make_backend(Rows())
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay_with_input_update(1, [1, 2], "lengths", int)
    assert caught.value.code == "update-type"
    assert "neither `list` nor `torch.Tensor`" in str(caught.value)


def test_lengths_on_the_device_are_refused_rather_than_waited_for(make_backend: Any) -> None:
    backend = make_backend(Rows())
    with pytest.raises(dg.ReplayError, match="on `npu:0` is not a row of integers in host memory"):
        backend.replay_with_input_update(1, torch.tensor([1, 2]).to("npu"), "lengths", list)


def test_an_update_of_a_graph_without_host_arguments_is_refused(make_backend: Any) -> None:
    x = torch.zeros(2, WIDTH, device="npu")
    backend = make_backend(lambda: x + 1)
    with pytest.raises(dg.ReplayError) as caught:
        backend.replay_with_input_update(1, [1, 2], "lengths", list)
    assert caught.value.code == "update-unexpected"
    assert _column(backend.replay(1, {})) == [1, 1]


@pytest.mark.parametrize(
    ("update", "code"),
    [
        (dg.InputUpdate("lengths", operator="npu_fused_infer_attention_score"), "update-unknown-operator"),
        (dg.InputUpdate("actual_seq_lengths_kv"), "update-unknown-key"),
        (dg.InputUpdate("lengths", calls=(0, 2)), "update-unknown-call"),
        (dg.InputUpdate("lengths", calls=(0,)), "update-missing"),
    ],
)
def test_a_declaration_that_does_not_fit_the_graph_fails_its_capture(
    make_backend: Any, update: dg.InputUpdate, code: str
) -> None:
    with pytest.raises(dg.CaptureError) as caught:
        make_backend(Rows(2), update)
    assert caught.value.code == code
    assert caught.value.shape_key == 1


def test_a_declaration_for_a_graph_without_host_arguments_fails_its_capture(make_backend: Any) -> None:
    x = torch.zeros(2, WIDTH, device="npu")
    with pytest.raises(dg.CaptureError) as caught:
        make_backend(lambda: x + 1, LENGTHS)
    assert caught.value.code == "update-unexpected"


def test_what_is_no_declaration_is_refused(adapter: dg.DeviceAdapter) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        dg.NPUCudaGraphBackend(adapter, phase="decode", input_updates=["lengths"])
    assert caught.value.code == "wrong-type"


@pytest.mark.usefixtures("never_hangs")
def test_a_failing_update_launches_nothing_and_the_next_step_is_right(make_backend: Any) -> None:
    backend, threads = make_backend(Rows(2), LENGTHS), threading.active_count()
    assert _column(backend.replay(1, _batch(3, 4))) == [9, 16]
    fault.error = ValueError("in the operator")
    try:
        with pytest.raises(dg.ReplayError) as caught:
            backend.replay(1, _batch(5, 6))
    finally:
        fault.error = None
    assert caught.value.code == "update-failed"
    assert isinstance(caught.value.__cause__, ValueError)
    npu.synchronize()
    for lengths in ([7, 8], [1, 2]):
        assert _column(backend.replay(1, _batch(*lengths))) == [length**2 for length in lengths]
    assert threading.active_count() == threads


@pytest.mark.usefixtures("never_hangs")
def test_an_interrupt_in_an_update_passes_and_the_next_step_is_right(make_backend: Any) -> None:
    backend = make_backend(Rows(2), LENGTHS)
    fault.error = KeyboardInterrupt()
    try:
        with pytest.raises(KeyboardInterrupt):
            backend.replay(1, _batch(5, 6))
    finally:
        fault.error = None
    assert _column(backend.replay(1, _batch(7, 8))) == [49, 64]


@pytest.mark.usefixtures("never_hangs")
def test_an_overlapping_update_that_fails_drops_the_graph_and_lets_the_device_pass(make_backend: Any) -> None:
    backend = make_backend(Rows(2), LENGTHS, overlap_input_updates=True)
    fault.error = ValueError("in the operator")
    try:
        with pytest.raises(dg.ReplayError) as caught:
            backend.replay(1, _batch(5, 6))
    finally:
        fault.error = None
    assert caught.value.code == "update-failed"
    npu.synchronize()
    assert not backend.can_run({}, 1)
    other = make_backend(Rows(2), LENGTHS)  # what was left open would break the next update
    assert _column(other.replay(1, _batch(3, 4))) == [9, 16]


@pytest.mark.usefixtures("never_hangs")
@pytest.mark.parametrize("captured_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("replayed_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_update_runs_in_the_modes_of_the_capture(make_backend: Any, captured_in: Any, replayed_in: Any) -> None:
    with captured_in():
        backend = make_backend(Rows(), LENGTHS)
    with replayed_in():
        assert _column(backend.replay(1, _batch(3, 4))) == [3, 4]
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_column(backend.replay(1, _batch(5, 6)))))
    thread.start()
    thread.join()
    assert seen == [[5, 6]]


def test_an_update_outside_of_the_captures_inference_mode_fails_in_torch_npu() -> None:
    with torch.inference_mode():
        graph, _ = _raw(Rows())
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        graph.update(cpu_update_input=[{"lengths": [5, 5]}])
    with suppress(RuntimeError):
        npu.graph_task_update_end(graph.graph_dispatch_mode.update_stream)  # else nothing could be updated any more


@pytest.mark.usefixtures("never_hangs")
def test_threads_that_update_different_graphs_take_turns(make_backend: Any) -> None:
    backends = [make_backend(Rows(3), LENGTHS) for _ in range(2)]
    wrong: list[Any] = []

    def serve(backend: Any, first: int) -> None:
        try:
            with backend.adapter.stream_context(backend.adapter.stream()):
                for step in range(first, first + 40):
                    if _column(backend.replay(1, _batch(step, 1))) != [step**3, 1]:
                        wrong.append(step)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(backend, 1 + 50 * i)) for i, backend in enumerate(backends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.usefixtures("never_hangs")
def test_a_dropped_graph_takes_its_updates_along(make_backend: Any) -> None:
    backend = make_backend(Rows(), LENGTHS)
    backend.discard(1)
    assert backend.updatable_calls(1) == []
    with pytest.raises(KeyError):
        backend.replay_with_input_update(1, [1, 2], "lengths", list)
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(1, lambda: lengths_scale_once([1, 1, 1]))
    assert _column(backend.replay(1, _batch(3, 4, 5))) == [3, 4, 5]
    backend.cleanup()
    assert backend.updatable_calls(1) == []
