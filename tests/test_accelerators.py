"""Accelerators with the graph functions of `torch.cuda`: what is asked of their modules, on stand-ins over the tape.

None of this runs on such a device. The stand-ins have the functions and arguments of the real modules.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
import stand_in
from devicegraph.devices import accelerator, cuda_streams, device_availability
from devicegraph.devices.accelerator import (
    END_BINDINGS,
    MODULE_CALLS,
    MusaDevice,
    XpuDevice,
    graph_class,
    missing_calls,
)
from devicegraph.testing import check_backend
from engines import ToyEngine, eager

if TYPE_CHECKING:
    from collections.abc import Callable

HAS_XPU_GRAPHS = pytest.mark.skipif(not hasattr(torch.xpu, "XPUGraph"), reason="this torch has no graphs for XPU")


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes devices of type `xpu` have a stand-in for their module; their memory is the host's."""

    def install(module: Any, where: str = "stand_in") -> None:
        class OnHost(XpuDevice):
            bindings = where

            def __init__(self, device: torch.device) -> None:
                super().__init__(device)
                self.device = torch.device("cpu")

            @classmethod
            def module(cls) -> Any:
                return module

        monkeypatch.setattr(accelerator, "XpuDevice", OnHost)

    return install


MODULES = [
    pytest.param("cuda", "CUDAGraph", True, id="cuda"),
    pytest.param("xpu", "XPUGraph", False, id="xpu", marks=HAS_XPU_GRAPHS),
]


@pytest.mark.parametrize(("kind", "name", "has_modes"), MODULES)
def test_the_modules_of_this_torch_take_what_they_are_called_with(kind: str, name: str, has_modes: bool) -> None:
    module = getattr(torch, kind)
    assert missing_calls(module) == []
    for call, positional in MODULE_CALLS.items():
        inspect.signature(getattr(module, call)).bind(*range(positional))
    graph: Any = graph_class(module)
    assert graph is getattr(module, name)
    parameters = inspect.signature(graph.capture_begin).parameters
    assert "pool" in parameters
    assert ("capture_error_mode" in parameters) is has_modes
    for call in ("capture_end", "replay", "reset"):
        inspect.signature(getattr(graph, call)).bind(graph)
    if inspect.signature(module.memory_snapshot).parameters:  # older ones show all pools, and take nothing
        assert "mempool_id" in inspect.signature(module.memory_snapshot).parameters
    inspect.signature(module.mem_get_info).bind(0)
    for names in (END_BINDINGS, ("releasePool",)):
        form = rf"def _{kind}_({'|'.join(names)})\(device: _int, mempool_id: tuple\[_int, _int\]\) -> None: ..."
        assert re.search(form, _stub_of_torch(), re.IGNORECASE), names


def _stub_of_torch() -> str:
    return Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text(encoding="utf-8")


def _arguments(function: Any) -> list[tuple[str, Any]]:
    if isinstance(function, type) and "__new__" in vars(function):
        function = function.__new__
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@HAS_XPU_GRAPHS
def test_the_stand_in_for_xpu_has_the_arguments_of_the_real_module() -> None:
    module = stand_in.make_module(stand_in.XPUGraph)
    for name in (*MODULE_CALLS, "mem_get_info", "memory_snapshot"):
        if name != "device":  # a class there, and a function here
            assert _arguments(getattr(module, name)) == _arguments(getattr(torch.xpu, name)), name
    for name in ("__new__", *accelerator.GRAPH_CALLS):
        ours, real = getattr(stand_in.XPUGraph, name), getattr(torch.xpu.XPUGraph, name)
        assert _arguments(ours) == _arguments(real), name


#: The clauses that an adapter has the most part in; the plug-in of `test_plugins.py` is held to all of them.
OF_THE_ADAPTER = [
    "constructor",
    "capture_error_mode",
    "capture_session",
    "replays_equal_eager",
    "cleanup",
    "two_backends_in_one_pool",
    "replays_anywhere",
    "failing_forwards",
    "forbidden_operations",
    "failing_recaptures",
    "graphs_share_memory",
    "failures_leak_no_memory",
]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param(dg.FullCudaGraphBackend, stand_in.XPUGraph, id="full, without error modes"),
        pytest.param(dg.BreakableCudaGraphBackend, stand_in.MUSAGraph, id="breakable, with error modes"),
    ],
)
def test_backends_keep_the_contract_on_a_stand_in(xpu: Callable[..., None], backend: Any, kind: Any) -> None:
    xpu(stand_in.make_module(kind))
    assert check_backend(backend, "xpu", clauses=OF_THE_ADAPTER) == OF_THE_ADAPTER


