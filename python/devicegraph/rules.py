"""Rules: which backends do not go with what else an engine does, and what follows.

An engine gives its facts, a rule says when it holds, and the core decides: a backend that nobody chose gives way, one
that somebody chose stays with a warning, or is an error where the rule is hard. `READY_RULES` are combinations that
engines met in public, most of them as a wrong result or a crash at capture; each reads one or two of the `FACTS` and is
off where the engine does not give them.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from devicegraph._core import CudaGraphConfig, check_rule, resolve
from devicegraph.config import Backend, Phase
from devicegraph.errors import ConfigError

__all__ = ["FACTS", "READY_RULES", "Rule", "resolve_config"]

_When = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Rule:
    """That some backends of a phase do not go with something the engine does.

    Attributes:
        name: a word for it, unique within its phase.
        phase: one of `Phase.ALL`.
        backends: those it is against; a phase that is `disabled` has no rule.
        when: whether it holds, from the facts. A fact that it indexes and that was not given, or is None, turns the
            rule off.
        hard: whether even somebody who names the backend cannot have it.
        reason: why, in a few words that go after a colon.

    Raises:
        ConfigError: with everything that is wrong with the parts in `issues`.
    """

    name: str
    phase: str
    backends: tuple[str, ...]
    when: _When
    hard: bool
    reason: str

    def __post_init__(self) -> None:
        check_rule(self)
        if not callable(self.when):
            raise ConfigError(f"when: `{self.when!r}` is not a function of the facts", code="wrong-type")
        object.__setattr__(self, "backends", tuple(self.backends))

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether the rule holds; False where it needs a fact that was not given.

        Raises:
            ConfigError: `when` raised something else (`rule-failed`), which is chained.
        """
        try:
            return bool(self.when(facts if isinstance(facts, _Facts) else _Facts(facts)))
        except _NotGivenError:
            return False
        except Exception as error:
            raise ConfigError(
                f"rule `{self.name}` of {self.phase} failed: {type(error).__name__}: {error}", code="rule-failed"
            ) from error


def resolve_config(
    config: CudaGraphConfig, facts: Mapping[str, Any], rules: Iterable[Rule] | None = None
) -> CudaGraphConfig:
    """The configuration that is left under an engine's facts.

    | the backend is | soft rule | hard rule |
    | --- | --- | --- |
    | the default | the phase is disabled, with the reason | the phase is disabled, with the reason |
    | explicit | kept, with a warning (`rule-outweighed`) | an error (`rule-forbids`) |

    The order of the rules does not matter. The result replaces that of an earlier call, so resolving twice gives the
    same, and resolving under other facts starts from what people named. Nothing is warned of here: see
    `config.warnings`, and `set_active_config`, which says them.

    Args:
        config: what people named.
        facts: what the engine does, by name; those that the ready rules read are in `FACTS`. A given name that no rule
            reads is a `UserWarning` where it is nearly one that a rule wanted.
        rules: `READY_RULES` unless given; for these and others `(*READY_RULES, other)`.

    Raises:
        ConfigError: with everything that is wrong in `issues`: every hard rule against an explicit backend, and rules
            with the name of another of their phase (`repeated-rule`). A rule that fails is `rule-failed`.
    """
    given = _Facts(facts)
    resolved = resolve(config, [(rule, rule.holds(given)) for rule in (READY_RULES if rules is None else rules)])
    for name in given.unread():
        nearest = difflib.get_close_matches(name, given.missing, n=1, cutoff=0.85)
        if nearest:
            warnings.warn(f"no rule reads the fact `{name}`; did you mean `{nearest[0]}`?", UserWarning, stacklevel=2)
    return resolved


class _NotGivenError(KeyError):
    """A fact that a rule reads and the engine did not give."""


class _Facts(Mapping[str, Any]):
    """Facts that know which of them were read, and what was looked for in vain."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._read: set[str] = set()
        self.missing: set[str] = set()

    def unread(self) -> list[str]:
        return [name for name in self._facts if name not in self._read]

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        value = self._facts.get(name)
        if value is None:
            self.missing.add(name)
            raise _NotGivenError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)


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
    "device": "`cuda`, `rocm`, `npu`, `xpu`, `musa` or `cpu`",
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

_Rows = tuple[tuple[str, _When, bool, str], ...]

# Hard are those that cannot work: what the forward does on the host happens once, at capture, and never again.
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
