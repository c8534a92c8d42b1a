"""Stages of a pipeline: what one sends is an input of the next, with a rank's share of the bucket's tokens as rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg

WIDTH, RANKS = 5, 4


class Proxies:
    """As engines have them: a class of their own around a dictionary."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class FirstStage:
    """Embeds its tokens and sends this rank's share of them on."""

    device, limits = "cpu", dg.Limits(32, 64)

    def __init__(self, rank: int, tokens: int = 1) -> None:
        self.rank, self.tokens = rank, tokens
        self.embedding = torch.arange(100.0)[:, None] + torch.arange(WIDTH) / 8

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        length = len(rows) // RANKS
        return rows[self.rank * length : (self.rank + 1) * length]

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        mine = self.share(self.embedding[batch.input_ids])
        return {"hidden": mine * 2, "residual": mine}


class LastStage(FirstStage):
    """Goes on from what the stage before sent, and sends the same form on."""

    proxies: type = dict

    def registry(self, **options: Any) -> dg.CudaGraphBufferRegistry:
        return dg.build_decode_registry(
            device="cpu",
            max_bs=32,
            max_num_token=32 * self.tokens,
            seq_len_fill_value=1,
            num_tokens_per_bs=self.tokens,
            attn_tp_size=RANKS,
            pp_proxy={"hidden": (WIDTH,), "residual": (WIDTH,)},
            **options,
        )

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        proxies, ids = batch.pp_proxy_tensors, self.share(batch.input_ids)
        hidden = proxies["hidden"] + proxies["residual"] + ids[:, None]
        return {"hidden": hidden, "residual": hidden + 1}


def runner_for(engine: Any, bs: list[int] | None, **options: Any) -> dg.DecodeCudaGraphRunner:
    config = dg.CudaGraphConfig(decode={"backend": options.pop("named", "full"), **({"bs": bs} if bs else {})})
    return dg.DecodeCudaGraphRunner(engine, config=config, num_tokens_per_bs=engine.tokens, **options)


def padded_batch(bs: int, bucket: int, tokens: int, seed: int = 0) -> tuple[Any, Any]:
    """A live batch, and the whole bucket as the ranks share it out, padded with zeros."""
    ids = torch.randint(1, 100, (bs * tokens,), generator=torch.Generator().manual_seed(seed))
    whole = torch.cat([ids, torch.zeros((bucket - bs) * tokens, dtype=torch.int64)])
    return SimpleNamespace(input_ids=ids, batch_size=bs), SimpleNamespace(input_ids=whole, batch_size=bucket)


