"""Importing the package: cheap, torch-free, and every public name reachable."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys

import pytest

import devicegraph


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_no_torch() -> None:
    assert _run("import sys, devicegraph; print('torch' in sys.modules)").strip() == "False"


def test_errors_load_neither_the_core_nor_anything_else_of_the_package() -> None:
    code = "import sys, devicegraph.errors; print(sorted(m for m in sys.modules if m.startswith('devicegraph')))"
    assert _run(code).strip() == "['devicegraph', 'devicegraph.errors']"


def test_reading_a_configuration_and_its_buckets_loads_no_torch() -> None:
    code = "import sys, devicegraph as dg; dg.decode_buckets(dg.CudaGraphConfig.from_json('{}').decode.max_bs, limit=8)"
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
