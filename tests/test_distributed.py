"""Ranks in processes of their own: they choose alike, refuse each other's plans, and outlive one that fails or dies."""

from __future__ import annotations

import itertools
import json
import pickle
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph import distributed
from devicegraph.plans import as_text, differences, plan_of
from engines import ToyEngine, config
from rank_cases import IMPATIENT_S, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT = Path(__file__).parent / "rank_cases.py"
PAGE = (Path(__file__).parent.parent / "docs" / "ranks.md").read_text(encoding="utf-8")
LIVING = (0, 1, 3)


@pytest.fixture(scope="module")
def groups() -> dict[str, Any]:
    """What each rank of each group of processes saw; they are started once for all tests, and ended if they hang."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert all("error" not in rank for ranks in outcomes.values() for rank in ranks), done.stderr
    return outcomes


@pytest.fixture
def ranks(groups: dict[str, Any]) -> dict[int, Any]:
    """The results of the data-parallel ranks that live to the end, by rank."""
    outcomes = groups["data_parallel"]
    assert [outcome["exit"] for outcome in outcomes] == [0, 0, 3, 0]
    return {rank: outcomes[rank]["result"] for rank in LIVING}


# What ranks do together.


def test_ranks_of_different_sizes_take_the_same_graph_or_all_run_eagerly(ranks: dict[int, Any]) -> None:
    steps = [
        [(s["code"], s["bucket"]) for s in found] for found in zip(*(r["steps"] for r in ranks.values()), strict=True)
    ]
    assert len(steps) == len(STEPS)
    together, idle, exact, above, larger = steps
    assert together == larger == [("graph", 8)] * 3
    assert exact == [("graph", 1)] * 3
    assert idle == [("idle", None)] * 3
    assert above == [("bucket-dropped", None), ("voted-eager", None), ("voted-eager", None)]
    # Nor is there a graph for ranks that are in different phases.
    assert [found["phases"] for found in ranks.values()] == [False] * 3


def test_each_rank_gets_what_its_own_forward_gives_and_an_idle_one_no_row(ranks: dict[int, Any]) -> None:
    assert all(step["is_right"] for found in ranks.values() for step in found["steps"])


def test_a_bucket_that_one_rank_cannot_capture_is_dropped_on_all_and_said_of_whom(ranks: dict[int, Any]) -> None:
    assert all(found["captured"] == [8, 4, 1] for found in ranks.values())
    assert ranks[0]["dropped"] == ranks[1]["dropped"] == [[16, "it could not be captured on rank 3"]]
    ((size, reason),) = ranks[3]["dropped"]
    assert size == 16
    assert "tried to allocate 2 GiB" in reason


@pytest.mark.parametrize("case", ["fails in a warm-up", "fails in the capture", "fails in a segment"])
def test_a_forward_that_fails_on_one_rank_ends_the_capture_on_all_and_they_can_capture_again(
    case: str, ranks: dict[int, Any]
) -> None:
    assert ranks[1][case]["codes"] == ["forward-failed", "ValueError"]
    for other in (0, 3):
        assert ranks[other][case]["codes"] == ["other-rank-failed"]
        assert "decode: capturing bucket 4 failed on rank 1 " in ranks[other][case]["text"]
    assert all(found[f"{case}, again"] == [8, 4, 1] for found in ranks.values())


def test_ranks_with_another_plan_are_refused_by_name_with_what_differs_and_can_try_again(ranks: dict[int, Any]) -> None:
    for found in ranks.values():
        assert found["plans differ"]["codes"] == ["plans-differ"]
        assert found["plans differ"]["ranks"] == [[2, 3]]
        assert found["plans agree"]["codes"] == []
    assert ranks[0]["plans differ"]["text"] == SNAPSHOT


SNAPSHOT = """\
the plan of ranks 2, 3 is not that of the others:
- `decode.config.bs`: [1, 4] on rank 2; [1, 4, 8] on ranks 0, 1, 3
- `decode.buckets`: [1, 4] on rank 2; [1, 4, 8] on ranks 0, 1, 3
- `decode.order`: "ascending" on rank 3; "descending" on ranks 0, 1, 2
- `decode.slots.input_ids`: int64 [4], axis tokens, FOREACH_COPY 0 on rank 2; int64 [8], axis tokens, FOREACH_COPY 0 on ranks 0, 1, 3
- `decode.slots.positions`: int64 [4], axis tokens, ZERO 0 on rank 2; int64 [8], axis tokens, ZERO 0 on ranks 0, 1, 3
- `decode.slots.out_cache_loc`: int64 [4], axis tokens, ZERO 0 on rank 2; int64 [8], axis tokens, ZERO 0 on ranks 0, 1, 3
- `decode.slots.mrope_positions`: int64 [3, 4], axis tokens, ZERO 0 on rank 2; int64 [3, 8], axis tokens, ZERO 0 on ranks 0, 1, 3
- `decode.slots.req_pool_indices`: int64 [4], axis bs, ZERO 0 on rank 2; int64 [8], axis bs, ZERO 0 on ranks 0, 1, 3
- and 2 more [plans-differ]

