"""Small forwards that a graph would get wrong, each marked at the lines where, and small forwards that it would not.

A mark is a comment, `#! code`, several for several findings of one line. The same models run on every device.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from devicegraph import AuditReport, DeviceAdapter, audit

ROWS, WIDTH = 8, 4


@dataclass
class Batch:
    """One step; `lengths` and `staged` lie in host memory, the latter pinned."""

    x: torch.Tensor
    index: torch.Tensor
    mask: torch.Tensor
    n: torch.Tensor
    lengths: torch.Tensor
    staged: torch.Tensor
    adapter: DeviceAdapter


def make_batch(adapter: DeviceAdapter) -> Batch:
    generator = torch.Generator().manual_seed(0)
    device = adapter.device
    lengths = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5])
    staged = torch.randn(ROWS, WIDTH, generator=generator)
    if device.type == "cpu":
        adapter.declare_host(lengths)
        adapter.declare_host(staged, pinned=True)
    else:
        staged = staged.pin_memory()
    return Batch(
        x=torch.randn(ROWS, WIDTH, generator=generator).to(device),
        index=torch.tensor([3, 1, 0, 2, 3, 0, 2, 1], device=device),
        mask=torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool, device=device),
        n=torch.tensor(3, device=device),
        lengths=lengths,
        staged=staged,
        adapter=adapter,
    )


class Block(torch.nn.Module):
    """What every model here is made of: a layer, and what it does besides."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, device=device)
        self.prepare(device)

    def prepare(self, device: torch.device) -> None:
        """Makes what the block needs."""

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.layer(hidden)

    def constants(self) -> Any:
        return ()


class Model(torch.nn.Module):
    """A plain block, and behind it the block in question: `layers.1`."""

    def __init__(self, block: type[Block], device: torch.device) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(device), block(device)])

    def forward(self, batch: Batch) -> Any:
        return self.layers[1](self.layers[0](batch.x, batch), batch)


BAD: list[type[Block]] = []
GOOD: list[type[Block]] = []


def bad(block: type[Block]) -> type[Block]:
    BAD.append(block)
    return block


def good(block: type[Block]) -> type[Block]:
    GOOD.append(block)
    return block


def marks(block: type[Block]) -> set[tuple[str, int]]:
    """The findings that a block is marked with: code and line."""
    lines, first = inspect.getsourcelines(block)
    return {(code, first + i) for i, line in enumerate(lines) for code in line.partition("#! ")[2].split()}


def run(block: type[Block], adapter: DeviceAdapter) -> AuditReport:
    torch.manual_seed(0)
    model = Model(block, adapter.device)
    return audit(model, make_batch(adapter), constants=model.layers[1].constants())


# What a graph would refuse.


