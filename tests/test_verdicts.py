"""The CPU tape keeps the table of verdicts; `tests/gpu` holds a GPU to the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture_rules_page import render
from devicegraph import get_device_adapter
from devicegraph.devices.tape_rules import REFUSALS
from verdicts import ALLOWED, CONSTRUCTS, RANDOM, Construct, check_allowed, check_random, check_refused, of

ADAPTER = get_device_adapter("cpu")


@pytest.mark.parametrize("construct", of(ALLOWED))
def test_an_allowed_construct_executes_nothing_in_capture_and_replays_like_eager(construct: Construct) -> None:
    check_allowed(ADAPTER, construct)


@pytest.mark.parametrize("construct", of(RANDOM))
def test_a_random_construct_leaves_the_generator_alone_in_capture_and_advances_on_replay(construct: Construct) -> None:
    check_random(ADAPTER, construct)


@pytest.mark.parametrize("construct", of(*REFUSALS))
def test_a_refused_construct_fails_with_its_code_and_leaves_the_device_usable(construct: Construct) -> None:
    assert check_refused(ADAPTER, construct).code == construct.verdict


def test_every_code_of_a_refusal_is_staged_by_a_construct() -> None:
    assert {c.verdict for c in CONSTRUCTS} - {ALLOWED, RANDOM} == set(REFUSALS) - {"no-fake-kernel"}


def test_the_page_of_capture_rules_shows_this_table() -> None:
    page = Path(__file__).parent.parent / "docs" / "capture-rules.md"
    assert page.read_text(encoding="utf-8") == render(), "python tests/capture_rules_page.py > docs/capture-rules.md"
