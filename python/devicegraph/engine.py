"""What an engine gives a runner: a device, limits, a forward, and as many hooks as it needs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from devicegraph.parallel import Proposal
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["Limits", "ModelRunner", "StaticBatch"]


@dataclass(frozen=True)
class Limits:
    """The most an engine ever puts into one step.

    Attributes:
        max_bs: requests.
        max_num_tokens: tokens, over all requests.
    """

    max_bs: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_bs", "max_num_tokens"):
            check_count(f"limits.{name}", getattr(self, name))


def check_count(name: str, value: object) -> None:
    """Refuses what is no integer of at least 1; `True` is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not an integer of at least 1", code="limit-invalid")


class StaticBatch(SimpleNamespace):
    """The batch that a graph is captured with, where an engine has no `make_batch`: each slot as an attribute.

    Attributes:
        batch_size: the bucket's requests.
    """

    batch_size: int


class ModelRunner(Protocol):
    """What a runner asks of an engine. `device`, `limits` and `forward` are needed; every other member is optional.

    The hooks that prepare metadata take the batch that the forward will see (the padded static batch under a graph, the
    engine's own in an eager step) and the graph's key, None in an eager step. They run in this order, in capture
    (before each warm-up's first use), on every replay and in every eager step:

    `prepare_metadata` -> `upgrade_metadata` -> [`prepare_in_graph` -> `forward`], the bracket being what is captured.
    """

    device: torch.device
    limits: Limits

    def forward(self, batch: Any) -> Any:
        """The forward pass on a batch. Under a graph it is captured: its Python runs at capture only."""


class Hooks:
    """An engine's hooks, looked up once; those that it lacks do what is said here.

    Attributes:
        sizes: `sizes(batch) -> (requests, tokens)`; by default `batch.batch_size` and the rows of `batch.input_ids`.
        make_batch: `make_batch(views, key) -> batch`, the static batch from the padded views of the slots by name; by
            default a `StaticBatch`. A slot that it leaves out, or sets to None, is not exposed to the graph.
        pre_replay: `pre_replay(batch)`, once a step and before anything is written, graph or eager; waits that the
            model itself would do belong here, since a replay runs no Python. What it raises prevents the step.
        prepare_metadata: `prepare_metadata(batch, key)`, outside the graph.
        upgrade_metadata: `upgrade_metadata(batch, key)`, right after it, in the same places.
        prepare_in_graph: `prepare_in_graph(batch, key)`, recorded at the head of the capture.
        after_warmup: `after_warmup()`, after each warm-up run and never inside a capture.
        variant: `variant(batch) -> label`, which of `variants` a batch needs.
        variants: the labels to capture every bucket for; `(None,)` by default.
        barrier: `barrier()`, aligns the tensor-parallel ranks before each warm-up.
        vote: `vote(proposal) -> proposal`, makes the data-parallel ranks agree; None where there is nobody to ask.
        rank: 0 shows progress.
    """

    def __init__(self, engine: Any) -> None:
        def find(name: str, default: Any) -> Any:
            return getattr(engine, name, None) or default

        self.sizes: Callable[[Any], tuple[int, int]] = find("sizes", _default_sizes)
        self.make_batch: Callable[[dict[str, torch.Tensor], ShapeKey], Any] = find("make_batch", _default_make_batch)
        self.pre_replay: Callable[[Any], None] | None = find("pre_replay", None)
        self.prepare_metadata: Callable[[Any, ShapeKey | None], None] | None = find("prepare_metadata", None)
        self.upgrade_metadata: Callable[[Any, ShapeKey | None], None] | None = find("upgrade_metadata", None)
        self.prepare_in_graph: Callable[[Any, ShapeKey | None], None] | None = find("prepare_in_graph", None)
        self.after_warmup: Callable[[], None] | None = find("after_warmup", None)
        self.variant: Callable[[Any], str | None] | None = find("variant", None)
        self.variants: Sequence[str | None] = tuple(find("variants", (None,)))
        self.barrier: Callable[[], None] | None = find("barrier", None)
        self.vote: Callable[[Proposal], Proposal] | None = find("vote", None)
        self.rank: int = getattr(engine, "rank", 0)
        if self.variant is not None and self.variants == (None,):
            raise ConfigError(
                "the engine has a `variant` hook but no `variants`",
                code="variants-missing",
                hint="list every label that `variant(batch)` returns in the engine's `variants`",
            )


def _default_sizes(batch: Any) -> tuple[int, int]:
    return batch.batch_size, batch.input_ids.shape[0]


def _default_make_batch(views: dict[str, torch.Tensor], key: ShapeKey) -> StaticBatch:
    return StaticBatch(**views, batch_size=key.size)
