"""An engine with two kinds of attention layers, whose metadata is prepared raw and upgraded before any layer reads it.

The metadata is shaped like DeepSeek-V4's: the raw form says for each token which cache row and position it has; the
full form has, for each kind of layer, the table of cache places that a token attends to. Layers know the full form
only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import devicegraph as dg

VOCABULARY, WIDTH, LENGTH = 32, 8, 16
WINDOW, BLOCK = 3, 4
#: The kind of each layer: the last tokens, or sums over the blocks of tokens that are complete.
KINDS = ("window", "compressed", "window")


@dataclass(frozen=True)
class Plan:
    """Where the tokens of a step attend to, for one kind of layer.

    Attributes:
        places: `[tokens, keys, cache places in a key]` int64 on the device.
        visible: `[tokens, keys]` bool on the device.
    """

    places: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True)
class RawMetadata:
    """What is prepared first.

    Attributes:
        rows: `[tokens]` int64 on the device: the cache row of each token; padded ones have the reserved row 0.
        positions: `[tokens]` int64 on the device: its position there.
        plans: for each kind of layer the tables that an upgrade fills.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    plans: dict[str, Plan]

    def tensors(self) -> list[torch.Tensor]:
        plans = [tensor for plan in self.plans.values() for tensor in (plan.places, plan.visible)]
        return [self.rows, self.positions, *plans]


class FullMetadata(RawMetadata):
    """What layers take: the plans are those of this step."""


