"""What the fuzzers share: objects that lie or raise, the one rule of what may come out, and how a fuzzer is run.

Whatever goes in, either the call does what an oracle says, or it raises an error of the package, or it passes on what
an object of the caller raised. Everything else is a finding: a panic of the core, an error of the interpreter, the
refusal of what is right, and the acceptance of what is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import devicegraph as dg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OwnError(Exception):
    """Raised by objects of the caller: it has to come out as it is, or as the cause of an error of the package."""


class Raises:
    """Nothing can be asked of it."""

    def _refuse(self, *_: object) -> Any:
        raise OwnError

    __index__ = __bool__ = __len__ = __iter__ = __eq__ = __repr__ = __str__ = __call__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Index:
    """Stands for an integer, or says so."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value


class Lists(Sequence[Any]):
    """A sequence whose length is not what it has."""

    def __init__(self, length: int, *items: object) -> None:
        self.length, self.items = length, items

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class Maps(Mapping[str, Any]):
    """A mapping that has other values than keys, or refuses."""

    def __init__(self, keys: Sequence[Any], **values: Any) -> None:
        self.names, self.values_ = keys, values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.names)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, name: str) -> Any:
        if name not in self.values_:
            raise OwnError
        return self.values_[name]


class Text(str):
    """Text that is not equal to itself."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class Number(int):
    """A number that is another one where it is asked."""

    def __index__(self) -> int:
        return -1

    def __int__(self) -> int:
        return -1


def odd_objects() -> list[Any]:
    """Values that are nothing anybody asked for."""
    cycle: list[Any] = []
    cycle.append(cycle)
    return [
        True, False, 1.5, float("nan"), float("inf"), -0.0, 1e300, "", "4", "\ud800", "\0", "é" * 70, b"4",
        bytearray(b"1"),
        2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, -1, 0, (), [], {}, set(), object(), type, len, cycle,
        [[]], [None], range(0), range(5), Index(3), Index("x"), Index(2**70), Raises(), Text("full"),
        Number(4), Lists(3, 1, 2), Lists(10**9, 4), Maps(["bs"]), Maps(["bs", 1], bs=[1]), ..., NotImplemented,
        complex(1, 2), memoryview(b"12"), Exception("x"), iter([1]), "full", "decode", "bs", "max_bs", {"bs": [1]},
    ]  # fmt: skip


class Outcome(NamedTuple):
    value: Any
    error: BaseException | None


#: What calls may raise; a `PanicException` of the core is no `Exception`.
MAY_RAISE = (dg.DeviceGraphError, OwnError)


def outcome(call: Callable[[], Any], *may_raise: type[BaseException]) -> Outcome:
    """What a call gives; what it may not raise goes on."""
    try:
        return Outcome(call(), None)
    except (*MAY_RAISE, *may_raise) as error:
        caught = error
    if isinstance(caught, dg.DeviceGraphError) and not (caught.code and str(caught)):
        raise FoundError(f"an error that says nothing: {caught!r}")
    return Outcome(None, caught)


class FoundError(AssertionError):
    """A finding, with what is needed to see it again."""


Case: TypeAlias = "Callable[[random.Random], str | Counter[str]]"


def fuzz(case: Case, cases: int, seed: int = 0, first: int = 0) -> Counter[str]:
    """Runs cases until there are as many as asked for; each depends on the seed and its own number only.

    Args:
        case: one of them, or several; it returns a word for how it came out, or counts of such words.
        cases: how many.
        seed: which ones.
        first: the number of the first.

    Returns:
        How often each word came.

    Raises:
        FoundError: a case failed.
    """
    words: Counter[str] = Counter()
    number = first
    while words.total() < cases:
        try:
            came = case(random.Random(seed << 40 | number))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise FoundError(f"case {number} of seed {seed}: {type(error).__name__}: {error}") from error
        words.update([came] if isinstance(came, str) else came)
        number += 1
    return words


def main(name: str, case: Case, cases: int) -> None:
    """The command line of a fuzzer: runs it and prints one line of what came out."""
    parser = argparse.ArgumentParser(description=f"{name}: random hostile input, each case known by its number")
    parser.add_argument("--cases", type=int, default=int(os.environ.get("DEVICEGRAPH_FUZZ_CASES", cases)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case; with --cases 1, that one alone")
    options = parser.parse_args()
    began = time.perf_counter()
    words = fuzz(case, options.cases, options.seed, options.first)
    seconds = time.perf_counter() - began
    counts = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    sys.stdout.write(f"{name}: {words.total()} cases of seed {options.seed} in {seconds:.0f} s: {counts}\n")
