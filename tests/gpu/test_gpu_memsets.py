"""Memsets of a graph are kernels, and write the same."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph._core import FillKernel

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {0: "kernel", 1: "memcpy", 2: "memset"}


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def kinds_of(driver: ctypes.CDLL, graph: int) -> Counter[str]:
    """How many nodes of each kind a graph has."""
    count = ctypes.c_size_t()
    assert driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)) == 0
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds[KINDS.get(kind.value, "other")] += 1
    return kinds


class Memsets:
    """Calls of the driver on the current stream."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver

    def row(self, tensor: torch.Tensor, itemsize: int, value: int, start: int, count: int) -> None:
        call = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[itemsize]
        self._call(call, tensor.data_ptr() + start, value, ctypes.c_size_t(count))

    def rows(self, tensor: torch.Tensor, itemsize: int, value: int, pitch: int, width: int, height: int) -> None:
        call = {1: "cuMemsetD2D8Async", 2: "cuMemsetD2D16Async", 4: "cuMemsetD2D32Async"}[itemsize]
        sizes = (ctypes.c_size_t(width), ctypes.c_size_t(height))
        self._call(call, tensor.data_ptr(), ctypes.c_size_t(pitch), value, *sizes)

    def _call(self, name: str, address: int, *arguments: Any) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_ulonglong(address)  # type: ignore[assignment]
        assert getattr(self._driver, name)(address, *arguments, stream) == 0


@pytest.fixture
def memsets(driver: ctypes.CDLL) -> Memsets:
    torch.cuda.init()
    return Memsets(driver)


def captured(adapter: dg.DeviceAdapter, body: Callable[[], Any]) -> Any:
    """A graph of the body, which is not run."""
    pool, graph, stream = dg.GraphMemoryPool(adapter), adapter.graph(), adapter.stream()
    with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 4096), (4, 3), (8, 1000), (20, 17), (64, 1 << 20)])
def test_a_row_is_written_whatever_its_element_and_alignment(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter, memsets: Memsets, itemsize: int, start: int, count: int
) -> None:
    value = {1: 0xA7, 2: 0xA7C3, 4: 0xA7C3E501}[itemsize]
    size = start + count * itemsize + 64
    found, wanted = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8)
    wanted[start : start + count * itemsize] = torch.frombuffer(
        bytearray(value.to_bytes(itemsize, "little")), dtype=torch.uint8
    ).repeat(count)
    graph = captured(adapter, lambda: memsets.row(found, itemsize, value, start, count))
    assert kinds_of(driver, graph.raw.raw_cuda_graph()) == {"kernel": 1}
    assert not found.any()
    graph.replay()
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("width", "height", "pitch"), [(3, 5, 32), (16, 300, 64), (1, 2000, 8), (1000, 3, 4096)])
def test_rows_are_written_and_what_lies_between_them_is_not(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter, memsets: Memsets, itemsize: int, width: int, height: int, pitch: int
) -> None:
    found = torch.full((height, pitch), 9, dtype=torch.uint8, device="cuda")
    graph = captured(adapter, lambda: memsets.rows(found, itemsize, 0, pitch, width, height))
    assert kinds_of(driver, graph.raw.raw_cuda_graph()) == {"kernel": 1}
    graph.replay()
    assert not found[:, : width * itemsize].any()
    assert (found[:, width * itemsize :] == 9).all()


def test_one_that_the_driver_does_faster_stays(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter, memsets: Memsets
) -> None:
    found = torch.ones((16 << 20) + 1, dtype=torch.uint8, device="cuda")
    graph = captured(adapter, lambda: memsets.row(found, 1, 0, 0, len(found)))
    assert kinds_of(driver, graph.raw.raw_cuda_graph()) == {"memset": 1}
    graph.replay()
    assert not found.any()


def test_those_of_a_graph_with_allocations_of_its_own_stay(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter, memsets: Memsets
) -> None:
    found = torch.ones(64, dtype=torch.uint8, device="cuda")

    def body() -> None:
        stream, own = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_ulonglong()
        assert driver.cuMemAllocAsync(ctypes.byref(own), ctypes.c_size_t(64), stream) == 0
        memsets.row(found, 1, 7, 0, 64)
        assert driver.cuMemFreeAsync(own, stream) == 0

    graph = captured(adapter, body)
    assert kinds_of(driver, graph.raw.raw_cuda_graph()) == {"memset": 1, "other": 2}
    graph.replay()
    assert (found == 7).all()


