"""An operator with lengths on the host, as attention has them on an NPU, and an engine around it.

`lengths_scale(out, x, lengths)` writes `x[i] * lengths[i]` into row i: a graph that keeps old lengths gives wrong rows.
It is made of operators that any device has, and torch_npu captures it through a registered handler, as its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu

import devicegraph as dg

WIDTH = 4

library = torch.library.Library("devicegraph_tests", "DEF")
library.define("lengths_scale(Tensor(a!) out, Tensor x, int[] lengths, *, int[]? extra=None) -> ()")
library.define("tensor_scale(Tensor(a!) out, Tensor x, Tensor lengths) -> ()")
#: Raised by the next runs of the operators, where it is set.
fault = SimpleNamespace(error=None)


def _scale(out: torch.Tensor, x: torch.Tensor, lengths: Any, *, extra: list[int] | None = None) -> None:
    if fault.error is not None:
        raise fault.error
    for row, length in enumerate(lengths):
        torch.mul(x[row], int(length) + 1000 * sum(extra or ()), out=out[row])


library.impl("lengths_scale", _scale, "PrivateUse1")
library.impl("tensor_scale", _scale, "PrivateUse1")


@torch_npu.npu.register_npu_graph_handler(["lengths_scale.default", "tensor_scale.default"])
class _Handler(torch_npu.npu.NpuGraphOpHandler):
    UPDATE_SPECS = {
        "lengths_scale.default": [("arg", 2, "lengths")],
        "tensor_scale.default": [("arg", 2, "context_lens")],
    }


@dataclass
class Batch:
    """What the engine reads of a batch."""

    input_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor
    batch_size: int


class LengthsEngine:
    """Multiplies each request's token by its length, layer after layer: exact in float32 for small numbers."""

    input_updates: tuple[dg.InputUpdate, ...] = (dg.InputUpdate("lengths"),)
    seq_len_fill_value = 1

    def __init__(self, max_bs: int = 8, layers: int = 2, as_tensor: bool = False) -> None:
        self.device = torch.device("npu", torch.npu.current_device())
        self.limits = dg.Limits(max_bs=max_bs, max_num_tokens=max_bs)
        self.layers = layers
        self.as_tensor = as_tensor

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch.input_ids.to(torch.float32)[:, None].expand(-1, WIDTH) * 1.0
        for _ in range(self.layers):
            out = torch.zeros_like(x)
            if self.as_tensor:
                torch.ops.devicegraph_tests.tensor_scale(out, x, batch.seq_lens_cpu.to(torch.int32))
            else:
                torch.ops.devicegraph_tests.lengths_scale(out, x, batch.seq_lens_cpu.tolist())
            x = out
        return x + 1

    def batch(self, lengths: list[int], first_id: int = 1) -> Batch:
        ids = torch.arange(first_id, first_id + len(lengths))
        return Batch(
            ids.to(self.device),
            ids.to(torch.int32).to(self.device),
            torch.tensor(lengths, dtype=torch.int64),
            len(lengths),
        )

    def expected(self, batch: Batch) -> torch.Tensor:
        ids, lengths = batch.input_ids.cpu().to(torch.float32), batch.seq_lens_cpu.to(torch.float32)
        return (ids * lengths**self.layers + 1)[:, None].expand(-1, WIDTH)


def decode(**phase: Any) -> dg.CudaGraphConfig:
    return dg.CudaGraphConfig(decode=phase, prefill={"backend": "disabled"})


def lengths_scale_once(lengths: list[int]) -> torch.Tensor:
    """One call: `[len(lengths), WIDTH]`, the lengths in every column."""
    rows, out = (make(len(lengths), WIDTH, device="npu") for make in (torch.ones, torch.zeros))
    torch.ops.devicegraph_tests.lengths_scale(out, rows, lengths)
    return out
