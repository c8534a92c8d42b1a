"""Every backend passes the suite on the CPU tape, and the suite finds every backend out that breaks a clause."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.devices import Availability
from devicegraph.devices.cpu import CpuDevice
from devicegraph.testing import _CLAUSES, CLAUSES, check_backend
from devicegraph.testing.model import ATTENTION
from mutants import MUTANTS, BoundToItsThread, RunsEverything

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = [
    pytest.param(dg.FullCudaGraphBackend, id="full"),
    pytest.param(dg.BreakableCudaGraphBackend, id="breakable"),
    *(
        pytest.param(
            functools.partial(dg.TcPiecewiseCudaGraphBackend, tc_compiler=compiler),
            id=f"tc_piecewise-{compiler}",
            marks=[
                pytest.mark.filterwarnings("default"),  # torch.compile and its compilers warn of things of their own
                pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer"),
            ],
        )
        for compiler in ("eager", "inductor")
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_keeps_every_clause_on_the_tape(backend: Any) -> None:
    assert check_backend(backend, "cpu") == list(CLAUSES)


@pytest.fixture
def first_stream() -> Iterator[None]:
    """Some mutants leave another stream current."""
    adapter = dg.get_device_adapter("cpu")
    with adapter.stream_context(adapter.current_stream()):
        yield


@pytest.mark.usefixtures("first_stream")
@pytest.mark.parametrize(("clause", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_a_backend_that_breaks_a_clause_is_found_out(clause: str, mutant: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        check_backend(mutant, "cpu", clauses=[clause])
    assert str(caught.value).startswith(f"clause `{clause}` is broken: ")


def test_every_clause_finds_a_backend_out() -> None:
    assert {clause for clause, _ in MUTANTS} == set(CLAUSES)


def test_a_failure_names_the_clause_and_what_was_seen() -> None:
    with pytest.raises(AssertionError) as caught:
        check_backend(RunsEverything, "cpu")
    assert str(caught.value) == (
        "clause `keys` is broken: `can_run` and `captured` know the captured keys, of whatever type, and a replay of "
        "another is a KeyError.\n"
        "`can_run` says yes to 4, that was never captured"
    )
    assert isinstance(caught.value.__cause__, AssertionError)


def test_an_error_of_the_backend_is_told_and_chained() -> None:
    with pytest.raises(AssertionError) as caught:
        check_backend(BoundToItsThread, "cpu", clauses=["replays_anywhere"])
    assert str(caught.value).splitlines()[1] == "RuntimeError: another thread"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_split_operator_of_the_suite_is_registered_while_it_runs_only() -> None:
    before = dg.split_operators()
    seen: list[tuple[str, ...]] = []

    class Looks(dg.FullCudaGraphBackend):
        def wrap_forward(self, forward: Any) -> Any:
            seen.append(dg.split_operators())
            return forward

    check_backend(Looks, "cpu", clauses=["warm_ups"])
    assert seen == [(*before, ATTENTION)]
    assert dg.split_operators() == before


NAMES = ", ".join(f"`{name}`" for name in CLAUSES)


@pytest.mark.parametrize(
    ("clauses", "said"),
    [
        ("keys", f"`clauses` is the string 'keys', not a sequence of names; there are {NAMES}"),
        (["keys", "speed"], f"`clauses` names 'speed', which is no clause; there are {NAMES}"),
    ],
    ids=["string", "unknown"],
)
def test_clauses_that_there_are_not_are_refused_before_any_is_checked(clauses: Any, said: str) -> None:
    made: list[object] = []

    def make(*args: Any, **kwargs: Any) -> dg.FullCudaGraphBackend:
        made.append(args)
        return dg.FullCudaGraphBackend(*args, **kwargs)

    with pytest.raises(ValueError, match="clauses") as caught:
        check_backend(make, "cpu", clauses=clauses)
    assert str(caught.value) == said
    assert not made


@pytest.mark.parametrize("device", ["foo", "meta"])
def test_a_device_without_an_adapter_is_no_fault_of_the_backend(device: str) -> None:
    with pytest.raises(dg.BackendError) as caught:
        check_backend(dg.FullCudaGraphBackend, device, clauses=["keys"])
    assert caught.value.code == "unknown-device"


def test_a_device_that_is_not_here_is_no_fault_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Availability(False, "its fan is off", "switch it on")
    monkeypatch.setattr(CpuDevice, "availability", classmethod(lambda cls: reason))
    with pytest.raises(dg.BackendError) as caught:
        check_backend(dg.FullCudaGraphBackend, "cpu", clauses=["keys"])
    assert caught.value.code == "device-not-available"
    assert caught.value.hint == "switch it on"


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def modes() -> tuple[object, ...]:
    """What a thread has set of what changes results."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(default_dtype, torch.float64),
    ],
    ids=["inference_mode", "no_grad", "autocast", "default_dtype"],
)
def test_the_modes_of_the_caller_make_no_difference_and_stay_as_they_are(mode: Any) -> None:
    seen: list[tuple[object, ...]] = []
    neutral = modes()

    class Looks(dg.BreakableCudaGraphBackend):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(modes())

    clauses = ["replays_equal_eager", "keys"]
    with mode():
        before = modes()
        assert before != neutral
        assert check_backend(Looks, "cpu", clauses=clauses) == clauses
        assert modes() == before
        with pytest.raises(AssertionError, match="clause `keys` is broken"):
            check_backend(RunsEverything, "cpu", clauses=["keys"])
        assert modes() == before
    assert set(seen) == {neutral}


def test_the_suite_needs_no_test_framework() -> None:
    code = "import sys, devicegraph.testing; print(sorted({'pytest', 'hypothesis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_page_says_what_the_clauses_say() -> None:
    page = (Path(__file__).parent.parent / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    table = page.split("## The clauses\n")[1].split("| --- | --- |\n")[1].splitlines()
    assert table == [f"| `{name}` | {clause.__doc__} |" for name, clause in _CLAUSES.items()]
