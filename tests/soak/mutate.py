"""Changes one operator, constant or statement of a module at a time, and tells which changes no test notices.

A copy of the package is changed, never the sources. A change that survives is either one that cannot be seen (a cache,
a bound that is never met), or a promise that no test holds.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        if isinstance(node, (ast.If, ast.IfExp)):

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


def is_noticed(folder: Path, tests: list[str]) -> bool:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return True
    return run.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="below the package, such as `registry.py`")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="devicegraph-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "python/devicegraph", folder / "devicegraph")
        target = folder / "devicegraph" / options.module
        source = target.read_text(encoding="utf-8")
        assert not is_noticed(folder, options.tests), "the tests fail as it is"
        number = len(list(places(ast.parse(source))))
        chosen = random.Random(options.seed).sample(range(number), min(options.count, number))
        survivors = 0
        for place in sorted(chosen):
            tree = ast.parse(source)
            node, change, what = list(places(tree))[place]
            line = getattr(node, "lineno", 0)
            change()
            target.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
            if not is_noticed(folder, options.tests):
                survivors += 1
                sys.stdout.write(
                    f"survives: {options.module}:{line}: {what}: {source.splitlines()[line - 1].strip()}\n"
                )
                sys.stdout.flush()
        sys.stdout.write(f"{options.module}: {len(chosen)} of {number} changes, {survivors} survive\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
