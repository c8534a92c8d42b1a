"""Capture backends, found by device and by the configuration's word.

Those of this package are in the table below; others come through the entry point group `devicegraph.backends`, under
names `<device>:<backend>` with the configuration's word for the backend, and their values are `BaseCudaGraphBackend`
classes.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, cast

import torch

from devicegraph.backends.base import BaseCudaGraphBackend
from devicegraph.backends.split_ops import OLDEST_TORCH_FOR_PIECES, split_operators
from devicegraph.devices.plugins import load_class
from devicegraph.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from devicegraph.runners.capturing import CapturingRunner

__all__ = ["BaseCudaGraphBackend", "resolve_decode_backend", "resolve_prefill_backend"]

_BACKENDS: Final = {
    f"{device}:{word}": f"devicegraph.backends.{word}:{name}"
    for device in ("cpu", "cuda")
    for word, name in (
        ("full", "FullCudaGraphBackend"),
        ("breakable", "BreakableCudaGraphBackend"),
        ("tc_piecewise", "TcPiecewiseCudaGraphBackend"),
    )
} | {
    "npu:full": "devicegraph.backends.npu:NPUCudaGraphBackend",
    "xpu:full": "devicegraph.backends.full:FullCudaGraphBackend",
    "musa:full": "devicegraph.backends.full:FullCudaGraphBackend",
    "musa:breakable": "devicegraph.backends.breakable:BreakableCudaGraphBackend",
}
_ENTRY_POINTS: Final = "devicegraph.backends"


def backend_class(device_type: str, backend: str) -> type[BaseCudaGraphBackend]:
    """The class of a backend on a device.

    Raises:
        BackendError: `backend-not-available` where there is none, with those that there are; `plugin-failed` where an
            entry point cannot be loaded, or is none.
    """
    name = f"{device_type}:{backend}"
    if name in _BACKENDS:
        module, attribute = _BACKENDS[name].split(":")
        return cast("type[BaseCudaGraphBackend]", getattr(importlib.import_module(module), attribute))
    for point in entry_points(group=_ENTRY_POINTS, name=name):
        what = f"backend `{name}`"
        return load_class(point, BaseCudaGraphBackend, what)  # type: ignore[type-abstract]  # what derives from it is not
    raise BackendError(
        f"backend `{backend}` is not available on device `{device_type}`",
        code="backend-not-available",
        hint=f"on `{device_type}` there are: {', '.join(backend_words(device_type))}",
    )


def backend_words(device_type: str) -> list[str]:
    """The configuration's words that mean something on a device; `disabled` is one everywhere."""
    known = sorted({*_BACKENDS, *(point.name for point in entry_points(group=_ENTRY_POINTS))})
    parts = [entry.partition(":") for entry in known]
    return [*(word for device, _, word in parts if device == device_type and word), "disabled"]


def resolve_decode_backend(runner: CapturingRunner) -> BaseCudaGraphBackend | None:
    """The backend that the configuration of a decode runner asks for on its device; None for `disabled`.

    Raises:
        BackendError: see `backend_class`.
    """
    return _resolve(runner, "decode")


def _why_not_piecewise(device_type: str) -> str | None:
    if f"{device_type}:tc_piecewise" not in _BACKENDS:  # else nobody has to look for plug-ins
        words = backend_words(device_type)
        if "tc_piecewise" not in words and "breakable" in words:
            return "not-on-device"
    if torch.__version__ < OLDEST_TORCH_FOR_PIECES:
        return "torch-too-old"
    # Without them the whole forward, attention included, would be one piece of fixed shape.
    return None if split_operators() else "no-split-ops"


def resolve_prefill_backend(runner: CapturingRunner) -> BaseCudaGraphBackend | None:
    """The backend that the configuration of a prefill runner asks for on its device; None for `disabled`.

    Raises:
        BackendError: see `backend_class`.
        ConfigError: `phase-not-on-device` where the device captures decode only.
    """
    return _resolve(runner, "prefill")


def _resolve(runner: CapturingRunner, phase: str) -> BaseCudaGraphBackend | None:
    word = runner.config[phase].backend
    assert word is not None  # a configuration names one for every phase
    if word == "disabled":
        return None
    if phase not in runner.adapter.phases:
        raise ConfigError(
            f"{phase}.backend: `{word}`: device `{runner.adapter.type}` captures graphs of "
            f"{', '.join(runner.adapter.phases)} only",
            code="phase-not-on-device",
            hint="set it to `disabled`, or resolve the configuration with the fact `device`, which does it",
        )
    if word == "tc_piecewise" and (reason := _why_not_piecewise(runner.adapter.type)) is not None:
        word, runner.fallback = "breakable", reason
    backend = backend_class(runner.adapter.type, word)
    return backend(
        runner.adapter,
        phase=phase,
        graph_pool=runner.graph_pool,
        capture_error_mode=runner.capture_error_mode,
        barrier=runner.hooks.barrier,
        **backend.options_from(runner),
    )
