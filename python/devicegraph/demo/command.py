"""`devicegraph demo`: serve prompts through captured graphs, check every token, and print what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from devicegraph.commands.arguments import positive_integer
from devicegraph.commands.explain import read_config
from devicegraph.config import ALLOWED_BACKENDS_PER_PHASE, CudaGraphConfig, Phase
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from devicegraph.demo.serve import DemoResult, PhaseResult, Speculation

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
    for phase, backends in ALLOWED_BACKENDS_PER_PHASE.items():
        default = CudaGraphConfig()[phase].backend
        parser.add_argument(
            f"--{phase}", choices=backends, help=f"the backend of the {phase} phase (default: {default})"
        )
    parser.add_argument("--config", help="the configuration: JSON text, or a JSON or TOML file")
    parser.add_argument("--model", metavar="FOLDER", help="a Llama-family checkpoint (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--prompts", metavar="FILE", help="a text file with a prompt in each line (default: eight of ours)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive_integer, default=48, help="for each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-requests", type=positive_integer, default=6, help="served at once (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prefill-tokens", type=positive_integer, default=128, help="of prompts in one step (default: %(default)s)"
    )
    parser.add_argument(
        "--proposals",
        metavar="TOKENS",
        type=positive_integer,
        default=0,
        help="that are proposed for each request in a step, and verified in one (default: none)",
    )
    parser.add_argument(
        "--draft-layers",
        metavar="LAYERS",
        type=positive_integer,
        help="of the model, that propose (default: prompt lookup); a few of SmolLM2's guess next to nothing",
    )
    parser.add_argument("--audit", action="store_true", help="audit both forwards instead of serving")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 where a graph decided a token that the eager forward does not, or an audit found something.

    Raises:
        DeviceGraphError: what the user gave cannot be used.
    """
    # torch is loaded here, not where the parser is built.
    import torch

    from devicegraph.demo.serve import DemoOptions, audit_demo, run_demo

    device = arguments.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = CudaGraphConfig() if arguments.config is None else read_config(arguments.config)
    for phase in Phase.ALL:
        if (backend := getattr(arguments, phase)) is not None:
            config = config.with_phase(phase, backend=backend)
    options = DemoOptions(
        prompts=_read_prompts(arguments.prompts) if arguments.prompts is not None else PROMPTS,
        config=config,
        device=device,
        model=arguments.model,
        max_new_tokens=arguments.max_new_tokens,
        max_requests=arguments.max_requests,
        max_prefill_tokens=arguments.max_prefill_tokens,
        proposals=arguments.proposals,
        draft_layers=arguments.draft_layers,
    )
    if arguments.audit:
        reports = audit_demo(options)
        shown = json.dumps({name: report.to_dict() for name, report in reports.items()}, indent=2)
        lines = [f"{name}: {report}" for name, report in reports.items()]
        sys.stdout.write((shown if arguments.json else "\n".join(lines)) + "\n")
        return 0 if all(report.ok for report in reports.values()) else 1
    result = run_demo(options)
    sys.stdout.write((json.dumps(to_dict(result), indent=2) if arguments.json else describe(result)) + "\n")
    return 0 if result.ok else 1


def describe(result: DemoResult) -> str:
    """The result for people."""
    lines = [f"{result.model} on {result.device}", ""]
    for answer in result.answers:
        lines += [f"> {answer.prompt}", answer.text, ""]
    for name, phase in result.phases.items():
        lines += [*_describe_phase(name, phase), ""]
    if result.speculation is not None:
        lines += [*_describe_speculation(result, result.speculation), ""]
    if not result.ok:
        lines += ["MISMATCH: a graph decided tokens that the eager forward on the same batch does not"]
    return "\n".join(lines).rstrip()


def _describe_phase(name: str, phase: PhaseResult) -> list[str]:
    metrics, checks = phase.metrics, phase.checks
    buckets = ", ".join(f"{key.size}: {count}" for key, count in sorted(metrics.replays.items()))
    eager = ", ".join(f"{count} {code}" for code, count in sorted(metrics.eager.items())) or "none"
    if name in ("verify", "draft"):  # how many of their tokens are of use shows below
        steps = metrics.steps or 1
        speed = f"{_ms(phase.graph_seconds / steps)} a step, eager {_ms(phase.eager_seconds / steps)}"
    else:
        speed = f"{_rate(phase.tokens, phase.graph_seconds)}, eager {_rate(phase.tokens, phase.eager_seconds)}"
    title = str(phase.capture)
    return [
        title if name == phase.capture.phase else f"{name}: {title}",
        "",
        f"{name + ' steps':<15} {metrics.steps}, {metrics.hit_rate:.1%} replayed",
        f"replays         {buckets or 'none'} (bucket: count)",
        f"eager steps     {eager}",
        f"padded rows     {metrics.padded_rows} of {metrics.padded_rows + metrics.raw_rows} ({metrics.waste:.1%})",
        f"speed           {speed} ({_ratio(phase):.2f}x)",
        f"checked         {checks.decided} tokens against eager on the same padded batches: "
        f"{checks.mismatches} differ, {checks.bitwise} of {sum(metrics.replays.values())} steps equal bit for bit",
        f"raw shapes      {checks.raw_differences} of {checks.decided} tokens differ from eager on unpadded batches",
    ]


def _describe_speculation(result: DemoResult, found: Speculation) -> list[str]:
    phases = [result.phases[name] for name in ("verify", "draft") if name in result.phases]
    seconds = sum(phase.graph_seconds for phase in phases)
    share = found.accepted / found.proposed if found.proposed else 0.0
    return [
        f"proposals       {found.accepted} of {found.proposed} accepted ({share:.1%}): "
        f"{found.tokens} tokens, where steps of one token give {found.rows}",
        f"speed with them {_rate(found.tokens, seconds)}{', drafts included' if len(phases) > 1 else ''}",
    ]


def to_dict(result: DemoResult) -> dict[str, Any]:
    """The result for machines."""
    return {
        "ok": result.ok,
        "model": result.model,
        "device": result.device,
        "config": result.config.to_dict(full=True),
        "answers": [vars(answer) for answer in result.answers],
        **{name: _phase_to_dict(phase) for name, phase in result.phases.items()},
        "speculation": None if result.speculation is None else vars(result.speculation),
    }


def _phase_to_dict(phase: PhaseResult) -> dict[str, Any]:
    metrics = phase.metrics
    return {
        "capture": phase.capture.to_dict(),
        "steps": metrics.steps,
        "replays": {str(key.size): count for key, count in sorted(metrics.replays.items())},
        "eager": metrics.eager,
        "raw_rows": metrics.raw_rows,
        "padded_rows": metrics.padded_rows,
        "recompiles": metrics.recompiles,
        "checks": vars(phase.checks),
        "tokens": phase.tokens,
        "graph_seconds": phase.graph_seconds,
        "eager_seconds": phase.eager_seconds,
    }


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds if seconds else 0:.0f} tokens/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _ratio(phase: PhaseResult) -> float:
    return phase.eager_seconds / phase.graph_seconds if phase.graph_seconds else 0.0


def _read_prompts(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`--prompts`: `{file}` cannot be read: {error}", code="prompts-unreadable") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"`--prompts`: `{file}` holds no prompt", code="prompts-unreadable")
    return prompts
