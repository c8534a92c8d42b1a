"""Configuration as Python meets it: every way in, the values, the exports, the errors."""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import pickle
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

import devicegraph as dg
from devicegraph import Backend, ConfigError, ConfigIssue, CudaGraphConfig, Phase, PhaseConfig
from documents import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _from_text(document: dict[str, Any]) -> CudaGraphConfig:
    return CudaGraphConfig.from_json(json.dumps(document))


def _from_keywords(document: dict[str, Any]) -> CudaGraphConfig:
    return CudaGraphConfig(**document)


def _from_objects(document: dict[str, Any]) -> CudaGraphConfig:
    phases = {name: PhaseConfig(**document[name]) for name in Phase.ALL if document.get(name) is not None}
    return CudaGraphConfig(**{**document, **phases})


def _from_changes(document: dict[str, Any]) -> CudaGraphConfig:
    config = CudaGraphConfig(padding=document.get("padding"))
    for phase in Phase.ALL:
        config = config.with_phase(phase, **document.get(phase, {}))
    return config


ROUTES: list[Callable[[dict[str, Any]], CudaGraphConfig]] = [
    CudaGraphConfig.from_dict,
    _from_text,
    _from_keywords,
    _from_objects,
    _from_changes,
]


@given(documents)
def test_every_route_gives_the_same_configuration_with_the_same_explicit_keys(document: dict[str, Any]) -> None:
    configs = [route(document) for route in ROUTES]
    assert len(set(configs)) == 1
    assert len({config.explicit_keys for config in configs}) == 1


@given(documents)
def test_every_export_reads_back_equal(document: dict[str, Any]) -> None:
    config = CudaGraphConfig.from_dict(document)
    for options in ({}, {"explicit": True}, {"full": True}):
        assert CudaGraphConfig.from_dict(config.to_dict(**options)) == config
        assert CudaGraphConfig.from_json(config.to_json(**options)) == config
        assert json.loads(config.to_json(**options)) == config.to_dict(**options)
    assert CudaGraphConfig.from_dict(config.to_dict(explicit=True)).explicit_keys == config.explicit_keys


@given(documents)
def test_repr_evaluates_and_pickle_and_copies_keep_what_was_explicit(document: dict[str, Any]) -> None:
    config = CudaGraphConfig.from_dict(document)
    for value in (config, config.decode, config.prefill):
        evaluated = eval(repr(value), vars(dg) | {name: getattr(dg, name) for name in dg.__all__})
        assert evaluated == value
        for same in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
            assert same == value
            assert hash(same) == hash(value)
            assert same.explicit_keys == value.explicit_keys


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("max_bs", "four", "wrong-type"),
    ("max_bs", "4", "wrong-type"),
    ("max_bs", -1, "out-of-range"),
    ("max_bs", 0, "out-of-range"),
    ("max_bs", 2**20 + 1, "out-of-range"),
    ("max_bs", 2**64, "out-of-range"),
    ("max_bs", True, "wrong-type"),
    ("max_bs", 1.5, "wrong-type"),
    ("max_bs", 4.0, "wrong-type"),
    ("max_bs", [4], "wrong-type"),
    ("bs", [], "empty-list"),
    ("bs", [True], "wrong-type"),
    ("bs", [None], "wrong-type"),
    ("bs", [1, "2"], "wrong-type"),
    ("bs", "1,2", "wrong-type"),
    ("bs", 8, "wrong-type"),
    ("bs", {"1": 2}, "wrong-type"),
    ("backend", "ful", "unknown-backend"),
    ("backend", "FULL", "unknown-backend"),
    ("backend", "", "unknown-backend"),
    ("backend", 1, "wrong-type"),
    ("backend", True, "wrong-type"),
    ("tc_compiler", "inducter", "unknown-compiler"),
    ("tc_compiler", False, "wrong-type"),
]


