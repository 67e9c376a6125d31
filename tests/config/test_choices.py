"""From the names of an eviction policy, a scheduling policy and page stores in a stack to what they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from kvframe_engine.contract.scheduling import FCFS, QueuedRequest, SchedulingPolicy
from kvframe_priority.policy import Priority
from kvframe_scan_resistant.policy import ScanResistant
from kvframe_valkey.store import ValkeyStore

from kvframe import Engine, SamplingParams, Setup
from kvframe.config.choices import make_page_stores, make_part
from kvframe.config.stack import Stack
from kvframe.contract.errors import StackError
from kvframe.contract.eviction import LRU, EvictionPolicy
from kvframe.contract.page_store import PageStore
from kvframe.loading.plugins import load_plugins
from tests.engine.scripted_model import ScriptedModel
from tests.support.commands import run
from tests.support.engines import manager_of
from tests.support.plugins import plugin

LAYERS = """
max_model_len = 64
[[layers]]
name = "layers.{}"
count = 2
kind = "full_attention"
num_kv_heads = 2
head_size = 8
query = { num_heads = 2 }
"""


def chosen(cache: dict[str, Any], **tables: Any) -> EvictionPolicy:
    stack = Stack.from_mapping({"cache": cache, **tables}, "my.toml")
    registry = load_plugins(stack.plugins).registry
    stack.check(registry)
    policy: EvictionPolicy = make_part("eviction", stack.cache.eviction, registry)
    return policy


def refusal(cache: dict[str, Any], **tables: Any) -> str:
    with pytest.raises(StackError) as caught:
        chosen(cache, **tables)
    return str(caught.value)


@attrs.frozen(kw_only=True)
class Mine(SchedulingPolicy):
    """Orders by a multiple of the arrival."""

    name: ClassVar[str] = "mine"
    by: int = 1

    def order(self, request: QueuedRequest) -> float:
        return self.by * request.arrival


def test_least_recently_used_is_the_default_and_needs_no_plugin() -> None:
    without = {"plugins": {"disabled": ["scan_resistant"]}}
    assert LRU == chosen({}) == chosen({"eviction": "lru"}, **without)


def test_a_name_or_a_table_chooses_a_policy() -> None:
    assert ScanResistant() == chosen({"eviction": "scan_resistant"})
    assert ScanResistant(patience=2) == chosen({"eviction": {"name": "scan_resistant", "patience": 2}})


def scheduled_by(choice: Any) -> SchedulingPolicy:
    stack = Stack.from_mapping({"engine": {"scheduling": choice}}, "my.toml")
    registry = load_plugins(plugins=[plugin("mine", scheduling_policies={"mine": Mine})]).registry
    stack.check(registry)
    policy: SchedulingPolicy = make_part("scheduling", stack.engine.scheduling, registry)
    return policy


def test_a_name_or_a_table_chooses_a_scheduling_policy() -> None:
    assert FCFS == scheduled_by("fcfs")
    assert [Mine(), Mine(by=2)] == [scheduled_by("mine"), scheduled_by({"name": "mine", "by": 2})]
    assert Priority(seconds=5) == scheduled_by({"name": "priority", "seconds": 5})


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("priorty", "my.toml: engine.scheduling: there is no scheduling policy named 'priorty'"),
        (
            {"name": "priority", "seconds": -1},
            "my.toml: engine.scheduling: scheduling policy 'priority': seconds",
        ),
        ({"name": "fcfs", "by": 1}, "my.toml: engine.scheduling: scheduling policy 'fcfs': there is no option 'by'"),
    ],
)
def test_a_wrong_scheduling_policy_is_refused(choice: Any, why: str) -> None:
    with pytest.raises(StackError) as refusal:
        scheduled_by(choice)
    assert str(refusal.value).startswith(why)


def test_page_stores_are_made_with_their_options() -> None:
    def made(*uses: dict[str, Any]) -> list[PageStore]:
        stack = Stack.from_mapping({"cache": {"stores": [*uses]}}, "my.toml")
        return make_page_stores(stack.page_stores, load_plugins().registry)

    use = {"name": "valkey", "url": "redis://cache:7000/2"}
    first, second = made({**use, "expiry": 60}, use)
    assert (ValkeyStore(url="redis://cache:7000/2", expiry=60), ValkeyStore(url="redis://cache:7000/2")) == (
        first,
        second,
    )
    with pytest.raises(StackError) as caught:
        made(use, {"name": "valkey", "uri": "redis://:secret@cache"})
    assert "cache.stores[1]: page store 'valkey': there is no option 'uri'; its options: url," in str(caught.value)
    assert "did you mean 'url'?" in str(caught.value)
    with pytest.raises(StackError) as caught:
        made({"name": "valkey", "url": "http://:secret@cache"})
    assert "page store 'valkey': url must be like valkey://host:6379" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    assert "my.toml: cache.eviction: there is no eviction policy named 'scan_resistent'" in refusal(
        {"eviction": "scan_resistent"}
    )
    assert "did you mean 'scan_resistant'?" in refusal({"eviction": "scan_resistent"})
    disabled = refusal({"eviction": "scan_resistant"}, plugins={"disabled": ["scan_resistant"]})
    assert "kvframe-scan-resistant:scan_resistant (disabled: my.toml disables it)" in disabled


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patiense": 2}, "there is no option 'patiense'; its options: patience; did you mean 'patience'?"),
        ({"patience": -1}, "patience must be a number from 0 to 1000, not -1; its options: patience"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    told = refusal({"eviction": {"name": "scan_resistant", **options}})
    assert told == f"my.toml: cache.eviction: eviction policy 'scan_resistant': {reason}"


def test_least_recently_used_has_no_options() -> None:
    told = refusal({"eviction": {"name": "lru", "patience": 1}})
    assert told.endswith("eviction policy 'lru': there is no option 'patience'; its options: none")


def invoke(*arguments: str) -> str:
    done = run(*arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_line_shows_the_policies_and_the_one_in_use(tmp_path: Path) -> None:
    layers, stack = tmp_path / "layers.toml", tmp_path / "stack.toml"
    layers.write_text(LAYERS)
    stack.write_text('[cache]\neviction = { name = "scan_resistant", patience = 2 }\n')
    names = json.loads(invoke("plugins", "--json"))["names"]
    (listed,) = [each for each in names if each["name"] == "scan_resistant"]
    assert ("eviction", "kvframe-scan-resistant", []) == (listed["kind"], listed["owner"], listed["missing"])
    policy = "scan_resistant (patience = 2)"
    assert f"by the policy {policy}" in invoke("explain", str(layers), "--stack", str(stack))
    assert policy == json.loads(invoke("explain", str(layers), "--stack", str(stack), "--json"))["eviction"]
    assert "by the policy" not in invoke("explain", str(layers))
    assert "lru" == json.loads(invoke("explain", str(layers), "--json"))["eviction"]


def serve_many(eviction: str) -> tuple[Engine, list[str | None]]:
    """Return an engine whose requests exceeded its cache, and its log."""
    stack = Stack.from_mapping({"cache": {"block_size": 4, "memory": 8 * 1024, "eviction": eviction}})
    registry, model = load_plugins().registry, ScriptedModel("x" * 30 + "a script")
    stack = stack.with_options(model={"dtype": "float32"})
    engine = Engine(model, Setup.of(model.description, stack, registry))
    prompts = [[1, index, *range(100, 128)] for index in range(30)]
    return engine, [output.text for output in engine.generate(prompts, SamplingParams(max_new_tokens=6))]


def test_an_engine_gives_pages_up_as_its_stack_says() -> None:
    lru, expected = serve_many("lru")
    engine, said = serve_many("scan_resistant")
    assert (LRU, ScanResistant()) == (manager_of(lru).eviction, manager_of(engine).eviction)
    assert engine.stats().evictions > 0
    assert expected == said
