"""Graphs that take turns on an executable: the same outputs in any order, and none of it where there is doubt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.devices.cpu import CpuDevice, UpdatableTapeGraph
from devicegraph.devices.cuda import KeptCudaGraph, UpdatableCudaGraph
from engines import ToyEngine, eager

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.devices.executables import SharedExecutables


def sharing(adapter: dg.DeviceAdapter | None = None) -> dg.FullCudaGraphBackend:
    adapter = dg.get_device_adapter("cpu") if adapter is None else adapter
    return dg.FullCudaGraphBackend(
        adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter), share_executables=True
    )


def capture(backend: dg.FullCudaGraphBackend, **forwards: Callable[[], Any]) -> None:
    with backend.capture_session():
        for key, forward in forwards.items():
            backend.capture_one(key, forward)


def executables(backend: dg.FullCudaGraphBackend) -> SharedExecutables:
    assert backend.executables is not None
    return backend.executables


def test_a_runner_gives_what_eager_gives_whatever_graph_ran_before() -> None:
    engine, backend = ToyEngine(), sharing()
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [1, 2, 4, 8]}), backend=backend) as r:
        r.capture()
        assert executables(backend).count == 1
        assert str(executables(backend)).startswith("4 graphs on 1 executables; a switch takes ")
        for seed, lengths in enumerate([[3] * 8, [2], [4, 1, 1], [5] * 7, [6, 2], [6, 3], [1]]):
            batch = engine.batch(lengths, seed)
            assert torch.equal(r.run(batch), eager(engine, batch))


def test_graphs_of_other_forms_have_executables_of_their_own() -> None:
    backend, x = sharing(), torch.ones(4)
    capture(backend, two=lambda: x * 2, three=lambda: x * 3, sine=lambda: x.sin(), half=lambda: x[:2] * 0.5)
    assert str(executables(backend)).partition(";")[0] == "4 graphs on 2 executables"
    for key, right in {"three": x * 3, "sine": x.sin(), "half": x[:2] * 0.5, "two": x * 2}.items():
        assert torch.equal(backend.replay(key, None), right)


def test_what_cannot_be_checked_or_draws_or_differs_shares_nothing() -> None:
    backend, x, steps = sharing(), torch.ones(4), torch.zeros(4)
    capture(
        backend,
        first=lambda: x * 2,
        draws=lambda: torch.rand(4) * 2,
        nothing=lambda: None,
        moves=lambda: steps.add_(1) * 2,
        last=lambda: x * 5,
    )
    assert executables(backend).alone == {
        "draws": "its outputs cannot be checked",
        "nothing": "its outputs cannot be checked",
        "moves": "its outputs differ from run to run",
    }
    assert torch.equal(backend.replay("last", None), x * 5)
    assert executables(backend).count == 4


@pytest.mark.parametrize(
    "forward",
    [
        lambda pair: pair[:, -1],
        lambda pair: pair[:, :1].expand(-1, 3),
        lambda pair: torch.view_as_complex(pair).conj(),
        lambda pair: torch.view_as_complex(pair).conj().imag,
    ],
    ids=["a column", "expanded", "conjugated", "negated"],
)
def test_outputs_in_any_form_are_checked_in_buckets_of_any_size(
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    table = torch.arange(64.0).view(32, 2)

    class Strided(ToyEngine):
        def forward(self, batch: Any) -> Any:
            return forward(table[batch.input_ids])

    engine, backend = Strided(), sharing()
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [1, 2, 4]}), backend=backend) as r:
        r.capture()
        assert str(executables(backend)).partition(";")[0] == "3 graphs on 1 executables"
        for seed, lengths in enumerate([[3], [4, 1, 1], [2, 3], [5]]):
            batch = engine.batch(lengths, seed)
            assert torch.equal(r.run(batch), engine.forward(batch))
        assert dg.verify(r, [engine.batch([4]), engine.batch([2, 3])], state={})


class Lies(UpdatableTapeGraph):
    """Says that it was updated, and does what it did."""

    def update(self, recorded: Any) -> bool:
        return True


class Idles(UpdatableTapeGraph):
    """Does nothing any more once it was updated."""

    def update(self, recorded: Any) -> bool:
        self.launch = lambda: None  # type: ignore[method-assign]
        return True


class Spoils(UpdatableTapeGraph):
    """Is no longer what it was after an update that failed."""

    def update(self, recorded: UpdatableTapeGraph) -> bool:
        self._runs = recorded.tape
        assert self.tape is not None
        assert recorded.tape is not None
        return self.tape.operators() == recorded.tape.operators()


def sharing_on(graph: type[UpdatableTapeGraph]) -> dg.FullCudaGraphBackend:
    class Device(CpuDevice):
        def updatable_graph(self) -> UpdatableTapeGraph:
            return graph()

    return sharing(Device(torch.device("cpu")))


@pytest.mark.parametrize(("graph", "factor"), [(Lies, 3), (Idles, 3), (Idles, 2)])
def test_an_update_that_does_not_do_what_it_says_is_found_when_the_graph_is_captured(
    graph: type[UpdatableTapeGraph], factor: int
) -> None:
    # The second graph's output lies where the first one's was, and with the factor 2 it is there before the launch.
    backend, x = sharing_on(graph), torch.ones(4)
    capture(backend, first=lambda: x * 2, second=lambda: x * factor)
    assert executables(backend).alone == {"second": "its outputs on a shared executable are not those of its warm-up"}
    assert torch.equal(backend.replay("second", None), x * factor)


def test_an_executable_that_an_update_spoiled_is_updated_again_before_it_is_used() -> None:
    backend, x = sharing_on(Spoils), torch.ones(4)
    capture(backend, two=lambda: x * 2, sine=lambda: x.sin())
    assert torch.equal(backend.replay("two", None), x * 2)
    assert torch.equal(backend.replay("sine", None), x.sin())
    assert executables(backend).count == 2


@pytest.mark.parametrize("refused", ["two", "three", "four"])
def test_a_graph_that_its_executable_does_not_take_any_more_gets_one_of_its_own(refused: str) -> None:
    made: list[UpdatableTapeGraph] = []
    refuses: list[UpdatableTapeGraph] = []

    class Refuses(UpdatableTapeGraph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def update(self, recorded: UpdatableTapeGraph) -> bool:
            self._runs = None if recorded in refuses else self._tape
            return super().update(recorded)

    factors = {"two": 2, "three": 3, "four": 4}
    backend, x = sharing_on(Refuses), torch.ones(4)
    capture(backend, two=lambda: x * 2, three=lambda: x * 3, four=lambda: x * 4)
    refuses.append(made[list(factors).index(refused) - len(factors)])
    for name, factor in list(factors.items()) * 2:
        assert torch.equal(backend.replay(name, None), x * factor)
    # The executable is made of the first graph, and made anew of it.
    why = {refused: "the executable that it shared could not be updated to it any more"}
    assert executables(backend).alone == ({} if refused == "two" else why)
    assert executables(backend).count == (1 if refused == "two" else 2)
    while factors:
        backend.discard(next(iter(factors)))
        del factors[next(iter(factors))]
        for name, factor in factors.items():
            assert torch.equal(backend.replay(name, None), x * factor)
    assert (executables(backend).count, backend.graph_pool.graphs) == (0, 0)


def test_an_output_outside_of_the_pool_is_not_written_to_be_checked() -> None:
    backend, slot = sharing(), torch.arange(4)
    capture(backend, slot=lambda: slot)
    assert slot.tolist() == [0, 1, 2, 3]
    assert executables(backend).alone == {"slot": "its outputs cannot be checked"}


def test_dropping_all_graphs_makes_no_executable() -> None:
    made: list[UpdatableTapeGraph] = []

    class Counts(UpdatableTapeGraph):
        def instantiate(self) -> None:
            made.append(self)
            super().instantiate()

    backend, x = sharing_on(Counts), torch.ones(4)
    capture(backend, two=lambda: x * 2, three=lambda: x * 3, four=lambda: x * 4)
    assert len(made) == 1
    backend.cleanup()
    assert len(made) == 1


def test_a_graph_whose_executable_cannot_be_handed_on_stays_until_it_can() -> None:
    failures: list[Exception] = []

    class Failing(UpdatableTapeGraph):
        def instantiate(self) -> None:
            if failures:
                raise failures.pop()
            super().instantiate()

    backend, x = sharing_on(Failing), torch.ones(4)
    capture(backend, two=lambda: x * 2, three=lambda: x * 3, four=lambda: x * 4)
    failures.append(torch.OutOfMemoryError("no memory for an executable"))
    with pytest.raises(torch.OutOfMemoryError):
        backend.discard("two")
    for name, factor in (("four", 4), ("two", 2), ("three", 3)):
        assert torch.equal(backend.replay(name, None), x * factor)
    backend.discard("two")
    for name, factor in (("four", 4), ("three", 3)):
        assert torch.equal(backend.replay(name, None), x * factor)
    backend.cleanup()
    assert backend.graph_pool.graphs == 0


def test_a_graph_that_draws_what_its_output_does_not_show_shares_nothing() -> None:
    backend, x = sharing(), torch.ones(4)

    def draws() -> torch.Tensor:
        torch.rand(4)
        return x * 2

    capture(backend, one=draws, two=draws)
    assert executables(backend).count == 2


def test_an_executable_goes_on_when_the_graph_that_it_was_made_of_is_dropped_or_captured_anew() -> None:
    backend, x = sharing(), torch.ones(4)
    capture(backend, two=lambda: x * 2, three=lambda: x * 3, four=lambda: x * 4)
    backend.discard("two")
    assert torch.equal(backend.replay("four", None), x * 4)
    assert torch.equal(backend.replay("three", None), x * 3)
    capture(backend, three=lambda: x * 33)
    assert torch.equal(backend.replay("four", None), x * 4)
    assert torch.equal(backend.replay("three", None), x * 33)
    assert executables(backend).count == 1
    backend.cleanup()
    assert executables(backend).count == 0
    assert backend.graph_pool.graphs == 0


def test_a_capture_that_fails_leaves_the_executable_to_the_others() -> None:
    backend, x = sharing(), torch.ones(4)

    def fails() -> torch.Tensor:
        raise ValueError("from the model")

    capture(backend, two=lambda: x * 2)
    with pytest.raises(dg.CaptureError), backend.capture_session():
        backend.capture_one("bad", fails)
    assert torch.equal(backend.replay("two", None), x * 2)
    assert backend.graph_pool.graphs == 1


def test_a_device_without_such_graphs_says_so_when_the_backend_is_made() -> None:
    class Plain(CpuDevice):
        updatable_graph = dg.DeviceAdapter.updatable_graph

    with pytest.raises(dg.BackendError) as caught:
        sharing(Plain(torch.device("cpu")))
    assert str(caught.value) == (
        "graphs cannot share executables: device `cpu` does not update them [executables-fixed]\n\n"
        "hint: leave `share_executables` out"
    )


class Driver:
    """The one call of the driver: an executable takes a graph of its form."""

    def __init__(self) -> None:
        self.forms: dict[int, str] = {}
        self.does: dict[int, int] = {}

    def update_executable(self, *, executable: int, graph: int) -> bool:
        if self.forms[executable] != self.forms[graph]:
            return False
        self.does[executable] = graph
        return True


def test_a_cuda_graph_gives_the_driver_its_executable_and_the_others_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, launched = Driver(), []
    monkeypatch.setattr("devicegraph.devices.cuda.kernel_on", {0: driver}.__getitem__)

    def graph(number: int, form: str) -> UpdatableCudaGraph:
        driver.forms |= {number: form, -number: form}
        raw = SimpleNamespace(
            raw_cuda_graph=lambda: number,
            raw_cuda_graph_exec=lambda: -number,
            instantiate=lambda: driver.does.update({-number: number}),
            replay=lambda: launched.append(driver.does[-number]),
            reset=lambda: driver.does.pop(-number, None),
        )
        return UpdatableCudaGraph(raw, 0)

    one, two, other = graph(1, "a"), graph(2, "a"), graph(3, "b")
    one.instantiate()
    one.launch()
    assert (one.update(two), one.update(other)) == (True, False)
    one.launch()
    assert launched == [1, 2]
    one.reset()
    assert driver.does == {}


@pytest.mark.parametrize("kind", [KeptCudaGraph, UpdatableCudaGraph])
def test_a_cuda_graph_loses_its_memsets_before_it_is_executable(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    kernel = SimpleNamespace(replace_memsets=lambda graph: done.append(f"memsets of {graph}"))
    monkeypatch.setattr("devicegraph.devices.cuda.kernel_on", {3: kernel}.__getitem__)
    raw = SimpleNamespace(
        raw_cuda_graph=lambda: 7, instantiate=lambda: done.append("executable"), replay=None, reset=lambda: None
    )
    graph, pool = kind(raw, 3), dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    graph.keep(pool)
    assert done == ["memsets of 7", "executable"][: 2 if kind is KeptCudaGraph else 1]
    assert pool.graphs == 1
    graph.reset()
    assert pool.graphs == 0
