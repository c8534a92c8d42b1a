"""`python -m devicegraph`."""

from __future__ import annotations

import sys

from devicegraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
