"""The command line: one file per command, each imported when the command runs.

Nothing here loads torch or rich; a command that needs them imports them when it runs.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from kvframe.cli.guard import run_guarded
from kvframe.cli.output import keep_output_apart
from kvframe.cli.render import wants_no_escapes
from kvframe.contract.errors import PluginError, UnknownNameError
from kvframe.contract.foreign import call, safe_repr
from kvframe.loading.packages import PROVIDERS, provider_of, to_install

_COMMANDS: Mapping[str, str] = {
    "plan": "kvframe.cli.plan:plan",
    "explain": "kvframe.cli.explain:explain",
    "plugins": "kvframe.cli.plugins:plugins",
    "doctor": "kvframe.cli.doctor:doctor",
    "schema": "kvframe.cli.schema:schema",
}
"""The commands by name, in the order that ``--help`` lists them, as import strings."""


_GROUP = "kvframe.commands"
"""The entry points of packages that add a command: its name, and the import string of a click command."""


def _added_commands() -> Mapping[str, EntryPoint]:
    """Return the commands that installed packages add; kvframe's own names cannot be taken."""
    return {command.name: command for command in entry_points(group=_GROUP) if command.name not in _COMMANDS}


class LazyGroup(click.Group):
    """A group that imports a command's module only for that command, and reports a user's mistakes in one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of help."""
        return [*_COMMANDS, *sorted(_added_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command named ``cmd_name``; None if there is none."""
        if cmd_name not in _COMMANDS:
            return _load_added(cmd_name)
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write which commands packages of kvframe add that are not installed."""
        known = {*_COMMANDS, *_added_commands()}
        commands = sorted((name, package) for (kind, name), package in PROVIDERS.items() if kind == "command")
        rows = [(name, to_install(package)) for name, package in commands if name not in known]
        if rows:
            with formatter.section("Commands that other packages add"):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` name; for an unknown name, raise an error with the nearest command."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and name not in (added_commands := _added_commands()):
            package = provider_of("command", name)
            advice = "`kvframe --help` says what each does" if package is None else f"`{to_install(package)}` adds it"
            raise UnknownNameError("command", name, [*_COMMANDS, *added_commands], advice)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line, and end the process with an exit code of ``kvframe.cli.guard``."""
        main = super().main
        if not standalone_mode:
            return main(args, prog_name, complete_var, standalone_mode=False, **extra)
        sys.exit(run_guarded(lambda: main(args, prog_name, complete_var, standalone_mode=False, **extra)))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with streams that can print any text, and without escape codes if the user wants none."""
        keep_output_apart()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # An error may quote text that is not Unicode. It is escaped, so that printing it does not fail.
                stream.reconfigure(errors="backslashreplace")
        if wants_no_escapes():
            ctx.color = False
        return super().invoke(ctx)


def _load_added(name: str) -> click.Command | None:
    """Return the command that an installed package adds; None if there is none."""
    entry_point = _added_commands().get(name)
    if entry_point is None:
        return None
    label = f"the command {name!r} of {entry_point.dist.name if entry_point.dist else 'an unknown package'}"
    command = call(f"{label}: loading {entry_point.value}", entry_point.load)
    if not isinstance(command, click.Command):
        raise PluginError(f"{label} must be a click command, not {safe_repr(command)}")
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvframe", message="kvframe %(version)s")
def main() -> None:
    """Run models through kvframe's paged KV cache, plan its memory, and ask what it will do and why."""
