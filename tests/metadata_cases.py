"""What holds of attention metadata in every backend, on the CPU tape and on a GPU, by phase, backend and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pytest
import torch

import devicegraph as dg
from metadata_model import LENGTH, FullMetadata, InGraphEngine, PlannedEngine, Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Setup(NamedTuple):
    """A phase and how it is captured."""

    phase: str
    backend: str
    compiler: str = "eager"

    def __str__(self) -> str:
        return "-".join(self if self.compiler != "eager" else self[:2])

    @property
    def runs_attention(self) -> bool:
        """Whether a step calls attention from Python, so that it can look at what it is given."""
        return self.backend != "full"


SETUPS = [
    Setup("decode", "full"),
    Setup("decode", "breakable"),
    Setup("decode", "tc_piecewise"),
    Setup("decode", "disabled"),
    Setup("prefill", "breakable"),
    Setup("prefill", "tc_piecewise"),
    Setup("prefill", "disabled"),
]
INDUCTOR = [Setup(phase, "tc_piecewise", "inductor") for phase in ("decode", "prefill")]
ENGINES: list[type[PlannedEngine]] = [PlannedEngine, InGraphEngine]

#: New tokens by cache row. Sizes lie in and below their buckets and come in no order; requests stop and go on.
STEPS: dict[str, list[dict[int, int]]] = {
    "decode": [
        dict.fromkeys(rows, 1)
        for rows in (
            (1, 2, 3),
            (2,),
            (3, 1),
            (5, 4, 3, 2, 1),
            (8, 7, 6, 5, 4, 3, 2, 1),
            (2, 1, 8),
            (1,),
            (1, 2, 3, 4, 5, 6, 7),
            *[(3, 1, 2), (1, 3, 5, 7), (6, 5, 4, 3, 2, 1), (2,), (4, 2)] * 2,
        )
    ],
    "prefill": [
        {1: 5},
        {2: 3, 3: 4},
        {4: 1, 1: 7, 5: 3},
        {2: 6, 6: 7},
        {3: 2},
        {1: 3, 2: 2, 3: 1, 4: 5},
        {7: 13, 8: 3},
        {7: 1, 2: 4, 1: 1},
        {6: 4, 5: 11},
        {1: 16, 2: 1, 3: 12},
    ],
}
#: A step that no bucket takes that is captured.
ABOVE = {"decode": dict.fromkeys(range(1, 7), 1), "prefill": {1: 9, 2: 10}}
BUCKETS = {"decode": [2, 4], "prefill": [4, 8, 16]}
#: Where replays need no look at what is above.
ALL_BUCKETS = {"decode": [2, 4, 8], "prefill": [2, 4, 8, 16, 32]}

Case: TypeAlias = "Callable[[str, Setup, type[PlannedEngine]], None]"
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def runner_for(engine: PlannedEngine, setup: Setup, bs: list[int] | None = None) -> dg.BaseCudaGraphRunner:
    phase: dict[str, Any] = {"backend": setup.backend, "bs": ALL_BUCKETS[setup.phase] if bs is None else bs}
    if setup.backend == "tc_piecewise":
        phase["tc_compiler"] = setup.compiler
    kind = {"decode": dg.DecodeCudaGraphRunner, "prefill": dg.PrefillCudaGraphRunner}[setup.phase]
    pool = dg.GraphMemoryPool(dg.get_device_adapter(engine.device))
    config = dg.CudaGraphConfig(**{setup.phase: phase})
    return kind(engine, config=config, registry=engine.registry(), graph_pool=pool)


def captured(engine: PlannedEngine, setup: Setup, bs: list[int] | None = None) -> dg.BaseCudaGraphRunner:
    runner = runner_for(engine, setup, bs)
    report = runner.capture()
    assert (report.backend, report.fallback) == (setup.backend, None)
    return runner


def wrong_steps(runner: dg.BaseCudaGraphRunner, requests: Requests, steps: Iterable[dict[int, int]]) -> list[int]:
    """The steps whose result is not the oracle's. All run, so that what a step leaves behind is seen by later ones."""
    wrong = []
    for number, step in enumerate(steps):
        got = runner.run(requests.step(step))
        if not torch.equal(got, requests.expected(step)):
            wrong.append(number)
    return wrong


