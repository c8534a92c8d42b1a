"""The CPU tape: what a recording holds, what replays, what memory it takes."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import devicegraph
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.devices.tape_check import _is_of_form
from devicegraph.devices.tape_memory import TapeMemory
from devicegraph.devices.tape_rules import REFUSALS, HostMemory
from verdicts import Construct, Setting, check_refused, of
from verdicts import capture as construct_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph.devices.cpu import TapeGraph

ADAPTER = get_device_adapter("cpu")
SPARSE = torch.eye(4).to_sparse()


def capture(
    forward: Callable[[], Any], pool: GraphMemoryPool | None = None, mode: Any = "thread_local"
) -> tuple[TapeGraph, Any]:
    graph = ADAPTER.graph()
    with ADAPTER.capture(
        graph, pool=pool or GraphMemoryPool(ADAPTER), stream=ADAPTER.stream(), capture_error_mode=mode
    ):
        output = forward()
    return graph, output


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors are on their way out of torch
def test_an_operator_that_takes_an_object_can_be_captured_again() -> None:
    x = torch.arange(8.0).view(2, 4)
    layer = torch.ao.nn.quantized.dynamic.Linear(4, 3)
    for _ in range(2):
        graph, output = capture(lambda: layer(x))
        graph.replay()
        assert torch.equal(output, layer(x))


def test_what_a_gpus_flash_attention_returns_says_nothing_of_values() -> None:
    mode = FakeTensorMode()
    form = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="meta")
    heads = FakeTensor(mode, form, torch.device("cuda:0"))
    with mode:
        returned = torch.ops.aten._scaled_dot_product_flash_attention.default(heads, heads, heads, 0.0, True)
    assert int in map(type, returned)
    assert all(map(_is_of_form, returned))
    assert not any(map(_is_of_form, (True, 1.0, 1j)))


def test_python_side_effects_do_not_replay() -> None:
    calls = []
    x = torch.ones(4)
    graph, output = capture(lambda: (calls.append(1), x + len(calls))[1])
    for _ in range(3):
        graph.replay()
    assert calls == [1]
    assert torch.equal(output, torch.full((4,), 2.0))


def test_a_tensor_replaced_after_the_capture_is_not_seen() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with torch.no_grad():
        graph, output = capture(lambda: layer(x))
        want = layer(x)
        layer.weight.data = torch.zeros(4, 4)
        graph.replay()
    assert torch.equal(output, want)


def test_a_write_to_a_captured_parameter_is_seen() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with torch.no_grad():
        graph, output = capture(lambda: layer(x))
        layer.weight.zero_()
        graph.replay()
    assert torch.equal(output, torch.zeros(1, 4))


def test_an_attribute_set_in_the_forward_shows_the_replay() -> None:
    """A tensor that the model keeps lies in the graph's memory: it must follow the replays, as beside a GPU."""
    x = torch.ones(4)
    kept = {}

    def forward() -> torch.Tensor:
        kept["half"] = (x * 2)[:2]
        return x + 1

    graph, _ = capture(forward)
    x.fill_(5)
    graph.replay()
    assert torch.equal(kept["half"], torch.full((2,), 10.0))


def test_memory_freed_in_a_capture_is_used_again_in_it() -> None:
    x = torch.ones(1 << 20)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = y + 1
        return y

    pool = GraphMemoryPool(ADAPTER)
    graph, output = capture(chain, pool)
    assert pool.handle.peak_bytes == 2 * x.nbytes
    graph.replay()
    assert torch.equal(output, x + 50)


