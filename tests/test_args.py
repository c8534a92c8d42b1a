"""Options on a command line and as keyword arguments: precedence, deprecation, help, errors."""

from __future__ import annotations

import argparse
import itertools
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph import ConfigError, CudaGraphConfig, PhaseConfig
from devicegraph._core import CONFIG_OPTIONS
from documents import documents

if TYPE_CHECKING:
    from devicegraph._core import ConfigOption

CURRENT = [option for option in CONFIG_OPTIONS if option.replacement is None]
DEPRECATED = [option for option in CONFIG_OPTIONS if option.replacement is not None]
#: A good value for each key.
VALUES: dict[str, Any] = {
    "decode.backend": "breakable",
    "prefill.backend": "breakable",
    "decode.max_bs": 64,
    "prefill.max_bs": 64,
    "decode.bs": [1, 64],
    "prefill.bs": [1, 64],
    "decode.tc_compiler": "inductor",
    "prefill.tc_compiler": "inductor",
}


def _value(option: ConfigOption) -> Any:
    return True if option.takes == "nothing" else VALUES[option.keys[0]]


def _argv(option: ConfigOption) -> list[str]:
    value = _value(option)
    tokens = [] if option.takes == "nothing" else value if isinstance(value, list) else [value]
    return [option.flag, *map(str, tokens)]


def _parse(*argv: str) -> CudaGraphConfig:
    parser = argparse.ArgumentParser(prog="engine")
    dg.add_cuda_graph_args(parser)
    return dg.config_from_args(parser.parse_args(argv))


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        _parse(*argv)
    assert exit.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


