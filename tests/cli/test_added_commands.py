"""Commands that installed packages add, by the entry points ``kvframe.commands``."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvframe import cli
from kvframe.contract.errors import PluginError, UnknownNameError


@click.command(short_help="Say hello.")
def hello() -> None:
    """Say hello."""
    click.echo("hello")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a package add three commands; one takes a name of kvframe's own, and one is no command."""
    here = ModuleType("added_commands")
    vars(here).update(hello=hello, plan=hello, broken="not a command")
    monkeypatch.setitem(__import__("sys").modules, "added_commands", here)
    points = [EntryPoint(name, f"added_commands:{name}", "kvframe.commands") for name in ("hello", "plan", "broken")]

    def entry_points(**selected: Any) -> list[EntryPoint]:
        assert selected == {"group": "kvframe.commands"}
        return points

    monkeypatch.setattr(cli, "entry_points", entry_points)
    return here


def test_an_added_command_is_listed_and_runs(added: ModuleType) -> None:
    assert "hello" in cli.main.list_commands(click.Context(cli.main))
    assert "hello\n" == CliRunner().invoke(cli.main, ["hello"]).output


def test_names_of_kvframe_cannot_be_taken(added: ModuleType) -> None:
    assert "hello\n" != CliRunner().invoke(cli.main, ["plan"]).output
    assert 1 == cli.main.list_commands(click.Context(cli.main)).count("plan")


def test_what_is_no_command_is_named(added: ModuleType) -> None:
    with pytest.raises(PluginError, match="the command 'broken' of an unknown package must be a click command, not"):
        cli.main(["broken"], standalone_mode=False)


def test_the_package_of_a_command_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **selected: [])
    with pytest.raises(UnknownNameError, match=r"`pip install -e .*plugins/serve` adds it"):
        cli.main(["serve", "model"], standalone_mode=False)


def test_help_names_the_commands_of_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "Commands that other packages add:\n"
    assert title not in CliRunner().invoke(cli.main, ["--help"]).output
    monkeypatch.setattr(cli, "entry_points", lambda **selected: [])
    _, _, rows = CliRunner().invoke(cli.main, ["--help"]).output.partition(title)
    added = ["chat", "check", "embed", "generate", "new-plugin", "serve", "top", "trace"]
    assert added == [line.split()[0] for line in rows.splitlines()]
    counts = {package: rows.count(f"plugins/{package}") for package in ("engine", "serve", "testing")}
    assert {"engine": 5, "serve": 1, "testing": 2} == counts
