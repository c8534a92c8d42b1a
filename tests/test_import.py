"""Importing the package: cheap, torch-free, and every public name reachable."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys

import pytest

import devicegraph

#: What an interpreter has loaded anyway, or nearly so.
PYTHON = {"__future__", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "warnings"}


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_no_torch() -> None:
    assert _run("import sys, devicegraph; print('torch' in sys.modules)").strip() == "False"


def test_importing_the_package_loads_next_to_nothing() -> None:
    """Every engine's start-up pays for it; `typing` alone takes longer than the package."""
    code = "import sys; before = set(sys.modules); import devicegraph; print(*sorted(set(sys.modules) - before))"
    assert set(_run(code).split()) <= {"devicegraph", *PYTHON}


def test_an_argument_parser_needs_the_core_and_the_standard_librarys_parser_only() -> None:
    code = "import sys, argparse; before = set(sys.modules); import devicegraph.args; print(*set(sys.modules) - before)"
    loaded = set(_run(code).split()) - PYTHON
    assert loaded == {f"devicegraph{name}" for name in ("", "._core", ".args", ".config", ".errors")}


def test_errors_load_neither_the_core_nor_anything_else_of_the_package() -> None:
    code = "import sys, devicegraph.errors; print(sorted(m for m in sys.modules if m.startswith('devicegraph')))"
    assert _run(code).strip() == "['devicegraph', 'devicegraph.errors']"


def test_reading_a_configuration_and_its_buckets_loads_no_torch() -> None:
    code = (
        "import sys, devicegraph as dg; config = dg.config_from_options(cuda_graph_max_bs_decode=8); "
        "config = dg.resolve_config(config, {'device': 'npu'}); dg.decode_buckets(config.decode.max_bs, limit=8)"
    )
    assert _run(f"{code}; print('torch' in sys.modules)").strip() == "False"


def test_every_public_name_can_be_imported_from_the_package() -> None:
    for name in devicegraph.__all__:
        assert getattr(devicegraph, name) is not None, name


def test_the_table_of_names_is_what_type_checkers_read() -> None:
    spec = importlib.util.find_spec("devicegraph")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    declared = {
        (node.module.removeprefix("devicegraph."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("devicegraph.")
        for alias in node.names
    }
    assert declared == {(module, name) for module, names in devicegraph._MODULES.items() for name in names}


def test_an_unknown_name_says_which_module_lacks_it() -> None:
    with pytest.raises(AttributeError, match="`no_such_name`"):
        _ = devicegraph.no_such_name
