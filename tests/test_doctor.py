"""`devicegraph doctor`, in processes of their own: it loads what is behind every device."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import devicegraph
from devicegraph import Availability, doctor

if TYPE_CHECKING:
    from pathlib import Path

RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from devicegraph.cli import main; sys.exit(main())"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def _doctor(packages: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", RUN, str(packages), "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A torch_npu that lacks the device library, and a device whose adapter cannot be loaded."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file: gone')")
    infos = {
        f"torch_npu-{torch.__version__.split('+')[0]}": "",
        "acme-1.0": "[devicegraph.devices]\nhpu = acme_missing:Device\n[devicegraph.backends]\nhpu:full = acme:Full\n",
    }
    for name, points in infos.items():
        info = tmp_path / f"{name}.dist-info"
        info.mkdir()
        project, version = name.split("-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points)
    return tmp_path


@NO_CUDA
def test_doctor_says_of_every_device_whether_it_can_be_used_and_why_not(packages: Path) -> None:
    lines = _doctor(packages).splitlines()
    assert lines[0] == (
        f"devicegraph {devicegraph.__version__}, torch {torch.__version__}, python {platform.python_version()}"
    )
    machine = platform.machine()
    assert lines[1] == f"cpu: available ({machine}); backends breakable, full, tc_piecewise, disabled"
    assert lines[2].startswith("cuda: not available: ")
    assert lines[3].startswith("  hint: ")
    assert lines[4:12] == [
        "npu: not available: torch_npu cannot be loaded: libhccl.so: cannot open shared object file: gone",
        "  hint: install CANN and the driver, and source CANN's `set_env.sh`",
        "xpu: not available: this torch was built without XPU",
        "  hint: install a torch built for XPU",
        "musa: not available: torch_musa is not installed",
        "  hint: install the torch_musa for this torch",
        "hpu: not available: the adapter of device `hpu` cannot be loaded from `acme_missing:Device`: "
        "No module named 'acme_missing'",
        "  hint: repair or remove the package that provides the entry point `hpu` of `devicegraph.devices`",
    ]
    assert lines[12].startswith("tools: ")
    assert lines[13:15] == ["breakable on cpu: ready", "full on cpu: ready"]


def test_doctor_prints_json_for_machines(packages: Path) -> None:
    found = json.loads(_doctor(packages, "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["cpu"] == {
        "available": True,
        "reason": None,
        "hint": None,
        "backends": ["breakable", "full", "tc_piecewise", "disabled"],
        "driver": None,
        "names": [platform.machine()],
    }
    assert found["tools"]["torch_npu"] == torch.__version__.split("+")[0]
    assert {entry["backend"] for entry in found["backends"] if entry["device"] == "cpu"} == {
        "breakable",
        "full",
        "tc_piecewise",
        "tc_piecewise inductor",
    }
    assert found["devices"]["npu"]["hint"] == "install CANN and the driver, and source CANN's `set_env.sh`"
    assert found["devices"]["npu"]["backends"] == ["full", "disabled"]
    assert found["devices"]["hpu"]["backends"] == ["full", "disabled"]


class Machine:
    """Stands for a machine of another kind: its devices, its drivers and what is installed on it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch = patch
        self.folder = folder
        self.devices = {"cpu": Availability(True)}
        self.names: dict[str, list[str]] = {"cpu": ["x86_64"]}
        self.tools: dict[str, str | None] = dict.fromkeys(
            ("torch CUDA", "torch HIP", "torch_npu", "triton", "C compiler", "C++ compiler", "Python.h")
        )
        self.installed: set[str] = {"tqdm", "matplotlib", "transformers"}
        patch.setattr(doctor, "device_types", lambda: list(self.devices))
        patch.setattr(doctor, "device_availability", lambda name: self.devices[name])
        patch.setattr(doctor, "_names", lambda name: self.names[name])
        patch.setattr(doctor, "_tools", lambda: self.tools)
        patch.setattr(doctor, "_version", lambda name: "1.0" if name in self.installed else None)
        patch.setattr(doctor, "_DRIVERS", {})
        patch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))

    def driver(self, device: str, text: str) -> None:
        _, pattern = DRIVERS[device][0]
        (self.folder / device).write_text(text)
        doctor._DRIVERS[device] = ((self.folder / "gone", pattern), (self.folder / device, pattern))

    def text(self) -> list[str]:
        return doctor._text(doctor._examine_all())[1:]


