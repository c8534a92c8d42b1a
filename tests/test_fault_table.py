"""The page of faults is complete, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from test_docs import _rows as rows_of

HERE = Path(__file__).parent
COLUMNS = 4

#: The survey's entries: its numbers, those that it lists shortly (L), and the risks of the design (D).
SURVEY = """
2 3 5 7 8 10 11 12 13 15 16 17 19 21 22 24 25 26 27 28 29 31 32 34 35 36 38 39 40 42 43 44 45 46 47 48
L1 L2 L3 L4 L5 L6 L7 L8 L9 L10 L11 L12 L13 L14 L15 L16 D1 D2 D3 D4 D5 D6
"""


def test_every_entry_is_on_the_page_once_with_what_holds_it_or_why_it_does_not_apply() -> None:
    held = list(rows_of("faults.md", "## What cannot happen"))
    others = list(rows_of("faults.md", "## What does not apply"))
    numbers = [cells[0] for cells in (*held, *others)]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) == set(SURVEY.split())
    assert all(len(cells) == COLUMNS + 1 and "::" in cells[-1] for cells in held)
    assert all(len(cells) == COLUMNS and len(cells[-1]) > 60 for cells in others)
    # Where a thread told it, it is named; the risks of the design nobody told.
    assert all(("https://github.com/" in cells[2]) != cells[0].startswith("D") for cells in (*held, *others))


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w/.]+)::(\w+)`", (HERE.parent / "docs/faults.md").read_text(encoding="utf-8"))
    assert len(named) > 100
    texts: dict[str, str] = {}
    for file, name in named:
        path = HERE.parent / file if file.endswith(".rs") else HERE / f"{file}.py"
        text = texts.setdefault(file, path.read_text(encoding="utf-8"))
        assert re.search(rf"^ *(def|fn) {name}\(", text, flags=re.MULTILINE), f"{file}::{name}"
