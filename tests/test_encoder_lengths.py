"""Encoder-decoders in decode: which batches of encoded lengths replay, and what padded rows attend to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from engines import WIDTH, ToyEngine, config, eager

ENCODED = 6


class Crossing(ToyEngine):
    """The toy engine with attention to encoded tokens, each with a weight of its own."""

    def __init__(self, fill: int = 0) -> None:
        super().__init__(max_bs=4)
        self.encoded = torch.arange(5.0 * ENCODED * WIDTH).reshape(5, ENCODED, WIDTH)
        self.registry = dg.build_decode_registry(
            device="cpu",
            max_bs=4,
            max_num_token=4,
            seq_len_fill_value=1,
            is_encoder_decoder=True,
            encoder_len_fill_value=fill,
        )

    def make_batch(self, views: dict[str, torch.Tensor], key: Any) -> Any:
        batch = super().make_batch(views, key)
        batch.encoder_lens = views["encoder_lens"]
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        visible = self.steps[:ENCODED] < batch.encoder_lens[:, None]
        crossed = (self.encoded[batch.req_pool_indices] * visible[:, :, None]).sum(1)
        return super().forward(batch) + crossed @ self.head

    def encoded_batch(self, lengths: list[int], seed: int = 0, on_host: Any = None) -> Any:
        batch = self.batch([3 + seed % 4] * len(lengths), seed)
        batch.encoder_lens = torch.tensor(lengths, dtype=torch.int32)
        batch.encoder_lens_cpu = on_host
        return batch


@pytest.fixture(scope="module", params=[0, 1])
def runner(request: pytest.FixtureRequest) -> Any:
    engine = Crossing(request.param)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]), registry=engine.registry) as made:
        made.capture()
        yield made


@pytest.mark.parametrize("mirror", [None, list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        ([0, 0, 0], "graph"),
        ([4, 6, 2], "graph"),
        ([1, 1, 6], "graph"),
        ([0, 6, 2], "encoder-lens-mixed"),
        ([1, 0, 1], "encoder-lens-mixed"),
    ],
)
def test_uniform_lengths_replay_and_mixed_ones_run_eagerly_whatever_pads_them(
    runner: Any, lengths: list[int], code: str, mirror: Any
) -> None:
    """Three requests in a bucket of four: the padded one is encoded where the fill is 1, and counts for nothing."""
    engine = runner.model_runner
    batch = engine.encoded_batch(lengths, on_host=None if mirror is None else mirror(lengths))
    assert runner.can_run(batch).code == code
    want = eager(engine, batch)
    assert torch.equal(runner.run(batch), want)
    assert engine.registry.get_slot("encoder_lens").buffer[3] == engine.registry.get_slot("encoder_lens").pad_value


def test_any_lengths_give_what_eager_gives_and_only_mixed_ones_cost_a_replay(runner: Any) -> None:
    engine = runner.model_runner

    @settings(max_examples=15)
    @given(st.lists(st.integers(0, ENCODED), min_size=1, max_size=4), st.integers(0, 99))
    def check(lengths: list[int], seed: int) -> None:
        batch = engine.encoded_batch(lengths, seed, on_host=lengths)
        assert bool(runner.can_run(batch)) == (len({length > 0 for length in lengths}) == 1)
        assert torch.equal(runner.run(batch), eager(engine, batch))

    check()


def test_lengths_that_only_the_device_knows_are_not_waited_for(runner: Any) -> None:
    batch = runner.model_runner.encoded_batch([1, 2])
    batch.encoder_lens = torch.empty(2, dtype=torch.int32, device="meta")  # nobody can read them
    assert runner.can_run(batch).code == "encoder-lens-unknown"
    batch.encoder_lens_cpu = [1, 2]
    assert runner.can_run(batch)
    batch.encoder_lens_cpu = torch.empty(2, dtype=torch.int32, device="meta")
    assert runner.can_run(batch).code == "encoder-lens-unknown"


@pytest.mark.parametrize(
    "mirror", [[1], [1, 2, 0], [], torch.tensor(1), torch.tensor([[1, 2]]), torch.tensor([1]), 2], ids=str
)
def test_a_mirror_of_other_requests_is_refused(runner: Any, mirror: Any) -> None:
    batch = runner.model_runner.encoded_batch([1, 2], on_host=mirror)
    for step in (runner.can_run, runner.run):
        with pytest.raises(
            dg.SlotError, match=r"^slot `encoder_lens_cpu`: the batch has .* for 2 requests \[wrong-shape\]"
        ):
            step(batch)


def test_a_batch_without_encoded_lengths_and_an_idle_one_are_uniform(runner: Any) -> None:
    batch = runner.model_runner.batch([3, 4])
    assert runner.can_run(batch)
    assert runner.can_run(runner.model_runner.batch([])).code == "idle"


def test_the_lengths_of_a_decoder_alone_are_nobodys_business() -> None:
    engine = ToyEngine(max_bs=2)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2])) as runner:
        runner.capture()
        batch: Any = engine.batch([3, 4])
        batch.encoder_lens_cpu = [0, 3]
        assert runner.can_run(batch)


class Skipping(Crossing):
    """Has no cross attention at all in the graphs for text alone."""

    variants = ("text", "crossed")

    def variant(self, batch: Any) -> str:
        return "crossed" if max(batch.encoder_lens_cpu) > 0 else "text"

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        batch.skips = (self.variant(batch) if key is None else key.variant_label) == "text"

    def forward(self, batch: Any) -> torch.Tensor:
        return ToyEngine.forward(self, batch) if batch.skips else super().forward(batch)


def test_a_model_that_skips_cross_attention_for_text_is_two_variants() -> None:
    engine = Skipping()
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]), registry=engine.registry) as runner:
        runner.capture()
        for lengths in ([0, 0, 0], [4, 6, 2], [0, 6, 2], [0], [5]):
            batch = engine.encoded_batch(lengths, on_host=lengths)
            engine.prepare_metadata(batch, None)
            assert torch.equal(runner.run(batch), eager(engine, batch))
        replays = runner.metrics().replays
        assert {(key.size, key.variant_label): count for key, count in replays.items() if count} == {
            (4, "text"): 1,
            (4, "crossed"): 1,
            (2, "text"): 1,
            (2, "crossed"): 1,
        }
        assert runner.metrics().eager == {"encoder-lens-mixed": 1}


def test_a_rank_with_mixed_lengths_keeps_the_others_out_of_their_graphs() -> None:
    engine = Crossing()
    proposals: list[dg.Proposal] = []

    def vote(proposal: dg.Proposal) -> dg.Proposal:
        proposals.append(proposal)
        return dg.agree([proposal, dg.Proposal(True, 2)])

    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), registry=engine.registry) as runner:
        runner.capture()
        runner.hooks.vote = vote
        assert runner.can_run(engine.encoded_batch([0, 3])).code == "encoder-lens-mixed"
        assert proposals == [dg.Proposal(False, 2)]
        assert runner.can_run(engine.encoded_batch([2, 3]))
