"""Every way in is one validator: the same value gets the same verdict, code and message, whoever brings it."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import devicegraph as dg
from devicegraph import ConfigError, CudaGraphConfig, PhaseConfig
from devicegraph._core import CONFIG_OPTIONS, read_argument
from documents import CASES, tree

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


class _CannotSayError(Exception):
    """A route has no way to say this."""


def _json(said: dict[str, Any]) -> str:
    try:
        return json.dumps(tree(said), allow_nan=False)
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
    document = tree(said)
    if said.get("prefill.backend") == "cuda":
        raise _CannotSayError  # a phase that stands alone lists the backends of both phases
    try:
        phases = {name: PhaseConfig(**value) for name, value in document.items() if isinstance(value, dict)}
        return CudaGraphConfig(**{**document, **phases})
    except TypeError:  # Python's own word for an unknown keyword
        raise _CannotSayError from None


def _keywords(said: dict[str, Any], _: Path) -> CudaGraphConfig:
    try:
        return CudaGraphConfig(**tree(said))
    except TypeError:
        raise _CannotSayError from None


def _changes(said: dict[str, Any], _: Path) -> CudaGraphConfig:
    config = CudaGraphConfig(padding=said.get("padding"))
    for phase, keys in tree({path: value for path, value in said.items() if path != "padding"}).items():
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
    "dict": lambda said, _: CudaGraphConfig.from_dict(tree(said)),
    "JSON text": lambda said, _: CudaGraphConfig.from_json(_json(said)),
    "JSON file": _file("json", _json),
    "TOML file": _file("toml", _toml),
    "keyword arguments": _keywords,
    "objects": _objects,
    "with_phase": _changes,
    "options": _options(_current),
    "deprecated options": _options(_deprecated),
    "an option with a dict": _options(_whole(tree)),
    "an option with JSON": _options(_whole(_json)),
    "an option with an object": _options(_whole(lambda said: CudaGraphConfig.from_dict(tree(said)))),
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