def test_a_smaller_capture_takes_no_memory_beside_a_larger_one() -> None:
    x = torch.randn(64, 4096)
    pool = GraphMemoryPool(ADAPTER)

    def forward(rows: int) -> Callable[[], torch.Tensor]:
        return lambda: ((x[:rows] * 2).softmax(-1) @ x[:rows].t()).relu()

    graphs = {}
    for rows in (64, 32, 7, 1):
        graph, output = capture(forward(rows), pool)
        graphs[rows] = graph, ADAPTER.weak_outputs([output], pool)[0]
        del output
        if rows == 64:
            reserved = pool.handle.reserved_bytes
    assert pool.handle.reserved_bytes == reserved
    assert pool.handle.live_bytes == 0
    for rows in (64, 1, 32, 7, 64):
        graph, output = graphs[rows]
        graph.replay()
        assert torch.equal(output, forward(rows)())


def test_a_strong_output_keeps_its_memory_from_later_captures() -> None:
    x = torch.randn(16)
    pool = GraphMemoryPool(ADAPTER)
    first, kept = capture(lambda: x + 1, pool)
    second, _ = capture(lambda: x + 2, pool)
    first.replay()
    second.replay()
    assert torch.equal(kept, x + 1)


def test_host_memory_that_dies_during_a_capture_is_not_taken_for_a_new_tensor() -> None:
    """A new storage may get the address of a dead one; its operators must be recorded all the same."""
    x = torch.ones(16)
    declared = [torch.zeros(16) for _ in range(64)]
    for tensor in declared:
        ADAPTER.declare_host(tensor)

    def forward() -> torch.Tensor:
        declared.clear()
        y = x
        for _ in range(64):
            y = y + 1
        return y

    graph, output = capture(forward)
    graph.replay()
    assert len(graph.tape) == 64
    assert torch.equal(output, x + 64)


def test_the_memory_goes_with_the_last_graph_and_tensor() -> None:
    gc.collect()
    before = len(TapeMemory.all())
    pool = GraphMemoryPool(ADAPTER)
    x = torch.ones(8)
    graph, output = capture(lambda: x + 1, pool)
    memory = weakref.ref(pool.handle)
    assert len(TapeMemory.all()) == before + 1
    graph.reset()
    del graph, output
    gc.collect()
    assert memory() is None
    assert len(TapeMemory.all()) == before


def test_a_pool_is_renewed_once_its_last_graph_is_reset() -> None:
    pool = GraphMemoryPool(ADAPTER)
    x = torch.ones(8)
    (first, _), (second, _) = capture(lambda: x + 1, pool), capture(lambda: x + 1, pool)
    handle = pool.handle
    assert pool.graphs == 2
    first.reset()
    first.reset()
    assert pool.graphs == 1
    assert pool.handle is handle
    second.reset()
    assert pool.graphs == 0
    assert pool.handle is not handle


@pytest.mark.parametrize("replay_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("capture_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_replay_gives_the_same_in_every_grad_and_autocast_state(capture_mode: Any, replay_mode: Any) -> None:
    layer = torch.nn.Linear(4, 4)
    cache = torch.zeros(3, 4)
    x = torch.randn(3, 4)

    def forward() -> torch.Tensor:
        y = layer(x)
        cache.copy_(y.detach())
        return y.relu()

    with capture_mode():
        graph, output = capture(forward)
    with torch.no_grad():
        want = layer(x).relu()
    with replay_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert torch.equal(output.detach(), want)
    assert torch.equal(cache.relu(), want)
    assert not cache.requires_grad


def test_the_default_dtype_of_the_capture_is_kept_by_the_replay() -> None:
    numbers = torch.arange(1, 5)
    graph, output = capture(lambda: (numbers / 3).sqrt() + numbers.sqrt())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        graph.replay()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(output, (numbers / 3).sqrt() + numbers.sqrt())


def test_autocast_in_the_capture_is_kept_by_the_replay() -> None:
    x = torch.randn(4, 4)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graph, output = capture(lambda: x @ x)
            want = x @ x
        graph.replay()
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, want)


def test_an_inference_tensor_that_the_model_writes_can_be_replayed_from_outside() -> None:
    with torch.inference_mode():
        cache = torch.zeros(4)
    x = torch.ones(4)
    with torch.inference_mode():
        graph, _ = capture(lambda: cache.add_(x))
    graph.replay()
    assert torch.equal(cache, x)


