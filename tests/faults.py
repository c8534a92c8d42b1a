"""Faults at every step: what a runner asks of its parts is recorded once, and each call then fails in its turn.

A call fails before it does anything, or after it has done all; a context, before and after it is entered and left.
"""

from __future__ import annotations

import functools
import gc
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import devicegraph as dg
from devicegraph.backends.breaks import batch_in_use
from devicegraph.devices.tape_memory import TapeMemory
from engines import CompiledPrefill, eager
from soak.engine import Rows, SoakEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOOKS = ("pre_replay", "prepare_metadata", "upgrade_metadata", "prepare_in_graph", "after_warmup", "barrier", "vote")
#: What returns a context.
CONTEXTS = ("capture", "capture_segments", "capture_session", "stream_context", "replay_session", "pause")
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: ValueError("injected"),
    lambda: torch.OutOfMemoryError("injected"),
    lambda: KeyboardInterrupt("injected"),
)


class Point(NamedTuple):
    """A call of a scenario: the how-manyth, and which."""

    index: int
    name: str
    is_after: bool


class Calls:
    """The calls of a runner's parts while it is switched on, and the one among them that fails.

    Attributes:
        made: their names, in order.
        point: which one fails.
        error: what it raises, once.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.is_on = False
        self.point: Point | None = None
        self.error: BaseException | None = None
        self.has_failed = False

    def start(self, point: Point | None = None, error: BaseException | None = None) -> None:
        """Notes calls from here on, and lets one fail."""
        self.made, self.is_on, self.point, self.error, self.has_failed = [], True, point, error, False

    def watch(self, owner: str, thing: Any, names: tuple[str, ...] | None = None) -> Any:
        """Notes the calls of an object's methods, by default of all public ones."""
        if names is None:
            methods = (
                name for kind in type(thing).__mro__ for name, value in vars(kind).items() if inspect.isfunction(value)
            )
            names = tuple(dict.fromkeys(name for name in methods if not name.startswith("_")))
        for name in names:
            setattr(thing, name, self._noted(f"{owner}.{name}", getattr(thing, name), name in CONTEXTS))
        return thing

    def _noted(self, name: str, function: Callable[..., Any], is_context: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "on_segment" in kwargs:
                kwargs["on_segment"] = self._noted_segment(kwargs["on_segment"])
            if is_context:
                return _Context(self, name, function(*args, **kwargs))
            index = self.reach(name)
            result = function(*args, **kwargs)
            self.leave(index)
            return self.watch("graph", result, ("replay", "reset")) if name.endswith("graph") and result else result

        return call

    def _noted_segment(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        noted = self._noted("on_segment", function, False)
        return lambda graph: noted(self.watch("segment", graph, ("replay", "reset")))

    def reach(self, name: str) -> int:
        """A call is about to be made; its number."""
        if self.is_on:
            self.made.append(name)
        self._fail(len(self.made) - 1, False)
        return len(self.made) - 1

    def leave(self, index: int) -> None:
        """A call has done its work."""
        self._fail(index, True)

    def _fail(self, index: int, is_after: bool) -> None:
        point = self.point
        if not self.is_on or self.has_failed or point is None or (index, is_after) != (point.index, point.is_after):
            return
        assert self.made[index] == point.name, f"{point} was recorded, and now there is {self.made[index]}"
        self.has_failed = True
        assert self.error is not None
        raise self.error


class _Context:
    """A context whose ends are calls. What fails inside of it passes through, as an error of its block does."""

    def __init__(self, calls: Calls, name: str, context: Any) -> None:
        self._calls, self._name, self._context = calls, name, context

    def __enter__(self) -> Any:
        index = self._calls.reach(f"{self._name}, enter")
        value = self._context.__enter__()
        try:
            self._calls.leave(index)
        except BaseException as error:
            if not self._context.__exit__(type(error), error, error.__traceback__):
                raise
        return self._calls.watch("segments", value, ("pause",)) if hasattr(value, "pause") else value

    def __exit__(self, *failure: object) -> Any:
        if failure[0] is not None:
            return self._context.__exit__(*failure)
        try:
            index = self._calls.reach(f"{self._name}, exit")
        except BaseException as injected:
            if not self._context.__exit__(type(injected), injected, injected.__traceback__):
                raise
            return None
        self._context.__exit__(None, None, None)
        self._calls.leave(index)
        return None


class WithHooks(SoakEngine):
    """The engine of the long runs, of one variant, with every hook."""

    variants, variant = (None,), None
    most_requests = 8

    def pre_replay(self, batch: Any) -> None:
        pass

    def upgrade_metadata(self, batch: Any, key: Any) -> None:
        pass

    def prepare_in_graph(self, batch: Any, key: Any) -> None:
        self.offset.add_(0)

    def after_warmup(self) -> None:
        pass

    def barrier(self) -> None:
        pass

    def vote(self, proposal: dg.Proposal) -> dg.Proposal:
        return proposal

    def rows(self, size: int, seed: int) -> Any:
        ids = [(seed + i) % 16 for i in range(size)]
        cells = [1 + (seed + i) % 32 for i in range(size)]
        return Rows(ids, cells, cells[::-1], ids, ids, None, seed % 4, None, min(size, self.most_requests)).batch(
            self.device
        )


class Compiled(CompiledPrefill):
    """The toy engine of torch.compile, with hooks."""

    cache_loc_dtype = torch.int64

    def barrier(self) -> None:
        pass

    def compile_mode(self, is_entering: bool) -> None:
        pass

    def after_warmup(self) -> None:
        pass

    def rows(self, size: int, seed: int) -> Any:
        return self.chunks([(1 + i // 8, 0, min(8, size - i)) for i in range(0, size, 8)], seed)


class Collector:
    """The garbage collector as captures see it: what they ask of it, without its work, which would be most of theirs.

    Attributes:
        is_on: whether it would collect.
        frozen: how many objects are set aside.
    """

    def __init__(self) -> None:
        self.is_on, self.frozen = True, 0

    def isenabled(self) -> bool:
        return self.is_on

    def enable(self) -> None:
        self.is_on = True

    def disable(self) -> None:
        self.is_on = False

    def collect(self) -> None:
        pass

    def get_freeze_count(self) -> int:
        return self.frozen

    def freeze(self) -> None:
        self.frozen = 1

    def unfreeze(self) -> None:
        self.frozen = 0


COLLECTOR = Collector()


class Bench:
    """A runner of two buckets whose parts are watched, and what the process looked like before.

    Attributes:
        calls: what was called while something was done.
        levels: what the graphs hold after a capture without fault.
    """

    def __init__(self, phase: str, backend: str, device: str = "cpu", *, adapter_of: str | None = None) -> None:
        """Makes and captures the runner.

        Args:
            phase: decode or prefill.
            backend: the configuration's word, and options of it.
            device: where tensors are.
            adapter_of: the device whose adapter is used, where that stands in for another one.
        """
        self.phase, self.calls = phase, Calls()
        self.adapter_of = device if adapter_of is None else adapter_of
        self.engine: Any = Compiled(device) if backend == "tc_piecewise" else WithHooks(device)
        self.pool = dg.GraphMemoryPool(dg.get_device_adapter(self.adapter_of))
        self.outside = self.surroundings()
        hooks = [name for name in (*HOOKS, "compile_mode") if hasattr(self.engine, name)]
        self.calls.watch("engine", self.engine, tuple(hooks))
        kind = dg.DecodeCudaGraphRunner if phase == "decode" else dg.PrefillCudaGraphRunner
        options: dict[str, Any] = {}
        if phase == "prefill":
            self.engine.most_requests = 4
        if backend != "tc_piecewise":
            options["registry"] = self.engine.registry(max_bs=self.engine.most_requests, share_pool=False)
        adapter, barrier = dg.get_device_adapter(self.adapter_of), getattr(self.engine, "barrier", None)
        given: dict[str, Any] = {"phase": phase, "graph_pool": self.pool, "barrier": barrier}
        if "shared" in backend:
            options["backend"] = dg.FullCudaGraphBackend(adapter, share_executables=True, **given)
        elif adapter_of is not None and backend == "breakable":  # the configuration has none for it
            options["backend"] = dg.BreakableCudaGraphBackend(adapter, barrier_fn=barrier, **given)
        self.engine.device = self.adapter_of
        self.buckets = [2, 4] if phase == "decode" else [4, 8]
        config = dg.CudaGraphConfig(**{phase: {"bs": self.buckets, "backend": backend.partition(",")[0]}})
        self.runner: Any = kind(self.engine, config=config, graph_pool=self.pool, progress=self._progress, **options)
        self.engine.device = torch.device(device)
        self.calls.watch("engine", self.engine, ("make_batch", "forward"))
        self.runner.hooks.make_batch = self.engine.make_batch
        for owner, thing in (("adapter", self.runner.adapter), ("registry", self.runner.buffer_registry)):
            self.calls.watch(owner, thing)
        if self.runner.backend.adapter is not self.runner.adapter:
            self.calls.watch("adapter", self.runner.backend.adapter)
        self.calls.watch("backend", self.runner.backend)
        self.calls.watch("runner", self.runner, ("_forward", "progress"))
        for _ in range(2):  # the second finds everything made that is made once
            self.runner.capture()
            self.expect_replays()
        for size in (3, self.largest + 2):
            self.expect_step(size)
        gc.collect()
        self.levels = self.held()

    def _progress(self, event: Any) -> None:
        pass

    def act(self, scenario: str) -> None:
        """Plays a scenario without a fault."""
        size = self.largest + 2 if SCENARIOS[scenario].is_large else 3
        SCENARIOS[scenario].act(self, self.engine.rows(size, 3))

    def repair(self) -> None:
        """Captures again where graphs are missing."""
        if self.runner._state == "paused":
            self.runner.resume()
        if len(self.runner.graphs) < len(self.buckets) and self.runner._state == "open":
            assert len(self.runner.capture().captured) == len(self.buckets)

    def close(self) -> None:
        """Closes the runner and expects nothing of it to be left."""
        self.calls.is_on = False
        self.runner.close()
        assert self.pool.graphs == 0

    @property
    def largest(self) -> int:
        return self.buckets[-1]

    def surroundings(self) -> dict[str, Any]:
        """What a call must leave as it found it."""
        adapter = dg.get_device_adapter(self.adapter_of)
        return {
            "collector": (COLLECTOR.is_on, COLLECTOR.frozen),
            "stream": adapter.current_stream(),
            "is capturing": adapter.is_capturing(),
            "capture mode": dg.get_is_capture_mode(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "function modes": torch._C._len_torch_function_stack(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "batch": _current_batch(),
        }

    def held(self) -> dict[str, Any]:
        """What the graphs hold."""
        self.runner.adapter.empty_cache()
        memory = self.runner.adapter.memory()
        on_host = self.engine.device.type == "cpu"
        return {
            "graphs of the pool": self.pool.graphs,
            "allocated": memory.allocated,
            "reserved": memory.reserved if on_host else None,
            "tapes": len(TapeMemory.all()),
            "generation counts": len(self.pool._captured),
            "pooled buffers": len(dg.input_buffer_pool),
        }

    def expect_step(self, size: int, seed: int = 1) -> None:
        """A step gives what eager gives."""
        batch = self.engine.rows(size, seed)
        wanted = self.eager(batch)
        assert torch.equal(self.runner.run(batch), wanted)

    def eager(self, batch: Any) -> torch.Tensor:
        """What the forward gives on a batch, on a copy of the cache."""
        if isinstance(self.engine, Compiled):
            self.engine.forwards.append(0)  # which `eager` takes back
            with batch_in_use(batch):
                return eager(self.engine, batch)
        kept = self.engine.cache.clone()
        self.engine.prepare_metadata(batch, None)
        with torch.no_grad():
            output = self.engine.forward(batch)
        self.engine.cache.copy_(kept)
        return output

    def expect_replays(self) -> None:
        """Every bucket is there, and its replays are right."""
        assert [key.size for key in self.runner.graphs] == self.buckets[::-1]
        assert set(self.runner.backend.captured) == set(self.runner.graphs)
        for size in (*self.buckets, self.buckets[0]):
            assert self.runner.can_run(self.engine.rows(size, size)).code == "graph"
            self.expect_step(size, size)


def _current_batch() -> Any:
    try:
        return dg.current_batch()
    except RuntimeError:
        return None


class Scenario(NamedTuple):
    """Something a runner does.

    Attributes:
        act: does it, with a batch.
        begin: what comes before.
        captures: whether what is raised comes out as a `CaptureError`; else it passes through as it is.
        is_large: whether the batch is above the largest bucket.
    """

    act: Callable[[Bench, Any], Any]
    begin: Callable[[Bench], None] = lambda bench: None
    captures: bool = False
    is_large: bool = False


def _one_shape(bench: Bench, batch: Any) -> None:
    bench.calls.is_on = False
    with bench.runner.backend.capture_session():
        bench.calls.is_on = True
        try:
            bench.runner.capture_one_shape(bench.largest)
        finally:
            bench.calls.is_on = False


def _drop(bench: Bench) -> None:
    for key in list(bench.runner.graphs):
        bench.runner.drop_graph(key)


SCENARIOS = {
    "capture": Scenario(lambda bench, batch: bench.runner.capture(), _drop, captures=True),
    "recapture": Scenario(lambda bench, batch: bench.runner.capture(), captures=True),
    "capture of one shape": Scenario(_one_shape, captures=True),
    "estimate": Scenario(lambda bench, batch: bench.runner.estimate_capture(), _drop, captures=True),
    "replay": Scenario(lambda bench, batch: bench.runner.run(batch)),
    "eager step": Scenario(lambda bench, batch: bench.runner.run(batch), is_large=True),
    "prepare": Scenario(lambda bench, batch: bench.runner.replay_prepare(batch)),
    "question": Scenario(lambda bench, batch: bench.runner.can_run(batch)),
    "pause": Scenario(lambda bench, batch: bench.runner.pause()),
    "close": Scenario(lambda bench, batch: bench.runner.close()),
}


#: What captures take too long for every run; where a runner is closed, each fault takes a new one.
SLOW = ("capture", "recapture", "capture of one shape", "estimate", "close")


def cases(bench: Bench, scenario: str, *, every: int | None) -> Iterator[tuple[Point, BaseException]]:
    """The faults of a scenario: every error at every place, or at one place in so many one of them."""
    found = points(bench, scenario)
    if every is None:
        for point in found:
            yield from ((point, error()) for error in ERRORS)
    else:
        for turn, point in enumerate(one_for_each_name(found)[len(scenario) % every :: every]):
            yield point, ERRORS[turn % len(ERRORS)]()


def points(bench: Bench, scenario: str) -> list[Point]:
    """Every place where a scenario can fail: before and after each call that it makes."""
    SCENARIOS[scenario].begin(bench)
    bench.calls.start()
    bench.act(scenario)
    bench.calls.is_on = False
    made = bench.calls.made.copy()
    bench.repair()
    return [Point(index, name, is_after) for index, name in enumerate(made) for is_after in (False, True)]


def one_for_each_name(found: list[Point]) -> list[Point]:
    """The last place before and the first one after each call of a name."""
    before = {point.name: point for point in found if not point.is_after}
    after = {point.name: point for point in reversed(found) if point.is_after}
    return sorted([*before.values(), *after.values()])


def inject(bench: Bench, scenario: str, point: Point, error: BaseException) -> None:
    """Lets a call of a scenario fail, and expects all that holds after any fault."""
    SCENARIOS[scenario].begin(bench)
    captures, graphs = SCENARIOS[scenario].captures, set(bench.runner.graphs)
    batch = bench.engine.rows(bench.largest + 2 if SCENARIOS[scenario].is_large else 3, 3)
    given = dict(vars(batch))
    bench.calls.start(point, error)
    raised: BaseException | None = None
    report: Any = None
    try:
        report = SCENARIOS[scenario].act(bench, batch)
    except BaseException as caught:
        raised = caught
    bench.calls.is_on = False
    assert bench.calls.has_failed, f"the call was not made again: {bench.calls.made}, {raised!r}"
    assert bench.surroundings() == bench.outside
    assert vars(batch).keys() == given.keys()
    assert all(vars(batch)[name] is value for name, value in given.items())
    if captures and raised is None:
        _expect_told(bench, report, error)
    elif captures and isinstance(error, Exception):
        assert isinstance(raised, dg.CaptureError), f"{raised!r}"
        assert raised.phase == bench.phase
        if raised.code == "estimate-failed":
            assert str(error) in raised.message
        else:
            assert error in _chain(raised)
            assert raised.code == "out-of-memory" or not isinstance(error, torch.OutOfMemoryError)
    else:
        assert raised is error, f"{raised!r}"
    runner = bench.runner
    if captures:
        assert set(runner.backend.captured) == set(runner.graphs)
        left = set() if scenario != "capture of one shape" else graphs - {dg.ShapeKey(bench.largest)}
        assert raised is None or set(runner.graphs) == left
    elif scenario == "close":
        runner.close()
        assert bench.pool.graphs == 0
        return
    else:
        assert set(runner.graphs) == set(runner.backend.captured) == graphs
    if raised is None or not isinstance(error, Exception):
        error.__traceback__ = None  # it holds all that was going on; those that became errors of ours do not
    del raised, report
    for fields in (given, vars(batch)):  # memory of the device, which the error's frames hold
        fields.clear()
    bench.expect_step(bench.largest + 2)
    bench.repair()
    bench.expect_replays()
    if bench.held() != bench.levels:
        gc.collect()
        assert bench.held() == bench.levels, f"{bench.held()} and not {bench.levels}"


def _expect_told(bench: Bench, report: Any, error: BaseException) -> None:
    """A capture that went on says which graph it dropped and why, unless it only asked how large an output can be."""
    if report.dropped:
        assert isinstance(error, torch.OutOfMemoryError)
        assert any(str(error).splitlines()[0] in drop.reason for drop in report.dropped), f"{report.dropped}"
    else:
        assert isinstance(error, Exception)
        assert bench.runner.backend.wants_largest_output
        assert "backend.size_outputs" not in bench.calls.made[: bench.calls.point.index]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
