"""The one logger of the package, `devicegraph`: silent until somebody gives it or the root a handler and a level."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGGER: Final = logging.getLogger("devicegraph")
# Without a handler of its own, warnings would go to standard error.
LOGGER.addHandler(logging.NullHandler())


def log(level: int, event: str, message: str, fields: Mapping[str, Any]) -> None:
    """Logs a sentence; the record has the event and its fields as values in `record.devicegraph`."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", message, extra={"devicegraph": {"event": event, **fields}})
