"""Ready rules: combinations that engines met in public, most of them as a wrong result or a crash at capture.

Each reads one or two facts of the table below and is off where the engine does not give them. Hard are those that
cannot work: what the forward does on the host happens once, at capture, and never again.
"""

from __future__ import annotations

from devicegraph.config import Backend, Phase
from devicegraph.rules import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    _When = Callable[[Mapping[str, Any]], object]
    _Rows = tuple[tuple[str, _When, bool, str], ...]

__all__ = ["FACTS", "READY_RULES"]

#: The facts that the ready rules read, by name.
FACTS: Mapping[str, str] = {
    "all_to_all_backend": "what exchanges tokens between experts, such as `deepep`; `none` where nothing does",
    "all_to_all_mode": "`normal` or `low_latency`",
    "attention_backend": "the attention kernels of the engine, such as `flashinfer`",
    "context_parallel_size": "ranks that share out a prompt's attention",
    "cpu_offload": "whether weights or caches move to the host and back while the model runs",
    "data_parallel_attention": "whether attention runs data-parallel beside tensor-parallel layers",
    "decode_context_parallel_size": "ranks that share out the cache of a request in decode",
    "deterministic": "whether results must not depend on the batch",
    "device": "`cuda`, `rocm`, `npu`, `xpu` or `cpu`",
    "diffusion_lm": "whether decode denoises blocks of tokens",
    "disaggregation_role": "`prefill` or `decode`, where a server does only that",
    "expert_recorder": "whether expert loads are recorded while the model runs",
    "hybrid_linear_attention": "whether layers of linear attention are among the others",
    "lora": "whether adapters are served",
    "multi_item_scoring": "whether several items are scored in one prompt",
    "multimodal": "whether prompts have images or sound in them, and the model is not known to bear it",
    "out_of_tree_platform": "whether the device comes from a plug-in of the engine",
    "pipeline_parallel_size": "stages that the layers are spread over",
    "quantization": "the format of the weights, such as `gguf`",
    "sparse_attention": "whether attention selects tokens by an index of its own",
    "symmetric_memory": "whether collectives use symmetric memory",
    "tensor_dump": "whether activations are written out while the model runs",
    "torch_compile": "whether the engine compiles the model itself",
    "two_batch_overlap": "whether two halves of a batch run interleaved",
    "unsupported_architecture": "whether the model is known not to trace",
}

_SOFT, _HARD = False, True
_DECODE = (Backend.FULL, Backend.BREAKABLE, Backend.TC_PIECEWISE)
_PREFILL = (Backend.BREAKABLE, Backend.TC_PIECEWISE)
_BREAKABLE = (Backend.BREAKABLE,)
_PIECEWISE = (Backend.TC_PIECEWISE,)


def _on(fact: str) -> _When:
    return lambda facts: facts[fact]


def _several(fact: str) -> _When:
    return lambda facts: facts[fact] > 1


def _among(fact: str, *values: str) -> _When:
    return lambda facts: facts[fact] in values


def _other_than(fact: str, *values: str) -> _When:
    return lambda facts: facts[fact] not in values


def _rocm_diffusion(facts: Mapping[str, Any]) -> object:
    return facts["diffusion_lm"] and facts["device"] == "rocm"


_EITHER_PHASE: _Rows = (
    ("all-to-all-normal", _among("all_to_all_mode", "normal"), _HARD, "its counts are read on the host in every layer"),
    ("diffusion-lm-rocm", _rocm_diffusion, _SOFT, "denoising is not known to bear a capture on this device"),
    (
        "host-attention",
        _among("attention_backend", "torch_native", "flex_attention"),
        _SOFT,
        "these kernels loop over the requests on the host",
    ),
    ("multi-item-scoring", _on("multi_item_scoring"), _SOFT, "where an item ends is worked out on the host"),
    ("tensor-dump", _on("tensor_dump"), _HARD, "a dump copies to the host in the middle of the forward"),
)

_ANY_DECODE: _Rows = (
    ("disaggregation", _among("disaggregation_role", "prefill"), _SOFT, "this server leaves decode to others"),
)

