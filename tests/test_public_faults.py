"""Faults of graph runtimes that were told in public, where no other test holds their kind; docs/faults.md lists all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import devicegraph as dg
from engines import Batch, ToyEngine, ToyPrefill, config, eager

# What is planned, for which sizes


class Watched:
    """Notes what attention would plan for."""

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        if key is not None:
            self.planned.append((key.size, batch.batch_size, len(batch.input_ids)))


class WatchedDecode(Watched, ToyEngine):
    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.planned: list[tuple[int, int, int]] = []


class WatchedPrefill(Watched, ToyPrefill):
    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[int, int, int]] = []


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("tokens_per_request", [1, 3])
def test_decode_plans_for_the_padded_requests_before_it_replays(backend: str, tokens_per_request: int) -> None:
    engine = WatchedDecode(max_bs=8, tokens_per_request=tokens_per_request)
    with dg.DecodeCudaGraphRunner(
        engine, config=config(backend=backend, bs=[4, 8]), num_tokens_per_bs=tokens_per_request
    ) as runner:
        runner.capture()
        engine.planned.clear()
        for bs in (3, 5, 8, 1):
            runner.run(engine.batch([tokens_per_request] * bs))
    assert engine.planned == [(size, size, size * tokens_per_request) for size in (4, 8, 8, 4)]


def test_prefill_plans_for_the_padded_tokens_of_the_real_requests() -> None:
    engine = WatchedPrefill()
    with dg.PrefillCudaGraphRunner(
        engine, config=dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [8, 16]})
    ) as runner:
        runner.capture()
        engine.planned.clear()
        runner.run(engine.chunks([(1, 0, 3), (2, 0, 1), (3, 0, 2)]))
        runner.run(engine.chunks([(1, 0, 9)]))
    assert engine.planned == [(8, 3, 8), (16, 1, 16)]


# Which graph


@dataclass
class EncoderBatch(Batch):
    encoder_lens: torch.Tensor | None = None


class EncoderDecoder(ToyEngine):
    """Attends to an encoder in all requests of a batch, or in none."""

    variants = ("text", "encoder")

    def make_batch(self, views: Any, key: Any) -> Any:
        return EncoderBatch(**{name: views[name] for name in views if name in EncoderBatch.__dataclass_fields__},
                            batch_size=key.size)  # fmt: skip

    def variant(self, batch: Any) -> str:
        present = {length > 0 for length in batch.encoder_lens.tolist()}
        return "mixed" if len(present) > 1 else "encoder" if present == {True} else "text"

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + batch.encoder_lens[:, None]


def test_encoder_lengths_that_are_uniform_replay_and_mixed_ones_run_eagerly_and_say_so() -> None:
    engine = EncoderDecoder(max_bs=4)
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    registry.register_slot(dg.GraphSlot("encoder_lens", lambda bs, tokens: (bs,), torch.int32, axis="bs",
                                        padding_policy=dg.PaddingPolicy.ZERO))  # fmt: skip
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), registry=registry) as runner:
        runner.capture()
        for lengths, code in (([0, 0], "graph"), ([4, 7], "graph"), ([0, 7], "variant-unknown"), ([0, 0], "graph")):
            batch = EncoderBatch(**vars(engine.batch([3, 5])), encoder_lens=torch.tensor(lengths, dtype=torch.int32))
            assert runner.can_run(batch).code == code
            assert torch.equal(runner.run(batch), eager(engine, batch))
        decision = runner.can_run(
            EncoderBatch(**vars(engine.batch([3, 5])), encoder_lens=torch.tensor([0, 7], dtype=torch.int32))
        )
        assert "variant" in str(decision.reason)
        assert runner.metrics().eager == {"variant-unknown": 1}


class Adapters(ToyEngine):
    """Adds its adapter's weights to each row; adapter 0 is none."""

    make_batch = None

    def __init__(self) -> None:
        super().__init__(max_bs=8)
        self.weights = torch.tensor([0.0, 100.0, 200.0])

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + self.weights[batch.lora_ids][:, None]