def test_they_keep_their_place_among_what_comes_before_and_after_on_all_streams(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter, memsets: Memsets
) -> None:
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    total, other = torch.zeros(64, device="cuda"), torch.cuda.Stream()

    def body() -> None:
        x.add_(1)  # 1 only if the memset at the end of the last replay came after all of it
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        memsets.row(y, 4, 0, 0, 64)
        with torch.cuda.stream(other):
            total.add_(x)
            memsets.row(x, 4, 0, 0, 64)
            x.add_(2)
        y.add_(5)
        here.wait_stream(other)
        total.add_(x).add_(y)
        memsets.row(x, 4, 0, 0, 64)

    graph = captured(adapter, body)
    assert kinds_of(driver, graph.raw.raw_cuda_graph())["memset"] == 0
    for replays in (1, 2, 3):
        graph.replay()
        assert torch.equal(total.cpu(), torch.full((64,), 8.0 * replays))
        assert torch.equal(y.cpu(), torch.full((64,), 5.0))
        assert not x.any()


def test_operators_that_count_on_zeroed_memory_give_what_they_give_eagerly(
    driver: ctypes.CDLL, adapter: dg.DeviceAdapter
) -> None:
    x = torch.randn(1 << 20, device="cuda")
    out = torch.zeros(2, device="cuda")
    torch.sum(x, 0, out=out[0])
    graph = captured(adapter, lambda: (torch.sum(x, 0, out=out[0]), out[1].copy_(out[0] * 2)))
    kinds = kinds_of(driver, graph.raw.raw_cuda_graph())
    assert kinds["memset"] == 0
    assert kinds["kernel"] >= 3
    for seed in range(5):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(out[0], x.sum())
        assert torch.equal(out[1], x.sum() * 2)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_graphs_of_a_runner_have_none_and_fill_themselves_as_ever(driver: ctypes.CDLL, backend: str) -> None:
    class Summing:
        device, limits = torch.device("cuda"), dg.Limits(max_bs=4, max_num_tokens=4)
        weights = torch.randn(1 << 18, device="cuda")

        def make_batch(self, views: Any, key: Any) -> Any:
            return dg.StaticBatch(**views, batch_size=key.size)

        def forward(self, batch: Any) -> torch.Tensor:
            return batch.input_ids + self.weights.sum().long()

    engine = Summing()
    registry = dg.CudaGraphBufferRegistry(device=engine.device, max_bs=4, max_num_tokens=4)
    registry.register_slot(
        dg.GraphSlot("input_ids", lambda bs, tokens: (tokens,), torch.int64, padding_policy=dg.PaddingPolicy.ZERO)
    )
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cuda"))
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [4]})
    with dg.DecodeCudaGraphRunner(engine, config=config, registry=registry, graph_pool=pool) as runner:
        report = runner.capture()
        assert report.executor == ("node" if backend == "full" else "native")
        recording = runner.backend.captured[dg.ShapeKey(4)].recording
        graphs = [recording] if backend == "full" else recording.graphs
        counts = [kinds_of(driver, graph.raw.raw_cuda_graph()) for graph in graphs]
        assert sum(count["kernel"] for count in counts) >= 3
        assert not any(count["memset"] for count in counts)
        for start in (1, 5):
            ids = torch.arange(start, start + 3, device="cuda")
            wanted = ids + engine.weights.sum().long()
            assert torch.equal(runner.run(dg.StaticBatch(input_ids=ids, batch_size=3)), wanted)


def test_how_many_were_replaced_and_left_is_told(memsets: Memsets) -> None:
    x = torch.zeros(64, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        memsets.row(x, 4, 0, 0, 64)
        x.add_(1)
        memsets.row(x, 1, 0, 0, 4)
    kernel = FillKernel(0)
    assert kernel.replace_memsets(graph=graph.raw_cuda_graph()) == (2, 0)
    assert kernel.replace_memsets(graph=graph.raw_cuda_graph()) == (0, 0)
