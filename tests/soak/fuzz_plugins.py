"""Packages whose entry points are broken or lie: each is an error that names it, and takes nothing else down."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import TYPE_CHECKING, Any
from unittest import mock

import devicegraph as dg
from devicegraph import backends, devices
from devicegraph.devices.cpu import CpuDevice
from hostile import FoundError, OwnError, main, odd_objects, outcome

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

ODD = odd_objects()
MODULE = "devicegraph_fuzzed_plugin"


class Module(types.ModuleType):
    """A module of which reading some names fails."""

    def __getattr__(self, name: str) -> Any:
        if name in ("Raises", "Exits"):
            raise {"Raises": OwnError, "Exits": SystemExit}[name]
        raise AttributeError(name)


def a_device(draw: random.Random) -> type:
    """A device's class, which may not be able to say whether it is there."""

    class Device(CpuDevice):
        type = "hpu"
        says = None

        @classmethod
        def availability(cls) -> Any:
            if cls.says is OwnError:
                raise OwnError
            return cls.says

    Device.says = draw.choice([
        dg.Availability(True), dg.Availability(False, "it is off"), OwnError, *ODD,
    ])  # fmt: skip
    return Device


def a_value(draw: random.Random, classes: dict[str, Any]) -> str:
    return draw.choice([
        f"{MODULE}:{draw.choice([*classes, 'Raises', 'Exits', 'missing', 'a.b', ''])}", "devicegraph_no_such_module:X",
        f"{MODULE}", "", ":", "a b:c", "json:loads", f"{MODULE}:Device", f"{MODULE}:Backend", "os:path",
    ])  # fmt: skip


def case(draw: random.Random) -> str:
    classes = {
        "Device": a_device(draw), "Backend": dg.FullCudaGraphBackend, "Other": dict, "function": len, "nothing": None,
        "instance": object(), "odd": draw.choice(ODD),
    }  # fmt: skip
    module = Module(MODULE)
    vars(module).update(classes)
    names = ["hpu", "hpu:full", "hpu:breakable", "hpu", "hpu:", ":", "", "hpu:full:x", "cpu:full", "cpu", "xyz"]
    points = [
        importlib.metadata.EntryPoint(draw.choice(names), a_value(draw, classes), group)
        for group in ("devicegraph.devices", "devicegraph.backends")
        for _ in range(draw.randrange(3))
    ]

    def entry_points(*, group: str, name: str | None = None) -> Iterator[Any]:
        return iter([point for point in points if point.group == group and name in (None, point.name)])

    with (
        mock.patch.dict(sys.modules, {MODULE: module}),
        mock.patch.object(backends, "entry_points", entry_points),
        mock.patch.object(devices, "entry_points", entry_points),
    ):
        device = draw.choice(["hpu", "hpu:0", "cpu", "xyz", "", draw.choice(ODD)])
        adapter, error = outcome(lambda: dg.get_device_adapter(device))
        if error is None and not isinstance(adapter, dg.DeviceAdapter):
            raise FoundError(f"{points}: {device!r} is {adapter!r}")
        kinds = {point.name for point in points if point.group == "devicegraph.devices"}
        said = outcome(lambda: [bool(devices.device_availability(kind)) for kind in kinds])
        if said.error is not None:
            raise FoundError(f"{points}: what there is cannot be listed: {said.error!r}")
        word = draw.choice(["full", "breakable", "tc_piecewise", "x"])
        found, refused = outcome(lambda: backends.backend_class("hpu", word))
        if refused is None and not issubclass(found, dg.BaseCudaGraphBackend):
            raise FoundError(f"{points}: hpu:{word} is {found!r}")
        assert backends.backend_words("hpu")[-1] == "disabled"
        assert backends.backend_class("cpu", "full") is dg.FullCudaGraphBackend
        assert dg.get_device_adapter("cpu").type == "cpu"
    return "refused" if error and refused else "accepted"


if __name__ == "__main__":
    main("fuzz_plugins", case, 5_000)
