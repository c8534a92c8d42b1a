"""The rules of the long runs, in any order that hypothesis finds; `make soak` goes through a million of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import devicegraph as dg
from devicegraph.runners import capture_mode
from devicegraph.runners.captured import CapturedGraph
from faults import COLLECTOR
from soak.levels import Levels
from soak.world import RULES, World


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_mode, "gc", COLLECTOR)


class AnyOrder(RuleBasedStateMachine):
    """Applies rules to a world whose choices hypothesis makes."""

    world: World | None = None

    @initialize(data=st.data())
    def open(self, data: Any) -> None:
        self.world = World("cpu", lambda low, high: data.draw(st.integers(low, high)))

    @rule(name=st.sampled_from([*RULES, *["step"] * len(RULES)]), data=st.data())
    def apply(self, name: str, data: Any) -> None:
        assert self.world is not None
        self.world.apply(name, lambda low, high: data.draw(st.integers(low, high)))

    def teardown(self) -> None:
        if self.world is not None:
            self.world.close()


def test_any_order_of_rules_leaves_what_the_model_says() -> None:
    few = settings(max_examples=3, stateful_step_count=10, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(AnyOrder, settings=few)


def test_worlds_that_come_and_go_leave_the_process_as_it_was() -> None:
    rng, levels = random.Random(1), []
    for _ in range(3):
        world = World("cpu", rng.randint)
        for rule_name in ("step", "step", "prepare", "drop", "capture_one"):
            world.apply(rule_name, rng.randint)
        world.close()
        del world
        levels.append(Levels.now())
    levels[2].check(levels[1], rss=64 << 20, objects=2000, blocks=20000)  # other tests have left things to be made


def without(kind: type, name: str) -> Any:
    """Stands for a method that was forgotten."""
    return lambda patch: patch.setattr(kind, name, lambda *args, **kwargs: None)


def _unpadded(patch: pytest.MonkeyPatch) -> None:
    trim = CapturedGraph.trim
    patch.setattr(CapturedGraph, "trim", lambda graph, size, clone: trim(graph, graph.key.size, clone=clone))


@pytest.mark.parametrize(
    "breaks",
    [
        pytest.param(without(dg.CudaGraphBufferRegistry, "fill_from"), id="nothing is filled"),
        pytest.param(without(CapturedGraph, "count"), id="replays are not counted"),
        pytest.param(without(dg.BaseCudaGraphRunner, "_prepare_metadata"), id="metadata is not prepared"),
        pytest.param(without(dg.BaseCudaGraphRunner, "resume"), id="a pause never ends"),
        pytest.param(_unpadded, id="padded rows are returned"),
    ],
)
def test_a_runner_that_does_wrong_is_found_out(breaks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    world = World("cpu", rng.randint)
    for _ in range(20):
        world.apply("step", rng.randint)
    breaks(monkeypatch)

    def go_on() -> None:
        for _ in range(20):
            for name in ("step", "step", "step", "pause"):
                world.apply(name, rng.randint)
            world.check()

    with pytest.raises((AssertionError, dg.ReplayError)):
        go_on()
