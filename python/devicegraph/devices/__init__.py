"""Device adapters, found by the type of a `torch.device`.

Those of this package are in the table below, others come through the entry point group `devicegraph.devices`, whose
names are device types and whose values are `DeviceAdapter` classes. Nothing outside this folder names a device.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Final, cast

import torch

from devicegraph.devices.adapter import (
    CAPTURE_ERROR_MODES,
    DEFAULT_CAPTURE_ERROR_MODE,
    Availability,
    CaptureErrorMode,
    CaptureSegments,
    DeviceAdapter,
    DeviceGraph,
    DeviceMemory,
    SegmentedCapture,
    UpdatableCall,
)
from devicegraph.devices.graph_pool import GraphMemoryPool
from devicegraph.devices.plugins import load_class
from devicegraph.errors import BackendError

__all__ = [
    "CAPTURE_ERROR_MODES",
    "DEFAULT_CAPTURE_ERROR_MODE",
    "Availability",
    "CaptureErrorMode",
    "CaptureSegments",
    "DeviceAdapter",
    "DeviceGraph",
    "DeviceMemory",
    "GraphMemoryPool",
    "SegmentedCapture",
    "UpdatableCall",
    "device_availability",
    "device_types",
    "get_device_adapter",
]

#: The adapters of this package, by device type.
_ADAPTERS: Final = {
    "cpu": "devicegraph.devices.cpu:CpuDevice",
    "cuda": "devicegraph.devices.cuda:CudaDevice",
    "npu": "devicegraph.devices.npu:NpuDevice",
    "xpu": "devicegraph.devices.accelerator:XpuDevice",
    "musa": "devicegraph.devices.accelerator:MusaDevice",
}
_ENTRY_POINTS: Final = "devicegraph.devices"


def get_device_adapter(device: torch.device | str | int) -> DeviceAdapter:
    """The adapter of a device; a device without an index means the current one.

    Raises:
        BackendError: `unknown-device` for a type without an adapter, `device-not-available` for one that cannot be used
            here, with the reason and what to install or set.
    """
    named = device.partition(":")[0] if isinstance(device, str) else ""
    if named and named in device_types() and not _is_known_to_torch(named):
        # The package behind it has to be loaded first, which asking whether it is available does.
        _check_available(_adapter_class(named), device)
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # text that is none, and numbers of more than 64 bits
        raise BackendError(
            f"{device!r} is no device of this torch",
            code="unknown-device",
            hint=f"known are {', '.join(device_types())}, with an index as in `cuda:1`",
        ) from error
    adapter = _adapter_class(wanted.type)
    _check_available(adapter, wanted)
    return adapter(wanted)


def _is_known_to_torch(device_type: str) -> bool:
    try:
        torch.device(device_type)
    except (RuntimeError, ValueError):
        return False
    return True


def _check_available(adapter: type[DeviceAdapter], device: object) -> None:
    availability = _availability(adapter)
    if not availability:
        raise BackendError(
            f"device `{device}` is not available here: {availability.reason}",
            code="device-not-available",
            hint=availability.hint,
        )


def _availability(adapter: type[DeviceAdapter]) -> Availability:
    """What an adapter says of its device; one that cannot say it is at fault itself."""
    fault = f"the adapter `{adapter.__name__}` cannot say whether its device is available"
    try:
        availability = adapter.availability()
    except Exception as error:
        raise BackendError(f"{fault}: {type(error).__name__}: {error}", code="plugin-failed") from error
    if not isinstance(availability, Availability):
        raise BackendError(f"{fault}: it says a `{type(availability).__name__}`", code="plugin-failed")
    return availability


def device_types() -> list[str]:
    """Every device type that has an adapter, this package's first."""
    return list(dict.fromkeys([*_ADAPTERS, *(point.name for point in entry_points(group=_ENTRY_POINTS))]))


def device_availability(device_type: str) -> Availability:
    """Whether devices of a type can be used here; an adapter that cannot be loaded is a reason like others."""
    try:
        return _availability(_adapter_class(device_type))
    except BackendError as error:
        return Availability(False, error.message, error.hint)


def _adapter_class(device_type: str) -> type[DeviceAdapter]:
    if device_type in _ADAPTERS:
        module, name = _ADAPTERS[device_type].split(":")
        return cast("type[DeviceAdapter]", getattr(importlib.import_module(module), name))
    for point in entry_points(group=_ENTRY_POINTS, name=device_type):
        what = f"the adapter of device `{device_type}`"
        return load_class(point, DeviceAdapter, what)  # type: ignore[type-abstract]  # what derives from it is not
    raise BackendError(
        f"no adapter for device `{device_type}`",
        code="unknown-device",
        hint=f"known are {', '.join(device_types())}; others come through the entry point group `{_ENTRY_POINTS}`",
    )
