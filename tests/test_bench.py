"""`devicegraph bench` on the CPU: each benchmark runs, measures what it says, and writes the figures that it prints."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph import cli
from devicegraph.bench import fill, memory, step
from devicegraph.bench.decoder import TINY
from devicegraph.bench.measuring import Result, Spread, Table, take_turns
from devicegraph.errors import DeviceGraphError

if TYPE_CHECKING:
    from pathlib import Path

TABLES = {
    "fill": ["8 slots", "16 slots", "7 slots from host memory", "8 slots in a bucket of 512"],
    "step": [
        "a graph of a few kernels",
        "a graph of a few kernels: where",
        "a decoder with",
        "a decoder with layers: 1, hidden size 32: where",
    ],
    "memory": ["all graphs against", "256 tokens", "8k tokens"],
    "capture": ["3 buckets up to 4"],
    "start": ["what comes before the first step"],
}


@pytest.mark.parametrize("name", TABLES)
def test_each_benchmark_runs_and_writes_what_it_prints(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", name, "--small", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / f"{name}.txt").read_text(encoding="utf-8") == printed
    data = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    cases = [table["case"] for table in data["tables"] if table["case"]]
    assert len(cases) == {"fill": 2, "memory": 2}.get(name, 0)
    assert data["versions"]["torch"] == torch.__version__
    for wanted, table in zip(TABLES[name], data["tables"], strict=True):
        assert table["title"].startswith(wanted)
        assert table["title"] in printed
        assert table["rows"]
        for row in table["rows"]:
            assert all(value is None or isinstance(value, (str, int, float, dict)) for value in row.values())


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_takes_no_result_is_refused_before_anything_is_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(fill, "measure", None)
    with pytest.raises(SystemExit):
        cli.main(["bench", "fill", "--device", "cpu", "--out", str(tmp_path / folder)])
    assert f"`--out`: nothing can be written to `{tmp_path / folder}`: " in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds_ratios_between_its_quartiles() -> None:
    ratio = Spread.ratio([2.0, 9.0, 4.0, 8.0, 10.0], [1.0, 3.0, 1.0, 4.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 3.0, 4.0)
    assert str(ratio) == "3.000 (2.000 to 4.000)"
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ways_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def way(name: str) -> Any:
        return lambda: (order.append(name), float(len(order)))[1]

    times = take_turns({"a": way("a"), "b": way("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_table_aligns_text_to_the_left_and_numbers_to_the_right() -> None:
    table = Table("title", [{"way": "one", "us": 1.0, "of": None}, {"way": "another", "us": 12.5, "of": 3}])
    assert str(table) == "title\nway         us  of\none       1.00   -\nanother  12.50   3"
    assert str(Table("title")) == "title: nothing to show"
    assert Result("name", "cpu", [table], ["a note"]).to_dict()["notes"] == ["a note"]


@pytest.mark.parametrize("case", fill.CASES, ids=str)
def test_all_ways_of_a_fill_leave_the_same_live_rows_and_those_that_pad_the_same_padding(case: fill.Case) -> None:
    device = torch.device("cpu")
    fields = fill.fields_of(case)
    assert len(fields) == case.slots
    batch = fill.batch_of(fields, case, device)
    left = {}
    for name, way in (("registry", fill.by_registry), ("field", fill.by_field), ("bare", fill.bare)):
        registry = fill.registry_of(fields, case, device)
        for slot in registry.slots:
            assert slot.buffer is not None
            slot.buffer.fill_(-7)
        way(registry, batch, case)()
        left[name] = {slot.name: slot.buffer for slot in registry.slots if slot.buffer is not None}
    for field in fields:
        live = case.raw_bs if field.axis == "bs" else case.raw_num_tokens
        assert torch.equal(left["registry"][field.name], left["field"][field.name])
        assert torch.equal(left["bare"][field.name][..., :live], batch[field.name])
        assert torch.equal(left["registry"][field.name][..., :live], batch[field.name])


def test_an_executor_that_cannot_be_had_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fields: Any, case: Any, device: Any) -> Any:
        yield "foreach", fill.registry_of(fields, case, device)
        yield "native", DeviceGraphError("there is no driver here", code="no-driver")

    monkeypatch.setattr(fill, "registries", refused)
    result = fill.measure(dg.get_device_adapter("cpu"), small=True, rounds=1)
    assert result.notes[0] == "`native` is left out: there is no driver here"
    assert [row["way"] for row in result.tables[0].rows] == ["fill_from (foreach)", fill.BY_FIELD, fill.BARE]


def test_the_parts_of_a_step_are_its_own_and_do_what_the_step_does() -> None:
    with torch.no_grad():
        engine = step.engine_on(torch.device("cpu"), step.FEW_KERNELS)
        with step.runner_of(engine) as runner:
            runner.capture()
            batch = engine.batch(8, seed=1)
            want = runner.run(batch).clone()
            runner.run(engine.batch(8, seed=2))
            pieces = step.parts_of(runner, batch)
            assert pieces["decide"]().key == dg.ShapeKey(8)
            pieces["fill"]()
            pieces["replay"]()
            assert torch.equal(pieces["trim"](), want)
            runner.run(engine.batch(8, seed=2))
            pieces["fill and replay"]()
            assert torch.equal(pieces["trim"](), want)


def test_shared_executables_are_measured_beside_the_others() -> None:
    with torch.no_grad(), ExitStack() as keep:
        notes: list[str] = []
        engine = step.engine_on(torch.device("cpu"), TINY)
        ((table, line),) = memory.measure_sharing("tiny", engine, dg.get_device_adapter("cpu"), notes, keep)
    assert (line["model"], line["graphs"], len(table.rows)) == ("tiny, shared executables", 3, 3)
    assert notes[0].startswith("tiny, shared executables: 0.0")


def test_what_an_engine_keeps_of_a_capture_shows_as_held_memory() -> None:
    class Hoards(step.StepEngine):
        """Keeps the hidden states of every forward."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.kept: list[torch.Tensor] = []

        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch)
            self.kept.append(logits * 2)
            return logits

    def held(kind: type[step.StepEngine]) -> list[bool]:
        rows = memory.capture_each(step.engine_on(torch.device("cpu"), TINY, kind), [4, 2, 1])
        return [row["held"] > 0 for row in rows]

    assert held(step.StepEngine) == [False, False, False]
    assert held(Hoards) == [True, True, True]
