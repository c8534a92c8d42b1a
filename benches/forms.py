"""The forms in which the steps of an engine can run, all over the same static buffers.

Meta's package `breakable-cuda-graphs` is one of them: for comparison only, and left out where it cannot be imported.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

import devicegraph as dg
from decoder import ATTEND
from devicegraph.backends.breaks import batch_in_use
from devicegraph.backends.segmented import SegmentedBackend
from devicegraph.bench.decoder import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.bench.decoder import Batch, Engine

META: Final = "Meta's breakable"
FORMS: Final = {
    "decode": ("eager", "full", "breakable", "tc_piecewise eager", "tc_piecewise inductor"),
    "prefill": ("eager", "breakable", "tc_piecewise eager", "tc_piecewise inductor"),
}
#: What attention is in the forms of a backend; in the others it is part of the forward.
MARKS: Final[dict[str, Callable[..., None]]] = {"breakable": dg.eager_on_graph(attend), "tc_piecewise": ATTEND}


@dataclass
class Form:
    """A way to run a phase. Its static buffers are those of all forms.

    Attributes:
        capture: captures all sizes, the largest first; returns the graphs that a step launches, and the seconds of the
            first size, which are those of tracing and compiling, too.
        replay: what replays the graphs for a static batch, and returns their output.
        run: a whole step with a live batch, where the form has one.
    """

    name: str
    capture: Callable[[], tuple[int, float]]
    replay: Callable[[Batch], Callable[[], Any]]
    run: Callable[[Batch], Any] | None
    close: Callable[[], None]


def package_form(name: str, engine: Engine, registry: dg.CudaGraphBufferRegistry) -> Form:
    """A runner of this package, with a graph memory pool of its own."""
    word, _, compiler = name.partition(" ")
    options: dict[str, Any] = {"backend": "disabled"}
    if word != "eager":
        options = {"backend": word, "bs": list(engine.buckets)}
    if compiler:
        options["tc_compiler"] = compiler
    kind = dg.DecodeCudaGraphRunner if engine.phase == "decode" else dg.PrefillCudaGraphRunner
    runner = kind(
        engine,
        config=dg.CudaGraphConfig.from_dict({engine.phase: options}),
        registry=registry,
        graph_pool=dg.GraphMemoryPool(dg.get_device_adapter(engine.device)),
        on_error="raise",
        progress=lambda _: None,
    )
    backend = runner.backend

    def capture() -> tuple[int, float]:
        report = runner.capture()
        if backend is None:
            return 0, 0.0
        first = report.captured[0]
        graphs = backend.coverage(first.key).segments if isinstance(backend, SegmentedBackend) else 1
        return graphs, first.seconds

    def replay(static: Batch) -> Callable[[], Any]:
        if backend is None:
            return partial(engine.forward, static)
        return partial(backend.replay, dg.ShapeKey(len(static.input_ids)), static)

    return Form(name, capture, replay, runner.run, runner.close)


def meta_form(package: Any, engine: Engine, registry: dg.CudaGraphBufferRegistry) -> Form:
    """Meta's package as its own pages use it: warm-ups and captures on a side stream, one pool for all sizes."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    captured: dict[int, tuple[Any, torch.Tensor]] = {}

    def capture() -> tuple[int, float]:
        seconds, graphs = [], 0
        for size in sorted(engine.buckets, reverse=True):
            begun = time.perf_counter()
            static = fill(engine, registry, engine.batch(size, seed=0))
            graph = package.BreakableCUDAGraph(pool)
            with batch_in_use(static), torch.cuda.stream(stream):
                for _ in range(2):
                    engine.forward(static)
                    torch.cuda.synchronize()
                with package.breakable_graph(graph, stream=stream, capture_error_mode="thread_local"):
                    captured[size] = graph, engine.forward(static)
            seconds.append(time.perf_counter() - begun)
            graphs = sum(isinstance(segment, torch.cuda.CUDAGraph) for segment in graph._segments)
        return graphs, seconds[0]

    def replay(static: Batch) -> Callable[[], Any]:
        graph, output = captured[len(static.input_ids)]
        return lambda: (graph.replay(), output)[1]

    def close() -> None:
        torch.cuda.synchronize()
        for graph, _ in captured.values():
            graph.reset()
        captured.clear()

    # Workspaces that libraries keep for this stream are not the captures', as they are not with the package's forms.
    static = fill(engine, registry, engine.batch(max(engine.buckets), seed=0))
    with batch_in_use(static), torch.cuda.stream(stream):
        engine.forward(static)
    return Form(META, capture, replay, None, close)


def fill(engine: Engine, registry: dg.CudaGraphBufferRegistry, batch: Batch) -> Any:
    """Fills the static buffers and prepares the metadata; the static batch."""
    bs, tokens = batch.batch_size, len(batch.input_ids)
    registry.fill_from(batch, raw_bs=bs, padded_bs=bs, raw_num_tokens=tokens, padded_num_tokens=tokens)
    static = registry.extract_buffer(padded_bs=bs, padded_num_tokens=tokens, forward_batch_template=batch)
    engine.prepare_metadata(static, None)
    return static


def find_package(device: torch.device) -> tuple[Any, str]:
    """Meta's package, or None; and its version, or why it is left out."""
    if device.type != "cuda":
        return None, f"left out: it needs a GPU, this is `{device}`"
    try:
        package = importlib.import_module("breakable_cuda_graphs")
    except ImportError as error:
        return None, f"left out: {error}"
    return package, package.__version__
