"""Devices and backends of third parties, found through entry points with no change to the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph import backends
from devicegraph.devices import DeviceAdapter
from devicegraph.testing import CLAUSES

HERE = Path(__file__).parent

#: In a process of its own, since torch has room for one device of a third party.
USE = """
import json, sys, torch, devicegraph as dg
from devicegraph.backends import backend_class
from devicegraph.devices import device_availability
from devicegraph.testing import check_backend
from engines import ToyEngine, eager

found = {"loaded at first": "torch_acme" in sys.modules, "available": bool(device_availability("acme"))}
adapter = dg.get_device_adapter("acme:0")
found["device"], found["backend"] = type(adapter).__name__, backend_class("acme", "full").__name__
engine = ToyEngine(max_bs=4)
engine.device = "acme"
config = dg.CudaGraphConfig(prefill={"backend": "disabled"}, decode={"max_bs": 4})
with dg.DecodeCudaGraphRunner(engine, config=config, capture_error_mode="relaxed") as runner:
    runner.capture()
    engine.device = adapter.device
    batch = engine.batch([3, 5, 2])
    found["is right"] = torch.equal(runner.run(batch), eager(engine, batch))
    found["replays"] = {str(key.size): count for key, count in runner.backend.replays.items()}
found["clauses"] = check_backend(backend_class("acme", "full"), "acme")
print(json.dumps(found))
"""


def test_a_package_adds_a_device_and_its_backend_which_keeps_every_clause() -> None:
    paths = [str(HERE / "plugin_package"), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "loaded at first": False,
        "available": True,
        "device": "AcmeDevice",
        "backend": "CountingBackend",
        "is right": True,
        "replays": {"4": 1},
        "clauses": list(CLAUSES),
    }


def install(folder: Path, name: str, entry_points: str) -> None:
    """A distribution in a folder, of entry points alone."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with a backend and a device that cannot be imported."""
    install(
        tmp_path,
        "acme-broken",
        "[devicegraph.backends]\nhpu:full = acme_missing:Backend\n[devicegraph.devices]\nhpu = acme_missing:Device\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("broken")
def test_a_plugin_that_cannot_be_imported_is_named_with_its_cause() -> None:
    with pytest.raises(dg.BackendError) as caught:
        backends.backend_class("hpu", "full")
    assert caught.value.code == "plugin-failed"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(dg.BackendError, match="acme_missing") as caught:
        dg.get_device_adapter("hpu")
    assert caught.value.code == "plugin-failed"


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution whose classes do not do all that they have to."""
    install(
        tmp_path,
        "acme-unfinished",
        "[devicegraph.backends]\ncpu:acme = acme_unfinished:Backend\n"
        "[devicegraph.devices]\nhpu = acme_unfinished:Device\n",
    )
    (tmp_path / "acme_unfinished.py").write_text(
        "import devicegraph as dg\n"
        "from devicegraph.devices import Availability, DeviceAdapter\n"
        "class Device(DeviceAdapter):\n"
        "    type = 'hpu'\n"
        "    availability = classmethod(lambda cls: Availability(True))\n"
        "class Backend(dg.BaseCudaGraphBackend):\n"
        "    def replay(self, shape_key, static_forward_batch, **kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("unfinished")
def test_a_plugin_that_lacks_methods_is_named_with_those_that_it_lacks() -> None:
    for use, lacking in (
        (lambda: dg.get_device_adapter("hpu"), DeviceAdapter.__abstractmethods__ - {"availability"}),
        (lambda: backends.backend_class("cpu", "acme"), dg.BaseCudaGraphBackend.__abstractmethods__ - {"replay"}),
    ):
        with pytest.raises(dg.BackendError) as caught:
            use()
        assert caught.value.code == "plugin-failed"
        assert caught.value.message.endswith(f"it lacks {', '.join(f'`{name}`' for name in sorted(lacking))}")


def test_a_device_without_an_adapter_names_those_that_there_are() -> None:
    with pytest.raises(dg.BackendError) as caught:
        dg.get_device_adapter("meta")
    assert caught.value.code == "unknown-device"
    assert "cpu, cuda" in (caught.value.hint or "")


@pytest.mark.parametrize("device", ["warp-drive", "", "cuda:x", None, 1.5])
def test_what_torch_takes_for_no_device_is_refused(device: Any) -> None:
    with pytest.raises(dg.BackendError, match="is no device of this torch") as caught:
        dg.get_device_adapter(device)
    assert caught.value.code == "unknown-device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_says_why() -> None:
    with pytest.raises(dg.BackendError) as caught:
        dg.get_device_adapter("cuda")
    assert caught.value.code == "device-not-available"
    assert "torch finds no GPU" in str(caught.value)
