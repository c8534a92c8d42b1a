"""Serving prompts through a runner for each phase, and holding every step to the eager forward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from devicegraph.config import CudaGraphConfig
from devicegraph.demo.checkpoint import load_checkpoint
from devicegraph.demo.engine import ATTENTION, LlamaEngine, PrefillBatch, register_attention
from devicegraph.demo.scheduler import Request, Scheduler
from devicegraph.devices import get_device_adapter
from devicegraph.errors import ConfigError
from devicegraph.runners.decode import DecodeCudaGraphRunner
from devicegraph.runners.prefill import PrefillCudaGraphRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.auditing import AuditReport
    from devicegraph.demo.checkpoint import Checkpoint
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
        tokens: tokens that went through the model.
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
class DemoResult:
    """Everything that a run of the demo shows."""

    model: str
    device: str
    config: CudaGraphConfig
    answers: list[Answer]
    prefill: PhaseResult
    decode: PhaseResult

    @property
    def phases(self) -> dict[Literal["prefill", "decode"], PhaseResult]:
        """Both phases by name."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def ok(self) -> bool:
        """Whether every token that a graph decided is the one that the eager forward decides."""
        return not any(phase.checks.mismatches for phase in self.phases.values())


_EAGER = CudaGraphConfig(prefill={"backend": "disabled"}, decode={"backend": "disabled"})


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
    """

    prompts: Sequence[str]
    config: CudaGraphConfig
    device: str
    model: str | None = None
    max_new_tokens: int = 48
    max_requests: int = 6
    max_prefill_tokens: int = 128


def run_demo(options: DemoOptions) -> DemoResult:
    """Loads a model and serves the prompts of `options` to their end.

    Raises:
        BackendError: the device, a backend, an extra or the checkpoint cannot be used.
        CaptureError: the model cannot be captured.
        ConfigError: the prompts do not fit into the model.
    """
    register_attention()
    device = get_device_adapter(options.device).device
    return serve(load_checkpoint(options.model, device, ATTENTION), options)


def audit_demo(options: DemoOptions) -> dict[str, AuditReport]:
    """Loads a model and audits the forwards of both phases as they would be captured; see `run_demo`."""
    register_attention()
    checkpoint = load_checkpoint(options.model, get_device_adapter(options.device).device, ATTENTION)
    requests = [_make_request(checkpoint, prompt) for prompt in options.prompts]
    with torch.inference_mode():
        engine = _make_engine(checkpoint, options, requests)
        with (
            PrefillCudaGraphRunner(engine.prefill, config=options.config) as prefill_runner,
            DecodeCudaGraphRunner(engine.decode, config=options.config) as decode_runner,
        ):
            return {"prefill": prefill_runner.audit(), "decode": decode_runner.audit()}


def serve(checkpoint: Checkpoint, options: DemoOptions) -> DemoResult:
    """Serves the prompts of `options` with a model that is loaded, on the device where it lies; see `run_demo`."""
    requests = [_make_request(checkpoint, prompt) for prompt in options.prompts]
    with torch.inference_mode():
        engine = _make_engine(checkpoint, options, requests)
        scheduler = Scheduler(
            requests,
            cache=engine.cache,
            max_prefill_tokens=options.max_prefill_tokens,
            max_new_tokens=options.max_new_tokens,
            eos_token_ids=_eos_token_ids(checkpoint),
        )
        with (
            PrefillCudaGraphRunner(engine.prefill, config=options.config) as prefill_runner,
            DecodeCudaGraphRunner(engine.decode, config=options.config) as decode_runner,
        ):
            prefill = _Phase(prefill_runner, PrefillCudaGraphRunner(engine.prefill, config=_EAGER))
            decode = _Phase(decode_runner, DecodeCudaGraphRunner(engine.decode, config=_EAGER))
            _run_all(engine, scheduler, prefill, decode)
            return DemoResult(
                checkpoint.name,
                str(engine.device),
                options.config,
                [_answer(checkpoint, request) for request in requests],
                prefill.finish(),
                decode.finish(),
            )


def _make_engine(checkpoint: Checkpoint, options: DemoOptions, requests: Sequence[Request]) -> LlamaEngine:
    return LlamaEngine(
        checkpoint.model,
        checkpoint.model.device,
        max_requests=min(options.max_requests, len(requests)),
        max_length=_max_length(checkpoint, requests, options.max_new_tokens),
        max_prefill_tokens=options.max_prefill_tokens,
    )


def _max_length(checkpoint: Checkpoint, requests: Sequence[Request], max_new_tokens: int) -> int:
    """Tokens of a row of the cache: a multiple of 16, so that attention's rows are aligned on every device."""
    longest = max(request.prompt_tokens for request in requests) + max_new_tokens
    max_length = -(-longest // 16) * 16
    limit = getattr(checkpoint.model.config, "max_position_embeddings", max_length)
    if max_length > limit:
        raise ConfigError(
            f"the longest prompt and its answer take {longest} tokens, the model has {limit} positions",
            code="prompt-too-long",
            hint="shorten the prompts, or lower `--max-new-tokens`",
        )
    return int(max_length)


def _run_all(engine: LlamaEngine, scheduler: Scheduler, prefill: _Phase, decode: _Phase) -> None:
    while (step := scheduler.next_batch()) is not None:
        batch, requests = step
        if isinstance(batch, PrefillBatch):
            # Only the last token of a prompt decides the next one.
            last = [row for row, request in zip(batch.last_tokens(), requests, strict=True) if request is not None]
            token_ids = prefill.step(batch, lambda hidden, last=last: engine.logits(hidden[last]))  # type: ignore[misc]
        else:
            token_ids = decode.step(batch, lambda logits: logits)
        deciding = [request for request in requests if request is not None]
        for request, token_id in zip(deciding, token_ids, strict=True):
            scheduler.append(request, token_id)


class _Phase:
    """The steps of one phase. Each runs three times: raw and eager, through the graph, and padded and eager.

    The raw run comes first and the padded one last, so that between two steps the cache holds what the graph wrote.

    Args:
        runner: captures the phase.
        plain: a runner of the same phase without graphs.
    """

    def __init__(self, runner: BaseCudaGraphRunner, plain: BaseCudaGraphRunner) -> None:
        self._runner = runner
        self._plain = plain
        self._result = PhaseResult(runner.capture(), runner.metrics())

    def step(self, batch: Any, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        """Runs a batch, and returns the tokens that its logits decide for."""
        result, checks = self._result, self._result.checks
        if not result.tokens:
            self._plain.run(batch)  # what is loaded by the first run of all is no step's time
        raw, eager_seconds = self._timed(self._plain, batch)
        raw_tokens = logits_of(raw).argmax(-1)
        decision = self._runner.can_run(batch)
        output, graph_seconds = self._timed(self._runner, batch)
        tokens = logits_of(output).argmax(-1)
        result.tokens += len(batch.input_ids)
        result.eager_seconds += eager_seconds
        result.graph_seconds += graph_seconds
        if decision:
            # Borrowed: the output is a view into the graph's memory, which nothing replays before it is read.
            padded = self._plain.run(self._runner.replay_prepare(batch, decision))[: len(output)]
            checks.decided += len(tokens)
            checks.mismatches += int((logits_of(padded).argmax(-1) != tokens).sum())
            checks.bitwise += int(torch.equal(padded, output))
            checks.raw_differences += int((raw_tokens != tokens).sum())
        token_ids: list[int] = tokens.tolist()
        return token_ids

    def finish(self) -> PhaseResult:
        """What was done so far."""
        self._result.metrics = self._runner.metrics()
        return self._result

    def _timed(self, runner: BaseCudaGraphRunner, batch: Any) -> tuple[torch.Tensor, float]:
        runner.adapter.synchronize()
        started = time.perf_counter()
        output = runner.run(batch)
        runner.adapter.synchronize()
        return output, time.perf_counter() - started


def _answer(checkpoint: Checkpoint, request: Request) -> Answer:
    text = checkpoint.tokenizer.decode(request.generated, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(request.prompt, text.strip(), len(request.generated))


def _make_request(checkpoint: Checkpoint, prompt: str) -> Request:
    tokenizer = checkpoint.tokenizer
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        token_ids = tokenizer(prompt)["input_ids"]
    return Request(prompt, list(token_ids), len(token_ids))


def _eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """What ends an answer, by the tokenizer and by the model's generation settings."""
    found: set[int] = set()
    for holder in (checkpoint.tokenizer, checkpoint.model.config, checkpoint.model.generation_config):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
