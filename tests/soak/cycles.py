"""Runners that are made, captured, used and closed, over and over: nothing of them may be left.

Run it in `tests`: `python -m soak.cycles --cycles 200`.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import warnings
import weakref
from typing import Any

from soak.levels import Levels
from soak.world import World

#: After so many cycles every option has been drawn, and everything that is made once was made.
WARM = 20


def run(cycles: int, device: str, seed: int) -> str:
    """Goes through the cycles; what was found.

    Raises:
        AssertionError: a buffer, graph, pool or runner outlived its cycle, or memory grew.
    """
    rng = random.Random(seed)
    gc.collect()
    gc.freeze()
    world = World(device, rng.randint)
    first: Levels | None = None
    held = 0
    for cycle in range(cycles + WARM):
        references = _references(world)
        for _ in range(5):
            world.apply("step", rng.randint)
        world.close()
        level = Levels.now()
        left = [thing for thing in (reference() for reference in references) if thing is not None]
        assert not left, f"cycle {cycle}: {len(left)} of {len(references)} are left, such as {left[0]!r:.200}"
        held += len(references)
        if cycle == WARM:
            first = level
        if first is not None:
            level.check(first)
        del left
        world.open(rng.randint)
    world.close()
    return f"{cycles} cycles: none of {held} buffers, graphs, runners and pools is left; {first}, then {level}\n"


def _references(world: World) -> list[weakref.ref[Any]]:
    """To everything that goes with the runners. Not to streams and events, which may not be referred to weakly."""
    things: list[Any] = []
    for side in world.sides:
        runner = side.runner
        things += [runner, runner.backend, runner.graph_pool, runner.buffer_registry, *runner.graphs.values()]
        things += [slot.buffer for slot in runner.buffer_registry.slots]
    return [weakref.ref(thing) for thing in things]


def main() -> None:
    """Runs the cycles and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    sys.stdout.write(run(arguments.cycles, arguments.device, arguments.seed))


if __name__ == "__main__":
    main()