def test_conjugated_and_negated_views_replay() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    graph, output = capture(lambda: ((z * 2).conj() * z, (z + 1).conj().imag + 1))
    graph.replay()
    assert torch.equal(output[0], (z * 2).conj() * z)
    assert torch.equal(output[1], (z + 1).conj().imag + 1)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Operators whose kernels are not known as Python's: they stand for compiled ones."""
    library = torch.library.Library("devicegraph_test_compiled", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.m.impl("opaque", "CPU", lambda x: x + 1, False)
    yield library
    library._destroy()


def test_an_operator_without_a_fake_kernel_is_named(library: torch.library.Library) -> None:
    x = torch.ones(4)
    with pytest.raises(devicegraph.CaptureError) as caught:
        capture(lambda: torch.ops.devicegraph_test_compiled.opaque(x))
    assert (caught.value.code, caught.value.operator) == ("no-fake-kernel", "devicegraph_test_compiled::opaque")


def test_an_operator_whose_fake_kernel_fails_is_a_limit_of_the_tape(library: torch.library.Library) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("not for this type")

    torch.library.register_fake("devicegraph_test_compiled::opaque", fake, lib=library)
    x = torch.ones(4)
    with pytest.raises(devicegraph.CaptureError) as caught:
        capture(lambda: torch.ops.devicegraph_test_compiled.opaque(x))
    assert (caught.value.code, caught.value.operator) == ("tape-limit", "devicegraph_test_compiled::opaque")
    assert "not for this type" in str(caught.value)


@pytest.mark.parametrize("wrong", [(8,), (4, 1)])
def test_a_fake_kernel_that_told_another_shape_is_found_by_the_replay(
    library: torch.library.Library, wrong: tuple[int, ...]
) -> None:
    torch.library.register_fake("devicegraph_test_compiled::opaque", lambda x: x.new_empty(wrong), lib=library)
    x = torch.ones(4)
    graph, _ = capture(lambda: torch.ops.devicegraph_test_compiled.opaque(x))
    with pytest.raises(devicegraph.ReplayError) as caught:
        graph.replay()
    assert caught.value.code == "fake-kernel-wrong"
    assert "devicegraph_test_compiled::opaque" in str(caught.value)


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: torch.sparse.mm(SPARSE, x), id="sparse argument"),
        pytest.param(lambda x: x.to_sparse(), id="sparse result"),
        pytest.param(
            lambda x: torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,)),
            id="higher-order operator",
            marks=pytest.mark.skipif(
                not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
                reason="this torch refuses them itself, with an error of its own",
            ),
        ),
    ],
)
def test_what_has_no_form_on_the_tape_is_called_a_limit_of_the_tape(forward: Any) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(devicegraph.CaptureError) as caught:
        capture(lambda: forward(x))
    assert caught.value.code == "tape-limit"


def test_allocations_and_questions_about_tensors_are_not_recorded() -> None:
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        y = torch.empty_like(x)
        assert x.is_same_size(y)
        with torch.profiler.record_function("range"):
            return y.copy_(x)

    graph, output = capture(forward)
    graph.replay()
    assert graph.tape.operators() == ["aten::copy_"]
    assert torch.equal(output, x)


def test_python_kernels_are_checked_inside() -> None:
    library = torch.library.Library("devicegraph_test_reader", "DEF")
    library.define("reads(Tensor x) -> Tensor")
    library.impl("reads", lambda x: x + sum(x.tolist()), "CPU")
    x = torch.ones(4)
    try:
        with pytest.raises(devicegraph.CaptureError) as caught:
            capture(lambda: torch.ops.devicegraph_test_reader.reads(x))
        assert caught.value.code == "host-read"
    finally:
        library._destroy()


