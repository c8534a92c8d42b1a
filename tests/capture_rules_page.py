"""Writes docs/capture-rules.md from the table of verdicts: run it and send its output there."""

from __future__ import annotations

import ast
import inspect
import sys

import verdicts
from devicegraph.devices.tape_rules import REFUSALS
from verdicts import ALLOWED, CONSTRUCTS, RANDOM

_HEAD = """# Capture rules

What may stand in a forward that is captured. A CUDA capture keeps these rules, and so does the CPU tape, construct by
construct: the tests run this very table on both (read off an NVIDIA H200 with torch 2.11, and held to the tape with
every torch that is tested). On the tape a refusal is a `CaptureError` with the code below, the operator's name and a
way out; a GPU fails with an error of its own, often about something later. A forward that catches a refusal saves
nothing: the capture, or the segment, ends with the first one.

In the table `x`, `y` and `buffer` are float tensors on the device, `index` and `counts` integer ones, `mask` a boolean
one, `n` an integer tensor without dimensions; `pageable` and `pinned` lie in host memory, `host_scalar` has no
dimensions there.

On the tape everything is host memory. What would be host memory beside a GPU is told apart so: slots declared with
`device="cpu"`, literals such as `torch.tensor([1, 2])`, factories that are given no device or the word `"cpu"`, and
what is computed from these alone. The word means the host, in `.to("cpu")` too; `batch.device` means the device.

The tape records operators that torch can propagate shapes for, and runs nothing while it captures. What it cannot
record and a device could is refused as `tape-limit` or `no-fake-kernel`: operators without a fake kernel or with one
that fails, higher-order operators, sparse tensors. Kernels that do not go through torch's dispatcher, such as a Triton
kernel, have no CPU form to record."""

_ALLOWED_HEAD = """## Allowed
A replay gives what the forward would give on the inputs of the moment."""

_RANDOM_HEAD = """## Allowed, and drawn anew by every replay
Capturing leaves the generator alone; the default generator's seed decides what replays draw."""


class _WithoutSetting(ast.NodeTransformer):
    """Shows `s.x` as `x`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "s":
            return ast.Name(node.attr)
        return node


def _sources() -> dict[str, str]:
    """The code of each construct, by its name."""
    names = {construct.name for construct in CONSTRUCTS}
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(verdicts)).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                if keyword.arg in names and isinstance(keyword.value, ast.Lambda):
                    found[keyword.arg] = _shown(keyword.value.body)
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            found[node.name] = "; ".join(_shown(statement) for statement in node.body)
    return found


def _shown(node: ast.AST) -> str:
    return " ".join(ast.unparse(_WithoutSetting().visit(node)).split())


def render() -> str:
    """The page."""
    sources = _sources()
    parts = [_HEAD]
    for code, (message, hint) in REFUSALS.items():
        rows = [construct.name for construct in CONSTRUCTS if construct.verdict == code]
        if rows:
            said = message.format(operator="...").replace("`...`", "The operator")
            parts.append(f"## `{code}`\n{said[0].upper()}{said[1:]}. Instead: {hint}.")
            parts.append(_table(rows, sources))
    for verdict, head in ((ALLOWED, _ALLOWED_HEAD), (RANDOM, _RANDOM_HEAD)):
        parts.append(head)
        parts.append(_table([c.name for c in CONSTRUCTS if c.verdict == verdict], sources))
    return "\n\n".join(parts) + "\n"


def _table(names: list[str], sources: dict[str, str]) -> str:
    lines = ["| construct | code |", "| --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | `{sources[name].replace('|', chr(92) + '|')}` |" for name in names]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render())