@dataclass
class Batch:
    """Both phases' batch: `query_lens[i]` new tokens of request i, whose cache then has `seq_lens[i]` tokens."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    query_lens: torch.Tensor
    batch_size: int
    engine: Any = None
    metadata: Any = None


class Planner:
    """Plans for one kind of layer.

    Attributes:
        plans: how often it planned, counted on the device, so that plans inside of a graph count too.
        is_stale: whether it leaves the plan as it is.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.plans = torch.zeros((), dtype=torch.int64, device=device)
        self.is_stale = False
        if kind == "window":
            self.offsets = torch.arange(1 - WINDOW, 1, device=device)[:, None]
        else:
            self.offsets = torch.arange(LENGTH, device=device).view(-1, BLOCK)
        self._plan_one = self._plan_window if kind == "window" else self._plan_compressed

    def empty(self, tokens: int) -> Plan:
        """Buffers for a plan, in which no token sees anything."""
        places = torch.zeros(tokens, *self.offsets.shape, dtype=torch.int64, device=self.offsets.device)
        return Plan(places, torch.zeros(places.shape[:2], dtype=torch.bool, device=places.device))

    def plan(self, raw: RawMetadata, into: Plan) -> None:
        if self.is_stale:
            return
        self.plans.add_(1)
        places, visible = self._plan_one(raw.positions[:, None, None])
        into.visible.copy_(visible)
        into.places.copy_(raw.rows[:, None, None] * LENGTH + places)

    def _plan_window(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = positions + self.offsets
        return places.clamp(min=0), places[:, :, 0] >= 0

    def _plan_compressed(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offsets, self.offsets[:, -1] <= positions[:, :, 0]


@torch.library.custom_op("devicegraph_tests::planned_attention", mutates_args=())
def planned_attention(hidden: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention as an operator: the plan comes from the batch of the step."""
    return dg.current_batch().engine.attention(hidden, layer)


@planned_attention.register_fake
def _(hidden: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(hidden)


class PlannedEngine:
    """Prepares its metadata outside of the graph, in buffers that it keeps for each graph.

    All values are small integers in float32, so that every order of summation gives the same bits.

    Attributes:
        is_checked: whether layers refuse raw metadata; else they read what the plans happen to hold.
        fail: which of `hooks`, or `attention`, is to fail midway, or None.
        seen: the metadata and the size of the batch that each call of attention met, where its Python runs.
    """

    #: What can be made to fail.
    hooks = ("prepare", "upgrade")

    def __init__(self, device: str | torch.device = "cpu", phase: str = "decode", max_bs: int = 8) -> None:
        self.device, self.phase = torch.device(device), phase
        self.limits = dg.Limits(max_bs=max_bs, max_num_tokens=max_bs * (1 if phase == "decode" else 8))
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float().to(self.device)  # noqa: E731
        self.embedding, self.position, self.head = draw(VOCABULARY, WIDTH), draw(LENGTH, WIDTH), draw(WIDTH, VOCABULARY)
        self.caches = torch.zeros(len(KINDS), (max_bs + 1) * LENGTH, WIDTH, device=self.device)
        self.planners = {kind: Planner(kind, self.device) for kind in dict.fromkeys(KINDS)}
        self.metadata: dict[dg.ShapeKey, RawMetadata] = {}
        self.is_checked = True
        self.fail: str | None = None
        self.seen: list[tuple[Any, int]] = []

    def registry(self) -> dg.CudaGraphBufferRegistry | None:
        """The usual slots, and in decode one more: the new tokens of each request."""
        if self.phase == "prefill":
            return None
        size = self.limits.max_bs
        registry = dg.build_decode_registry(
            device=self.device, max_bs=size, max_num_token=size, seq_len_fill_value=1, cache_loc_dtype=torch.int64
        )
        policy = dg.PaddingPolicy.FILL_SENTINEL
        registry.register_slot(
            dg.GraphSlot("query_lens", lambda bs, _: (bs,), torch.int64, axis="bs", padding_policy=policy, pad_value=1)
        )
        return registry

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Batch:
        views = {name: view for name, view in views.items() if name in Batch.__dataclass_fields__}
        if self.phase == "decode":
            return Batch(**views, batch_size=key.size, engine=self)
        # One request that has all tokens; places beyond its cache row are cut off by the preparation.
        one = lambda value: torch.tensor([value], device=self.device)  # noqa: E731
        return Batch(
            **views,
            seq_lens=one(key.size),
            req_pool_indices=one(0),
            query_lens=one(key.size),
            batch_size=1,
            engine=self,
        )

    # Metadata.

    def empty_metadata(self, tokens: int) -> RawMetadata:
        rows, positions = torch.zeros(2, tokens, dtype=torch.int64, device=self.device)
        return RawMetadata(rows, positions, {kind: planner.empty(tokens) for kind, planner in self.planners.items()})

    def metadata_for(self, batch: Batch, key: dg.ShapeKey | None) -> RawMetadata:
        """The buffers of a graph, always the same; those of an eager step are its own."""
        tokens = len(batch.input_ids)
        if key is None:
            return self.empty_metadata(tokens)
        if key not in self.metadata:
            self.metadata[key] = self.empty_metadata(tokens)
        return self.metadata[key]

    def prepare_metadata(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        batch.metadata = raw = self.metadata_for(batch, key)
        ends = batch.query_lens.cumsum(0)
        tokens = torch.arange(len(raw.rows), device=self.device)
        requests = torch.searchsorted(ends, tokens, right=True)  # behind the last request: padding
        nobody = ends.new_zeros(1)
        raw.rows.copy_(torch.cat([batch.req_pool_indices, nobody])[requests])
        if self.fail == "prepare":
            raise ValueError("prepare failed")
        positions = torch.cat([batch.seq_lens - ends, nobody])[requests] + tokens
        raw.positions.copy_(positions.where(requests < len(ends), nobody).clamp(max=LENGTH - 1))

    def upgrade_metadata(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        raw = batch.metadata
        for kind, planner in self.planners.items():
            planner.plan(raw, raw.plans[kind])
            batch.metadata = FullMetadata(raw.rows, raw.positions, raw.plans)
            if self.fail == "upgrade":
                batch.upgraded = kind
                raise ValueError("upgrade failed")

    # The model.

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        for layer, cache in enumerate(self.caches.unbind()):
            cache.index_copy_(0, batch.out_cache_loc, hidden)
            attend = planned_attention if torch.compiler.is_compiling() else self.attend
            hidden = (attend(hidden, layer) + hidden).clamp(-3, 3)
        return hidden @ self.head

    @dg.eager_on_graph
    def attend(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        return self.attention(hidden, layer)

    def attention(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        batch = dg.current_batch()
        self.seen.append((batch.metadata, batch.batch_size))
        if self.is_checked and not isinstance(batch.metadata, FullMetadata):
            raise TypeError(f"layer {layer} met `{type(batch.metadata).__name__}`")
        if self.fail == "attention" and layer == 1:
            raise ValueError("attention failed")
        plan = batch.metadata.plans[KINDS[layer]]
        keys = self.caches[layer][plan.places].sum(2)
        scores = (keys @ hidden[:, :, None])[:, :, 0].masked_fill(~plan.visible, 0)
        return (scores[:, None, :] @ keys)[:, 0]


class InGraphEngine(PlannedEngine):
    """Prepares its metadata inside of the graph, from slots; outside, the batch is only given the buffers for it."""

    hooks = ("prepare", "upgrade", "in graph")

    def prepare_metadata(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        batch.metadata = self.metadata_for(batch, key)
        if self.fail == "prepare":
            raise ValueError("prepare failed")

    def upgrade_metadata(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        """Only says that the buffers will be full when a layer reads them."""
        batch.metadata = FullMetadata(**vars(batch.metadata))
        if self.fail == "upgrade":
            raise ValueError("upgrade failed")

    def prepare_in_graph(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        full = batch.metadata
        full.rows.copy_(batch.out_cache_loc // LENGTH)
        full.positions.copy_(batch.positions)
        for kind, planner in self.planners.items():
            planner.plan(full, full.plans[kind])
            if self.fail == "in graph":
                batch.upgraded = kind
                raise ValueError("in graph failed")


@dataclass
class Requests:
    """Requests in rows 1, 2, ... of the cache that grow from step to step, and what the model must say of them."""

    engine: PlannedEngine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def step(self, new_tokens: dict[int, int]) -> Batch:
        """A live batch that adds random tokens to rows; a row whose cache would overflow starts over."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for row, count in new_tokens.items():
            if len(self.tokens.get(row, ())) + count > LENGTH:
                del self.tokens[row]
            held = self.tokens.setdefault(row, [])
            new = torch.randint(0, VOCABULARY, (count,), generator=self.generator).tolist()
            places += [(row, len(held) + i) for i in range(count)]
            ids += new
            held += new
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.engine.device)  # noqa: E731
        return Batch(
            input_ids=tensor(ids),
            positions=tensor([position for _, position in places]),
            out_cache_loc=tensor([row * LENGTH + position for row, position in places]),
            seq_lens=tensor([len(self.tokens[row]) for row in new_tokens]),
            req_pool_indices=tensor(list(new_tokens)),
            query_lens=tensor(list(new_tokens.values())),
            batch_size=len(new_tokens),
            engine=self.engine,
        )

    def expected(self, new_tokens: dict[int, int]) -> torch.Tensor:
        """The naive oracle: logits of the new tokens, each request computed alone and from its first token on."""
        return torch.cat([self._logits(self.tokens[row])[-count:] for row, count in new_tokens.items()])

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        engine = self.engine
        hidden = [engine.embedding[token] + engine.position[position] for position, token in enumerate(tokens)]
        for kind in KINDS:
            attended = []
            for position, query in enumerate(hidden):
                if kind == "window":
                    keys = hidden[max(0, position - WINDOW + 1) : position + 1]
                else:
                    complete = (position + 1) // BLOCK
                    keys = [sum(hidden[block * BLOCK : (block + 1) * BLOCK]) for block in range(complete)]
                attended.append(sum(((key @ query) * key for key in keys), torch.zeros_like(query)))
            hidden = [(a + query).clamp(-3, 3) for a, query in zip(attended, hidden, strict=True)]
        return torch.stack(hidden) @ engine.head
