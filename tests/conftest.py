"""What every test runs under."""

from __future__ import annotations

import hypothesis

# The first example of a test may import or compile what it needs, so a deadline would time the machine.
hypothesis.settings.register_profile("devicegraph", deadline=None)
hypothesis.settings.load_profile("devicegraph")
