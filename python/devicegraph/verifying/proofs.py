"""The proofs of a verification: launches that may differ in nothing but poison, and what they show.

Every launch starts from the same engine state and the same buffers, both of which are put back at the end.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from devicegraph.batches import read_fields, replaced
from devicegraph.outputs import tensors_of
from devicegraph.slots import FillContext, PaddingPolicy, buffer_of
from devicegraph.verifying.differences import Result, first_difference, first_far, first_moved, moved_rows
from devicegraph.verifying.poison import Poisons, SlotRows, check_state, float_pair, may_be_target, rows_of
from devicegraph.verifying.report import SkippedBatch, VerifyFinding, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.runners.shape_key import ShapeKey
    from devicegraph.slots import GraphSlot, HostValue
    from devicegraph.verifying.poison import Pair
    from devicegraph.verifying.report import Proof

__all__ = ["Proofs", "Step"]

#: Why the padding of a slot that rows are written by is left as it is.
POINTS: Final = "its rows point into the state"


class Step(NamedTuple):
    """A batch, its sizes, the graphs that take it, and what an eager step gets: it may show what a fill computes."""

    number: int
    batch: Any
    bs: int
    num_tokens: int
    keys: list[ShapeKey]
    eager: Any


class Proofs:
    """The proofs on one runner, and what they have found."""

    def __init__(
        self,
        runner: BaseCudaGraphRunner,
        state: Mapping[str, torch.Tensor] | None,
        poisons: Mapping[str, Sequence[HostValue]],
        tolerances: dict[torch.dtype, float],
    ) -> None:
        self.runner = runner
        if state is None and runner.hooks.state_tensors is not None:
            state = runner.hooks.state_tensors()
        self._is_state_known = state is not None
        self.state = check_state(state or {})
        self.poisons = Poisons(runner.buffer_registry, poisons)
        self.tolerances = tolerances
        self.findings: list[VerifyFinding] = []
        self.held: dict[str, str] = {}
        self.used: dict[str, Pair] = {}
        self.padded: set[ShapeKey] = set()

    def run(self, steps: Sequence[Step], skipped: Sequence[SkippedBatch]) -> VerifyReport:
        """Does all of them, for each batch in each of its graphs."""
        with torch.no_grad(), self._put_back():
            for step in steps:
                for key in step.keys:
                    self._reset()
                    self.runner._fill_now(step.batch, key, step.bs, step.num_tokens)
                    self.poisons.see(self._rows(step, key))
            for step in steps:
                if step.keys:
                    want = self._eager(step)
                    for key in step.keys:
                        self._prove(step, key, want)
        verified = list(dict.fromkeys(key for step in steps for key in step.keys))
        return VerifyReport(
            self.runner.phase,
            verified=tuple(verified),
            padded=tuple(key for key in verified if key in self.padded),
            missed=tuple(key for key in self.runner.graphs if key not in verified),
            findings=tuple(self.findings),
            skipped=tuple(skipped),
            poisons={name: pair for name, pair in self.used.items() if name not in self.held},
            held=dict(self.held),
        )

    # Launches, all from the same state and the same buffers.

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        buffers = [buffer_of(slot) for slot in self.runner.buffer_registry.slots]
        self._saved = [(tensor, tensor.clone()) for tensor in (*buffers, *self.state.values())]
        try:
            yield
        finally:
            self._reset()
            self._saved = []

    def _reset(self) -> None:
        # The host may be writing what a launch still reads.
        self.runner.adapter.synchronize()
        with torch.inference_mode():  # where tensors can be written that were made in it, and others too
            for tensor, saved in self._saved:
                tensor.copy_(saved)

    def _eager(self, step: Step) -> Result:
        self._reset()
        batch = replaced(step.eager, {}, {})  # hooks leave things on it
        self.runner._prepare_metadata(batch, None)
        return self._result(self.runner._run_forward(batch, None))

    def _launch(
        self,
        step: Step,
        key: ShapeKey,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> Result:
        """A replay; `before` is called before the buffers are filled, `after` behind that and before metadata."""
        runner = self.runner
        self._reset()
        if before is not None:
            before()
        static = runner._fill_now(step.batch, key, step.bs, step.num_tokens)
        if after is not None:
            after()
        runner._prepare_metadata(static, key)
        runner._launch(runner.graphs[key], static)
        runner.backend.graph_pool.overwrite()  # type: ignore[union-attr]
        size = runner._live_size(step.bs, step.num_tokens)
        return self._result(runner.graphs[key].trim(int(size), clone=False))

    def _result(self, output: Any) -> Result:
        state = {name: tensor[1:].clone() for name, tensor in self.state.items()}
        return Result([tensor.clone() for tensor in tensors_of(output)], state)

    def _rows(self, step: Step, key: ShapeKey) -> list[SlotRows]:
        padded_bs, padded_tokens = self.runner._padded_sizes(key.size, step.bs)
        proxies = read_fields(step.batch, ("pp_proxy_tensors",))[0]
        context = FillContext(step.bs, padded_bs, step.num_tokens, padded_tokens, proxies)
        return rows_of(self.runner.buffer_registry, step.batch, context)

    # Proofs.

    def _prove(self, step: Step, key: ShapeKey, eager: Result) -> None:
        report = partial(self._report, step, key)
        plain = self._launch(step, key)
        place = first_far(eager, plain, self.tolerances)
        if place is not None:
            report("eager", (), place)
        place = first_moved(plain, self._launch(step, key))
        if place is not None:
            report("repeat", (), place)
            return
        rows = self._rows(step, key)
        self._prove_padding(step, key, plain, rows)
        self._prove_fresh(step, key, plain, rows)

    def _report(self, step: Step, key: ShapeKey, proof: Proof, slots: tuple[str, ...], place: str) -> None:
        self.findings.append(VerifyFinding(proof, key, step.number, slots, place))

    def _prove_padding(self, step: Step, key: ShapeKey, plain: Result, rows: Sequence[SlotRows]) -> None:
        suspects = [
            suspect for each in rows if each.padding is not None and (suspect := self._suspect(step, key, plain, each))
        ]
        if not suspects:
            return
        self.padded.add(key)
        suspects += [
            _Suspect(f"state {name}", tensor[:1], float_pair(tensor.dtype))
            for name, tensor in self.state.items()
            if tensor.dtype.is_floating_point
        ]
        self.used.update({suspect.name: suspect.pair for suspect in suspects})

        def launch(chosen: Sequence[_Suspect], which: int) -> Result:
            return self._launch(step, key, after=lambda: _poison(chosen, which))

        found = self._search(plain, suspects, launch)
        while pointing := self._pointing(plain, suspects, found, launch):
            self.held[pointing] = POINTS
            suspects = [suspect for suspect in suspects if suspect.name != pointing]
            found = self._search(plain, suspects, launch)
        for names, place in found.items():
            each = next((each for each in rows if (each.slot.name,) == names), None)
            if each is None or not self._is_undecided(each.slot):
                self._report(step, key, "padding", names, place)
            elif (again := self._look_again(step, key, plain, each)) is not None:
                self._report(step, key, "padding", names, again)

    def _pointing(
        self,
        plain: Result,
        suspects: Sequence[_Suspect],
        found: Iterable[tuple[str, ...]],
        launch: Callable[[Sequence[_Suspect], int], Result],
    ) -> str | None:
        """A slot that points into the state where others are poisoned too: alone, it may write what is there anyway."""
        groups = [[each for each in suspects if each.name in names] for names in found if len(names) > 1]
        for group in groups:
            for which in (0, 1):
                if not moved_rows(plain, launch(group, which)):
                    continue
                for each in group:
                    is_slot = self.runner.buffer_registry.has_slot(each.name)
                    if is_slot and self._is_undecided(self.runner.buffer_registry.get_slot(each.name)):
                        rest = [other for other in group if other is not each]
                        if not moved_rows(plain, launch(rest, which)):
                            return each.name
        return None

    def _is_undecided(self, slot: GraphSlot) -> bool:
        """Whether padded rows of a slot may point somewhere, so that what poison moves there may be no leak."""
        return may_be_target(slot) and not self.poisons.is_given(slot)

    def _look_again(self, step: Step, key: ShapeKey, plain: Result, each: SlotRows) -> str | None:
        """What a slot's padding moves with values that are harmless in this step; what was in another need not be."""
        self.used.pop(each.slot.name, None)
        suspect = self._suspect(step, key, plain, each)
        if suspect is None:
            return None
        self.used[suspect.name] = suspect.pair
        places = (
            first_moved(plain, self._launch(step, key, after=partial(_poison, [suspect], which))) for which in (0, 1)
        )
        return next((place for place in places if place is not None), None)

    def _suspect(self, step: Step, key: ShapeKey, plain: Result, each: SlotRows) -> _Suspect | None:
        """The padded rows of a slot with the poison for them; where there is none it is noted why."""
        slot = each.slot
        assert each.padding is not None  # who asks has looked
        if slot.name in self.held:
            return None
        pair = self.used.get(slot.name) or self.poisons.pair(slot)
        is_given = self.poisons.is_given(slot)
        if pair is None:
            self.held[slot.name] = "left out" if is_given else "only one value is known to be valid"
        elif slot.name not in self.used and self._is_undecided(slot):
            if not self._is_state_known:
                self.held[slot.name] = "its rows may point into state, and no state was given"
                return None
            pair = self._harmless_pair(step, key, plain, each.padding, slot, pair)
            if pair is None:
                self.held[slot.name] = POINTS
        return None if pair is None else _Suspect(slot.name, each.padding, pair)

    def _harmless_pair(
        self, step: Step, key: ShapeKey, plain: Result, padding: torch.Tensor, slot: GraphSlot, pair: Pair
    ) -> Pair | None:
        """Two values that point nowhere but into the reserved rows of the state; None where none are known.

        A value that is written by moves the row that it names. Where all values move the same rows, it is no pointer,
        and the rows depend on it: then the values are as good as any.
        """
        padded = slot.pad_value if slot.padding_policy is PaddingPolicy.FILL_SENTINEL else 0
        tried: dict[HostValue, set[tuple[str, int]]] = {}
        for value in {min(padded + 1, pair[1]), *pair} - {padded}:
            suspect = _Suspect(slot.name, padding, (value, value))
            result = self._launch(step, key, after=partial(_poison, [suspect], 0))
            tried[value] = moved_rows(plain, result)
        harmless = [value for value, moved in tried.items() if not moved]
        if harmless:
            return min(padded, *harmless), max(padded, *harmless)
        is_same = len(tried) > 1 and len({frozenset(moved) for moved in tried.values()}) == 1
        return pair if is_same else None

    def _prove_fresh(self, step: Step, key: ShapeKey, plain: Result, rows: Sequence[SlotRows]) -> None:
        self._reset()
        self.runner._fill_now(step.batch, key, step.bs, step.num_tokens)
        kept = [(each.padding, each.padding.clone()) for each in rows if each.padding is not None]
        suspects = [_Buffer(each, pair) for each in rows if (pair := self.poisons.pair(each.slot)) is not None]

        def launch(chosen: Sequence[_Buffer], which: int) -> Result:
            return self._launch(
                step,
                key,
                before=lambda: [buffer.poison(which) for buffer in chosen],
                after=lambda: [padding.copy_(before) for padding, before in kept],
            )

        left = self._survivors(step, key, rows)
        for name in left:
            self._report(step, key, "stale", (name,), "its own rows, which the fill has to write")
        suspects = [each for each in suspects if each.name not in left]
        for names, place in self._search(plain, suspects, launch).items():
            self._report(step, key, "stale", names, place)

    def _survivors(self, step: Step, key: ShapeKey, rows: Sequence[SlotRows]) -> list[str]:
        """The slots of which a fill leaves elements that it has to write: those that differ where only they did."""
        filled: list[list[list[torch.Tensor]]] = []
        for which in (0, 1):
            self._reset()
            for each in rows:
                _Buffer(each, self.poisons.marks(each.slot)).poison(which)
            self.runner._fill_now(step.batch, key, step.bs, step.num_tokens)
            filled.append([[part.clone() for part in each.refreshed] for each in rows])
        return [
            each.slot.name
            for each, *parts in zip(rows, *filled, strict=True)
            if any(first_difference(*pair) is not None for pair in zip(*parts, strict=True))
        ]

    def _search(
        self, plain: Result, suspects: Sequence[_Named], launch: Callable[[Sequence[Any], int], Result]
    ) -> dict[tuple[str, ...], str]:
        """Poisons all suspects, and where that moves anything halves of them, to tell who does it, and where first."""
        found = _blame(plain, suspects, 0, launch)
        named = {name for names in found for name in names}
        return found | _blame(plain, [each for each in suspects if each.name not in named], 1, launch)


