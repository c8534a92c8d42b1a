"""Changes one operator, constant or statement of a module at a time, and tells which changes no test notices.

A copy of the package is changed, never the sources. A change that survives is either one that cannot be seen (a cache,
a bound that is never met), or a promise that no test holds. Each change is tried by the tests that run its lines, the
fastest first; what runs in processes that a test starts counts as run by none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch  # noqa: F401  # The processes of the tests are forked from this one, and need not import it again.

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

ROOT = Path(__file__).parent.parent.parent
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, Callable[[], None], str]]:
    """Each thing to change: where it is, what changes it, and in words."""
    annotations = {id(inner) for node in ast.walk(tree) for part in hints(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        for name in ("op", "ops"):
            held = getattr(node, name, None)
            operators = held if isinstance(held, list) else [held]
            for index, operator in enumerate(operators):
                other = SWAPS.get(type(operator))
                if other is None:
                    continue

                def swap(node: ast.AST = node, name: str = name, index: int = index, other: type = other) -> None:
                    new = [*getattr(node, "ops", []), None]
                    new[index] = other()
                    setattr(node, name, new[:-1] if name == "ops" else other())

                yield node, swap, f"{type(operator).__name__} to {other.__name__}"
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int):

            def other_value(node: ast.Constant = node) -> None:
                node.value = not node.value if isinstance(node.value, bool) else int(node.value) + 1  # type: ignore[arg-type]

            yield node, other_value, f"the constant {node.value}"
        if isinstance(node, (ast.If, ast.IfExp)) and ast.unparse(node.test) != "TYPE_CHECKING":

            def negate(node: ast.If | ast.IfExp = node) -> None:
                node.test = ast.UnaryOp(ast.Not(), node.test)

            yield node, negate, "the condition"
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for index, statement in enumerate(body if isinstance(body, list) else []):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if isinstance(statement, (ast.Expr, ast.Raise, ast.AugAssign)) and not is_text:

                    def drop(body: list[ast.stmt] = body, index: int = index) -> None:
                        body[index] = ast.Pass()

                    yield statement, drop, "dropped"


def hints(node: ast.AST) -> list[ast.AST]:
    """What is read by type checkers only."""
    found = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [part for part in found if part is not None]


class Watch:
    """A plugin that notes which tests run which lines of files, and how long each takes."""

    def __init__(self, targets: list[Path]) -> None:
        self.targets = {str(target) for target in targets}
        self.lines: dict[str, set[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seen = self.lines.setdefault(item.nodeid, set())

        def inside(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                seen.add((frame.f_code.co_filename, frame.f_lineno))
            return inside

        def enter(frame: FrameType, _: str, __: Any) -> Any:
            return inside if frame.f_code.co_filename in self.targets else None

        start = time.perf_counter()
        threading.settrace(enter)
        sys.settrace(enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid] = time.perf_counter() - start


class Choice:
    """A plugin that runs the given tests only, in the order given."""

    def __init__(self, tests: list[str]) -> None:
        self.ranks = {test: rank for rank, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.ranks), key=lambda item: self.ranks[item.nodeid]
        )


def run_tests(folder: Path, files: Iterable[str], plugin: object, seconds: float) -> bool:
    """Whether tests pass with the package in a folder, in a process of their own that has torch already.

    One that takes longer than `seconds` is ended, and has not passed.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(ROOT)
            os.environ["PYTHONPATH"] = str(folder)
            # Compiled files are known by the second, and two changes may fall into one.
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(folder))
            with (folder / "output").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            hypothesis.settings.register_profile(
                "unshrunk",
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            )
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
            options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
            code = int(pytest.main([*options, *files], plugins=[plugin]))
            if isinstance(plugin, Watch):
                tests = {test: (sorted(lines), plugin.seconds[test]) for test, lines in plugin.lines.items()}
                modules = [name for name in sys.modules if name.startswith("torch.")]
                (folder / "noted").write_text(json.dumps({"tests": tests, "modules": modules}), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > end:
            break
        time.sleep(0.02)
    # Also what the tests have started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return bool(ended) and status == 0


def passes(folder: Path, tests: list[str], seconds: dict[str, float]) -> bool:
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return run_tests(folder, files, Choice(tests), 60 + 3 * sum(seconds[test] for test in tests))


def lines_of(tree: ast.Module, sought: ast.AST) -> set[int]:
    """The lines that run where a node does; none outside of functions, whose lines run on import."""
    found: set[int] = set()

    def visit(node: ast.AST, lines: set[int], is_inside: bool) -> None:
        if isinstance(node, ast.stmt):
            bodies = [part for name in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, name, [])]
            last = min((part.lineno for part in bodies), default=node.end_lineno + 1) - 1
            lines = set(range(node.lineno, max(last, node.lineno) + 1))
        if node is sought and is_inside:
            found.update(lines)
        arguments = getattr(node, "args", None) if isinstance(node, ast.FunctionDef) else None
        for child in ast.iter_child_nodes(node):
            is_body = isinstance(node, ast.FunctionDef) and child is not arguments and child not in node.decorator_list
            visit(child, lines, is_body or (is_inside and not isinstance(node, ast.FunctionDef)))

    visit(tree, set(), False)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", help="below the package, such as `registry.py`")
    parser.add_argument("--tests", nargs="+", required=True, help="files of tests, the nearest first")
    parser.add_argument("--count", type=int, help="a sample of so many changes of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="the changes of these numbers, as printed before")
    parser.add_argument("--start", type=int, default=0, help="go on from the change of this number")
    parser.add_argument("--within", type=float, default=math.inf, help="leave out tests that take longer, in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="devicegraph-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "python/devicegraph", folder / "devicegraph")
        targets = [folder / "devicegraph" / module for module in options.modules]
        passed = run_tests(folder, options.tests, Watch(targets), 3600)
        assert passed, (folder / "output").read_text(encoding="utf-8")
        noted = json.loads((folder / "noted").read_text(encoding="utf-8"))
        for module in noted["modules"]:  # which every process would import again
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        tests = noted["tests"]
        for module, target in zip(options.modules, targets, strict=True):
            seen = {test: {line for name, line in lines if name == str(target)} for test, (lines, _) in tests.items()}
            seconds = {test: seconds for test, (_, seconds) in tests.items()}
            mutate(module, folder, seen, seconds, options)
    return 0


def mutate(
    module: str, folder: Path, seen: dict[str, set[int]], seconds: dict[str, float], options: argparse.Namespace
) -> None:
    """Prints what survives in a module, and how many; then the module is as it was.

    Args:
        module: below the package.
        folder: the copy of the package is there.
        seen: the lines of the module that each test runs.
        seconds: how long each test takes.
        options: which changes.
    """
    target = folder / "devicegraph" / module
    source = target.read_text(encoding="utf-8")
    number = len(list(places(ast.parse(source))))
    chosen: Iterable[int] = range(number)
    if options.only is not None:
        chosen = options.only
    elif options.count is not None:
        chosen = sorted(random.Random(options.seed).sample(range(number), min(options.count, number)))
    chosen = [place for place in chosen if place >= options.start]
    by_time = sorted((test for test in seen if seconds[test] <= options.within), key=lambda test: seconds[test])
    survivors = 0
    for place in chosen:
        tree = ast.parse(source)
        node, change, what = list(places(tree))[place]
        lines = lines_of(tree, node)
        # What is changed outside of functions runs on import, for any test.
        tests = [test for test in by_time if not lines.isdisjoint(seen[test])] if lines else by_time
        change()
        target.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
        # One file is read faster than all of them, and the first is the nearest.
        nearest = [test for test in tests if test.startswith(f"{options.tests[0]}::")]
        others = [test for test in tests if test not in nearest]
        if all(passes(folder, chosen, seconds) for chosen in (nearest, others) if chosen):
            survivors += 1
            line = getattr(node, "lineno", 0)
            text = source.splitlines()[line - 1].strip()
            sys.stdout.write(f"survives: {place}: {module}:{line}: {what}: {text} (run by {len(tests)} tests)\n")
        sys.stdout.flush()
        sys.stderr.write(f"{place}\r")
    target.write_text(source, encoding="utf-8")
    sys.stdout.write(f"{module}: {len(chosen)} of {number} changes, {survivors} survive\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