hint: start every rank with the same options and engine; graphs that differ would hang in a collective"""  # noqa: E501


def test_the_page_shows_a_refusal_as_it_is() -> None:
    plans = {rank: as_text({"decode.buckets": "[2, 4]" if rank == 1 else "[2, 4, 8]"}) for rank in range(4)}
    assert f"- {differences(plans)[0]} [plans-differ]\n" in PAGE


def test_the_page_has_every_code() -> None:
    source = Path(distributed.__file__).read_text(encoding="utf-8")
    table = PAGE.partition("## When a rank is missing")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == set(re.findall(r'code="([a-z-]+)"', source)) - {
        "limit-invalid"
    }


# Ranks that are missing.


def test_a_rank_that_fails_elsewhere_and_leaves_ends_the_others_wait_at_once_with_its_name(
    ranks: dict[int, Any],
) -> None:
    assert ranks[3]["leaves"]["codes"] == ["ValueError"]
    for other in (0, 1):
        assert ranks[other]["leaves"]["codes"] == ["rank-left"]
        assert ranks[other]["leaves"]["ranks"] == [[3]]
        assert ranks[other]["leaves"]["text"].startswith("barrier 1: it goes on without rank 3 [rank-left]\n\nhint: ")


def test_a_rank_that_does_not_vote_is_named_to_the_others_when_their_time_is_over_and_to_itself_when_it_comes(
    ranks: dict[int, Any],
) -> None:
    for found in ranks.values():
        assert found["late"]["codes"] == found["late, again"]["codes"] == ["rank-late"]
        assert found["late"]["ranks"] == [[1]]
        assert found["late"]["text"] == found["late, again"]["text"]
    assert ranks[0]["late"]["text"].startswith(f"vote 8: rank 1 did not come within {IMPATIENT_S} s [rank-late]\n\n")
    assert ranks[1]["late"]["text"].startswith("vote 8: this rank, 1, came when the others had given it up")


def test_a_rank_that_dies_in_a_capture_ends_it_on_the_others_with_its_name(ranks: dict[int, Any]) -> None:
    for found in ranks.values():
        # The vote on the bucket, the capture of it that failed, and the barrier where that was noticed.
        assert found["dies"]["codes"] == ["rank-late"] * 3
        assert found["dies"]["ranks"] == [[2], [2]]
        assert found["graphs left"] == 0


def test_ranks_that_lost_another_one_go_on_eagerly_when_they_have_left_and_close(ranks: dict[int, Any]) -> None:
    for found in ranks.values():
        assert found["late, then alone"] == {"code": "voted-eager", "bucket": None, "is_right": True}
        assert found["dies, then alone"] == {"code": "not-captured", "bucket": None, "is_right": True}
        assert found["closed"] == [["closed"], False]


def test_where_no_launcher_holds_the_store_the_death_of_the_rank_that_does_is_an_error_too(
    groups: dict[str, Any],
) -> None:
    gone, left = groups["without_launcher"]
    assert (gone["exit"], left["exit"]) == (3, 0)
    assert left["result"]["codes"][0] == "store-lost"
    assert "the store of `torch.distributed` does not answer" in left["result"]["text"]


# Tensor parallel.


def test_a_decoder_shared_by_two_ranks_decodes_as_the_whole_one_does_in_all_backends(groups: dict[str, Any]) -> None:
    first, second = groups["tensor_parallel"]
    assert (first["exit"], second["exit"]) == (0, 0)
    assert first["result"] == second["result"]
    assert set(first["result"]["tensor parallel"]) == {
        f"{backend} {dtype}" for backend in ("full", "breakable") for dtype in ("float32", "bfloat16")
    }
    assert first["result"]["data parallel"] == ["graph", "eager", "graph", "eager", "graph"]


def test_a_functional_collective_is_recorded_and_waited_for_on_replay(groups: dict[str, Any]) -> None:
    for rank in groups["functional_collective"]:
        assert rank["exit"] == 0
        assert rank["result"] == [[0, 3, 6], [15, 18, 21]]


# Ranks that come while they are given up.

THREE = (0, 1, 2)


class Steps:
    """A store for ranks in threads, of which one at a time does one thing, in the order that a test wants."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.turns = {rank: threading.Semaphore(0) for rank in THREE}
        #: Whether the rank is at its next step, or through.
        self.states: dict[int, queue.SimpleQueue[bool]] = {rank: queue.SimpleQueue() for rank in THREE}

    def run(self, task: Callable[[int], object], order: list[int]) -> dict[int, Any]:
        """What the task of each rank returns or raises."""
        found: dict[int, Any] = {}

        def do(rank: int) -> None:
            try:
                found[rank] = task(rank)
            except dg.RankError as error:
                found[rank] = error
            self.states[rank].put(False)

        threads = [threading.Thread(target=do, args=(rank,)) for rank in THREE]
        for thread in threads:
            thread.start()
        going = {rank for rank in THREE if self.states[rank].get()}
        for rank in itertools.chain(order, itertools.cycle(THREE)):
            if not going:
                break
            if rank in going:
                self.turns[rank].release()
                going -= set() if self.states[rank].get() else {rank}
        for thread in threads:
            thread.join()
        return found


