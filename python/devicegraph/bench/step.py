"""`devicegraph bench step`: whole steps against the bare `graph.replay()` of the same forward.

A step is `runner.run(batch)`: decision, fill, replay, trim. Two engines show two things: one whose graph is a few
kernels, where the device never holds up the host, what a step costs the host; and the reference decoder what that means
for the time of a step. Their metadata is prepared in the graph, so that all of the difference is the runner's.

A step's time is taken twice: `queued`, among others that follow at once, where a device that is slower than the host
hides the host's part; and `alone`, from an idle device to its last kernel.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.backends.breaks import batch_in_use
from devicegraph.bench.decoder import SMALL, TINY, Cache, DecodeEngine, Decoder, Shape, attend
from devicegraph.bench.measuring import (
    Result,
    Spread,
    Table,
    host_microseconds,
    lone_microseconds,
    queued_microseconds,
    take_turns,
)
from devicegraph.config import CudaGraphConfig
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.layouts import build_decode_registry
from devicegraph.runners.capture_mode import freeze_gc
from devicegraph.runners.decode import DecodeCudaGraphRunner
from devicegraph.runners.shape_key import ShapeKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.bench.decoder import Batch
    from devicegraph.devices import DeviceAdapter
    from devicegraph.registry import CudaGraphBufferRegistry, Executor

#: Steps in a block whose launches are queued at once: few enough for a device's queue to take them all.
BLOCK: Final = 8
FEW_KERNELS: Final = Shape(0, 64, 4, 2, 128, 256, 64, 32)


class StepEngine(DecodeEngine):
    """The decode engine with its mask made in the graph."""

    prepare_metadata: Any = None

    def prepare_in_graph(self, batch: Batch, key: ShapeKey | None) -> None:
        """Recorded at the head of the graph."""
        DecodeEngine.prepare_metadata(self, batch, key)


def engine_on(device: torch.device, shape: Shape, kind: type[StepEngine] = StepEngine) -> StepEngine:
    """An engine with a model of its own, with random weights in bfloat16."""
    torch.manual_seed(0)
    with device:  # drawing half a billion numbers on the host takes longer than to measure anything
        model = Decoder(shape).to(torch.bfloat16).requires_grad_(False)
    return kind(shape, model, Cache(shape, device), attend)


def executors_on(adapter: DeviceAdapter) -> tuple[Executor, ...]:
    """The executors whose steps are compared, the one that parts are shown of first."""
    return ("native", "node") if adapter.fills_in_graphs else ("auto",)


def runner_of(engine: StepEngine, *, executor: Executor = "auto", **options: Any) -> DecodeCudaGraphRunner:
    """A runner of the engine's buckets with a graph memory pool of its own."""
    maximum = max(engine.buckets)
    return DecodeCudaGraphRunner(
        engine,
        config=CudaGraphConfig(decode={"bs": list(engine.buckets)}),
        registry=build_decode_registry(
            device=engine.device,
            max_bs=maximum,
            max_num_token=maximum,
            seq_len_fill_value=1,
            executor=executor,
        ),
        graph_pool=None if "backend" in options else GraphMemoryPool(get_device_adapter(engine.device)),
        on_error="raise",
        progress=lambda _: None,
        **options,
    )


def bare_graph(
    adapter: DeviceAdapter,
    engine: StepEngine,
    registry: CudaGraphBufferRegistry,
    size: int,
    pool: GraphMemoryPool,
    stream: Any,
) -> tuple[Any, Any]:
    """A graph of a bucket over a registry's buffers, and its output.

    Captured as one would without this package, in the fewest calls: on CUDA by `torch.cuda.graph`.
    """
    key = ShapeKey(size)
    batch = engine.make_batch(registry.views(padded_bs=size, padded_num_tokens=size), key)

    def forward() -> Any:
        with batch_in_use(batch):
            engine.prepare_in_graph(batch, key)
            return engine.forward(batch)

    for _ in range(2):
        with adapter.stream_context(stream):
            forward()
        adapter.synchronize()
    if adapter.type == "cuda":
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
            output = forward()
    else:
        graph = adapter.graph()
        with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = forward()
    return graph, output


def parts_of(runner: DecodeCudaGraphRunner, batch: Any) -> dict[str, Callable[[], Any]]:
    """The runner's graph, and the parts of a step, each as a call that can be repeated."""
    decision = runner.can_run(batch)
    key = decision.key
    assert key is not None  # the batch is of a captured size
    graph, backend, registry = runner.graphs[key], runner.backend, runner.buffer_registry
    assert backend is not None  # as above
    bs, num_tokens = runner.hooks.sizes(batch)
    sizes = {"raw_bs": bs, "padded_bs": key.size, "raw_num_tokens": num_tokens, "padded_num_tokens": key.size}
    bucket = {"padded_bs": key.size, "padded_num_tokens": key.size}
    static = registry.extract_buffer(**bucket, forward_batch_template=batch)
    replay: Callable[[], Any] = graph.launch or (lambda: backend.replay(key, static))

    def fill_and_replay() -> None:
        fill_step()
        replay()
        if graph.node is not None:
            graph.node.launched()

    def fill_step() -> None:
        if graph.node is None:
            registry.fill_from(batch, **sizes)
        else:
            registry.fill_in(graph.node, batch, **sizes)

    parts = {
        "graph": backend.captured[key].recording.replay,
        "fill and replay": fill_and_replay,
        "decide": lambda: runner.can_run(batch),
        "fill": fill_step,
        "replay": replay,
        "trim": lambda: graph.trim(bs, clone=False),
    }
    if graph.launch is None:
        parts["show"] = lambda: registry.extract_buffer(**bucket, forward_batch_template=batch)
    return parts


