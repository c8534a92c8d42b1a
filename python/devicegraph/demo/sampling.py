"""Choosing the next token: the likeliest, or a draw of the request's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p: draws are from the likeliest tokens that have so much of the probability together.
        seed: of the request's draws, which depend on nothing else: not on who else is in the batch.

    Raises:
        ConfigError: `sampling-invalid`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: {self.temperature!r} is no number from 0 on", code="sampling-invalid")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: {self.top_p!r} is no number above 0 up to 1", code="sampling-invalid")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], sources: Sequence[random.Random]) -> torch.Tensor:
    """A token for each row, without synchronising.

    Args:
        logits: `[rows, vocabulary]`.
        samplings: one for each row; none of them greedy.
        sources: the rows' random numbers, one of which is taken from each.

    Returns:
        `[rows]` int64, where the logits are.
    """
    numbers = [
        (sampling.temperature, sampling.top_p, source.random())
        for sampling, source in zip(samplings, sources, strict=True)
    ]
    temperature, top_p, number = (
        torch.tensor(numbers, dtype=torch.float32, device="cpu").to(logits.device)[..., None].unbind(1)
    )
    logits = logits.float()
    # From the largest on, so that a temperature near 0, which may be 0 in this type, makes nothing infinite.
    below = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(torch.finfo(logits.dtype).tiny)
    likely, order = below.softmax(-1).sort(-1, descending=True)
    before = likely.cumsum(-1) - likely
    kept = before < top_p
    kept[:, 0] = True  # the likeliest token stays, however small `top_p` is
    likely = likely.where(kept, 0)
    up_to = likely.cumsum(-1)
    chosen = (up_to <= number * up_to[:, -1:]).sum(-1, keepdim=True)
    # Rounding may leave the number at the very end, behind the last token that has a share.
    chosen = chosen.minimum((likely > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
    token_ids: torch.Tensor = order.gather(-1, chosen)[:, 0]
    return token_ids
