"""The prefill runner: requests of any lengths in one batch, whole prompts or chunks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from devicegraph.backends import resolve_prefill_backend
from devicegraph.buckets import prefill_buckets
from devicegraph.errors import ConfigError
from devicegraph.layouts import build_prefill_registry
from devicegraph.runners.base import BaseCudaGraphRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from devicegraph.backends import BaseCudaGraphBackend
    from devicegraph.buckets import Buckets
    from devicegraph.config import CudaGraphConfig
    from devicegraph.devices import CaptureErrorMode, GraphMemoryPool
    from devicegraph.engine import ModelRunner
    from devicegraph.outputs import RowAxis
    from devicegraph.registry import CudaGraphBufferRegistry
    from devicegraph.runners.progress import CaptureProgress

__all__ = ["PrefillCudaGraphRunner"]


class PrefillCudaGraphRunner(BaseCudaGraphRunner):
    """Runs prefill batches through captured graphs; the bucket counts tokens.

    Tokens are padded to the bucket and requests are not: what depends on where one request ends and the next begins
    (attention) is left to breaks, which take the live batch from `current_batch()`. A graph is captured with one
    request that has all of the bucket's tokens, so what has a row for each request (the last token's logits, say) is
    neither a slot nor an output of the forward: compute it from the output, behind the runner.

    Args:
        model_runner: the engine; see `ModelRunner`.
        max_padding_factor: a batch whose bucket has more than so many times its tokens runs eagerly
            (`padding-too-large`).

    The other arguments and errors are those of `BaseCudaGraphRunner`.

    Raises:
        ConfigError: `limit-invalid`; `slot-per-request` for a registry with a slot that has a row for each request.
    """

    phase: ClassVar[Literal["decode", "prefill"]] = "prefill"

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        config: CudaGraphConfig,
        registry: CudaGraphBufferRegistry | None = None,
        backend: BaseCudaGraphBackend | None = None,
        max_padding_factor: float = 2.0,
        capture_error_mode: CaptureErrorMode = "thread_local",
        order: Literal["descending", "ascending"] = "descending",
        on_error: Literal["drop", "raise"] = "drop",
        clone_outputs: bool = False,
        debug_outputs: bool | None = None,
        verify_on_capture: bool = False,
        output_axes: Sequence[RowAxis | None] | None = None,
        graph_pool: GraphMemoryPool | None = None,
        progress: Callable[[CaptureProgress], None] | None = None,
        nvtx: bool = False,
        profile: str | PathLike[str] | None = None,
    ) -> None:
        given: object = max_padding_factor
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not given >= 1:
            raise ConfigError(
                f"max_padding_factor: {max_padding_factor!r} is not a number of at least 1", code="limit-invalid"
            )
        self.max_padding_factor = max_padding_factor
        super().__init__(
            model_runner,
            config=config,
            registry=registry,
            backend=backend,
            capture_error_mode=capture_error_mode,
            order=order,
            on_error=on_error,
            clone_outputs=clone_outputs,
            debug_outputs=debug_outputs,
            verify_on_capture=verify_on_capture,
            output_axes=output_axes,
            graph_pool=graph_pool,
            progress=progress,
            nvtx=nvtx,
            profile=profile,
        )

    def _make_buckets(self) -> Buckets:
        phase = self.config.prefill
        limit = self.model_runner.limits.max_num_tokens
        return prefill_buckets(
            phase.max_bs, bs=phase.bs, padding=self.config.padding, alignment=self.bucket_unit, limit=limit
        )

    @property
    def bucket_unit(self) -> int:
        """What every bucket is a multiple of."""
        return self.alignment[1]

    def _make_registry(self) -> CudaGraphBufferRegistry:
        return build_prefill_registry(
            device=self.adapter.device,
            max_bs=self.model_runner.limits.max_bs,
            max_num_token=max(self.buckets.maximum, 1),
            cache_loc_dtype=getattr(self.model_runner, "cache_loc_dtype", torch.int64),
        )

    def _resolve_backend(self) -> BaseCudaGraphBackend | None:
        return resolve_prefill_backend(self)

    def _padded_sizes(self, size: int, bs: int) -> tuple[int, int]:
        return bs, size

    def _idle_requests(self, size: int) -> int:
        return 1

    def _live_size(self, bs: int, num_tokens: int) -> int | str:
        return num_tokens if bs <= self.buffer_registry.max_bs else "too-many-requests"

    def _check_registry(self) -> None:
        super()._check_registry()
        for slot in self.buffer_registry.slots:
            if slot.axis == "bs":
                raise ConfigError(
                    f"slot `{slot.name}` has a row for each request, and a prefill graph is captured with one",
                    code="slot-per-request",
                    hint="leave it out of the registry: breaks find the field of the live batch on `current_batch()`",
                )

    def _wastes_too_much(self, size: int, bucket: int) -> bool:
        return bucket > size * self.max_padding_factor