def test_host_memory_stays_host_memory_as_long_as_one_tensor_is_on_it() -> None:
    x = torch.ones(4)
    storage = torch.ones(8)
    first, second = storage[:4], storage[4:]
    for tensor in (first, second):
        ADAPTER.declare_host(tensor)
    del first, storage
    with pytest.raises(devicegraph.CaptureError) as caught:
        capture(lambda: x + second)
    assert caught.value.code == "device-mismatch"


def test_declaring_host_memory_for_ever_does_not_grow() -> None:
    host = HostMemory()
    for _ in range(1000):
        host.declare(torch.ones(4))
    assert len(host) < 200


def test_an_output_may_outlive_its_graph_and_its_pool() -> None:
    x = torch.randn(1 << 10)
    graph, output = capture(lambda: x + 1)
    graph.replay()
    del graph
    gc.collect()
    others = [torch.full((1 << 23,), 7.0) for _ in range(4)]
    assert torch.equal(output, x + 1)
    assert len(others) == 4


@pytest.mark.parametrize("capture_mode", [torch.no_grad, torch.inference_mode])
def test_a_custom_operator_in_python_is_recorded_by_what_it_calls(capture_mode: Any) -> None:
    calls = []

    # A name of its own in each run: torch may forget the kernels of a name that was defined before.
    @torch.library.custom_op(f"devicegraph_test::scaled_{capture_mode.__name__}", mutates_args=())
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        calls.append(by)
        return x * by

    library = torch.library.Library("devicegraph_test_library", "DEF")
    library.define("shifted(Tensor x) -> Tensor")
    library.impl("shifted", lambda x: x + len(calls), "CPU")
    x = torch.ones(4)
    with capture_mode():
        graph, output = capture(lambda: torch.ops.devicegraph_test_library.shifted(scaled(x, 3.0)))
    x.fill_(2)
    graph.replay()
    assert calls == [3.0]
    assert graph.tape.operators() == ["aten::mul.Tensor", "aten::add.Tensor"]
    assert torch.equal(output, torch.full((4,), 7.0))
    library._destroy()


def test_a_tensor_subclass_is_recorded_by_the_operators_it_lowers_to() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(4), torch.randn(4)
    graph, output = capture(lambda: (TwoTensor(a, b) + 1).a * 2)
    assert "aten::add.Tensor" in graph.tape.operators()
    a.fill_(3)
    graph.replay()
    assert torch.equal(output, torch.full((4,), 8.0))


def test_an_exception_in_the_block_passes_through_and_leaves_nothing() -> None:
    pool = GraphMemoryPool(ADAPTER)
    x = torch.ones(4)
    error = ValueError("from the model")

    def forward() -> None:
        _ = x + 1
        raise error

    with pytest.raises(ValueError, match="from the model") as caught:
        capture(forward, pool)
    assert caught.value is error
    del caught
    assert pool.graphs == 0
    assert not ADAPTER.is_capturing()
    error.__traceback__ = None
    gc.collect()
    assert pool.handle.live_bytes == 0


def test_replay_of_an_empty_or_reset_graph_is_refused() -> None:
    with pytest.raises(RuntimeError, match="holds no capture"):
        ADAPTER.graph().replay()
    x = torch.ones(4)
    graph, _ = capture(lambda: x + 1)
    graph.reset()
    with pytest.raises(RuntimeError, match="holds no capture"):
        graph.replay()


def caught(run: Callable[[], object]) -> None:
    """A model that goes on where it could not do something."""
    with contextlib.suppress(Exception):
        run()


# A stream that was not joined is refused at the end of the capture, where no model can catch it.
@pytest.mark.parametrize("construct", of(*(code for code in REFUSALS if code != "unjoined-stream")))
def test_a_refusal_that_the_model_catches_is_what_its_capture_ends_with(construct: Construct) -> None:
    with pytest.raises(devicegraph.CaptureError) as uncaught:
        construct_capture(ADAPTER, construct, Setting(ADAPTER))
    catching = construct._replace(run=lambda s: caught(lambda: construct.run(s)))
    refused = check_refused(ADAPTER, catching)
    assert (refused.code, refused.operator, str(refused)) == (
        construct.verdict,
        uncaught.value.operator,
        str(uncaught.value),
    )