def addresses(engine: PlannedEngine) -> dict[Any, list[int]]:
    return {key: [tensor.data_ptr() for tensor in raw.tensors()] for key, raw in engine.metadata.items()}


def planned(engine: PlannedEngine) -> list[int]:
    return [int(planner.plans) for planner in engine.planners.values()]


@case
def every_step_equals_the_oracle_with_metadata_at_stable_addresses(
    device: str, setup: Setup, engine_class: type[PlannedEngine]
) -> None:
    engine = engine_class(device, setup.phase)
    with captured(engine, setup) as runner:
        before = addresses(engine)
        assert len(before) == len(runner.graphs)
        assert wrong_steps(runner, Requests(engine), STEPS[setup.phase]) == []
        assert addresses(engine) == before
        assert runner.metrics().hit_rate == (0.0 if setup.backend == "disabled" else 1.0)
        if setup.backend == "tc_piecewise":
            assert runner.backend.traces == 1


@case
def every_planner_plans_once_in_every_step(device: str, setup: Setup, engine_class: type[PlannedEngine]) -> None:
    engine = engine_class(device, setup.phase)
    requests = Requests(engine)
    with captured(engine, setup) as runner:
        for step in STEPS[setup.phase]:
            before = planned(engine)
            runner.run(requests.step(step))
            assert planned(engine) == [count + 1 for count in before]


@case
def a_plan_of_an_earlier_step_gives_wrong_values(device: str, setup: Setup, engine_class: type[PlannedEngine]) -> None:
    """So the first case can fail: whichever planner it is that does not plan anew."""
    for kind in PlannedEngine().planners:
        engine = engine_class(device, setup.phase)
        runner = runner_for(engine, setup)
        if engine_class is InGraphEngine:  # what was captured plans, whatever is said later
            engine.planners[kind].is_stale = True
            runner.capture()
        else:
            runner.capture()
            engine.planners[kind].is_stale = True
        with runner:
            assert wrong_steps(runner, Requests(engine), STEPS[setup.phase])


@case
def an_engine_that_does_not_upgrade_fails(device: str, setup: Setup, engine_class: type[PlannedEngine]) -> None:
    """Loudly where its layers look, with wrong values where they do not."""
    forgetful = type("Forgetful", (engine_class,), {"upgrade_metadata": None})
    engine = forgetful(device, setup.phase)
    with runner_for(engine, setup) as runner:
        if setup.backend == "disabled":
            with pytest.raises(TypeError, match="layer 0 met `RawMetadata`"):
                runner.run(Requests(engine).step(STEPS[setup.phase][0]))
        else:
            with pytest.raises(dg.CaptureError, match="layer 0 met `RawMetadata`") as caught:
                runner.capture()
            assert isinstance(caught.value.__cause__, TypeError)
            assert not runner.graphs
    if engine_class is InGraphEngine:
        return  # its upgrade changes nothing but the type
    engine = forgetful(device, setup.phase)
    engine.is_checked = False
    with captured(engine, setup) as runner:
        assert wrong_steps(runner, Requests(engine), STEPS[setup.phase])


@case
def an_engine_that_upgrades_at_capture_only_fails(device: str, setup: Setup, engine_class: type[PlannedEngine]) -> None:
    """A full replay runs no layer that could look: its values are wrong."""

    class AtCapture(engine_class):  # type: ignore[misc, valid-type]
        def upgrade_metadata(self, batch: Any, key: Any) -> None:
            if dg.get_is_capture_mode():
                super().upgrade_metadata(batch, key)

    engine = AtCapture(device, setup.phase)
    with captured(engine, setup) as runner:
        requests, steps = Requests(engine), STEPS[setup.phase]
        if setup.runs_attention:
            with pytest.raises(TypeError, match="layer 0 met `RawMetadata`"):
                runner.run(requests.step(steps[0]))
        elif engine_class is PlannedEngine:
            assert wrong_steps(runner, requests, steps)


