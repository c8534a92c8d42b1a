"""What a fill costs on the host, as ratios measured in one run.

    python benches/bench_fill.py [--device cuda] [--rounds 30]

Three ways to do the same step of a decode batch (eight slots, `[3, T]` positions and lengths on the host among them,
100 live rows in a bucket of 128):

- `fill_from`: the registry, checks included;
- `copy_` by field: what a runner writes by hand: a copy for each field, a call for each tail;
- bare grouped copy: one `torch._foreach_copy_` of the same-dtype rows for each device, with all views made beforehand:
  no checks, no padding, nothing looked up. It is the floor of anything that ends in that call.

The ways take turns in every round, so that a noisy machine is noisy for all of them. The last column is the median of
the rounds' ratios, with the quartiles as its spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

from devicegraph import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy, build_decode_registry

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BS, RAW, PADDED = 512, 100, 128


def registry_on(device: torch.device) -> CudaGraphBufferRegistry:
    registry = build_decode_registry(device=device, max_bs=MAX_BS, max_num_token=MAX_BS, seq_len_fill_value=1)
    lora = GraphSlot("lora_ids", lambda bs, tokens: (bs,), torch.int64, axis="bs", padding_policy=PaddingPolicy.ZERO)
    registry.register_slot(lora)
    return registry


def buffers_of(registry: CudaGraphBufferRegistry) -> dict[str, torch.Tensor]:
    return {slot.name: slot.buffer for slot in registry.slots if slot.buffer is not None}


def sources_of(registry: CudaGraphBufferRegistry) -> dict[str, torch.Tensor]:
    return {
        name: torch.randint(1, 1000, (3, RAW) if name == "mrope_positions" else (RAW,), device=buffer.device)
        for name, buffer in buffers_of(registry).items()
    }


def by_registry(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    sizes = {"raw_bs": RAW, "padded_bs": PADDED, "raw_num_tokens": RAW, "padded_num_tokens": PADDED}
    return lambda: registry.fill_from(batch, **sizes)


def by_field(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    buffers = buffers_of(registry)
    slots = [(slot.name, buffers[slot.name], slot.padding_policy, slot.pad_value) for slot in registry.slots]

    def fill() -> None:
        for name, buffer, policy, pad_value in slots:
            buffer[..., :RAW].copy_(batch[name])
            if policy is PaddingPolicy.ZERO:
                buffer[..., RAW:PADDED].zero_()
            elif policy is PaddingPolicy.FILL_SENTINEL:
                buffer[..., RAW:PADDED].fill_(pad_value)

    return fill


def bare(registry: CudaGraphBufferRegistry, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    groups: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, buffer in buffers_of(registry).items():
        dsts, srcs = groups.setdefault(buffer.device, ([], []))
        rows, source = buffer[..., :RAW], batch[name]
        dsts += rows.unbind(0) if rows.ndim > 1 else [rows]
        srcs += source.unbind(0) if source.ndim > 1 else [source]

    def copy() -> None:
        for dsts, srcs in groups.values():
            torch._foreach_copy_(dsts, srcs)

    return copy


def microseconds(step: Callable[[], None], steps: int, wait: Callable[[], None]) -> float:
    """Host time of one step. Waiting is outside: what is queued on the device is not the host's time."""
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    elapsed = time.perf_counter() - start
    wait()
    return elapsed / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200, help="steps of each way in a round")
    options = parser.parse_args()
    device = torch.device(options.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    registry = registry_on(device)
    batch = sources_of(registry)
    ways = {
        "fill_from": by_registry(registry, batch),
        "copy_ by field": by_field(registry, batch),
        "bare grouped copy": bare(registry, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for step in ways.values():
            microseconds(step, options.steps, wait)  # warm
        for _ in range(options.rounds):
            for name, step in ways.items():
                times[name].append(microseconds(step, options.steps, wait))

    print(f"{len(registry.slots)} slots on {device}, {RAW} rows in a bucket of {PADDED}, {options.rounds} rounds")
    print(f"{'':20}{'median us':>12}{'fastest us':>12}   ratio to fill_from (quartiles)")
    for name, measured in times.items():
        ratios = [other / own for other, own in zip(measured, times["fill_from"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{name:20}{statistics.median(measured):12.1f}{min(measured):12.1f}   {spread}")


if __name__ == "__main__":
    main()