@bad
class TemperatureFromTheDevice(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.layer(hidden) / batch.n.item()  #! host-read


@bad
class BranchOnValues(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        if (hidden > 0).all():  #! host-read
            return hidden
        return self.layer(hidden)


@bad
class SlicesByADeviceCount(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        head = hidden[: batch.n]  #! host-read
        return self.layer(head)


@bad
class RequestByRequest(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        rows = [hidden[row] for row in batch.index.tolist()]  #! host-read
        return self.layer(torch.stack(rows))


@bad
class DetourOverTheHost(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        order = hidden[:, 0].cpu().numpy().argsort()  #! host-read
        order = torch.from_numpy(order).to(hidden.device)  #! host-copy
        return self.layer(hidden[order])


@bad
class ScalesFromALiteral(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        scales = torch.tensor([1.0, 2.0, 3.0, 4.0], device=hidden.device)  #! host-copy
        return self.layer(hidden * scales)


@bad
class PicksRowsByAList(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.layer(hidden[[0, 2]])  #! host-copy


@bad
class KeepsLiveRows(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.layer(hidden[batch.mask])  #! data-dependent-shape


@bad
class ExpertByExpert(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        output = torch.zeros_like(hidden)
        experts = batch.index.unique()  #! data-dependent-shape
        for expert in experts.tolist():  #! host-read
            rows = (batch.index == expert).nonzero()[:, 0]  #! data-dependent-shape
            output.index_add_(0, rows, self.layer(hidden[rows]))
        return output


@bad
class InvertsWithACheck(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        square = hidden.t() @ hidden + torch.eye(WIDTH, device=hidden.device)
        return hidden @ torch.linalg.inv(square)  #! host-read


@bad
class MaskOnTheHost(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        causal = torch.ones(ROWS, WIDTH).tril()
        return self.layer(hidden) * causal  #! device-mismatch


@bad
class DrawsFromItsOwnGenerator(Block):
    def prepare(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(1)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        noise = torch.rand(ROWS, WIDTH, device=hidden.device, generator=self.generator)  #! unregistered-generator
        return self.layer(hidden + noise)


@bad
class WaitsForTheDevice(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        batch.adapter.synchronize()  #! synchronize
        done = batch.adapter.event()
        done.record()
        done.synchronize()  #! synchronize
        return self.layer(hidden)


# What a graph would get wrong without a word.


@bad
class DropoutLeftOn(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        hidden = F.dropout(self.layer(hidden), 0.5, training=True)  #! random
        return torch.bernoulli(hidden.sigmoid())  #! random


@bad
class SkipsLayersByChance(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        skip = torch.rand([]) > 2.0  #! random
        skip = skip or random.uniform(0, 1) > 2.0  #! random
        skip = skip or np.random.rand() > 2.0  #! random
        return hidden if skip else self.layer(hidden)


@bad
class KeepsItsLastHidden(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        self.last_hidden = hidden * 2  #! outlives-step
        return self.layer(self.last_hidden)


@bad
class CollectsHistory(Block):
    def prepare(self, device: torch.device) -> None:
        self.history: list[Any] = []

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        output = self.layer(hidden)
        self.history.append({"norm": output.norm(dim=-1)})  #! outlives-step
        return output


@bad
class TableInAPlainAttribute(Block):
    def prepare(self, device: torch.device) -> None:
        self.tables = {"scale": torch.rand(WIDTH, device=device)}
        self.shift = torch.rand(WIDTH, device=device)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.layer(hidden * self.tables["scale"] + self.shift)  #! unknown-tensor


@bad
class RecurrentStateOnPython(Block):
    def prepare(self, device: torch.device) -> None:
        self.state: Any = None

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        if self.state is not None:
            hidden = hidden + self.state  #! unknown-tensor
        self.state = torch.tanh(hidden)  #! outlives-step
        return self.layer(hidden)


@bad
class LengthsFromTheHost(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        longest = int(batch.lengths.max())  #! frozen-value
        if 6 in batch.lengths.tolist():  #! frozen-value
            return self.layer(hidden[:longest])
        return self.layer(hidden)


@bad
class HalfOfItRaises(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        flag = bool(batch.n > 2)  #! host-read
        width = WIDTH + 1 if flag else WIDTH
        return self.layer(hidden).view(ROWS, width)  #! forward-failed


# What a graph gets right.


@good
class Plain(Block):
    pass


@good
class Norms(Block):
    def prepare(self, device: torch.device) -> None:
        self.inner = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH, device=device), torch.nn.GELU(), torch.nn.Identity())

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.inner(self.layer(F.rms_norm(hidden, (WIDTH,))))


@good
class Attention(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        heads = self.layer(hidden).view(1, 1, ROWS, WIDTH)
        visible = batch.mask | (torch.arange(ROWS, device=hidden.device) == 0)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=visible[None, None, None], dropout_p=0.0)


@good
class DropoutSwitchedOff(Block):
    def prepare(self, device: torch.device) -> None:
        self.dropout = torch.nn.Dropout(0.5).eval()

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.dropout(self.layer(hidden))


@good
class RotaryTable(Block):
    def prepare(self, device: torch.device) -> None:
        angles = torch.arange(ROWS, device=device)[:, None] * torch.rand(WIDTH // 2, device=device)
        self.register_buffer("cosines", angles.cos(), persistent=False)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        first, second = self.layer(hidden).chunk(2, -1)
        cosines = self.cosines[batch.index]
        return torch.cat([first * cosines, second * cosines], -1)


@good
class BufferMadeInTheFirstRun(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(WIDTH, device=hidden.device) * 2)
        return self.layer(hidden * self.table)


@good
class Cache(Block):
    def prepare(self, device: torch.device) -> None:
        self.rows = [torch.zeros(2 * ROWS, WIDTH, device=device)]

    def constants(self) -> Any:
        return self.rows

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        self.rows[0].view(-1, WIDTH).index_copy_(0, batch.index, hidden)
        return self.layer(self.rows[0][batch.index])


@good
class MasksOfFixedSize(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        output = torch.where(batch.mask[:, None], self.layer(hidden), 0.0)
        output = output.masked_fill(~batch.mask[:, None], -1.0)
        output[batch.mask] = 0.0
        return output[torch.nonzero_static(batch.mask, size=ROWS, fill_value=0)[:, 0]]


@good
class RoutesToEveryExpert(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        weights, experts = self.layer(hidden).softmax(-1).topk(2)
        chosen = F.one_hot(experts, WIDTH).to(hidden.dtype)
        return (chosen * weights[..., None]).sum(1) * hidden.repeat_interleave(batch.n * 0 + 1, 0, output_size=ROWS)


@good
class StagedFromPinnedMemory(Block):
    def prepare(self, device: torch.device) -> None:
        self.register_buffer("staged", torch.zeros(ROWS, WIDTH, device=device))

    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        self.staged.copy_(batch.staged, non_blocking=True)
        return self.layer(hidden + self.staged) + batch.staged.to(hidden.device, non_blocking=True)


@good
class Autocast(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            return self.layer(self.layer(hidden)).float()


@good
class NestedOutput(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        output = self.layer(hidden)
        return {"logits": output, "hidden": [(hidden * 2)[1:], (output.sum(-1), None)]}


@good
class ForgetsBeforeItReturns(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        self.scratch = [hidden * 2]
        cycle: list[Any] = [self.scratch.pop() + 1]
        cycle.append(cycle)
        return self.layer(cycle[0])


@good
class TiedWeights(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return F.linear(F.embedding(batch.index, self.layer.weight) + hidden, self.layer.weight, self.layer.bias)


@good
class NumbersOfTheHost(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        steps = torch.tensor([1.0, 2.0, 4.0])
        return self.layer(hidden * float(steps.max())) * torch.tensor(2.0)


@torch.library.custom_op("devicegraph_tests::doubled", mutates_args=())
def doubled(hidden: torch.Tensor) -> torch.Tensor:
    """An operator in Python."""
    return hidden * 2


@doubled.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


@good
class OperatorInPython(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        return doubled(self.layer(hidden))


@good
class ReusesWhatItWasGiven(Block):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> Any:
        batch.x.add_(1)
        torch.add(hidden, batch.x, out=batch.x)
        return self.layer(batch.x)


def check_bad(block: type[Block], adapter: DeviceAdapter) -> None:
    """Everything that is marked is found, at its line and in its module, and nothing else."""
    report = run(block, adapter)
    assert {(finding.code, finding.line) for finding in report.findings} == marks(block), str(report)
    for finding in report.findings:
        assert finding.file == __file__
        assert finding.module == "layers.1"
        assert finding.what
        assert finding.hint


def check_good(block: type[Block], adapter: DeviceAdapter) -> None:
    report = run(block, adapter)
    assert report.ok, str(report)
