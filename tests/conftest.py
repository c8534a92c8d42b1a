"""What every test runs under."""

from __future__ import annotations

import gc

import hypothesis

# The first example of a test may import or compile what it needs, so a deadline would time the machine.
hypothesis.settings.register_profile("devicegraph", deadline=None)
hypothesis.settings.load_profile("devicegraph")


def pytest_collection_finish() -> None:
    """What imports have left is there for good: captures collect garbage, and need not look through it every time."""
    gc.collect()
    gc.freeze()
