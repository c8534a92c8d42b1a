"""Configuration: which backend each phase is captured by, and for which sizes.

The rules are in the core, and one validator serves every way in. What is here needs Python: the words as constants,
the type for an argument parser, and the configuration that the process runs with.
"""

from __future__ import annotations

import argparse
import warnings

from devicegraph._core import ALLOWED_BACKENDS_PER_PHASE, ConfigIssue, CudaGraphConfig, Explanation, PhaseConfig
from devicegraph.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

__all__ = [
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
]


class Phase:
    """The two kinds of step that are captured apart."""

    DECODE: Final = "decode"
    PREFILL: Final = "prefill"
    ALL: Final = (DECODE, PREFILL)


class Backend:
    """How a phase is captured; `ALLOWED_BACKENDS_PER_PHASE` says which phase can have which."""

    #: One graph for each shape, attention included.
    FULL: Final = "full"
    #: Graphs between breaks, where the model runs eagerly.
    BREAKABLE: Final = "breakable"
    #: The forward split by `torch.compile`, its pieces compiled and captured.
    TC_PIECEWISE: Final = "tc_piecewise"
    #: No graph: every step runs eager.
    DISABLED: Final = "disabled"
    ALL: Final = (FULL, BREAKABLE, TC_PIECEWISE, DISABLED)


def default_cuda_graph_config() -> CudaGraphConfig:
    """The configuration in which nobody has named anything."""
    return CudaGraphConfig()


def parse_cuda_graph_config_arg(text: str) -> dict[str, Any]:
    """Reads a JSON configuration as the `type` of an `argparse` argument.

    Args:
        text: a JSON object, such as `{"decode": {"max_bs": 64}}`.

    Returns:
        The keys that the text names, checked, as `CudaGraphConfig.from_dict` takes them. It is a layer and no whole
        configuration: what it does not name is left to others.

    Raises:
        argparse.ArgumentTypeError: the text is not JSON, or something in it is wrong; the message lists everything.
    """
    try:
        return CudaGraphConfig.from_json(text).to_dict(explicit=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_active: CudaGraphConfig | None = None


def set_active_config(config: CudaGraphConfig | None) -> None:
    """Makes a configuration the one that this process runs with; None takes it back.

    What in it has no effect (`config.warnings`) is said here, once, as a `UserWarning`: reading and merging are silent,
    since a key that is idle in one layer may be needed by the next.

    Args:
        config: the resolved configuration.
    """
    global _active
    if config is not None:
        for issue in config.warnings:
            warnings.warn(str(issue), UserWarning, stacklevel=2)
    _active = config


def check_cuda_graph_backend(phase: str, backend: str) -> bool:
    """Whether the active configuration captures a phase by a backend; False before `set_active_config`.

    Args:
        phase: one of `Phase.ALL`.
        backend: one of `Backend.ALL`.

    Raises:
        KeyError: no such phase.
        ConfigError: no such backend (`unknown-backend`), whether a configuration is active or not: a misspelt name
            would be False for ever.
    """
    wanted = PhaseConfig(backend=backend).backend
    config = default_cuda_graph_config() if _active is None else _active
    return config[phase].backend == wanted and _active is not None
