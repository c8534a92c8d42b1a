"""Curves of what `devicegraph bench fill` and `memory` wrote, as PNG beside the data. Needs matplotlib.

devicegraph bench fill --out benches/results && python benches/plot.py benches/results
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

#: What a curve of fills runs along, and what is the same at all of its points.
CURVES = {
    "slots": {"requests": 64, "tokens": 64},
    "requests": {"slots": 8},
    "tokens": {"slots": 8, "requests": 8},
}


def points(tables: list[dict[str, Any]], along: str) -> dict[str, list[tuple[int, float]]]:
    """The host time of each way, by what the curve runs along."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for table in tables:
        case = table["case"]
        if not case or any(case[name] != value for name, value in CURVES[along].items()):
            continue
        if along == "requests" and case["tokens"] != case["requests"]:
            continue  # a case of prefill
        for row in table["rows"]:
            curves.setdefault(row["way"], []).append((case[along], row["host us"]))
    return {way: sorted(found) for way, found in curves.items()}


def plot_fill(data: dict[str, Any], axes: Any) -> None:
    for axis, along in zip(axes, CURVES, strict=True):
        for way, found in points(data["tables"], along).items():
            axis.plot(*zip(*found, strict=True), marker="o", label=way)
        axis.set(xscale="log", yscale="log", xlabel=along, ylabel="host us")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)


def plot_memory(data: dict[str, Any], axes: Any) -> None:
    tables = [table for table in data["tables"] if table["case"]]
    kinds = ("reserved", "executable", "its output")
    for axis, kind in zip(axes, kinds, strict=True):
        for table in tables:
            sizes = [row["bs"] for row in table["rows"]]
            values = [row[kind] or 0.0 for row in table["rows"]]
            axis.plot(range(1, len(sizes) + 1), list(accumulate(values)), label=table["case"]["model"])
        axis.set(xlabel="graphs, in order of capture", ylabel="MiB", title=f"{kind}, all so far", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what has `fill.json` or `memory.json`")
    folder = parser.parse_args().folder
    from matplotlib import pyplot

    for name, plot in (("fill", plot_fill), ("memory", plot_memory)):
        if not (folder / f"{name}.json").is_file():
            continue
        data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
        plot(data, axes)
        figure.suptitle(f"{name} on {data['device']}, torch {data['versions']['torch']}, {data['date']}")
        figure.savefig(folder / f"{name}.png", dpi=110)
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
