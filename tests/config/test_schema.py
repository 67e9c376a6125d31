"""The JSON Schema of the stack file accepts what ``Stack`` accepts, key by key, and offers the registered names."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvframe.config.options import CacheOptions, EngineOptions, LimitOptions, ModelOptions, Rule
from kvframe.config.schema import describe_keys, make_schema
from kvframe.config.stack import Stack
from kvframe.config.stack_file import _OwnersTable
from kvframe.contract.errors import StackError
from kvframe.loading.claims import KINDS
from tests.support.commands import stdout_of

ROOT = Path(__file__).resolve().parents[2]
TABLES = (("model", ModelOptions), ("limits", LimitOptions), ("cache", CacheOptions), ("engine", EngineOptions))
SCHEMA = make_schema({"backend": ["triton"], "plugin": ["cpu"], "spec": ["mamba"]})
TYPES: Mapping[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,)}


def accepts(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value is valid, by the part of JSON Schema that the schema uses; other keywords are an error."""
    return all(_holds(keyword, asked, schema, value) for keyword, asked in schema.items())


def _holds(keyword: str, asked: Any, schema: Mapping[str, Any], value: Any) -> bool:
    if keyword in ("$schema", "title", "description", "default", "then"):
        return True
    if keyword == "type":
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole if asked == "integer" else isinstance(value, TYPES[asked])
    if keyword == "enum":
        return isinstance(value, str) and value in asked
    if keyword == "const":
        return bool(value == asked)
    if keyword == "anyOf":
        return any(accepts(each, value) for each in asked)
    if keyword == "if":
        return not accepts(asked, value) or accepts(schema["then"], value)
    if keyword in ("minimum", "maximum"):
        return value >= asked if keyword == "minimum" else value <= asked
    if keyword == "pattern":
        return re.search(asked, value) is not None
    if keyword in ("minLength", "minItems"):
        return len(value) >= asked
    if keyword == "items":
        return all(accepts(asked, each) for each in value)
    if keyword == "required":
        return isinstance(value, dict) and all(key in value for key in asked)
    if keyword == "propertyNames":
        return all(accepts(asked, key) for key in value)
    if keyword == "properties":
        return all(accepts(each, value[key]) for key, each in asked.items() if key in value)
    if keyword == "additionalProperties":
        more = [each for key, each in value.items() if key not in schema.get("properties", {})]
        return not more if asked is False else all(accepts(asked, each) for each in more)
    raise AssertionError(f"the schema uses {keyword}, which this test does not know")


def is_stack(data: Mapping[str, Any]) -> bool:
    try:
        Stack.from_mapping(data)
    except StackError:
        return False
    return True


VALUES = [
    *(True, False, 0, 1, 16, -3, 2**31 - 1, 2**31, 2**60, 2**60 + 1, 1.5),
    *("", "auto", "off", "lru", "plain", "float32", "int8", "cpu", "cuda:0", "cuda:", "CPU"),
    *("2GiB", "512 MB", "1.5GiB", "2 potatoes", "16", "*", "a/file", "floot16"),
    *([], [1], [1, 4], [0], ["a"], ["a", 1], [""], [{"name": "decode_only"}], [{"option": 1}]),
    *({}, {"name": "x"}, {"name": "x", "option": 1}, {"name": 3}, {"option": 1}, {"": 1}),
]


def keys() -> Iterator[Any]:
    for table, options in (*TABLES, ("rules", Rule)):
        for field in attrs.fields(options):
            yield pytest.param(table, field.name, id=f"{table}.{field.name}")


@pytest.mark.parametrize(("table", "key"), [*keys()])
def test_a_key_accepts_the_values_that_a_stack_accepts(table: str, key: str) -> None:
    judged = []
    for value in VALUES:
        # A rule says which layers it is for.
        beside = {"kind": "mamba"} if table == "rules" else {}
        content = {**beside, key: value}
        data = {table: [content] if table == "rules" else content}
        judged.append((is_stack(data), accepts(SCHEMA, data), value))
    assert [] == [value for by_stack, by_schema, value in judged if by_stack != by_schema]
    assert {True, False} == {by_stack for by_stack, _, _ in judged}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"cache": {"preemption": "swap"}},
        {"cache": {"host_memory": 5}},
        {"rules": [{"backend": "triton"}]},
        {"rules": [{"layers": "*", "backend": "triton"}]},
        {"rules": [{"kind": "made_by_nobody_here"}]},
        {"rules": {"layers": "*"}},
        {"cach": {}},
        {"cache": {"memry": 3}},
        {"engine": []},
        {"plugins": {"disabled": ["cpu", "another"], "required": []}},
        {"plugins": {"disabled": "cpu"}},
        {"plugins": {"disabled": [""]}},
        {"plugins": {"owners": {"backend": {"triton": "kvframe-triton"}}}},
        {"plugins": {"owners": {"proposer": {"ngram": "kvframe-ngram"}}}},
        {"plugins": {"owners": {"tree": {}}}},
        {"plugins": {"owners": {"backend": {"triton": 3}}}},
        {"plugin": {"cpu": {"threads": 2}, "another": {}}},
        {"plugin": {"cpu": 3}},
    ],
)
def test_a_whole_stack_is_valid_for_both_or_for_none(data: Mapping[str, Any]) -> None:
    assert is_stack(data) == accepts(SCHEMA, data)


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "examples").rglob("*.toml")), *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_every_stack_of_the_examples_and_documents_is_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if path.suffix == ".md" else [text]
    for data in map(tomllib.loads, blocks):
        if set(data) & set(SCHEMA["properties"]):
            assert is_stack(data) == accepts(SCHEMA, data)


def test_every_key_has_its_description_and_its_default() -> None:
    for table, options in TABLES:
        properties = SCHEMA["properties"][table]["properties"]
        assert [field.name for field in attrs.fields(options)] == list(properties)
        assert describe_keys(options) == {key: each["description"] for key, each in properties.items()}
    assert 64 == SCHEMA["properties"]["limits"]["properties"]["max_num_seqs"]["default"]
    assert "auto" == SCHEMA["properties"]["cache"]["properties"]["memory"]["default"]


def test_every_kind_of_name_can_be_given_an_owner() -> None:
    assert set(KINDS) == {field.name for field in attrs.fields(_OwnersTable)}


def test_the_command_offers_the_names_that_are_installed() -> None:
    tables = json.loads(stdout_of("schema"))["properties"]
    backend = tables["rules"]["items"]["properties"]["backend"]["anyOf"][0]["enum"]
    assert ["auto", "cpu", "flash_attn"] == backend[:3]
    assert ["plain", "fp8_tensor"] == tables["cache"]["properties"]["format"]["anyOf"][0]["enum"][:2]
    assert "ngram" in tables["model"]["properties"]["drafts"]["anyOf"][0]["enum"]
    assert "mamba" in tables["rules"]["items"]["properties"]["kind"]["anyOf"][0]["enum"]
    assert "transformers" in tables["plugins"]["properties"]["required"]["items"]["anyOf"][0]["enum"]
