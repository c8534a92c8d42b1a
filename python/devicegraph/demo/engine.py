"""The engine: requests go in, tokens come out, and each step runs through the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from devicegraph.config import CudaGraphConfig
from devicegraph.demo.batches import DecodeBatch, PrefillBatch
from devicegraph.demo.draft import DraftRunner
from devicegraph.demo.graphs import decode_runner, prefill_runner
from devicegraph.demo.lookup import PromptLookup
from devicegraph.demo.model import Model
from devicegraph.demo.sampling import Sampling, draw
from devicegraph.demo.scheduler import Request, Scheduler
from devicegraph.engine import Limits
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from devicegraph.runners.base import BaseCudaGraphRunner

#: The kinds of steps.
Step: TypeAlias = Literal["prefill", "decode", "verify", "draft"]
#: Without graphs.
EAGER = CudaGraphConfig(prefill={"backend": "disabled"}, decode={"backend": "disabled"})


class Engine:
    """Serves a transformers model of the Llama family.

    Args:
        transformer: the model, loaded with the attention `ATTENTION`, on its device.
        config: how to capture.
        max_requests: that run at once.
        max_length: tokens of a request, generated ones included.
        max_prefill_tokens: of prompts in one step.
        block_size: tokens of a block of the cache.
        blocks: of the cache, the reserved one included; by default enough for all requests at their longest.
        proposals: tokens that are proposed for each greedy request in a step, and that one step verifies; 0 to decode
            token by token.
        draft_layers: how many of the model's layers draft them; None for prompt lookup.

    Attributes:
        runners: of the steps, with nothing captured before `capture()`.
        steps_verified: how many verified proposals.
        proposed: tokens that were proposed in them.
        accepted: those that were right.

    Raises:
        BackendError: `checkpoint-unusable` for a model that is built in another way.
        ConfigError: see `check_draft`.
    """

    def __init__(
        self,
        transformer: Any,
        *,
        config: CudaGraphConfig,
        max_requests: int,
        max_length: int,
        max_prefill_tokens: int,
        block_size: int = 16,
        blocks: int | None = None,
        proposals: int = 0,
        draft_layers: int | None = None,
    ) -> None:
        self.model = Model(transformer)
        self._proposals = proposals
        self._draft_layers = draft_layers
        check_draft(draft_layers, proposals, transformer.config)
        if blocks is None:
            blocks = 1 + max_requests * -(-max_length // block_size)
        self.cache = self.model.make_cache(blocks, block_size)
        self.scheduler = Scheduler(
            self.cache,
            max_requests=max_requests,
            max_length=max_length,
            max_prefill_tokens=max_prefill_tokens,
            proposals=proposals,
        )
        self._max_requests = max_requests
        self._max_prefill_tokens = max_prefill_tokens
        self.runners = self.make_runners(config)
        #: What runs a step of each kind.
        self.run: dict[Step, Callable[[Any], Any]] = {kind: runner.run for kind, runner in self.runners.items()}
        self._lookups: dict[Request, PromptLookup] = {}
        self.steps_verified = self.proposed = self.accepted = 0
        self._check()

    def make_runners(self, config: CudaGraphConfig) -> dict[Step, BaseCudaGraphRunner]:
        """Runners of this engine's steps, with nothing captured."""
        bs, model, cache = self._max_requests, self.model, self.cache
        limits = Limits(max_bs=bs, max_num_tokens=self._max_prefill_tokens)
        width = self.scheduler.table_width
        runners: dict[Step, BaseCudaGraphRunner] = {
            "prefill": prefill_runner(model, cache, config, limits),
            "decode": decode_runner(model, cache, config, bs, width),
        }
        if self._proposals:
            runners["verify"] = decode_runner(model, cache, config, bs, width, tokens=1 + self._proposals)
        if self._proposals and self._draft_layers is not None:
            runners["draft"] = DraftRunner(
                model,
                cache,
                config=config,
                max_bs=bs,
                table_width=width,
                layers=self._draft_layers,
                tokens=self._proposals,
            )
        return runners

    def capture(self) -> None:
        """Captures the graphs of all steps."""
        with torch.inference_mode():
            for runner in self.runners.values():
                runner.capture()

    def close(self) -> None:
        """Drops the graphs."""
        for runner in self.runners.values():
            runner.close()

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int] = (),
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    ) -> Request:
        """Lets a prompt wait for its turn; may be called between any two steps.

        Raises:
            ConfigError: `prompt-empty`; `token-unknown` for one that the model has no embedding of; `prompt-too-long`
                for one that could never run to its end; `limit-invalid` for no number of new tokens.
        """
        known = self.model.vocabulary
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < known]
        if unknown:
            message = f"the prompt has token {unknown[0]}, the model knows 0 to {known - 1}"
            raise ConfigError(message, code="token-unknown", hint="use the tokenizer of the model")
        request = Request(list(token_ids), len(token_ids), max_new_tokens, frozenset(eos_token_ids), sampling)
        self.scheduler.submit(request)
        return request

    def stream(self) -> Iterator[tuple[Request, int]]:
        """Runs steps until all requests are done, and gives each token with its request as it comes."""
        while not self.scheduler.is_idle:
            for request, token_ids in self.step():
                for token_id in token_ids:
                    yield request, token_id

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, list[int]]]:
        """Runs one step: prompts, or a token or more of each request whose prompt is done.

        Returns:
            What it decided, by request.
        """
        prefill = self.scheduler.prefill_batch()
        if prefill is not None:
            return self._prefill(*prefill)
        self.scheduler.make_room(1 + self._proposals)
        requests = self.scheduler.decoding.copy()
        if not requests:
            return []
        batch = self.scheduler.decode_batch()
        proposals = self._propose(batch, requests) if self._proposals else []
        if any(proposals):
            return self._verify(requests, proposals)
        output = self.run["decode"](batch)
        return self._append(requests, [[t] for t in _choose(output.token_ids, output.logits, requests)])

    def _prefill(self, batch: PrefillBatch, requests: list[Request]) -> list[tuple[Request, list[int]]]:
        hidden = self.run["prefill"](batch)
        token_ids: list[int] = []
        if requests:
            logits = self.model.head(hidden[torch.tensor(batch.decides).to(hidden.device)])
            token_ids = _choose(logits.argmax(-1), logits, requests)
        self.scheduler.prefilled()
        return self._append(requests, [[token_id] for token_id in token_ids])

    def _propose(self, batch: DecodeBatch, requests: list[Request]) -> list[list[int]]:
        greedy = [request.sampling.is_greedy for request in requests]
        if "draft" in self.runners:
            drafted = self.run["draft"](batch).tolist() if any(greedy) else greedy
            return [tokens if is_greedy else [] for tokens, is_greedy in zip(drafted, greedy, strict=True)]
        return [
            self._lookups.setdefault(request, PromptLookup()).propose(request.token_ids, self._proposals)
            if is_greedy
            else []
            for request, is_greedy in zip(requests, greedy, strict=True)
        ]

    def _verify(self, requests: list[Request], proposals: list[list[int]]) -> list[tuple[Request, list[int]]]:
        """Every token is the one that decoding alone would have chosen; proposals only let several come at once."""
        count = 1 + self._proposals
        # A request without a whole proposal gets any tokens in its place: what they lead to is not looked at.
        filled = [[*proposed, *[0] * (self._proposals - len(proposed))] for proposed in proposals]
        output = self.run["verify"](self.scheduler.decode_batch(filled))
        decided = _choose(output.token_ids, output.logits, requests, count)
        found = []
        for row, proposed in enumerate(proposals):
            following = decided[row * count : (row + 1) * count]
            right = following[:1]
            for guess, next_id in zip(proposed, following[1:], strict=False):
                if guess != right[-1]:
                    break
                right.append(next_id)
            found.append(right)
            self.proposed += len(proposed)
        self.steps_verified += 1
        added = self._append(requests, found)
        self.accepted += sum(len(token_ids) - 1 for _, token_ids in added)
        return added

    def _append(self, requests: list[Request], found: list[list[int]]) -> list[tuple[Request, list[int]]]:
        added = []
        for request, token_ids in zip(requests, found, strict=True):
            added.append((request, self.scheduler.append(request, token_ids)))
            if request.finish is not None:
                self._lookups.pop(request, None)
        return added

    def _check(self) -> None:
        """Runs one token through every layer, into the reserved block."""
        zero = torch.zeros(1, dtype=torch.int64)
        table = torch.zeros(1, 1, dtype=torch.int32)
        prompt = PrefillBatch(zero, zero, zero, table, [(0, 1)], 1, self.cache, [0])
        batch = DecodeBatch(zero, zero, zero, zero + 1, table, 1, self.cache)
        plain = self.make_runners(EAGER)
        problem = None
        try:
            with torch.inference_mode():
                hidden = plain["prefill"].run(prompt)
                same = torch.equal(self.model.head(hidden), plain["decode"].run(batch).logits)
        except Exception as error:
            problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        else:
            if not same:
                problem = "it does more between its last layer and its logits than one projection"
            if not all(keys[0, 0].any() for keys in self.cache.keys):
                problem = "not every layer asks for the attention it was given"
        if problem is not None:
            raise self.model.unusable(problem)


