"""Every command with hostile options, files and values, drawn at random: it serves them or says one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvframe_transformers.testing import save_tiny

from kvframe.cli import main
from tests.support.commands import run

LAYER = {"name": "l.{}", "count": 2, "kind": "full_attention", "num_kv_heads": 2, "head_size": 8}
LAYER_KEYS = [*LAYER, "names", "shares_with", "query", "window", "dtype", "format", "x"]
FILE_KEYS = ["name", "max_model_len", "max_encoder_len", "repeat", "layers", "x"]
QUERY_KEYS = ["num_heads", "head_size", "scale", "soft_cap", "has_sinks", "relative_bias", "x"]
CONFIG_KEYS = ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim", "x"]
RULE_KEYS = ["kind", "layers", "spec", "wrappers", "backend", "optional", "x"]
STACK_KEYS = {
    "plugins": ["disabled", "required", "owners", "x"],
    "cache": ["memory", "block_size", "hybrid", "dtype", "format", "prefix_caching", "eviction", "x"],
    "engine": ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "device", "compile", "graphs", "x"],
}
NAMES = ["auto", "torch", "cpu", "cuda:99", "float32", "float8", "sliding_window", "decode_only", "lru", "off", "64MiB"]
NUMBERS = ["0", "-1", "3", "1e9", "1e400", "nan", "-inf", "0x10", "1_0", "1.5", "9" * 30, "9" * 5000, "10EiB"]
TEXTS = ["", " ", "-", "--", "*", "a:b:c", "x" * 5000, "é😀", "١٢", "\udcff", "a\nb", "\x1b[31mred", "%s%n", "{}", "[["]
GARBAGE = [b"", b"\xef\xbb\xbf{}", b"\xff\xfe", b"\0" * 100, b"NaN", b"[" * 100_000, b"a = 1\na = 2", b"[a]\n[a]"]
PLACES = ["", ".", "/", "none", "none/none", "/dev/null", "/dev/zero", "/dev/full", "folder", "circle", "\x1b[31m"]
WRITTEN = ["none", "page.html"]

words = st.sampled_from([*NAMES, *NUMBERS, *TEXTS])
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), words)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | words, inner, max_size=3)
)
"""Values of keys in files."""


def changed(good: Mapping[str, Any], keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a good table with one to three hostile keys."""
    return st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3).map(lambda bad: {**good, **bad})


@st.composite
def layer_files(draw: st.DrawFn) -> bytes:
    """Draw a layer file with something wrong in it, as JSON."""
    query = draw(st.none() | changed({}, QUERY_KEYS))
    layer = draw(changed(LAYER if query is None else {**LAYER, "query": query}, LAYER_KEYS))
    file = {"max_model_len": 64, "layers": [layer, {**LAYER, "name": "m.{}"}]}
    return as_json(draw(st.just(file) | changed(file, FILE_KEYS)))


@st.composite
def stacks(draw: st.DrawFn) -> bytes:
    """Draw a stack with something wrong in it, as TOML."""
    tables = draw(st.lists(st.sampled_from([*STACK_KEYS]), unique=True, max_size=2))
    lines = []
    for table in tables:
        lines += [f"[{table}]", *assignments(draw(changed({}, STACK_KEYS[table])))]
    for rule in draw(st.lists(changed({"layers": "*"}, RULE_KEYS), max_size=2)):
        lines += ["[[rules]]", *assignments(rule)]
    return "\n".join(lines).encode(errors="surrogatepass")


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {in_toml(value)}" for key, value in table.items()]


def in_toml(value: Any) -> str:
    """Return a value as TOML has it, and what TOML lacks as a text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {in_toml(each)}' for key, each in value.items())} }}"
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value))


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model, and places that no command can use."""
    path = tmp_path_factory.mktemp("hostile")
    save_tiny(path / "model", "llama")
    (path / "folder").mkdir()
    (path / "circle").symlink_to("circle")
    (path / "damaged").mkdir()
    (path / "damaged" / "model.safetensors").symlink_to(path / "model" / "model.safetensors")
    return path


def options_of(command: str) -> list[click.Parameter]:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    drawn_apart = ("stack", "table", "html")
    return [each for each in found.params if isinstance(each, click.Option) and each.name not in drawn_apart]


@st.composite
def calls(draw: st.DrawFn, command: str, folder: Path) -> list[str]:
    """Draw a command's arguments, and write the files that they name."""
    arguments = [command]
    if command != "plugins":
        (folder / "layers.json").write_bytes(draw(layer_files() | st.sampled_from(GARBAGE)))
        config = json.loads((folder / "model" / "config.json").read_text())
        (folder / "damaged" / "config.json").write_bytes(as_json(draw(changed(config, CONFIG_KEYS))))
        arguments.append(draw(st.sampled_from(["model", "damaged", "layers.json"]) | st.sampled_from(PLACES)))
    if command in ("generate", "embed"):
        good = st.just([[1, 2, 3], [7]])
        prompts = good | st.lists(values, max_size=3)
        (folder / "ids.json").write_bytes(draw(prompts.map(as_json) | st.sampled_from(GARBAGE)))
        arguments += ["--prompt-token-ids" if command == "generate" else "--token-ids", "ids.json"]
    if command in ("plan", "explain") and draw(st.booleans()):
        arguments += ["--html", "page.html"]
    if draw(st.booleans()):
        (folder / "stack.toml").write_bytes(draw(stacks() | st.sampled_from(GARBAGE)))
        arguments += ["--stack", "stack.toml"]
    for option in draw(st.lists(st.sampled_from(options_of(command)), max_size=3)):
        is_flag = isinstance(option, click.Option) and option.is_flag
        value = st.sampled_from(PLACES) if isinstance(option.type, click.Path) else words
        arguments += option.opts[:1] if is_flag else [option.opts[0], draw(value)]
    return arguments


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a folder, without those that commands are asked to write."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in WRITTEN}


@pytest.mark.parametrize("command", ["plan", "explain", "plugins", "generate", "embed"])
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_call_is_served_or_ends_in_one_sentence(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.chdir(folder)
    arguments = data.draw(calls(command, folder))
    before = contents(folder)
    result = run(*arguments)
    assert result.exit_code in (0, 1, 2), result.stderr
    assert "Traceback" not in result.stderr
    if result.exit_code == 2:
        *start, error = result.stderr.splitlines()
        assert error.startswith("kvframe: error: ")
        # A call that fails after the start of an engine has the start's line before its error.
        assert len(start) <= 1
        assert all(" runs on cpu in " in line for line in start)
    assert before == contents(folder)
