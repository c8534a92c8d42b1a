"""What arguments of several commands are read by."""

from __future__ import annotations

__all__ = ["positive_integer"]


def positive_integer(text: str) -> int:
    """An integer from 1 up, for `argparse`, which names the type in its message.

    Raises:
        ValueError: the text is no such integer.
    """
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive_integer.__name__ = "positive integer"
