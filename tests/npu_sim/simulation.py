"""Runs a command on the real `torch_npu`, over a simulated device library that is built when it is first needed."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Where the tests' environment has the wheel: beside its packages, not among them, since torch would load it by itself.
BESIDE = Path(sys.prefix) / "npu-sim"


class Unavailable(Exception):  # noqa: N818 - a reason, not a fault
    """Why there is no simulation here."""


def wheel() -> Path:
    """The folder that holds the package `torch_npu`, which is not imported.

    Raises:
        Unavailable: it is missing, or made for another torch.
    """
    spec = importlib.util.find_spec("torch_npu")
    folder = BESIDE if spec is None or spec.origin is None else Path(spec.origin).parent.parent
    found = next((d for d in importlib.metadata.distributions(path=[str(folder)]) if d.name == "torch_npu"), None)
    if found is None:
        raise Unavailable("torch_npu is not installed")
    if torch.__version__.split("+")[0] != found.version:
        raise Unavailable(f"torch_npu {found.version} does not go with torch {torch.__version__}")
    return folder


@functools.cache
def libraries() -> Path:
    """The folder of the libraries; they are kept in the build folder until a source or the wheel changes.

    Raises:
        Unavailable: something is missing that it takes to build them.
    """
    folder = wheel()
    if missing := [tool for tool in ("g++", "gcc", "nm") if shutil.which(tool) is None]:
        raise Unavailable(f"no {' and no '.join(missing)} to build the simulated device library with")
    state = hashlib.sha256(torch.__version__.encode())
    for source in [*sorted(HERE.glob("*.[ch]pp")), HERE / "build.py"]:
        state.update(source.read_bytes())
    built = ROOT / "target" / "npu-sim" / state.hexdigest()[:16]
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            out = Path(scratch) / "lib"
            subprocess.run([sys.executable, str(HERE / "build.py"), str(folder), str(out)], check=True)
            out.rename(built)
    return built


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with `arguments` in the simulation, and returns how it ended, with all that it printed in `stdout`.

    Raises:
        Unavailable: see `libraries`.
    """
    built, folder = libraries(), wheel()
    environment = {**os.environ, **variables}
    environment["DEVICEGRAPH_NPU"] = "simulated"
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment["LD_LIBRARY_PATH"] = str(built)
    environment["CUDA_VISIBLE_DEVICES"] = ""  # torch_npu refuses to be loaded beside a GPU
    paths = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    # Behind the others: what is beside the packages is for torch_npu only.
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(folder)])
    if torch.backends.cuda.is_built():
        environment["LD_PRELOAD"] = str(built / "liballocator_keys.so")
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