class StepStore:
    """The store of one rank."""

    def __init__(self, steps: Steps, rank: int) -> None:
        self._steps, self._rank, self._values = steps, rank, steps.values

    def _step(self) -> None:
        self._steps.states[self._rank].put(True)
        self._steps.turns[self._rank].acquire()

    def set(self, key: str, value: str) -> None:
        self._step()
        self._values[key] = value.encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.check(keys):
            raise RuntimeError("timeout")

    def check(self, keys: list[str]) -> bool:
        self._step()
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = []
        for key in keys:  # one by one, as not every store has them all in one go
            self._step()
            found.append(self._values[key])
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        self._step()
        return self._values.setdefault(key, desired.encode())


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ranks_whose_time_is_over_while_others_come_all_have_the_vote_or_none_has() -> None:
    @settings(max_examples=150)
    @example([0] * 5 + [1] * 2 + [2] * 6 + [0, 0])  # the last one comes when the first one gives it up
    @given(st.lists(st.sampled_from(THREE), max_size=40))
    def check(order: list[int]) -> None:
        steps = Steps()

        def vote(rank: int) -> dg.Proposal:
            ranks = dg.RankGroup(limit_s=1e-9)
            ranks.rank, ranks.ranks = rank, THREE
            ranks._store = StepStore(steps, rank)
            return ranks.vote(dg.Proposal(True, 1 + rank))

        found = steps.run(vote, order)
        voted = [rank for rank in THREE if not isinstance(found[rank], dg.RankError)]
        if voted:
            assert [found[rank] for rank in THREE] == [dg.Proposal(True, 3)] * 3
        else:
            late = set.union(*(set(found[rank].ranks) for rank in THREE))
            assert late < set(THREE)  # who was there first is late for nobody
            assert all(found[rank].code == "rank-late" for rank in late)

    check()


