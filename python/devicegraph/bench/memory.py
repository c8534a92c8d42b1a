"""`devicegraph bench memory`: what the default decode buckets of a model hold, against the largest one alone.

The allocator's reserved bytes are measured with its cache emptied after each bucket, so that they are the graphs'. What
the device has less of beside them is the executables: the driver's own memory, about the same for each graph.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.backends import backend_class
from devicegraph.bench.decoder import TINY, Shape
from devicegraph.bench.measuring import Result, Table
from devicegraph.bench.step import StepEngine, engine_on, runner_of
from devicegraph.buckets import decode_buckets
from devicegraph.devices import GraphMemoryPool
from devicegraph.errors import BackendError
from devicegraph.runners.capture_mode import freeze_gc, model_capture_mode

if TYPE_CHECKING:
    from devicegraph.backends import BaseCudaGraphBackend
    from devicegraph.devices import DeviceAdapter, DeviceMemory

MIB: Final = 2**20
#: The 28-layer model with 36 buckets, as it decodes for most models, and as some sample: many tokens, in float32.
BUCKETS: Final = tuple(decode_buckets(256).sizes)
SHAPES: Final = {
    "32k tokens, bfloat16 logits": Shape(row_length=64, context=64, decode=BUCKETS),
    "152k tokens, float32 logits": Shape(
        row_length=64, context=64, decode=BUCKETS, vocabulary=151936, fp32_logits=True
    ),
}
SMALL_SHAPES: Final = {
    name: replace(TINY, vocabulary=vocabulary, fp32_logits=fp32)
    for name, vocabulary, fp32 in (
        ("256 tokens, bfloat16 logits", 256, False),
        ("8k tokens, float32 logits", 8192, True),
    )
}


def level(adapter: DeviceAdapter) -> DeviceMemory:
    """Memory figures with everything done, and given back that can be."""
    adapter.synchronize()
    adapter.empty_cache()
    return adapter.memory()


def capture_each(
    engine: StepEngine,
    sizes: list[int],
    backend: BaseCudaGraphBackend | None = None,
    *,
    keep: ExitStack | None = None,
) -> list[dict[str, Any]]:
    """Captures sizes in order, and measures what each of them took.

    Args:
        engine: whose forward is captured.
        sizes: of the graphs.
        backend: how to capture; by default with an executable for each graph.
        keep: what drops the graphs in the end; by default they are dropped at once. A driver keeps the memory of
            executables that were dropped, and the next ones seem to take none.

    Returns:
        For each size: what the allocator reserved, and how much of that is held by tensors that live on; what the
        device has less of beside that (None where it does not tell); and the size of its output. All in bytes.
    """
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    with ExitStack() as dropped, freeze_gc(), model_capture_mode(), torch.no_grad():
        runner = (dropped if keep is None else keep).enter_context(runner_of(engine, **options))
        assert runner.backend is not None  # decode is captured
        runner.buffer_registry.reset_index_buffers()
        with runner.backend.capture_session():
            before = level(runner.adapter)
            for size in sizes:
                output = runner.capture_one_shape(size)
                after = level(runner.adapter)
                beside = None
                if before.free is not None and after.free is not None:
                    beside = before.free - after.free - (after.reserved - before.reserved)
                rows.append(
                    {
                        "bs": size,
                        "reserved": after.reserved - before.reserved,
                        "held": after.allocated - before.allocated,
                        "beside": beside,
                        "output": output.numel() * output.element_size(),
                    }
                )
                del output
                before = after
    return rows


def measure_sharing(
    title: str, engine: StepEngine, adapter: DeviceAdapter, notes: list[str], keep: ExitStack
) -> list[tuple[Table, dict[str, Any]]]:
    """`measure_shape` with shared executables, where the device has them."""
    make: Any = backend_class(adapter.type, "full")
    try:
        backend = make(adapter, phase="decode", graph_pool=GraphMemoryPool(adapter), share_executables=True)
    except BackendError as error:
        notes.append(f"shared executables are left out: {error.message}")
        return []
    measured = measure_shape(f"{title}, shared executables", engine, notes, keep, backend)
    notes.append(f"{title}, shared executables: {backend.executables.seconds_per_switch or 0:.5f} s for each switch")
    return [measured]


def measure_shape(
    title: str, engine: StepEngine, notes: list[str], keep: ExitStack, backend: BaseCudaGraphBackend | None = None
) -> tuple[Table, dict[str, Any]]:
    """The table of bytes by bucket of an engine, and the line that sums it up."""
    sizes = sorted(engine.buckets, reverse=True)
    # Kernels are loaded from then on, and what libraries keep for a stream is there.
    capture_each(engine, sizes, keep=keep)
    alone = capture_each(engine, sizes[:1], keep=keep)[0]
    rows = capture_each(engine, sizes, backend, keep=keep)
    reserved = sum(row["reserved"] for row in rows)
    outputs = sum(row["output"] for row in rows)
    beside = None if rows[0]["beside"] is None else sum(row["beside"] for row in rows)
    summary = {
        "model": title,
        "graphs": len(rows),
        "largest alone MiB": alone["reserved"] / MIB,
        "all MiB": reserved / MIB,
        "all / alone": reserved / alone["reserved"],
        "held MiB": sum(row["held"] for row in rows) / MIB,
        "outputs MiB": outputs / MIB,
        "executables MiB": None if beside is None else beside / MIB,
    }
    if reserved > 1.05 * alone["reserved"]:
        notes.append(f"{title}: all graphs hold more than 1.05 times the largest one alone")
    table = Table(f"{title}: MiB by bucket, in order of capture", case={"model": title})
    for row in rows:
        table.rows.append(
            {
                "bs": row["bs"],
                "reserved": row["reserved"] / MIB,
                "held": row["held"] / MIB,
                "executable": None if row["beside"] is None else row["beside"] / MIB,
                "its output": row["output"] / MIB,
            }
        )
    return table, summary


def measure(adapter: DeviceAdapter, *, small: bool = False, share: bool = False) -> Result:
    """All models.

    Args:
        adapter: the device.
        share: measure each with shared executables, too.
        small: tiny models with few buckets: to see that all of it runs.
    """
    result = Result("memory", str(adapter.device))
    summary = Table("all graphs against the largest alone, allocator memory; executables are apart")
    tables = []
    shapes = SMALL_SHAPES if small or adapter.type == "cpu" else SHAPES
    with ExitStack() as keep, freeze_gc():
        for title, shape in shapes.items():
            engine = engine_on(adapter.device, shape)
            measured = [measure_shape(title, engine, result.notes, keep)]
            if share:
                measured += measure_sharing(title, engine, adapter, result.notes, keep)
            tables += [table for table, _ in measured]
            summary.rows += [line for _, line in measured]
    result.tables = [summary, *tables]
    return result
