"""Serving prompts through a decode runner, and holding every step to the eager forward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.demo.checkpoint import load_checkpoint
from devicegraph.demo.engine import ATTENTION, LlamaEngine, register_attention
from devicegraph.demo.scheduler import Request, Scheduler
from devicegraph.devices import get_device_adapter
from devicegraph.errors import ConfigError
from devicegraph.runners.decode import DecodeCudaGraphRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.config import CudaGraphConfig
    from devicegraph.demo.checkpoint import Checkpoint
    from devicegraph.demo.engine import DecodeBatch
    from devicegraph.metrics import StepMetrics
    from devicegraph.report import CaptureReport


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
        tokens: tokens that were decided by a replay and checked.
        mismatches: tokens for which the eager forward on the same padded batch decides otherwise; none is tolerated.
        bitwise: replays whose logits equal those of the eager forward on the same padded batch bit for bit.
        raw_differences: tokens for which the eager forward on the unpadded batch decides otherwise. Kernels may add up
            in another order for another shape, so in bfloat16 a few are normal.
    """

    tokens: int = 0
    mismatches: int = 0
    bitwise: int = 0
    raw_differences: int = 0


@dataclass
class DemoResult:
    """Everything that a run of the demo shows."""

    model: str
    device: str
    config: CudaGraphConfig
    capture: CaptureReport
    metrics: StepMetrics
    answers: list[Answer] = field(default_factory=list)
    checks: Checks = field(default_factory=Checks)
    graph_seconds: float = 0.0
    eager_seconds: float = 0.0
    decoded_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether every token that a graph decided is the one that the eager forward decides."""
        return not self.checks.mismatches


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
    """

    prompts: Sequence[str]
    config: CudaGraphConfig
    device: str
    model: str | None = None
    max_new_tokens: int = 48
    max_requests: int = 6


def run_demo(options: DemoOptions) -> DemoResult:
    """Serves the prompts of `options` to their end.

    Raises:
        BackendError: the device, a backend, an extra or the checkpoint cannot be used.
        CaptureError: the model cannot be captured.
    """
    adapter = get_device_adapter(options.device)
    register_attention()
    checkpoint = load_checkpoint(options.model, adapter.device, ATTENTION)
    requests = [_make_request(checkpoint, prompt) for prompt in options.prompts]
    # A multiple of 16, so that attention's rows are aligned on every device.
    longest = max(request.prompt_tokens for request in requests) + options.max_new_tokens
    max_length = -(-longest // 16) * 16
    limit = getattr(checkpoint.model.config, "max_position_embeddings", max_length)
    if max_length > limit:
        raise ConfigError(
            f"the longest prompt and its answer take {longest} tokens, the model has {limit} positions",
            code="prompt-too-long",
            hint="shorten the prompts, or lower `--max-new-tokens`",
        )
    max_requests = min(options.max_requests, len(requests))
    with torch.inference_mode():
        engine = LlamaEngine(checkpoint.model, adapter.device, max_requests=max_requests, max_length=max_length)
        with DecodeCudaGraphRunner(engine, config=options.config) as runner:
            result = DemoResult(
                checkpoint.name, str(adapter.device), options.config, runner.capture(), runner.metrics()
            )
            _Server(engine, runner, result).serve(
                Scheduler(
                    requests,
                    max_requests=max_requests,
                    max_new_tokens=options.max_new_tokens,
                    max_length=max_length,
                    eos_token_ids=_eos_token_ids(checkpoint),
                )
            )
            result.metrics = runner.metrics()
    decode = checkpoint.tokenizer.decode
    result.answers = [
        Answer(
            request.prompt,
            decode(request.generated, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip(),
            len(request.generated),
        )
        for request in requests
    ]
    return result


class _Server:
    """The serving loop. Each step runs three times: raw and eager, through the graph, and padded and eager.

    The raw run comes first and the padded one last, so that between two steps the cache holds what the graph wrote.
    """

    def __init__(self, engine: LlamaEngine, runner: DecodeCudaGraphRunner, result: DemoResult) -> None:
        self._engine = engine
        self._runner = runner
        self._result = result

    def serve(self, scheduler: Scheduler) -> None:
        device = self._engine.device
        while True:
            for request in list(scheduler.admit()):
                logits = self._engine.prefill(torch.tensor(request.token_ids, device=device), request.row)
                scheduler.append(request, int(logits.argmax()))
            if not scheduler.running:
                return
            token_ids = self._step(scheduler.batch(device))
            for request, token_id in zip(list(scheduler.running), token_ids, strict=True):
                scheduler.append(request, token_id)

    def _step(self, batch: DecodeBatch) -> list[int]:
        result = self._result
        raw, eager_seconds = self._timed(self._engine.forward, batch)
        raw_tokens = raw.argmax(-1)
        decision = self._runner.can_run(batch)
        output, graph_seconds = self._timed(self._runner.run, batch)
        tokens: list[int] = output.argmax(-1).tolist()
        result.decoded_tokens += batch.batch_size
        result.eager_seconds += eager_seconds
        result.graph_seconds += graph_seconds
        if decision:
            # Borrowed: the output is a view into the graph's memory, which nothing replays before it is read.
            padded = self._engine.forward(self._runner.replay_prepare(batch, decision))[: batch.batch_size]
            result.checks.tokens += batch.batch_size
            result.checks.mismatches += int((padded.argmax(-1) != output.argmax(-1)).sum())
            result.checks.bitwise += int(torch.equal(padded, output))
            result.checks.raw_differences += int((raw_tokens != output.argmax(-1)).sum())
        return tokens

    def _timed(self, function: Any, batch: DecodeBatch) -> tuple[torch.Tensor, float]:
        adapter = self._runner.adapter
        adapter.synchronize()
        started = time.perf_counter()
        output = function(batch)
        adapter.synchronize()
        return output, time.perf_counter() - started


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
