"""Random steps, as many as one likes, held to the model at each of them; the memory of the process stays flat.

Run it in `tests`: `python -m soak.steps --steps 1000000 --out FILE`. A failure is repeated by its seed.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import sys
import time
import warnings
from pathlib import Path

import torch

from soak.levels import Levels
from soak.world import BACKENDS, RULES, World

#: How often runners are closed to measure what is left; the first of them is what the others are held to.
CHECKPOINTS = 20


def run(steps: int, device: str, seed: int) -> list[str]:
    """Takes the steps; figures of the run, a line each.

    Raises:
        AssertionError: something was not as the model has it, or memory grew.
    """
    rng = random.Random(seed)
    gc.collect()
    gc.freeze()  # what imports have made stays; captures need not look through it
    world = World(device, rng.randint)
    for backend in BACKENDS["decode"]:
        world.close()
        world.open(rng.randint, backend)
        _load(world, rng)
    names, weights = list(RULES), list(RULES.values())
    levels: list[Levels] = []
    started = time.perf_counter()
    for checkpoint in range(CHECKPOINTS):
        for rule in rng.choices(names, weights, k=steps // CHECKPOINTS):
            world.apply(rule, rng.randint)
        world.close()
        levels.append(Levels.now())
        levels[-1].check(levels[0])
        world.open(rng.randint)
        sys.stderr.write(f"{(checkpoint + 1) * 100 // CHECKPOINTS}%: {levels[-1]}\n")
    world.close()
    seconds = time.perf_counter() - started
    counts, done = world.counts, steps // CHECKPOINTS * CHECKPOINTS
    captures = sum(counts[rule] for rule in ("recapture", "out_of_memory", "failing_capture", "capture_one"))
    first, last = levels[0], levels[-1]
    return [
        f"{done} steps in {seconds:.0f} s, {done / seconds:.0f} steps/s, seed {seed}: every output, decision and count "
        "as the model has it",
        f"{counts['replays']} replays, {counts['eager steps']} eager steps, {counts['eager_between']} forwards between",
        f"{captures} captures anew, opened {counts['opened']} times",
        "rules: " + ", ".join(f"{name} {counts[name]}" for name in RULES),
        f"rss {first.rss / 2**20:.1f} MiB after {100 // CHECKPOINTS}% of the steps, {last.rss / 2**20:.1f} MiB at the "
        f"end; heap {first.heap / 2**20:.2f}, {last.heap / 2**20:.2f} MiB; objects {first.objects}, {last.objects}; "
        f"blocks {first.blocks}, {last.blocks}",
        f"alike at all {CHECKPOINTS} checkpoints: threads {last.threads}, files {last.files}, tapes {last.tapes}, "
        f"pooled {last.pooled}, device bytes {last.device}, pinned bytes {last.pinned}",
    ]


def _load(world: World, rng: random.Random) -> None:
    """Has both runners load what they need, such as kernels of which only some backends make use."""
    for side in world.sides:
        world.recapture(side, rng.randint)
        world.step(side, rng.randint)


def main() -> None:
    """Runs the steps, prints the figures and writes them where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    lines = run(arguments.steps, arguments.device, arguments.seed)
    place = torch.cuda.get_device_name() if arguments.device == "cuda" else "the CPU tape"
    versions = f"# {place}, Python {platform.python_version()}, torch {torch.__version__}"
    text = "\n".join(
        [f"# python -m soak.steps --steps {arguments.steps} --device {arguments.device}", versions, *lines, ""]
    )
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
