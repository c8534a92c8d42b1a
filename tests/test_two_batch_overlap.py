"""Two-batch overlap: halves of the padded batch as views, metadata for each, results as of the whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph.backends import split_ops
from devicegraph.plans import as_text, differences, plan_of
from engines import LENGTH, VOCABULARY, config
from overlapping_engine import Overlapping, eager


class Broken(Overlapping):
    """Attention runs between segments, on the half of the batch of the step."""

    def forward(self, batch: Any) -> torch.Tensor:
        if getattr(batch, "tbo_children", None) is None:
            return super().forward(batch)
        self.halves_run += 1
        hidden = [self.embed(half) for half in batch.tbo_children]
        return torch.cat([self.attend_half(number, each) for number, each in enumerate(hidden)])

    @dg.eager_on_graph
    def attend_half(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.attend(dg.current_batch().tbo_children[number], hidden)


class InGraph(Overlapping):
    """Prepares its lengths at the head of the graph."""

    prepare_metadata = None  # type: ignore[assignment]

    def prepare_in_graph(self, batch: Any, key: Any) -> None:
        Overlapping.prepare_metadata(self, batch, key)


@torch.library.custom_op("devicegraph_tests::attend_half", mutates_args=())
def attend_half(hidden: torch.Tensor, number: int) -> torch.Tensor:
    """Attention of a half of the batch of the step, as an operator that a compiled forward is split at."""
    half = dg.current_batch().tbo_children[number]
    return half.engine.attend(half, hidden)


@attend_half.register_fake
def _(hidden: torch.Tensor, number: int) -> torch.Tensor:
    return hidden.new_empty(len(hidden), VOCABULARY)


class Compiled(Overlapping):
    """The forward in a form that torch.compile takes."""

    def make_batch(self, views: dict[str, torch.Tensor], key: Any) -> Any:
        return SimpleNamespace(**views, batch_size=key.size, engine=self)

    def batch(self, *args: Any) -> Any:
        batch: Any = super().batch(*args)
        batch.engine = self
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        if getattr(batch, "tbo_children", None) is None:
            return super().forward(batch)
        return torch.cat([attend_half(self.embed(half), number) for number, half in enumerate(batch.tbo_children)])


def runner_for(engine: Any, bs: list[int] | None = None, backend: str = "full", **options: Any) -> Any:
    options.setdefault("registry", engine.registry)
    options.setdefault("tbo", dg.TboCudaGraphRunnerPlugin())
    tokens = engine.tokens_per_request
    phase = config(backend=backend, **({} if bs is None else {"bs": bs}))
    return dg.DecodeCudaGraphRunner(engine, config=phase, num_tokens_per_bs=tokens, **options)


@pytest.mark.parametrize(
    ("engine_class", "backend", "tokens"),
    [
        (Overlapping, "full", 1),
        (Overlapping, "full", 3),
        (InGraph, "full", 1),
        (Broken, "breakable", 1),
        (Broken, "breakable", 2),
    ],
)
def test_any_sequence_of_batches_gives_what_the_whole_gives_eagerly(
    engine_class: Any, backend: str, tokens: int
) -> None:
    engine = engine_class(tokens=tokens)
    with runner_for(engine, [2, 4, 8], backend) as runner:
        runner.capture()
        assert engine.halves_run > 0
        runs = engine.halves_run

        @settings(max_examples=8)
        @given(st.lists(st.lists(st.integers(tokens, LENGTH - 1), min_size=1, max_size=8), min_size=1, max_size=4))
        def check(steps: list[list[int]]) -> None:
            for seed, lengths in enumerate(steps):
                batch = engine.batch(lengths, seed)
                assert runner.can_run(batch)
                batch.lengths = batch.seq_lens
                want = eager(engine, batch)
                del batch.lengths
                assert torch.equal(runner.run(batch), want)

        check()
        proven = dg.verify(runner, [engine.batch([tokens + 1] * size) for size in (1, 3, 7)])
        assert (bool(proven), len(proven.padded), proven.held) == (True, 3, {})
        assert engine.halves_run == runs  # replays run no Python of the forward
        assert not hasattr(engine.batch([3]), "tbo_children")


@pytest.mark.filterwarnings("default")  # torch.compile warns of things of its own
@pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer")
def test_halves_of_a_compiled_forward_meet_the_batch_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op("devicegraph_tests::attend_half")
    torch._dynamo.reset()
    engine = Compiled()
    with runner_for(engine, [2, 4], "tc_piecewise") as runner:
        assert runner.capture().backend == "tc_piecewise"
        for seed, lengths in enumerate(([3, 4, 5], [2], [9, 8, 7, 6], [4, 4])):
            batch = engine.batch(lengths, seed)
            batch.lengths = batch.seq_lens
            want = eager(engine, batch)
            del batch.lengths
            assert torch.equal(runner.run(batch), want)
        assert runner.metrics().hit_rate == 1.0


def test_halves_are_the_same_views_of_the_padded_batch_in_capture_and_on_every_replay() -> None:
    engine = Overlapping(tokens=2, pp_proxy={"hidden": (3,)})
    plugin = dg.TboCudaGraphRunnerPlugin()
    seen: dict[int, list[Any]] = {}
    make_batch = engine.make_batch

    def remembered(views: dict[str, torch.Tensor], key: Any) -> Any:
        batch = make_batch(views, key)
        seen.setdefault(key.size, []).append(batch)
        return batch

    engine.make_batch = remembered  # type: ignore[method-assign]
    with runner_for(engine, [4, 8], tbo=plugin) as runner:
        runner.capture()
        for lengths in ([3, 4, 5], [2], [5] * 8, [4] * 4):
            batch: Any = engine.batch(lengths)
            batch.extras = {"kept": 1}
            static = runner.replay_prepare(batch)
            captured = seen[static.batch_size][-1]
            half, rows = static.batch_size // 2, 0
            assert static.tbo_split_seq_index == half
            for number, (now, then) in enumerate(zip(static.tbo_children, captured.tbo_children, strict=True)):
                assert type(now) is type(batch)
                assert (now.batch_size, now.tbo_parent_token_range) == (
                    half,
                    (number * 2 * half, (number + 1) * 2 * half),
                )
                assert now.extras is batch.extras
                for name in ("input_ids", "positions", "out_cache_loc", "seq_lens", "req_pool_indices"):
                    part, whole = getattr(now, name), getattr(static, name)
                    assert part.data_ptr() == getattr(then, name).data_ptr()
                    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                    assert torch.equal(part, whole.chunk(2)[number])
                rows += len(now.seq_lens)
            assert rows == static.batch_size
            planes = captured.tbo_children[1].mrope_positions
            assert torch.equal(planes, captured.mrope_positions[:, static.batch_size :])
            assert not hasattr(batch, "tbo_children")


def test_metadata_is_prepared_for_the_whole_and_each_half_in_capture_and_on_every_replay() -> None:
    engine = Overlapping()
    with runner_for(engine, [4], output_axes=[dg.RowAxis(0)]) as runner:
        runner.capture()
        key = dg.ShapeKey(4)
        three = [key, key._replace(stream_idx=0), key._replace(stream_idx=1)]
        assert engine.prepared == three
        tables = [table.data_ptr() for table in engine.tables.values()]
        assert len(set(tables)) == 3
        for lengths in ([3, 5, 7], [2], [9, 8, 7, 6]):
            engine.prepared.clear()
            runner.run(engine.batch(lengths))
            assert engine.prepared == three
            padded = [*lengths, *[1] * (4 - len(lengths))]
            assert [engine.tables[each].tolist() for each in three] == [padded, padded[:2], padded[2:]]
        assert [table.data_ptr() for table in engine.tables.values()] == tables
        engine.prepared.clear()
        runner.run(engine.batch([3] * 5))  # above the largest: eager, and whole
        assert engine.prepared == []


def test_an_audit_prepares_the_halves_at_the_head_of_the_graph_as_a_capture_does() -> None:
    engine = InGraph()
    three = [dg.ShapeKey(4), dg.ShapeKey(4, stream_idx=0), dg.ShapeKey(4, stream_idx=1)]
    engine.tables = {key: torch.zeros(rows, dtype=torch.int64) for key, rows in zip(three, (4, 2, 2), strict=True)}
    with runner_for(engine, [4]) as runner:
        report = runner.audit(constants=vars(engine))
        assert report.ok, str(report)
        assert engine.prepared == 2 * three


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_counts_of_a_half_are_its_own(rank: int | None) -> None:
    options: dict[str, Any] = {"enable_num_token_non_padded": True}
    if rank is not None:
        options |= {"require_gathered_buffer": True, "attn_tp_size": 2, "attn_tp_rank": rank}
        options |= {"register_global_num_tokens": True, "require_mlp_tp_gather": True, "num_dp_ranks": 3}
    engine = Overlapping(**options)
    with runner_for(engine, [4, 8]) as runner:
        runner.capture()
        for live, on_device in itertools.product(range(1, 9), (False, True)):
            batch: Any = engine.batch([3] * live)
            if on_device:
                batch.num_token_non_padded = torch.tensor(live)
            else:
                batch.num_token_non_padded_cpu = live
            static = runner.replay_prepare(batch)
            half = static.batch_size // 2
            for number, child in enumerate(static.tbo_children):
                tokens = range(number * half, (number + 1) * half)
                if rank is not None:
                    tokens = tokens[rank * half // 2 : (rank + 1) * half // 2]
                    assert child.global_num_tokens_gpu.tolist() == [half] * 3
                    assert child.global_num_tokens_for_logprob_gpu.tolist() == [half] * 3
                assert child.num_token_non_padded.tolist() == [sum(token < live for token in tokens)]


class Count:
    """The live requests, and those of either half, as a slot's `value_fn`."""

    def __call__(self, context: dg.FillContext) -> int:
        return context.raw_bs

    def halves(self, context: dg.FillContext) -> list[int]:
        middle = context.padded_bs // 2
        return [min(context.raw_bs, middle), max(context.raw_bs - middle, 0)]


