"""Every way in is one validator: the same value gets the same verdict, code and message, whoever brings it."""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import devicegraph as dg
from devicegraph import ConfigError, CudaGraphConfig, PhaseConfig
from devicegraph._core import CONFIG_OPTIONS, read_argument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Where each route can say a key.
CURRENT = {option.keys[0]: option for option in CONFIG_OPTIONS if option.keys and option.replacement is None}
DEPRECATED = {
    path: option
    for option in CONFIG_OPTIONS
    if option.replacement is not None and option.takes != "nothing"
    for path in option.keys
}
SWITCHES = {
    (path, option.says): option
    for option in CONFIG_OPTIONS
    if option.takes == "nothing"
    for path in option.keys
    if len(option.keys) == 1
}

NAN = math.nan
SIZE = "an integer from 1 to 1048576"
DECODE = "one of `full`, `breakable`, `tc_piecewise` or `disabled`"
PREFILL = "one of `breakable`, `tc_piecewise` or `disabled`"
COMPILER = "one of `eager` or `inductor`"
FLAG = "`true` or `false`"

#: What one source says, and the verdict: the code and the message of its one problem, or None.
CASES: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
    ({"decode.max_bs": 64}, None),
    ({"prefill.max_bs": 8192}, None),
    ({"decode.bs": [4, 1, 4, 2]}, None),
    ({"prefill.bs": [4]}, None),
    ({"decode.max_bs": 4, "decode.bs": [1, 4]}, None),
    ({"decode.backend": "full"}, None),
    ({"decode.backend": "disabled"}, None),
    ({"prefill.backend": "breakable"}, None),
    ({"prefill.backend": "disabled"}, None),
    ({"prefill.tc_compiler": "inductor"}, None),
    # Another backend beside the compiler: kept, and a warning that the verdict has too.
    ({"prefill.backend": "breakable", "prefill.tc_compiler": "inductor"}, None),
    ({"padding": False}, None),
    ({"decode.max_bs": None, "decode.backend": "full"}, None),
    ({"decode.max_bs": "four"}, ("wrong-type", f'`"four"` is a string, not {SIZE}')),
    ({"decode.max_bs": "4"}, ("wrong-type", f'`"4"` is a string, not {SIZE}')),
    ({"decode.max_bs": -1}, ("out-of-range", f"`-1` is not {SIZE}")),
    ({"decode.max_bs": 0}, ("out-of-range", f"`0` is not {SIZE}")),
    ({"prefill.max_bs": 2**20 + 1}, ("out-of-range", f"`1048577` is not {SIZE}")),
    ({"decode.max_bs": True}, ("wrong-type", f"`true` is a boolean, not {SIZE}")),
    ({"decode.max_bs": 1.5}, ("wrong-type", f"`1.5` is a float, not {SIZE}")),
    ({"decode.max_bs": 4.0}, ("wrong-type", f"`4.0` is a float, not {SIZE}")),
    ({"decode.max_bs": NAN}, ("wrong-type", f"`NaN` is a float, not {SIZE}")),
    ({"decode.max_bs": []}, ("wrong-type", f"`[]` is a list, not {SIZE}")),
    ({"decode.max_bs": {}}, ("wrong-type", f"`{{}}` is an object, not {SIZE}")),
    ({"decode.bs": []}, ("empty-list", "`[]` names no size")),
    ({"prefill.bs": []}, ("empty-list", "`[]` names no size")),
    ({"decode.bs": [True]}, ("wrong-type", f"`true` is a boolean, not {SIZE}")),
    ({"prefill.bs": [4, "8"]}, ("wrong-type", f'`"8"` is a string, not {SIZE}')),
    ({"decode.bs": [4, NAN]}, ("wrong-type", f"`NaN` is a float, not {SIZE}")),
    ({"decode.bs": [4, None]}, ("wrong-type", f"`null` is null, not {SIZE}")),
    ({"decode.bs": [4, -1]}, ("out-of-range", f"`-1` is not {SIZE}")),
    ({"decode.bs": 4}, ("wrong-type", "`4` is an integer, not a list of integers from 1 to 1048576")),
    ({"decode.bs": "1,2"}, ("wrong-type", '`"1,2"` is a string, not a list of integers from 1 to 1048576')),
    ({"decode.bs": {}}, ("wrong-type", "`{}` is an object, not a list of integers from 1 to 1048576")),
    ({"decode.max_bs": 8, "decode.bs": [1, 4]}, ("sizes-disagree", "`8` is not the largest entry of `bs`, 4")),
    ({"prefill.max_bs": 2, "prefill.bs": [1, 4]}, ("sizes-disagree", "`2` is not the largest entry of `bs`, 4")),
    ({"decode.backend": "ful"}, ("unknown-backend", f'`"ful"` is not {DECODE}')),
    ({"decode.backend": "Full"}, ("unknown-backend", f'`"Full"` is not {DECODE}')),
    ({"decode.backend": ""}, ("unknown-backend", f'`""` is not {DECODE}')),
    ({"decode.backend": True}, ("wrong-type", f"`true` is a boolean, not {DECODE}")),
    ({"decode.backend": ["full"]}, ("wrong-type", f'`["full"]` is a list, not {DECODE}')),
    ({"prefill.backend": "cuda"}, ("unknown-backend", f'`"cuda"` is not {PREFILL}')),
    (
        {"prefill.backend": "full"},
        ("backend-not-allowed", '`"full"` needs the same shapes on every replay, and those of this phase vary'),
    ),
    ({"prefill.tc_compiler": "gcc"}, ("unknown-compiler", f'`"gcc"` is not {COMPILER}')),
    ({"prefill.tc_compiler": 1}, ("wrong-type", f"`1` is an integer, not {COMPILER}")),
    ({"decode.tc_compiler": "gcc"}, ("unknown-compiler", f'`"gcc"` is not {COMPILER}')),
    ({"padding": "no"}, ("wrong-type", f'`"no"` is a string, not {FLAG}')),
    ({"padding": 0}, ("wrong-type", f"`0` is an integer, not {FLAG}")),
    (
        {"decode.maxbs": 8},
        ("unknown-key", "no such key; the keys here are `backend`, `max_bs`, `bs` and `tc_compiler`"),
    ),
    ({"paddin": True}, ("unknown-key", "no such key; the keys here are `decode`, `prefill` and `padding`")),
    ({"max_bs": 8}, ("unknown-key", "a key of a phase, outside a phase")),
    ({"prefil.max_bs": 8}, ("unknown-phase", "no such phase; the phases are `decode` and `prefill`")),
    (
        {"decode": [4]},
        ("wrong-type", "`[4]` is a list, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`"),
    ),
    (
        {"decode": "full"},
        ("wrong-type", '`"full"` is a string, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`'),
    ),
]


