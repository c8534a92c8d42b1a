"""The reference engine with graphs, the same without, and transformers' continuous batching with and without its own.

All of them serve the same prompts with the same random weights to the same number of greedy tokens, and take turns in
one run. A way is warmed up by serving all prompts once before the clock starts: graphs are captured and kernels loaded.
What is measured is from the first request handed in to the last token read.

    python benches/bench_engine.py --out benches/results
    python benches/bench_engine.py --device cpu --small --out /tmp/results
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import devicegraph as dg
from devicegraph.bench.measuring import Result, Spread, Table, queued_microseconds, take_turns
from devicegraph.demo.checkpoint import import_transformers
from devicegraph.demo.engine import EAGER, Engine
from devicegraph.demo.model import ATTENTION, register_attention

if TYPE_CHECKING:
    from collections.abc import Callable

OURS, PLAIN = "devicegraph", "devicegraph, eager"
THEIRS, THEIRS_EAGER = "transformers, its graphs", "transformers, eager"


@dataclass(frozen=True)
class Load:
    """The model's sizes and what is served."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    width: int = 128
    intermediate: int = 3072
    vocabulary: int = 151936
    requests: int = 64
    prompt: int = 32
    new: int = 128

    @property
    def tokens(self) -> int:
        """Generated in all."""
        return self.requests * self.new


SMALL = Load(2, 64, 4, 2, 16, 96, 512, requests=6, prompt=8, new=6)