def test_rows_without_an_adapter_and_padded_rows_take_none_whatever_ran_before() -> None:
    engine = Adapters()
    registry = dg.build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1)
    slot = dg.GraphSlot("lora_ids", lambda bs, tokens: (bs,), torch.int64, axis="bs", required=True,
                        padding_policy=dg.PaddingPolicy.ZERO)  # fmt: skip
    registry.register_slot(slot)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[8]), registry=registry) as runner:
        runner.capture()
        for ids in ([1, 2, 1, 2, 1, 2, 1, 2], [0, 1, 0], [0], [2, 0]):
            batch = dg.StaticBatch(**vars(engine.batch([3] * len(ids))), lora_ids=torch.tensor(ids))
            want = eager(engine, batch)
            assert torch.equal(runner.run(batch), want)
            assert slot.buffer.tolist() == ids + [0] * (8 - len(ids))


def test_two_phases_of_one_engine_each_decide_by_sizes_of_their_own() -> None:
    engine = ToyPrefill()
    settings = dg.CudaGraphConfig(decode={"bs": [4]}, prefill={"backend": "breakable", "bs": [16]})
    decoder = ToyEngine()
    with (
        dg.PrefillCudaGraphRunner(engine, config=settings) as prefill,
        dg.DecodeCudaGraphRunner(decoder, config=settings) as decode,
    ):
        prefill.capture()
        decode.capture()
        prompt, step = engine.chunks([(1, 0, 9)]), decoder.batch([3, 5])
        prefill_decision, decode_decision = prefill.can_run(prompt), decode.can_run(step)
        assert (prefill_decision.key, decode_decision.key) == (dg.ShapeKey(16), dg.ShapeKey(4))
        for _ in range(2):  # either may be the one that ran last
            assert prefill.replay(prompt, prefill_decision).shape[0] == 9
            assert decode.replay(step, decode_decision).shape[0] == 2
        with pytest.raises(dg.ReplayError):
            prefill.replay(prompt, decode_decision)


# The reserved row


def test_runners_of_other_widths_share_the_reserved_row_and_none_sees_what_another_left_there() -> None:
    single, wide = ToyEngine(max_bs=4), ToyEngine(max_bs=4, tokens_per_request=2)
    wide.cache = single.cache
    parked = single.cache[4:].random_(-2, 3, generator=torch.Generator().manual_seed(1)).clone()
    with (
        dg.DecodeCudaGraphRunner(single, config=config(bs=[4])) as one,
        dg.DecodeCudaGraphRunner(wide, config=config(bs=[4]), num_tokens_per_bs=2) as two,
    ):
        one.capture()
        two.capture()
        for seed in range(3):
            for engine, runner in ((single, one), (wide, two)):
                batch = engine.batch([3, 5, 2], seed)
                want = eager(engine, batch)
                single.cache[0] = float("nan")
                assert torch.equal(runner.run(batch), want)
                single.cache[0] = 0
    assert torch.equal(single.cache[4:], parked)


class MixesRows(ToyEngine):
    """A kernel that leaves padded rows unwritten, and one behind it that multiplies them by zero."""

    scale = 1.0

    def make_batch(self, views: Any, key: Any) -> Any:
        return dg.StaticBatch(**views, batch_size=key.size, live=key.size)

    @dg.eager_on_graph
    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[: dg.current_batch().live] * self.scale

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.attend(super().forward(batch))
        live = (batch.seq_lens > 1).float()
        return torch.outer(live, live) @ hidden


def test_rows_that_a_break_left_unwritten_spread_nothing_into_those_that_are_mixed_with_them() -> None:
    engine, oracle = MixesRows(max_bs=8), MixesRows(max_bs=8)

    def live(lengths: list[int]) -> dg.StaticBatch:
        return dg.StaticBatch(**vars(engine.batch(lengths)), live=len(lengths))

    with (
        dg.DecodeCudaGraphRunner(engine, config=config(backend="breakable", bs=[8])) as runner,
        dg.DecodeCudaGraphRunner(oracle, config=config(backend="disabled")) as plain,
    ):
        runner.capture()
        engine.scale = float("nan")
        assert runner.run(live([3] * 8)).isnan().all(), "every row of what the break leaves is poison"
        engine.scale = 1.0
        plain.run(live([3] * 8))
        for lengths in ([3, 5, 2], [4]):
            got = runner.run(live(lengths))
            assert got.isfinite().all()
            assert torch.equal(got, plain.run(live(lengths)))


# Random numbers


class Draws(ToyEngine):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + torch.rand(batch.input_ids.shape[0], 1, device=self.device)