def check_draft(layers: int | None, proposals: int, config: Any) -> None:
    """Refuses what cannot draft.

    Args:
        layers: how many of the model's; None where they do not draft.
        proposals: tokens to propose.
        config: the model's, as transformers has it.

    Raises:
        ConfigError: `proposals-missing` for layers that have nothing to draft; `limit-invalid` for more layers than the
            model has, or for none.
    """
    if layers is None:
        return
    if not proposals:
        raise ConfigError(
            f"draft_layers: {layers} layers have nothing to draft without proposals",
            code="proposals-missing",
            hint="say how many tokens to propose, too",
        )
    if not 1 <= layers <= config.num_hidden_layers:
        message = f"draft_layers: {layers} layers cannot draft, the model has {config.num_hidden_layers}"
        raise ConfigError(message, code="limit-invalid", hint="fewer than it has, or the draft costs what it saves")


def _choose(
    likeliest: torch.Tensor, logits: torch.Tensor, requests: Sequence[Request], tokens_per_request: int = 1
) -> list[int]:
    """The likeliest token of each row, but for the first row of each request that draws: the one wait of a step."""
    drawing = [row for row, request in enumerate(requests) if not request.sampling.is_greedy]
    if drawing:
        rows = torch.tensor([row * tokens_per_request for row in drawing]).to(logits.device)
        chosen = [requests[row] for row in drawing]
        drawn = draw(logits[rows], [r.sampling for r in chosen], [r.source for r in chosen])
        likeliest = likeliest.index_copy(0, rows, drawn)
    token_ids: list[int] = likeliest.tolist()
    return token_ids