@pytest.mark.parametrize("option", DEPRECATED, ids=lambda option: option.flag)
def test_a_deprecated_option_works_with_one_warning_that_names_its_replacement(option: ConfigOption) -> None:
    configs = []
    for route in (lambda: _parse(*_argv(option)), lambda: dg.config_from_options(**{option.keyword: _value(option)})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            configs.append(route())
        (warning,) = caught
        assert warning.category is DeprecationWarning
        assert str(warning.message) == f"`{option.flag}` is deprecated; use {option.replacement}"
        # It points at the engine's line, not into the package.
        assert warning.filename == __file__
    assert configs[0] == configs[1]
    assert configs[0].explicit_keys == configs[1].explicit_keys == option.keys
    # What the warning says to write instead says the same.
    assert option.replacement is not None
    instead = [text.split() for text in option.replacement.split("`") if text.startswith("--")]
    argv = list(itertools.chain(*instead)) if option.takes == "nothing" else [instead[0][0], *_argv(option)[1:]]
    assert {key: value for key, value in _named(_parse(*argv)).items() if key in option.keys} == _named(configs[0])


def _named(config: CudaGraphConfig) -> dict[str, Any]:
    keys = config.explain().to_dict()["keys"]
    return {path: keys[path]["value"] for path in config.explicit_keys}


@pytest.mark.parametrize("option", DEPRECATED, ids=lambda option: option.flag)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_per_key_options_go_before_deprecated_ones_and_the_whole_before_both_key_by_key(option: ConfigOption) -> None:
    below: dict[str, Any] = {option.keyword: _value(option)}
    # Every key has another value in each of the two layers above.
    middle = {
        "cuda_graph_backend_decode": "tc_piecewise",
        "cuda_graph_backend_prefill": "tc_piecewise",
        "cuda_graph_max_bs_decode": 32,
        "cuda_graph_max_bs_prefill": 32,
        "cuda_graph_tc_compiler": "eager",
    }
    top = {phase: {"backend": "disabled", "max_bs": 16, "tc_compiler": "inductor"} for phase in dg.Phase.ALL}
    all_of_middle = dg.config_from_options(**middle)
    assert dg.config_from_options(**below, **middle) == all_of_middle
    assert dg.config_from_options(**below, cuda_graph_config=top) == CudaGraphConfig.from_dict(top)
    assert dg.config_from_options(**below, **middle, cuda_graph_config=top) == CudaGraphConfig.from_dict(top)
    # What a layer does not name is left to the one below it.
    other = {"padding": False}
    config = dg.config_from_options(**below, cuda_graph_config=other)
    assert config.explicit_keys == (*option.keys, "padding")
    assert _named(config) == {**_named(dg.config_from_options(**below)), "padding": False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_switching_off_erases_no_size_and_an_explicit_size_switches_nothing_on() -> None:
    config = dg.config_from_options(disable_cuda_graph=True, cuda_graph_config={"decode": {"max_bs": 64}})
    assert config.to_dict() == {
        "decode": {"backend": "disabled", "max_bs": 64},
        "prefill": {"backend": "disabled"},
    }


def test_null_in_a_higher_layer_wipes_nothing_and_one_phase_leaves_the_other_alone() -> None:
    options: dict[str, Any] = {"cuda_graph_max_bs_decode": 256, "cuda_graph_backend_decode": "breakable"}
    for whole in (
        {"decode": {"backend": "full", "max_bs": None}},
        {"decode": {"backend": "full"}, "prefill": None},
        '{"decode": {"backend": "full", "bs": null}, "padding": null}',
        CudaGraphConfig(decode=PhaseConfig(backend="full", max_bs=None)),
    ):
        config = dg.config_from_options(**options, cuda_graph_config=whole)
        assert config.to_dict() == {"decode": {"max_bs": 256}}
        assert config.explicit_keys == ("decode.backend", "decode.max_bs")


def test_a_configuration_given_as_an_object_is_the_keys_that_somebody_named_in_it() -> None:
    base = CudaGraphConfig.from_json('{"decode": {"backend": "full"}}')
    options: dict[str, Any] = {"cuda_graph_backend_decode": "breakable", "cuda_graph_backend_prefill": "breakable"}
    # Explicit though it is the default: it goes before the option.
    assert dg.config_from_options(**options, cuda_graph_config=base).decode.backend == "full"
    assert (
        dg.config_from_options(**options, cuda_graph_config=pickle.loads(pickle.dumps(base))).decode.backend == "full"
    )
    # A default that nobody named does not, whether the phase or the whole is an object.
    assert dg.config_from_options(**options, cuda_graph_config=base).prefill.backend == "breakable"
    assert dg.config_from_options(**options, cuda_graph_config={"prefill": base.prefill}).prefill.backend == "breakable"
    assert dg.config_from_options(**options, cuda_graph_config=CudaGraphConfig()).decode.backend == "breakable"


def _options(options: list[ConfigOption]) -> st.SearchStrategy[dict[str, Any]]:
    """Options of one layer that do not contradict one another."""
    good = {
        "backend": st.sampled_from(["breakable", "tc_piecewise", "disabled"]),
        "max_bs": st.just(64),
        "bs": st.lists(st.integers(1, 64), max_size=3).map(lambda bs: [*bs, 64]),
        "tc_compiler": st.sampled_from(["eager", "inductor"]),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        option.keyword: good[option.keys[0].split(".")[1]] for option in options if option.takes in ("one", "many")
    }
    switch = st.sampled_from([{option.keyword: True} for option in options if option.takes == "nothing"])
    return st.tuples(st.fixed_dictionaries({}, optional=optional), st.just({}) | switch).map(
        lambda two: two[0] | two[1]
    )


@given(_options(DEPRECATED), _options(CURRENT), documents)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_are_associative_and_what_they_come_to_round_trips(
    old: dict[str, Any], new: dict[str, Any], whole: dict[str, Any]
) -> None:
    config = dg.config_from_options(**old, **new, cuda_graph_config=whole)
    upper = dg.config_from_options(**new, cuda_graph_config=whole)
    same = dg.config_from_options(**old, cuda_graph_config=upper)
    assert str(same.explain()) == str(config.explain())
    for document in (config.to_dict(), config.to_dict(explicit=True), config.to_dict(full=True)):
        assert CudaGraphConfig.from_dict(document) == config
    assert CudaGraphConfig.from_dict(config.to_dict(explicit=True)).explicit_keys == config.explicit_keys
    assert str(pickle.loads(pickle.dumps(config)).explain()) == str(config.explain())


def test_bs_of_one_layer_and_max_bs_of_another_are_told_apart() -> None:
    config = dg.config_from_options(cuda_graph_max_bs_decode=64, cuda_graph_config={"decode": {"bs": [1, 2]}})
    assert (config.decode.max_bs, config.decode.bs) == (None, (1, 2))
    dropped = config.explain().to_dict()["keys"]["decode.max_bs"]
    assert [entry["value"] for entry in dropped["overrode"]] == [64]
    with pytest.raises(ConfigError, match="sizes-disagree"):
        dg.config_from_options(cuda_graph_max_bs_decode=64, cuda_graph_bs_decode=[1, 2])
    assert dg.config_from_options(cuda_graph_max_bs_decode=2, cuda_graph_bs_decode=[2, 1]).decode.bs == (1, 2)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(DEPRECATED, 2)), ids=lambda option: option.flag)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_deprecated_options_agree_about_a_key_or_are_refused(
    one: ConfigOption, other: ConfigOption, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = set(one.keys) & set(other.keys)
    options = {one.keyword: _value(one), other.keyword: _value(other)}
    if not shared or one.says == other.says:
        assert dg.config_from_options(**options).explicit_keys
        return
    with pytest.raises(ConfigError) as raised:
        dg.config_from_options(**options)
    assert {issue.code for issue in raised.value.issues} == {"options-disagree"}
    assert {issue.path for issue in raised.value.issues} == shared
    for argv in (_argv(one) + _argv(other), _argv(other) + _argv(one)):
        assert _refused(capsys, *argv) == f"{raised.value}\n"


def test_false_and_none_are_not_given() -> None:
    switches = {option.keyword: False for option in CONFIG_OPTIONS if option.takes == "nothing"}
    nothing = {option.keyword: None for option in CONFIG_OPTIONS}
    for options in (switches, nothing, {**nothing, **switches}):
        config = dg.config_from_options(**options)
        assert config == CudaGraphConfig()
        assert config.explicit_keys == ()


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as raised:
        dg.config_from_options(cuda_graph_max_bs_decod=4, disable_cuda_graphs=True)
    assert [(issue.path, issue.code, issue.hint) for issue in raised.value.issues] == [
        ("cuda_graph_max_bs_decod", "unknown-option", "did you mean `cuda_graph_max_bs_decode`?"),
        ("disable_cuda_graphs", "unknown-option", "did you mean `disable_cuda_graph`?"),
    ]


def test_errors_of_a_command_line_end_in_parser_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _refused(capsys, "--cuda-graph-max-bs-decode", "four") == (
        'decode.max_bs (--cuda-graph-max-bs-decode): `"four"` is a string, not an integer from 1 to 1048576 '
        "[wrong-type]\n"
    )
    assert _refused(capsys, "--cuda-graph-bs-prefill") == (
        "prefill.bs (--cuda-graph-bs-prefill): `[]` names no size [empty-list]\n"
        "  hint: to run this phase without graphs, set its `backend` to `disabled`\n"
    )
    assert _refused(capsys, "--cuda-graph-config", '{"decode": {}, "decode": {}}') == (
        "argument --cuda-graph-config: decode: the key is given more than once [repeated-key]\n"
        "  hint: keep one of them\n"
    )
    # Two options that are each good and not together, in either order.
    sizes = ("--cuda-graph-max-bs-decode", "8"), ("--cuda-graph-bs-decode", "1", "4")
    for one, other in (sizes, sizes[::-1]):
        assert "`8` is not the largest entry of `bs`, 4 [sizes-disagree]" in _refused(capsys, *one, *other)


def test_a_parser_that_does_not_exit_raises_its_own_error() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    dg.add_cuda_graph_args(parser)
    with pytest.raises(argparse.ArgumentError, match=r"decode\.max_bs \(--cuda-graph-max-bs-decode\): `0` is not"):
        parser.parse_args(["--cuda-graph-max-bs-decode", "0"])


def test_a_namespace_that_no_parser_checked_is_checked_when_it_is_read() -> None:
    with pytest.raises(ConfigError, match="unknown-backend"):
        dg.config_from_args(argparse.Namespace(cuda_graph_backend_decode="ful"))
    assert dg.config_from_args(argparse.Namespace(model="x")) == CudaGraphConfig()


def test_options_work_on_subparsers_and_parents_and_leave_the_rest_of_a_namespace_alone() -> None:
    parent = argparse.ArgumentParser(add_help=False)
    dg.add_cuda_graph_args(parent)
    parser = argparse.ArgumentParser()
    serve = parser.add_subparsers(dest="command").add_parser("serve", parents=[parent])
    serve.add_argument("model")
    arguments = parser.parse_args(
        ["serve", "--cuda-graph-bs-decode", "1", "8", "--disable-cuda-graph-padding", "m"][:6]
    )
    arguments = parser.parse_args(["serve", "m", "--cuda-graph-bs-decode", "1", "8", "--disable-cuda-graph-padding"])
    assert dg.config_from_args(arguments).to_dict() == {"decode": {"bs": [1, 8]}, "padding": False}
    # Plain data under the names of the keyword arguments: it pickles, and it goes into them as it is.
    values = vars(pickle.loads(pickle.dumps(arguments)))
    assert {values.pop("command"), values.pop("model")} == {"serve", "m"}
    assert dg.config_from_options(**values) == dg.config_from_args(arguments)


def test_the_help_says_of_every_option_the_default_and_the_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # so that no line is broken
    parser = argparse.ArgumentParser()
    dg.add_cuda_graph_args(parser)
    text = parser.format_help()
    assert "lowest first: defaults, deprecated options, options of one key, --cuda-graph-config" in text
    for option in CONFIG_OPTIONS:
        assert option.flag in text
    for option in CURRENT:
        assert "(default: " in option.help
        assert "overrides" in option.help
    for option in DEPRECATED:
        assert option.help == f"deprecated, every current option overrides it; use {option.replacement}"
    defaults = CudaGraphConfig()
    assert f"(default: {defaults.decode.backend})" in text
    assert f"(default: {defaults.prefill.backend})" in text
    assert f"(default: {defaults.decode.tc_compiler})" in text
