"""Assertions that no interpreter option switches off, with a sentence that says what was expected and seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def expect(holds: bool, sentence: str) -> None:
    """Expects something to hold."""
    if not holds:
        raise AssertionError(sentence)


def expect_equal(what: str, seen: object, wanted: object) -> None:
    """Expects two values to be equal."""
    expect(bool(seen == wanted), f"{what}: expected {wanted!r}, saw {seen!r}")


def expect_same(what: str, seen: Any, wanted: Any) -> None:
    """Expects two outputs in host memory to have the same classes, shapes and values."""
    expect(type(seen) is type(wanted), f"{what}: expected a `{_class(wanted)}`, saw a `{_class(seen)}`")
    if isinstance(wanted, torch.Tensor):
        expect_equal(f"{what}: shape", list(seen.shape), list(wanted.shape))
        expect_equal(f"{what}: dtype", seen.dtype, wanted.dtype)
        wrong = int((seen != wanted).sum())
        expect(not wrong, f"{what}: {wrong} of {wanted.numel()} values differ; expected {wanted}, saw {seen}")
    elif isinstance(wanted, (list, tuple)):
        expect_equal(f"{what}: length", len(seen), len(wanted))
        for index, (mine, theirs) in enumerate(zip(seen, wanted, strict=True)):
            expect_same(f"{what}[{index}]", mine, theirs)
    elif isinstance(wanted, dict) or hasattr(wanted, "__dict__"):
        mine, theirs = (value if isinstance(value, dict) else vars(value) for value in (seen, wanted))
        expect_equal(f"{what}: names", list(mine), list(theirs))
        for name in theirs:
            expect_same(f"{what}.{name}", mine[name], theirs[name])
    else:
        expect_equal(what, seen, wanted)


def expect_raises(what: str, kind: type[BaseException], function: Callable[[], object]) -> BaseException:
    """Expects an exception of a class, and returns it."""
    try:
        function()
    except BaseException as error:
        if not isinstance(error, kind):
            seen = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{what}: expected `{kind.__name__}`, saw `{seen}`") from error
        return error
    raise AssertionError(f"{what}: expected `{kind.__name__}`, and nothing was raised")


def _class(value: object) -> str:
    return type(value).__name__
