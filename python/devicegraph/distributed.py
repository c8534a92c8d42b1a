"""Ranks in processes of their own: votes, barriers, one plan for all, and an end in the order that communicators need.

Ranks speak through the store of `torch.distributed`, on the host and beside every communicator, so that a device whose
queue waits for a dead rank holds nobody up here, and what is missing tells which rank has not spoken. A collective of
a CPU group would fail on all ranks with a lost connection, which tells nothing, and costs no less.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.distributed as dist
from typing_extensions import Self

from devicegraph.errors import BackendError, ConfigError, RankError
from devicegraph.logs import log
from devicegraph.parallel import Proposal, agree, named
from devicegraph.plans import as_text, differences, plan_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from devicegraph.runners.base import BaseCudaGraphRunner

__all__ = ["RankGroup"]

#: How long a rank waits for the others in one call of the store, which nothing interrupts; then it looks now and then.
_PATIENCE_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.05

#: What ranks do together; they know by it when one of them does something else.
_VOTE, _BARRIER, _PLAN, _LEFT = "vote", "barrier", "check of plans", "left"
#: What the word of a rank begins with that is about to go on without others; and the verdict that they have come.
_DOUBT, _GO = "?", "go"

#: Differences in one message: buckets that differ make every slot differ.
_SHOWN: Final = 8
#: What can be done where ranks have lost each other.
_WAY_OUT: Final = "end this process, or `leave()` and run eagerly where the forward needs no other rank"

#: How many there have been for each process group, so that none reads what an earlier one wrote.
_made: Counter[str] = Counter()


class _Word(NamedTuple):
    """What a rank says in an exchange."""

    kind: str
    text: str


class RankGroup:
    """Ranks that decide together; an engine's hooks `vote`, `barrier` and `rank` are its members of these names.

    Every rank makes one for the same process group, and calls the same methods in the same order. A rank that fails, is
    late or does something else ends what the others wait for with a `RankError` that names it. After one whose code is
    `rank-late`, `rank-left` or `store-lost` the ranks agree on nothing any more: every later call raises the same
    error, until this rank calls `leave()`. Only `close` waits for a device. One thread at a time.

        ranks = devicegraph.RankGroup(limit_s=60)
        engine.vote, engine.barrier, engine.rank = ranks.vote, ranks.barrier, ranks.rank
        runner = devicegraph.DecodeCudaGraphRunner(engine, config=config)
        ranks.check_plan(runner)
        runner.capture()
        ...
        ranks.close(runner, communicators=[torch.distributed.group.WORLD])

    Args:
        group: the ranks: a process group of `torch.distributed` of any backend, since nothing is sent through it. By
            default all.
        limit_s: how long a rank waits for the others. Long enough for the slowest of them to compile and to capture a
            bucket.

    Attributes:
        rank: this process, as `torch.distributed` counts in the whole job; messages count so too.
        ranks: all of them, ascending in the group.
        limit_s: as given.

    Raises:
        BackendError: `ranks-not-started`: no process group, or one without this process, or a destroyed one.
        ConfigError: `limit-invalid`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, limit_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise BackendError(
                "`torch.distributed` has no process group",
                code="ranks-not-started",
                hint="call `torch.distributed.init_process_group()` in the processes that `torchrun` starts",
            )
        given: object = limit_s
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given < float("inf"):
            raise ConfigError(f"limit_s: {limit_s!r} is not a number of seconds above 0", code="limit-invalid")
        group = dist.group.WORLD if group is None else group
        self.limit_s = limit_s
        self.rank = dist.get_rank()
        self.ranks = _ranks_of(group)
        if self.rank not in self.ranks:
            raise BackendError(f"rank {self.rank} is not in the process group", code="ranks-not-started")
        name = str(group.group_name)  # type: ignore[union-attr]
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"devicegraph/{name}/{_made[name]}", store)  # type: ignore[attr-defined]
        _made[name] += 1
        self._number = 0
        self._lost: RankError | None = None
        self._is_alone = False

    def vote(self, proposal: Proposal) -> Proposal:
        """What all ranks do; see `agree`. Waits for their proposals.

        A rank that comes to a vote while others are at a barrier has failed in a capture: they learn of it there, and
        come to the vote. Ranks in different phases have no graph to share.

        Returns:
            The same on every rank, with the ranks that are against a graph, or have failed. On a rank that has left,
            its own proposal, without a graph.

        Raises:
            RankError: `rank-late`, `rank-left`, `store-lost` or `rank-out-of-step`.
        """
        if self._is_alone:
            return replace(proposal, graph=False)
        said = f"{bool(proposal.graph):d} {int(proposal.size)} {bool(proposal.failed):d} {proposal.phase}"
        words = self._exchange(_VOTE, said)
        if any(word.kind != _VOTE for word in words):
            words = self._exchange(_VOTE, said)
            self._check_step(_VOTE, words)
        proposals = [_proposal(word.text) for word in words]
        agreed = agree(proposals)
        if agreed.graph and not agreed.failed:
            return agreed
        against = (p.failed if agreed.failed else not p.graph for p in proposals)
        return replace(agreed, against=tuple(rank for rank, is_so in zip(self.ranks, against, strict=True) if is_so))

    def barrier(self) -> None:
        """Returns when all ranks have come to it; at once on a rank that has left.

        Raises:
            RankError: see `vote`; `rank-out-of-step` also where another rank has failed and is at its vote.
        """
        if not self._is_alone:
            self._check_step(_BARRIER, self._exchange(_BARRIER))

    def check_plan(self, *runners: BaseCudaGraphRunner) -> None:
        """Refuses ranks that would not capture and choose the same graphs; to be called before `capture()`.

        What has to be the same: configuration, backend, limits, buckets, order and variants of each runner, over how
        many ranks the tokens of a bucket are spread, the shapes, dtypes, axes, padding and origins of its slots, and
        the version of this package. Which share of the tokens a rank takes is not compared.

        Raises:
            RankError: on every rank, `plans-differ`, with each thing that differs and the ranks that are not like most;
                the ranks can go on and check others. Else as in `vote`.
        """
        if self._is_alone:
            return
        words = self._exchange(_PLAN, as_text(plan_of(runners)))
        self._check_step(_PLAN, words)
        found = differences(dict(zip(self.ranks, (word.text for word in words), strict=True)))
        if found:
            odd = tuple(sorted({rank for difference in found for rank in difference.ranks}))
            more = len(found) - _SHOWN
            lines = "".join(f"\n- {difference}" for difference in found[:_SHOWN])
            lines += f"\n- and {more} more" if more > 0 else ""
            raise RankError(
                f"the plan of {named(odd)} is not that of the others:{lines}",
                code="plans-differ",
                hint="start every rank with the same options and engine; graphs that differ would hang in a collective",
                ranks=odd,
            )

    def leave(self) -> None:
        """Takes this rank out: the others' next exchange ends with its name; here steps run eagerly, asking nobody.

        For a rank whose forward needs no other, to finish its requests without them. Calling it twice is fine.
        """
        if not self._is_alone:
            self._is_alone = True
            self._say(self._number + 1, _Word(_LEFT, str(self.rank)))

    def close(self, *runners: BaseCudaGraphRunner, communicators: Iterable[dist.ProcessGroup | None] = ()) -> None:
        """Ends what this rank has, in the one order that is safe: graphs, their memory, then communicators.

        A communicator that goes before the graphs that were captured with it hangs, or takes their memory with it. What
        raises on the way keeps the rest: a communicator is not destroyed while a graph may be left. Leaves first, so
        that no rank waits for this one. Waits for the device. Calling it twice is fine.

        Args:
            runners: see `BaseCudaGraphRunner.close`.
            communicators: for `torch.distributed.destroy_process_group`, in this order; one that is destroyed is passed
                over.
        """
        self.leave()
        for runner in runners:
            runner.close()
        for runner in runners:
            runner.adapter.empty_cache()
        for communicator in communicators:
            if dist.is_initialized() and (communicator is None or _ranks_of(communicator)):
                dist.destroy_process_group(communicator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    # What ranks say to each other.

    def _exchange(self, kind: str, text: str = "") -> Sequence[_Word]:
        """What each rank says in this exchange, which has the same number on all of them, in the order of `ranks`."""
        if self._lost is not None:
            raise RankError(self._lost.message, code=self._lost.code, hint=self._lost.hint, ranks=self._lost.ranks)
        self._number += 1
        number, doing = self._number, f"{kind} {self._number}"
        try:
            self._store.set(_key(number, self.rank), f"{kind}:{text}")
            if number > 2:
                # All have begun the last exchange, and so have read the one before.
                self._store.delete_key(_key(number - 2, self.rank))
            late = self._wait_for(number)
            if late:
                # A rank that has read the words before this one has found them all, and then so do we, below.
                self._store.set(_key(number, self.rank), f"{_DOUBT}{kind}:{text}")
                late = self._missing(number)
            words = [] if late else self._read(number)
            if late or any(word.startswith(_DOUBT) for word in words):
                late = self._agree_on_late(number, late)
                words = [] if late else self._read(number)
        except RuntimeError as error:
            raise self._give_up(
                RankError(
                    f"{doing}: the store of `torch.distributed` does not answer",
                    code="store-lost",
                    hint="the process that holds it is gone: rank 0, unless a launcher such as `torchrun` holds it",
                )
            ) from error
        if late and self.rank not in late:
            raise self._give_up(
                RankError(
                    f"{doing}: {named(late)} did not come within {self.limit_s:g} s",
                    code="rank-late",
                    hint=f"look into the log of {named(late)}, or give more time with `limit_s`; {_WAY_OUT}",
                    ranks=late,
                )
            )
        said = [_Word(*word.removeprefix(_DOUBT).split(":", 1)) for word in words]
        left = {int(rank) for word in said if word.kind == _LEFT for rank in word.text.split()} | set(late)
        if left:
            raise self._give_up(self._left(doing, tuple(sorted(left))))
        return said

    def _wait_for(self, number: int) -> tuple[int, ...]:
        """Waits until all ranks have spoken; those that have not when the time is over."""
        deadline = time.monotonic() + self.limit_s
        with suppress(RuntimeError):
            # Whether the store is gone or only silent shows right below.
            keys = [_key(number, rank) for rank in self.ranks]
            self._store.wait(keys, timedelta(seconds=min(_PATIENCE_S, self.limit_s)))
            return ()
        while True:
            is_over = time.monotonic() >= deadline
            late = self._missing(number)
            if is_over or not late:
                return late
            time.sleep(_LOOK_AGAIN_S)

    def _missing(self, number: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if not self._store.check([_key(number, rank)]))

    def _read(self, number: int) -> list[str]:
        return [word.decode() for word in self._store.multi_get([_key(number, rank) for rank in self.ranks])]

    def _agree_on_late(self, number: int, late: Sequence[int]) -> tuple[int, ...]:
        """Which ranks are given up, as the first one says that asks: all obey, so that nobody goes on alone."""
        verdict = self._store.compare_set(f"{number}/verdict", "", " ".join(map(str, late)) or _GO).decode()
        return () if verdict == _GO else tuple(int(rank) for rank in verdict.split())

    def _left(self, doing: str, ranks: tuple[int, ...]) -> RankError:
        if self.rank in ranks:
            return RankError(
                f"{doing}: this rank, {self.rank}, came when the others had given it up",
                code="rank-late",
                hint=f"look for what held it up for the limit of the others; {_WAY_OUT}",
                ranks=ranks,
            )
        return RankError(
            f"{doing}: it goes on without {named(ranks)}",
            code="rank-left",
            hint=f"look into the log of {named(ranks)}; {_WAY_OUT}",
            ranks=ranks,
        )

    def _check_step(self, kind: str, words: Sequence[_Word]) -> None:
        """All numbers stay alike, so that ranks out of step can still come to a vote, and have to."""
        others = {rank: word.kind for rank, word in zip(self.ranks, words, strict=True) if word.kind != kind}
        if others:
            at = ", ".join(f"rank {rank} at a {other}" for rank, other in others.items())
            raise RankError(
                f"{kind} {self._number}: {at}",
                code="rank-out-of-step",
                hint="a rank that failed in a capture says so in its log; else the ranks do not run the same program",
                ranks=tuple(others),
            )

    def _give_up(self, error: RankError) -> RankError:
        """Keeps the error, and lets ranks that come later know at once whom it is about."""
        self._lost = error
        # A late rank learns of it as soon as it comes.
        word = _Word(_LEFT, " ".join(map(str, error.ranks or (self.rank,))))
        for number in (self._number, self._number + 1):
            self._say(number, word)
        # Whoever handles the error may have to wait for a device first, which may wait for the lost rank.
        log(logging.ERROR, "ranks", str(error), {"code": error.code, "ranks": list(error.ranks)})
        return error

    def _say(self, number: int, word: _Word) -> None:
        with suppress(RuntimeError):  # a lost store has told the others already
            self._store.set(_key(number, self.rank), f"{word.kind}:{word.text}")


def _ranks_of(group: object) -> tuple[int, ...]:
    """The ranks of a process group; none where it is destroyed, or torch's mark for a group without this process."""
    try:
        return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else ()
    except KeyError:
        return ()


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _proposal(text: str) -> Proposal:
    graph, size, failed, phase = text.split(" ", 3)
    return Proposal(graph == "1", int(size), failed == "1", phase)
