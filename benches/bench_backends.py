"""What each backend makes of the steps of a decoder, all measured in one run on one device.

    python benches/bench_backends.py --out FOLDER
    python benches/bench_backends.py --device cpu --small --out FOLDER    # every path but Meta's, for its own sake

The decoder has 28 layers (hidden size 1024, 16 heads, 8 key-value heads, bfloat16, random weights). Its attention is
one function: the break of breakable captures, the operator at which compiled ones are split, and the break of Meta's
package `breakable-cuda-graphs`, which is left out, with the reason, where it cannot be used.

Before anything is timed, the outputs of all forms are compared with eager's: bit for bit, but for what inductor
compiled, which rounds at other places. Nothing is timed if one is wrong.

Two things are timed, at sizes that are buckets, so that nothing is padded:

- replay: the forward alone, on static buffers that are filled and with metadata that is prepared: the eager call, or
  the replay of the captured graphs and the breaks between them;
- run: the whole step, `runner.run(batch)` on a live batch: decision, fill, metadata, replay, trim. Eager steps read the
  live batch where it lies and fill nothing; Meta's package has no such step.

Each step starts on an idle device. Its step time goes from there to the end of its last kernel, by CUDA events (on the
CPU it is the host time); its host time is the wall clock of the launching CPU until the call returns. Forms take turns
in every round. Times are medians of all steps; ratios are medians of the rounds' ratios, with the quartiles as spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

import devicegraph as dg
from decoder import ATTEND, PrefillEngine, attend_nothing
from devicegraph.backends.breaks import batch_in_use
from devicegraph.bench.decoder import SMALL, Batch, Cache, DecodeEngine, Decoder, Engine, Shape, attend
from forms import FORMS, MARKS, META, Form, fill, find_package, meta_form, package_form

if TYPE_CHECKING:
    from collections.abc import Callable

    Times = tuple[list[float], list[float]]

REGIONS: Final = ("replay", "run")
#: Of eager's largest value. Compiled kernels round at other places than bfloat16 operators; all other forms launch
#: eager's kernels, and equal it bit for bit.
TOLERANCE: Final = {"tc_piecewise inductor": 0.05}


def measure_capture(form: Form, device: torch.device) -> dict[str, Any]:
    """What a capture takes: seconds, and the memory that stays taken when all caches are emptied."""
    adapter = dg.get_device_adapter(device)

    def memory() -> dg.DeviceMemory:
        gc.collect()
        adapter.synchronize()
        adapter.empty_cache()
        return adapter.memory()

    before, begun = memory(), time.perf_counter()
    graphs, first_seconds = form.capture()
    seconds, after = time.perf_counter() - begun, memory()
    device_bytes = None if before.free is None or after.free is None else before.free - after.free
    return {
        "graphs": graphs,
        "seconds": seconds,
        "first_seconds": first_seconds,
        "reserved_bytes": after.reserved - before.reserved,
        "device_bytes": device_bytes,
    }


def verify(
    forms: list[Form], engine: Engine, blind: Engine, registry: dg.CudaGraphBufferRegistry
) -> tuple[dict[str, float], float]:
    """Compares the outputs of all forms with eager's, at all sizes and in both regions.

    Returns:
        The largest difference of each form from eager, over eager's largest value; and the smallest that an engine
        without attention has, which the comparison must be able to see.

    Raises:
        SystemExit: a form differs more than it may: what it takes is of no interest then.
    """
    found = {form.name: 0.0 for form in forms}
    seen = float("inf")
    wrong = []
    for size in engine.buckets:
        # Other tokens each time: an output that nobody wrote is not the one that is wanted.
        for seed, region in enumerate(REGIONS * 2, start=1):
            batch = engine.batch(size, seed)
            static = fill(engine, registry, batch)
            with batch_in_use(static):
                want = forms[0].replay(static)().float()
                seen = min(seen, difference_of(blind.forward(static), want))
                for form in forms:
                    step = partial(form.run, batch) if region == "run" and form.run else form.replay(static)
                    difference = difference_of(step(), want)
                    found[form.name] = max(found[form.name], difference)
                    if not difference <= TOLERANCE.get(form.name, 0.0):  # not so, too, if it is no number
                        wrong.append(f"{engine.phase} {size}, {region}: `{form.name}` differs by {difference:.2g}")
    if not seen > 3 * max(TOLERANCE.values()):
        wrong.append(f"{engine.phase}: without attention it differs by {seen:.2g}, which a tolerance could hide")
    if wrong:
        raise SystemExit("\n".join(["nothing is timed, since outputs are wrong:", *wrong]))
    return found, seen


def difference_of(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return float("nan")
    return float((got.float() - want).abs().max() / want.abs().max())


def measure_steps(forms: list[Form], engine: Engine, batch: Batch, static: Batch, rounds: int, steps: int) -> Any:
    """Rounds of (step times, host times) in microseconds, for each (form, region)."""
    is_cuda = engine.device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []

    def measure(step: Callable[[], Any]) -> tuple[float, float]:
        if is_cuda:
            torch.cuda.synchronize()
            events[0].record()
        begun = time.perf_counter()
        step()
        host = (time.perf_counter() - begun) * 1e6
        if not is_cuda:
            return host, host
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) * 1e3, host

    ways: list[tuple[tuple[str, str], Callable[[], Any]]] = []
    ways += [((form.name, "replay"), form.replay(static)) for form in forms]
    ways += [((form.name, "run"), partial(form.run, batch)) for form in forms if form.run is not None]
    measured: dict[tuple[str, str], list[Times]] = {way: [] for way, _ in ways}
    with batch_in_use(static), dg.freeze_gc():
        for turn in range(rounds):
            first = turn % len(ways)
            for way, step in ways[first:] + ways[:first]:
                step()  # the caches are the last form's
                times = [measure(step) for _ in range(steps)]
                measured[way].append(([time[0] for time in times], [time[1] for time in times]))
    return measured


def ratio(rounds: list[Times], base: list[Times], kind: int) -> list[float]:
    """Quartiles of the rounds' ratios of medians: the step's (kind 0) or the host's (1)."""
    pairs = zip(rounds, base, strict=True)
    ratios = [statistics.median(a[kind]) / statistics.median(b[kind]) for a, b in pairs]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def summary(measured: dict[tuple[str, str], list[Times]]) -> list[dict[str, Any]]:
    rows = []
    for (name, region), rounds in measured.items():
        base = measured["eager", region]
        row: dict[str, Any] = {"form": name, "region": region}
        for kind, word in enumerate(("step", "host")):
            row[f"{word}_us"] = statistics.median(time for times in rounds for time in times[kind])
            row[f"{word}_of_eager"] = ratio(rounds, base, kind)
            if name == "breakable" and (META, region) in measured:
                row[f"{word}_of_meta"] = ratio(rounds, measured[META, region], kind)
        rows.append(row)
    return rows


