"""Hostile input, a little of it; `tests/soak/fuzz_*.py` go on for as many cases as they are given."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "soak"))

import fuzz_config
import fuzz_fills
import fuzz_plugins
import fuzz_slots
from hostile import FoundError, fuzz


def test_configurations_of_anything_are_what_the_oracle_says_or_an_error_and_never_a_panic() -> None:
    words = fuzz(fuzz_config.case, 2_000, seed=7)
    assert min(words["accepted"], words["refused"]) > 400


def test_batches_of_anything_are_filled_as_specified_or_refused_with_nothing_written() -> None:
    words = fuzz(fuzz_fills.case, 600, seed=7)
    assert min(words["accepted"], words["refused"]) > 150


def test_declarations_of_anything_are_kept_to_or_refused_with_nothing_changed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of the kinds of tensors
        words = fuzz(fuzz_slots.case, 250, seed=7)
    assert min(words["accepted"], words["refused"]) > 25


def test_entry_points_that_are_broken_or_lie_are_errors_that_name_them() -> None:
    words = fuzz(fuzz_plugins.case, 150, seed=7)
    assert min(words["accepted"], words["refused"]) > 10


def test_a_case_that_fails_is_told_by_its_number() -> None:
    def third(draw: object, numbers: list[int] = [0]) -> str:  # noqa: B006  # counts its calls
        numbers[0] += 1
        assert numbers[0] < 3, "no"
        return "fine"

    with pytest.raises(FoundError, match="case 2 of seed 5: AssertionError: no"):
        fuzz(third, 10, seed=5)
