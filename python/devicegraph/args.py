"""Options: on a command line or as keyword arguments, current and deprecated, merged into one configuration.

The table of options is in the core, `CONFIG_OPTIONS`: the parser, the keyword arguments and the documentation all come
from it. Lowest first: defaults, deprecated options, options of one key, `--cuda-graph-config`; they merge key by key.
"""

from __future__ import annotations

import argparse
import warnings

from devicegraph._core import CONFIG_OPTIONS, merge_options, read_argument
from devicegraph.config import CudaGraphConfig, parse_cuda_graph_config_arg
from devicegraph.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from devicegraph._core import ConfigOption

__all__ = ["add_cuda_graph_args", "config_from_args", "config_from_options"]

_PRECEDENCE = (
    "Which backend captures each phase, and for which sizes. Merged key by key, lowest first: defaults, deprecated "
    "options, options of one key, --cuda-graph-config."
)


def add_cuda_graph_args(parser: argparse.ArgumentParser) -> None:
    """Adds every option, current and deprecated, as a group of its own.

    An option that is not given is None in the namespace, and one that takes no value is True or None. A bad value, or
    one that contradicts another option, ends in `parser.error`.

    Args:
        parser: any `argparse` parser, a subparser among them.
    """
    group = parser.add_argument_group("device graphs", _PRECEDENCE)
    for option in CONFIG_OPTIONS:
        group.add_argument(option.flag, action=_Checked, option=option, default=None)


def config_from_args(namespace: argparse.Namespace) -> CudaGraphConfig:
    """The configuration that parsed arguments come to.

    Args:
        namespace: what a parser with `add_cuda_graph_args` returned; options that are not there are not given.

    Raises:
        ConfigError: something in a namespace that no parser checked is wrong; all of it is in `issues`.

    Warns:
        DeprecationWarning: once for each deprecated option given, naming what to use instead.
    """
    return _merged(_given(namespace))


def config_from_options(**options: Any) -> CudaGraphConfig:
    """The configuration that keyword arguments come to, by the names of the command line.

    `config_from_options(cuda_graph_max_bs_decode=64)` is `--cuda-graph-max-bs-decode 64`. None is "not given", and so
    is False for an option that takes no value there.

    Args:
        **options: `cuda_graph_config` takes JSON text, a mapping or a `CudaGraphConfig`, whose explicit keys it is.

    Raises:
        ConfigError: with everything that is wrong in `issues`; an unknown name is `unknown-option`, two deprecated
            options that set one key to different values are `options-disagree`.

    Warns:
        DeprecationWarning: once for each deprecated option given, naming what to use instead.
    """
    return _merged(options)


def _merged(options: dict[str, Any]) -> CudaGraphConfig:
    config, deprecations = merge_options(options)
    for text in deprecations:
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return config


def _given(namespace: argparse.Namespace) -> dict[str, Any]:
    return {option.keyword: getattr(namespace, option.keyword, None) for option in CONFIG_OPTIONS}


_NARGS: dict[str, int | str] = {"nothing": 0, "many": "*"}


class _Checked(argparse.Action):
    """Stores what an option says, and checks it together with the options before it.

    A namespace does not know its parser, so what is wrong has to be found while the parser is still at work.
    """

    def __init__(self, *, option: ConfigOption, option_strings: list[str], dest: str, default: None) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=_NARGS.get(option.takes),
            default=default,
            type=parse_cuda_graph_config_arg if option.takes == "config" else read_argument,
            help=option.help,
            metavar=option.metavar,
        )

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        try:
            merge_options(_given(namespace))
        except ConfigError as error:
            raise argparse.ArgumentError(None, str(error)) from error