class _CannotSayError(Exception):
    """A route has no way to say this."""


def _tree(said: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path, value in said.items():
        *phase, key = path.split(".")
        (document.setdefault(phase[0], {}) if phase else document)[key] = value
    return document


def _json(said: dict[str, Any]) -> str:
    try:
        return json.dumps(_tree(said), allow_nan=False)
    except ValueError:
        raise _CannotSayError from None


def _toml(said: dict[str, Any]) -> str:
    def value(value: Any) -> str:
        if value is None:
            raise _CannotSayError
        if isinstance(value, list):
            return f"[{', '.join(map(write, value))}]"
        return "nan" if value != value else "{}" if value == {} else json.dumps(value)

    write = value
    return "\n".join(f"{path} = {value(entry)}" for path, entry in said.items())


def _file(suffix: str, write: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any], Path], CudaGraphConfig]:
    def route(said: dict[str, Any], folder: Path) -> CudaGraphConfig:
        path = folder / f"config.{suffix}"
        path.write_text(write(said))
        return CudaGraphConfig.from_file(path)

    return route


def _objects(said: dict[str, Any], _: Path) -> CudaGraphConfig:
    document = _tree(said)
    if said.get("prefill.backend") == "cuda":
        raise _CannotSayError  # a phase that stands alone lists the backends of both phases
    try:
        phases = {name: PhaseConfig(**value) for name, value in document.items() if isinstance(value, dict)}
        return CudaGraphConfig(**{**document, **phases})
    except TypeError:  # Python's own word for an unknown keyword
        raise _CannotSayError from None


def _keywords(said: dict[str, Any], _: Path) -> CudaGraphConfig:
    try:
        return CudaGraphConfig(**_tree(said))
    except TypeError:
        raise _CannotSayError from None


def _changes(said: dict[str, Any], _: Path) -> CudaGraphConfig:
    config = CudaGraphConfig(padding=said.get("padding"))
    for phase, keys in _tree({path: value for path, value in said.items() if path != "padding"}).items():
        try:
            config = config.with_phase(phase, **keys)
        except TypeError:
            raise _CannotSayError from None
    return config


def _current(said: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for path, value in said.items():
        option = CURRENT.get(path)
        if option is None:
            raise _CannotSayError
        # The one option for both compilers cannot set one of them; where it is wrong, it is wrong about decode's first.
        if len(option.keys) > 1 and (path != option.keys[0] or value in ("eager", "inductor")):
            raise _CannotSayError
        if option.takes == "nothing" and value is not option.says:
            raise _CannotSayError
        given[option.keyword] = True if option.takes == "nothing" else value
    return given


def _deprecated(said: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for path, value in said.items():
        switch = SWITCHES.get((path, value)) if isinstance(value, str) else None
        option = switch or DEPRECATED.get(path)
        if option is None:
            raise _CannotSayError
        given[option.keyword] = True if switch else value
    return given


def _options(say: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any], Path], CudaGraphConfig]:
    return lambda said, _: dg.config_from_options(**say(said))


def _token(value: Any) -> str:
    if isinstance(value, list | dict) or value != value:
        raise _CannotSayError
    # What would be read as a number or a word of JSON is text only between quotes.
    return value if isinstance(value, str) and read_argument(value) == value else json.dumps(value)