DRIVERS = doctor._DRIVERS


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_a_machine_with_gpus_names_them_and_their_driver(machine: Machine) -> None:
    machine.devices["cuda"] = Availability(True)
    machine.names["cuda"] = ["NVIDIA H200", "NVIDIA H200", "AMD"]
    machine.driver(
        "cuda",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12",
    )
    machine.tools |= {"torch CUDA": "13.0", "triton": "3.7", "C compiler": "/usr/bin/gcc", "Python.h": "/usr/Python.h"}
    assert machine.text() == [
        "cpu: available (x86_64); backends breakable, full, tc_piecewise, disabled",
        "cuda: available (2x NVIDIA H200, AMD, driver 550.54.15); backends breakable, full, tc_piecewise, disabled",
        "tools: torch CUDA 13.0, triton 3.7, C compiler /usr/bin/gcc, Python.h /usr/Python.h",
        "breakable on cpu: ready",
        "full on cpu: ready",
        "tc_piecewise on cpu: ready; the engine names its split operators",
        "tc_piecewise inductor on cpu: lacks C++ compiler",
        "  hint: install g++, or set CXX",
        "breakable on cuda: ready",
        "full on cuda: ready",
        "tc_piecewise on cuda: ready; the engine names its split operators",
        "tc_piecewise inductor on cuda: ready; the engine names its split operators",
    ]


def test_what_a_backend_lacks_is_listed_with_the_way_to_get_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.6.0"))
    machine.devices = {"cuda": Availability(True)}
    machine.names["cuda"] = []
    machine.installed = {"tqdm"}
    assert machine.text() == [
        "cuda: available; backends breakable, full, tc_piecewise, disabled",
        "tools: none",
        "breakable on cuda: ready",
        "full on cuda: ready",
        "tc_piecewise on cuda: lacks torch 2.11",
        "  hint: install torch 2.11 or newer",
        "tc_piecewise inductor on cuda: lacks torch 2.11",
        "  hint: install torch 2.11 or newer",
        "tc_piecewise inductor on cuda: lacks Python.h",
        "  hint: install the headers of this Python (`python3-dev`)",
        "tc_piecewise inductor on cuda: lacks triton",
        "  hint: run `pip install triton`",
        "tc_piecewise inductor on cuda: lacks C compiler",
        "  hint: install gcc, or set CC",
        "matplotlib: not installed; it is for `report.plot`",
        "  hint: run `pip install matplotlib`",
        "transformers: not installed; it is for `devicegraph demo`",
        "  hint: run `pip install transformers`",
    ]


def test_a_driver_without_a_device_that_can_be_used_is_named_all_the_same(machine: Machine) -> None:
    machine.devices = {"npu": Availability(False, "torch_npu cannot be loaded", "install it")}
    machine.driver("npu", "Innerversion=V100\nVersion=24.1.rc2\n")
    assert machine.text()[:2] == [
        "npu: not available, driver 24.1.rc2: torch_npu cannot be loaded",
        "  hint: install it",
    ]


def test_a_compiler_is_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mine", "gcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert doctor._compiler("CC", "clang", "gcc") == str(tmp_path / "gcc")
    assert doctor._compiler("CC", "clang") is None
    monkeypatch.setenv("CC", "mine -O2")
    assert doctor._compiler("CC", "gcc") == str(tmp_path / "mine")
    monkeypatch.setenv("CC", "gone")
    assert doctor._compiler("CC", "gcc") is None
