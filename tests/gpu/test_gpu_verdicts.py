"""A GPU gives the verdicts of the table that the CPU tape is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from devicegraph.devices.tape_rules import REFUSALS
from verdicts import ALLOWED, RANDOM, Construct, check_allowed, check_random, check_refused, of

if TYPE_CHECKING:
    import devicegraph as dg


@pytest.mark.parametrize("construct", of(ALLOWED))
def test_an_allowed_construct_executes_nothing_in_capture_and_replays_like_eager(
    adapter: dg.DeviceAdapter, construct: Construct
) -> None:
    check_allowed(adapter, construct)


@pytest.mark.parametrize("construct", of(RANDOM))
def test_a_random_construct_leaves_the_generator_alone_in_capture_and_advances_on_replay(
    adapter: dg.DeviceAdapter, construct: Construct
) -> None:
    check_random(adapter, construct)


@pytest.mark.parametrize("construct", of(*REFUSALS))
def test_a_refused_construct_fails_and_leaves_the_device_usable(
    adapter: dg.DeviceAdapter, construct: Construct
) -> None:
    check_refused(adapter, construct)
