"""Graphs with and without adapters side by side: each with its own side table, padded rows without an adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from engines import ToyEngine, config, eager

ADAPTERS = 2
NONE = ADAPTERS


class Adapted(ToyEngine):
    """Adds to each row its adapter's weight, once for each row of the batch that has the same adapter.

    So a padded row that counts for an adapter changes the rows that really have it.
    """

    variants = ("nolora", "lora")
    padding = NONE

    def __init__(self) -> None:
        super().__init__(max_bs=4)
        self.weights = torch.tensor([[100.0], [1000.0], [0.0]])
        self.tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.updated: list[Any] = []
        self.registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
        self.registry.register_slot(
            dg.GraphSlot(
                "lora_ids",
                lambda bs, tokens: (bs,),
                torch.int64,
                axis="bs",
                padding_policy=dg.PaddingPolicy.FILL_SENTINEL,
                pad_value=self.padding,
            )
        )

    def make_batch(self, views: dict[str, torch.Tensor], key: Any) -> Any:
        batch = super().make_batch(views, key)
        batch.lora_ids = views["lora_ids"]
        return batch

    def variant(self, batch: Any) -> str:
        return "lora" if any(each != NONE for each in batch.extras["adapters"]) else "nolora"

    def key_of_table(self, key: dg.ShapeKey) -> Any:
        return key

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        counts = torch.bincount(batch.lora_ids, minlength=ADAPTERS + 1).float()
        if key is None:
            batch.table, batch.is_adapted = (batch.lora_ids, counts), self.variant(batch) == "lora"
            return
        if key not in self.tables or dg.get_is_capture_mode():
            self.tables[self.key_of_table(key)] = (batch.lora_ids.clone(), counts)
        table = self.tables[self.key_of_table(key)]
        for kept, now in zip(table, (batch.lora_ids, counts), strict=True):
            kept.copy_(now)
        self.updated.append(table)
        batch.table, batch.is_adapted = table, key.variant_label == "lora"

    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        if not batch.is_adapted:
            return logits
        rows, counts = batch.table
        return logits + self.weights[rows] * counts[rows][:, None]

    def adapted(self, adapters: list[int], seed: int = 0) -> Any:
        batch: Any = self.batch([3 + seed % 5] * len(adapters), seed)
        batch.lora_ids, batch.extras = torch.tensor(adapters), {"adapters": adapters}
        return batch


class BySize(Adapted):
    """Keeps one table for both variants of a size."""

    def key_of_table(self, key: dg.ShapeKey) -> Any:
        return key.size


class ZeroForNone(Adapted):
    """Pads with the first adapter."""

    padding = 0


def captured(engine: Adapted, backend: str = "full") -> Any:
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4], backend=backend), registry=engine.registry)
    runner.capture()
    return runner


def wrong(runner: Any, steps: list[list[int]]) -> list[int]:
    engine, found = runner.model_runner, []
    for number, adapters in enumerate(steps):
        batch = engine.adapted(adapters, number)
        engine.prepare_metadata(batch, None)
        want = eager(engine, batch)
        if not torch.equal(runner.run(batch), want):
            found.append(number)
    return found


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_each_variant_of_a_bucket_updates_and_reads_the_table_of_its_own(backend: str) -> None:
    engine = Adapted()
    with captured(engine, backend) as runner:
        tables = dict(engine.tables)
        assert set(tables) == {dg.ShapeKey(size, None, label) for size in (2, 4) for label in engine.variants}
        for adapters, label in (([0, 1, 0], "lora"), ([NONE] * 3, "nolora"), ([NONE, 1, NONE], "lora")) * 2:
            engine.updated.clear()
            assert wrong(runner, [adapters]) == []
            (table,) = engine.updated
            assert table is tables[dg.ShapeKey(4, None, label)]
            assert table[0].tolist() == [*adapters, NONE]


def test_any_sequence_of_adapters_gives_what_eager_gives() -> None:
    with captured(Adapted()) as runner:

        @settings(max_examples=12)
        @given(st.lists(st.lists(st.integers(0, NONE), min_size=1, max_size=4), min_size=1, max_size=5))
        def check(steps: list[list[int]]) -> None:
            assert wrong(runner, steps) == []

        check()
        assert runner.metrics().hit_rate == 1.0


STEPS = [[0, 1, 0], [NONE, NONE, NONE], [NONE, 1, NONE], [0, 0], [NONE]]


def test_tables_by_size_alone_give_the_variant_that_was_captured_first_stale_rows() -> None:
    engine = BySize()
    engine.variants = ("lora", "nolora")
    with captured(engine) as runner:
        assert wrong(runner, STEPS)


def test_padding_with_the_first_adapter_counts_rows_that_are_not_there() -> None:
    with captured(ZeroForNone()) as runner:
        assert 0 in wrong(runner, STEPS)