def _median_host(adapter: DeviceAdapter, step: Callable[[], Any], blocks: int) -> float:
    return statistics.median(host_microseconds(adapter, step, BLOCK) for _ in range(blocks))


def measure_engine(title: str, engine: StepEngine, adapter: DeviceAdapter, rounds: int, blocks: int) -> list[Table]:
    """The steps of an engine at its buckets under each executor, and what the parts of one take."""
    steps = Table(title)
    parts: list[Table] = []
    with ExitStack() as stack:
        runners: dict[str, DecodeCudaGraphRunner] = {}
        for executor in executors_on(adapter):
            runner = stack.enter_context(runner_of(engine, executor=executor))
            runners[str(runner.capture().executor)] = runner
        parts += [Table(f"{title}: where the host's time goes with `{name}`, us") for name in runners]
        for size in engine.buckets:
            batch = engine.batch(size, seed=1)
            each = {name: (runner, batch) for name, runner in runners.items()}
            registry = next(iter(runners.values())).buffer_registry
            bare, _ = bare_graph(adapter, engine, registry, size, GraphMemoryPool(adapter), adapter.stream())
            measured = _measure_size(adapter, bare.replay, each, rounds, blocks)
            for table, (name, (step, where)) in zip(parts, measured.items(), strict=True):
                steps.rows.append({"bs": size, "filled by": name, **step})
                table.rows.append({"bs": size, **where})
    return [steps, *parts]


def _measure_size(
    adapter: DeviceAdapter,
    bare: Callable[[], Any],
    runners: dict[str, tuple[DecodeCudaGraphRunner, Batch]],
    rounds: int,
    blocks: int,
) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """What a step takes, and its parts, for each executor; all of them take turns, and the bare replay."""
    ways = {"bare": bare}
    pieces: dict[str, Callable[[], Any]] = {}
    names: dict[str, list[str]] = {}
    for name, (runner, batch) in runners.items():
        runner.run(batch)
        parts = parts_of(runner, batch)
        ways |= {f"{name} graph": parts.pop("graph"), f"{name} run": partial(runner.run, batch)}
        pieces |= {f"{name} {part}": call for part, call in parts.items()}
        names[name] = [part for part in parts if part != "fill and replay"]
    host = take_turns(
        {name: partial(_median_host, adapter, step, blocks) for name, step in {**ways, **pieces}.items()}, rounds
    )
    queued, alone = (
        take_turns({name: partial(microseconds, adapter, step, BLOCK) for name, step in ways.items()}, rounds)
        for microseconds in (queued_microseconds, lone_microseconds)
    )
    found = {}
    for name, of_name in names.items():
        run = f"{name} run"
        step = {
            "bare replay host us": statistics.median(host["bare"]),
            "own replay host us": statistics.median(host[f"{name} graph"]),
            "fill and replay host us": statistics.median(host[f"{name} fill and replay"]),
            "step host us": statistics.median(host[run]),
            "host us more": Spread.difference(host[run], host["bare"]),
            "bare replay us": statistics.median(queued["bare"]),
            "step, queued": Spread.ratio(queued[run], queued["bare"]),
            "step, alone": Spread.ratio(alone[run], alone["bare"]),
        }
        medians = {part: statistics.median(host[f"{name} {part}"]) for part in of_name}
        whole = statistics.median(host[run])
        found[name] = step, {**medians, "rest": whole - sum(medians.values()), "all": whole}
    return found


def measure(adapter: DeviceAdapter, *, small: bool = False, rounds: int | None = None) -> Result:
    """Both engines.

    Args:
        adapter: the device.
        small: a tiny decoder and few rounds: to see that all of it runs.
        rounds: of each size; 15 by default.
    """
    rounds, blocks = rounds or (2 if small else 15), 1 if small else 12
    result = Result("step", str(adapter.device))
    shape = TINY if small else SMALL if adapter.type == "cpu" else Shape()
    with torch.no_grad(), freeze_gc():
        for title, each in (
            ("a graph of a few kernels", FEW_KERNELS),
            (f"a decoder with layers: {shape.layers}, hidden size {shape.hidden}", shape),
        ):
            result.tables += measure_engine(title, engine_on(adapter.device, each), adapter, rounds, blocks)
    result.notes.append(
        "`more` and ratios are over the bare replay of a graph of the same forward that was captured without this "
        "package; `own` is the runner's graph; `rest` is what no part accounts for"
    )
    return result