def test_what_a_module_lacks_is_done_without(xpu: Callable[..., None]) -> None:
    # No bindings of the allocator, no pools in its figures, none of the driver: outputs are held as they are then.
    xpu(stand_in.make_module(stand_in.MUSAGraph, without=("memory_snapshot", "mem_get_info")), "math")
    clauses = [clause for clause in OF_THE_ADAPTER if clause not in ("graphs_share_memory", "failures_leak_no_memory")]
    assert check_backend(dg.FullCudaGraphBackend, "xpu", clauses=clauses) == clauses
    memory = dg.get_device_adapter("xpu").memory()
    assert (memory.free, memory.total) == (None, None)
    assert memory.reserved >= memory.allocated


def test_a_driver_that_does_not_tell_its_memory_leaves_it_open(xpu: Callable[..., None]) -> None:
    module = stand_in.make_module(stand_in.XPUGraph)
    xpu(module)
    adapter = dg.get_device_adapter("xpu")
    assert (adapter.memory().free, adapter.memory().total) == (3 << 30, 4 << 30)

    def refuse(device: Any) -> Any:
        raise RuntimeError("the device doesn't support querying the available free memory")

    module.mem_get_info = refuse
    assert (adapter.memory().free, adapter.memory().total) == (None, None)


def _runner(**options: Any) -> Any:
    engine = ToyEngine(max_bs=4)
    engine.device = torch.device("xpu")
    config = dg.CudaGraphConfig(decode={"max_bs": 4}, prefill={"backend": "disabled"})
    runner = dg.DecodeCudaGraphRunner(engine, config=config, **options)
    engine.device = runner.adapter.device
    return engine, runner


@pytest.mark.parametrize("mode", ["global", "relaxed"])
def test_error_modes_are_refused_where_captures_have_none(xpu: Callable[..., None], mode: Any) -> None:
    xpu(stand_in.make_module(stand_in.XPUGraph))
    with pytest.raises(dg.BackendError) as caught:
        _runner(capture_error_mode=mode)
    assert str(caught.value) == (
        f"capture_error_mode: `{mode}`: captures on device `xpu` have no error modes [capture-error-mode-unsupported]"
        "\n\nhint: leave it at `thread_local`; the device decides what breaks a capture"
    )


@pytest.mark.parametrize("kind", [stand_in.XPUGraph, stand_in.MUSAGraph])
def test_a_runner_serves_on_a_stand_in_and_hands_on_the_modes_that_there_are(
    xpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    xpu(stand_in.make_module(kind))
    seen: list[Any] = []
    begin = kind._begin
    monkeypatch.setattr(kind, "_begin", lambda self, pool, mode: seen.append(mode) or begin(self, pool, mode))
    engine, runner = _runner(**({"capture_error_mode": "global"} if kind is stand_in.MUSAGraph else {}))
    with runner:
        assert len(runner.capture().captured) == 3
        batch = engine.batch([3, 5, 2])
        assert torch.equal(runner.run(batch), eager(engine, batch))
        assert sum(runner.metrics().replays.values()) == 1
    assert set(seen) == {"global" if kind is stand_in.MUSAGraph else "no modes"}


def _capture(adapter: Any, pool: dg.GraphMemoryPool, forward: Callable[[], Any]) -> tuple[Any, Any]:
    graph = adapter.graph()
    with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        output = forward()
    return graph, output


def test_asking_torch_what_a_pool_holds_takes_no_references_away() -> None:
    # The numbers of a pool are objects of their own in a process that has made many.
    pool = (int("1000000000"), int("1000000007"))
    before = [sys.getrefcount(value) for value in (*pool, False)]
    for _ in range(100):
        assert accelerator._spans(torch.cuda.memory_snapshot, pool) == []
    assert all(sys.getrefcount(value) >= count for value, count in zip((*pool, False), before, strict=True))


def test_events_of_a_capture_in_segments_are_not_referred_to_weakly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_streams, "_record", lambda event, stream: None)
    event: Any = torch.cuda.Event()
    cuda_streams.SideStreams(torch.empty(0)).record(event, None)  # type: ignore[arg-type]
    assert weakref.getweakrefcount(event) == 0


def test_outputs_are_held_weakly(xpu: Callable[..., None]) -> None:
    xpu(stand_in.make_module(stand_in.XPUGraph))
    adapter: Any = dg.get_device_adapter("xpu")
    pool, x = dg.GraphMemoryPool(adapter), torch.ones(1 << 18)
    graph, output = _capture(adapter, pool, lambda: x[1:].view(-1, 1) + 1)
    (weak, given) = adapter.weak_outputs([output, x], pool)
    assert given is x
    assert (weak.data_ptr(), weak.shape, weak.stride()) == (output.data_ptr(), output.shape, output.stride())
    before = adapter.memory().allocated
    del output
    assert adapter.memory().allocated <= before - (1 << 20) + 4
    graph.replay()
    assert weak[-1].item() == 2


