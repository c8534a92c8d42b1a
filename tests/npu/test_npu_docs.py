"""The page about NPUs: its code runs, and its table is that of torch_npu's handlers."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

import devicegraph as dg
from lengths import LengthsEngine

PAGE = (Path(__file__).parents[2] / "docs" / "npu.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_from_top_to_bottom() -> None:
    names = {"dg": dg, "torch": torch, "LengthsEngine": LengthsEngine}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/npu.md", "exec"), names)


def test_the_keys_of_the_page_are_those_of_torch_npus_handlers() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    for operator, keys in rows:
        name = f"{operator}.default"
        specs = _NPU_GRAPH_OP_HANDLERS[name].get_update_specs(name)
        assert re.findall(r"`(\w+)`", keys) == [key for _, _, key in specs]
