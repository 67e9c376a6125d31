"""``kvframe chat``: talk with a model on disk, line by line."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe import find_model
from kvframe.cli.options import (
    TEXT_TYPE,
    block_size_option,
    dtype_option,
    max_model_len_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.contract.errors import KVFrameError, ModelError
from kvframe.contract.foreign import call
from kvframe_engine.commands.interrupts import ctrl_c_raises
from kvframe_engine.commands.options import device_option, drafts_option, log_lines
from kvframe_engine.commands.sampling import sampling_options
from kvframe_engine.commands.streaming import print_stream

if TYPE_CHECKING:
    from kvframe import Use
    from kvframe_engine.engine import Engine
    from kvframe_engine.requests.params import SamplingParams

RESET = "/reset"
"""The line that starts a new conversation."""

_ENDS = ("/exit", "/quit", "exit", "quit")
"""The lines that end the chat."""

_COMMAND = re.compile(r"/[A-Za-z-]*(\s|$)")
"""How a line begins that is a command and no message, unlike a path or a fraction."""

_HELP = f"{RESET} starts again, /exit or Ctrl-D ends the chat, Ctrl-C ends an answer"

_PROMPT = "> "


@click.command(short_help="Talk with a model on disk.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--system", type=TEXT_TYPE, metavar="TEXT", help="What the model is told before each conversation.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="The most tokens of an answer.",
)
@sampling_options
@drafts_option
@stack_option
@memory_option
@block_size_option
@max_model_len_option
@device_option
@dtype_option
def chat(
    model: Path,
    system: str | None,
    max_new_tokens: int,
    sampling: dict[str, Any],
    drafts: Use | str | None,
    stack_file: Path | None,
    memory: str | None,
    block_size: int | None,
    max_model_len: int | None,
    device: str | None,
    dtype: str | None,
) -> None:
    """Talk with MODEL, a model's folder or the id of a repository (Qwen/Qwen3-0.6B), in its chat template.

    Each line is a message, and the answer is printed as it comes. The tokens of earlier messages stay in the prefix
    cache, so that a turn computes only what is new. /reset starts a new conversation. Ctrl-C ends an answer; /exit,
    Ctrl-C or the end of the input, Ctrl-D, ends the chat. On a terminal, lines can be edited, and the arrow keys bring
    earlier ones back.
    """
    from kvframe_engine.ranks.environment import find_rank

    model = find_model(model, weights=True)
    if find_rank() is not None:
        raise click.UsageError("a chat reads standard input, which several ranks share: start it in one process")
    stack = read_stack(
        stack_file,
        cache={"memory": memory, "block_size": block_size},
        model={"device": device, "dtype": dtype, "drafts": drafts},
        limits={"max_model_len": max_model_len},
    )

    from kvframe_engine.engine import Engine

    with log_lines():
        new_engine = Engine.from_pretrained(model, stack=stack)
    with new_engine as engine:
        conversation = Conversation(engine, engine.default_params(max_new_tokens=max_new_tokens, **sampling), system)
        conversation.check()
        if _is_a_dialogue():
            click.echo(_HELP, err=True)
        for line in _lines():
            if line in _ENDS:
                break
            if line == RESET:
                conversation.reset()
            elif _COMMAND.match(line):
                refusal = "" if line == "/help" else f"kvframe: there is no command {line.split()[0]}: "
                click.echo(f"{refusal}{_HELP}", err=True)
            elif line:
                conversation.answer(line)


class Conversation:
    """A conversation with a model.

    Attributes:
        messages: What was said. An answer that was interrupted is in it as far as it came; a message that could not be
            answered is not.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        """Start with what the model is told before each conversation; None for nothing."""
        self._engine = engine
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = [*self._start]

    def check(self) -> None:
        """Raise ``ModelError`` if the model has no chat template, or one that does not take the start."""
        self._encode([*self._start, _said("user", "?")])

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [*self._start]

    def answer(self, text: str) -> None:
        """Print the answer to a message as it comes, then what it took; an error of this message is printed instead."""
        messages = [*self.messages, _said("user", text)]
        stats_before, start_time = self._engine.stats(), time.perf_counter()
        parts: list[str] = []
        try:
            stream = self._engine.stream(self._encode(messages), self._params)
            try:
                with ctrl_c_raises():
                    output = print_stream(self._engine, stream, parts.append)
                error = output.error
            except KeyboardInterrupt:
                error = None
            finally:
                stream.close()
                click.echo()
        except KVFrameError as refused:
            error = str(refused)
        if error is not None:
            click.echo(f"kvframe: {error}; {RESET} starts a new conversation", err=True)
            return
        self.messages = [*messages, _said("assistant", "".join(parts))]
        if sys.stderr.isatty():
            after = self._engine.stats()
            click.echo(
                f"{after.generated_tokens - stats_before.generated_tokens} tokens in "
                f"{time.perf_counter() - start_time:.2f} s; "
                f"{after.cached_prompt_tokens - stats_before.cached_prompt_tokens} of "
                f"{after.prompt_tokens - stats_before.prompt_tokens} tokens before them were cached",
                err=True,
            )

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        model = self._engine.model
        what = f"{model.description.name}: encode_chat()"
        return call(what, model.encode_chat, messages, passes=(ModelError,))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_a_dialogue() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _lines() -> Iterator[str]:
    """Yield the lines of standard input without spaces around them; ask for each if somebody types them."""
    read = _editing_reader() or _read_line
    while line := read():
        try:
            yield line.decode("utf-8").strip()
        except UnicodeDecodeError:
            click.echo("kvframe: a line that is not UTF-8 text was left out", err=True)
    if _is_a_dialogue():
        click.echo(err=True)


def _read_line() -> bytes:
    """Return the next line; nothing at the end of the input."""
    if _is_a_dialogue():
        click.echo(_PROMPT, nl=False, err=True)
    return sys.stdin.buffer.readline()


def _editing_reader() -> Callable[[], bytes] | None:
    """Return what reads lines that can be edited, with a history of this chat; None without a terminal or readline."""
    terminal = sys.__stdout__  # the descriptor 1, which shows what is not output, as on stderr
    try:
        if not _is_a_dialogue() or sys.stdin.fileno() != 0 or terminal is None or not terminal.isatty():
            return None
        import readline
    except (ImportError, OSError, ValueError):  # Windows has no readline; a stream may have no descriptor, or be closed
        return None
    readline.parse_and_bind("set enable-bracketed-paste off")

    def read() -> bytes:
        try:
            with redirect_stdout(terminal):  # readline serves the streams that the process was started with
                return os.fsencode(input(_PROMPT)) + b"\n"
        except EOFError:
            return b""

    return read
