"""What README and the guides show is run as it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.engine import Hooks
from engines import LENGTH, ToyEngine

ROOT = Path(__file__).parent.parent


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@dataclass
class MyBatch:
    """The batch of an engine that serves adapters; attention leaves its plan on it."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    lora_ids: torch.Tensor
    batch_size: int
    seq_lens_cpu: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None
    plan: torch.Tensor | None = None


class Attention:
    """Prepares lengths in a raw form first, and upgrades them; the layers take the full form only."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.zeros(64, dtype=torch.int64, device=device)
        self.full = torch.zeros(64, dtype=torch.float32, device=device)

    def plan(self, batch: MyBatch) -> None:
        self.raw[: batch.batch_size].copy_(batch.seq_lens)
        batch.plan = None

    def upgrade(self, batch: MyBatch) -> None:
        batch.plan = self.full[: batch.batch_size].copy_(self.raw[: batch.batch_size])


def run_api_in_one_look(device: str) -> None:
    """Runs README's example with a toy model behind it, and compares each sampled output with the model's own."""
    (source,) = (block for block in code_blocks("README.md") if block.startswith("class Engine:"))
    assert source.count('torch.device("cuda")') == 1
    source = source.replace('torch.device("cuda")', f'torch.device("{device}")')
    definition, use = source.split("\nengine = Engine()")
    toy = ToyEngine(device, max_bs=64)

    def model(input_ids: torch.Tensor, positions: torch.Tensor, batch: MyBatch) -> torch.Tensor:
        assert batch.plan is not None, "the layers met raw metadata"
        return ToyEngine.forward(toy, batch) + batch.lora_ids[:, None] + batch.plan[:, None]

    sampled: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []

    def schedule() -> Any:
        for seed, lengths in enumerate([[3, 5, 2], [4], [2] * 64, [7] * 9]):
            live = toy.batch(lengths, seed)
            fields = {name: value for name, value in vars(live).items() if name != "extras"}
            batch = MyBatch(**fields, lora_ids=torch.arange(len(lengths), dtype=torch.int32, device=device))
            batch.plan = live.seq_lens.float()
            kept = toy.cache.clone()
            expected.append(model(batch.input_ids, batch.positions, batch))
            toy.cache.copy_(kept)
            batch.plan = None
            yield batch

    namespace: dict[str, Any] = {
        "torch": torch,
        "dg": dg,
        "MyBatch": MyBatch,
        "schedule": schedule,
        "sample": lambda output: sampled.append(output.clone()),
    }
    exec(compile(definition, "README.md", "exec"), namespace)
    namespace["Engine"].model = staticmethod(model)
    namespace["Engine"].attention = Attention(torch.device(device))
    exec(compile("engine = Engine()" + use, "README.md", "exec"), namespace)
    assert len(sampled) == 4
    for got, want in zip(sampled, expected, strict=True):
        assert torch.equal(got, want)
    assert LENGTH > 7


def test_the_api_in_one_look_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    run_api_in_one_look("cpu")
    printed = capsys.readouterr().out
    assert "decode, backend `full`" in printed
    assert "bucket 64" in printed
    assert "12 graphs" in printed


def test_every_page_that_readme_links_to_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in re.findall(r"\]\((docs/[^)#]+)\)", text):
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("page", ["docs/embedding.md", "docs/slots.md"])
def test_the_code_of_a_guide_runs_from_top_to_bottom(page: str) -> None:
    namespace: dict[str, Any] = {}
    for source in code_blocks(page):
        exec(compile(source, page, "exec"), namespace)


def test_the_guide_names_every_hook_and_no_other() -> None:
    table = (ROOT / "docs/embedding.md").read_text(encoding="utf-8").split("## All hooks")[1]
    named = set(re.findall(r"`(\w+)(?:\([^)]*\))?`", table.split("\n\n")[0]))
    hooks = {name for name in vars(Hooks(ToyEngine())) if name != "rank"}
    assert hooks <= named
