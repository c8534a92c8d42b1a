"""`devicegraph bench capture`: seconds to capture the default decode buckets, against a bare loop over them.

The bare loop does what an engine's first version does: for each size, the largest first, two warm-ups on a side stream
with a wait after each, and a capture into a common pool (`torch.cuda.graph` on CUDA), with the garbage collector frozen
around all of it, as the runner does. It fills nothing, reports nothing and survives no failure.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.bench.decoder import SMALL, TINY, Shape
from devicegraph.bench.measuring import Result, Spread, Table, take_turns
from devicegraph.bench.step import StepEngine, bare_graph, engine_on, runner_of
from devicegraph.buckets import decode_buckets
from devicegraph.devices import GraphMemoryPool
from devicegraph.layouts import build_decode_registry
from devicegraph.runners.capture_mode import freeze_gc

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.devices import DeviceAdapter

BUCKETS: Final = tuple(decode_buckets(256).sizes)
SHAPE: Final = Shape(row_length=64, context=64, decode=BUCKETS)
ON_CPU: Final = replace(SMALL, decode=(1, 2, 4, 8))


def bare_loop(engine: StepEngine, adapter: DeviceAdapter, stream: Any) -> float:
    """Seconds of the bare loop; its graphs are dropped afterwards."""
    maximum = max(engine.buckets)
    registry = build_decode_registry(device=adapter.device, max_bs=maximum, max_num_token=maximum, seq_len_fill_value=1)
    pool = GraphMemoryPool(adapter)
    captured = []
    adapter.synchronize()
    begun = time.perf_counter()
    with freeze_gc(), torch.no_grad():
        for size in sorted(engine.buckets, reverse=True):
            captured.append(bare_graph(adapter, engine, registry, size, pool, stream))
    adapter.synchronize()
    seconds = time.perf_counter() - begun
    for graph, _ in captured:
        graph.reset()
    return seconds


def by_runner(engine: StepEngine) -> float:
    """Seconds of `runner.capture()`."""
    with runner_of(engine) as runner:
        runner.adapter.synchronize()
        begun = time.perf_counter()
        runner.capture()
        return time.perf_counter() - begun


def measure(adapter: DeviceAdapter, *, small: bool = False, rounds: int | None = None) -> Result:
    """Both ways, over the same engine.

    Args:
        adapter: the device.
        small: a tiny model with few buckets: to see that all of it runs.
        rounds: 7 by default.
    """
    shape = TINY if small else ON_CPU if adapter.type == "cpu" else SHAPE
    engine = engine_on(adapter.device, shape)
    stream = adapter.stream()

    def clean(way: Callable[[], float]) -> float:
        gc.collect()
        adapter.synchronize()
        adapter.empty_cache()
        return way()

    times = take_turns(
        {
            "bare loop": lambda: clean(lambda: bare_loop(engine, adapter, stream)),
            "runner": lambda: clean(lambda: by_runner(engine)),
        },
        rounds or (2 if small else 7),
    )
    table = Table(f"{len(shape.decode)} buckets up to {max(shape.decode)} of a decoder with layers: {shape.layers}")
    for name, seconds in times.items():
        table.rows.append(
            {
                "way": name,
                "seconds": statistics.median(seconds),
                "ms a bucket": statistics.median(seconds) / len(shape.decode) * 1e3,
                "ratio to the bare loop": Spread.ratio(seconds, times["bare loop"]),
            }
        )
    return Result("capture", str(adapter.device), [table])
