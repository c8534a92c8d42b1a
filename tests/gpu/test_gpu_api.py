"""README's example on a GPU, as it stands."""

from __future__ import annotations

from test_readme import run_api_in_one_look


def test_the_api_in_one_look_runs_as_it_stands() -> None:
    run_api_in_one_look("cuda")