# No function inside of another one: it would hold itself, and with it the results, until a collector comes.
def _blame(
    plain: Result, chosen: Sequence[_Named], which: int, launch: Callable[[Sequence[Any], int], Result]
) -> dict[tuple[str, ...], str]:
    place = first_moved(plain, launch(chosen, which)) if chosen else None
    if place is None:
        return {}
    middle = len(chosen) // 2
    halves = (chosen[:middle], chosen[middle:]) if middle else ()
    found = {names: where for half in halves for names, where in _blame(plain, half, which, launch).items()}
    return found or {tuple(each.name for each in chosen): place}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Suspect(NamedTuple):
    """Rows that may leak, with the poison for them."""

    name: str
    rows: torch.Tensor
    pair: Pair


class _Buffer(NamedTuple):
    """The buffer of a slot, with the poison for it."""

    each: SlotRows
    pair: Pair

    @property
    def name(self) -> str:
        return self.each.slot.name

    def poison(self, which: int) -> None:
        """Poisons all of it, but for live rows that the engine has written there before the fill."""
        live = self.each.live if self.each.is_engines and self.each.slot.post_fill is None else None
        kept = None if live is None else live.clone()
        buffer_of(self.each.slot).fill_(self.pair[which])
        if live is not None and kept is not None:
            live.copy_(kept)


def _poison(suspects: Sequence[_Suspect], which: int) -> None:
    with torch.inference_mode():
        for suspect in suspects:
            suspect.rows.fill_(suspect.pair[which])
