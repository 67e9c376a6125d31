"""Write the commands in command_line.md, with their arguments and options, from the commands themselves.

python docs/commands.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click

from kvframe.cli import main

PAGE = Path(__file__).with_name("command_line.md")
START, END = "<!-- commands: start -->\n", "<!-- commands: end -->\n"


def write_commands() -> str:
    """Return a section for each command, as Markdown."""
    context = click.Context(main, info_name="kvframe")
    packages = {point.name: point.dist.name for point in entry_points(group="kvframe.commands") if point.dist}
    sections = []
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        sections.append("\n".join(_section(click.Context(command, context, name), packages.get(name, "kvframe"))))
    return "\n".join(sections)


def with_commands(page: str) -> str:
    """Return a page with the commands between its two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{write_commands()}\n{END}{rest.partition(END)[2]}"


def _section(context: click.Context, package: str) -> Iterator[str]:
    command = context.command
    yield f"## `{context.command_path}`\n"
    yield from (f"{paragraph}\n" for paragraph in _paragraphs(command.help or ""))
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    yield f"From the package `{package}`.\n"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and "--help" not in parameter.opts:
            names, text = record
            said, _, extra = f"  {text}".partition("  [")
            limits = [f"`{each}`" for each in extra.removesuffix("]").split("; ") if each]
            yield f"- `{names}`: {' '.join([_plain(said), *limits]).strip()}"
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.replace("\b", "").strip()):
        yield _plain(paragraph)


def _plain(text: str) -> str:
    """Return text on one line, in which options and JSON are code, and nothing else is marked up."""
    parts = re.split(r"(`[^`]+`)", re.sub(r"(?<![`\w-])(--[a-z][\w-]+|'{.+?}')", r"`\1`", " ".join(text.split())))
    return "".join(part if part.startswith("`") else re.sub(r"([<>*])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(with_commands(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
