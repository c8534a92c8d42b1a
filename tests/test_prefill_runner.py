"""The prefill runner on the CPU tape: requests of different lengths, chunks, and what is too small for its bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph import backends
from devicegraph.backends import split_ops, tc_piecewise
from engines import LENGTH, ToyPrefill


def runner_for(engine: Any, **options: Any) -> dg.PrefillCudaGraphRunner:
    prefill = {"backend": options.pop("word", "breakable")}
    prefill |= {key: options.pop(key) for key in ("bs", "max_bs") if key in options}
    return dg.PrefillCudaGraphRunner(engine, config=dg.CudaGraphConfig(prefill=prefill), **options)


def captured(engine: Any, **options: Any) -> dg.PrefillCudaGraphRunner:
    runner = runner_for(engine, **options)
    runner.capture()
    return runner


def eager(engine: ToyPrefill, batch: Any) -> torch.Tensor:
    """A runner without graphs runs the same hooks, and what they set."""
    kept = engine.cache.clone()
    with runner_for(engine, word="disabled") as runner:
        output = runner.run(batch)
    engine.cache.copy_(kept)
    return output


def test_the_default_buckets_go_up_to_the_engines_tokens() -> None:
    with runner_for(ToyPrefill()) as runner:
        sizes = [bucket.key.size for bucket in runner.capture().captured]
        assert sizes == [64, 48, 32, 28, 24, 20, 16, 12, 8, 4]


@pytest.mark.parametrize(
    ("device", "tokens", "code"),
    [("meta", 64, "registry-device"), ("cpu", 31, "registry-too-small"), ("cpu", 32, None)],
)
def test_a_registry_has_to_be_on_the_engines_device_and_to_hold_the_largest_bucket(
    device: str, tokens: int, code: str | None
) -> None:
    registry = dg.build_prefill_registry(device=device, max_bs=1, max_num_token=tokens)
    if code is None:
        assert runner_for(ToyPrefill(), registry=registry, bs=[32]).buffer_registry is registry
        return
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(ToyPrefill(), registry=registry, bs=[32])
    assert caught.value.code == code


@pytest.mark.parametrize(
    "requests",
    [
        [(1, 0, 5)],
        [(1, 0, 3), (2, 0, 7), (3, 0, 1)],
        [(4, 0, 16)],
        [(row, 0, 2) for row in range(1, 9)],
        [(1, 0, 1), (2, 0, 2)],
    ],
)
def test_prompts_of_different_lengths_in_one_batch_equal_eager(requests: list[tuple[int, int, int]]) -> None:
    engine, oracle = ToyPrefill(), ToyPrefill()
    with captured(engine) as runner:
        batch = engine.chunks(requests)
        assert runner.can_run(batch).code == "graph"
        want = eager(oracle, batch)
        got = runner.run(batch)
        assert got.shape == (sum(length for _, _, length in requests), 32)
        assert torch.equal(got, want)


def test_equal_token_counts_with_other_boundaries_are_not_mistaken() -> None:
    engine = ToyPrefill()
    with captured(engine, bs=[8]) as runner:
        for requests in ([(1, 0, 4), (2, 0, 4)], [(1, 0, 2), (2, 0, 6)], [(1, 0, 8)], [(1, 0, 4), (2, 0, 4)]):
            batch = engine.chunks(requests, seed=3)
            assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_prompt_in_chunks_leaves_what_the_whole_prompt_leaves() -> None:
    engine, whole = ToyPrefill(), ToyPrefill()
    with captured(engine) as runner:
        want = eager(whole, whole.chunks([(1, 0, 13)], seed=5))
        tokens = whole.chunks([(1, 0, 13)], seed=5)
        parts = []
        for start, length in ((0, 4), (4, 8), (12, 1)):
            batch = engine.chunks([(1, start, length)])
            batch.input_ids = tokens.input_ids[start : start + length]
            parts.append(runner.run(batch).clone())
        assert torch.equal(torch.cat(parts), want)


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=5, unique_by=lambda r: r[0]),
        min_size=1,
        max_size=6,
    )
)
def test_any_sequence_of_prompts_leaves_outputs_and_cache_as_eager_does(steps: list[list[tuple[int, int]]]) -> None:
    engine, oracle = ToyPrefill(), ToyPrefill()
    with captured(engine, bs=[8, 24, 64]) as runner, runner_for(oracle, word="disabled") as plain:
        for seed, requests in enumerate(steps):
            shape = [(row, 0, length) for row, length in requests]
            assert torch.equal(runner.run(engine.chunks(shape, seed)), plain.run(oracle.chunks(shape, seed)))
            assert torch.equal(engine.cache[1:], oracle.cache[1:])


def test_a_batch_whose_padding_more_than_doubles_its_work_runs_eagerly() -> None:
    engine = ToyPrefill()
    with captured(engine, bs=[4, 64]) as runner:
        assert runner.can_run(engine.chunks([(1, 0, 2)])).code == "graph"
        assert runner.can_run(engine.chunks([(1, 0, 1)])).code == "padding-too-large"
        assert runner.can_run(engine.chunks([(1, 0, 5)])).code == "padding-too-large"
        batch = engine.chunks([(1, 0, 16), (2, 0, 15)])
        assert runner.can_run(batch).code == "padding-too-large"
        assert torch.equal(runner.run(batch), eager(engine, batch))
        assert runner.metrics().eager == {"padding-too-large": 1}
        assert runner.can_run(engine.chunks([(1, 0, 16), (2, 0, 16)])).code == "graph"
    with captured(engine, bs=[64], max_padding_factor=64) as runner:
        assert runner.can_run(engine.chunks([(1, 0, 1)])).code == "graph"


def test_a_padding_factor_of_one_replays_batches_that_fill_a_bucket_and_no_others() -> None:
    engine = ToyPrefill()
    with captured(engine, bs=[1, 4], max_padding_factor=1) as runner:
        codes = [runner.can_run(engine.chunks([(1, 0, tokens)])).code for tokens in (1, 2, 3, 4)]
        assert codes == ["graph", "padding-too-large", "padding-too-large", "graph"]


def test_buffers_are_as_large_as_the_largest_bucket() -> None:
    for largest in (1, 8):
        with runner_for(ToyPrefill(), bs=[1, largest]) as runner:
            assert runner.buffer_registry.max_num_tokens == largest


@pytest.mark.parametrize("factor", [0, 0.5, True, float("nan"), -1, "2", None, []])
def test_a_padding_factor_below_one_is_refused(factor: Any) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(ToyPrefill(), max_padding_factor=factor)
    assert caught.value.code == "limit-invalid"


def test_decisions_and_an_empty_batch() -> None:
    engine = ToyPrefill(max_num_tokens=16)
    with captured(engine, bs=[8]) as runner:
        assert runner.can_run(engine.chunks([(1, 0, 8)])).code == "graph"
        assert runner.can_run(engine.chunks([(1, 0, 8), (2, 0, 1)])).code == "above-largest"
        assert runner.can_run(engine.chunks([])).code == "idle"


def test_more_requests_than_the_buffers_were_made_for_run_eagerly() -> None:
    engine = ToyPrefill(max_bs=4)
    engine.cache = torch.zeros(9, LENGTH, 8)
    with captured(engine, bs=[8]) as runner:
        batch = engine.chunks([(row, 0, 1) for row in range(1, 6)])
        assert runner.can_run(batch).code == "too-many-requests"
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_slot_with_a_row_for_each_request_is_refused() -> None:
    registry = dg.build_prefill_registry(device="cpu", max_bs=8, max_num_token=64)
    registry.register_slot(
        dg.GraphSlot("lora_ids", lambda bs, _: (bs,), torch.int64, axis="bs", padding_policy=dg.PaddingPolicy.ZERO)
    )
    with pytest.raises(dg.ConfigError, match="slot `lora_ids` has a row for each request") as caught:
        runner_for(ToyPrefill(), registry=registry)
    assert caught.value.code == "slot-per-request"


class Variants(ToyPrefill):
    """Gives a tensor, or a pair of them."""

    variants = (None, "pair")

    def variant(self, batch: Any) -> Any:
        return getattr(batch, "label", None)

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        batch = super().make_batch(views, key)
        batch.label = key.variant_label
        return batch

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        return logits if batch.label is None else (logits, logits * 2)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_variants_of_other_forms_have_outputs_of_their_own_one_for_all_buckets(order: Any, debug: bool) -> None:
    engine = Variants()
    adapter = dg.get_device_adapter("cpu")
    backend = dg.BreakableCudaGraphBackend(adapter, phase="prefill", debug=debug)
    with captured(engine, bs=[4, 8, 16], order=order, backend=backend) as runner:
        addresses: dict[Any, set[Any]] = {None: set(), "pair": set()}
        for seed, length in enumerate((3, 8, 13, 4)):
            for label in (None, "pair"):
                batch = engine.chunks([(1, 0, length)], seed)
                batch.label = label
                want = eager(engine, batch)
                got = runner.run(batch)
                tensors = [got] if label is None else got
                wanted = [want] if label is None else want
                assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))
                addresses[label].add(tuple(tensor.data_ptr() for tensor in tensors))
        assert runner.metrics().hit_rate == 1.0
        assert [len(found) for found in addresses.values()] == [1, 1]


def test_full_is_no_backend_of_prefill() -> None:
    with pytest.raises(dg.ConfigError):
        dg.CudaGraphConfig(prefill={"backend": "full"})


def test_the_break_takes_the_batch_of_the_step_and_not_what_the_model_left_on_itself() -> None:
    class Leaves(ToyPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            self.left = batch
            return super().forward(batch)

    engine = Leaves()
    seen: list[Any] = []
    plain = engine._attend = ToyPrefill.attend

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        seen.append((dg.current_batch().lengths, len(engine.left.input_ids)))
        return plain(engine, hidden)

    engine.attend = dg.eager_on_graph(watch)
    with captured(engine, bs=[4, 8]) as runner:
        seen.clear()
        runner.run(engine.chunks([(1, 0, 3), (2, 0, 4)]))
        # The attribute is the last capture's, of bucket 4; the batch is this step's, in bucket 8.
        assert seen == [([3, 4], 4)]


class Embeds(ToyPrefill):
    """Takes embeddings that the engine computed, and rotary positions of three planes."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = dg.build_prefill_registry(
            device="cpu", max_bs=8, max_num_token=64, is_multimodal=True, hidden_size=8, embed_dtype=torch.float32
        )

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = batch.input_embeds + self.position[batch.mrope_positions].sum(0)
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        return self.attend(hidden) @ self.head