@case
def attention_meets_the_upgraded_metadata_of_the_step(
    device: str, setup: Setup, engine_class: type[PlannedEngine]
) -> None:
    if not setup.runs_attention:
        return
    engine = engine_class(device, setup.phase)
    requests = Requests(engine)
    with captured(engine, setup) as runner:
        for step in STEPS[setup.phase]:
            engine.seen.clear()
            batch = requests.step(step)
            key = runner.can_run(batch).key
            runner.run(batch)
            assert len(engine.seen) == 3
            for metadata, size in engine.seen:
                assert type(metadata) is FullMetadata
                assert size == (key.size if key is not None and setup.phase == "decode" else len(step))
                live = len(batch.positions)
                assert torch.equal(metadata.positions[:live], batch.positions)
                assert torch.equal(metadata.rows[:live], batch.out_cache_loc // LENGTH)
                assert not metadata.rows[live:].any()


def contents(batch: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A batch's attributes as they are, and copies of its tensors."""
    fields = dict(vars(batch))
    return fields, {name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)}


def check_contents(batch: Any, before: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    fields, values = before
    assert vars(batch).keys() == fields.keys()
    assert all(vars(batch)[name] is value for name, value in fields.items())
    assert all(torch.equal(vars(batch)[name], value) for name, value in values.items())


@case
def a_replay_leaves_the_batch_as_it_was_given(device: str, setup: Setup, engine_class: type[PlannedEngine]) -> None:
    engine = engine_class(device, setup.phase)
    requests = Requests(engine)
    with captured(engine, setup) as runner:
        for step in STEPS[setup.phase]:
            batch = requests.step(step)
            before = contents(batch)
            if runner.can_run(batch):
                runner.run(batch)
                check_contents(batch, before)


@case
def a_failure_in_a_step_leaves_batch_and_runner_as_they_were(
    device: str, setup: Setup, engine_class: type[PlannedEngine]
) -> None:
    """In a replay and in an eager step; the same batch then runs, as a replay and eagerly, and so does the next one."""
    engine = engine_class(device, setup.phase)
    requests, plain = Requests(engine), runner_for(engine, Setup(setup.phase, "disabled"))
    steps = [STEPS[setup.phase][0], ABOVE[setup.phase], STEPS[setup.phase][1]]
    with captured(engine, setup, BUCKETS[setup.phase]) as runner, plain:
        for hook in (*engine.hooks, "attention"):
            for step in steps:
                batch = requests.step(step)
                decision = runner.can_run(batch)
                assert bool(decision) is (step is not ABOVE[setup.phase] and setup.backend != "disabled")
                if decision and (hook == "in graph" or (hook == "attention" and not setup.runs_attention)):
                    # Nothing of it runs in a replay.
                    assert torch.equal(runner.run(batch), requests.expected(step))
                    continue
                state = (runner.metrics(), dict(runner.graphs), addresses(engine))
                before, engine.fail = contents(batch), hook
                with pytest.raises(ValueError, match=f"{hook} failed"):
                    runner.run(batch)
                engine.fail = None
                check_contents(batch, before)
                assert (runner.metrics(), dict(runner.graphs), addresses(engine)) == state
                assert runner.can_run(batch) == decision
                # Cache rows are written anew with the same values, so that a step can be run twice.
                want = requests.expected(step)
                assert torch.equal(plain.run(batch), want)
                assert torch.equal(runner.run(batch), want)
        assert wrong_steps(runner, requests, STEPS[setup.phase][:5]) == []


@case
def a_failure_while_preparing_a_capture_leaves_no_graph_and_a_runner_that_works(
    device: str, setup: Setup, engine_class: type[PlannedEngine]
) -> None:
    if setup.backend == "disabled":
        return
    engine = engine_class(device, setup.phase)
    requests, steps = Requests(engine), STEPS[setup.phase]
    with runner_for(engine, setup) as runner:
        for hook in engine.hooks:
            engine.fail = hook
            with pytest.raises(dg.CaptureError, match=f"{hook} failed") as caught:
                runner.capture()
            engine.fail = None
            assert (caught.value.code, caught.value.shape_key) == ("forward-failed", dg.ShapeKey(max(runner.buckets)))
            assert isinstance(caught.value.__cause__, ValueError)
            del caught
            assert not runner.graphs
            assert not runner.backend.captured
            assert runner.backend.graph_pool.graphs == 0
            assert wrong_steps(runner, requests, steps[:2]) == []
            assert runner.metrics().replays == {}
        runner.capture()
        assert wrong_steps(runner, requests, steps) == []
        assert sum(runner.metrics().replays.values()) == len(steps)
