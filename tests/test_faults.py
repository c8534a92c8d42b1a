"""Whatever fails at whichever step, a runner is as it was or without graphs, and goes on from there.

Every call that a scenario makes of adapter, backend, registry, graphs and hooks fails in its turn; a few of them in
every run, all of them where `DEVICEGRAPH_SOAK` is set.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import devicegraph as dg
import stand_in
from devicegraph.backends import split_ops
from devicegraph.devices import accelerator
from devicegraph.devices.accelerator import XpuDevice
from devicegraph.runners import capture_mode
from faults import COLLECTOR, SCENARIOS, SLOW, Bench, cases, inject, points

if TYPE_CHECKING:
    from collections.abc import Iterator

IS_SOAK = bool(os.environ.get("DEVICEGRAPH_SOAK"))


class Setup(NamedTuple):
    phase: str
    backend: str
    #: The device whose adapter is used over a stand-in for its module; None for the CPU's own.
    adapter_of: str | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, self))

    def bench(self) -> Bench:
        return Bench(self.phase, self.backend, adapter_of=self.adapter_of)


SETUPS = [
    Setup("decode", "full"),
    Setup("decode", "full, shared executables"),
    Setup("decode", "breakable"),
    Setup("prefill", "breakable"),
    Setup("prefill", "tc_piecewise"),
    Setup("decode", "full", "xpu"),
    Setup("decode", "breakable", "xpu"),
]


class OnHost(XpuDevice):
    """The adapter of accelerators like CUDA, over a stand-in for their module."""

    bindings = "stand_in"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = torch.device("cpu")

    @classmethod
    def module(cls) -> Any:
        return STAND_IN


STAND_IN = stand_in.make_module(stand_in.XPUGraph)


class Benches:
    """One bench at a time, made when it is first asked for, and anew after a fault that was not survived."""

    def __init__(self) -> None:
        self.setup: Setup | None = None
        self.bench: Bench | None = None

    def of(self, setup: Setup) -> Bench:
        if setup.backend == "tc_piecewise" and torch.__version__ < "2.11":
            pytest.skip("tc_piecewise is held to torch 2.11 and newer")
        if self.bench is None or self.setup != setup:
            self.drop()
            self.setup, self.bench = setup, setup.bench()
            gc.collect()
            gc.freeze()  # what torch made on the way stays
        return self.bench

    def drop(self) -> None:
        if self.bench is not None:
            self.bench.runner.close()
        self.bench = None
        gc.collect()


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_mode, "gc", COLLECTOR)
        patch.setattr(accelerator, "XpuDevice", OnHost)
        patch.setattr(split_ops, "_registered", {})
        dg.register_split_op(torch.ops.devicegraph_tests.attend)
        made = Benches()
        yield made
        made.drop()


@pytest.mark.filterwarnings("default")  # torch.compile warns of things of its own
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "close"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_fault_at_any_step_leaves_nothing_and_the_runner_goes_on(
    setup: Setup, scenario: str, benches: Benches
) -> None:
    bench = benches.of(setup)
    rarely = 30 if setup.backend == "tc_piecewise" or setup.adapter_of else 9
    every = None if IS_SOAK else (rarely if scenario in SLOW else 1)
    found = 0
    for point, error in cases(bench, scenario, every=every):
        try:
            inject(bench, scenario, point, error)
        except AssertionError as failure:
            benches.drop()
            raise AssertionError(f"{type(error).__name__} at {point}: {failure}") from failure
        found += 1
    assert found > 0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("setup", SETUPS if IS_SOAK else SETUPS[:1], ids=str)
def test_a_close_that_fails_lets_go_of_everything_when_it_is_called_again(setup: Setup, benches: Benches) -> None:
    benches.drop()
    for point, error in list(cases(setup.bench(), "close", every=None if IS_SOAK else 2)):
        inject(setup.bench(), "close", point, error)


def test_the_steps_that_fail_are_all_that_a_capture_and_a_replay_ask_for(benches: Benches) -> None:
    bench = benches.of(Setup("decode", "breakable"))
    capture = {point.name for point in points(bench, "recapture")}
    assert capture >= {
        "adapter.synchronize",
        "adapter.empty_cache",
        "adapter.memory",
        "adapter.capture_segments, enter",
        "adapter.capture_segments, exit",
        "backend.capture_session, enter",
        "backend.capture_session, exit",
        "backend.capture_one",
        "backend.cleanup",
        "backend.discard",
        "on_segment",
        "segment.replay",
        "segment.reset",
        "segments.pause, enter",
        "segments.pause, exit",
        "registry.reset_index_buffers",
        "registry.fill_from",
        "registry.views",
        "runner._forward",
        "runner.progress",
        *(f"engine.{hook}" for hook in ("make_batch", "prepare_metadata", "upgrade_metadata", "prepare_in_graph")),
        *(f"engine.{hook}" for hook in ("after_warmup", "barrier", "vote")),
    }
    step = {point.name for point in points(bench, "replay")}
    assert step >= {
        "engine.pre_replay",
        "engine.vote",
        "engine.prepare_metadata",
        "engine.upgrade_metadata",
        "registry.fill_from",
        "registry.extract_buffer",
        "backend.can_run",
        "backend.replay_session, enter",
        "backend.replay",
        "segment.replay",
    }
