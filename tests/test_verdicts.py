"""The CPU tape keeps the table of verdicts; `tests/gpu` holds a GPU to the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capture_rules_page import render
from devicegraph import get_device_adapter
from devicegraph.devices.tape_rules import REFUSALS
from verdicts import ALLOWED, CONSTRUCTS, RANDOM, Construct, check_allowed, check_random, check_refused, of

ADAPTER = get_device_adapter("cpu")


#: Operators that consist of others reach the tape whole in inference mode, and in parts without.
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
@pytest.mark.parametrize("construct", of(ALLOWED))
def test_an_allowed_construct_executes_nothing_in_capture_and_replays_like_eager(
    construct: Construct, mode: Any
) -> None:
    with mode():
        check_allowed(ADAPTER, construct)


@pytest.mark.parametrize("construct", of(RANDOM))
def test_a_random_construct_leaves_the_generator_alone_in_capture_and_advances_on_replay(construct: Construct) -> None:
    check_random(ADAPTER, construct)


@MODES
@pytest.mark.parametrize("construct", of(*REFUSALS))
def test_a_refused_construct_fails_with_its_code_and_leaves_the_device_usable(construct: Construct, mode: Any) -> None:
    with mode():
        assert check_refused(ADAPTER, construct).code == construct.verdict


def test_every_code_of_a_refusal_is_staged_by_a_construct() -> None:
    assert {c.verdict for c in CONSTRUCTS} - {ALLOWED, RANDOM} == set(REFUSALS) - {"no-fake-kernel", "tape-limit"}


def test_the_page_of_capture_rules_shows_this_table() -> None:
    page = Path(__file__).parent.parent / "docs" / "capture-rules.md"
    assert page.read_text(encoding="utf-8") == render(), "python tests/capture_rules_page.py > docs/capture-rules.md"
