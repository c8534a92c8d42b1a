"""Devices and backends of third parties, found through entry points with no change to the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph import backends
from engines import ToyEngine, eager

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = """
from devicegraph.backends.full import FullCudaGraphBackend
from devicegraph.devices.cpu import CpuDevice


class Counting(FullCudaGraphBackend):
    name = "breakable"
    replays = 0

    def replay(self, shape_key, static_forward_batch, **kwargs):
        Counting.replays += 1
        return super().replay(shape_key, static_forward_batch, **kwargs)


class Accelerator(CpuDevice):
    type = "mtia"

    @classmethod
    def availability(cls):
        return super().availability()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with a backend, a device, and one of each that cannot be imported.

    The backends are for words that the device has no backend of ours for.
    """
    for word in ("cpu:breakable", "cpu:tc_piecewise"):
        monkeypatch.delitem(backends._BACKENDS, word)
    (tmp_path / "acme_plugin.py").write_text(PLUGIN)
    info = tmp_path / "acme_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[devicegraph.backends]\n"
        "cpu:breakable = acme_plugin:Counting\n"
        "cpu:tc_piecewise = acme_missing:Backend\n"
        "[devicegraph.devices]\n"
        "mtia = acme_plugin:Accelerator\n"
        "xpu = acme_missing:Device\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
def test_a_backend_of_a_third_party_serves_under_its_word_of_the_configuration() -> None:
    engine = ToyEngine(max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"backend": "breakable"})) as runner:
        assert "backend `breakable`" in str(runner.capture())
        batch = engine.batch([3, 5, 2])
        assert torch.equal(runner.run(batch), eager(engine, batch))
        assert type(runner.backend).replays == 1


@pytest.mark.usefixtures("plugin")
def test_a_device_of_a_third_party_is_found_by_its_type() -> None:
    assert type(dg.get_device_adapter("mtia")).__name__ == "Accelerator"


@pytest.mark.usefixtures("plugin")
def test_a_plugin_that_cannot_be_imported_is_named_with_its_cause() -> None:
    with pytest.raises(dg.BackendError) as caught:
        backends.backend_class("cpu", "tc_piecewise")
    assert caught.value.code == "plugin-failed"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(dg.BackendError, match="acme_missing") as caught:
        dg.get_device_adapter("xpu")
    assert caught.value.code == "plugin-failed"


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
