"""Prompt lookup: what followed the last tokens where the request had them before is proposed to follow them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Lengths of what is looked up, the longest first: it says most.
_LENGTHS: Final = (3, 2)


class PromptLookup:
    """The places of a request's runs of tokens, kept up with what is generated."""

    def __init__(self) -> None:
        #: Behind which position each run was last seen.
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may come next; none where the last ones are new.

        Args:
            token_ids: the request's, which only grow from call to call.
            count: the most to propose.
        """
        # The run at the very end has nothing behind it yet.
        for end in range(self._indexed, len(token_ids)):
            for length in _LENGTHS:
                if end >= length:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._indexed = len(token_ids)
        for length in _LENGTHS:
            end_of_last = self._ends.get(tuple(token_ids[-length:]))
            if end_of_last is not None:
                return list(token_ids[end_of_last : end_of_last + count])
        return []