def counted(name: str, shape: tuple[int, ...], value_fn: Any) -> dg.GraphSlot:
    return dg.GraphSlot(name, lambda bs, tokens: shape, torch.int32, axis="none", value_fn=value_fn)


def test_an_engines_own_counts_are_the_halves_in_any_form_and_rows_of_a_count_are_cut() -> None:
    class Several(Count):
        def halves(self, context: dg.FillContext) -> Any:
            return range(6)

    class Rows(Count):
        def __call__(self, context: dg.FillContext) -> Any:
            return range(context.padded_bs)

    engine = Overlapping()
    engine.registry.register_slot(counted("scalar", (), Count()))
    engine.registry.register_slot(counted("several", (3,), Several()))
    engine.registry.register_slot(
        dg.GraphSlot("numbers", lambda bs, tokens: (bs,), torch.int32, axis="bs", value_fn=Rows())
    )
    with runner_for(engine, [4, 8]) as runner:
        runner.capture()
        for live, want in ((3, (2, 1)), (5, (4, 1)), (8, (4, 4))):
            halves = runner.replay_prepare(engine.batch([3] * live)).tbo_children
            assert [half.scalar.shape for half in halves] == [torch.Size([])] * 2
            assert tuple(int(half.scalar) for half in halves) == want
            assert [half.several.tolist() for half in halves] == [[0, 1, 2], [3, 4, 5]]
            numbers = [row for half in halves for row in half.numbers.tolist()]
            assert numbers[:live] == list(range(live))
            assert len(numbers) == 2 * halves[0].batch_size


