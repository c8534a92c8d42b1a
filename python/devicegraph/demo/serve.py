"""What `devicegraph demo` runs: prompts through the engine, with every step held to the eager forward."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.demo.checkpoint import load_checkpoint
from devicegraph.demo.engine import EAGER, Engine, check_draft
from devicegraph.demo.graphs import DecodeOutput
from devicegraph.demo.model import ATTENTION, register_attention
from devicegraph.devices import get_device_adapter
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.auditing import AuditReport
    from devicegraph.config import CudaGraphConfig
    from devicegraph.demo.checkpoint import Checkpoint
    from devicegraph.demo.engine import Step
    from devicegraph.demo.scheduler import Request
    from devicegraph.metrics import StepMetrics
    from devicegraph.report import CaptureReport
    from devicegraph.runners.base import BaseCudaGraphRunner


@dataclass
class Answer:
    """What the model said to a prompt."""

    prompt: str
    text: str
    tokens: int


@dataclass
class Checks:
    """What holding replays to the eager forward found.

    Attributes:
        decided: tokens that were decided by a replay and checked.
        mismatches: those for which the eager forward on the same padded batch decides otherwise; none is tolerated.
        bitwise: replays whose output equals that of the eager forward on the same padded batch bit for bit.
        raw_differences: decided tokens for which the eager forward on the unpadded batch decides otherwise. Kernels may
            add up in another order for another shape, so in bfloat16 a few are normal.
    """

    decided: int = 0
    mismatches: int = 0
    bitwise: int = 0
    raw_differences: int = 0


@dataclass
class PhaseResult:
    """What the steps of one phase did.

    Attributes:
        tokens: tokens that went through the model; in steps that verify, proposed ones too.
        graph_seconds: what they took through the runner.
        eager_seconds: what they took eagerly, unpadded.
    """

    capture: CaptureReport
    metrics: StepMetrics
    checks: Checks = field(default_factory=Checks)
    tokens: int = 0
    graph_seconds: float = 0.0
    eager_seconds: float = 0.0


@dataclass
class Speculation:
    """What became of proposals.

    Attributes:
        proposed: tokens.
        accepted: those that were right.
        rows: requests in steps that verified; each gets a token in any case.
    """

    proposed: int
    accepted: int
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens that steps which verify have decided."""
        return self.rows + self.accepted


@dataclass
class DemoResult:
    """Everything that a run of the demo shows.

    Attributes:
        speculation: None where nothing is proposed.
    """

    model: str
    device: str
    config: CudaGraphConfig
    answers: list[Answer]
    phases: dict[Step, PhaseResult]
    speculation: Speculation | None = None

    @property
    def prefill(self) -> PhaseResult:
        """What prefill steps did."""
        return self.phases["prefill"]

    @property
    def decode(self) -> PhaseResult:
        """What decode steps did."""
        return self.phases["decode"]

    @property
    def ok(self) -> bool:
        """Whether every token that a graph decided is the one that the eager forward decides."""
        return not any(phase.checks.mismatches for phase in self.phases.values())


@dataclass(frozen=True)
class DemoOptions:
    """What to serve and how.

    Attributes:
        prompts: what to ask.
        config: how to capture.
        device: where; a device without an index is the current one.
        model: the folder of a checkpoint; None for the default one.
        max_new_tokens: tokens generated for each prompt at most.
        max_requests: prompts served at once.
        max_prefill_tokens: tokens of prompts that go through the model in one step.
        proposals: tokens that are proposed for a request in a step; 0 for none.
        draft_layers: how many of the model's layers draft them; None for prompt lookup.
    """

    prompts: Sequence[str]
    config: CudaGraphConfig
    device: str
    model: str | None = None
    max_new_tokens: int = 48
    max_requests: int = 6
    max_prefill_tokens: int = 128
    proposals: int = 0
    draft_layers: int | None = None


def run_demo(options: DemoOptions) -> DemoResult:
    """Loads a model and serves the prompts of `options` to their end.

    Raises:
        BackendError: the device, a backend, an extra or the checkpoint cannot be used.
        CaptureError: the model cannot be captured.
        ConfigError: the prompts do not fit into the model.
    """
    return serve(_load(options), options)


def audit_demo(options: DemoOptions) -> dict[str, AuditReport]:
    """Loads a model and audits the forwards of both phases as they would be captured; see `run_demo`."""
    checkpoint = _load(options)
    with torch.inference_mode():
        engine = _make_engine(checkpoint, options, [_prompt(checkpoint, prompt) for prompt in options.prompts])
        return {name: runner.audit() for name, runner in engine.runners.items()}


