"""Autocast as it was when something was captured: a setting of the thread that no graph holds."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@functools.cache
def _device_types() -> tuple[str, ...]:
    """Those whose autocast a model may use. An accelerator may be registered after this module is loaded."""
    try:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    except RuntimeError:  # what torch 2.6 says of a vendor's device that does not count itself to it
        accelerator = None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast_state() -> dict[str, torch.dtype]:
    """What autocast casts to now, for each device type for which it is on."""
    return {kind: torch.get_autocast_dtype(kind) for kind in _device_types() if torch.is_autocast_enabled(kind)}


@contextmanager
def autocast_as(state: dict[str, torch.dtype]) -> Iterator[None]:
    """Makes autocast for the block what it was when `state` was taken."""
    now = autocast_state()
    with ExitStack() as stack:
        for kind in _device_types():
            if state.get(kind) != now.get(kind):
                stack.enter_context(torch.autocast(kind, dtype=state.get(kind), enabled=kind in state))
        yield
