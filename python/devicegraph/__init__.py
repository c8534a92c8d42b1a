"""Device-graph capture and replay for LLM serving engines.

Every public name can be imported from here. Nothing is loaded before a name that needs it is used, so that an argument
parser can build a configuration in milliseconds and without torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as type checkers read it; `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from devicegraph._core import __version__ as __version__
    from devicegraph.args import add_cuda_graph_args as add_cuda_graph_args
    from devicegraph.args import config_from_args as config_from_args
    from devicegraph.args import config_from_options as config_from_options
    from devicegraph.auditing import AUDIT_CODES as AUDIT_CODES
    from devicegraph.auditing import AuditFinding as AuditFinding
    from devicegraph.auditing import AuditReport as AuditReport
    from devicegraph.auditing import audit as audit
    from devicegraph.backends import BaseCudaGraphBackend as BaseCudaGraphBackend
    from devicegraph.backends import resolve_decode_backend as resolve_decode_backend
    from devicegraph.backends import resolve_prefill_backend as resolve_prefill_backend
    from devicegraph.backends.breakable import BreakableCudaGraphBackend as BreakableCudaGraphBackend
    from devicegraph.backends.breaks import break_graph as break_graph
    from devicegraph.backends.breaks import current_batch as current_batch
    from devicegraph.backends.breaks import eager_on_graph as eager_on_graph
    from devicegraph.backends.full import FullCudaGraphBackend as FullCudaGraphBackend
    from devicegraph.backends.input_update import InputUpdate as InputUpdate
    from devicegraph.backends.npu import NPUCudaGraphBackend as NPUCudaGraphBackend
    from devicegraph.backends.segmented import Coverage as Coverage
    from devicegraph.backends.split_ops import register_split_op as register_split_op
    from devicegraph.backends.split_ops import split_operators as split_operators
    from devicegraph.backends.tc_piecewise import TcPiecewiseCudaGraphBackend as TcPiecewiseCudaGraphBackend
    from devicegraph.buckets import Buckets as Buckets
    from devicegraph.buckets import DroppedBucket as DroppedBucket
    from devicegraph.buckets import OptimizedBuckets as OptimizedBuckets
    from devicegraph.buckets import decode_buckets as decode_buckets
    from devicegraph.buckets import optimize_buckets as optimize_buckets
    from devicegraph.buckets import prefill_buckets as prefill_buckets
    from devicegraph.buckets import read_histogram as read_histogram
    from devicegraph.buckets import write_histogram as write_histogram
    from devicegraph.config import ALLOWED_BACKENDS_PER_PHASE as ALLOWED_BACKENDS_PER_PHASE
    from devicegraph.config import Backend as Backend
    from devicegraph.config import ConfigIssue as ConfigIssue
    from devicegraph.config import CudaGraphConfig as CudaGraphConfig
    from devicegraph.config import Explanation as Explanation
    from devicegraph.config import Phase as Phase
    from devicegraph.config import PhaseConfig as PhaseConfig
    from devicegraph.config import check_cuda_graph_backend as check_cuda_graph_backend
    from devicegraph.config import default_cuda_graph_config as default_cuda_graph_config
    from devicegraph.config import parse_cuda_graph_config_arg as parse_cuda_graph_config_arg
    from devicegraph.config import set_active_config as set_active_config
    from devicegraph.devices import Availability as Availability
    from devicegraph.devices import DeviceAdapter as DeviceAdapter
    from devicegraph.devices import DeviceMemory as DeviceMemory
    from devicegraph.devices import GraphMemoryPool as GraphMemoryPool
    from devicegraph.devices import UpdatableCall as UpdatableCall
    from devicegraph.devices import get_device_adapter as get_device_adapter
    from devicegraph.devices.accelerator import AcceleratorDevice as AcceleratorDevice
    from devicegraph.distributed import RankGroup as RankGroup
    from devicegraph.engine import Limits as Limits
    from devicegraph.engine import ModelRunner as ModelRunner
    from devicegraph.engine import StaticBatch as StaticBatch
    from devicegraph.engine import hook as hook
    from devicegraph.errors import BackendError as BackendError
    from devicegraph.errors import CaptureError as CaptureError
    from devicegraph.errors import ConfigError as ConfigError
    from devicegraph.errors import DeviceGraphError as DeviceGraphError
    from devicegraph.errors import RankError as RankError
    from devicegraph.errors import ReplayError as ReplayError
    from devicegraph.errors import SlotError as SlotError
    from devicegraph.fill import grouped_foreach_copy_ as grouped_foreach_copy_
    from devicegraph.layouts import build_decode_registry as build_decode_registry
    from devicegraph.layouts import build_eager_registry as build_eager_registry
    from devicegraph.layouts import build_prefill_registry as build_prefill_registry
    from devicegraph.metrics import StepMetrics as StepMetrics
    from devicegraph.metrics import prometheus_text as prometheus_text
    from devicegraph.outputs import RowAxis as RowAxis
    from devicegraph.parallel import Proposal as Proposal
    from devicegraph.parallel import agree as agree
    from devicegraph.pool import ForwardInputBuffers as ForwardInputBuffers
    from devicegraph.pool import InputBufferPool as InputBufferPool
    from devicegraph.pool import input_buffer_pool as input_buffer_pool
    from devicegraph.pool import share_input_buffer as share_input_buffer
    from devicegraph.registry import CudaGraphBufferRegistry as CudaGraphBufferRegistry
    from devicegraph.registry import reset_index_buffers as reset_index_buffers
    from devicegraph.report import CapturedBucket as CapturedBucket
    from devicegraph.report import CaptureEstimate as CaptureEstimate
    from devicegraph.report import CaptureReport as CaptureReport
    from devicegraph.report import DroppedCapture as DroppedCapture
    from devicegraph.report import InputBuffer as InputBuffer
    from devicegraph.rules import FACTS as FACTS
    from devicegraph.rules import READY_RULES as READY_RULES
    from devicegraph.rules import Rule as Rule
    from devicegraph.rules import resolve_config as resolve_config
    from devicegraph.runners.base import BaseCudaGraphRunner as BaseCudaGraphRunner
    from devicegraph.runners.capture_mode import compile_in_capture_mode as compile_in_capture_mode
    from devicegraph.runners.capture_mode import freeze_gc as freeze_gc
    from devicegraph.runners.capture_mode import get_is_capture_mode as get_is_capture_mode
    from devicegraph.runners.capture_mode import model_capture_mode as model_capture_mode
    from devicegraph.runners.decision import DECISION_CODES as DECISION_CODES
    from devicegraph.runners.decision import Decision as Decision
    from devicegraph.runners.decode import DecodeCudaGraphRunner as DecodeCudaGraphRunner
    from devicegraph.runners.decode import get_batch_sizes_to_capture as get_batch_sizes_to_capture
    from devicegraph.runners.prefill import PrefillCudaGraphRunner as PrefillCudaGraphRunner
    from devicegraph.runners.progress import CaptureProgress as CaptureProgress
    from devicegraph.runners.progress import json_progress as json_progress
    from devicegraph.runners.shape_key import ShapeKey as ShapeKey
    from devicegraph.runners.tbo import TboCudaGraphRunnerPlugin as TboCudaGraphRunnerPlugin
    from devicegraph.slots import FillContext as FillContext
    from devicegraph.slots import GraphSlot as GraphSlot
    from devicegraph.slots import PaddingPolicy as PaddingPolicy
    from devicegraph.verifying import verify as verify
    from devicegraph.verifying.report import SkippedBatch as SkippedBatch
    from devicegraph.verifying.report import VerifyFinding as VerifyFinding
    from devicegraph.verifying.report import VerifyReport as VerifyReport

#: The module of each public name. A test holds it equal to the imports above, which are what type checkers read.
_MODULES = {
    "_core": ("__version__",),
    "args": (
        "add_cuda_graph_args",
        "config_from_args",
        "config_from_options",
    ),
    "auditing": (
        "AUDIT_CODES",
        "AuditFinding",
        "AuditReport",
        "audit",
    ),
    "backends": (
        "BaseCudaGraphBackend",
        "resolve_decode_backend",
        "resolve_prefill_backend",
    ),
    "backends.breakable": ("BreakableCudaGraphBackend",),
    "backends.breaks": (
        "break_graph",
        "current_batch",
        "eager_on_graph",
    ),
    "backends.full": ("FullCudaGraphBackend",),
    "backends.input_update": ("InputUpdate",),
    "backends.npu": ("NPUCudaGraphBackend",),
    "backends.segmented": ("Coverage",),
    "backends.split_ops": (
        "register_split_op",
        "split_operators",
    ),
    "backends.tc_piecewise": ("TcPiecewiseCudaGraphBackend",),
    "buckets": (
        "Buckets",
        "DroppedBucket",
        "OptimizedBuckets",
        "decode_buckets",
        "optimize_buckets",
        "prefill_buckets",
        "read_histogram",
        "write_histogram",
    ),
    "config": (
        "ALLOWED_BACKENDS_PER_PHASE",
        "Backend",
        "ConfigIssue",
        "CudaGraphConfig",
        "Explanation",
        "Phase",
        "PhaseConfig",
        "check_cuda_graph_backend",
        "default_cuda_graph_config",
        "parse_cuda_graph_config_arg",
        "set_active_config",
    ),
    "devices": (
        "Availability",
        "DeviceAdapter",
        "DeviceMemory",
        "GraphMemoryPool",
        "UpdatableCall",
        "get_device_adapter",
    ),
    "devices.accelerator": ("AcceleratorDevice",),
    "distributed": ("RankGroup",),
    "engine": (
        "Limits",
        "ModelRunner",
        "StaticBatch",
        "hook",
    ),
    "errors": (
        "BackendError",
        "CaptureError",
        "ConfigError",
        "DeviceGraphError",
        "RankError",
        "ReplayError",
        "SlotError",
    ),
    "fill": ("grouped_foreach_copy_",),
    "layouts": (
        "build_decode_registry",
        "build_eager_registry",
        "build_prefill_registry",
    ),
    "metrics": (
        "StepMetrics",
        "prometheus_text",
    ),
    "outputs": ("RowAxis",),
    "parallel": (
        "Proposal",
        "agree",
    ),
    "pool": (
        "ForwardInputBuffers",
        "InputBufferPool",
        "input_buffer_pool",
        "share_input_buffer",
    ),
    "registry": (
        "CudaGraphBufferRegistry",
        "reset_index_buffers",
    ),
    "report": (
        "CaptureEstimate",
        "CaptureReport",
        "CapturedBucket",
        "DroppedCapture",
        "InputBuffer",
    ),
    "rules": (
        "FACTS",
        "READY_RULES",
        "Rule",
        "resolve_config",
    ),
    "runners.base": ("BaseCudaGraphRunner",),
    "runners.capture_mode": (
        "compile_in_capture_mode",
        "freeze_gc",
        "get_is_capture_mode",
        "model_capture_mode",
    ),
    "runners.decision": (
        "DECISION_CODES",
        "Decision",
    ),
    "runners.decode": (
        "DecodeCudaGraphRunner",
        "get_batch_sizes_to_capture",
    ),
    "runners.prefill": ("PrefillCudaGraphRunner",),
    "runners.progress": (
        "CaptureProgress",
        "json_progress",
    ),
    "runners.shape_key": ("ShapeKey",),
    "runners.tbo": ("TboCudaGraphRunnerPlugin",),
    "slots": (
        "FillContext",
        "GraphSlot",
        "PaddingPolicy",
    ),
    "verifying": ("verify",),
    "verifying.report": (
        "SkippedBatch",
        "VerifyFinding",
        "VerifyReport",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module `devicegraph` has no attribute `{name}`")
    value = getattr(importlib.import_module(f"devicegraph.{module}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