@pytest.mark.parametrize(("key", "value", "code"), BAD_VALUES)
def test_every_route_refuses_a_bad_value_with_the_same_issues(key: str, value: Any, code: str) -> None:
    issues = set()
    for route in ROUTES:
        with pytest.raises(ConfigError) as raised:
            route({"decode": {key: value}})
        assert [issue.code for issue in raised.value.issues] == [code]
        (issue,) = raised.value.issues
        # A phase that stands alone has a path of its own.
        issues.add(str(issue).removeprefix("decode."))
    assert len(issues) == 1


class _Unreadable:
    def __repr__(self) -> str:
        return "<unreadable>"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "`NaN` is a float, not an integer from 1 to 1048576"),
        (float("inf"), "`inf` is a float, not an integer from 1 to 1048576"),
        (10**400, "`inf` is a float, not an integer from 1 to 1048576"),
        (b"4", "`b'4'` is of type `bytes`, not an integer from 1 to 1048576"),
        ("\ud800", "`'\\ud800'` is of type `str`, not an integer from 1 to 1048576"),
        (
            datetime.date(1979, 5, 27),
            "`datetime.date(1979, 5, 27)` is of type `date`, not an integer from 1 to 1048576",
        ),
        (_Unreadable(), "`<unreadable>` is of type `_Unreadable`, not an integer from 1 to 1048576"),
    ],
)
def test_objects_that_json_cannot_hold_are_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PhaseConfig(max_bs=value)  # type: ignore[arg-type]
    assert [issue.message for issue in raised.value.issues] == [message]


@pytest.mark.parametrize("index", [True, 1])
def test_a_boolean_of_another_library_is_no_integer(index: int) -> None:
    class One:
        dtype = "torch.bool" if index is not True else "an integer's"

        def __index__(self) -> int:
            return index

        def __repr__(self) -> str:
            return "<one>"

    for make in (lambda: PhaseConfig(max_bs=One()), lambda: dg.decode_buckets(One())):
        with pytest.raises(ConfigError, match="max_bs: `<one>` is of type `One`, not an integer from 1 to 1048576"):
            make()


def test_an_object_that_contains_itself_is_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["decode"] = cycle
    with pytest.raises(ConfigError, match=r"decode\.decode: no such key"):
        CudaGraphConfig.from_dict(cycle)