class _RefusedError(Exception):
    """What a command line was refused with, as it is printed."""


def _command_line(say: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any], Path], CudaGraphConfig]:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise _RefusedError(message)

    def route(said: dict[str, Any], _: Path) -> CudaGraphConfig:
        parser, argv = Parser(), []
        dg.add_cuda_graph_args(parser)
        for option in CONFIG_OPTIONS:
            given = say(said)
            if option.keyword not in given:
                continue
            value = given[option.keyword]
            if (option.takes == "many") != isinstance(value, list):
                raise _CannotSayError
            tokens = value if option.takes == "many" else [] if option.takes == "nothing" else [value]
            argv += [option.flag, *([value] if option.takes == "config" else map(_token, tokens))]
        return dg.config_from_args(parser.parse_args(argv))

    return route


def _whole(make: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda said: {"cuda_graph_config": make(said)}


ROUTES: dict[str, Callable[[dict[str, Any], Path], CudaGraphConfig]] = {
    "dict": lambda said, _: CudaGraphConfig.from_dict(_tree(said)),
    "JSON text": lambda said, _: CudaGraphConfig.from_json(_json(said)),
    "JSON file": _file("json", _json),
    "TOML file": _file("toml", _toml),
    "keyword arguments": _keywords,
    "objects": _objects,
    "with_phase": _changes,
    "options": _options(_current),
    "deprecated options": _options(_deprecated),
    "an option with a dict": _options(_whole(_tree)),
    "an option with JSON": _options(_whole(_json)),
    "an option with an object": _options(_whole(lambda said: CudaGraphConfig.from_dict(_tree(said)))),
    "command line": _command_line(_current),
    "deprecated command line": _command_line(_deprecated),
    "command line with JSON": _command_line(_whole(_json)),
}

_PRINTED = re.compile(
    r"(?:argument --[\w-]+: )?(?P<path>[\w.\[\]]+)(?: \(.*?\))?: (?P<message>.*) \[(?P<code>[a-z0-9-]+)\]"
)


def _verdict(route: str, said: dict[str, Any], folder: Path) -> object:
    """All that a caller can tell: the problems, each with key, code and message; or the values and what was named."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            config = ROUTES[route](said, folder)
    except ConfigError as error:
        problems = [(issue.path, issue.code, issue.message) for issue in error.issues]
    except _RefusedError as refused:
        problems = [found.group("path", "code", "message") for found in _PRINTED.finditer(str(refused))]
    else:
        return config.to_dict(full=True), config.explicit_keys, [issue.code for issue in config.warnings]
    # A phase that stands alone does not know which one it is.
    return [(path.split(".")[-1], code, message) for path, code, message in problems]


@pytest.mark.parametrize(("said", "problem"), CASES, ids=[str(said) for said, _ in CASES])
def test_every_route_that_can_say_it_gives_the_same_verdict(
    said: dict[str, Any], problem: tuple[str, str] | None, tmp_path: Path
) -> None:
    verdicts = {}
    for route in ROUTES:
        try:
            verdicts[route] = _verdict(route, said, tmp_path)
        except _CannotSayError:
            continue
    reference = verdicts["dict"]
    assert verdicts == dict.fromkeys(verdicts, reference)
    if problem is None:
        assert isinstance(reference, tuple)
        assert set(reference[1]) == {path for path, value in said.items() if value is not None}
    else:
        assert isinstance(reference, list)
        assert [entry[1:] for entry in reference] == [problem]


def test_every_route_takes_part_with_some_good_and_some_bad(tmp_path: Path) -> None:
    """Otherwise the test above would be silent about a route that nothing can be said by."""
    for route in ROUTES:
        said_by = {True: 0, False: 0}
        for said, problem in CASES:
            try:
                _verdict(route, said, tmp_path)
            except _CannotSayError:
                continue
            said_by[problem is None] += 1
        assert min(said_by.values()) >= 5, (route, said_by)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_repeated_key_is_the_same_problem_wherever_text_can_repeat_one(phase: str, tmp_path: Path) -> None:
    text = f'{{"{phase}": {{"max_bs": 1, "max_bs": 2}}}}'
    (tmp_path / "a.json").write_text(text)
    parser = argparse.ArgumentParser(exit_on_error=False)
    dg.add_cuda_graph_args(parser)
    routes: list[Callable[[], object]] = [
        lambda: CudaGraphConfig.from_json(text),
        lambda: CudaGraphConfig.from_file(tmp_path / "a.json"),
        lambda: dg.config_from_options(cuda_graph_config=text),
        lambda: parser.parse_args(["--cuda-graph-config", text]),
    ]
    for route in routes:
        with pytest.raises((ConfigError, argparse.ArgumentError), match="the key is given more than once") as raised:
            route()
        assert f"{phase}.max_bs" in str(raised.value)
        assert "[repeated-key]" in str(raised.value)
