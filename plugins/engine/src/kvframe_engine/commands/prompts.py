"""The options that name prompts, and prompts in files: text, JSON, JSON lines or token ids."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvframe.cli.options import TEXT_TYPE
from kvframe.contract.errors import FileError, RequestError, shorten
from kvframe.contract.files import as_text, parse_json, read_bytes, read_stream, reason_of
from kvframe_engine.ranks.environment import find_rank

_MAX_BYTES = 256 << 20
"""The most bytes that are read from a file of prompts."""

_Prompt = TypeVar("_Prompt", str, list[int])


_Command = TypeVar("_Command", bound=Callable[..., Any])


class PromptCommand(click.Command):
    """A command whose prompts come from options; the error for a text without one shows the option."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; raise ``UsageError`` for a text without an option."""
        texts = super().parse_args(ctx, args)
        if texts and not ctx.resilient_parsing:
            raise click.UsageError(f"a prompt needs an option: --prompt {shlex.quote(shorten(texts[0], 60))}", ctx)
        return texts


_OPTIONS = (
    click.option(
        "--prompt", "texts", type=TEXT_TYPE, multiple=True, metavar="TEXT", help="A prompt; repeat for several."
    ),
    click.option(
        "--prompts",
        "prompts_file",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help="A file of prompts: one a line, a JSON list (.json) or JSON lines (.jsonl); - for standard input.",
    ),
    click.option(
        "--prompt-token-ids",
        "token_ids_file",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help="A file of JSON lists of token ids, for models with no tokenizer; - for standard input.",
    ),
)


def prompt_options(command: _Command) -> _Command:
    """Add the options that name a command's prompts: its parameters are those of ``read_given_prompts``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_given_prompts(
    texts: tuple[str, ...], prompts_file: Path | None, token_ids_file: Path | None
) -> Sequence[str | list[int]]:
    """Return the prompts that one of the options names; raise ``UsageError`` for none and for several options."""
    named_sources = [
        option
        for option, value in (
            ("--prompt", texts or None),
            ("--prompts", prompts_file),
            ("--prompt-token-ids", token_ids_file),
        )
        if value is not None
    ]
    if len(named_sources) != 1:
        raise click.UsageError(
            "give prompts by one of --prompt, --prompts and --prompt-token-ids"
            + (f", not by {' and '.join(named_sources)}" if named_sources else "")
        )
    if prompts_file is not None:
        return read_prompts(prompts_file)
    return texts if token_ids_file is None else read_prompt_token_ids(token_ids_file)


def read_prompts(path: Path, what: str = "prompt") -> list[str]:
    """Return the prompts of a file, or other texts.

    Args:
        path: ``.json``: a list of strings. ``.jsonl``: on each line a string, or an object with a ``prompt``. For any
            other suffix: one prompt a line. Empty lines are left out. ``-`` reads lines from standard input.
        what: The name of a text, in the objects and in errors.

    Raises:
        RequestError: The file cannot be read or has other content.
    """
    text = _read(path)
    if path.suffix == ".json":
        data = _parse(path, "", text)
        prompts = data if isinstance(data, list) else [data]
        locations = [f"[{index}]" for index in range(len(prompts))]
    elif path.suffix == ".jsonl":
        numbered = _lines(text)
        prompts = [_parse(path, f" line {number}", line) for number, line in numbered]
        prompts = [prompt.get(what) if isinstance(prompt, dict) else prompt for prompt in prompts]
        locations = [f" line {number}" for number, _ in numbered]
    else:
        return _some(path, [line for _, line in _lines(text)], what)
    for location, prompt in zip(locations, prompts, strict=True):
        if not isinstance(prompt, str):
            raise RequestError(f"{path}{location}: a {what} is a string, not {_shown(prompt)}", code="bad_prompt")
    return _some(path, prompts, what)


def read_prompt_token_ids(path: Path) -> list[list[int]]:
    """Return the prompts of a file of token ids.

    Args:
        path: A JSON list of lists of ids, or JSON lines with a list of ids each. ``-`` reads standard input.

    Raises:
        RequestError: The file cannot be read or has other content.
    """
    text = _read(path)
    try:
        data = parse_json(text)
    except FileError:
        numbered = _lines(text)
        data = [_parse(path, f" line {number}", line) for number, line in numbered]
        locations = [f" line {number}" for number, _ in numbered]
    else:
        # A single list of ids is valid as one line of JSON lines, but as JSON it is a flat list.
        data = [data] if isinstance(data, list) and data and not isinstance(data[0], list) else data
        locations = [f"[{index}]" for index in range(len(data))] if isinstance(data, list) else []
    if not isinstance(data, list):
        raise RequestError(f"{path}: prompts are JSON lists of token ids, not {_shown(data)}", code="bad_prompt")
    for location, prompt in zip(locations, data, strict=True):
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise RequestError(
                f"{path}{location}: a prompt is a list of token ids (whole numbers), not {_shown(prompt)}",
                code="bad_prompt",
            )
    return _some(path, data, "prompt")


def _read(path: Path) -> str:
    try:
        return as_text(_read_standard_input() if str(path) == "-" else read_bytes(path, _MAX_BYTES))
    except FileError as error:
        raise RequestError(f"{path} {error}", code="bad_prompt") from error


def _read_standard_input() -> bytes:
    if sys.stdin is None:
        raise FileError("cannot be read: standard input is closed")
    if find_rank() is not None:
        raise FileError("cannot be read by several ranks, which share one standard input: give prompts in a file")
    try:
        return read_stream(sys.stdin.buffer, _MAX_BYTES)
    except OSError as error:
        raise FileError(f"cannot be read: {reason_of(error)}") from error


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _parse(path: Path, location: str, text: str) -> Any:
    try:
        return parse_json(text)
    except FileError as error:
        raise RequestError(f"{path}{location} {error}", code="bad_prompt") from error


def _some(path: Path, prompts: list[_Prompt], what: str) -> list[_Prompt]:
    if not prompts:
        raise RequestError(f"{path} holds no {what}", code="bad_prompt")
    return prompts


def _shown(value: Any) -> str:
    return shorten(json.dumps(value), 60)
