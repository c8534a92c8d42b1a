"""What README and the guides show is run as it stands."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import split_ops
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


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_every_page_and_heading_that_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page sees: a module of its own, which torch.compile finds by its name."""
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    return vars(module)


def run_guide(page: str, guide: dict[str, Any]) -> None:
    for source in code_blocks(page):
        exec(compile(source, page, "exec"), guide)


GUIDES = ("audit", "breaks", "embedding", "filling", "memory", "slots", "variants", "writing-a-backend")


@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in GUIDES])
def test_the_code_of_a_guide_runs_from_top_to_bottom(page: str, guide: dict[str, Any]) -> None:
    run_guide(page, guide)


@pytest.mark.filterwarnings("default")  # torch.compile warns of things of its own
@pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer")
def test_the_code_of_the_guide_to_splitting_runs_from_top_to_bottom(
    guide: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    run_guide("docs/splitting.md", guide)


def test_the_guide_names_every_hook_and_no_other() -> None:
    table = (ROOT / "docs/embedding.md").read_text(encoding="utf-8").split("## All hooks")[1]
    named = set(re.findall(r"`(\w+)(?:\([^)]*\))?`", table.split("\n\n")[0]))
    hooks = {name for name in vars(Hooks(ToyEngine())) if name != "rank"}
    assert hooks <= named


def test_the_readme_lists_every_page() -> None:
    _, _, more = (ROOT / "README.md").read_text(encoding="utf-8").partition("## More\n")
    listed = re.findall(r"\]\(docs/([\w-]+\.md)", more)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
