"""Plugins that are broken at random, a few here; what is recorded is hundreds beside every command."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.cli import broken_plugins, fuzz_plugins
from tests.benchmarks.calling import page_of, record_of


def test_plugins_that_are_broken_at_random_are_refused_by_name() -> None:
    record = fuzz_plugins.fuzz(30, 3, 30, with_commands=False)
    assert {} == record["wrong"]
    refused = sum(ways.get("refused", 0) for ways in record["ended"].values())
    assert 20 <= refused <= 30


def test_a_seed_draws_the_same_plugins_again() -> None:
    first, again = (list(fuzz_plugins.in_groups(20, 3, 5)) for _ in range(2))
    assert first == again


def test_a_plugin_that_raises_past_everything_is_found_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframe.loading import plugins

    def not_contained(what: str, function: Any, *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    monkeypatch.setattr(plugins, "call", not_contained)
    raises = broken_plugins._at_import("escaping", Random(1))
    fuzz_plugins.install(tmp_path, raises)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(fuzz_plugins.Wrong, match="named by a stack it raises"):
        fuzz_plugins.use_by_name(raises, tmp_path)


def test_what_is_recorded_broke_at_least_200_plugins_and_nothing_else() -> None:
    record = record_of("fuzz_plugins")
    assert {} == record["wrong"]
    assert record["count"] >= 200
    assert record["count"] == sum(sum(ways.values()) for ways in record["ended"].values())
    assert len(record["ended"]) >= 40
    page = page_of("fuzz_plugins")
    assert f"{record['count']} plugins, broken at random (seed {record['seed']}): 0 ended in a" in page
