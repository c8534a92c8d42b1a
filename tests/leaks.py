"""A toy engine with more slots, of any kind, whose padded rows its forward heeds where it is told to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import devicegraph as dg
from engines import ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ZERO, KEEP_PAD = dg.PaddingPolicy.ZERO, dg.PaddingPolicy.KEEP_PAD


@dataclass(frozen=True)
class Kind:
    """A kind of slot.

    Attributes:
        make: the slot of a name.
        live: what a batch of n requests carries; None where the slot has another origin.
        by_row: one number for each request of the bucket, from the padded rows.
        computed: for an eager step, what the slot would hold for a live batch that does not carry it.
    """

    make: Callable[[str], dg.GraphSlot]
    live: Callable[[int], torch.Tensor] | None = None
    by_row: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    computed: Callable[[Any], torch.Tensor] = lambda batch: torch.full((batch.batch_size,), 3.0)


def flat(policy: dg.PaddingPolicy, dtype: torch.dtype, axis: str = "tokens", **options: Any) -> Callable[..., Any]:
    return lambda name: dg.GraphSlot(name, lambda bs, _: (bs,), dtype, axis=axis, padding_policy=policy, **options)


def _planes(name: str) -> dg.GraphSlot:
    cut = lambda buffer, size: buffer[:, :size]  # noqa: E731
    return dg.GraphSlot(name, lambda _, tokens: (3, tokens), torch.int32, slice_fn=cut, padding_policy=ZERO)


def _boundaries(name: str) -> dg.GraphSlot:
    cut, once = lambda buffer, size: buffer[: size + 1], dg.PaddingPolicy.FILL_ONCE
    return dg.GraphSlot(name, lambda bs, _: (bs + 1,), torch.int32, axis="bs", slice_fn=cut, padding_policy=once)


def fill_live(buffer: torch.Tensor, batch: Any, context: dg.FillContext) -> None:
    buffer[: context.raw_bs].fill_(3)


KINDS = {
    f"{policy.name}_{str(dtype).removeprefix('torch.')}": Kind(
        flat(policy, dtype, pad_value=1 if policy is dg.PaddingPolicy.FILL_SENTINEL else 0),
        lambda n, dtype=dtype: torch.arange(3, 3 + n).to(dtype),
    )
    for policy in dg.PaddingPolicy
    for dtype in (torch.int64, torch.float32, torch.bool)
} | {
    "by_request": Kind(flat(ZERO, torch.int32, "bs"), lambda n: torch.arange(2, 2 + n, dtype=torch.int32)),
    "planes": Kind(_planes, lambda n: torch.arange(3 * n, dtype=torch.int32).view(3, n), lambda rows: rows.sum(0)),
    "boundaries": Kind(_boundaries, lambda n: torch.arange(n + 1, dtype=torch.int32) * 2, lambda rows: rows.diff()),
    "matrix": Kind(
        lambda name: dg.GraphSlot(name, lambda _, tokens: (tokens, 5), torch.bfloat16, padding_policy=ZERO),
        lambda n: torch.ones(n, 5, dtype=torch.bfloat16),
        lambda rows: rows.sum(1),
    ),
    "by_source_fn": Kind(
        flat(ZERO, torch.int64, source_fn=lambda batch, context: batch.positions + 2),
        computed=lambda batch: batch.positions + 2,
    ),
    "by_value_fn": Kind(
        flat(KEEP_PAD, torch.int64, value_fn=lambda context: list(range(1, context.raw_bs + 1))),
        computed=lambda batch: torch.arange(1, batch.batch_size + 1),
    ),
    "by_hook": Kind(flat(ZERO, torch.float32, copy_from_fb=False, post_fill=fill_live)),
}


class WithSlots(ToyEngine):
    """The toy engine with slots of these kinds by name, each of whose rows adds to its own request's logits.

    Args:
        kinds: the slots.
        leaks: `batch -> scalar`, by name: what is added to all logits where it is turned on.
    """

    def __init__(
        self, kinds: Mapping[str, Kind], leaks: Mapping[str, Callable[[Any], Any]], device: str = "cpu"
    ) -> None:
        super().__init__(device, max_bs=4)
        self.kinds, self.leaks = dict(kinds), dict(leaks)
        self.switch = torch.zeros(len(leaks), device=self.device)
        self.registry = dg.build_decode_registry(
            device=self.device, max_bs=4, max_num_token=4, seq_len_fill_value=1, cache_loc_dtype=torch.int64
        )
        for name, kind in self.kinds.items():
            self.registry.register_slot(kind.make(name))
        self.cache.copy_(torch.randint(-2, 3, self.cache.shape, generator=torch.Generator().manual_seed(1)))

    def turn_on(self, *names: str) -> None:
        """Lets these leaks through, in graphs that were captured before too."""
        self.switch.copy_(torch.tensor([float(name in names) for name in self.leaks]))

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        batch = super().make_batch(views, key)
        vars(batch).update({name: views[name] for name in self.kinds})
        return batch

    def batch(self, lengths: list[int], seed: int = 0, rows: list[int] | None = None) -> Any:
        batch = super().batch(lengths, seed, rows)
        for name, kind in self.kinds.items():
            setattr(batch, name, None if kind.live is None else kind.live(len(lengths)).to(self.device))
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        for name, kind in self.kinds.items():
            if getattr(batch, name) is None:
                setattr(batch, name, kind.computed(batch).to(self.device))
        logits = super().forward(batch)
        for name, kind in self.kinds.items():
            logits = logits + kind.by_row(getattr(batch, name))[:, None].float()
        for position, leak in enumerate(self.leaks.values()):
            logits = logits + self.switch[position] * leak(batch)
        return logits

    def batches(self) -> list[Any]:
        return [self.batch([3, 5], 1), self.batch([9, 2, 4], 2, rows=[4, 2, 3]), self.batch([6], 3)]

    def state(self) -> dict[str, torch.Tensor]:
        return {"cache": self.cache}


def captured(engine: Any, **options: Any) -> dg.DecodeCudaGraphRunner:
    config = dg.CudaGraphConfig(decode={"bs": options.pop("bs", [4])})
    runner = dg.DecodeCudaGraphRunner(engine, config=config, registry=getattr(engine, "registry", None), **options)
    runner.capture()
    return runner


#: What a forward may take from padded rows of numbers; two poisons show each of them, one would not.
FORMS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda rows: rows.sum(),
    "largest": lambda rows: rows.max(),
    "least": lambda rows: rows.min(),
    "squares": lambda rows: (rows**2).sum(),
    "last": lambda rows: rows[-1],
    "whether any is large": lambda rows: (rows > 100).any(),
    "whether any is very negative": lambda rows: (rows < -100).any(),
}
USUAL = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")


def leaky(device: str = "cpu") -> WithSlots:
    """An engine with a slot of every kind, and a leak through each of them and each usual one, all turned off."""

    def summed(name: str) -> Callable[[Any], torch.Tensor]:
        return lambda batch: getattr(batch, name).float().sum() % 8191

    def formed(name: str) -> Callable[[Any], Any]:
        return lambda batch: FORMS[name](batch.ZERO_float32)

    return WithSlots(
        KINDS, {name: summed(name) for name in (*KINDS, *USUAL)} | {name: formed(name) for name in FORMS}, device
    )
