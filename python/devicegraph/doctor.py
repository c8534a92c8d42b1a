"""`devicegraph doctor`: what this machine can do, and why not more."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph._core import __version__
from devicegraph.backends import backend_words
from devicegraph.backends.split_ops import OLDEST_TORCH_FOR_PIECES
from devicegraph.devices import device_availability, device_types

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

#: Where the driver of a device says its version, and how. Read as files: its tools need not be installed.
_DRIVERS: Final = {
    "cuda": (
        (Path("/proc/driver/nvidia/version"), re.compile(r"NVRM version:.*?  (\d[\d.]+)")),
        (Path("/sys/module/amdgpu/version"), re.compile(r"(\S+)")),
    ),
    "npu": ((Path("/usr/local/Ascend/driver/version.info"), re.compile(r"^Version=(\S+)", re.MULTILINE)),),
}
#: What is not needed, and what it is good for.
_OPTIONAL: Final = {
    "tqdm": "a bar while graphs are captured",
    "matplotlib": "`report.plot`",
    "transformers": "`devicegraph demo`",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found. Loads what is behind each device."""
    found = _examine_all()
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_text(found)))
    return 0


def _examine_all() -> dict[str, Any]:
    versions = {"devicegraph": __version__, "torch": torch.__version__, "python": platform.python_version()}
    devices = {name: _examine(name) for name in device_types()}
    tools = _tools()
    return {
        "versions": versions,
        "devices": devices,
        "tools": tools,
        "backends": [
            _needs(device, backend, tools)
            for device, examined in devices.items()
            if examined["available"]
            for backend in _forms(examined["backends"])
        ],
        "optional": {name: _version(name) for name in _OPTIONAL},
    }


def _examine(device_type: str) -> dict[str, Any]:
    availability = device_availability(device_type)
    return {
        "available": bool(availability),
        "reason": availability.reason or None,
        "hint": availability.hint,
        "backends": backend_words(device_type),
        "driver": _driver(device_type),
        "names": _names(device_type) if availability else [],
    }


def _driver(device_type: str) -> str | None:
    for path, pattern in _DRIVERS.get(device_type, ()):
        try:
            match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return None


def _names(device_type: str) -> list[str]:
    """The name of each device, as torch has it."""
    if device_type == "cpu":
        return [platform.machine()]
    module = getattr(torch, device_type, None)
    try:
        return [str(module.get_device_name(index)) for index in range(module.device_count())]  # type: ignore[union-attr]
    except Exception:
        # A device of another package need not have these; that it can be used is known already.
        return []


def _tools() -> dict[str, str | None]:
    """What compiles, and what torch was built for; None for what is not here."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "torch CUDA": torch.version.cuda,
        "torch HIP": torch.version.hip,
        "torch_npu": _version("torch_npu"),
        "triton": _version("triton"),
        "C compiler": _compiler("CC", "gcc", "clang", "cc"),
        "C++ compiler": _compiler("CXX", "g++", "clang++"),
        "Python.h": str(headers) if headers.exists() else None,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compiler(variable: str, *commands: str) -> str | None:
    """The path of a compiler: the one that the environment names, else the first that is there."""
    named = shlex.split(os.environ.get(variable, ""))
    return next((path for command in named[:1] or commands if (path := shutil.which(command))), None)


def _forms(words: list[str]) -> list[str]:
    """The backends, and `tc_piecewise` once for each of its compilers."""
    forms = [[word, "tc_piecewise inductor"] if word == "tc_piecewise" else [word] for word in words]
    return [form for forms_of_word in forms for form in forms_of_word if form != "disabled"]


def _needs(device: str, backend: str, tools: dict[str, str | None]) -> dict[str, Any]:
    """What a backend lacks on a device, each with the way to get it."""
    lacks = []
    if backend.startswith("tc_piecewise") and torch.__version__ < OLDEST_TORCH_FOR_PIECES:
        lacks.append((f"torch {OLDEST_TORCH_FOR_PIECES}", f"install torch {OLDEST_TORCH_FOR_PIECES} or newer"))
    if backend.endswith("inductor"):
        needed = {"Python.h": "install the headers of this Python (`python3-dev`)"}
        if device == "cpu":
            needed["C++ compiler"] = "install g++, or set CXX"
        else:
            needed |= {"triton": "run `pip install triton`", "C compiler": "install gcc, or set CC"}
        lacks += [(tool, hint) for tool, hint in needed.items() if tools[tool] is None]
    return {
        "backend": backend,
        "device": device,
        "ready": not lacks,
        "lacks": [{"what": what, "hint": hint} for what, hint in lacks],
    }


def _text(found: dict[str, Any]) -> list[str]:
    lines = [", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    for name, device in found["devices"].items():
        lines += _device_lines(name, device)
    lines += ["tools: " + (", ".join(f"{name} {at}" for name, at in found["tools"].items() if at) or "none")]
    for entry in found["backends"]:
        title = f"{entry['backend']} on {entry['device']}"
        if entry["ready"]:
            needs = "; the engine names its split operators" if entry["backend"].startswith("tc_piecewise") else ""
            lines.append(f"{title}: ready{needs}")
        for lack in entry["lacks"]:
            lines += [f"{title}: lacks {lack['what']}", f"  hint: {lack['hint']}"]
    for name, version in found["optional"].items():
        if version is None:
            lines += [f"{name}: not installed; it is for {_OPTIONAL[name]}", f"  hint: run `pip install {name}`"]
    return lines


def _device_lines(name: str, device: dict[str, Any]) -> list[str]:
    driver = f", driver {device['driver']}" if device["driver"] else ""
    if not device["available"]:
        lines = [f"{name}: not available{driver}: {device['reason']}"]
        return lines if device["hint"] is None else [*lines, f"  hint: {device['hint']}"]
    names = device["names"]
    counted = [f"{names.count(each)}x {each}" if names.count(each) > 1 else each for each in dict.fromkeys(names)]
    what = f" ({', '.join(counted)}{driver})" if counted else ""
    return [f"{name}: available{what}; backends {', '.join(device['backends'])}"]