def test_another_runner_on_a_registry_whose_counts_were_halved_keeps_its_own_buckets() -> None:
    engine = Overlapping(require_gathered_buffer=True, enable_num_token_non_padded=True, attn_tp_size=2)
    with runner_for(engine, [2, 4, 6], tbo=None) as plain:
        plain.capture()
        with runner_for(engine, [4, 8]) as splitting:
            splitting.capture()
            for _ in range(2):
                for live in (1, 5):
                    batch: Any = engine.batch([3] * live)
                    want = eager(engine, SimpleNamespace(**vars(batch), lengths=batch.seq_lens))
                    for runner in (plain, splitting):
                        assert runner.can_run(batch)
                        assert torch.equal(runner.run(batch), want)
                plain.capture()


def test_buckets_are_those_that_halve_evenly() -> None:
    with runner_for(Overlapping()) as runner:
        assert list(runner.buckets) == [2, 4, 8]
    with runner_for(Overlapping(), [1, 2, 3, 6, 8]) as runner:
        assert list(runner.buckets) == [2, 6, 8]
    spread = Overlapping(require_gathered_buffer=True, enable_num_token_non_padded=True, attn_tp_size=2)
    with runner_for(spread, [2, 4, 6, 8]) as runner:
        assert list(runner.buckets) == [4, 8]


def test_ranks_of_which_one_splits_its_batches_have_different_plans() -> None:
    plans = [
        as_text(plan_of([runner_for(Overlapping(), [2, 4], tbo=tbo)])) for tbo in (dg.TboCudaGraphRunnerPlugin(), None)
    ]
    assert [found.path for found in differences(dict(enumerate(plans)))] == ["decode.tbo"]