def make_model(load: Load, device: torch.device, attention: str) -> Any:
    transformers = import_transformers()
    config = transformers.Qwen3Config(
        hidden_size=load.hidden,
        intermediate_size=load.intermediate,
        num_hidden_layers=load.layers,
        num_attention_heads=load.heads,
        num_key_value_heads=load.kv_heads,
        head_dim=load.width,
        vocab_size=load.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.eos_token_id = -1
    return model


class Ours:
    """Our engine, captured where it has graphs to capture."""

    def __init__(self, model: Any, load: Load, config: dg.CudaGraphConfig) -> None:
        self.engine = Engine(
            model,
            config=config,
            max_requests=load.requests,
            max_length=load.prompt + load.new,
            max_prefill_tokens=load.requests * load.prompt,
        )
        self.engine.capture()
        self.steps = 0
        self.batch: Any = None
        run = self.engine.run["decode"]

        def counted(batch: Any) -> Any:
            self.steps += 1
            self.batch = batch
            return run(batch)

        self.engine.run["decode"] = counted

    def serve(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The tokens that each prompt gets."""
        requests = [self.engine.submit(prompt, max_new_tokens=new) for prompt in prompts]
        for _ in self.engine.stream():
            pass
        return [request.generated for request in requests]


def serve_theirs(model: Any, load: Load, prompts: list[list[int]], *, graphs: bool, rounds: int) -> tuple[float, Any]:
    """Seconds of the last of some rounds on one manager, and its tokens; the others warm it up."""
    transformers = import_transformers()
    generation = transformers.GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1)
    room = load.requests * (-(-(load.prompt + load.new) // 256) + 1)
    batching = transformers.ContinuousBatchingConfig(
        use_cuda_graph=graphs, num_blocks=room, max_batch_tokens=max(load.requests * load.prompt, 256)
    )
    seconds = 0.0
    order: list[str] = []
    found: dict[str, list[int]] = {}
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, timeout=30
        ) as manager,
    ):
        for _ in range(rounds):
            begun = time.perf_counter()
            order = manager.add_requests(inputs=prompts, max_new_tokens=load.new)
            found = {}
            while len(found) < len(order):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise SystemExit("transformers' continuous batching stopped")
                if result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            seconds = time.perf_counter() - begun
    answers = [found[name] for name in order]
    if any(len(answer) != load.new for answer in answers):
        raise SystemExit("transformers' continuous batching did not generate what was asked for")
    return seconds, answers


def measure(load: Load, device: torch.device, rounds: int, name: str) -> Result:
    register_attention()
    prompts = [
        [random.Random(row).randrange(load.vocabulary) for _ in range(load.prompt)] for row in range(load.requests)
    ]
    model = make_model(load, device, ATTENTION)
    theirs = make_model(load, device, "sdpa")
    theirs.load_state_dict(model.state_dict(), assign=True)
    adapter = dg.get_device_adapter(device)
    whole = load.requests * load.prompt
    config = dg.CudaGraphConfig(
        prefill={"backend": "breakable", "bs": [whole]}, decode={"bs": decode_sizes(load.requests)}
    )
    engines = {OURS: Ours(model, load, config), PLAIN: Ours(model, load, EAGER)}
    answers: dict[str, list[list[int]]] = {}

    def ours(way: str) -> float:
        engine = engines[way]
        engine.steps = 0
        gc.collect()
        adapter.synchronize()
        begun = time.perf_counter()
        answers[way] = engine.serve(prompts, load.new)
        return time.perf_counter() - begun

    def other(way: str) -> float:
        gc.collect()
        seconds, answers[way] = serve_theirs(theirs, load, prompts, graphs=way == THEIRS, rounds=2)
        tell(f"{way}: {load.tokens / seconds:.0f} tokens/s")
        return seconds

    ways: dict[str, Callable[[], float]] = {
        OURS: lambda: ours(OURS),
        PLAIN: lambda: ours(PLAIN),
        THEIRS: lambda: other(THEIRS),
        THEIRS_EAGER: lambda: other(THEIRS_EAGER),
    }
    times = take_turns(ways, rounds)
    table = Table(f"{load.requests} requests of {load.prompt} prompt and {load.new} new tokens, greedy")
    for way, seconds in times.items():
        table.rows.append(
            {
                "way": way,
                "tokens/s": Spread.of([load.tokens / each for each in seconds]),
                f"{OURS} is faster by": Spread.ratio(seconds, times[OURS]),
                "tokens as by ours": share(answers[way], answers[OURS]),
            }
        )
    return Result(name, str(device), [table, steps_table(engines, times, adapter)], [shape_of(load)])


def steps_table(engines: dict[str, Ours], times: dict[str, list[float]], adapter: dg.DeviceAdapter) -> Table:
    """What a decode step takes in the engine, and what the runner's part of it takes where nobody reads its tokens."""
    table = Table("decode steps of the engine, and the largest alone, queued without reading its tokens (ms)")
    for way, engine in engines.items():
        batch, runner = engine.batch, engine.engine.runners["decode"]
        with torch.inference_mode():
            alone = queued_microseconds(adapter, partial(runner.run, batch), 10)
        metrics = runner.metrics()
        table.rows.append(
            {
                "way": way,
                "steps": engine.steps,
                "whole, prefill in it": statistics.median(times[way]) / engine.steps * 1e3,
                "queued": alone / 1e3,
                "replayed": f"{metrics.hit_rate:.0%}",
            }
        )
    return table


def decode_sizes(requests: int) -> list[int]:
    return sorted({size for size in (1, 2, 4, 8, 16, 32, 64, requests) if size <= requests})


def share(answers: list[list[int]], other: list[list[int]]) -> str:
    pairs = [a == b for mine, theirs in zip(answers, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return f"{sum(pairs) / len(pairs):.0%}"


def shape_of(load: Load) -> str:
    transformers = import_transformers()
    return (
        f"Qwen3 of {load.layers} layers, hidden {load.hidden}, {load.heads} query heads, {load.kv_heads} of keys, head "
        f"width {load.width}, intermediate {load.intermediate}, vocabulary {load.vocabulary}, random weights in "
        f"bfloat16; transformers {transformers.__version__}. Random logits lie close together, and bfloat16 kernels "
        "differ by shape: one token that differs changes all behind it."
    )


def tell(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the result, as text and as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="a tiny model: to see that all of it runs")
    options = parser.parse_args()
    device = dg.get_device_adapter(options.device).device
    short = torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else platform.machine()
    load = SMALL if options.small else Load(requests=options.requests)
    result = measure(load, device, options.rounds, f"engine-{short}")
    print(result)
    result.write(options.out)


if __name__ == "__main__":
    main()
