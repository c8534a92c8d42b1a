"""What a warm fill and a warm step do on the host, counted: it must not grow. No clock is read.

Counted are the package's own function calls, the calls of C functions that they make (operators of tensors among them),
and the operators that reach torch's dispatcher. Whoever makes a path shorter lowers its ceiling here.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import devicegraph as dg
from devicegraph.bench.fill import Case, batch_of, by_registry, fields_of, registry_of
from devicegraph.native import EXCHANGE
from engines import ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = str(Path(dg.__file__).parent)
#: The tape stands for the device: what a replay does there is not the host's.
DEVICES = str(Path(dg.__file__).parent / "devices")

#: (own functions, C functions) of the path by what it is; more where torch has no table to read tensors through.
CEILINGS = {
    "fill": (4, 3) if EXCHANGE is not None else (17, 56),
    "can_run": (14, 12),
    "run": (26, 19) if EXCHANGE is not None else (40, 58),
}
#: Operators of a fill of eight slots that is left to calls: the planes of one source, and the grouped copy.
FILL_OPERATORS = 2


def counted(step: Callable[[], Any]) -> tuple[int, int]:
    """Own functions and C functions that one call of a warm path calls."""
    counts: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_call") and file.startswith(PACKAGE) and not file.startswith(DEVICES):
            counts[event] += 1

    for _ in range(3):
        step()
    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(previous)
    return counts["call"], counts["c_call"]


class Operators(TorchDispatchMode):
    """Lists the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def fill_of(slots: int) -> Callable[[], None]:
    case, device = Case(slots, 64, 64), torch.device("cpu")
    fields = fields_of(case)
    return by_registry(registry_of(fields, case, device), batch_of(fields, case, device), case)


@pytest.fixture(scope="module")
def runner() -> Iterator[dg.DecodeCudaGraphRunner]:
    with torch.no_grad(), dg.DecodeCudaGraphRunner(ToyEngine(), config=dg.CudaGraphConfig(decode={"bs": [8]})) as made:
        made.capture()
        yield made


@pytest.fixture
def paths(runner: dg.DecodeCudaGraphRunner) -> Iterator[dict[str, Callable[[], Any]]]:
    batch = runner.model_runner.batch([3, 5, 2])
    with torch.no_grad():
        yield {"fill": fill_of(8), "can_run": lambda: runner.can_run(batch), "run": lambda: runner.run(batch)}


@pytest.mark.parametrize("path", CEILINGS)
def test_a_warm_path_calls_no_more_than_it_did(path: str, paths: dict[str, Callable[[], Any]]) -> None:
    own, c = counted(paths[path])
    assert (own <= CEILINGS[path][0], c <= CEILINGS[path][1]) == (True, True), f"{path}: {(own, c)}"


def test_the_count_sees_every_call() -> None:
    fill = fill_of(8)
    once = counted(fill)
    assert min(once) > 0
    assert counted(lambda: (fill(), fill())) == (2 * once[0], 2 * once[1])


def test_a_warm_fill_sends_no_more_operators_than_it_did() -> None:
    fill = fill_of(8)
    with torch.inference_mode(), Operators() as operators:
        fill()
        operators.names.clear()
        fill()
    assert len(operators.names) <= FILL_OPERATORS, operators.names


def test_a_fill_grows_by_the_same_for_each_further_slot() -> None:
    at = {slots: counted(fill_of(slots)) for slots in (16, 32, 64)}
    for kind in (0, 1):
        assert at[64][kind] - at[32][kind] == 2 * (at[32][kind] - at[16][kind])


def test_finding_the_graph_of_a_batch_costs_the_same_among_any_number_of_buckets() -> None:
    few, many = (dg.decode_buckets(512, bs=list(range(step, 513, step))) for step in (512, 1))
    assert counted(lambda: few.fit(300)) == counted(lambda: many.fit(300)) == (0, 0)
    assert (few.fit(300), many.fit(300)) == (512, 300)


def test_warm_steps_keep_nothing_and_leave_the_collector_nothing_to_do(paths: dict[str, Callable[[], Any]]) -> None:
    steps = 400

    def take() -> None:
        for path in paths.values():
            for _ in range(steps):
                path()

    take()
    gc.collect()  # which also drops what the interpreter keeps for reuse
    before = sys.getallocatedblocks()
    gc.disable()
    try:
        take()
    finally:
        gc.enable()
    garbage = gc.collect()
    # Not one block for each step of a path; caches of torch and of the interpreter may have grown by some.
    assert (garbage, sys.getallocatedblocks() - before < steps) == (0, True)
