"""The decode runner: the same number of tokens for each request, one in plain decoding, several in verification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch

from devicegraph.backends import resolve_decode_backend
from devicegraph.batches import read_fields
from devicegraph.buckets import decode_buckets
from devicegraph.devices import get_device_adapter
from devicegraph.engine import Hooks, as_count
from devicegraph.errors import ConfigError
from devicegraph.layouts import build_decode_registry
from devicegraph.runners.base import BaseCudaGraphRunner
from devicegraph.runners.parts import check_choice
from devicegraph.runners.tbo import TboCudaGraphRunnerPlugin
from devicegraph.slots import fault, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from devicegraph.backends import BaseCudaGraphBackend
    from devicegraph.buckets import Buckets
    from devicegraph.config import CudaGraphConfig
    from devicegraph.devices import CaptureErrorMode, DeviceAdapter, GraphMemoryPool
    from devicegraph.engine import Limits, ModelRunner
    from devicegraph.outputs import RowAxis
    from devicegraph.registry import CudaGraphBufferRegistry
    from devicegraph.runners.progress import CaptureProgress

__all__ = ["DecodeCudaGraphRunner", "get_batch_sizes_to_capture"]

#: What a decode runner is for: one new token a request, several tokens of a draft to verify, a block to denoise.
MODES: Final = ("decode", "target_verify", "dllm_extend")


def get_batch_sizes_to_capture(
    model_runner: ModelRunner,
    *,
    config: CudaGraphConfig,
    num_tokens_per_bs: int = 1,
    alignment: int = 1,
    token_alignment: int = 1,
) -> tuple[list[int], list[int]]:
    """The batch sizes of the decode phase within the engine's limits: those to capture, and those to compile.

    Args:
        model_runner: the engine, for its limits.
        config: the configuration.
        num_tokens_per_bs: tokens for each request.
        alignment: what the requests of every bucket are a multiple of: two with two-batch overlap.
        token_alignment: what its tokens are a multiple of: the ranks that they are spread over, twice with two-batch
            overlap.

    Returns:
        `(capture_bs, compile_bs)`, both ascending; the second is empty unless the backend compiles.

    Raises:
        BackendError: the engine's device is not available here.
        ConfigError: an engine that lacks something, or more tokens for a request than it can take.
    """
    adapter, hooks = get_device_adapter(model_runner.device), Hooks(model_runner)
    units = (as_count("alignment", alignment), as_count("token_alignment", token_alignment))
    capture_bs = list(_buckets(adapter, hooks, model_runner.limits, config, num_tokens_per_bs, units))
    return capture_bs, capture_bs.copy() if config.decode.backend == "tc_piecewise" else []


class DecodeCudaGraphRunner(BaseCudaGraphRunner):
    """Runs decode batches through captured graphs; the bucket counts requests.

    Where the registry has `encoder_lens`, a batch in which some requests have encoded tokens and some have none runs
    eagerly (`encoder-lens-mixed`); so does one whose lengths are on the device only, without the `encoder_lens_cpu`
    that tells (`encoder-lens-unknown`).

    Args:
        model_runner: the engine; see `ModelRunner`.
        mode: `decode`, `target_verify` or `dllm_extend`: what the graphs are for, for the engine to read.
        num_tokens_per_bs: tokens for each request; more than one in the two other modes.
        tbo: splits every static batch in two halves; see there.

    The other arguments and the errors are those of `BaseCudaGraphRunner`.
    """

    phase: ClassVar[Literal["decode", "prefill"]] = "decode"

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        config: CudaGraphConfig,
        registry: CudaGraphBufferRegistry | None = None,
        backend: BaseCudaGraphBackend | None = None,
        mode: Literal["decode", "target_verify", "dllm_extend"] = "decode",
        num_tokens_per_bs: int = 1,
        tbo: TboCudaGraphRunnerPlugin | None = None,
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
        check_choice("mode", mode, MODES)
        self.mode = mode
        self.num_tokens_per_bs = as_count("num_tokens_per_bs", num_tokens_per_bs)
        if not isinstance(tbo, TboCudaGraphRunnerPlugin | None):
            raise ConfigError(f"tbo: {shown(tbo)} is no `TboCudaGraphRunnerPlugin`", code="wrong-type")
        self.tbo = tbo
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
        if self.buffer_registry.has_slot("encoder_lens"):
            self._why_eager = why_not_uniform
        if tbo is not None:
            tbo.attach(self)

    def _find_alignment(self, slots: tuple[int, int]) -> tuple[int, int]:
        # Each half is a batch that the slots have whole rows for.
        return slots if self.tbo is None else (2 * slots[0], 2 * slots[1])

    def _make_buckets(self) -> Buckets:
        limits, alignment = self.model_runner.limits, self.alignment
        return _buckets(self.adapter, self.hooks, limits, self.config, self.num_tokens_per_bs, alignment)

    @property
    def bucket_unit(self) -> int:
        """What every bucket is a multiple of."""
        requests, tokens = self.alignment
        return math.lcm(requests, tokens // math.gcd(tokens, self.num_tokens_per_bs))

    def _make_registry(self) -> CudaGraphBufferRegistry:
        maximum = max(self.buckets.maximum, 1)
        return build_decode_registry(
            device=self.adapter.device,
            max_bs=maximum,
            max_num_token=maximum * self.num_tokens_per_bs,
            seq_len_fill_value=getattr(self.model_runner, "seq_len_fill_value", 1),
            cache_loc_dtype=getattr(self.model_runner, "cache_loc_dtype", self.adapter.cache_loc_dtype),
        )

    def _resolve_backend(self) -> BaseCudaGraphBackend | None:
        return resolve_decode_backend(self)

    def _padded_sizes(self, size: int, bs: int) -> tuple[int, int]:
        return size, size * self.num_tokens_per_bs

    def _idle_requests(self, size: int) -> int:
        return size

    def _live_size(self, bs: int, num_tokens: int) -> int | str:
        return bs if num_tokens == bs * self.num_tokens_per_bs else "not-uniform"


def why_not_uniform(forward_batch: Any, requests: int) -> str | None:
    """The code of the decision for encoded lengths of which some are zero and some are not; None for all others.

    They are read where that waits for nothing: from the batch's `encoder_lens_cpu`, a sequence of numbers or a tensor
    on the host, or from `encoder_lens` itself if that is there. Padded rows are in neither.

    Raises:
        SlotError: `wrong-shape`: those on the host are not one for each request. Of `encoder_lens` a fill says it.
    """
    lengths, on_host = read_fields(forward_batch, ("encoder_lens", "encoder_lens_cpu"))
    if on_host is not None:
        given: object = f"a `{type(on_host).__name__}`"
        if hasattr(on_host, "shape"):
            given = list(on_host.shape)
        elif hasattr(on_host, "__len__"):
            given = [len(on_host)]
        if given != [requests]:
            what = f"the batch has {given} for {requests} requests"
            raise fault("encoder_lens_cpu", "wrong-shape", what, expected=[requests], given=given)
    known = lengths if on_host is None else on_host
    if isinstance(known, torch.Tensor):
        if known.device.type != "cpu":
            return "encoder-lens-unknown"
        known = known.tolist()
    if known is None or len(known) == 0 or min(known) > 0 or max(known) <= 0:
        return None
    return "encoder-lens-mixed"


def _buckets(
    adapter: DeviceAdapter,
    hooks: Hooks,
    limits: Limits,
    config: CudaGraphConfig,
    num_tokens_per_bs: int,
    alignment: tuple[int, int],
) -> Buckets:
    if num_tokens_per_bs > limits.max_num_tokens:
        raise ConfigError(
            f"num_tokens_per_bs: {num_tokens_per_bs} tokens of one request are more than the engine's "
            f"`limits.max_num_tokens`, {limits.max_num_tokens}",
            code="limit-invalid",
        )
    return decode_buckets(
        config.decode.max_bs,
        bs=config.decode.bs,
        padding=config.padding,
        num_tokens_per_bs=num_tokens_per_bs,
        alignment=alignment[0],
        token_alignment=alignment[1],
        limit=min(limits.max_bs, limits.max_num_tokens // num_tokens_per_bs),
        max_graphs=_max_graphs(adapter, hooks),
    )


def _max_graphs(adapter: DeviceAdapter, hooks: Hooks) -> int | None:
    """How many buckets the device has streams for; None where streams are no limit."""
    if adapter.stream_limit is None:
        return None
    return max(adapter.stream_limit // (hooks.streams_per_graph * len(hooks.variants)), 1)