@pytest.mark.parametrize(
    ("rank", "proxies", "backend"), [(0, dict, "full"), (RANKS - 1, Proxies, "full"), (1, Proxies, "breakable")]
)
def test_a_later_stage_has_its_share_of_the_bucket_in_capture_replay_and_output(
    rank: int, proxies: type, backend: str
) -> None:
    first, last = FirstStage(rank), LastStage(rank)
    registry = last.registry()
    seen: list[tuple[int, ...]] = []
    forward = last.forward
    last.forward = lambda batch: (seen.append(batch.pp_proxy_tensors["hidden"].shape), forward(batch))[1]  # type: ignore[method-assign]
    with runner_for(last, [8, 32], registry=registry, named=backend) as runner:
        runner.capture()
        assert set(seen) == {(2, WIDTH), (8, WIDTH)}
        for seed, (bs, bucket) in enumerate([(32, 32), (30, 32), (5, 8), (9, 32), (8, 8), (1, 8)]):
            batch, whole = padded_batch(bs, bucket, 1, seed)
            sent = first.forward(whole)
            whole.pp_proxy_tensors = sent
            batch.pp_proxy_tensors = proxies(sent)
            registry.get_slot("input_ids").buffer.zero_()  # rows of earlier steps are its padding
            static = runner.replay_prepare(batch)
            assert type(static.pp_proxy_tensors) is proxies
            assert static.pp_proxy_tensors["hidden"].shape == (bucket // RANKS, WIDTH)
            slot = registry.get_slot("pp_proxy_tensors.hidden")
            assert static.pp_proxy_tensors["hidden"].data_ptr() == slot.buffer.data_ptr()
            assert batch.pp_proxy_tensors["hidden"] is sent["hidden"]
            output = runner.run(batch)
            want = forward(whole)
            for name in want:
                assert output[name].shape == (bucket // RANKS, WIDTH)
                assert torch.equal(output[name], want[name])


def test_two_stages_of_any_sizes_give_what_both_give_eagerly() -> None:
    tokens = 3
    first, last = FirstStage(1, tokens), LastStage(1, tokens)
    spread = dg.build_decode_registry(
        device="cpu", max_bs=32, max_num_token=96, seq_len_fill_value=1, num_tokens_per_bs=tokens
    )
    spread.token_alignment = RANKS
    first.limits = last.limits = dg.Limits(32, 96)
    registry = last.registry()
    with (
        runner_for(first, [4, 8, 16], registry=spread) as before,
        runner_for(last, [4, 8, 16], registry=registry) as after,
    ):
        before.capture()
        after.capture()

        @settings(max_examples=12)
        @given(st.integers(1, 16), st.integers(0, 99))
        def check(bs: int, seed: int) -> None:
            for each in (spread, registry):
                each.get_slot("input_ids").buffer.zero_()
            batch, whole = padded_batch(bs, next(size for size in (4, 8, 16) if size >= bs), tokens, seed)
            batch.pp_proxy_tensors = before.run(batch)
            whole.pp_proxy_tensors = first.forward(whole)
            for got, want in zip(after.run(batch).values(), last.forward(whole).values(), strict=True):
                assert torch.equal(got, want)

        check()


def test_a_later_stage_prefills_with_its_share_of_the_tokens() -> None:
    first, last = FirstStage(2), LastStage(2)
    first.limits = last.limits = dg.Limits(4, 32)
    registry = dg.build_prefill_registry(
        device="cpu",
        max_bs=4,
        max_num_token=32,
        attn_tp_size=RANKS,
        pp_proxy={"hidden": (WIDTH,), "residual": (WIDTH,)},
    )
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [6, 8, 16, 32]})
    with dg.PrefillCudaGraphRunner(last, config=config, registry=registry) as runner:
        assert list(runner.buckets) == [8, 16, 32]
        runner.capture()
        for tokens, bucket in ((8, 8), (13, 16), (20, 32)):
            batch, whole = padded_batch(tokens, bucket, 1, tokens)
            batch.batch_size = 2
            batch.pp_proxy_tensors = whole.pp_proxy_tensors = first.forward(whole)
            for got, want in zip(runner.run(batch).values(), last.forward(whole).values(), strict=True):
                assert got.shape == (bucket // RANKS, WIDTH)
                assert torch.equal(got, want)


def test_a_stage_that_is_sent_nothing_replays_no_rows_of_the_step_before() -> None:
    last = LastStage(0)
    registry = last.registry()
    last.forward = lambda batch: batch.input_ids * 2  # type: ignore[assignment, method-assign, return-value]
    with runner_for(last, [4, 8], registry=registry) as runner:
        runner.capture()
        sent, whole = padded_batch(3, 4, 1)
        sent.pp_proxy_tensors = FirstStage(0).forward(whole)
        assert runner.can_run(sent)
        buffers = registry.group("pp_proxy_tensors", padded_bs=32, padded_num_tokens=32)
        for buffer in buffers.values():
            buffer.fill_(7)
        batch = padded_batch(3, 4, 1)[0]
        decision = runner.can_run(batch)
        assert (decision.code, decision.fields) == ("field-missing", ("pp_proxy_tensors",))
        assert torch.equal(runner.run(batch), batch.input_ids * 2)
        assert all((buffer == 7).all() for buffer in buffers.values())


@pytest.mark.parametrize("options", [{"copy_from_fb": False}, {"source_fn": lambda batch, context: None}])
def test_a_stage_whose_buffers_are_written_otherwise_needs_no_proxies_in_its_batches(options: Any) -> None:
    registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    shape = lambda bs, tokens: (tokens, 2)  # noqa: E731
    registry.register_slot(dg.GraphSlot("pp_proxy_tensors.hidden", shape, torch.float32, **options))

    class Stage:
        device, limits = torch.device("cpu"), dg.Limits(max_bs=4, max_num_tokens=4)

        def forward(self, batch: Any) -> Any:
            return batch.pp_proxy_tensors["hidden"] + batch.input_ids[:, None]

    config = dg.CudaGraphConfig(decode={"bs": [4]})
    with dg.DecodeCudaGraphRunner(Stage(), config=config, registry=registry, output_axes=[dg.RowAxis(0)]) as runner:
        runner.capture()
        received = registry.get_slot("pp_proxy_tensors.hidden").buffer
        for step in (1.0, 2.0):
            received.fill_(step)
            batch = SimpleNamespace(input_ids=torch.arange(3), batch_size=3)
            assert runner.can_run(batch).code == "graph"
            assert torch.equal(runner.run(batch), torch.arange(3)[:, None] + torch.full((3, 2), step))


def test_a_graph_whose_batch_shows_no_proxies_takes_none() -> None:
    last = LastStage(0)
    last.make_batch = lambda views, key: SimpleNamespace(**views, batch_size=key.size, pp_proxy_tensors=None)  # type: ignore[attr-defined]
    forward = last.forward
    last.forward = lambda batch: FirstStage.forward(last, batch) if batch.pp_proxy_tensors is None else forward(batch)  # type: ignore[method-assign]
    with runner_for(last, [4, 8], registry=last.registry()) as runner:
        runner.capture()
        batch, whole = padded_batch(4, 4, 1)
        batch.pp_proxy_tensors = None
        assert runner.can_run(batch)
        batch.pp_proxy_tensors = FirstStage(0).forward(whole)
        decision = runner.can_run(batch)
        assert (decision.code, decision.fields) == ("field-unexpected", ("pp_proxy_tensors",))
        assert torch.equal(runner.run(batch)["hidden"], forward(batch)["hidden"])


def test_buckets_are_multiples_of_the_ranks_and_dropped_ones_are_listed() -> None:
    last = LastStage(0)
    with runner_for(last, None, registry=last.registry()) as runner:
        assert list(runner.buckets) == [4, 8, 12, 16, 24, 32]
    with runner_for(last, [2, 4, 6, 32], registry=last.registry()) as runner:
        assert list(runner.buckets) == [4, 32]
        assert [(dropped.size, dropped.code) for dropped in runner.buckets.dropped] == [
            (2, "bucket-not-aligned"),
            (6, "bucket-not-aligned"),
        ]
    spec = LastStage(0, tokens=2)
    with runner_for(spec, [1, 2, 3, 4], registry=spec.registry()) as runner:
        assert list(runner.buckets) == [2, 4]
    assert dg.get_batch_sizes_to_capture(
        last, config=dg.CudaGraphConfig(decode={"max_bs": 12}), token_alignment=RANKS
    ) == ([4, 8, 12], [])
    assert dg.get_batch_sizes_to_capture(
        last, config=dg.CudaGraphConfig(decode={"max_bs": 8}), alignment=2, token_alignment=2 * RANKS
    ) == ([8], [])


def test_a_bucket_that_is_no_equal_shares_is_refused_at_registration_and_at_capture() -> None:
    with pytest.raises(dg.SlotError) as caught:
        dg.build_decode_registry(
            device="cpu",
            max_bs=30,
            max_num_token=30,
            seq_len_fill_value=1,
            attn_tp_size=RANKS,
            pp_proxy={"hidden": (5,)},
        )
    assert caught.value.code == "bucket-not-divisible"
    last = LastStage(0)
    registry = dg.build_decode_registry(device="cpu", max_bs=32, max_num_token=32, seq_len_fill_value=1)
    with runner_for(last, [6, 8], registry=registry) as runner:
        # A slot that comes after the runner has made its buckets.
        registry.register_slot(
            dg.GraphSlot(
                "pp_proxy_tensors.hidden",
                lambda bs, tokens: (tokens // RANKS, WIDTH),
                torch.float32,
                slice_fn=lambda buffer, size: buffer[: size // RANKS],
                source_fn=lambda batch, context: None,
            )
        )
        with pytest.raises(dg.CaptureError, match="a bucket of 6 is not a multiple of 4"):
            runner.capture()
        assert not runner.graphs


def test_a_share_that_could_be_a_row_for_each_request_is_for_output_axes_to_tell() -> None:
    last = LastStage(0, tokens=RANKS)
    last.limits = dg.Limits(8, 32)
    registry = dg.build_decode_registry(
        device="cpu",
        max_bs=8,
        max_num_token=32,
        seq_len_fill_value=1,
        attn_tp_size=RANKS,
        pp_proxy={"hidden": (WIDTH,), "residual": (WIDTH,)},
    )
    with runner_for(last, [4, 8], registry=registry) as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert caught.value.code == "output-rows"
        assert "1 for each unit, or this rank's share of the tokens" in caught.value.message
    with runner_for(last, [4, 8], registry=registry, output_axes=[None, None]) as runner:
        runner.capture()
        batch, whole = padded_batch(3, 4, RANKS)
        batch.pp_proxy_tensors = FirstStage(0, RANKS).forward(whole)
        assert runner.run(batch)["hidden"].shape == (4, WIDTH)


def test_a_single_bucket_of_the_least_size_is_for_output_axes_to_tell() -> None:
    last = LastStage(0)
    with (
        runner_for(last, [4], registry=last.registry()) as runner,
        pytest.raises(dg.CaptureError, match="no smaller one is a multiple of 4"),
    ):
        runner.capture()
