"""What users read: the text of reports, decisions, keys and errors, as it is."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import textwrap
import time
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import backend_class
from devicegraph.devices import DeviceMemory
from devicegraph.report import format_bytes
from engines import ShortOfMemory, ToyEngine

if TYPE_CHECKING:
    from pathlib import Path

REPORT = dg.CaptureReport(
    "decode",
    "full",
    captured=(
        dg.CapturedBucket(dg.ShapeKey(64), 0.1234, 32 << 20, 40 << 20),
        dg.CapturedBucket(dg.ShapeKey(8, None, "lora"), 0.05, 0, 7 << 20),
    ),
    dropped=(dg.DroppedCapture(dg.ShapeKey(128), "decode: capturing bucket 128 failed: out of memory"),),
)


def test_a_report_prints_as_a_table() -> None:
    assert str(REPORT) == textwrap.dedent(
        """\
        decode, backend `full`
        graph                          seconds  reserved    device
        bucket 64                        0.123  32.0 MiB  40.0 MiB
        bucket 8 (variant_label=lora)    0.050       0 B   7.0 MiB
        2 graphs                         0.173  32.0 MiB
        dropped bucket 128: decode: capturing bucket 128 failed: out of memory"""
    )


def test_a_report_without_graphs_says_why() -> None:
    report = dg.CaptureReport("decode", "disabled", note="the phase is disabled")
    assert str(report) == "decode, backend `disabled`: no graphs, the phase is disabled"


def test_a_report_of_a_phase_that_a_rule_disabled_names_the_rule() -> None:
    rule = dg.Rule("shared", "decode", ("full",), lambda facts: facts["shared"], hard=False, reason="it is shared")
    for shared, note in (
        (True, "the phase is disabled: it is shared (rule `shared`)"),
        (False, "the phase is disabled"),
    ):
        asked = dg.CudaGraphConfig() if shared else dg.CudaGraphConfig(decode={"backend": "disabled"})
        config = dg.resolve_config(asked, {"shared": shared}, [rule])
        with dg.DecodeCudaGraphRunner(ToyEngine(max_bs=4), config=config) as runner:
            assert runner.capture().note == note


def test_a_report_exports_plain_values() -> None:
    exported = json.loads(REPORT.to_json())
    assert exported["captured"][1] == {
        "key": {"size": 8, "variant_label": "lora"},
        "seconds": 0.05,
        "reserved_bytes": 0,
        "device_bytes": 7 << 20,
    }
    assert exported["dropped"][0]["key"] == {"size": 128}
    assert (exported["seconds"], exported["reserved_bytes"]) == (REPORT.seconds, 32 << 20)


def test_an_estimate_is_the_first_graph_and_a_line_through_the_second_and_the_last() -> None:
    graph = lambda size, seconds, mebibytes: dg.CapturedBucket(  # noqa: E731
        dg.ShapeKey(size), seconds, mebibytes << 20, (mebibytes + 7) << 20
    )
    sampled = (graph(64, 0.5, 100), graph(48, 0.25, 12), graph(16, 0.125, 4))
    estimate = dg.CaptureEstimate.of(sampled, [64, 48, 32, 16])
    assert (estimate.graphs, estimate.seconds) == (4, 0.3125 + 0.25 + 0.1875 + 0.125)
    assert (estimate.reserved_bytes, estimate.device_bytes) == ((100 + 12 + 8 + 4) << 20, (124 + 4 * 7) << 20)
    # What a graph takes besides: 7 MiB, and a quarter of one for each row.
    assert [estimate.bytes_per_size(size) for size in (4, 32)] == [8 << 20, 15 << 20]
    list_of_two = dg.optimize_buckets({4: 9, 8: 9, 32: 1}, bytes=24 << 20, bytes_per_size=estimate.bytes_per_size)
    assert list_of_two.sizes == (8, 32)
    assert str(estimate) == "4 graphs: 0.875 s, reserved 124.0 MiB, device 152.0 MiB; estimated from 3"
    one = dg.CaptureEstimate.of(sampled[:1], [64])
    assert (one.seconds, one.reserved_bytes, one.bytes_per_size(64)) == (0.5, 100 << 20, 0)
    assert dg.CaptureEstimate.of(sampled[:2], [64, 48]).reserved_bytes == 112 << 20
    falling = dg.CaptureEstimate.of((sampled[0], graph(48, 0.1, 4), graph(16, 0.1, 12)), [64, 48, 32, 16])
    assert falling.bytes_per_size(1) == falling.bytes_per_size(64) == 19 << 20


def test_a_report_prints_how_far_off_the_estimate_was_and_who_shares_what() -> None:
    estimate = dg.CaptureEstimate(2, 0.25, 40 << 20, 40 << 20, REPORT.captured)
    inputs = (dg.InputBuffer("input_ids", 512, ("prefill",)), dg.InputBuffer("seq_lens", 512))
    report = dataclasses.replace(REPORT, estimate=estimate, inputs=inputs)
    assert str(report).splitlines()[5:] == [
        "dropped bucket 128: decode: capturing bucket 128 failed: out of memory",
        "estimate from 2 graphs: 0.250 s (+44%), reserved 40.0 MiB (+25%), device 40.0 MiB (-15%)",
        "2 input buffers, 1.0 KiB",
        "  `input_ids` is shared with prefill",
    ]
    assert report.summary == "decode, backend `full`: 2 graphs in 0.17 s, 32.0 MiB reserved, 1 dropped"
    exported = json.loads(report.to_json())
    assert exported["estimate"]["sampled"] == [{"size": 64}, {"size": 8, "variant_label": "lora"}]
    assert exported["inputs"][0] == {"name": "input_ids", "bytes": 512, "shared_with": ["prefill"]}


def test_a_capture_reports_its_estimate_and_its_shared_buffers() -> None:
    engine = ToyEngine(max_bs=4)
    registries = [
        dg.build_decode_registry(
            device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1, cache_loc_dtype=torch.int64, share_pool=True
        )
        for _ in range(2)
    ]
    # A pool of its own: in one that others use there may be room for these graphs.
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    config = dg.CudaGraphConfig()
    with dg.DecodeCudaGraphRunner(engine, config=config, registry=registries[0], graph_pool=pool) as runner:
        estimate = runner.estimate_capture()
        assert [bucket.key.size for bucket in estimate.sampled] == [4, 2, 1]
        assert runner.graphs == {}
        assert runner.can_run(engine.batch([3])).code == "not-captured"
        report = runner.capture()
        assert report.estimate is estimate
        assert estimate.graphs == len(report.captured) == 3
        assert estimate.reserved_bytes == report.reserved_bytes > 0
        shared = {buffer.name: buffer for buffer in report.inputs}
        assert shared["input_ids"].bytes == 4 * 8
        # Whoever else in the process has such a buffer shares it as well.
        assert registries[1].label in shared["input_ids"].shared_with
        users = dg.input_buffer_pool.users(registries[1].get_slot("input_ids").buffer)
        assert len(users) == len(shared["input_ids"].shared_with) + 1
        with pytest.raises(dg.CaptureError, match="already-captured"):
            runner.estimate_capture()
        assert len(runner.graphs) == 3
    disabled = dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"backend": "disabled"}))
    assert disabled.estimate_capture() == dg.CaptureEstimate(0, 0.0, 0, None, ())


def test_an_estimate_captures_the_first_graph_the_second_and_the_last() -> None:
    for sizes, sampled in ([1, 2, 4, 8], [8, 4, 1]), ([2, 4], [4, 2]), ([2], [2]):
        config = dg.CudaGraphConfig(decode={"bs": sizes})
        with dg.DecodeCudaGraphRunner(ToyEngine(max_bs=8), config=config) as runner:
            estimate = runner.estimate_capture()
        assert [bucket.key.size for bucket in estimate.sampled] == sampled
        assert estimate.graphs == len(sizes)


@pytest.mark.parametrize(("before", "after", "taken"), [(100, 93, 7), (None, 93, None), (100, None, None)])
def test_a_graph_took_what_the_device_has_less_and_the_pool_more_where_that_is_told(
    before: int | None, after: int | None, taken: int | None
) -> None:
    events: list[dg.CaptureProgress] = []
    runner = dg.DecodeCudaGraphRunner(
        ToyEngine(max_bs=1), config=dg.CudaGraphConfig(decode={"bs": [1]}), progress=events.append
    )
    figures = [DeviceMemory(0, 10, before, None), DeviceMemory(0, 14, after, None)]
    started = time.perf_counter()
    with runner, mock.patch.object(runner.adapter, "memory", side_effect=figures):
        (bucket,) = runner.capture().captured
    assert (bucket.reserved_bytes, bucket.device_bytes) == (4, taken)
    assert 0 < bucket.seconds <= time.perf_counter() - started
    assert [(event.seconds, event.free_bytes) for event in events] == [(bucket.seconds, after)]


def test_an_estimate_of_what_does_not_fit_says_so() -> None:
    runner = dg.DecodeCudaGraphRunner(ShortOfMemory(max_bs=4), config=dg.CudaGraphConfig(decode={"bs": [4]}))
    with pytest.raises(
        dg.CaptureError, match=r"bucket 4 was captured for an estimate, and dropped: .* tried to allocate 2 GiB"
    ):
        runner.estimate_capture()
    assert not runner.graphs


def test_a_plot_shows_memory_and_seconds_by_graph(tmp_path: Path) -> None:
    REPORT.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")
    memory, seconds = REPORT._figure().axes
    assert [bar.get_height() for bar in memory.patches] == [0.0, 32.0, 7.0, 40.0]
    assert [bar.get_height() for bar in seconds.patches] == [0.05, 0.1234]
    assert [label.get_text() for label in seconds.get_xticklabels()] == ["8 (variant_label=lora)", "64"]
    assert (memory.get_ylabel(), seconds.get_ylabel(), seconds.get_xlabel()) == ("MiB", "seconds", "requests")
    # Devices that do not tell, and reports without a graph, have a plot as well.
    dg.CaptureReport("prefill", "full", (dg.CapturedBucket(dg.ShapeKey(4), 0.1, 1, None),)).plot(tmp_path / "a.svg")
    dg.CaptureReport("decode", "full").plot(tmp_path / "b.png")
    assert (tmp_path / "a.svg").stat().st_size > 0


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(dg.BackendError) as info:
        REPORT.plot(tmp_path / "report.png")
    assert info.value.code == "matplotlib-missing"
    assert info.value.hint == "run `pip install matplotlib`, or `pip install devicegraph[plot]`"
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (-(3 << 20), "-3.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_bytes_are_given_in_the_unit_that_fits(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


def test_decisions_and_keys_print_what_they_say() -> None:
    assert repr(dg.Decision("graph", dg.ShapeKey(4))).startswith("Decision('graph', key=ShapeKey(size=4")
    decision = dg.Decision("field-missing", fields=("a", "b"))
    assert repr(decision) == "Decision('field-missing', fields=('a', 'b'))"
    assert decision.reason == "the batch lacks a field that the graph reads: `a`, `b`"
    assert str(dg.ShapeKey(4)) == "bucket 4"


def test_metrics_of_no_steps_are_zero() -> None:
    metrics = dg.StepMetrics()
    assert (metrics.steps, metrics.hit_rate, metrics.waste) == (0, 0.0, 0.0)


def errors() -> dict[str, BaseException]:
    """The errors of a runner and its devices, each staged for real."""
    engine = ToyEngine(max_bs=4)
    small = dg.CudaGraphConfig(decode={"bs": [2]})

    class Reads(ToyEngine):
        def forward(self, batch: object) -> object:
            return super().forward(batch).sum().item()

    class Fails(ToyEngine):
        error: Exception = torch.OutOfMemoryError("no room for 2 GiB")

        def forward(self, batch: object) -> object:
            raise self.error

    class Hides(ToyEngine):
        def forward(self, batch: object) -> object:
            return {super().forward(batch)}

    failing, alone = Fails(max_bs=4), ToyEngine(max_bs=4)
    failing.error = KeyError("weights")
    alone.vote = lambda proposal: dg.Proposal(False, proposal.size, failed=True)

    closed = dg.DecodeCudaGraphRunner(engine, config=small)
    closed.close()
    paused = dg.DecodeCudaGraphRunner(engine, config=small)
    paused.pause()
    captured = dg.DecodeCudaGraphRunner(engine, config=small)
    captured.capture()
    batch = engine.batch([3, 3, 3])
    staged = {
        "closed": lambda: closed.run(batch),
        "paused": lambda: paused.run(batch),
        "above-largest": lambda: captured.replay(batch),
        "host-read": lambda: dg.DecodeCudaGraphRunner(Reads(max_bs=4), config=small).capture(),
        "out-of-memory": lambda: dg.DecodeCudaGraphRunner(Fails(max_bs=4), config=small, on_error="raise").capture(),
        "forward-failed": lambda: dg.DecodeCudaGraphRunner(failing, config=small).capture(),
        "output-unknown": lambda: dg.DecodeCudaGraphRunner(Hides(max_bs=4), config=small).capture(),
        "other-rank-failed": lambda: dg.DecodeCudaGraphRunner(alone, config=small).capture(),
        "bucket-unknown": lambda: captured.capture_one_shape(3),
        "sizes-unknown": lambda: captured.run({"batch_size": 1}),
        "engine-incomplete": lambda: dg.DecodeCudaGraphRunner(object(), config=small),
        "wrong-type": lambda: dg.DecodeCudaGraphRunner(engine, config={}),
        "choice-unknown": lambda: dg.DecodeCudaGraphRunner(engine, config=small, order="up"),
        "limit-invalid": lambda: dg.Limits(max_bs=0, max_num_tokens=1),
        "unknown-device": lambda: dg.get_device_adapter("meta"),
        "backend-not-available": lambda: backend_class("mtia", "breakable"),
    }
    caught: dict[str, BaseException] = {}
    for code, stage in staged.items():
        with pytest.raises(dg.DeviceGraphError) as info:
            stage()
        assert info.value.code == code
        caught[code] = info.value
    return caught


SENTENCES = """\
the decode runner is closed [closed]

