"""What a runner counts, and how it is read: as a snapshot, as a histogram, and as a page for Prometheus."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import devicegraph as dg
from engines import ToyEngine


class Votes(ToyEngine):
    """An engine among ranks of which another one may have a larger batch."""

    other = 0

    def vote(self, proposal: dg.Proposal) -> dg.Proposal:
        return dg.agree([proposal, dg.Proposal(True, self.other)])


def parse(page: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The samples of a page by family and labels, read as the format's description says."""
    families: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    kinds: dict[str, str] = {}
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[3]
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in kinds
            assert kind in ("counter", "gauge")
            kinds[family] = kind
        else:
            match = re.fullmatch(r"([a-z_]+)\{((?:[a-z_]+=\"(?:[^\"\\]|\\.)*\",?)*)\} (\d+)", line)
            assert match, line
            family, labels, value = match.groups()
            assert family.endswith("_total") == (kinds[family] == "counter")
            pairs = re.findall(r"([a-z_]+)=\"((?:[^\"\\]|\\.)*)\"", labels)
            unescape = lambda m: {"n": "\n"}.get(m[1], m[1])  # noqa: E731
            key = frozenset((name, re.sub(r"\\(.)", unescape, text)) for name, text in pairs)
            assert key not in families.setdefault(family, {})
            families[family][key] = float(value)
    return families


@pytest.fixture(scope="module")
def metrics() -> dg.StepMetrics:
    """Seven steps of an engine with buckets of 2 and 4 for up to 8 requests."""
    engine = ToyEngine(max_bs=8)
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2, 4]})) as runner:
        runner.run(engine.batch([3]))
        runner.capture()
        for bs in (1, 2, 1, 3, 5, 7):
            runner.run(engine.batch([3] * bs))
        return runner.metrics()


def test_rows_are_counted_by_graph_and_live_size(metrics: dg.StepMetrics) -> None:
    two, four = dg.ShapeKey(2), dg.ShapeKey(4)
    assert metrics.live_sizes == {four: {3: 1}, two: {1: 2, 2: 1}}
    assert metrics.replays == {four: 1, two: 3}
    assert (metrics.rows(two), metrics.rows(four)) == ((4, 2), (3, 1))
    assert (metrics.raw_rows, metrics.padded_rows, metrics.steps) == (7, 3, 7)
    assert metrics.waste == 0.3
    assert metrics.eager_sizes == {"not-captured": {1: 1}, "above-largest": {5: 1, 7: 1}}
    with pytest.raises(KeyError):
        metrics.rows(dg.ShapeKey(8))


def test_the_histogram_has_the_steps_that_buckets_decide_about(metrics: dg.StepMetrics) -> None:
    assert metrics.histogram == {1: 3, 2: 1, 3: 1, 5: 1, 7: 1}
    best = dg.optimize_buckets(metrics.histogram, 3)
    assert (best.sizes, best.padded_rows) == ((1, 3, 7), 3)
    # Steps that no bucket would have replayed are no reason for one, nor are those of an idle rank.
    other = dg.StepMetrics(
        live_sizes={dg.ShapeKey(4): {0: 9, 2: 1}}, eager_sizes={"field-missing": {3: 5}, "padding-too-large": {1: 2}}
    )
    assert other.histogram == {1: 2, 2: 1}


def test_a_snapshot_exports_plain_values(metrics: dg.StepMetrics) -> None:
    exported = json.loads(metrics.to_json())
    assert exported["graphs"][1] == {
        "key": {"size": 2},
        "replays": 3,
        "raw_rows": 4,
        "padded_rows": 2,
        "live_sizes": {"1": 2, "2": 1},
    }
    assert exported["eager_sizes"] == {"not-captured": {"1": 1}, "above-largest": {"5": 1, "7": 1}}
    assert (exported["phase"], exported["steps"], exported["hit_rate"]) == ("decode", 7, 4 / 7)
    assert dg.optimize_buckets(exported["graphs"][1]["live_sizes"]).sizes == (1, 2)


def test_a_snapshot_stays_what_it_was() -> None:
    engine = ToyEngine(max_bs=2)
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2]})) as runner:
        runner.capture()
        before = runner.metrics()
        runner.run(engine.batch([3]))
        runner.run(engine.batch([]))
        assert (before.replays, before.eager, before.live_sizes) == ({}, {}, {dg.ShapeKey(2): {}})
        assert runner.metrics().live_sizes == {dg.ShapeKey(2): {1: 1}}
        assert runner.metrics().eager == {"idle": 1}
        runner.capture()
        assert runner.metrics().live_sizes == {dg.ShapeKey(2): {}}


def test_a_runner_that_has_done_nothing_counts_nothing() -> None:
    with dg.DecodeCudaGraphRunner(ToyEngine(), config=dg.CudaGraphConfig()) as runner:
        metrics = runner.metrics()
    assert (metrics.steps, metrics.recompiles) == (0, 0)


def test_a_replay_for_another_ranks_sake_is_all_padding() -> None:
    engine = Votes(max_bs=4)
    engine.other = 4
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2, 4]})) as runner:
        runner.capture()
        runner.run(engine.batch([]))
        runner.run(engine.batch([3]))
        metrics = runner.metrics()
        assert metrics.live_sizes[dg.ShapeKey(4)] == {0: 1, 1: 1}
        assert metrics.rows(dg.ShapeKey(4)) == (1, 7)
        assert metrics.histogram == {1: 1}


