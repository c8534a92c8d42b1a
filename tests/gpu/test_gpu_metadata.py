"""Attention metadata on a GPU: the cases that the CPU tape keeps, too, and compiled pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import split_ops
from metadata_cases import CASES, ENGINES, INDUCTOR, SETUPS, Setup

pytestmark = pytest.mark.filterwarnings("default")  # torch.compile and its compilers warn of things of their own


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op("devicegraph_tests::planned_attention")
    torch._dynamo.reset()


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_case_holds_on_a_gpu(case: Any, setup: Setup, engine_class: Any) -> None:
    case("cuda", setup, engine_class)


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("setup", INDUCTOR, ids=str)
def test_compiled_pieces_meet_the_metadata_of_every_step(setup: Setup, engine_class: Any) -> None:
    CASES[0]("cuda", setup, engine_class)