_DECODE_IN_PARTS: _Rows = (
    ("npu", _among("device", "npu"), _HARD, "an NPU captures decode as one full graph only"),
    ("xpu", _among("device", "xpu"), _HARD, "an XPU captures decode as one full graph only"),
)

_ANY_PREFILL: _Rows = (
    ("context-parallel", _several("context_parallel_size"), _SOFT, "how ranks share a prompt varies with the prompt"),
    (
        "decode-context-parallel",
        _several("decode_context_parallel_size"),
        _SOFT,
        "where ranks keep a prompt's cache varies with the prompt",
    ),
    ("disaggregation", _among("disaggregation_role", "decode"), _SOFT, "this server leaves prefill to others"),
    ("hybrid-attention", _on("hybrid_linear_attention"), _SOFT, "linear attention advances its state chunk by chunk"),
    ("multimodal", _on("multimodal"), _SOFT, "embeddings of images and sound take the place of tokens"),
    ("npu", _among("device", "npu"), _HARD, "an NPU captures decode only"),
    ("pipeline-parallel", _several("pipeline_parallel_size"), _SOFT, "what stages hand over has sizes of its own"),
    ("sparse-attention", _on("sparse_attention"), _SOFT, "which tokens are attended to varies with the prompt"),
    ("trtllm-mla", _among("attention_backend", "trtllm_mla"), _SOFT, "its prefill is not known to bear a capture"),
    ("two-batch-overlap", _on("two_batch_overlap"), _SOFT, "where a batch is cut in two varies with the batch"),
    ("xpu", _among("device", "xpu"), _HARD, "an XPU captures decode only"),
)

_BREAKABLE_PREFILL: _Rows = (
    (
        "all-to-all-backend",
        _other_than("all_to_all_backend", "none", "deepep", "megamoe", "flashinfer"),
        _SOFT,
        "this token exchange is not known to bear a capture",
    ),
)

_PIECEWISE_PREFILL: _Rows = (
    ("all-to-all", _other_than("all_to_all_backend", "none"), _SOFT, "a token exchange does not trace"),
    ("cpu-offload", _on("cpu_offload"), _SOFT, "what was offloaded comes back at another address"),
    ("data-parallel-attention", _on("data_parallel_attention"), _SOFT, "gathers between the ranks do not trace"),
    ("deterministic", _on("deterministic"), _SOFT, "compiled kernels may sum in another order at another size"),
    ("diffusion-lm", _on("diffusion_lm"), _SOFT, "denoising steps do not trace"),
    ("expert-recorder", _on("expert_recorder"), _SOFT, "recording is a side effect, which a trace drops"),
    ("gguf", _among("quantization", "gguf"), _SOFT, "the kernels of this format do not trace"),
    ("lora", _on("lora"), _SOFT, "which adapters a batch uses changes what is traced"),
    ("other-device", _other_than("device", "cuda", "cpu"), _SOFT, "compiled pieces are known to work on CUDA only"),
    ("out-of-tree-platform", _on("out_of_tree_platform"), _SOFT, "what the plug-in replaces is not known to trace"),
    ("prefill-server", _among("disaggregation_role", "prefill"), _SOFT, "sending the cache away does not trace"),
    ("symmetric-memory", _on("symmetric_memory"), _SOFT, "the compiler does not know its buffers"),
    ("torch-compile", _on("torch_compile"), _SOFT, "the model is compiled already"),
    ("unsupported-architecture", _on("unsupported_architecture"), _SOFT, "the model does not trace"),
)

READY_RULES: tuple[Rule, ...] = tuple(
    Rule(name, phase, backends, when, hard, reason)
    for phase, backends, rows in (
        (Phase.DECODE, _DECODE, _EITHER_PHASE),
        (Phase.PREFILL, _PREFILL, _EITHER_PHASE),
        (Phase.DECODE, _DECODE, _ANY_DECODE),
        (Phase.DECODE, (Backend.BREAKABLE, Backend.TC_PIECEWISE), _DECODE_IN_PARTS),
        (Phase.PREFILL, _PREFILL, _ANY_PREFILL),
        (Phase.PREFILL, _BREAKABLE, _BREAKABLE_PREFILL),
        (Phase.PREFILL, _PIECEWISE, _PIECEWISE_PREFILL),
    )
    for name, when, hard, reason in rows
)
