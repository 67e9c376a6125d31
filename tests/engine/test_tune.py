"""Measured times: the table, its use by ``backend = "auto"``, the measurement, and ``kvframe tune``."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_torch.backend import TorchBackend

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.config.stack import Stack
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import FileError, StackError
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.engine import tuning
from kvframe.engine.tuning import make_batches, measure
from kvframe.loading.plugins import load_plugins
from kvframe.selection import times as times_module
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from kvframe.selection.times import MeasuredTime, TimeKey, TimesTable, layer_shape, time_key
from tests.cli.test_commands import error_of, run, run_json

TORCH, REFERENCE = "kvframe-torch:torch", "kvframe:torch_reference"


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)


LAYER = LayerSpec(name="a", spec=full(4), query=QuerySpec(num_heads=2, head_size=8, scale=1.0))
ONLY_TORCH = {"plugins": {"disabled": ["cpu", "flex", "numba"]}}


def took(decode: float, prefill: float = 1.0, mixed: float = 1.0) -> MeasuredTime:
    return MeasuredTime({"decode": decode, "prefill": prefill, "mixed": mixed})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's table, which does not exist yet."""
    path = tmp_path / "cache" / "times.json"
    monkeypatch.setenv("KVFRAME_TIMES", str(path))
    return path


def key(backend: str, **changes: str) -> TimeKey:
    return attrs.evolve(time_key("cpu", layer_shape(LAYER, ()), backend), **changes)


def choose(engine: dict[str, Any] | None = None, rules: Any = ()) -> Choice:
    stack = Stack.from_mapping({**ONLY_TORCH, "engine": engine or {}, "rules": list(rules)})
    return select_backends([LAYER], stack, load_plugins(stack.plugins).registry, "cpu")[0]


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_table_is_what_was_written(table: Path) -> None:
    written = TimesTable({key(TORCH): took(1.5), key(REFERENCE): took(0.25)}, {"shape": "a note"})
    written.write(table)
    assert written == TimesTable.read(table)
    assert [table.name] == [path.name for path in table.parent.iterdir()]


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "a_folder"
    folder.mkdir()
    with pytest.raises(FileError, match=r"cannot be written: .* directory"):
        TimesTable().write(folder)
    assert [folder] == [*tmp_path.iterdir()]


def test_times_of_another_version_of_the_same_are_replaced() -> None:
    before = TimesTable({key(TORCH, version="0.0"): took(1), key(REFERENCE): took(2), key(TORCH, device="x"): took(3)})
    after = before.with_times({key(TORCH): took(4)}, {})
    assert {key(TORCH): took(4), key(REFERENCE): took(2), key(TORCH, device="x"): took(3)} == after.times


def test_twice_as_fast_counts_by_the_weight_of_its_kind_alone() -> None:
    assert took(2.0, 8.0, 3.0).score / took(1.0, 8.0, 3.0).score == pytest.approx(2**0.6)
    assert took(2.0, 800.0).score / took(2.0, 400.0).score == pytest.approx(2**0.2)
    assert 1.0 == pytest.approx(sum(times_module.WEIGHTS.values()))


CORRUPT = [
    ("{", "it is not valid JSON: Expecting property name"),
    ("[]", "it is not a table of measured times"),
    ('{"format": 99}', "it has the format 99, and this kvframe reads 1"),
    ('{"format": 1, "times": [{"key": {}, "seconds": {}}], "layers": {}}', "it is not a table of measured times"),
    ("\x80", "it is not UTF-8 text"),
]


@pytest.mark.parametrize(("content", "reason"), CORRUPT)
def test_a_users_table_that_cannot_be_read_is_one_line_and_ignored(
    content: str, reason: str, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.parent.mkdir()
    table.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING, logger="kvframe"):
        assert TORCH == choose().backend
    (message,) = caplog.messages
    assert reason in message
    assert message.endswith("remove it, and `kvframe tune` writes another")


@pytest.mark.parametrize(("content", "reason"), CORRUPT)
def test_a_table_that_the_stack_names_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(StackError, match=f"engine.measured_times is .*named.json': {reason}"):
        choose({"measured_times": str(path)})
    with pytest.raises(StackError, match=r"none\.json': it cannot be read: No such file"):
        choose({"measured_times": str(tmp_path / "none.json")})


