"""Two-batch overlap: the padded batch of a graph as two halves that an engine runs interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from devicegraph.batches import read_fields, replaced, set_field, showing_proxies
from devicegraph.errors import ConfigError
from devicegraph.runners.wrapping import unheld
from devicegraph.slots import GraphSlot, buffer_of

if TYPE_CHECKING:
    import torch

    from devicegraph.registry import CudaGraphBufferRegistry
    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["TboCudaGraphRunnerPlugin"]

#: Counts of the whole bucket, which say something wrong of a half.
COUNTS = ("num_token_non_padded", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
CHILDREN, PROXIES = "tbo_children", "pp_proxy_tensors"


class TboCudaGraphRunnerPlugin:
    """Gives every static batch of a decode runner two halves: while one communicates, the other computes.

    The split is that of the bucket, whatever is live: its first `size // 2` requests, and the others, which have as
    many. So the halves of a bucket are the same views in its capture and on every replay, and a small live batch leaves
    the second one all padding. Buckets are multiples of two; an eager step is not split.

    The static batch has its halves as `tbo_children`, a pair of batches of its own class, and where the second begins
    as `tbo_split_seq_index`. A half has the slots of the batch as views of its rows, its own `batch_size`, and as
    `tbo_parent_token_range` the tokens of the batch that it has. Counts that the factories compute are those of the
    half, as are those of an engine's own `value_fn` that has a method `halves(context)`, the numbers of the first and
    behind them those of the second; other slots without rows are the same in both. What is no slot is the batch's own.

    `prepare_metadata`, `upgrade_metadata` and `prepare_in_graph` run for the batch and then for each half, whose key is
    the graph's with the number of the half, 0 or 1, as its `stream_idx`: a side table has an entry for each.

        with dg.DecodeCudaGraphRunner(engine, config=config, tbo=dg.TboCudaGraphRunnerPlugin()) as runner: ...
    """

    def __init__(self) -> None:
        """A plugin for one runner."""
        self._buffers: CudaGraphBufferRegistry | None = None
        self._tokens_per_request = 1
        #: The views of both halves, by bucket and number of slots.
        self._views: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]] = {}

    def attach(self, runner: BaseCudaGraphRunner) -> None:
        """Makes a runner split its static batches; runners do it with the plugin that they are given.

        Raises:
            ConfigError: `plugin-in-use` by another runner; `slot-not-splittable`. The runner's registry is as it was.
        """
        if self._buffers is not None:
            raise ConfigError(
                "tbo: the plugin belongs to another runner", code="plugin-in-use", hint="make one for each runner"
            )
        registry = runner.buffer_registry
        if runner.buckets:
            for slot in registry.slots:
                self._check(runner, slot)
        for slot in registry.slots:
            if _counts_halves(slot) and not registry.has_slot(f"{CHILDREN}.{slot.name}"):
                registry.register_slot(_of_both_halves(slot))
        self._buffers = registry
        _, self._tokens_per_request = runner._padded_sizes(1, 1)
        whole, in_graph = unheld(runner._prepare_metadata), runner._prepare_in_graph

        def prepare_metadata(batch: Any, key: ShapeKey | None) -> None:
            if key is not None:
                self.split(batch, key)
            whole(batch, key)
            if key is not None:
                for number, half in enumerate(_halves(batch)):
                    whole(half, key._replace(stream_idx=number))

        def prepare_in_graph(batch: Any, key: ShapeKey | None) -> None:
            assert in_graph is not None
            assert key is not None  # eager steps call the engine's own
            in_graph(batch, key)
            for number, half in enumerate(_halves(batch)):
                in_graph(half, key._replace(stream_idx=number))

        runner._prepare_metadata = prepare_metadata  # type: ignore[method-assign]
        if in_graph is not None:
            runner._prepare_in_graph = prepare_in_graph

    def split(self, batch: Any, key: ShapeKey) -> tuple[Any, Any]:
        """Gives a static batch its halves, and returns them.

        Raises:
            SlotError: `field-not-settable`: the batch's class has no place for what a half, or the batch, shows.
        """
        requests = key.size // 2
        tokens = requests * self._tokens_per_request
        kept = (key.size, len(self._registry.slot_names))
        both = self._views.get(kept)
        if both is None:
            both = self._views[kept] = self._views_of(requests, tokens)
        names = list(both[0])
        shown = [name for name, value in zip(names, read_fields(batch, names), strict=True) if value is not None]
        halves = []
        for number, views in enumerate(both):
            fields = {name: views[name] for name in shown if name != PROXIES}
            own = {"batch_size": requests, "tbo_parent_token_range": (number * tokens, (number + 1) * tokens)}
            half = replaced(batch, fields, own)
            halves.append(showing_proxies(half, views[PROXIES]) if PROXIES in shown else half)
        pair = (halves[0], halves[1])
        set_field(batch, "tbo_split_seq_index", requests)
        set_field(batch, CHILDREN, pair)
        return pair

    @property
    def _registry(self) -> CudaGraphBufferRegistry:
        assert self._buffers is not None  # attached before anything is split
        return self._buffers

    def _views_of(self, requests: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        for slot in self._registry.slots:
            prefix, _, name = slot.name.rpartition(".")
            if _counts_halves(slot):
                counts = buffer_of(self._registry.get_slot(f"{CHILDREN}.{name}")).view(2, *buffer_of(slot).shape)
                first[name], second[name] = counts[0], counts[1]
            elif prefix == "":
                first[name], second[name] = _cut(slot, requests, tokens)
            elif prefix == PROXIES:
                both = (first.setdefault(PROXIES, {}), second.setdefault(PROXIES, {}))
                both[0][name], both[1][name] = _cut(slot, requests, tokens)
        return first, second

    def _check(self, runner: BaseCudaGraphRunner, slot: GraphSlot) -> None:
        """Refuses a slot of which halves would say something wrong."""
        prefix, _, name = slot.name.rpartition(".")
        smallest = min(runner.buckets)
        requests, tokens = (size // 2 for size in runner._padded_sizes(smallest, smallest))
        registry, of_halves = runner.buffer_registry, f"{CHILDREN}.{slot.name}"
        reason = None
        if _counts_halves(slot):
            known = registry.get_slot(of_halves) if registry.has_slot(of_halves) else None
            if known is not None and known.value_fn != _halves_of(slot):
                reason = f"has its halves counted in `{of_halves}`, which is another slot already"
        elif slot.axis == "none":
            if name in COUNTS and not prefix:
                reason = "counts tokens of the whole batch"
        elif prefix == PROXIES and registry.token_alignment > 1:
            reason = "has a rank's share of the whole batch, which is no share of either half"
        elif [2 * part.numel() for part in _cut(slot, requests, tokens)] != [
            slot.slice_for(2 * requests, 2 * tokens).numel()
        ] * 2:
            reason = "has other rows for both halves together than for each"
        if reason is not None:
            raise ConfigError(
                f"tbo: slot `{slot.name}` {reason}",
                code="slot-not-splittable",
                hint="leave it out of the registry, or run without two-batch overlap",
            )


def _halves(batch: Any) -> tuple[Any, Any]:
    (halves,) = read_fields(batch, (CHILDREN,))
    return halves  # type: ignore[no-any-return]


def _cut(slot: GraphSlot, requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the first half of a bucket of twice these sizes, and those of the second."""
    first, whole = slot.slice_for(requests, tokens), slot.slice_for(2 * requests, 2 * tokens)
    if slot.axis == "none":
        return whole, whole
    dim = next(dim for dim, (part, rows) in enumerate(zip(first.shape, whole.shape, strict=True)) if part != rows)
    return first, whole.narrow(dim, first.shape[dim], whole.shape[dim] - first.shape[dim])


def _counts_halves(slot: GraphSlot) -> bool:
    """Whether a slot without rows has a function that counts for either half."""
    return slot.axis == "none" and "." not in slot.name and hasattr(slot.value_fn, "halves")


def _halves_of(slot: GraphSlot) -> Any:
    counts: Any = slot.value_fn
    return counts.halves


def _of_both_halves(slot: GraphSlot) -> GraphSlot:
    """The slot with a computed count of either half, one behind the other."""
    length = buffer_of(slot).numel()
    return GraphSlot(
        f"{CHILDREN}.{slot.name}",
        lambda _bs, _tokens: (2 * length,),
        slot.dtype,
        axis="none",
        source_device=slot.source_device,
        value_fn=_halves_of(slot),
    )
