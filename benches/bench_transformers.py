"""Tokens a second of transformers' continuous batching: with its own graphs, without any, and with these.

    python benches/bench_transformers.py [--asynchronous] --out FOLDER
    python benches/bench_transformers.py --device cpu --small --out FOLDER    # every path, for its own sake

A random model of Qwen3's 0.6 B form (28 layers, bfloat16) answers 64 requests of 32 prompt tokens with 128 new tokens
each, greedily, all of them there when the session begins. All ways are managers of one model, with caches and batches
of the same size and attention by `paged|sdpa`, kept from session to session; they take turns in one run. What a way
captures before its first session, or in it, is not timed: the first round is not counted.

- own graphs: as transformers has them, keys padded by steps of 16384, its default;
- own graphs, fine: keys padded by steps of 2048, so that what finer sizes gain is told apart from the rest;
- no graphs: as it runs without;
- devicegraph: `enable(manager)` with nothing said.

A session's time goes from handing over the requests to the last answer. Ratios are medians of the rounds' ratios of
times, with the quartiles as spread. On the CPU transformers has no graphs of its own, and the first three are one.

Tokens are compared with those of no graphs. In bfloat16 forwards of other shapes round elsewhere, and a random model
has near ties, so that a request that differs once differs from there on: how many are alike is told, no more. In
float32 (`--small`) all have to be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

import devicegraph as dg
from devicegraph.bench.command import show
from devicegraph.bench.measuring import Result, Spread, Table, take_turns
from devicegraph.commands.arguments import positive_integer
from devicegraph.integrations.transformers import VERSIONS, enable

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN, FINE, NONE, OURS = "own graphs", "own graphs, fine", "no graphs", "devicegraph"


class Load(NamedTuple):
    """What is served."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    #: Of a batch: all prompts fit into one.
    max_batch_tokens: int
    #: Of the cache, of 256 tokens each.
    blocks: int


FULL: Final = Load(requests=64, prompt_tokens=32, new_tokens=128, max_batch_tokens=2048, blocks=128)
SMALL: Final = Load(requests=4, prompt_tokens=8, new_tokens=8, max_batch_tokens=32, blocks=8)


def make_model(device: torch.device, *, is_small: bool) -> Any:
    """A model with random weights: in bfloat16, or a tiny one in float32."""
    import transformers

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    if is_small:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Qwen3Config(**shape, **heads, tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen3ForCausalLM(config)
    model = model.to(torch.float32 if is_small else torch.bfloat16).eval()
    model.set_attn_implementation("paged|sdpa")
    return model


def make_manager(model: Any, load: Load, **options: Any) -> Any:
    """A manager that generates greedily, to the full length of each answer."""
    import transformers

    return model.init_continuous_batching(
        transformers.GenerationConfig(max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            num_blocks=load.blocks,
            max_batch_tokens=load.max_batch_tokens,
            max_requests_per_batch=load.requests,
            allow_block_sharing=False,
            **options,
        ),
    )


def serve(manager: Any, prompts: Sequence[list[int]], answers: dict[str, list[list[int]]], way: str) -> float:
    """One session: its seconds; its tokens are put under the way's name.

    Raises:
        SystemExit: a request failed, or was never answered.
    """
    manager.start()
    begun = time.perf_counter()
    names = manager.add_requests(list(prompts))
    done: dict[str, list[int]] = {}
    while len(done) < len(names):
        output = manager.get_result(timeout=60)
        if output is None or output.error is not None:
            raise SystemExit(f"{way}: {'no answer came' if output is None else output.error}")
        done[output.request_id] = output.generated_tokens
    seconds = time.perf_counter() - begun
    manager.stop(keep_for_next_session=True)
    answers[way] = [done[name] for name in names]
    return seconds


def measure(device: torch.device, rounds: int, *, is_small: bool, is_asynchronous: bool) -> Result:
    """Measures all ways."""
    load = SMALL if is_small else FULL
    model = make_model(device, is_small=is_small)
    generator = torch.Generator().manual_seed(1)
    shape = (load.requests, load.prompt_tokens)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    make = partial(make_manager, model, load, use_async_batching=is_asynchronous)
    managers = {
        OWN: make(use_cuda_graph=True),
        FINE: make(use_cuda_graph=True, kv_padding_interval_size=2048),
        NONE: make(use_cuda_graph=False),
        OURS: make(use_cuda_graph=False),
    }
    answers: dict[str, list[list[int]]] = {}
    with enable(managers[OURS]) as graphs:
        for manager in managers.values():
            manager.warmup()
        times = take_turns({way: partial(serve, each, prompts, answers, way) for way, each in managers.items()}, rounds)
        report, metrics = graphs.report, graphs.runner.metrics()
    tokens = load.requests * load.new_tokens
    table = Table(
        f"{load.requests} requests of {load.prompt_tokens} prompt and {load.new_tokens} new tokens"
        f"{', asynchronous batching' if is_asynchronous else ''}",
        [
            {
                "way": way,
                "tokens/s": tokens / statistics.median(each),
                "ms/session": statistics.median(each) * 1e3,
                "times no graphs": Spread.ratio(times[NONE], each),
                "times own graphs": Spread.ratio(times[OWN], each),
                "answers alike": sum(mine == plain for mine, plain in zip(answers[way], answers[NONE], strict=True)),
            }
            for way, each in times.items()
        ],
        case=load._asdict(),
    )
    if is_small and any(each != answers[NONE] for each in answers.values()):
        raise SystemExit("nothing is told, since tokens are wrong")
    notes = [
        f"transformers {VERSIONS[0]}; {OURS}: {len(report.captured)} graphs, {report.seconds:.1f} s, "
        f"{report.reserved_bytes / 2**20:.0f} MiB; {metrics.hit_rate:.1%} of its steps replayed, "
        f"{metrics.waste:.1%} of their rows padding; eager: {metrics.eager}"
    ]
    return Result("transformers-asynchronous" if is_asynchronous else "transformers", str(device), [table], notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=positive_integer, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--asynchronous", action="store_true", help="batching that overlaps host and device (on CUDA)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the result there as text and as JSON, too")
    arguments = parser.parse_args()
    device = dg.get_device_adapter(arguments.device).device
    result = measure(device, arguments.rounds, is_small=arguments.small, is_asynchronous=arguments.asynchronous)
    show(result, arguments)


if __name__ == "__main__":
    main()