# One process.


def test_ranks_want_a_process_group_and_a_time_limit() -> None:
    with pytest.raises(dg.BackendError, match=r"no process group \[ranks-not-started\]"):
        dg.RankGroup()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for limit in (0, -1, float("inf"), float("nan"), True, "60"):
            with pytest.raises(dg.ConfigError, match=r"limit_s: .* is not a number of seconds above 0"):
                dg.RankGroup(limit_s=limit)
        with pytest.raises(dg.BackendError, match="rank 0 is not in the process group"):
            dg.RankGroup(dist.GroupMember.NON_GROUP_MEMBER)
        with dg.RankGroup() as ranks:
            assert (ranks.rank, ranks.ranks) == (0, (0,))
            assert ranks.vote(dg.Proposal(True, 3)) == dg.Proposal(True, 3)
            assert ranks.vote(dg.Proposal(False, 3)) == dg.Proposal(False, 3, against=(0,))
            assert ranks.vote(dg.Proposal(True, 3, failed=True)) == dg.Proposal(True, 3, failed=True, against=(0,))
            ranks.barrier()
        assert ranks.vote(dg.Proposal(True, 3)) == dg.Proposal(False, 3)
        ranks.barrier()
        ranks.check_plan()
    finally:
        dist.destroy_process_group()


