"""Writes a chat as the text that the checkpoint's chat template makes of it; what the template ignores is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvframe.contract import RequestError, shown
from kvframe_serve.reading.bodies import Message, Tool

_TEMPLATE_FAILS = (TemplateError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What a chat template raises if the messages do not suit it: a template is a program of the checkpoint's."""

_OWN_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "conversation"}
"""Values of a template that a client does not name as further values."""


def template_of(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template, or of all its templates; empty if it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


class ChatWriter:
    """Writes chats through one tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the tokenizer; its template is read once."""
        self._tokenizer = tokenizer
        self._template = template_of(tokenizer)
        self._variables = _variables_of(self._template)

    def write(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, options: Mapping[str, Any] | None
    ) -> str:
        """Return a chat's text, up to the model's next answer.

        Args:
            messages: The messages, at least one.
            tools: The tools for the template, or None.
            options: Further values for the template, or None.

        Raises:
            RequestError: There is no template or no message, or the template refuses or ignores what was given
                (``no_chat_template``, ``empty_prompt``, ``bad_text``, ``bad_params``).
        """
        if not self._template:
            raise RequestError("the model has no chat template; use /v1/completions", code="no_chat_template")
        if not messages:
            raise RequestError("messages must hold at least one message", code="empty_prompt")
        options = dict(options or {})
        if taken_names := sorted(_OWN_NAMES & set(options)):
            raise RequestError(f"chat_template_kwargs may not set {taken_names[0]!r}", code="bad_params")
        for name in [*(["tools"] if tools else []), *options]:
            if name not in self._variables:
                raise RequestError(f"the model's chat template does not read {name!r}; leave it out", code="bad_params")
        plain = [_plain(message) for message in messages]
        if any(message["tool_calls"] for message in plain) and "tool_calls" not in self._template:
            raise RequestError("the model's chat template does not read tool calls; leave them out", code="bad_params")
        text = self._render(plain, tools, options)
        for index, message in enumerate(messages):
            if message.name is not None and message.role != "tool":
                nameless = [*plain[:index], {**plain[index], "name": None}, *plain[index + 1 :]]
                if self._render(nameless, tools, options) == text:
                    raise RequestError(
                        f"messages[{index}].name is ignored by the model's chat template; leave it out",
                        code="bad_params",
                    )
        return text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None, options: Mapping[str, Any]
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    # A template finds a key whose value is null, and writes "None".
                    [{key: value for key, value in message.items() if value is not None} for message in messages],
                    tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **options,
                )
            )
        except _TEMPLATE_FAILS as error:
            why = str(error) if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: {error}"
            raise RequestError(f"the model's chat template refuses the messages: {why}", code="bad_text") from error


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as chat templates of transformers read it: one text, and arguments as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    calls = [
        {
            "type": call.type,
            **({} if call.id is None else {"id": call.id}),
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in message.tool_calls or ()
    ]
    return {
        "role": message.role,
        "content": content,
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"a tool call's arguments are the JSON of an object, not {shown(text)}", code="bad_params")
    return arguments


class _Generation(Extension):
    """Reads the tag that marks answers for training, and leaves it out."""

    tags = {"generation"}  # noqa: RUF012 -- as in the base class

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables_of(template: str) -> frozenset[str]:
    """Return the names that a chat template reads."""
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols, _Generation])
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))
