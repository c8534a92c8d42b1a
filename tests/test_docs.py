"""The pages about configuration, buckets, figures and ranks are run, and their tables are those of the code."""

from __future__ import annotations

import doctest
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import devicegraph as dg
from devicegraph import CudaGraphConfig, cli
from devicegraph._core import CONFIG_OPTIONS, config_schema
from devicegraph.metrics import _FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    "buckets.md",
    "configuration.md",
    "metrics.md",
    "migrating-modules.md",
    "migrating-options.md",
    "ranks.md",
    "transformers.md",
)

_BLOCK = re.compile(r"^```(?P<language>\w+) ?(?P<file>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def _read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _rows(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of the first table below a heading."""
    below = _read(page).partition(f"{heading}\n")[2]
    table = below[below.index("| ---") :].partition("\n\n")[0].splitlines()[1:]
    for line in table:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_runs_and_prints_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "transformers.md":
        pytest.importorskip("transformers", reason="needs transformers")
        pytest.importorskip("psutil", reason="transformers needs psutil, to know the memory of a CPU")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = list(_BLOCK.finditer(_read(page)))
    with warnings.catch_warnings():
        for number, block in enumerate(blocks):
            text = block["text"]
            match block["language"]:
                case "toml" | "json":
                    Path(block["file"]).write_text(text)
                case "python":
                    exec(compile(text, page, "exec"), names)
                case "text":
                    pass  # what another process would print
                case "pycon":
                    example = doctest.DocTestParser().get_doctest(text, names, f"{page}, block {number}", page, 0)
                    runner = doctest.DocTestRunner(verbose=False)
                    report: list[str] = []
                    runner.run(example, out=report.append, clear_globs=False)
                    assert runner.failures == 0, "".join(report)
                    names |= example.globs
                case "console":
                    command, _, expected = text.partition("\n")
                    assert cli.main(command.removeprefix("$ devicegraph ").split()) == 0
                    assert capsys.readouterr().out == expected
                case other:
                    raise AssertionError(f"who runs `{other}`?")
    assert "pycon" in {block["language"] for block in blocks}


def test_the_table_of_keys_is_the_validators() -> None:
    defaults = CudaGraphConfig().explain().to_dict()["keys"]
    properties = config_schema()["properties"]
    schema = {
        f"{phase}.{key}": value for phase in dg.Phase.ALL for key, value in properties[phase]["properties"].items()
    } | {"padding": properties["padding"]}
    rows = {cells[0].strip("`"): cells[1:] for cells in _rows("configuration.md", "### Every key")}
    assert list(rows) == list(defaults)
    for path, (values, default, about) in rows.items():
        assert about == schema[path]["description"]
        if "enum" in schema[path]:
            assert values == ", ".join(f"`{word}`" for word in schema[path]["enum"] if word is not None)
        if "maximum" in schema[path]:
            assert values == f"integer from 1 to {schema[path]['maximum']}"
        if defaults[path]["value"] is not None:
            assert default == f"`{str(defaults[path]['value']).lower()}`"


def test_the_table_of_backends_is_the_validators() -> None:
    for name, _, *phases in _rows("configuration.md", "Each phase has a **backend**, which says how it is captured:"):
        backend = name.strip("`")
        for phase, cell in zip(dg.Phase.ALL, phases, strict=True):
            possible = backend in dg.ALLOWED_BACKENDS_PER_PHASE[phase]
            default = CudaGraphConfig()[phase].backend == backend
            assert cell == ("**default**" if default else "yes") if possible else cell.startswith("not possible")


def test_the_table_of_facts_is_that_of_the_ready_rules() -> None:
    assert {name.strip("`"): about for name, about in _rows("configuration.md", "### Every fact")} == dict(dg.FACTS)


def test_the_table_of_current_options_names_them_all() -> None:
    flags = re.findall(
        r"`(--[\w-]+)", " ".join(cells[0] for cells in _rows("configuration.md", "## On a command line"))
    )
    assert flags == [option.flag for option in CONFIG_OPTIONS if option.replacement is None]


def test_the_table_of_deprecated_options_is_that_of_the_code() -> None:
    documented = [
        (flag, keys, value, instead)
        for flag, keys, value, instead in _rows("migrating-options.md", "## What became of each option")
    ]
    takes = {"one": "its value", "many": "its values"}
    assert documented == [
        (
            f"`{option.flag}`",
            ", ".join(f"`{key}`" for key in option.keys),
            takes.get(option.takes, f"`{option.says}`"),
            option.replacement,
        )
        for option in CONFIG_OPTIONS
        if option.replacement is not None
    ]


def test_the_table_of_modules_names_what_there_is() -> None:
    rows = list(_rows("migrating-modules.md", "## Which name became which"))
    assert len(rows) > 20
    for _, there, here, about in rows:
        names = re.findall(r"`([\w.]+)`", here)
        for name in names:
            owner, _, member = name.partition(".")
            assert not member or hasattr(getattr(dg, owner), member), name
            assert hasattr(dg, owner), name
        # What kept its name is said to have: nothing of ours is passed off as theirs.
        kept = {name for name in re.findall(r"`(\w+)`", there) if name in dg.__all__}
        assert kept <= set(names), (there, here)
        assert about


def test_the_tables_of_figures_name_what_there_is() -> None:
    series = " ".join(cells[0] for cells in _rows("metrics.md", "What each series is, and what is worth an alarm:"))
    assert re.findall(r"`(\w+)`", series) == list(_FAMILIES)
    figures = {cells[0].strip("`").partition("(")[0] for cells in _rows("metrics.md", "## Which figure says what")}
    assert all(hasattr(dg.StepMetrics(), figure) for figure in figures)


FORMS = ("full", "breakable", "tc_piecewise eager", "tc_piecewise inductor")


def test_the_numbers_of_the_backends_are_those_that_were_measured() -> None:
    results = json.loads((DOCS.parent / "benches/results/backends-h200.json").read_text(encoding="utf-8"))
    phases = [(phase, results[phase]) for phase in ("decode", "prefill")]
    wanted: list[list[str]] = []
    for phase, measured in phases:
        for size, rows in measured["sizes"].items():
            shares = {row["form"]: row["step_of_eager"][1] for row in rows if row["region"] == "run"}
            unit = "tokens" if phase == "prefill" else "request" if size == "1" else "requests"
            wanted.append([f"{phase}, {size} {unit}", *(_shown(shares.get(form), "{:.2f}") for form in FORMS)])
    for title, field, scale, style in (
        ("seconds to capture three sizes", "seconds", 1, "{:.2f}"),
        ("MiB that the captures hold", "reserved_bytes", 2**20, "{:.0f}"),
    ):
        for phase, measured in phases:
            values = [measured["captures"].get(form, {}).get(field) for form in FORMS]
            wanted.append([f"{title}, {phase}", *(_shown(value and value / scale, style) for value in values)])
    assert list(_rows("backends.md", "## What they cost and gain")) == wanted


def test_what_is_said_of_the_other_package_is_what_was_measured() -> None:
    printed = (DOCS.parent / "benches/results/backends-h200.txt").read_text(encoding="utf-8")
    ratios = [float(ratio) for ratio in re.findall(r"of Meta's breakable: step ([\d.]+)", printed)]
    assert len(ratios) == 6
    page = " ".join(_read("backends.md").split())
    assert f"takes between {min(ratios):.2f} and {max(ratios):.2f} of its time at all six sizes" in page


def _shown(value: float | None, style: str) -> str:
    return "-" if value is None else style.format(value)