@pytest.mark.parametrize("name", END_BINDINGS)
def test_captures_that_could_not_end_take_no_memory_for_good(
    name: str, xpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(stand_in, "_xpu_endAllocateToPool")
    monkeypatch.setattr(stand_in, f"_xpu_{name}", stand_in.end, raising=False)
    xpu(stand_in.make_module(stand_in.XPUGraph))
    adapter: Any = dg.get_device_adapter("xpu")
    pool, x = dg.GraphMemoryPool(adapter), torch.ones(4)

    def reserved() -> int:
        gc.collect()
        adapter.empty_cache()
        return int(adapter.memory().reserved)

    at_first = reserved()
    for _ in range(3):
        with pytest.raises(dg.CaptureError) as caught:
            _capture(adapter, pool, lambda: (x + 1).sum().item())
        assert caught.value.code == "host-read"  # the model's error, and not that of the end of the capture
    del caught
    assert reserved() == at_first
    graph, _ = _capture(adapter, pool, lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [2] * 4


def test_a_forward_may_leave_another_stream_current(xpu: Callable[..., None]) -> None:
    xpu(stand_in.make_module(stand_in.XPUGraph))
    adapter: Any = dg.get_device_adapter("xpu")
    x, side, before = torch.ones(4), adapter.stream(), adapter.current_stream()

    def forward() -> None:
        capturing = adapter.current_stream()
        side.wait_stream(capturing)
        stand_in.set_stream(side)
        x.add_(1)
        capturing.wait_stream(side)

    graph, _ = _capture(adapter, dg.GraphMemoryPool(adapter), forward)
    assert adapter.current_stream() is before
    graph.replay()
    assert x.tolist() == [2] * 4


def test_a_pool_takes_captures_again_after_one_that_could_not_begin(
    xpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    xpu(stand_in.make_module(stand_in.XPUGraph))
    adapter: Any = dg.get_device_adapter("xpu")
    pool, x = dg.GraphMemoryPool(adapter), torch.zeros(4)

    def capture() -> Any:
        return _capture(adapter, pool, lambda: x.add_(1))[0]

    kept = capture()
    with monkeypatch.context() as patch:
        # As the real ones: the allocator records into the pool before the device is asked.
        patch.setattr(stand_in.CPU, "capture", lambda *_, **__: 1 / 0)
        before = adapter.current_stream()
        with pytest.raises(ZeroDivisionError):
            capture()
        assert adapter.current_stream() is before
    for graph in (capture(), kept):
        graph.replay()
    assert x.tolist() == [2] * 4


def _device(kind: Any, module: Any, package: str | None) -> Any:
    return type("Device", (kind,), {"module": classmethod(lambda cls: module), "package": package})


@pytest.mark.parametrize(
    ("module", "changes", "reason", "hint"),
    [
        pytest.param(
            {},
            {"_is_compiled": lambda: False},
            "this torch was built without XPU",
            "install a torch built for XPU",
            id="not compiled",
        ),
        pytest.param(
            {"without": ("graph_pool_handle", "is_current_stream_capturing")},
            {"XPUGraph": None},
            "`torch.xpu` cannot capture graphs: it has no graph class, graph_pool_handle, is_current_stream_capturing",
            "update torch",
            id="no graphs",
        ),
        pytest.param(
            {},
            {"is_available": lambda: False},
            "torch finds no XPU device or no driver",
            "check the driver",
            id="no device",
        ),
    ],
)
def test_a_device_that_cannot_be_used_says_why(module: Any, changes: Any, reason: str, hint: str) -> None:
    live = stand_in.make_module(stand_in.XPUGraph, **module)
    for name, value in changes.items():
        setattr(live, name, value)
    availability = _device(XpuDevice, live, None).availability()
    assert (availability.available, availability.reason, availability.hint) == (False, reason, hint)


def test_a_package_that_is_missing_or_does_not_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    device = _device(MusaDevice, None, "torch_broken")
    assert device.availability() == dg.Availability(
        False, "torch_broken is not installed", "install the torch_broken for this torch"
    )
    (tmp_path / "torch_broken.py").write_text("raise OSError('libmusart.so: cannot open shared object file\\nmore')")
    for _ in range(2):
        assert device.availability() == dg.Availability(
            False,
            "torch_broken cannot be loaded: libmusart.so: cannot open shared object file",
            "run `python -c 'import torch_broken'`",
        )
    (tmp_path / "torch_plain.py").write_text("")
    assert _device(MusaDevice, None, "torch_plain").availability() == dg.Availability(
        False, "torch_plain has no `torch.musa`", "update torch_plain"
    )


def test_each_device_of_the_table_says_whether_it_is_there() -> None:
    for name in ("xpu", "musa"):
        availability = device_availability(name)
        assert availability or (availability.reason and availability.hint)