def test_a_time_of_zero_is_no_time(table: Path) -> None:
    TimesTable({key(TORCH): took(1)}).write(table)
    table.write_text(table.read_text().replace('"decode": 1', '"decode": 0'))
    with pytest.raises(ValueError, match="times must be finite"):
        TimesTable.read(table)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_the_times_are_said(table: Path) -> None:
    TimesTable({key(TORCH): took(0.002), key(REFERENCE): took(0.001)}).write(table)
    choice = choose()
    assert (REFERENCE, True) == (choice.backend, choice.by_time)
    reasons = {candidate.name: choice.why_not(candidate) for candidate in choice.candidates}
    assert "can serve this layer; it takes longer (decode 2 ms, prefill 1e+03 ms, mixed 1e+03 ms)" == reasons[TORCH]
    assert "" == reasons[REFERENCE]


@pytest.mark.parametrize(
    "changes", [{"device": "another"}, {"torch": "1.0"}, {"version": "0.0.1"}, {"layer": "0123456789abcdef"}]
)
def test_a_time_of_something_else_does_not_count(changes: dict[str, str], table: Path) -> None:
    TimesTable({key(TORCH, **changes): took(2), key(REFERENCE, **changes): took(1)}).write(table)
    assert (TORCH, False) == (choose().backend, choose().by_time)


def test_without_a_time_of_the_preferred_one_the_preference_decides(table: Path) -> None:
    TimesTable({key(REFERENCE): took(1)}).write(table)
    assert (TORCH, False) == (choose().backend, choose().by_time)