def measure_phase(
    kind: type[Engine], shape: Shape, model: Decoder, cache: Cache, package: Any, rounds: int, steps: int
) -> dict[str, Any]:
    engine = kind(shape, model, cache, attend)
    bs, tokens = engine.limits.max_bs, engine.limits.max_num_tokens
    if engine.phase == "decode":
        registry = dg.build_decode_registry(device=engine.device, max_bs=bs, max_num_token=tokens, seq_len_fill_value=1)
    else:
        registry = dg.build_prefill_registry(device=engine.device, max_bs=bs, max_num_token=tokens)

    def form(name: str) -> Form:
        return package_form(name, kind(shape, model, cache, MARKS.get(name.split()[0], attend)), registry)

    # Kernels are loaded and workspaces made before anything is measured.
    first = form("breakable")
    first.capture()
    first.close()
    forms = [form(name) for name in FORMS[engine.phase]]
    if package is not None:
        forms.append(meta_form(package, kind(shape, model, cache, package.no_graph(attend)), registry))
    captures = {form.name: measure_capture(form, engine.device) for form in forms}
    tell(f"{engine.phase}: captured")
    cache.write_history()
    differences, without_attention = verify(forms, engine, kind(shape, model, cache, attend_nothing), registry)
    for name, difference in differences.items():
        captures[name]["difference"] = difference
    tell(f"{engine.phase}: outputs are right")
    times = {}
    for size in engine.buckets:
        batch = engine.batch(size, seed=1)
        static = fill(engine, registry, batch)
        times[str(size)] = summary(measure_steps(forms, engine, batch, static, rounds, steps))
        tell(f"{engine.phase} {size}: measured")
    for form_ in forms:
        form_.close()
    return {"captures": captures, "without_attention": without_attention, "sizes": times}


