"""transformers' continuous batching on these runners, in place of its own handling of graphs.

    manager = model.init_continuous_batching(generation_config, continuous_batching_config)
    with enable(manager) as graphs:
        manager.start()
        ...
        manager.stop()

transformers schedules, prepares inputs and keeps the cache as it does without graphs; its forward and its choice of
tokens are what is captured. What is replaced is replaced on the manager's own objects, and put back by `close()`.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.config import CudaGraphConfig
from devicegraph.engine import as_count
from devicegraph.errors import BackendError, ConfigError, ReplayError
from devicegraph.integrations.paged import (
    PagedBatch,
    PagedEngine,
    PagedRunner,
    build_paged_registry,
    register_carry_over,
)
from devicegraph.slots import shown
from devicegraph.verifying import verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from devicegraph.report import CaptureReport
    from devicegraph.verifying.report import VerifyReport

__all__ = ["KEY_SIZES", "VERSIONS", "ContinuousBatchingGraphs", "enable"]

#: The versions of transformers that this was seen working with.
VERSIONS: Final = ("5.17.0",)

#: What graphs have room for in keys where nothing is said: 16384 is as far as transformers pads its own.
KEY_SIZES: Final = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)

#: The query tokens of the largest bucket where neither the configuration nor transformers says less.
_LARGEST_BUCKET: Final = 256

_ATTENTION: Final = ("paged|sdpa", "paged|eager")

#: Poison for `verify`: none where query tokens begin, as these places ascend, nor for where padding writes, which
#: is no free choice. Rows to take logits from must be rows of the bucket, and one with padding has two.
_POISONS: Final[dict[str, tuple[int, ...]]] = {
    "cu_seq_lens_q": (),
    "write_index": (),
    "logits_indices": (0, 1),
}


def enable(
    manager: Any,
    *,
    config: CudaGraphConfig | None = None,
    key_sizes: Sequence[int] | None = None,
    keep_batches: int = 0,
) -> ContinuousBatchingGraphs:
    """Captures graphs for a manager of transformers' continuous batching, and has its steps replay them.

    Makes the manager's batch processor, and with it the cache, if there is none yet. A manager that is started again
    after a `stop()` that has dropped its processor gets graphs anew, when it starts. Waits for the device.

    Args:
        manager: from `model.init_continuous_batching(...)`; not running.
        config: its decode phase says how to capture, and which buckets: they count the query tokens of a batch, one for
            each request that decodes and more for one whose prompt is read. By default, and where it names neither
            `max_bs` nor `bs`, up to the requests of a batch, but no more than 256. The prefill phase is not read.
        key_sizes: what graphs have room for in keys, which are all tokens so far of all requests in a batch; there is a
            graph for each of these and each bucket. By default `KEY_SIZES`. What is beyond the cache is cut to it.
        keep_batches: of how many of the latest replayed steps the inputs are copied, for `verify()`.

    Raises:
        BackendError: `transformers-version`; `mode-not-covered`, with everything about the manager that is not.
        CaptureError: a forward that cannot be captured. The manager is as it was.
        ConfigError: `wrong-type` or `limit-invalid` for an argument.
        ReplayError: `manager-running`, or `already-captured`.
    """
    _check_version()
    return ContinuousBatchingGraphs(manager, config=config, key_sizes=key_sizes, keep_batches=keep_batches)


def _check_version() -> None:
    known = " or ".join(VERSIONS)
    try:
        import transformers
    except ImportError as error:
        raise BackendError(
            "transformers is not installed", code="transformers-version", hint=f"install transformers {known}"
        ) from error
    if transformers.__version__ not in VERSIONS:
        raise BackendError(
            f"transformers {transformers.__version__} is not one that this was seen working with: {known}",
            code="transformers-version",
            hint=f"install transformers {known}, or let it run on its own graphs",
        )


class ContinuousBatchingGraphs:
    """The graphs of a manager; `enable` makes them, and `close()`, or leaving the block, drops them.

    Attributes:
        manager: whose steps are replayed.
        runner: the decode runner behind it, for `metrics()`, `audit()` and the like; of the present batch processor.
        report: of the last capture.
    """

    runner: PagedRunner
    report: CaptureReport

    def __init__(
        self, manager: Any, *, config: CudaGraphConfig | None, key_sizes: Sequence[int] | None, keep_batches: int
    ) -> None:
        from transformers.generation.continuous_batching import ContinuousBatchingManager

        if not isinstance(manager, ContinuousBatchingManager):
            raise ConfigError(
                f"manager: {shown(manager)} is no `ContinuousBatchingManager`",
                code="wrong-type",
                hint="pass what `model.init_continuous_batching(...)` returns",
            )
        if config is not None and not isinstance(config, CudaGraphConfig):
            raise ConfigError(f"config: {shown(config)} is no `CudaGraphConfig`", code="wrong-type")
        self.manager = manager
        self._config = CudaGraphConfig() if config is None else config
        self._key_sizes = sorted(
            {as_count("key_sizes", size) for size in (KEY_SIZES if key_sizes is None else key_sizes)}
        )
        if not self._key_sizes:
            raise ConfigError("key_sizes: there is none", code="limit-invalid")
        self._kept: deque[PagedBatch] = deque(maxlen=keep_batches and as_count("keep_batches", keep_batches))
        self._steps: _Steps | None = None
        self._is_open = True
        self._check_stopped("graphs cannot be put under")
        if "_create_batch_processor" in vars(manager):
            raise ReplayError("the manager has graphs already", code="already-captured", hint="close those first")
        # Wherever a processor is made, by this thread or by the manager's own, it comes from here.
        self._make_processor = manager._create_batch_processor
        before = manager.batch_processor
        manager._create_batch_processor = self._processor
        try:
            manager.batch_processor = self._processor()
        except BaseException:
            manager.batch_processor = before
            self.close()
            raise

    def _processor(self) -> Any:
        """The manager's batch processor, with graphs."""
        if self.manager.batch_processor is None:
            self._let_go()  # what the last one held is to be gone before its successor shares out memory
        processor = self._make_processor()
        if self._steps is None or self._steps.processor is not processor:
            self._let_go()
            self._steps = _Steps(self.manager.model, processor, self._config, self._key_sizes, self._kept)
            self.runner = self._steps.runner
            self.report = self.runner.capture()
            self._steps.install()
        return processor

    def _let_go(self) -> None:
        self._kept.clear()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _check_stopped(self, doing: str) -> None:
        if self.manager.is_running():
            raise ReplayError(
                f"{doing} a manager that is running", code="manager-running", hint="call `manager.stop()` first"
            )

    def verify(self) -> VerifyReport:
        """Proves graphs on the kept batches, in the manager's cache as it is now; see `devicegraph.verify`.

        Each batch writes its keys and values once more where it has written them, so that what other requests have put
        there since is lost: call it between generations, when no request is active. Waits for the device, often.

        Returns:
            A report, which is not true where no batch was kept.

        Raises:
            ReplayError: `manager-running`, or the graphs are closed.
        """
        self._check_stopped("graphs cannot be verified under")
        return verify(self.runner, list(self._kept), poisons=_POISONS)

    def close(self) -> None:
        """Puts everything back that was replaced, and drops the graphs. Calling it twice is fine.

        What the device raises passes through once everything is back: call it again to let go of the graphs.

        Raises:
            ReplayError: `manager-running`.
        """
        if self._is_open:
            self._check_stopped("graphs cannot be taken from")
            vars(self.manager).pop("_create_batch_processor", None)
            self._let_go()
            self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes; a manager that still runs is stopped before, at once where an error ends the block."""
        if self.manager.is_running():
            self.manager.stop(hard_stop=error is not None)
        self.close()


class _Steps:
    """What stands where a batch processor has its `ModelRunner`: pads nothing, and runs steps on a runner.

    Attributes:
        processor: the batch processor.
        runner: the decode runner.
        pad_inputs: read by the processor; slots pad, and eager steps need none.
    """

    pad_inputs: Final = False

    def __init__(
        self,
        model: Any,
        processor: Any,
        config: CudaGraphConfig,
        key_sizes: Sequence[int],
        kept: deque[PagedBatch],
    ) -> None:
        self.processor = processor
        self._own = processor.model_runner
        self._inputs = processor.inputs_and_outputs
        self._kept = kept
        cache = processor.cache
        _check_covered(model, processor)
        capacity = self._next_inputs().read_index_storage.shape[1]
        key_sizes = sorted({min(size, capacity) for size in key_sizes})
        if config.decode.max_bs is None and config.decode.bs is None:
            config = config.with_phase(
                "decode", max_bs=min(processor.cb_config.max_requests_per_batch, _LARGEST_BUCKET)
            )
        self._engine = PagedEngine(model, self._own, max_queries=cache.max_batch_tokens, key_sizes=key_sizes)
        registry = build_paged_registry(
            self._static_tensors(cache.max_batch_tokens, key_sizes[-1]),
            device=model.device,
            max_queries=cache.max_batch_tokens,
            max_keys=key_sizes[-1],
            read_trash=cache.read_trash_index,
            write_trash=cache.write_trash_index,
        )
        if self._pairs:
            register_carry_over(registry, output_rows=self._next_inputs().output_ids.shape[0])
        self.runner = PagedRunner(self._engine, config=config, registry=registry)
        self._masks: list[tuple[Any, Any]] = []
        #: The keys that the batch which is prepared was given places for; None where it has its own.
        self._room: int | None = None

    @property
    def _pairs(self) -> list[Any]:
        """The two pairs of inputs and outputs of asynchronous batching; none in synchronous."""
        return getattr(self._inputs, "io_pairs", [])

    def _next_inputs(self) -> Any:
        """The static tensors on the device that this step reads."""
        return self._pairs[self._inputs.current_pair].device_io if self._pairs else self._inputs

    def _static_tensors(self, max_queries: int, max_keys: int) -> dict[str, torch.Tensor]:
        """The tensors that transformers writes the inputs of every step to, where there is one set of them.

        Two sets have one set of graphs, whose buffers are filled from the one that is next.
        """
        if self._pairs:
            return {}
        inputs, rows = self._inputs, self._inputs._bulk_input_tensor
        # Each of the small inputs is the beginning of a row that has a place for every query token.
        return {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids,
            "cu_seq_lens_q": rows[2, : max_queries + 1],
            "logits_indices": rows[3, :max_queries],
            "cu_seq_lens_k": rows[4, : max_queries + 1],
            "write_index": inputs.write_index_storage[0],
            "read_index": inputs.read_index_storage[0, :max_keys],
        }

    def install(self) -> None:
        """Takes the place of the processor's own."""
        everywhere = [io for pair in self._pairs for io in (pair.host_io, pair.device_io)] or [self._inputs]
        self._masks = [(io, io.attention_mask) for io in everywhere]
        for io in everywhere:
            io.attention_mask = None  # the forward makes it of the lengths, instead of a few launches for each request
        self.processor.model_runner = self

    def close(self) -> None:
        """Puts back what `install` has replaced, and drops the graphs."""
        for io, mask in self._masks:
            io.attention_mask = mask
        self._masks = []
        self.processor.model_runner = self._own
        self.runner.close()

    # What the processor calls.

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """The sizes to prepare a batch at: its own query tokens, and the keys that its graph has room for."""
        # Graphs read all keys from the cache, also those that the query tokens bring along. With as many places to read
        # as the graph has, what transformers does not write is its trash, and fills come in as many sizes as graphs do.
        self._room = self._engine.room(num_q_tokens + max(max_kv_read, 1)) if self.runner.graphs else None
        if self._room is None or num_q_tokens > self.runner.buckets.maximum:
            self._room = None
            return num_q_tokens, max_kv_read
        return num_q_tokens, self._room - num_q_tokens

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """One step; its tokens are in the static outputs once the compute stream is done."""
        carry_over_ids, prev_output_ids, output_ids = self._inputs.get_cb_kwargs()
        inputs, (read_index,) = self._next_inputs(), batch_data["read_index"]
        if self._room is not None:
            read_index = inputs.read_index_storage[0, : self._room]
        input_ids = batch_data["input_ids"][0]
        batch = PagedBatch(
            input_ids=input_ids,
            position_ids=batch_data["position_ids"][0],
            write_index=batch_data["write_index"][0],
            cu_seq_lens_q=batch_data["cu_seq_lens_q"],
            cu_seq_lens_k=batch_data["cu_seq_lens_k"],
            # What is behind the last query token is of earlier batches: no more tokens than those have logits.
            logits_indices=batch_data["logits_indices"][: input_ids.shape[0]],
            read_index=read_index,
        )
        if self._pairs:
            batch.carry_over_ids, batch.prev_output_ids = carry_over_ids, prev_output_ids
        stream = self._inputs.compute_stream
        if stream is not None and not self._pairs:
            # Synchronous inputs are written on the stream that is current, asynchronous ones have been waited for.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if self._kept.maxlen and self.runner.can_run(batch):
                self._kept.append(batch.copy(inputs.true_read_sizes[0]))
            logits = batch.logits_indices.shape[0]
            output_ids[:, :logits].copy_(self.runner.run(batch)[:, :logits])

    def warmup(self, model: Any) -> None:
        """Nothing: graphs are captured already."""


def _check_covered(model: Any, processor: Any) -> None:
    """Refuses what has no graphs here.

    Raises:
        BackendError: `mode-not-covered`, naming all of it.
    """
    attention = model.config.get_text_config()._attn_implementation
    own = processor.model_runner
    found = []
    if attention not in _ATTENTION:
        found.append(f"attention by `{attention}`, which is none of {', '.join(f'`{name}`' for name in _ATTENTION)}")
    if processor.cache.num_groups > 1 or processor.cache.num_sliding_attention_groups:
        found.append("layers with a sliding window")
    if processor.distributed_helper.tp_size > 1:
        found.append("tensor parallel ranks")
    if own._compiled_varlen is not None or own._compiled_decode is not None:
        found.append("a forward under `torch.compile`")
    if processor.logit_processor.tensors_required:
        found.append("processors of logits with values for each request")
    if found:
        hint = "let transformers run on its own graphs"
        if attention not in _ATTENTION and len(found) == 1:
            hint = f"load the model with attn_implementation=`paged|sdpa`, or {hint}"
        raise BackendError(
            f"continuous batching is set up with what has no graphs here: {'; '.join(found)}",
            code="mode-not-covered",
            hint=hint,
        )