def test_batches_may_be_mappings_and_one_without_a_place_for_halves_is_refused() -> None:
    class Mapping(Overlapping):
        def make_batch(self, views: dict[str, torch.Tensor], key: Any) -> Any:
            return {**views, "batch_size": key.size}

        def prepare_metadata(self, batch: Any, key: Any) -> None: ...

        def forward(self, batch: Any) -> torch.Tensor:
            halves = batch.get("tbo_children")
            if halves is None:
                return self.embedding[batch["input_ids"]]
            return torch.cat([self.embedding[half["input_ids"]] for half in halves])

    engine = Mapping()
    with runner_for(engine, [4]) as runner:
        runner.capture()
        ids = torch.tensor([3, 1, 2])
        assert torch.equal(runner.run({"input_ids": ids, "batch_size": 3}), engine.embedding[ids])

    class Closed:
        __slots__ = ("batch_size", "input_ids")

        def __init__(self, input_ids: torch.Tensor, batch_size: int) -> None:
            self.input_ids, self.batch_size = input_ids, batch_size

    engine.make_batch = lambda views, key: Closed(views["input_ids"], key.size)  # type: ignore[method-assign]
    with runner_for(engine, [4]) as runner, pytest.raises(dg.CaptureError, match="no field to show it in"):
        runner.capture()


def slot(name: str, **options: Any) -> dg.GraphSlot:
    return dg.GraphSlot(name, lambda bs, tokens: (bs + 1,), torch.int32, axis="bs", **options)


def test_a_slot_whose_halves_would_say_something_wrong_is_refused_and_nothing_changed() -> None:
    cumulative = Overlapping()
    cumulative.registry.register_slot(slot("cu_seqlens", slice_fn=lambda buffer, size: buffer[: size + 1]))
    total = Overlapping(register_global_num_tokens=True, enable_num_token_non_padded=True)
    shared = Overlapping(attn_tp_size=2, pp_proxy={"hidden": (3,)})
    taken = Overlapping()
    taken.registry.register_slot(counted("number", (1,), Count()))
    taken.registry.register_slot(counted("last", (1,), Count()))
    taken.registry.register_slot(counted("tbo_children.last", (2,), lambda context: 7))
    for engine, said in (
        (taken, "`last` has its halves counted in `tbo_children.last`, which is another slot already"),
        (cumulative, "`cu_seqlens` has other rows for both halves together than for each"),
        (total, "`global_num_tokens_gpu` counts tokens of the whole batch"),
        (shared, "`pp_proxy_tensors.hidden` has a rank's share of the whole batch"),
    ):
        names = engine.registry.slot_names
        with pytest.raises(dg.ConfigError, match=said) as caught:
            runner_for(engine)
        assert caught.value.code == "slot-not-splittable"
        assert engine.registry.slot_names == names


def test_a_plugin_is_for_one_runner_and_two_of_them_may_share_a_registry() -> None:
    engine, plugin = Overlapping(enable_num_token_non_padded=True), dg.TboCudaGraphRunnerPlugin()
    runner_for(engine, [2], tbo=plugin)
    with pytest.raises(dg.ConfigError, match="belongs to another runner") as caught:
        runner_for(engine, [2], tbo=plugin)
    assert caught.value.code == "plugin-in-use"
    runner_for(engine, [2])
    with pytest.raises(dg.ConfigError) as caught:
        runner_for(engine, [2], tbo=True)
    assert caught.value.code == "wrong-type"


def test_a_disabled_phase_and_a_recapture_work_with_it() -> None:
    engine = Overlapping()
    with runner_for(engine, [4], "disabled") as runner:
        runner.capture()
        batch: Any = engine.batch([3, 4])
        assert runner.run(batch).shape == (2, 32)
    with runner_for(engine, [4]) as runner:
        runner.capture()
        engine.registry.register_slot(
            dg.GraphSlot(
                "bias", lambda bs, tokens: (bs,), torch.float32, axis="bs", padding_policy=dg.PaddingPolicy.ZERO
            )
        )
        runner.capture()
        batch.bias = torch.tensor([1.0, 2.0])
        assert [half.bias.tolist() for half in runner.replay_prepare(batch).tbo_children] == [[1, 2], [0, 0]]
