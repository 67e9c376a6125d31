"""A plugin that uses what a later version deprecates still loads, and its author is told once what to write instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvframe.cli import main
from kvframe.contract.hookspecs import API_VERSION, Register
from kvframe.loading import deprecations
from kvframe.loading.deprecations import DEPRECATED, Deprecation
from kvframe.loading.plugins import load_plugins
from tests.frozen.snapshot import take
from tests.loading.fake_distributions import FakeSite

ROOT = Path(__file__).resolve().parents[2]
Deprecate = Callable[..., None]

MANIFEST = """
from kvframe.contract import hookimpl

@hookimpl
def kvframe_configure(settings):
    pass

@hookimpl
def kvframe_register_eviction_policies(register):
    register("kept", "kvframe_old.policy:Kept", install="pip install it")
"""
POLICY = """
import attrs
from kvframe.contract import EvictionPolicy

@attrs.frozen(kw_only=True)
class Kept(EvictionPolicy):
    name = "kept"

    def priorities(self, pages):
        return pages.uses * 0 + pages.clock
"""


@pytest.fixture
def deprecate(monkeypatch: pytest.MonkeyPatch) -> Deprecate:
    """Returns a function that makes this kvframe a later one, which deprecates something."""
    monkeypatch.setattr(deprecations, "_warned", {})

    def apply(**instead: str) -> None:
        found = {name: Deprecation(since="1.1", instead=text) for name, text in instead.items()}
        monkeypatch.setattr(deprecations, "DEPRECATED", found)

    return apply


def said(site: FakeSite) -> list[str]:
    """Return the warnings when the plugin is loaded twice, and its class."""
    site.add("kvframe-old", "old", MANIFEST, files={"policy": POLICY})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            host = load_plugins()
            assert ("loaded", "") == (host.record("old").status, host.record("old").reason)
            host.registry.eviction_policies.load("kept")
    assert {DeprecationWarning} >= {each.category for each in caught}
    return [str(each.message) for each in caught if "kvframe-old" in str(each.message)]


START, SINCE = "plugin kvframe-old:old uses", "which version 1.1 of kvframe's contract deprecates"


@pytest.mark.parametrize(
    "name",
    [
        "kvframe_configure",
        "kvframe_configure(settings)",
        "kvframe_register_eviction_policies(register)",
        "register(install)",
        "EvictionPolicy.priorities",
        "EvictionPolicy.priorities(pages)",
        "EvictionPolicy.name",
    ],
)
def test_a_use_is_named_once_with_what_to_write_instead(name: str, site: FakeSite, deprecate: Deprecate) -> None:
    deprecate(**{name: "write something else"})
    assert [f"{START} {name}, {SINCE}: write something else instead"] == said(site)


@pytest.mark.parametrize(
    "name",
    ["kvframe_register_formats", "kvframe_configure(other)", "register(needs)", "EvictionPolicy.priorities(other)"],
)
def test_what_a_plugin_does_not_use_is_not_named(name: str, site: FakeSite, deprecate: Deprecate) -> None:
    deprecate(**{name: "write something else"})
    assert [] == said(site)


def test_the_check_of_a_plugin_says_it_too(site: FakeSite, deprecate: Deprecate) -> None:
    deprecate(**{"EvictionPolicy.priorities": "write something else"})
    site.add("kvframe-old", "old", MANIFEST, files={"policy": POLICY})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(main, ["check", "kept"])
    assert 0 == result.exit_code
    assert f"Deprecated: {START} EvictionPolicy.priorities" in result.stdout


# --- the table --------------------------------------------------------------------------------------------------------


def names() -> Iterator[str]:
    """Yield each name that can be deprecated."""
    for name, found in take().items():
        for member, of_member in found.get("members", {}).items() if isinstance(found, dict) else ():
            whole = member if name == "HookSpecs" else f"{name}.{member}"
            yield whole
            if isinstance(of_member, dict):
                yield from (f"{whole}({argument})" for argument in of_member["parameters"] if argument != "self")
    yield from (f"register({argument})" for argument in inspect.signature(Register.__call__).parameters)


def test_what_is_deprecated_exists_since_a_version_and_is_in_the_policy() -> None:
    known = {*names()}
    assert {"kvframe_configure(settings)", "EvictionPolicy.priorities", "register(needs)"} <= known
    assert {*DEPRECATED} <= known
    policy = (ROOT / "docs" / "contract_version.md").read_text(encoding="utf-8")
    for name, found in DEPRECATED.items():
        assert f"| `{name}` | {found.since} | {found.instead} |" in policy
        assert found.since <= API_VERSION
