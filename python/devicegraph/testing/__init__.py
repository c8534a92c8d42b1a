"""For the tests of others: a suite for every capture backend, and one for what an engine makes of its graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from devicegraph.backends.autocast import autocast_as
from devicegraph.backends.split_ops import also_split_at
from devicegraph.devices import get_device_adapter
from devicegraph.testing import captures, failures, lifetimes, replays
from devicegraph.testing.model import ATTENTION
from devicegraph.testing.stage import Subject
from devicegraph.verifying import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from devicegraph.backends import BaseCudaGraphBackend
    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.slots import HostValue
    from devicegraph.verifying.report import VerifyReport

__all__ = ["CLAUSES", "check_backend", "check_runner"]

_CLAUSES = {
    clause.__name__: clause for clause in (*captures.CLAUSES, *replays.CLAUSES, *failures.CLAUSES, *lifetimes.CLAUSES)
}
#: The names of all clauses, in the order in which they are checked.
CLAUSES = tuple(_CLAUSES)
_KNOWN = f"there are {', '.join(f'`{name}`' for name in CLAUSES)}"


def check_backend(
    make_backend: Callable[..., BaseCudaGraphBackend], device: torch.device | str, *, clauses: Sequence[str] = CLAUSES
) -> list[str]:
    """Checks a capture backend against every clause of the contract, with values, on a small model of its own.

    The model is driven as a runner does it, through the backend's `wrap_forward`, `wrap_prepare`, `mark_rows` and
    `size_outputs`. Its attention is a break for backends that have breaks, and a registered split operator for those
    that compile. Captures take some tens of MiB of device memory. Synchronises the device, often. The caller's
    inference mode, grad mode, autocast and default dtype make no difference: the clauses run with torch's own defaults.

    Args:
        make_backend: the class, or what makes an instance of it from the arguments of `BaseCudaGraphBackend`.
        device: where; it needs an adapter, see `get_device_adapter`.
        clauses: names of those to check, for looking into one of them.

    Returns:
        The names of the clauses that were checked, in order.

    Raises:
        AssertionError: at the first clause that is broken, with its name, what it says and what was seen; what the
            backend raised against the contract is chained.
        ValueError: `clauses` is a string, or names a clause that there is not.
        BackendError: `unknown-device`, or `device-not-available` with the reason; see `get_device_adapter`.
    """
    subject = Subject(make_backend, get_device_adapter(device))
    names = _checked_names(clauses)
    with _neutral_modes(), also_split_at(ATTENTION):
        for name in names:
            clause = _CLAUSES[name]
            try:
                clause(subject)
            except Exception as error:
                seen = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                raise AssertionError(f"clause `{name}` is broken: {clause.__doc__}\n{seen}") from error
    return names


def check_runner(
    runner: BaseCudaGraphRunner,
    batches: Iterable[Any],
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    poisons: Mapping[str, Sequence[HostValue]] | None = None,
    tolerances: Mapping[torch.dtype, float] | None = None,
) -> VerifyReport:
    """Checks an engine's graphs with `verify`: the arguments and errors are described there.

    Every captured graph needs a batch that it has room for, and every batch a graph.

    Returns:
        The report, which is true.

    Raises:
        AssertionError: what `verify` has found, or left out.
    """
    report = verify(runner, batches, state=state, poisons=poisons, tolerances=tolerances)
    if not report or report.missed or report.skipped:
        raise AssertionError(str(report))
    return report


def _checked_names(clauses: Sequence[str]) -> list[str]:
    if isinstance(clauses, str):
        raise ValueError(f"`clauses` is the string {clauses!r}, not a sequence of names; {_KNOWN}")
    names = list(clauses)
    unknown = [name for name in names if name not in _CLAUSES]
    if unknown:
        raise ValueError(f"`clauses` names {', '.join(map(repr, unknown))}, which is no clause; {_KNOWN}")
    return names


@contextmanager
def _neutral_modes() -> Iterator[None]:
    """Torch's defaults for the block: the clauses compare bits, and write to tensors outside of inference mode."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_as({}):
            yield
    finally:
        torch.set_default_dtype(dtype)
