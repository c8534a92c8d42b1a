"""What a capture shows and logs: nothing unless asked, a bar in a terminal, records for programs."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

import devicegraph as dg
from devicegraph.backends import split_ops
from devicegraph.runners.progress import show_progress
from engines import ShortOfMemory, ToyEngine, ToyPrefill

EVENTS = [
    dg.CaptureProgress("decode", dg.ShapeKey(4), 1, 2, 0.125, None),
    dg.CaptureProgress("decode", dg.ShapeKey(2, None, "lora"), 2, 2, 0.25, 3 << 30),
]


def test_a_capture_is_quiet_and_logs_under_one_name(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.INFO, logger="devicegraph")
    with dg.DecodeCudaGraphRunner(ShortOfMemory(max_bs=4), config=dg.CudaGraphConfig(decode={"bs": [2, 4]})) as runner:
        report = runner.capture()
    assert {record.name for record in caplog.records} == {"devicegraph"}
    assert [(record.levelname, record.devicegraph["event"]) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("INFO", "captured"),
        ("INFO", "captured"),
        ("INFO", "capture"),
        ("WARNING", "dropped"),
    ]
    first, _, summary, dropped = caplog.records
    assert first.getMessage().startswith("capture decode: 1/2, bucket 4, ")
    assert summary.getMessage() == report.summary
    assert summary.devicegraph == {"event": "capture", **report.to_dict()}  # type: ignore[attr-defined]
    assert dropped.getMessage().startswith("decode: dropped bucket 4: decode: capturing bucket 4 failed: ")
    assert dropped.devicegraph["key"] == {"size": 4}  # type: ignore[attr-defined]
    assert capfd.readouterr() == ("", "")


def test_a_program_that_sets_up_no_logging_sees_nothing_and_one_that_does_sees_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Without handlers, Python itself would write warnings to standard error.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with dg.DecodeCudaGraphRunner(ShortOfMemory(max_bs=4), config=dg.CudaGraphConfig(decode={"bs": [4]})) as runner:
        runner.capture()
        logging.getLogger("another").warning("heard")
        assert capsys.readouterr() == ("", "heard\n")
        caplog.set_level(logging.INFO, logger="devicegraph")
        logging.getLogger().addHandler(logging.StreamHandler())
        runner.capture()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "capture decode: 1/1",
        "decode",
        "decode: dropped bucket 4: decode: capturing bucket 4 failed: OutOfMemoryError: tried to allocate 2 GiB",
    ]


def test_other_ranks_log_what_went_wrong_and_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="devicegraph")
    engine = ShortOfMemory(max_bs=4)
    engine.rank = 1
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2, 4]})) as runner:
        runner.capture()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_sizes_that_were_asked_for_and_do_not_fit_the_engine_are_reported_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for decode, left_out in (({"bs": [2, 64]}, "64"), ({"max_bs": 8}, "8"), ({}, None)):
        caplog.clear()
        with dg.DecodeCudaGraphRunner(ToyEngine(max_bs=4), config=dg.CudaGraphConfig(decode=decode)) as runner:
            report = runner.capture()
        text = None if left_out is None else f"left out {left_out}: `bucket-over-limit`"
        assert [line for line in str(report).splitlines() if "left out" in line] == ([] if text is None else [text])
        assert [record.getMessage() for record in caplog.records] == ([] if text is None else [f"decode: {text}"])
        sizes = [] if left_out is None else [{"size": int(left_out), "code": "bucket-over-limit"}]
        assert report.to_dict()["left_out"] == sizes


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_logs_that_another_backend_captures_than_was_asked_for(
    rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    engine = ToyPrefill()
    engine.rank = rank  # type: ignore[attr-defined]
    config = dg.CudaGraphConfig(prefill={"bs": [8], "backend": "tc_piecewise"})
    with dg.PrefillCudaGraphRunner(engine, config=config) as runner:
        assert runner.capture().fallback is not None
    (record,) = caplog.records
    assert record.getMessage() == f"prefill: `tc_piecewise` is captured by `breakable`: {runner.fallback}"
    assert record.devicegraph == {  # type: ignore[attr-defined]
        "event": "fallback",
        "phase": "prefill",
        "reason": runner.fallback,
    }


class Terminal(io.StringIO):
    shown = ""

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.shown = self.getvalue()


def test_a_terminal_without_tqdm_has_one_line_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    for rank in (0, 1):
        show = show_progress(rank)
        for event in EVENTS:
            show(event)
    assert sys.stderr.shown == (  # type: ignore[attr-defined]
        "\rcapture decode: 1/2, bucket 4, 0.12 s"
        "\rcapture decode: 2/2, bucket 2 (variant_label=lora), 0.25 s, 3.0 GiB free\n"
    )


def test_a_terminal_with_tqdm_has_a_bar_for_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[dict[str, Any], list[Any]]] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.notes: list[Any] = []
            bars.append((options, self.notes))

        def set_postfix_str(self, text: str) -> None:
            self.notes.append(text)

        def update(self, count: int) -> None:
            self.notes.append(count)

        def close(self) -> None:
            self.notes.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setattr(sys.modules["tqdm"], "tqdm", Bar, raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    show = show_progress(0)
    for event in EVENTS * 2:
        show(event)
    assert len(bars) == 2
    options, notes = bars[1]
    assert options == {"total": 2, "desc": "capture decode", "unit": "graph"}
    assert notes == [
        "bucket 4, 0.12 s",
        1,
        "bucket 2 (variant_label=lora), 0.25 s, 3.0 GiB free",
        1,
        "closed",
    ]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_progress_for_programs_is_a_line_of_json_for_each_graph(capsys: pytest.CaptureFixture[str]) -> None:
    file = Terminal()
    with dg.DecodeCudaGraphRunner(
        ToyEngine(max_bs=2), config=dg.CudaGraphConfig(), progress=dg.json_progress(file)
    ) as runner:
        runner.capture()
    lines = [json.loads(line) for line in file.shown.splitlines()]
    assert [(line["event"], line["key"], line["done"], line["total"]) for line in lines] == [
        ("captured", {"size": 2}, 1, 2),
        ("captured", {"size": 1}, 2, 2),
    ]
    dg.json_progress()(EVENTS[1])
    assert json.loads(capsys.readouterr().err) == {
        "event": "captured",
        "phase": "decode",
        "key": {"size": 2, "variant_label": "lora"},
        "done": 2,
        "total": 2,
        "seconds": 0.25,
        "free_bytes": 3 << 30,
    }
