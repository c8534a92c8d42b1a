"""Attention metadata on the CPU tape: prepared and upgraded for every step, whatever the backend and wherever it is."""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph.backends import split_ops
from engines import ToyEngine
from metadata_cases import CASES, ENGINES, INDUCTOR, SETUPS, STEPS, Setup, addresses, captured, planned, wrong_steps
from metadata_model import FullMetadata, PlannedEngine, Requests

pytestmark = pytest.mark.filterwarnings("default")  # torch.compile and its compilers warn of things of their own


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op("devicegraph_tests::planned_attention")
    torch._dynamo.reset()


def skip_if_too_old(setup: Setup) -> None:
    if setup.backend == "tc_piecewise" and torch.__version__ < "2.11":
        pytest.skip("tc_piecewise is held to torch 2.11 and newer")


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_cases_that_a_gpu_is_held_to_hold_on_the_tape(case: Any, setup: Setup, engine_class: Any) -> None:
    skip_if_too_old(setup)
    case("cpu", setup, engine_class)


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("setup", INDUCTOR, ids=str)
def test_compiled_pieces_meet_the_metadata_of_every_step(setup: Setup, engine_class: Any) -> None:
    skip_if_too_old(setup)
    CASES[0]("cpu", setup, engine_class)


class ReadsTheHost(ToyEngine):
    """Prepares an eager step from what only its own batches have."""

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        batch.offset = batch.offset_on_host if key is None else torch.zeros((), dtype=torch.int64)

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) + batch.offset


def test_a_batch_of_the_package_is_never_prepared_as_one_of_the_engine() -> None:
    one = dg.DecodeCudaGraphRunner(ReadsTheHost(), config=dg.CudaGraphConfig(decode={"bs": [4]}))
    two = dg.DecodeCudaGraphRunner(ReadsTheHost(), config=dg.CudaGraphConfig(decode={"bs": [2, 4]}))
    with one, two:
        assert two.estimate_capture().graphs == 2
        for runner in (one, two):
            runner.capture()
            batch: Any = runner.model_runner.batch([3, 5, 2])
            assert runner.run(batch).shape == (3, 32)


def test_graphs_that_cannot_be_proved_on_idle_batches_are_refused_with_a_way_out() -> None:
    config = dg.CudaGraphConfig(decode={"bs": [4]})
    with dg.DecodeCudaGraphRunner(ReadsTheHost(), config=config, verify_on_capture=True) as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert str(caught.value) == (
            "decode: the graphs cannot be verified on idle batches: AttributeError: 'Batch' object has no attribute "
            "'offset_on_host' [verify-failed]\n\nhint: give the engine `verify_batches()`: live batches, which have "
            "what an eager step needs"
        )
        engine: Any = runner.model_runner
        batch: Any = engine.batch([3, 5])
        batch.offset_on_host = torch.zeros((), dtype=torch.int64)
        engine.verify_batches = lambda: [batch]
    with dg.DecodeCudaGraphRunner(engine, config=config, verify_on_capture=True) as runner:
        assert len(runner.capture().captured) == 1


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[4]], ids=str)
def test_any_sequence_of_steps_equals_the_oracle(setup: Setup) -> None:
    engine = PlannedEngine(phase=setup.phase)
    with captured(engine, setup) as runner:
        before = addresses(engine)
        counts = st.just(1) if setup.phase == "decode" else st.integers(1, 8)
        step = st.dictionaries(st.integers(1, 8), counts, min_size=1, max_size=8)

        @settings(max_examples=20)
        @given(st.lists(step, min_size=1, max_size=8))
        def check(steps: list[dict[int, int]]) -> None:
            assert wrong_steps(runner, Requests(engine), steps) == []
            assert addresses(engine) == before

        check()


@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_debugged_replay_sees_the_batch_of_the_step(engine_class: Any) -> None:
    """Requests of a prefill are no slots: the batch of the capture knows nothing of them."""
    engine = engine_class(phase="prefill")
    adapter = dg.get_device_adapter("cpu")
    backend = dg.BreakableCudaGraphBackend(adapter, phase="prefill", debug=True)
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [4, 8, 16, 32]})
    with dg.PrefillCudaGraphRunner(engine, config=config, backend=backend) as runner:
        runner.capture()
        requests = Requests(engine)
        for step in STEPS["prefill"]:
            engine.seen.clear()
            batch = requests.step(step)
            assert torch.equal(runner.run(batch), requests.expected(step))
            assert {size for _, size in engine.seen} == {len(step)}


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[1]], ids=str)
def test_each_variant_of_a_bucket_has_metadata_of_its_own(setup: Setup) -> None:
    class Variants(PlannedEngine):
        variants = (None, "lora")
        wanted: str | None = None

        def variant(self, batch: Any) -> str | None:
            return self.wanted

    engine = Variants()
    with captured(engine, setup) as runner:
        assert set(engine.metadata) == set(runner.graphs)
        places = [address for metadata in addresses(engine).values() for address in metadata]
        assert len(set(places)) == len(places)
        requests = Requests(engine)
        for engine.wanted, step in zip([None, "lora"] * 9, STEPS["decode"], strict=False):
            assert wrong_steps(runner, requests, [step]) == []
        assert {key.variant_label for key in runner.metrics().replays} == {None, "lora"}


