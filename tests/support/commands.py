"""Runs commands of ``kvframe`` in this process."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kvframe.cli import main


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(*arguments: object, **options: Any) -> Result:
    """Run a command; the options are those of ``CliRunner.invoke``."""
    return CliRunner().invoke(main, [*map(str, arguments)], **options)


def stdout_of(*arguments: object, **options: Any) -> str:
    """Return what a command prints that succeeds."""
    result = run(*arguments, **options)
    assert 0 == result.exit_code, result.output
    return result.stdout


def run_json(*arguments: object, **options: Any) -> Any:
    """Return what a command prints as JSON; it succeeds, and says nothing but what serves a model."""
    result = run(*arguments, *(() if "--json" in arguments else ("--json",)), **options)
    assert (0, "") == (result.exit_code, without_start(result.stderr)), result.output
    return json.loads(result.stdout)


def write(path: Path, content: object) -> str:
    """Write text, or a value as JSON; return the path."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def without_start(stderr: str) -> str:
    """Return what a command printed to stderr, apart from the lines that say what serves a model."""
    start = r"kvframe: .* runs on .*; attention by .*; a cache of .* MiB(; .*)?\n"
    no_cache = r"kvframe: .*: no layer keeps anything of the past: .*\n"
    return re.sub(f"^({start}|{no_cache})", "", stderr, flags=re.MULTILINE)
