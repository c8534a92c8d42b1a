"""Profiles of captures and of steps, with the ranges that say which graph they are about."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from engines import ShortOfMemory, ToyEngine, config, eager

if TYPE_CHECKING:
    from pathlib import Path

# torch's profiler warns of what it leaves out where there is no device to look at.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def runner_for(engine: Any, folder: Any, **options: Any) -> dg.DecodeCudaGraphRunner:
    bs = options.pop("bs", [2, 4])
    return dg.DecodeCudaGraphRunner(engine, config=config(bs=bs), profile=folder, **options)


def test_a_capture_leaves_a_trace_with_a_range_for_each_graph_and_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profiles"
    with runner_for(ToyEngine(), folder) as runner:
        report = runner.capture()
        assert {bucket.key.size for bucket in report.captured} == {2, 4}
        events = json.loads((folder / "decode-rank0.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if str(event.get("name")).startswith("devicegraph")]
        graphs = [f"devicegraph decode, bucket {size}" for size in (4, 2)]
        assert sorted(names) == sorted(name for graph in graphs for name in (f"{graph}: capture", f"{graph}: prepare"))
        assert any("Input Dims" in event.get("args", {}) for event in events)
        assert "aten::" in (folder / "decode-rank0.txt").read_text()


def test_a_profiled_capture_needs_nobody_to_hold_its_runner(tmp_path: Path) -> None:
    engine = ToyEngine(max_bs=2)
    capture = runner_for(engine, tmp_path, bs=[2]).capture
    assert len(capture().captured) == 1


def test_profiles_of_later_captures_and_of_other_modes_and_ranks_stand_beside(tmp_path: Path) -> None:
    with runner_for(ToyEngine(), tmp_path, bs=[1]) as runner:
        runner.capture()
        runner.capture()
    engine = ToyEngine(tokens_per_request=2)
    engine.rank = 3  # type: ignore[attr-defined]
    with runner_for(engine, str(tmp_path), bs=[1], mode="target_verify", num_tokens_per_bs=2) as runner:
        runner.capture()
    names = ["decode-rank0", "decode-rank0-2", "target_verify-rank3"]
    assert sorted(os.listdir(tmp_path)) == sorted(f"{name}.{end}" for name in names for end in ("json", "txt"))


def test_steps_are_ranges_in_any_profile_around_them_and_give_what_they_gave(tmp_path: Path) -> None:
    engine = ToyEngine()
    with runner_for(engine, tmp_path) as runner:
        runner.capture()
        batch, above = engine.batch([3, 4, 5]), engine.batch([3] * 5)
        want = eager(engine, batch)
        with torch.profiler.profile() as profiler:
            assert torch.equal(runner.run(batch), want)
            runner.run(above)
        seen = {event.key for event in profiler.key_averages() if event.key.startswith("devicegraph")}
        steps = {f"devicegraph decode, bucket 4: {part}" for part in ("fill", "replay")}
        assert seen == {*steps, "devicegraph decode, eager: prepare"}


def test_a_capture_that_fails_raises_what_it_raised_and_leaves_no_profile(tmp_path: Path) -> None:
    engine = ShortOfMemory(max_bs=4)
    with runner_for(engine, tmp_path, on_error="raise") as runner:
        with pytest.raises(dg.CaptureError, match="out-of-memory"):
            runner.capture()
        assert os.listdir(tmp_path) == []
        engine.most = 4
        runner.capture()
        assert len(os.listdir(tmp_path)) == 2


def test_what_is_no_path_is_refused_and_nothing_is_wrapped_without_one() -> None:
    with pytest.raises(dg.ConfigError, match="profile: True is no path") as caught:
        runner_for(ToyEngine(), True)
    assert caught.value.code == "wrong-type"
    assert not {"capture", "capture_key", "_fill", "_launch"} & set(vars(runner_for(ToyEngine(), None)))
