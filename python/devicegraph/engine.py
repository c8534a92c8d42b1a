"""What an engine gives a runner: a device, limits, a forward, and as many hooks as it needs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsIndex, TypeVar, cast

from devicegraph.batches import read_fields
from devicegraph.errors import ConfigError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from devicegraph.backends.input_update import InputUpdate
    from devicegraph.parallel import Proposal
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["Limits", "ModelRunner", "StaticBatch", "hook"]


#: The largest size of anything, as in the configuration.
LARGEST_SIZE: Final = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The most an engine ever puts into one step, up to 1048576 of each.

    Attributes:
        max_bs: requests.
        max_num_tokens: tokens, over all requests.

    Raises:
        ConfigError: `limit-invalid`.
    """

    max_bs: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_bs", "max_num_tokens"):
            object.__setattr__(self, name, as_count(f"limits.{name}", getattr(self, name)))


def as_count(name: str, value: object) -> int:
    """An integer from 1 to `LARGEST_SIZE`, or what stands for one by `__index__`; no boolean.

    Raises:
        ConfigError: `limit-invalid`.
    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        count = 0
    if not 1 <= count <= LARGEST_SIZE:
        raise ConfigError(f"{name}: {value!r} is not an integer from 1 to {LARGEST_SIZE}", code="limit-invalid")
    return count


_Hook = TypeVar("_Hook", bound="Callable[..., Any]")


def hook(*, reads: Collection[str]) -> Callable[[_Hook], _Hook]:
    """Declares which slots a hook reads: one that prepares metadata, or a slot's `post_fill`.

    A fill can become the first node of a captured graph where nobody reads a slot on the device between the fill and
    the replay. A hook that declares nothing is taken to read every slot.

        @devicegraph.hook(reads={"seq_lens_cpu"})
        def prepare_metadata(self, batch, key): ...

    Args:
        reads: names of slots; writing a slot that a graph reads is no business of such a hook either.

    Raises:
        ConfigError: `reads-invalid`: no collection of names.
    """
    if isinstance(reads, str) or not all(isinstance(name, str) for name in reads):
        raise ConfigError(f"reads: {reads!r} is no collection of slot names", code="reads-invalid")

    def declare(function: _Hook) -> _Hook:
        function.reads = frozenset(reads)  # type: ignore[attr-defined]
        return function

    return declare


class StaticBatch(SimpleNamespace):
    """The batch that a graph is captured with, where an engine has no `make_batch`: each slot as an attribute.

    Attributes:
        batch_size: the requests that the graph is captured with.
    """

    batch_size: int


class ModelRunner(Protocol):
    """What a runner asks of an engine. `device`, `limits` and `forward` are needed; every other member is optional.

    The hooks that prepare metadata take the batch that the forward will see (the padded static batch under a graph, the
    engine's own in an eager step) and the graph's key, None in an eager step; with a single bucket also the key of a
    smaller size, which is run once to tell the rows of the output. They run in this order, in capture
    (before each warm-up's first use), on every replay and in every eager step:

    `prepare_metadata` -> `upgrade_metadata` -> [`prepare_in_graph` -> `forward`], the bracket being what is captured.

    What they set on a static batch never reaches the batch that it was copied from, and is gone after the step. The
    copy is shallow: a tensor or a list that both hold is the same. A hook that raises ends the step; see
    `BaseCudaGraphRunner.run`.
    """

    @property
    def device(self) -> torch.device | str:
        """The device that the forward runs on."""

    @property
    def limits(self) -> Limits:
        """The most that a step can hold."""

    def forward(self, batch: Any) -> Any:
        """The forward pass on a batch. Under a graph it is captured: its Python runs at capture only."""


class Hooks:
    """An engine's hooks, looked up once; those that it lacks do what is said here.

    Attributes:
        sizes: `sizes(batch) -> (requests, tokens)`; by default the batch's `batch_size` and the rows of its
            `input_ids`, and nothing for an empty mapping. Anything but a pair is refused (`sizes-unknown`).
        make_batch: `make_batch(views, key) -> batch`, the static batch from the padded views of the slots by name; by
            default a `StaticBatch`. A slot that it leaves out, or sets to None, is not exposed to the graph.
        pre_replay: `pre_replay(batch)`, once a step and before anything is written, graph or eager; waits that the
            model itself would do belong here, since a replay runs no Python. What it raises prevents the step.
        prepare_metadata: `prepare_metadata(batch, key)`, outside the graph.
        upgrade_metadata: `upgrade_metadata(batch, key)`, right after it, in the same places.
        prepare_in_graph: `prepare_in_graph(batch, key)`, recorded at the head of the capture.
        after_warmup: `after_warmup()`, after each warm-up run and never inside a capture.
        variant: `variant(batch) -> label`, which of `variants` a batch needs.
        variants: the labels to capture every bucket for, strings or None; `(None,)` by default.
        compile_mode: `compile_mode(entering)`, before and after torch.compile may trace the forward (`tc_piecewise`).
        barrier: `barrier()`, aligns the tensor-parallel ranks before each warm-up, and whenever `breakable` has
            captured a segment.
        vote: `vote(proposal) -> proposal`, makes the data-parallel ranks agree; None where there is nobody to ask.
            `RankGroup` has this hook and the two beside it for ranks in processes of their own.
        votes_each_step: whether they vote on steps, too, as by default; False where all ranks have the same batch in
            each step (tensor parallel), so that captures alone can come out differently.
        rank: 0 shows progress.
        streams_per_graph: how many streams of the device a captured forward takes, 1 by default: more where it forks
            side streams or communicates. Where a device has few streams, this limits how many buckets are captured.
        input_updates: what captured operators keep from the host and each replay updates, a tuple of `InputUpdate`;
            none by default. For devices with such operators (`npu`).
        state_tensors: `state_tensors() -> tensors by name`, what the forward writes beside its output, for `verify`.
        verify_batches: `verify_batches() -> batches`, live batches that `verify_on_capture` proves the graphs on.
        overlap_input_updates: whether a graph is launched before it is updated, see `NPUCudaGraphBackend`; not by
            default.
        queue_input_updates: whether the device waits for the last replay before an update, and not the host, see there;
            not by default.
    """

    def __init__(self, engine: Any) -> None:
        for name, is_right in (
            ("device", lambda value: value is not None),
            ("limits", lambda value: isinstance(value, Limits)),
            ("forward", callable),
        ):
            if not is_right(getattr(engine, name, None)):
                raise ConfigError(
                    f"the engine (`{type(engine).__name__}`) has no `{name}` that could be used",
                    code="engine-incomplete",
                    hint="it needs `device`, `limits` (a `Limits`) and `forward(batch)`; see `ModelRunner`",
                )

        def find(name: str, default: Any) -> Any:
            return getattr(engine, name, None) or default

        self.sizes: Callable[[Any], tuple[int, int]] = find("sizes", _default_sizes)
        self.make_batch: Callable[[dict[str, torch.Tensor], ShapeKey], Any] | None = find("make_batch", None)
        self.pre_replay: Callable[[Any], None] | None = find("pre_replay", None)
        self.prepare_metadata: Callable[[Any, ShapeKey | None], None] | None = find("prepare_metadata", None)
        self.upgrade_metadata: Callable[[Any, ShapeKey | None], None] | None = find("upgrade_metadata", None)
        self.prepare_in_graph: Callable[[Any, ShapeKey | None], None] | None = find("prepare_in_graph", None)
        self.after_warmup: Callable[[], None] | None = find("after_warmup", None)
        self.variant: Callable[[Any], str | None] | None = find("variant", None)
        self.variants: Sequence[str | None] = _labels(find("variants", (None,)))
        self.compile_mode: Callable[[bool], None] | None = find("compile_mode", None)
        self.barrier: Callable[[], None] | None = find("barrier", None)
        self.vote: Callable[[Proposal], Proposal] | None = find("vote", None)
        self.votes_each_step = bool(getattr(engine, "votes_each_step", True))
        self.rank: int = getattr(engine, "rank", 0)
        self.streams_per_graph = as_count("streams_per_graph", getattr(engine, "streams_per_graph", 1))
        self.input_updates: Sequence[InputUpdate] = find("input_updates", ())
        self.state_tensors: Callable[[], Mapping[str, torch.Tensor]] | None = find("state_tensors", None)
        self.verify_batches: Callable[[], Iterable[Any]] | None = find("verify_batches", None)
        self.overlap_input_updates = bool(find("overlap_input_updates", False))
        self.queue_input_updates = bool(find("queue_input_updates", False))
        if self.variant is not None and self.variants == (None,):
            raise ConfigError(
                "the engine has a `variant` hook but no `variants`",
                code="variants-missing",
                hint="list every label that `variant(batch)` returns in the engine's `variants`",
            )


def _labels(variants: object) -> tuple[str | None, ...]:
    """Each label once, in the engine's order."""
    given = () if isinstance(variants, str) or not isinstance(variants, Iterable) else tuple(variants)
    if not given or any(not (label is None or isinstance(label, str)) for label in given):
        raise ConfigError(
            f"the engine's `variants`: {variants!r} is no sequence of strings or None", code="variants-invalid"
        )
    return tuple(dict.fromkeys(given))


def _default_sizes(batch: Any) -> tuple[int, int]:
    batch_size, input_ids = read_fields(batch, ("batch_size", "input_ids"))
    if batch_size is not None and input_ids is not None:
        return batch_size, input_ids.shape[0]
    if isinstance(batch, Mapping) and not batch:
        return 0, 0
    raise ReplayError(
        f"the size of a `{type(batch).__name__}` without `batch_size` and `input_ids` is not known",
        code="sizes-unknown",
        hint="set both, or give the engine a hook `sizes(batch) -> (requests, tokens)`",
    )