def check_seeds(device: str) -> None:
    """Reseeding sets what a graph draws, wherever the generator stood when it was captured."""
    engine = Draws(device, max_bs=4)
    torch.manual_seed(5)
    with dg.DecodeCudaGraphRunner(
        engine, config=config(bs=[4]), graph_pool=dg.GraphMemoryPool(dg.get_device_adapter(device))
    ) as runner:
        runner.capture()
        batch = engine.batch([3, 5, 2, 4])

        def drawn(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            return [runner.run(batch).clone() for _ in range(3)]

        a, b, again = drawn(1), drawn(2), drawn(1)
        assert not torch.equal(a[0], a[1])
        assert not torch.equal(a[0], b[0])
        assert all(torch.equal(x, y) for x, y in zip(a, again, strict=True))


def test_a_seed_gives_its_numbers_again_and_two_replays_never_the_same() -> None:
    with torch.random.fork_rng(devices=[]):
        check_seeds("cpu")


def check_refuses_a_generator_of_its_own(device: str) -> None:
    class OwnGenerator(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + torch.rand(1, generator=self.generator, device=self.device)

    engine = OwnGenerator(device, max_bs=4)
    engine.generator = torch.Generator(device)
    with (
        dg.DecodeCudaGraphRunner(
            engine, config=config(bs=[4]), graph_pool=dg.GraphMemoryPool(dg.get_device_adapter(device))
        ) as runner,
        pytest.raises(dg.CaptureError),
    ):
        runner.capture()
    assert not runner.graphs


def test_a_generator_that_no_graph_knows_is_refused() -> None:
    check_refuses_a_generator_of_its_own("cpu")


# Life cycle


def test_a_pause_waits_first_and_a_paused_runner_leaves_its_backend_alone_until_it_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ToyEngine(max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4])) as runner:
        runner.capture()
        batch, idle = engine.batch([3, 5]), engine.batch([])
        want = eager(engine, batch)
        address = runner.run(batch).data_ptr()
        said: list[str] = []
        monkeypatch.setattr(type(runner.adapter), "synchronize", lambda self: said.append(f"waited, {runner._state}"))
        runner.pause()
        assert said == ["waited, open"]
        monkeypatch.undo()
        kept, forwards = engine.cache.clone(), list(engine.forwards)
        for replays in ("replay", "can_run", "replay_session"):
            monkeypatch.setattr(runner.backend, replays, lambda *_, **__: pytest.fail("the backend was asked"))
        for each in (batch, idle, engine.batch([3] * 5)):
            for step in (runner.run, runner.replay, runner.can_run, runner.replay_prepare):
                with pytest.raises(dg.ReplayError) as caught:
                    step(each)
                assert caught.value.code == "paused"
        monkeypatch.undo()
        assert engine.forwards == forwards
        assert torch.equal(engine.cache, kept)
        runner.resume()
        runner.resume()
        got = runner.run(batch)
        assert (got.data_ptr(), torch.equal(got, want)) == (address, True)


# Lists and limits


@pytest.mark.parametrize(
    ("bs", "limit", "kept"), [([8, 1, 4, 4, 2, 64], 6, [1, 2, 4, 6]), ([128], 64, [64]), (None, 1, [1]), ([3], 1, [1])]
)
def test_a_list_is_sorted_cut_to_the_limit_and_ends_there_and_buffers_are_as_large(
    bs: list[int] | None, limit: int, kept: list[int]
) -> None:
    engine = ToyEngine(max_bs=limit)
    with dg.DecodeCudaGraphRunner(engine, config=config(**({"bs": bs} if bs else {}))) as runner:
        assert list(runner.buckets) == kept
        assert runner.buffer_registry.max_bs == kept[-1]


def test_a_phase_of_which_no_bucket_is_left_says_so_and_serves_eagerly() -> None:
    engine = ToyEngine(max_bs=4)
    settings = dg.CudaGraphConfig(decode={"bs": [128]}, padding=False)
    with dg.DecodeCudaGraphRunner(engine, config=settings) as runner:
        assert list(runner.buckets) == []
        assert "128" in str(runner.buckets)
        report = runner.capture()
        assert not report.captured
        batch = engine.batch([3, 5])
        decision = runner.can_run(batch)
        assert not decision
        assert torch.equal(runner.run(batch), eager(engine, batch))
        assert sum(runner.metrics().eager.values()) == 1