def test_closing_again_destroys_what_is_left_and_a_destroyed_group_starts_no_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy = dist.destroy_process_group
    try:
        first, second = dist.new_group([0]), dist.new_group([0])
        ranks = dg.RankGroup(first)
        stuck = lambda group: destroy(group) if group is first else _raise(RuntimeError("stuck"))  # noqa: E731
        with mock.patch.object(dist, "destroy_process_group", stuck), pytest.raises(RuntimeError, match="stuck"):
            ranks.close(communicators=[first, second])
        for _ in range(2):
            ranks.close(communicators=[first, second])
        for destroyed in (first, second):
            with pytest.raises(dg.BackendError, match=r"rank 0 is not in the process group \[ranks-not-started\]"):
                dg.RankGroup(destroyed)
        assert dg.RankGroup().ranks == (0,)
        for _ in range(2):
            ranks.close(communicators=[None])
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            destroy()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("size", [True, np.int64(1), torch.tensor(1)], ids=repr)
def test_a_vote_takes_what_stands_for_a_size(size: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dg.RankGroup().vote(dg.Proposal(True, size)) == dg.Proposal(True, 1)
    finally:
        dist.destroy_process_group()


def test_a_store_keeps_no_more_of_a_rank_than_its_last_exchanges() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = dg.RankGroup()
        before = store.num_keys()
        for _ in range(100):
            ranks.barrier()
        assert store.num_keys() - before == 2
    finally:
        dist.destroy_process_group()


def test_a_lost_rank_is_logged_before_anybody_waits_for_a_device(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = dg.RankGroup(limit_s=0.01)
        ranks.ranks = (0, 1, 2)  # two that never come
        with pytest.raises(dg.RankError) as caught:
            ranks.barrier()
        (record,) = caplog.records
        assert (record.name, record.levelname, record.message) == ("devicegraph", "ERROR", str(caught.value))
        assert record.devicegraph == {"event": "ranks", "code": "rank-late", "ranks": [1, 2]}
        assert str(caught.value) == (
            "barrier 1: ranks 1, 2 did not come within 0.01 s [rank-late]\n\n"
            "hint: look into the log of ranks 1, 2, or give more time with `limit_s`; end this process, or `leave()` "
            "and run eagerly where the forward needs no other rank"
        )
        with pytest.raises(dg.RankError) as again:
            ranks.vote(dg.Proposal(True, 1))
        assert str(again.value) == str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).ranks == (1, 2)
    finally:
        dist.destroy_process_group()


def test_graphs_go_before_communicators_and_a_graph_that_cannot_be_dropped_keeps_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    order: list[str] = []

    class Runner(dg.DecodeCudaGraphRunner):
        def close(self) -> None:
            order.append(f"graphs, {'with' if dist.is_initialized() else 'without'} communicator")
            super().close()

    class Stuck(Runner):
        def close(self) -> None:
            raise RuntimeError("the device does not answer")

    try:
        ranks = dg.RankGroup()
        one, other = (Runner(ToyEngine(max_bs=2), config=config(bs=[2])) for _ in range(2))
        one.capture()
        with pytest.raises(RuntimeError, match="does not answer"):
            ranks.close(Stuck(ToyEngine(max_bs=2), config=config(bs=[2])), communicators=[dist.group.WORLD])
        assert dist.is_initialized()
        ranks.close(one, other, communicators=[dist.group.WORLD])
        assert order == ["graphs, with communicator"] * 2
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_plan_holds_what_graphs_depend_on() -> None:
    def text(max_bs: int = 4, bs: tuple[int, ...] = (1, 2), **engine: Any) -> str:
        toy = ToyEngine(max_bs=max_bs)
        vars(toy).update(engine)
        return as_text(plan_of([dg.DecodeCudaGraphRunner(toy, config=config(bs=bs))]))

    def differing(*plans: str) -> dict[str, tuple[int, ...]]:
        return {found.path: found.ranks for found in differences(dict(enumerate(plans)))}

    usual = text()
    assert differing(usual, text()) == {}
    assert differing(usual, usual, text(max_bs=8)) == {
        "decode.limits.max_bs": (2,),
        "decode.limits.max_num_tokens": (2,),
    }
    assert differing(usual, text(variants=("a", None), variant=lambda batch: None)) == {"decode.variants": (1,)}
    assert differing(text(seq_len_fill_value=2), usual, usual) == {
        "decode.slots.seq_lens": (0,),
        "decode.slots.seq_lens_cpu": (0,),
    }
    assert differing(usual, as_text(plan_of([])))["decode.backend"] == (1,)


def test_a_plan_holds_where_rows_come_from_and_over_how_many_ranks_they_are_spread() -> None:
    def text(registry: dg.CudaGraphBufferRegistry) -> str:
        return as_text(plan_of([dg.DecodeCudaGraphRunner(ToyEngine(), config=config(bs=[4, 8]), registry=registry)]))

    def differing(*plans: str) -> list[str]:
        return [str(found) for found in differences(dict(enumerate(plans)))]

    def counting(ranks: int, rank: int = 0) -> str:
        return text(
            dg.build_decode_registry(
                device="cpu",
                max_bs=8,
                max_num_token=8,
                seq_len_fill_value=1,
                enable_num_token_non_padded=True,
                require_gathered_buffer=ranks > 1,
                attn_tp_size=ranks,
                attn_tp_rank=rank,
            )
        )

    def with_slot(**options: Any) -> str:
        registry = dg.CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8)
        registry.register_slot(dg.GraphSlot("x", lambda bs, tokens: (8,), torch.int64, **options))
        return text(registry)

    assert counting(4) == counting(4, rank=3)
    assert differing(counting(4), counting(2)) == ["`decode.token_alignment`: 2 on rank 1; 4 on rank 0"]
    assert "`decode.token_alignment`: 1 on rank 1; 2 on rank 0" in differing(counting(2), counting(1))
    plain = with_slot()
    for options, said in (
        ({"axis": "bs"}, "axis bs, KEEP_PAD 0"),
        ({"required": True}, "axis tokens, KEEP_PAD 0, required"),
        ({"value_fn": lambda context: 1}, "axis tokens, KEEP_PAD 0, by `value_fn`"),
        ({"source_fn": lambda batch, context: None}, "axis tokens, KEEP_PAD 0, by `source_fn`"),
        ({"copy_from_fb": False}, "axis tokens, KEEP_PAD 0, not copied"),
    ):
        (found,) = differing(plain, plain, with_slot(**options))
        assert (
            found == f"`decode.slots.x`: int64 [8], {said} on rank 2; int64 [8], axis tokens, KEEP_PAD 0 on ranks 0, 1"
        )
