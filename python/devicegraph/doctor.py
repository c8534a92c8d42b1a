"""`devicegraph doctor`: what this machine can do, and why not more."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any

import torch

from devicegraph._core import __version__
from devicegraph.backends import backend_words
from devicegraph.devices import device_availability, device_types

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found. Loads what is behind each device."""
    versions = {"devicegraph": __version__, "torch": torch.__version__, "python": platform.python_version()}
    devices = {name: _examine(name) for name in device_types()}
    if arguments.json:
        print(json.dumps({"versions": versions, "devices": devices}, indent=2))
    else:
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        print(*(line for name, found in devices.items() for line in _lines(name, found)), sep="\n")
    return 0


def _examine(device_type: str) -> dict[str, Any]:
    availability = device_availability(device_type)
    return {
        "available": bool(availability),
        "reason": availability.reason or None,
        "hint": availability.hint,
        "backends": backend_words(device_type),
    }


def _lines(name: str, found: dict[str, Any]) -> list[str]:
    if found["available"]:
        return [f"{name}: available; backends {', '.join(found['backends'])}"]
    lines = [f"{name}: not available: {found['reason']}"]
    return lines if found["hint"] is None else [*lines, f"  hint: {found['hint']}"]