def serve(checkpoint: Checkpoint, options: DemoOptions) -> DemoResult:
    """Serves the prompts of `options` with a model that is loaded, on the device where it lies; see `run_demo`."""
    prompts = [_prompt(checkpoint, prompt) for prompt in options.prompts]
    engine = _make_engine(checkpoint, options, prompts)
    plain = engine.make_runners(EAGER)

    def decided_by(kind: Step, batch: Any, output: Any) -> DecodeOutput:
        if kind == "draft":
            return DecodeOutput(output, output)
        if kind != "prefill":
            return output  # type: ignore[no-any-return]
        # Only the last token of a prompt decides the next one.
        logits = engine.model.head(output[list(batch.decides)])
        return DecodeOutput(logits.argmax(-1), logits)

    try:
        with torch.inference_mode():
            phases = {
                kind: CheckedPhase(runner, plain[kind], partial(decided_by, kind))
                for kind, runner in engine.runners.items()
            }
        engine.run = {kind: phase.run for kind, phase in phases.items()}
        requests = [
            engine.submit(prompt, max_new_tokens=options.max_new_tokens, eos_token_ids=_eos_token_ids(checkpoint))
            for prompt in prompts
        ]
        for _ in engine.stream():
            pass
        answers = [
            _answer(checkpoint, prompt, request) for prompt, request in zip(options.prompts, requests, strict=True)
        ]
        results = {kind: phase.finish() for kind, phase in phases.items()}
    finally:
        engine.close()
    speculation = None
    if "verify" in results:
        speculation = Speculation(engine.proposed, engine.accepted, results["verify"].metrics.raw_rows)
    return DemoResult(checkpoint.name, str(engine.model.device), options.config, answers, results, speculation)


class CheckedPhase:
    """The steps of one phase. Each runs three times: raw and eager, through the graph, and padded and eager.

    The raw run comes first and the padded one last, so that between two steps the cache holds what the graph wrote.

    Args:
        runner: captures the phase.
        plain: a runner of the same phase without graphs.
        decided_by: the tokens that a batch and its output decide, and the logits that they were decided by.
    """

    def __init__(
        self,
        runner: BaseCudaGraphRunner,
        plain: BaseCudaGraphRunner,
        decided_by: Callable[[Any, Any], DecodeOutput],
    ) -> None:
        self._runner = runner
        self._plain = plain
        self._decided_by = decided_by
        self._result = PhaseResult(runner.capture(), runner.metrics())

    def run(self, batch: Any) -> Any:
        """Runs a batch, and returns what the graph made of it."""
        result, checks = self._result, self._result.checks
        if not result.tokens:
            self._plain.run(copy.copy(batch))  # what is loaded by the first run of all is no step's time
        # An eager step brings the fields of its batch over, and a fill takes them from the host.
        raw, eager_seconds = self._timed(self._plain, copy.copy(batch))
        raw_tokens = self._decided_by(batch, raw).token_ids
        decision = self._runner.can_run(batch)
        output, graph_seconds = self._timed(self._runner, copy.copy(batch))
        tokens, logits = self._decided_by(batch, output)
        result.tokens += len(batch.input_ids)
        result.eager_seconds += eager_seconds
        result.graph_seconds += graph_seconds
        if decision:
            # Borrowed: the output is a view into the graph's memory, which nothing replays before it is read.
            padded = self._plain.run(self._runner.replay_prepare(batch, decision))
            again = self._decided_by(batch, padded)
            checks.decided += tokens.numel()
            checks.mismatches += int((again.token_ids[: len(tokens)] != tokens).sum())
            checks.bitwise += int(torch.equal(again.logits[: len(tokens)], logits))
            checks.raw_differences += int((raw_tokens != tokens).sum())
        return output

    def finish(self) -> PhaseResult:
        """What was done so far."""
        self._result.metrics = self._runner.metrics()
        return self._result

    def _timed(self, runner: BaseCudaGraphRunner, batch: Any) -> tuple[Any, float]:
        runner.adapter.synchronize()
        started = time.perf_counter()
        output = runner.run(batch)
        runner.adapter.synchronize()
        return output, time.perf_counter() - started


def _load(options: DemoOptions) -> Checkpoint:
    register_attention()
    check = None if options.draft_layers is None else partial(check_draft, options.draft_layers, options.proposals)
    return load_checkpoint(options.model, get_device_adapter(options.device).device, ATTENTION, check)


def _make_engine(checkpoint: Checkpoint, options: DemoOptions, prompts: Sequence[list[int]]) -> Engine:
    return Engine(
        checkpoint.model,
        config=options.config,
        max_requests=min(options.max_requests, len(prompts)),
        max_length=_max_length(checkpoint, prompts, options.max_new_tokens),
        max_prefill_tokens=options.max_prefill_tokens,
        proposals=options.proposals,
        draft_layers=options.draft_layers,
    )


def _max_length(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> int:
    longest = max(map(len, prompts)) + max_new_tokens
    limit = getattr(checkpoint.model.config, "max_position_embeddings", longest)
    if longest > limit:
        raise ConfigError(
            f"the longest prompt and its answer take {longest} tokens, the model has {limit} positions",
            code="prompt-too-long",
            hint="shorten the prompts, or lower `--max-new-tokens`",
        )
    return longest


def _answer(checkpoint: Checkpoint, prompt: str, request: Request) -> Answer:
    text = checkpoint.tokenizer.decode(request.generated, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(prompt, text.strip(), len(request.generated))


def _prompt(checkpoint: Checkpoint, prompt: str) -> list[int]:
    tokenizer = checkpoint.tokenizer
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        token_ids = tokenizer(prompt)["input_ids"]
    return list(token_ids)


def _eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """What ends an answer, by the tokenizer and by the model's generation settings."""
    found: set[int] = set()
    for holder in (checkpoint.tokenizer, checkpoint.model.config, checkpoint.model.generation_config):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