def test_a_page_has_every_count_once(metrics: dg.StepMetrics) -> None:
    page = parse(metrics.to_prometheus())
    graph = lambda size: frozenset({("phase", "decode"), ("bucket", str(size)), ("variant", "")})  # noqa: E731
    reason = lambda code: frozenset({("phase", "decode"), ("reason", code)})  # noqa: E731
    phase = frozenset({("phase", "decode")})
    assert page == {
        "devicegraph_replays_total": {graph(4): 1, graph(2): 3},
        "devicegraph_raw_rows_total": {graph(4): 3, graph(2): 4},
        "devicegraph_padded_rows_total": {graph(4): 1, graph(2): 2},
        "devicegraph_eager_steps_total": {reason("not-captured"): 1, reason("above-largest"): 2},
        "devicegraph_recompiles_total": {phase: 0},
        "devicegraph_graphs": {phase: 2},
    }


def test_a_page_reads_like_this(metrics: dg.StepMetrics) -> None:
    assert metrics.to_prometheus({"rank": "0"}).splitlines()[:4] == [
        "# HELP devicegraph_replays_total Steps that were replayed through a captured graph.",
        "# TYPE devicegraph_replays_total counter",
        'devicegraph_replays_total{phase="decode",bucket="4",variant="",rank="0"} 1',
        'devicegraph_replays_total{phase="decode",bucket="2",variant="",rank="0"} 3',
    ]


def test_labels_with_quotes_backslashes_and_line_ends_come_back() -> None:
    odd = 'a "b" \\ \\n\n,}='
    key = dg.ShapeKey(2, 1, odd, "mla")
    page = dg.StepMetrics(live_sizes={key: {1: 5}}, mode="target_verify").to_prometheus({"model": odd})
    assert parse(page)["devicegraph_replays_total"] == {
        frozenset(
            {
                ("phase", "decode"),
                ("mode", "target_verify"),
                ("bucket", "2"),
                ("variant", odd),
                ("stream", "1"),
                ("attention", "mla"),
                ("model", odd),
            }
        ): 5
    }


def test_runners_share_a_page_where_labels_tell_them_apart(metrics: dg.StepMetrics) -> None:
    prefill = dg.StepMetrics(phase="prefill", live_sizes={dg.ShapeKey(16): {9: 2}})
    page = dg.prometheus_text([metrics, prefill])
    assert page.count("# TYPE devicegraph_replays_total") == 1
    assert len(parse(page)["devicegraph_replays_total"]) == 3
    assert dg.prometheus_text([]) == ""
    with pytest.raises(dg.ConfigError) as info:
        dg.prometheus_text([metrics, metrics])
    assert info.value.code == "series-repeated"


def test_a_label_may_be_a_number_of_anybodys(metrics: dg.StepMetrics) -> None:
    for rank in (3, "3"):
        assert 'rank="3"} ' in metrics.to_prometheus({"rank": rank})


@pytest.mark.parametrize("name", ["", "1st", "a-b", "__name", "bucket", "é", "a\n", 1, None])
def test_a_name_that_is_no_label_is_refused(name: Any) -> None:
    with pytest.raises(dg.ConfigError) as info:
        dg.prometheus_text([], {name: "x"})
    assert info.value.code == "label-invalid"


# Ranges for a profiler.


class Ranged(ToyEngine):
    """Notes what happens, in the list that the ranges are noted in as well."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(max_bs=4)
        self.notes = notes
        self.fails = False

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        self.notes.append("metadata")
        if self.fails:
            raise ValueError("metadata failed")


def test_ranges_stand_beside_one_another_and_are_named_by_phase_and_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(
        dg.get_device_adapter("cpu").__class__,
        "profiler_ranges",
        lambda adapter: (notes.append, lambda: notes.append("end")),
    )
    engine = Ranged(notes)
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2]}), nvtx=True) as runner:
        runner.capture()
        notes.clear()
        output = runner.run(engine.batch([3]))
        graph = "devicegraph decode, bucket 2"
        step = [f"{graph}: fill", "end", f"{graph}: prepare", "metadata", "end", f"{graph}: replay", "end"]
        assert notes == step
        assert output.shape == (1, 32)
        notes.clear()
        runner.run(engine.batch([3, 3, 3]))
        assert notes == ["devicegraph decode, eager: prepare", "metadata", "end"]
        notes.clear()
        engine.fails = True
        with pytest.raises(ValueError, match="metadata failed"):
            runner.run(engine.batch([3]))
        assert notes == step[:5]
        engine.fails = False
        notes.clear()
        runner.run(engine.batch([3]))
        assert notes == step


def test_a_runner_without_ranges_has_nothing_wrapped_and_a_device_without_any_refuses() -> None:
    plain = dg.DecodeCudaGraphRunner(ToyEngine(max_bs=2), config=dg.CudaGraphConfig())
    assert not {"_prepare", "_prepare_metadata"} & set(vars(plain))
    assert "replay" not in vars(plain.backend)
    with pytest.raises(dg.BackendError) as info:
        dg.DecodeCudaGraphRunner(ToyEngine(max_bs=2), config=dg.CudaGraphConfig(), nvtx=True)
    assert info.value.code == "nvtx-not-available"
