"""The JSON Schema: one source with the validator, shipped, and of the same opinion wherever it can be."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devicegraph import ConfigError, CudaGraphConfig
from devicegraph._core import config_schema
from documents import CASES, documents, tree

SCHEMA = config_schema()
VALIDATOR = jsonschema.Draft4Validator(SCHEMA)


def _accepted(document: object) -> bool:
    try:
        CudaGraphConfig.from_dict(document)  # type: ignore[arg-type]
    except ConfigError as error:
        # What a schema has no words for.
        return {issue.code for issue in error.issues} == {"sizes-disagree"}
    return True


def test_the_shipped_file_is_what_the_core_generates() -> None:
    """Written anew by `devicegraph explain --schema > python/devicegraph/config.schema.json`."""
    shipped = importlib.resources.files("devicegraph").joinpath("config.schema.json").read_text(encoding="utf-8")
    assert shipped == json.dumps(SCHEMA, indent=2) + "\n"


def test_the_schema_is_one() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-04/schema#"
    VALIDATOR.check_schema(SCHEMA)


@pytest.mark.parametrize("document", [tree(said) for said, _ in CASES], ids=str)
def test_the_schema_and_the_validator_agree_about_the_documents_of_every_route(document: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid(document) == _accepted(document)


@pytest.mark.parametrize("document", [None, [], 1, "decode", True, {}])
def test_they_agree_about_what_is_no_document(document: object) -> None:
    assert VALIDATOR.is_valid(document) == _accepted(document)


@given(documents)
def test_every_good_document_and_every_export_is_valid(document: dict[str, Any]) -> None:
    config = CudaGraphConfig.from_dict(document)
    for exported in (document, config.to_dict(), config.to_dict(explicit=True), config.to_dict(full=True)):
        VALIDATOR.validate(exported)


words = st.sampled_from(
    ["decode", "prefill", "padding", "backend", "max_bs", "bs", "tc_compiler", "full", "eager", "x"]
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(-2, 8), st.just(2**20 + 1), st.floats(), words)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4))


@given(st.dictionaries(words, trees, max_size=3))
def test_they_agree_about_anything_made_of_the_right_words(document: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid(document) == _accepted(document)