def test_input_embeddings_and_rotary_planes_are_slots_of_a_multimodal_prefill() -> None:
    engine = Embeds()
    with captured(engine, registry=engine.registry) as runner:
        embeds = engine.registry.get_slot("input_embeds").buffer
        for seed, requests in enumerate([[(1, 0, 9), (2, 0, 4)], [(1, 0, 3)], [(3, 0, 16)]]):
            batch = engine.chunks(requests, seed)
            tokens = len(batch.input_ids)
            # The engine writes the embeddings where the graph reads them; a fill clears what is behind them.
            values = engine.embedding[batch.input_ids]
            embeds.fill_(float("nan"))
            embeds[:tokens] = values
            batch.mrope_positions = torch.arange(3 * tokens).view(3, tokens) % LENGTH
            got = runner.run(batch)
            batch.input_embeds = values
            assert torch.equal(got, eager(engine, batch))
            assert runner.metrics().eager == {}


def test_multimodal_slots_need_their_sizes() -> None:
    with pytest.raises(dg.SlotError) as caught:
        dg.build_prefill_registry(device="cpu", max_bs=8, max_num_token=64, is_multimodal=True)
    assert caught.value.code == "option-missing"


def test_a_largest_bucket_that_runs_out_of_memory_is_dropped_although_outputs_are_sized_by_it() -> None:
    class Large(ToyPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            if len(batch.input_ids) == 16:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(batch)

    engine = Large()
    for order in ("descending", "ascending"):
        with runner_for(engine, bs=[4, 8, 16], order=order) as runner:
            report = runner.capture()
            assert sorted(bucket.key.size for bucket in report.captured) == [4, 8]
            assert [bucket.key.size for bucket in report.dropped] == [16]
            for length in (7, 3, 8):
                batch = engine.chunks([(1, 0, length)], seed=length)
                assert torch.equal(runner.run(batch), eager(engine, batch))
    with runner_for(engine, bs=[4, 8, 16], on_error="raise") as runner, pytest.raises(dg.CaptureError) as caught:
        runner.capture()
    assert (caught.value.code, caught.value.shape_key) == ("out-of-memory", dg.ShapeKey(16))


def test_the_engines_barrier_aligns_ranks_before_warm_ups_and_behind_segments() -> None:
    class Ranked(ToyPrefill):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[str] = []

        def barrier(self) -> None:
            self.log.append("barrier")

        def forward(self, batch: Any) -> torch.Tensor:
            self.log.append("forward")
            return super().forward(batch)

    engine = Ranked()
    with runner_for(engine, bs=[8]) as runner, runner.backend.capture_session():
        runner.capture_one_shape(8)
        # Two warm-ups, then the capture with a segment on each side of attention; the rest looks for the output's rows.
        assert engine.log[:7] == ["barrier", "forward", "barrier", "forward", "forward", "barrier", "barrier"]
        engine.log.clear()
        runner.run(engine.chunks([(1, 0, 6)]))
        assert engine.log == []


@pytest.mark.parametrize(
    ("oldest", "operators", "reason"),
    [
        ("2.6", {}, "no-split-ops"),
        ("99.0", {"a::b": None}, "torch-too-old"),
        ("99.0", {}, "torch-too-old"),
        ("2.6", {"a::b": None}, "not-on-device"),
    ],
)
def test_where_pieces_cannot_be_had_the_phase_is_breakable_and_says_why(
    oldest: str, operators: dict[str, None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "OLDEST_TORCH_FOR_PIECES", oldest)
    monkeypatch.setattr(split_ops, "_registered", operators)
    if reason == "not-on-device":
        monkeypatch.delitem(backends._BACKENDS, "cpu:tc_piecewise")
    engine = ToyPrefill()
    with runner_for(engine, word="tc_piecewise", bs=[8]) as runner:
        report = runner.capture()
        assert (report.backend, report.fallback) == ("breakable", reason)
        assert str(report).startswith(f"prefill, backend `breakable` ({reason})")
        assert report.to_dict()["fallback"] == reason
        batch = engine.chunks([(1, 0, 3), (2, 0, 4)])
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_a_torch_that_is_too_old_for_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tc_piecewise, "OLDEST_TORCH_FOR_PIECES", "99.0")
    with pytest.raises(dg.BackendError, match=r"`tc_piecewise` needs torch 99\.0, this is ") as caught:
        dg.TcPiecewiseCudaGraphBackend(dg.get_device_adapter("cpu"), phase="prefill")
    assert (caught.value.code, caught.value.hint) == ("torch-too-old", "use the backend `breakable`")