@pytest.mark.parametrize("code", ["no-fake-kernel", "tape-limit"])
def test_what_the_tape_cannot_record_ends_the_capture_where_the_model_catches_it(
    library: torch.library.Library, code: str
) -> None:
    operator = torch.ops.devicegraph_test_compiled.opaque if code == "no-fake-kernel" else torch.Tensor.to_sparse
    x = torch.ones(4)
    with pytest.raises(devicegraph.CaptureError) as failed:
        capture(lambda: caught(lambda: operator(x)))
    assert failed.value.code == code


def test_of_several_caught_refusals_the_first_is_told_with_the_line_that_it_came_from() -> None:
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        caught(lambda: x[x > 0])
        caught(lambda: x.tolist())
        caught(ADAPTER.synchronize)
        return x + 1

    with pytest.raises(devicegraph.CaptureError) as failed:
        capture(forward)
    assert (failed.value.code, failed.value.operator) == ("data-dependent-shape", "aten::index.Tensor")
    assert "caught(lambda: x[x > 0])" in "".join(map(str, failed.traceback))


def test_an_error_of_the_model_is_told_before_the_refusal_that_it_caught() -> None:
    x = torch.ones(4)
    error = ValueError("from the model")

    def forward() -> None:
        caught(x.tolist)
        raise error

    with pytest.raises(ValueError, match="from the model") as failed:
        capture(forward)
    assert failed.value is error


def test_a_caught_refusal_leaves_nothing_of_its_capture_and_later_ones_work() -> None:
    pool, before = GraphMemoryPool(ADAPTER), ADAPTER.current_stream()
    x = torch.ones(4)
    kept, _ = capture(lambda: x * 2, pool)

    def forward() -> torch.Tensor:
        y = x + 1
        caught(y.sum().item)
        return y * 2

    gc.disable()  # nothing may wait for it
    try:
        for _ in range(2):
            with pytest.raises(devicegraph.CaptureError) as failed:
                capture(forward, pool)
            assert failed.value.code == "host-read"
            del failed
            assert pool.graphs == 1
            assert pool.handle.live_bytes == 0
            assert ADAPTER.current_stream() is before
            assert not ADAPTER.is_capturing()
    finally:
        gc.enable()
    graph, output = capture(lambda: x + 5, pool)
    graph.replay()
    assert torch.equal(output, x + 5)
    kept.replay()


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_segment_ends_with_the_refusal_that_was_caught_in_it(segment: int) -> None:
    pool = GraphMemoryPool(ADAPTER)
    x = torch.ones(4)
    graphs: list[TapeGraph] = []

    def forward(segments: Any) -> torch.Tensor:
        y = x
        for index in range(3):
            y = y + 1
            if index == segment:
                caught(y.sum().item)
            if index < 2:
                with segments.pause():
                    y.tolist()  # a break may
        return y

    def run(model: Callable[[Any], Any]) -> None:
        with ADAPTER.capture_segments(
            pool=pool, stream=ADAPTER.stream(), capture_error_mode="thread_local", on_segment=graphs.append
        ) as segments:
            model(segments)

    with pytest.raises(devicegraph.CaptureError) as failed:
        run(forward)
    assert (failed.value.code, failed.value.operator) == ("host-read", "aten::_local_scalar_dense")
    assert len(graphs) == pool.graphs == segment
    with pytest.raises(devicegraph.CaptureError) as failed:
        run(lambda segments: caught(lambda: forward(segments)))  # catches the end of the segment as well
    assert failed.value.code == "host-read"
    assert len(graphs) == pool.graphs == 2 * segment
    assert not ADAPTER.is_capturing()
    del failed
    graphs.clear()
    segment = 3  # none
    run(forward)
    assert len(graphs) == 3


