"""`devicegraph demo`: serve prompts through captured graphs, check every token, and print what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from devicegraph.commands.explain import read_config
from devicegraph.config import Backend, CudaGraphConfig
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from devicegraph.demo.serve import DemoResult

PROMPTS: Final = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    "Explain in simple words why the sky is blue and why sunsets are red.",
    "What is 7 times 8?",
    "Give me a short recipe for pancakes with only four ingredients, please.",
    "Who wrote Romeo and Juliet?",
    "Hi!",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--device", help="where to run, such as cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--decode", choices=Backend.ALL, help="the backend of the decode phase (default: full)")
    parser.add_argument("--config", help="the configuration: JSON text, or a JSON or TOML file")
    parser.add_argument("--model", metavar="FOLDER", help="a Llama-family checkpoint (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--prompts", metavar="FILE", help="a text file with a prompt in each line (default: eight of ours)"
    )
    parser.add_argument("--max-new-tokens", type=_positive, default=48, help="for each prompt (default: %(default)s)")
    parser.add_argument("--max-requests", type=_positive, default=6, help="served at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 where a graph decided a token that the eager forward does not.

    Raises:
        DeviceGraphError: what the user gave cannot be used.
    """
    # torch is loaded here, not where the parser is built.
    import torch

    from devicegraph.demo.serve import DemoOptions, run_demo

    device = arguments.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = CudaGraphConfig() if arguments.config is None else read_config(arguments.config)
    if arguments.decode is not None:
        config = config.with_phase("decode", backend=arguments.decode)
    options = DemoOptions(
        prompts=_read_prompts(arguments.prompts) if arguments.prompts is not None else PROMPTS,
        config=config,
        device=device,
        model=arguments.model,
        max_new_tokens=arguments.max_new_tokens,
        max_requests=arguments.max_requests,
    )
    result = run_demo(options)
    sys.stdout.write((json.dumps(to_dict(result), indent=2) if arguments.json else describe(result)) + "\n")
    return 0 if result.ok else 1


def describe(result: DemoResult) -> str:
    """The result for people."""
    lines = [f"{result.model} on {result.device}", ""]
    for answer in result.answers:
        lines += [f"> {answer.prompt}", answer.text, ""]
    metrics, checks = result.metrics, result.checks
    lines += [str(result.capture), ""]
    buckets = ", ".join(f"{key.size}: {count}" for key, count in sorted(metrics.replays.items()))
    eager = ", ".join(f"{count} {code}" for code, count in sorted(metrics.eager.items())) or "none"
    lines += [
        f"decode steps    {metrics.steps}, {metrics.hit_rate:.1%} replayed",
        f"replays         {buckets or 'none'} (bucket: count)",
        f"eager steps     {eager}",
        f"padded rows     {metrics.padded_rows} of {metrics.padded_rows + metrics.raw_rows} ({metrics.waste:.1%})",
        f"speed           {_rate(result, result.graph_seconds)} tokens/s, eager {_rate(result, result.eager_seconds)}"
        f" ({_ratio(result):.2f}x)",
        f"checked         {checks.tokens} tokens against eager on the same padded batches: "
        f"{checks.mismatches} differ, {checks.bitwise} of {sum(metrics.replays.values())} steps equal bit for bit",
        f"raw shapes      {checks.raw_differences} of {checks.tokens} tokens differ from eager on unpadded batches",
    ]
    if not result.ok:
        lines += ["", "MISMATCH: a graph decided tokens that the eager forward on the same batch does not"]
    return "\n".join(lines)


def to_dict(result: DemoResult) -> dict[str, Any]:
    """The result for machines."""
    metrics, checks = result.metrics, result.checks
    return {
        "ok": result.ok,
        "model": result.model,
        "device": result.device,
        "config": result.config.to_dict(full=True),
        "answers": [vars(answer) for answer in result.answers],
        "capture": result.capture.to_dict(),
        "steps": metrics.steps,
        "replays": {str(key.size): count for key, count in sorted(metrics.replays.items())},
        "eager": metrics.eager,
        "raw_rows": metrics.raw_rows,
        "padded_rows": metrics.padded_rows,
        "checks": vars(checks),
        "decoded_tokens": result.decoded_tokens,
        "graph_seconds": result.graph_seconds,
        "eager_seconds": result.eager_seconds,
    }


def _rate(result: DemoResult, seconds: float) -> str:
    return f"{result.decoded_tokens / seconds:.0f}" if seconds else "-"


def _ratio(result: DemoResult) -> float:
    return result.eager_seconds / result.graph_seconds if result.graph_seconds else 0.0


def _read_prompts(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`--prompts`: `{file}` cannot be read: {error}", code="prompts-unreadable") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"`--prompts`: `{file}` holds no prompt", code="prompts-unreadable")
    return prompts


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "positive integer"  # argparse names the type in its message