@pytest.mark.parametrize("setup", SETUPS[:3], ids=str)
def test_an_idle_rank_that_joins_plans_for_padding_alone(setup: Setup) -> None:
    skip_if_too_old(setup)

    class Rank(PlannedEngine):
        def vote(self, proposal: dg.Proposal) -> dg.Proposal:
            return dg.Proposal(True, 3) if proposal.size == 0 else proposal

    engine = Rank()
    requests = Requests(engine)
    with captured(engine, setup) as runner:
        assert wrong_steps(runner, requests, STEPS["decode"][:5]) == []
        before = planned(engine)
        assert runner.run(requests.step({})).shape == (0, 32)
        assert planned(engine) == [count + 1 for count in before]
        assert not engine.metadata[dg.ShapeKey(4)].rows.any()
        assert wrong_steps(runner, requests, STEPS["decode"][5:]) == []
        assert runner.metrics().hit_rate == 1.0


def test_preparing_from_parameters_keeps_no_history_of_the_steps() -> None:
    class Weighted(PlannedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.weights = torch.zeros(8)

        def upgrade_metadata(self, batch: Any, key: Any) -> None:
            super().upgrade_metadata(batch, key)
            self.weights.copy_(self.weight * 2)

    engine = Weighted()
    with captured(engine, SETUPS[0]) as runner, torch.enable_grad():
        assert wrong_steps(runner, Requests(engine), STEPS["decode"][:3]) == []
        assert not engine.weights.requires_grad


def test_the_static_batch_of_a_replay_has_the_metadata_and_the_live_one_has_not() -> None:
    engine = PlannedEngine()
    requests = Requests(engine)
    with captured(engine, SETUPS[0]) as runner:
        batch = requests.step({1: 1, 2: 1, 3: 1})
        static = runner.replay_prepare(batch)
        assert type(static.metadata) is FullMetadata
        assert (len(static.metadata.rows), static.metadata.rows.tolist()) == (4, [1, 2, 3, 0])
        assert batch.metadata is None
        engine.fail = "upgrade"
        with pytest.raises(ValueError, match="upgrade failed"):
            runner.replay_prepare(batch)
        engine.fail = None
        # What the failed step left in the static buffers is no part of the next one.
        assert wrong_steps(runner, requests, [{4: 1}, {5: 1, 4: 1}]) == []


@dataclass(frozen=True)
class Frozen:
    input_ids: torch.Tensor
    batch_size: int = 2


@dataclass(slots=True)
class Slotted:
    input_ids: torch.Tensor
    batch_size: int = 2
    added: Any = field(init=False)


@dataclass
class Mixed(Slotted):
    """Slots of a base class, and a dictionary of its own."""

    more: int = 0


@pytest.mark.parametrize("kind", [SimpleNamespace, Frozen, Slotted, Mixed, dict, UserDict])
def test_whatever_a_batch_is_a_failed_eager_step_gives_it_its_fields_back(kind: Any) -> None:
    batch = kind(
        input_ids=torch.zeros(2, dtype=torch.int64), **({} if kind in (Frozen, Slotted) else {"batch_size": 2})
    )
    is_mapping = isinstance(batch, MutableMapping)

    class Engine:
        device, limits = "cpu", dg.Limits(2, 2)

        def prepare_metadata(self, batch: Any, key: Any) -> None:
            if is_mapping:
                batch["added"], batch["batch_size"] = 1, 7
                del batch["input_ids"]
            else:
                object.__setattr__(batch, "added", 1)
                object.__setattr__(batch, "batch_size", 7)
                object.__delattr__(batch, "input_ids")
            raise KeyboardInterrupt

        def forward(self, batch: Any) -> Any:
            raise NotImplementedError

    def fields() -> dict[str, Any]:
        if is_mapping:
            return dict(batch)
        return {name: getattr(batch, name) for name in ("input_ids", "batch_size", "added") if hasattr(batch, name)}

    before = fields()
    config = dg.CudaGraphConfig(decode={"backend": "disabled"})
    with dg.DecodeCudaGraphRunner(Engine(), config=config) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(batch)
        assert fields() == before
        assert fields()["input_ids"] is before["input_ids"]
        assert runner.metrics().steps == 0
