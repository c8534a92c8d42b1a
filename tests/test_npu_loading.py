"""What is said of an NPU where `torch_npu` cannot be used: each reason, in a process that it cannot disturb."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

MINE = ".".join(torch.__version__.split(".")[:2])
INSTALL = f"install the torch_npu for this torch, `pip install torch_npu=={MINE}.*`"
ASK = """
import sys, torch, devicegraph as dg
sys.path.insert(0, sys.argv[1])
for _ in range(2):  # the second answer must not be about what the first one left
    try:
        dg.get_device_adapter("npu:0")
    except dg.BackendError as error:
        print(error)
"""
HEAD = "device `npu:0` is not available here: "


def _ask(packages: Path) -> str:
    """What is said, which has to be the same when it is asked for again."""
    run = subprocess.run(
        [sys.executable, "-c", ASK, str(packages)],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.rstrip("\n")
    first, second = said[: len(said) // 2], said[len(said) // 2 + 1 :]
    assert first == second
    return first


def _install(folder: Path, body: str, version: str = f"{MINE}.0") -> Path:
    (folder / "torch_npu.py").write_text(body)
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    return folder


def test_a_torch_npu_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    hide = "import importlib.util\nfind = importlib.util.find_spec\n"
    hide += "importlib.util.find_spec = lambda name: None if name == 'torch_npu' else find(name)\n"
    run = subprocess.run([sys.executable, "-c", hide + ASK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout == 2 * f"{HEAD}torch_npu is not installed [device-not-available]\n\nhint: {INSTALL}\n"


@pytest.mark.parametrize(
    ("body", "reason", "hint"),
    [
        pytest.param(
            "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            "torch_npu cannot be loaded: libhccl.so: cannot open shared object file: No such file or directory",
            "install CANN and the driver, and source CANN's `set_env.sh`",
            id="no-cann",
        ),
        pytest.param(
            "raise RuntimeError('Two accelerators cannot be used at the same time in PyTorch: npu and cuda.\\nmore')",
            "torch_npu cannot be loaded: Two accelerators cannot be used at the same time in PyTorch: npu and cuda.",
            "use a torch that was built without CUDA",
            id="beside-cuda",
        ),
        pytest.param(
            "raise ValueError",
            "torch_npu cannot be loaded: ValueError",
            "run `python -c 'import torch_npu'` with TORCH_DEVICE_BACKEND_AUTOLOAD=0 to see all of it",
            id="anything-else",
        ),
        pytest.param(
            "import sys, types, torch\n"
            "module = types.ModuleType('torch.npu')\n"
            "module.is_available = lambda: False\n"
            "torch.npu = sys.modules['torch.npu'] = module\n",
            "torch_npu finds no NPU or no driver",
            "check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES",
            id="no-device",
        ),
    ],
)
def test_a_torch_npu_that_does_not_load_says_why(tmp_path: Path, body: str, reason: str, hint: str) -> None:
    assert _ask(_install(tmp_path, body)) == f"{HEAD}{reason} [device-not-available]\n\nhint: {hint}"


def test_a_torch_npu_for_another_torch_is_not_even_loaded(tmp_path: Path) -> None:
    _install(tmp_path, "import os; os._exit(9)", version="1.11.0")
    assert _ask(tmp_path) == (
        f"{HEAD}torch_npu 1.11.0 is for torch 1.11, and this is torch {torch.__version__} [device-not-available]"
        f"\n\nhint: {INSTALL}"
    )
