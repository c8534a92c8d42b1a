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
    assert lines[1] == "cpu: available; backends breakable, full, tc_piecewise, disabled"
    assert lines[2].startswith("cuda: not available: ")
    assert lines[3].startswith("  hint: ")
    assert lines[4:] == [
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


def test_doctor_prints_json_for_machines(packages: Path) -> None:
    found = json.loads(_doctor(packages, "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["cpu"] == {
        "available": True,
        "reason": None,
        "hint": None,
        "backends": ["breakable", "full", "tc_piecewise", "disabled"],
    }
    assert found["devices"]["npu"]["hint"] == "install CANN and the driver, and source CANN's `set_env.sh`"
    assert found["devices"]["npu"]["backends"] == ["full", "disabled"]
    assert found["devices"]["hpu"]["backends"] == ["full", "disabled"]
