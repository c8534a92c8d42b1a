"""An audit on a device with a memory of its own, where tensors say where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from lengths import LengthsEngine, decode

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

NPU = torch.device("npu", 0)


class Setting:
    """The tensors that the constructs work on."""

    def __init__(self, adapter: dg.DeviceAdapter) -> None:
        self.adapter = adapter
        self.weight, self.buffer = torch.ones(4, 4).to(NPU), torch.ones(4, 4).to(NPU)
        self.n = torch.tensor(3).to(NPU)
        self.pageable, self.pinned = torch.ones(4, 4), torch.ones(4, 4).pin_memory()
        self.kept: list[Any] = []


#: What the simulated library has operators for, and the findings.
CONSTRUCTS: dict[str, tuple[Any, list[str]]] = {
    "arithmetic": (lambda s, x: torch.relu(torch.mm(x, s.weight)) + x, []),
    "device factory": (lambda s, x: x + torch.zeros(4, 4, device=NPU), []),
    "host scalar": (lambda s, x: x * torch.tensor(2.0), []),
    "host literal": (lambda s, x: x * float(torch.tensor([1.0, 2.0]).max()), []),
    "pinned without waiting": (lambda s, x: s.pinned.to(NPU, non_blocking=True), []),
    "copy from pinned without waiting": (lambda s, x: s.buffer.copy_(s.pinned, non_blocking=True), []),
    "item": (lambda s, x: x + s.n.item(), ["host-read"]),
    "branch": (lambda s, x: x if s.n else s.weight, ["host-read"]),
    "tolist": (lambda s, x: s.n.tolist(), ["host-read"]),
    "cpu": (lambda s, x: x.cpu(), ["host-read"]),
    "to the word": (lambda s, x: x.to("cpu"), ["host-copy"]),
    "to the device": (lambda s, x: x.to(torch.device("cpu")), ["host-copy"]),
    "to a type on the host": (lambda s, x: x.type(torch.FloatTensor), ["host-copy"]),
    "pageable": (lambda s, x: s.pageable.to(NPU), ["host-copy"]),
    "pageable by another name": (lambda s, x: s.pageable.npu(), ["host-copy"]),
    "pinned and waiting": (lambda s, x: s.pinned.to(NPU), ["host-copy"]),
    "copy from pageable": (lambda s, x: s.buffer.copy_(s.pageable), ["host-copy"]),
    "literal on the device": (lambda s, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=NPU), ["host-copy"]),
    "index by a list": (lambda s, x: x[[0, 1]], ["host-copy"]),
    "factory on the host": (lambda s, x: x + torch.zeros(4, 4), ["device-mismatch"]),
    "factory on the host by name": (
        lambda s, x: x + torch.zeros(4, 4, device=torch.device("cpu")),
        ["device-mismatch"],
    ),
    "torch's own wait": (lambda s, x: torch.npu.synchronize(), ["synchronize"]),
    "adapter's wait": (lambda s, x: s.adapter.synchronize(), ["synchronize"]),
    "wait for a stream": (lambda s, x: s.adapter.current_stream().synchronize(), ["synchronize"]),
    "ask an event": (lambda s, x: s.adapter.event().query(), ["synchronize"]),
    "keep": (lambda s, x: s.kept.append(x + 1), ["outlives-step"]),
    "rand": (lambda s, x: torch.rand(4, 4, device=NPU), ["random"]),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_is_found_out(adapter: dg.DeviceAdapter, name: str) -> None:
    run, want = CONSTRUCTS[name]
    setting = Setting(adapter)
    report = dg.audit(lambda x: run(setting, x), torch.ones(4, 4).to(NPU), constants=vars(setting))
    assert report.device == str(NPU)
    assert [finding.code for finding in report.findings] == want, str(report)


def test_an_unknown_tensor_is_found_and_a_known_one_is_not(adapter: dg.DeviceAdapter) -> None:
    setting, x = Setting(adapter), torch.ones(4, 4).to(NPU)
    (finding,) = dg.audit(lambda x: x + setting.weight, x).findings
    assert finding.code == "unknown-tensor"
    assert "`Setting.weight`, [4, 4] of float32" in finding.what


def test_a_runner_is_told_of_lengths_that_a_graph_would_keep() -> None:
    """They are what `input_updates` are for: the audit shows the line that has to have one."""
    with dg.DecodeCudaGraphRunner(LengthsEngine(max_bs=4), config=decode(max_bs=4)) as runner:
        findings = runner.audit(4).findings
    assert [finding.code for finding in findings] == ["frozen-value"]
    assert "`seq_lens_cpu`" in findings[0].what