def test_a_list_without_end_is_refused_as_none_of_sizes() -> None:
    class Endless(Sequence[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> Any:
            return 4

    for sizes in (range(1, 10**12), Endless()):
        for make in (lambda sizes=sizes: PhaseConfig(bs=sizes), lambda sizes=sizes: dg.decode_buckets(bs=sizes)):
            with pytest.raises(ConfigError, match=r"`more than 1048576 items` is of type `.*`, not a list of integers"):
                make()


def test_an_exception_of_the_callers_mapping_is_the_callers() -> None:
    class Broken(dict[str, int]):
        def items(self) -> Any:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        CudaGraphConfig.from_dict(Broken())


def test_any_mapping_and_any_sequence_of_integers_will_do() -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    document = types.MappingProxyType({"decode": types.MappingProxyType({"bs": range(1, 9)}), "prefill": None})
    assert CudaGraphConfig.from_dict(document).decode.bs == tuple(range(1, 9))
    assert PhaseConfig(bs=(Three(), 1)).bs == (1, 3)  # type: ignore[arg-type]
    assert PhaseConfig(bs=[4, 1, 4, 2], max_bs=4) == PhaseConfig(bs=(1, 2, 4), max_bs=4)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        CudaGraphConfig(
            decode={"backend": "ful", "bs": [1, 0]},
            prefill=PhaseConfig(backend="full", bs=[1, 2], max_bs=2),
            padding=1,  # type: ignore[arg-type]
        )
    error = raised.value
    assert error.code == "invalid-config"
    assert str(error) == (
        "4 problems:\n"
        'decode.backend: `"ful"` is not one of `full`, `breakable`, `tc_piecewise` or `disabled` [unknown-backend]\n'
        "  hint: did you mean `full`?\n"
        "decode.bs[1]: `0` is not an integer from 1 to 1048576 [out-of-range]\n"
        'prefill.backend: `"full"` needs the same shapes on every replay, and those of this phase vary '
        "[backend-not-allowed]\n"
        "  hint: use `breakable`, `tc_piecewise` or `disabled`\n"
        "padding: `1` is an integer, not `true` or `false` [wrong-type]"
    )
    assert [(issue.path, issue.value) for issue in error.issues] == [
        ("decode.backend", "ful"),
        ("decode.bs[1]", 0),
        ("prefill.backend", "full"),
        ("padding", 1),
    ]
    assert error.issues[2].allowed == "one of `breakable`, `tc_piecewise` or `disabled`"


@pytest.mark.parametrize("document", [{"decode": {"bs": [1]}}, {"prefill": None}, {"padding": False}], ids=str)
def test_a_whole_mapping_in_the_place_of_a_phase_is_told_where_it_goes(document: dict[str, Any]) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        dg.CudaGraphConfig(document)
    (issue,) = caught.value.issues
    assert issue.hint == "write it outside the phase; a mapping of phases goes to `CudaGraphConfig.from_dict`"
    assert dg.CudaGraphConfig.from_dict(document)["decode"]


def test_an_error_and_its_issues_survive_pickle_and_repr() -> None:
    with pytest.raises(ConfigError) as raised:
        CudaGraphConfig.from_json('{"decode": {"max_bs": {"a": [1, null, 1.5]}}, "padding": "no", "x": 1}')
    same = pickle.loads(pickle.dumps(raised.value))
    assert same.issues == raised.value.issues
    assert str(same) == str(raised.value)
    for issue in raised.value.issues:
        assert eval(repr(issue), {"ConfigIssue": ConfigIssue}) == issue
        assert hash(copy.copy(issue)) == hash(issue)


def test_an_issue_about_what_no_document_holds_is_equal_to_its_copies(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("padding = 1979-05-27\n[decode]\nbs = {a = [07:32:00]}\n")
    with pytest.raises(ConfigError) as dates:
        CudaGraphConfig.from_file(tmp_path / "a.toml")
    with pytest.raises(ConfigError) as objects:
        CudaGraphConfig(padding=datetime.date(1979, 5, 27), decode={"bs": {"a": [b"1"]}})  # type: ignore[arg-type]
    issues = [*dates.value.issues, *objects.value.issues]
    assert [issue.value for issue in issues] == [
        "1979-05-27", {"a": ["07:32:00"]}, {"a": ["b'1'"]}, "datetime.date(1979, 5, 27)",
    ]  # fmt: skip
    for issue in issues:
        assert pickle.loads(pickle.dumps(issue)) == issue


def test_nobody_can_change_a_configuration() -> None:
    config = CudaGraphConfig()
    for target, name in ((config, "padding"), (config.decode, "max_bs"), (config, "other")):
        with pytest.raises(AttributeError):
            setattr(target, name, 1)


def test_a_phase_is_read_by_name_and_an_unknown_one_is_a_key_error() -> None:
    config = CudaGraphConfig(decode=PhaseConfig(max_bs=64))
    assert config["decode"] == config.decode == PhaseConfig(backend="full", max_bs=64)
    assert config[Phase.PREFILL].backend == Backend.TC_PIECEWISE
    for name in ("Decode", "padding", 0, None):
        with pytest.raises(KeyError) as raised:
            config[name]  # type: ignore[index]
        assert raised.value.args == (name,)
    with pytest.raises(ConfigError) as unknown:
        config.with_phase("prefil", max_bs=1)
    assert unknown.value.issues[0].code == "unknown-phase"


def test_a_configuration_iterates_over_the_names_of_its_phases() -> None:
    config = CudaGraphConfig(padding=False)
    assert tuple(config) == Phase.ALL
    assert len(config) == 2
    assert {name: config[name] for name in config} == {"decode": config.decode, "prefill": config.prefill}
    assert "decode" in config
    for other in ("padding", "Decode", 0, None, [], b"decode"):
        assert other not in config
    with pytest.raises(TypeError):
        reversed(config)  # type: ignore[call-overload]


def test_equality_ignores_what_was_explicit_and_a_phase_alone_has_no_default_backend() -> None:
    assert CudaGraphConfig(decode=PhaseConfig(backend="full")) == CudaGraphConfig()
    assert CudaGraphConfig(decode=PhaseConfig(backend="full")).explicit_keys == ("decode.backend",)
    assert CudaGraphConfig(padding=True).explicit_keys == ("padding",)
    assert CudaGraphConfig(padding=None).explicit_keys == ()
    assert PhaseConfig(tc_compiler="eager").explicit_keys == ("tc_compiler",)
    assert PhaseConfig().backend is None
    assert PhaseConfig() != CudaGraphConfig().decode
    assert CudaGraphConfig() != "CudaGraphConfig()"


def test_a_phase_taken_from_one_configuration_keeps_in_another_what_was_explicit() -> None:
    config = CudaGraphConfig.from_json('{"decode": {"max_bs": 64}}')
    moved = CudaGraphConfig(decode=config.decode, prefill=PhaseConfig(backend="disabled"))
    assert moved.explicit_keys == ("decode.max_bs", "prefill.backend")
    assert CudaGraphConfig.from_dict({"decode": config.decode}).explicit_keys == ("decode.max_bs",)
    # What `decode` has by default is still what it has, and no phase for it.
    with pytest.raises(ConfigError) as raised:
        CudaGraphConfig(prefill=config.decode)
    assert [issue.code for issue in raised.value.issues] == ["backend-not-allowed"]


def test_a_change_replaces_bs_and_max_bs_together_and_none_leaves_a_key_alone() -> None:
    config = CudaGraphConfig(decode=PhaseConfig(bs=[1, 8], max_bs=8, backend="breakable"))
    changed = config.with_phase("decode", max_bs=64)
    assert (changed.decode.max_bs, changed.decode.bs, changed.decode.backend) == (64, None, "breakable")
    assert config.with_phase("decode", max_bs=None, bs=None) == config
    assert changed.with_phase("decode", bs=[2]).to_dict() == {"decode": {"backend": "breakable", "bs": [2]}}


def test_an_export_has_what_differs_or_what_is_explicit_or_everything() -> None:
    config = CudaGraphConfig.from_json('{"decode": {"backend": "full", "bs": [2, 1]}, "prefill": {"max_bs": null}}')
    assert config.to_dict() == {"decode": {"bs": [1, 2]}}
    assert config.to_dict(explicit=True) == {"decode": {"backend": "full", "bs": [1, 2]}}
    assert config.to_json(explicit=True) == '{"decode": {"backend": "full", "bs": [1, 2]}}'
    phase = {"max_bs": None, "bs": None, "tc_compiler": "eager"}
    assert CudaGraphConfig().to_dict(full=True) == {
        "decode": {"backend": "full", **phase},
        "prefill": {"backend": "tc_piecewise", **phase},
        "padding": True,
    }
    assert repr(config) == (
        "CudaGraphConfig(decode=PhaseConfig(backend='full', bs=[1, 2]), "
        "prefill=PhaseConfig(backend='tc_piecewise'), padding=True)"
    )


def test_files_are_read_by_suffix_and_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"decode": {"bs": [1, 2]}, "padding": false}')
    (tmp_path / "a.toml").write_text("padding = false\n[decode]\nbs = [1, 2]\n")
    (tmp_path / "b.toml").write_text("padding = 0\n[decode]\nbs = [1, '2']\n")
    (tmp_path / "b.yaml").write_text("padding: no\n")
    (tmp_path / "b.json").write_bytes(b'{"\xff')
    assert CudaGraphConfig.from_file(tmp_path / "a.json") == CudaGraphConfig.from_file(str(tmp_path / "a.toml"))
    codes = {"b.toml": {"wrong-type"}, "b.yaml": {"unknown-file-type"}, "b.json": {"not-utf8"}}
    for name, expected in codes.items():
        with pytest.raises(ConfigError) as raised:
            CudaGraphConfig.from_file(tmp_path / name)
        assert {issue.code for issue in raised.value.issues} == expected
        assert str(tmp_path / name) in str(raised.value)
    with pytest.raises(FileNotFoundError) as missing:
        CudaGraphConfig.from_file(tmp_path / "none.json")
    assert missing.value.filename == str(tmp_path / "none.json")
    with pytest.raises(IsADirectoryError):
        CudaGraphConfig.from_file(tmp_path)


def test_the_words_of_python_are_those_of_the_validator() -> None:
    assert tuple(dg.ALLOWED_BACKENDS_PER_PHASE) == Phase.ALL
    assert dg.ALLOWED_BACKENDS_PER_PHASE["decode"] == Backend.ALL
    assert dg.ALLOWED_BACKENDS_PER_PHASE["prefill"] == (Backend.BREAKABLE, Backend.TC_PIECEWISE, Backend.DISABLED)
    with pytest.raises(TypeError):
        dg.ALLOWED_BACKENDS_PER_PHASE["decode"] = ()  # type: ignore[index]


def test_the_default_configuration_names_nothing() -> None:
    assert dg.default_cuda_graph_config() == CudaGraphConfig.from_json("{}")
    assert dg.default_cuda_graph_config().explicit_keys == ()


def test_the_argparse_type_gives_a_layer_or_the_validators_message(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda-graph-config", type=dg.parse_cuda_graph_config_arg)
    layer = '{"decode": {"backend": "full", "bs": [4, 2], "max_bs": null}}'
    parsed = parser.parse_args(["--cuda-graph-config", layer]).cuda_graph_config
    assert parsed == {"decode": {"backend": "full", "bs": [2, 4]}}
    bad = '{"decode": {"max_bs": 0}'
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        dg.parse_cuda_graph_config_arg(bad)
    with pytest.raises(ConfigError) as same:
        CudaGraphConfig.from_json(bad)
    assert str(raised.value) == str(same.value)
    with pytest.raises(SystemExit):
        parser.parse_args(["--cuda-graph-config", bad])
    assert "line 1, column 24: EOF while parsing an object [json-syntax]" in capsys.readouterr().err


@pytest.fixture
def _no_active_config() -> Iterator[None]:
    yield
    dg.set_active_config(None)


@pytest.mark.usefixtures("_no_active_config")
def test_the_active_configuration_answers_for_each_phase() -> None:
    assert not dg.check_cuda_graph_backend("decode", "full")
    dg.set_active_config(CudaGraphConfig(prefill=PhaseConfig(backend="disabled")))
    assert dg.check_cuda_graph_backend(Phase.DECODE, Backend.FULL)
    assert dg.check_cuda_graph_backend("prefill", "disabled")
    assert not dg.check_cuda_graph_backend("prefill", "full")
    dg.set_active_config(None)
    assert not dg.check_cuda_graph_backend("prefill", "disabled")
    with pytest.raises(ConfigError, match="did you mean `full`"):
        dg.check_cuda_graph_backend("decode", "ful")
    with pytest.raises(KeyError):
        dg.check_cuda_graph_backend("decod", "full")


@pytest.mark.usefixtures("_no_active_config")
def test_what_has_no_effect_is_a_value_and_is_said_when_the_configuration_becomes_active() -> None:
    config = CudaGraphConfig.from_json(
        '{"decode": {"tc_compiler": "inductor"}, "prefill": {"tc_compiler": "inductor"}}'
    )
    assert config.decode.tc_compiler == "inductor"
    (issue,) = config.warnings
    assert (issue.path, issue.value, issue.code) == ("decode.tc_compiler", "inductor", "compiler-unused")
    with pytest.warns(UserWarning, match=r"decode\.tc_compiler.*has no effect beside the backend `full`"):
        dg.set_active_config(config)
    assert config.with_phase("decode", backend="tc_piecewise").warnings == ()