def test_a_faster_backend_that_cannot_be_captured_is_passed_over_for_graphs(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TimesTable({key(TORCH): took(2), key(REFERENCE): took(1)}).write(table)
    capturable = attrs.evolve(TorchBackend.capabilities, capture=GraphCapture.ALWAYS)
    monkeypatch.setattr(TorchBackend, "capabilities", capturable)
    assert (REFERENCE, TORCH) == (choose({"graphs": "auto"}).backend, choose({"graphs": [1]}).backend)


def test_a_backend_that_was_not_measured_says_so(table: Path) -> None:
    TimesTable({key("kvframe-flex:flex"): took(9), key(TORCH): took(1)}).write(table)
    stack = Stack.from_mapping({"plugins": {"disabled": ["cpu", "numba"]}})
    (choice,) = select_backends([LAYER], stack, load_plugins(stack.plugins).registry, "cpu")
    reasons = {candidate.name: choice.why_not(candidate) for candidate in choice.candidates}
    assert f"can serve this layer; it was not measured, and {TORCH} was" == reasons[REFERENCE]


def test_times_are_those_of_the_device_that_the_stack_names(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe.selection.times.device_name", lambda device: device)
    on_the_second = {key(TORCH, device="cpu:1"): took(2.0), key(REFERENCE, device="cpu:1"): took(1.0)}
    TimesTable().with_times(on_the_second, {}).write(table)
    assert (TORCH, REFERENCE) == (choose({"device": "cpu:0"}).backend, choose({"device": "cpu:1"}).backend)


def test_a_stack_can_name_a_table_or_none(table: Path, tmp_path: Path) -> None:
    TimesTable({key(TORCH): took(2), key(REFERENCE): took(1)}).write(table)
    other = tmp_path / "other.json"
    TimesTable({key(TORCH): took(1), key(REFERENCE): took(2)}).write(other)
    none, named = choose({"measured_times": False}), choose({"measured_times": str(other)})
    assert (TORCH, False) == (none.backend, none.by_time)
    assert (TORCH, True) == (named.backend, named.by_time)


def test_a_backend_that_the_stack_names_is_taken_whatever_was_measured(table: Path) -> None:
    TimesTable({key(TORCH): took(2), key(REFERENCE): took(1)}).write(table)
    assert TORCH == choose(rules=[{"layers": "*", "backend": "torch"}]).backend


def test_a_shape_is_what_attention_takes_time_for() -> None:
    shape = layer_shape(LAYER, ())
    assert shape == layer_shape(attrs.evolve(LAYER, name="b", shares_with="a"), ())
    assert shape != layer_shape(attrs.evolve(LAYER, spec=full(8)), ())
    assert shape != layer_shape(attrs.evolve(LAYER, query=attrs.evolve(LAYER.query, soft_cap=2.0)), ())


# --- measuring --------------------------------------------------------------------------------------------------------


def scripted(*seconds: float) -> Callable[[], float]:
    """Return a clock by which steps take these times, repeated."""
    ticks = itertools.accumulate(itertools.chain.from_iterable((0.0, each) for each in itertools.cycle(seconds)))
    return lambda: next(ticks)


def test_the_batches_are_decodes_one_prompt_and_both() -> None:
    batches = make_batches(64)
    assert [(63, 1)] * 16 == list(batches["decode"])
    assert [(0, 64)] == list(batches["prefill"])
    assert [(32, 16), *[(63, 1)] * 8] == list(batches["mixed"])


def test_the_median_of_the_steps_counts_per_layer() -> None:
    stack, registry = Stack(), load_plugins().registry
    # The first of the eight steps of each kind does not count.
    clock = scripted(1.0, 0.01, 0.09, 0.02, 0.08, 0.03, 0.07, 0.04)
    time = measure(LAYER, TORCH, stack, registry, torch.device("cpu"), 8, clock, num_layers=2)
    assert dict.fromkeys(("decode", "prefill", "mixed"), 0.02) == pytest.approx(dict(time.seconds))


def test_a_slow_backend_is_not_measured_for_long() -> None:
    stack, registry = Stack(), load_plugins().registry
    steps = []
    clock = scripted(tuning.MAX_SECONDS + 1)

    def counted() -> float:
        steps.append(1)
        return clock()

    time = measure(LAYER, TORCH, stack, registry, torch.device("cpu"), 8, counted)
    assert tuning.MAX_SECONDS + 1 == pytest.approx(time.seconds["decode"])
    assert 3 * 2 * 2 == len(steps)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    sizes = {"num_kv_heads": 1, "head_size": 8, "query": {"num_heads": 2}}
    path = tmp_path / "layers.json"
    every = [
        {"name": "full.{}", "count": 2, "kind": "full_attention", **sizes},
        {"name": "chunk", "kind": "chunked_local", "chunk": 8, **sizes},
        {"name": "skips", "kind": "full_attention", "shares_with": "full.1", **sizes},
    ]
    path.write_text(json.dumps({"max_model_len": 32, "layers": every}))
    return path


@pytest.fixture
def stack_file(tmp_path: Path) -> Path:
    path = tmp_path / "stack.toml"
    path.write_text('[plugins]\ndisabled = ["cpu", "flex", "numba"]\n[engine]\nprefill_skipping = "decode_only"\n')
    return path


def test_tune_measures_each_shape_once_and_explain_goes_by_it(
    layers: Path, stack_file: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = run_json("tune", layers, "--stack", stack_file, "--context", 16)
    assert {TORCH, REFERENCE} == {result["backend"] for result in tuned["results"]}
    measured = {tuple(result["layers"]) for result in tuned["results"]}
    assert {("full.0", "full.1", "skips"), ("chunk",)} == measured
    assert str(table) == tuned["table"]
    assert all(result["score"] > 0 and not result["problem"] for result in tuned["results"])
    explained = run_json("explain", layers, "--stack", stack_file)["layers"]
    assert [True] * 4 == [layer["by_time"] for layer in explained]
    fastest = min((each for each in tuned["results"] if "chunk" in each["layers"]), key=lambda each: each["score"])
    assert fastest["backend"] == explained[2]["backend"]
    assert fastest["seconds"] == explained[2]["seconds"][fastest["backend"]]
    name = fastest["backend"].rpartition(":")[2]
    monkeypatch.setenv("COLUMNS", "200")
    assert f"{name} (decode " in run("explain", layers, "--stack", stack_file).stdout


@pytest.mark.parametrize("content", ["{", '{"model_type": "llama"}', '{"format": 99}', "some text", "\x80"])
def test_tune_writes_over_nothing_but_a_table(
    content: str, layers: Path, stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("it was measured"))
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    before = sorted(tmp_path.iterdir())
    error = error_of("tune", layers, "--stack", stack_file, "--context", 8, "--table", path)
    assert error.startswith(f"{path}: the table of times is not overwritten: it ")
    assert error.endswith("; name another file, or remove it first")
    assert (content.encode("latin-1"), before) == (path.read_bytes(), sorted(tmp_path.iterdir()))


def test_tune_adds_to_a_table_and_fills_an_empty_file(layers: Path, stack_file: Path, tmp_path: Path) -> None:
    path, link = tmp_path / "times.json", tmp_path / "link.json"
    path.touch()
    link.symlink_to(path)
    run_json("tune", layers, "--stack", stack_file, "--context", 8, "--table", link, "--backend", "torch")
    assert 2 == len(TimesTable.read(path).times)
    run_json("tune", layers, "--stack", stack_file, "--context", 8, "--table", path, "--backend", "torch_reference")
    assert (4, True) == (len(TimesTable.read(path).times), link.is_symlink())


def test_a_table_whose_keys_are_no_texts_is_no_table(table: Path) -> None:
    TimesTable({key(TORCH): took(1)}).write(table)
    table.write_text(table.read_text().replace('"torch": "', '"torch": 3, "version": "', 1))
    with pytest.raises(ValueError, match="it is not a table of measured times"):
        TimesTable.read(table)


def test_tune_measures_the_backends_that_are_asked_for(layers: Path, stack_file: Path, table: Path) -> None:
    tuned = run_json("tune", layers, "--stack", stack_file, "--context", 8, "--backend", "torch")
    assert {TORCH} == {result["backend"] for result in tuned["results"]}
    assert "there is no backend named 'torhc'" in error_of("tune", layers, "--backend", "torhc")


def test_a_context_that_needs_more_memory_than_there_is_is_refused_before_anything_is_measured(
    layers: Path, stack_file: Path, table: Path
) -> None:
    layers.write_text(layers.read_text().replace('"max_model_len": 32', '"max_model_len": 2000000000'))
    refused = error_of("tune", layers, "--stack", stack_file, "--context", 999999999)
    expected = r"^the host has no \d+ bytes to measure 16 requests of 999999999 tokens; give a smaller "
    assert re.match(expected + r"--context; this process may use \d+ bytes of memory$", refused.strip()), refused
    assert not table.exists()


def test_what_only_one_backend_serves_is_not_measured(tmp_path: Path, table: Path) -> None:
    path = tmp_path / "latents.json"
    layer = {"kind": "mla", "latent_size": 8, "rope_size": 4, "head_size_v": 8}
    query = {"num_heads": 2, "head_size": 12}
    path.write_text(json.dumps({"max_model_len": 32, "layers": [{"name": "a", **layer, "query": query}]}))
    assert "nothing to measure" in run("tune", path).stdout
    assert not table.exists()


@pytest.mark.parametrize("place", ["folder", "folder/file/times.json"])
def test_a_table_that_cannot_be_written_is_said_before_anything_is_measured(
    place: str, layers: Path, stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("it was measured"))
    path = tmp_path / place
    reason = "it is a folder" if place == "folder" else f"{path.parent} is not a folder"
    assert f"{path}: the table of times cannot be written: {reason}" in error_of(
        "tune", layers, "--stack", stack_file, "--table", path
    )


def test_latents_are_drawn_as_their_backend_knows_them(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For latents alone, a CPU has one backend, which would not be measured.
    monkeypatch.setattr(tuning, "is_measured", lambda choice: True)
    path = tmp_path / "latents.json"
    layer = {"kind": "mla", "latent_size": 8, "rope_size": 4, "head_size_v": 8}
    query = {"num_heads": 2, "head_size": 12}
    path.write_text(json.dumps({"max_model_len": 32, "layers": [{"name": "a", **layer, "query": query}]}))
    (result,) = run_json("tune", path, "--context", 8)["results"]
    assert ("kvframe-mla:mla", "") == (result["backend"], result["problem"])
    assert result["score"] > 0
    assert 1 == len(TimesTable.read(table).times)


def test_a_device_that_is_not_there_is_one_line(layers: Path) -> None:
    assert "engine.device 'cuda' cannot be used" in error_of("tune", layers, "--device", "cuda")
