"""The rules of a long run and what is expected of each: two runners on one engine and one graph memory pool.

A rule does one thing that a serving engine might do, and holds the runners to a model in plain Python that knows
nothing of how they work: which buckets there are, what each decides, what every row of an output is.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from soak.engine import CACHE_ROWS, MAX_BS, MAX_REQUESTS, MAX_TOKENS, VARIANTS, VOCABULARY, Rows, SoakEngine, expected

if TYPE_CHECKING:
    from collections.abc import Callable

    #: A whole number from the first to the second.
    Draw = Callable[[int, int], int]

BUCKETS = {"decode": ([2, 4, 8], [1, 3, 8], [5], [2, 5]), "prefill": ([4, 8, 16], [6, 12], [16], [3, 7])}
BACKENDS = {"decode": ("full", "full, shared executables", "breakable"), "prefill": ("breakable",)}
LABELS = SoakEngine.variants


class Side:
    """One runner, and what it is expected to have done."""

    def __init__(self, world: World, phase: str, draw: Draw, backend: str | None = None) -> None:
        self.phase = phase
        self.buckets = BUCKETS[phase][draw(0, len(BUCKETS[phase]) - 1)]
        self.backend = BACKENDS[phase][draw(0, len(BACKENDS[phase]) - 1)] if backend is None else backend
        self.pads, self.clones = draw(0, 3) > 0, draw(0, 1) == 0
        config = dg.CudaGraphConfig(
            padding=self.pads, **{phase: {"bs": self.buckets, "backend": self.backend.partition(",")[0]}}
        )
        kind = dg.DecodeCudaGraphRunner if phase == "decode" else dg.PrefillCudaGraphRunner
        options: dict[str, Any] = {}
        if "shared" in self.backend:
            adapter = dg.get_device_adapter(world.engine.device)
            with suppress(dg.BackendError):  # not every torch lets them be shared
                options["backend"] = dg.FullCudaGraphBackend(
                    adapter, phase=phase, graph_pool=world.pool, share_executables=True
                )
        self.runner = kind(
            world.engine,
            config=config,
            registry=world.engine.registry(
                max_bs=MAX_BS if phase == "decode" else MAX_REQUESTS, share_pool=draw(0, 1) == 0
            ),
            graph_pool=world.pool,
            clone_outputs=self.clones,
            order=("descending", "ascending")[draw(0, 1)],
            **options,
        )
        self.graphs: set[tuple[int, str | None]] = set()
        self.has_captured = False
        self.replays: Counter[tuple[int, str | None]] = Counter()
        self.eager: Counter[str] = Counter()

    def decides(self, rows: Rows) -> tuple[int, str | None] | str:
        """The graph that takes a batch, or the code of why none does."""
        size = len(rows.input_ids)
        if not self.graphs:
            return "nothing-captured" if self.has_captured else "not-captured"
        if rows.variant not in LABELS:
            return "variant-unknown"
        if self.phase == "decode" and rows.batch_size != size:
            return "not-uniform"
        if self.phase == "prefill" and rows.batch_size > MAX_REQUESTS:
            return "too-many-requests"
        if size == 0:
            return "idle"
        if size > max(self.buckets):
            return "above-largest"
        if not self.pads and size not in self.buckets:
            return "no-exact-bucket"
        fitting = [bucket for bucket in self.buckets if bucket >= size][: None if self.pads else 1]
        bucket = next((bucket for bucket in fitting if (bucket, rows.variant) in self.graphs), None)
        if bucket is None:
            return "bucket-dropped"
        if self.phase == "prefill" and bucket > 2 * size:
            return "padding-too-large"
        if rows.needed is None:
            return "field-missing"
        return "field-unexpected" if rows.late is not None else (bucket, rows.variant)

    def check(self) -> None:
        """The graphs and the counts are those that the model has."""
        runner = self.runner
        assert {(key.size, key.variant_label) for key in runner.graphs} == self.graphs
        assert set(runner.backend.captured) == set(runner.graphs)
        metrics = runner.metrics()
        assert {(key.size, key.variant_label): n for key, n in metrics.replays.items()} == self.replays
        assert metrics.eager == self.eager


class World:
    """An engine, its two runners, and the cache as it ought to be.

    Attributes:
        counts: how often each rule was applied, and steps by how they ran.
    """

    def __init__(self, device: str, draw: Draw) -> None:
        self.engine = SoakEngine(device)
        self.cache = [[0] * self.engine.cache.shape[1] for _ in range(CACHE_ROWS)]
        self.counts: Counter[str] = Counter()
        self.open(draw)

    def open(self, draw: Draw, backend: str | None = None) -> None:
        """Makes both runners, one for decode of a backend that may be given, and captures one of them or both."""
        self.counts["opened"] += 1
        self.pool = dg.GraphMemoryPool(dg.get_device_adapter(self.engine.device))
        self.sides = [Side(self, "decode", draw, backend), Side(self, "prefill", draw)]
        self._owned: tuple[torch.Tensor, list[list[int]]] | None = None
        for side in self.sides:
            if draw(0, 9) > 0:
                self._capture(side)

    def close(self) -> None:
        """Closes both runners, for good, and twice."""
        self.check()
        for side in self.sides:
            side.runner.close()
            side.runner.close()
        assert self.pool.graphs == 0
        self.sides, self._owned, self.pool = [], None, None

    def apply(self, rule: str, draw: Draw) -> None:
        """Applies a rule to one of the runners."""
        self.counts[rule] += 1
        getattr(self, rule)(self.sides[draw(0, 1)], draw)

    def check(self) -> None:
        """Everything is as the model has it."""
        assert self.engine.cache[1:].tolist() == self.cache[1:]
        for side in self.sides:
            side.check()

    def _rows(self, side: Side, draw: Draw, *, is_plain: bool = False) -> Rows:
        most = MAX_BS + 2 if side.phase == "decode" else MAX_TOKENS + 2
        size = draw(0, most) if draw(0, 3) == 0 else draw(1, max(side.buckets))
        first = draw(1, CACHE_ROWS - 1)
        locations = [1 + (first + 5 * i) % (CACHE_ROWS - 1) for i in range(size)]
        start, odd = draw(0, VOCABULARY - 1), 99 if is_plain else draw(0, 39)
        field = [(start + i) % 7 for i in range(size)]
        if side.phase == "decode":
            batch_size = size + 1 if odd == 0 and size else size
        else:
            batch_size = MAX_REQUESTS + 1 if odd == 0 and size > MAX_REQUESTS else min(size, 1 + start % MAX_REQUESTS)
        return Rows(
            input_ids=[(start + 3 * i) % VOCABULARY for i in range(size)],
            out_cache_loc=locations,
            read_from=[1 + (first + start + 7 * i) % (CACHE_ROWS - 1) for i in range(size)],
            bias=None if odd in (1, 2, 3, 4) else field,
            needed=None if odd == 5 else [value + 1 for value in field],
            late=field if odd == 6 else None,
            tag=draw(0, 3),
            variant="unknown" if odd == 7 else list(VARIANTS)[start % 2],
            batch_size=batch_size,
        )

    # Rules.

    def step(self, side: Side, draw: Draw) -> None:
        """A batch of any size with any fields, by `run`, or by `can_run` and `replay`."""
        rows = self._rows(side, draw)
        batch, decision = rows.batch(self.engine.device), side.decides(rows)
        if draw(0, 3) > 0:
            output = side.runner.run(batch)
        else:
            decided = side.runner.can_run(batch)
            if isinstance(decision, str):
                assert decided.code == decision
                output = side.runner.run(batch)
            else:
                assert (decided.key.size, decided.key.variant_label) == decision
                output = side.runner.replay(batch, decided)
        if isinstance(decision, str):
            side.eager[decision] += 1
            self.counts["eager steps"] += 1
        else:
            side.replays[decision] += 1
            self.counts["replays"] += 1
        if self._owned is not None:
            assert self._owned[0].tolist() == self._owned[1]
        wanted = expected(self.engine, self.cache, rows)
        assert output.tolist() == wanted
        self._owned = (output, wanted) if side.clones else None

    def eager_between(self, side: Side, draw: Draw) -> None:
        """A forward of the engine's own, beside the runners."""
        rows = self._rows(side, draw)
        batch = rows.batch(self.engine.device)
        with torch.no_grad():
            self.engine.prepare_metadata(batch, None)
            output = self.engine.forward(batch)
        assert output.tolist() == expected(self.engine, self.cache, rows)

    def prepare(self, side: Side, draw: Draw) -> None:
        """Fills the buffers of a bucket without a replay, and looks at them."""
        rows = self._rows(side, draw)
        decision = side.decides(rows)
        if isinstance(decision, str):
            with pytest.raises(dg.ReplayError) as caught:
                side.runner.replay_prepare(rows.batch(self.engine.device))
            assert caught.value.code == decision
            return
        static = side.runner.replay_prepare(rows.batch(self.engine.device))
        size, bucket = len(rows.input_ids), decision[0]
        assert static.input_ids.tolist()[:size] == rows.input_ids
        assert static.read_from.tolist() == rows.read_from + [0] * (bucket - size)
        assert static.needed.tolist() == (rows.needed or []) + [1] * (bucket - size)
        assert (static.bias is None) == (rows.bias is None)

    def misfit(self, side: Side, draw: Draw) -> None:
        """A field with a row too many is refused, and nothing is written."""
        rows = self._rows(side, draw, is_plain=True)
        if isinstance(side.decides(rows), str):
            return
        batch = rows.batch(self.engine.device)
        batch.needed = torch.ones(len(rows.input_ids) + 1, dtype=torch.int64, device=self.engine.device)
        before = [slot.buffer.clone() for slot in side.runner.buffer_registry.slots]
        with pytest.raises(dg.SlotError) as caught:
            side.runner.run(batch)
        assert (caught.value.code, caught.value.slot) == ("wrong-rows", "needed")
        after = [slot.buffer for slot in side.runner.buffer_registry.slots]
        assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))

    def failing_hook(self, side: Side, draw: Draw) -> None:
        """A hook that raises ends the step, which is not counted and wrote no state."""
        error = self.engine.hook_error = ValueError("from the hook")
        try:
            with pytest.raises(ValueError, match="from the hook") as caught:
                side.runner.run(self._rows(side, draw).batch(self.engine.device))
            assert caught.value is error
        finally:
            self.engine.hook_error = None

    def pause(self, side: Side, draw: Draw) -> None:
        """A paused runner refuses a step, and takes it once it is resumed."""
        side.runner.pause()
        with pytest.raises(dg.ReplayError) as caught:
            side.runner.run(self._rows(side, draw).batch(self.engine.device))
        assert caught.value.code == "paused"
        side.runner.resume()
        self.step(side, draw)

    def drop(self, side: Side, draw: Draw) -> None:
        """A bucket is dropped; the next larger one takes its batches."""
        size, label = side.buckets[draw(0, len(side.buckets) - 1)], LABELS[draw(0, 1)]
        side.runner.drop_graph(dg.ShapeKey(size, None, label))
        side.graphs.discard((size, label))
        side.replays.pop((size, label), None)

    def capture_one(self, side: Side, draw: Draw) -> None:
        """One graph is captured, anew if it is there."""
        size, label = side.buckets[draw(0, len(side.buckets) - 1)], LABELS[draw(0, 1)]
        with side.runner.backend.capture_session():
            side.runner.capture_one_shape(size, variant_label=label)
        side.graphs.add((size, label))
        side.replays.pop((size, label), None)

    def recapture(self, side: Side, draw: Draw) -> None:
        """All graphs are captured anew, and no live row is touched."""
        self._capture(side)
        self.check()

    def out_of_memory(self, side: Side, draw: Draw) -> None:
        """A bucket does not fit into memory: it is dropped, and the others serve."""
        size = side.buckets[draw(0, len(side.buckets) - 1)]
        self._capture(side, (size, torch.OutOfMemoryError("no memory left")))
        self.check()

    def failing_capture(self, side: Side, draw: Draw) -> None:
        """A capture that fails at a bucket leaves no graph, and eager steps work."""
        size = side.buckets[draw(0, len(side.buckets) - 1)]
        self.engine.failure = size, ValueError("from the forward")
        try:
            with pytest.raises(dg.CaptureError) as caught:
                side.runner.capture()
        finally:
            self.engine.failure = None
        assert (caught.value.code, caught.value.shape_key.size) == ("forward-failed", size)
        side.graphs, side.has_captured, side.replays = set(), False, Counter()
        self.check()
        self.step(side, draw)
        if draw(0, 3) > 0:
            self._capture(side)

    def reopen(self, side: Side, draw: Draw) -> None:
        """Both runners are closed, refuse to be used, and others take their place."""
        closed = side.runner
        self.close()
        with pytest.raises(dg.ReplayError) as caught:
            closed.run(self._rows(side, draw).batch(self.engine.device))
        assert caught.value.code == "closed"
        self.open(draw)

    def _capture(self, side: Side, failure: tuple[int, Exception] | None = None) -> None:
        self.engine.failure = failure
        try:
            report = side.runner.capture()
        finally:
            self.engine.failure = None
        missing = 0 if failure is None else failure[0]
        assert {drop.key.size for drop in report.dropped} == {missing} - {0}
        side.graphs = {(size, label) for size in side.buckets for label in LABELS if size != missing}
        side.has_captured, side.replays = True, Counter()


#: How often each rule is applied, among all of them.
RULES = {
    "step": 100_000,
    "eager_between": 8_000,
    "prepare": 4_000,
    "misfit": 1_000,
    "failing_hook": 1_000,
    "pause": 1_000,
    "drop": 80,
    "capture_one": 80,
    "recapture": 80,
    "out_of_memory": 30,
    "failing_capture": 30,
    "reopen": 60,
}