def tell(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def spread(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(phase: str, result: dict[str, Any]) -> list[str]:
    unit = "requests" if phase == "decode" else "tokens"
    sizes = ", ".join(result["sizes"])
    lines = [
        f"{phase}: captures of {sizes} {unit}",
        f"{'':24}{'graphs a step':>14}{'seconds':>9}{'first size':>12}{'reserved MiB':>14}{'device MiB':>12}"
        f"{'differs by':>12}",
    ]
    for name, taken in result["captures"].items():
        device = "-" if taken["device_bytes"] is None else f"{taken['device_bytes'] / 2**20:.1f}"
        lines.append(
            f"{name:24}{taken['graphs']:14}{taken['seconds']:9.2f}{taken['first_seconds']:12.2f}"
            f"{taken['reserved_bytes'] / 2**20:14.1f}{device:>12}{taken['difference']:12.2g}"
        )
    lines.append(f"without attention eager differs by {result['without_attention']:.2g} or more")
    for size, rows in result["sizes"].items():
        for region in REGIONS:
            lines += ["", f"{phase}, {size} {unit}: {region}"]
            lines.append(f"{'':24}{'step us':>12}{'host us':>12}   step, of eager's          host, of eager's")
            shown = [row for row in rows if row["region"] == region]
            for row in shown:
                ratios = f"{spread(row['step_of_eager']):26}{spread(row['host_of_eager'])}"
                lines.append(f"{row['form']:24}{row['step_us']:12.1f}{row['host_us']:12.1f}   {ratios}")
            lines += [
                f"breakable, of {META}: step {spread(row['step_of_meta'])}, host {spread(row['host_of_meta'])}"
                for row in shown
                if "step_of_meta" in row
            ]
    return [*lines, ""]


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": torch.version.cuda, "devicegraph": dg.__version__}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets `backends.txt` and `.json`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and two rounds: to see that all of it runs")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = dg.get_device_adapter(options.device).device
    shape, rounds, steps = (SMALL, 2, 2) if options.small else (Shape(), 15, 10)
    package, meta = find_package(device)
    dg.register_split_op(ATTEND)
    torch.manual_seed(0)
    model = Decoder(shape).to(device, torch.bfloat16).requires_grad_(False)
    cache = Cache(shape, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    known = {**versions(), META: meta}
    about: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": name,
        "versions": known,
        "shape": asdict(shape),
        "rounds": rounds,
        "steps": steps,
        "tolerance": TOLERANCE,
    }
    phases: dict[str, Any] = {}
    # Compiled kernels of earlier runs would make this one's captures look fast.
    with torch.no_grad(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for kind in (DecodeEngine, PrefillEngine):
            phases[kind.phase] = measure_phase(kind, shape, model, cache, package, rounds, steps)
    seconds = time.perf_counter() - begun
    head = [
        f"# Steps of a decoder of {shape.layers} layers under each backend, all measured in one run",
        f"# device: {name}",
        f"# versions: {', '.join(f'{what} {value}' for what, value in known.items())}",
        f"# date: {about['date']}, {seconds:.0f} s, {rounds} rounds of {steps} steps of each form",
        f"# command: {about['command']}",
        "",
    ]
    text = "\n".join([*head, *(line for phase, result in phases.items() for line in table(phase, result))])
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "backends.txt").write_text(text, encoding="utf-8")
    (options.out / "backends.json").write_text(
        json.dumps({**about, "seconds": seconds, **phases}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
