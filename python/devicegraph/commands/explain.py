"""`devicegraph explain`: what a configuration comes to, and who said what."""

from __future__ import annotations

import json
import warnings

from devicegraph._core import CONFIG_OPTIONS, config_schema, read_argument
from devicegraph.args import add_cuda_graph_args, config_from_options
from devicegraph.config import CudaGraphConfig
from devicegraph.errors import ConfigError
from devicegraph.rules import FACTS, resolve_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

__all__ = ["add_arguments", "read_config", "run"]


def read_config(text: str) -> CudaGraphConfig:
    """Reads what an operator means by a configuration: JSON text, which begins with a brace, or the name of a file."""
    return CudaGraphConfig.from_json(text) if text.lstrip().startswith("{") else CudaGraphConfig.from_file(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command, the options of an engine among them."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a JSON or TOML file, or JSON text")
    parser.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="apply the ready rules under this fact; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a configuration instead")
    add_cuda_graph_args(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation."""
    if arguments.schema:
        print(json.dumps(config_schema(), indent=2))
        return 0
    options = {option.keyword: getattr(arguments, option.keyword) for option in CONFIG_OPTIONS}
    if arguments.config is not None:
        if options["cuda_graph_config"] is not None:
            raise ConfigError("give CONFIG or `--cuda-graph-config`, not both", code="options-disagree")
        options["cuda_graph_config"] = read_config(arguments.config)
    with warnings.catch_warnings(record=True) as deprecations:
        warnings.simplefilter("always", DeprecationWarning)
        config = config_from_options(**options)
    if arguments.fact:
        config = resolve_config(config, dict(map(_read_fact, arguments.fact)))
    explanation = config.explain()
    messages = [str(warning.message) for warning in deprecations]
    if arguments.json:
        print(json.dumps({**explanation.to_dict(), "deprecations": messages}, indent=2))
    else:
        print(explanation, *(f"warning: {message}" for message in messages), sep="\n")
    return 0


def _read_fact(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if name not in FACTS:
        known = ", ".join(f"`{fact}`" for fact in FACTS)
        raise ConfigError(f"`{name}` is no fact that a ready rule reads: {known}", code="unknown-fact")
    if not equals:
        raise ConfigError(f"`{text}` gives the fact no value; write `{name}=VALUE`", code="unknown-fact")
    return name, read_argument(value)