hint: make a new one
---
the decode runner is paused [paused]

hint: call `resume()` first
---
decode: the batch cannot be replayed: the batch is larger than the largest bucket [above-largest]

hint: ask `can_run` first, or call `run`, which falls back to the eager forward
---
decode: capturing bucket 2 failed: `aten::_local_scalar_dense` reads a device tensor's value on the host, which a capture cannot do [host-read]

hint: keep the value on the device, or compute it in `prepare_metadata`, which runs outside the graph
---
decode: capturing bucket 2 failed: OutOfMemoryError: no room for 2 GiB [out-of-memory]

hint: capture fewer or smaller buckets (`max_bs`, `bs`), or leave the graphs more memory
---
decode: capturing bucket 2 failed: KeyError: 'weights' [forward-failed]

hint: the error above is the engine's, from its forward or a hook; there is no graph for this key
---
decode: capturing bucket 2 failed: the output has tensors in a `set` [output-unknown]

hint: return them in a tuple, list, dict, named tuple, dataclass or SimpleNamespace
---
decode: capturing bucket 2 failed on another rank [other-rank-failed]

hint: its error is in the log of that rank; no rank has graphs now
---
decode: 3 is not one of the buckets: 2 [bucket-unknown]
---
the size of a `dict` without `batch_size` and `input_ids` is not known [sizes-unknown]

hint: set both, or give the engine a hook `sizes(batch) -> (requests, tokens)`
---
the engine (`object`) has no `device` that could be used [engine-incomplete]

hint: it needs `device`, `limits` (a `Limits`) and `forward(batch)`; see `ModelRunner`
---
config: {} is no `CudaGraphConfig` [wrong-type]
---
order: 'up' is not one of descending, ascending [choice-unknown]
---
limits.max_bs: 0 is not an integer from 1 to 1048576 [limit-invalid]
---
no adapter for device `meta` [unknown-device]

hint: known are cpu, cuda, npu, xpu, musa; others come through the entry point group `devicegraph.devices`
---
backend `breakable` is not available on device `mtia` [backend-not-available]

hint: on `mtia` there are: disabled"""  # noqa: E501


def test_the_sentences_of_errors_are_these() -> None:
    assert "\n---\n".join(str(error) for error in errors().values()) == SENTENCES


def test_every_error_survives_pickling() -> None:
    for error in errors().values():
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert {key: str(value) for key, value in vars(copy).items()} == {
            key: str(value) for key, value in vars(error).items()
        }