@pytest.mark.parametrize("backend", [devicegraph.FullCudaGraphBackend, devicegraph.BreakableCudaGraphBackend])
def test_a_backend_captures_no_forward_that_goes_on_after_a_refusal(backend: Any) -> None:
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        try:
            n = x.sum().item()
        except Exception:
            n = 5.0
        return x * n

    graphs = backend(ADAPTER, phase="decode")
    with torch.no_grad(), graphs.capture_session():
        with pytest.raises(devicegraph.CaptureError) as failed:
            graphs.capture_one("reads", forward)
        output = graphs.capture_one("later", lambda: x + 1)
    assert (failed.value.code, failed.value.shape_key) == ("host-read", "reads")
    assert list(graphs.captured) == ["later"]
    graphs.replay("later", None)
    assert torch.equal(output, x + 1)
    graphs.cleanup()


@pytest.mark.parametrize(("mode", "survives"), [("global", False), ("thread_local", True), ("relaxed", True)])
def test_another_thread_that_waits_breaks_a_capture_in_global_mode_only(mode: str, survives: bool) -> None:
    x = torch.ones(4)
    seen: list[BaseException] = []

    def wait_elsewhere() -> None:
        try:
            ADAPTER.synchronize()
        except devicegraph.CaptureError as error:
            seen.append(error)

    def forward() -> torch.Tensor:
        thread = threading.Thread(target=wait_elsewhere)
        thread.start()
        thread.join()
        return x + 1

    if survives:
        graph, output = capture(forward, mode=mode)
        graph.replay()
        assert torch.equal(output, x + 1)
        assert not seen
    else:
        with pytest.raises(devicegraph.CaptureError) as caught:
            capture(forward, mode=mode)
        assert caught.value.code == "synchronize"
        assert [error.code for error in seen] == ["synchronize"]


def test_two_threads_capture_at_the_same_time() -> None:
    barrier = threading.Barrier(2)
    outputs: dict[int, tuple[TapeGraph, torch.Tensor, torch.Tensor]] = {}

    def work(which: int) -> None:
        x = torch.full((4,), float(which))

        def forward() -> torch.Tensor:
            barrier.wait()
            y = x * 3
            barrier.wait()
            return y + 1

        graph, output = capture(forward)
        outputs[which] = graph, output, x

    threads = [threading.Thread(target=work, args=(which,)) for which in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for graph, output, x in outputs.values():
        graph.replay()
        assert torch.equal(output, x * 3 + 1)


def test_asynchronous_collectives_are_captured_unexecuted_and_waited_for_on_replay() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(1 << 16)
        gathered = [torch.zeros_like(x)]

        def forward() -> torch.Tensor:
            y = x * 2
            work = dist.all_reduce(y, async_op=True)
            work.wait()
            dist.all_gather(gathered, y)
            return gathered[0] + 1

        graph, output = capture(forward)
        assert not gathered[0].any()
        graph.replay()
        assert torch.equal(output, x * 2 + 1)
    finally:
        dist.destroy_process_group()
        os.environ.pop("MASTER_ADDR", None)


def test_what_a_call_in_one_piece_returns_stays_a_view_of_its_arguments_and_of_its_other_results() -> None:
    def piece(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.zeros_like(x)
        return cache[1], out, out.view(2, 2), (x * 2)[1:]

    def forward() -> torch.Tensor:
        row, out, square, tail = ADAPTER.opaque_call(piece, (cache, x), shapes=piece)
        row.add_(x)
        square.add_(3)
        return out.sum() + tail.sum()

    cache, x = torch.zeros(3, 4), torch.ones(4)
    graph, output = capture(forward)
    for step in (1, 2):
        graph.replay()
        assert cache.tolist() == [[0] * 4, [step] * 4, [0] * 4]
        assert output.item() == 4 * 3 + 3 * 2
