"""What a parser of answers gets and returns: the interface that a plugin of ``kvframe.answers`` implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import attrs

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool that a client offers, by the tool's name; ``{}`` if it has none."""


@attrs.frozen
class Content:
    """Text of the answer that its reader sees."""

    text: str


@attrs.frozen
class Reasoning:
    """Text in which the model reasons before it answers."""

    text: str


@attrs.frozen
class ToolCall:
    """A whole call of a tool.

    Attributes:
        name: The tool's name.
        arguments: The JSON text of an object.
    """

    name: str
    arguments: str


Part = Content | Reasoning | ToolCall


class AnswerParser(ABC):
    """Divides one answer into its parts while the model generates it.

    The parts do not depend on how the text is divided, apart from how adjacent contents (or reasonings) are divided.
    No text raises an error: what is no call of an offered tool is text, as the model wrote it.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain after ``text``, which continues the answer; special tokens are in it."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """Return the last parts. The answer has ended, perhaps within a call. It is called once, after all texts."""


class AnswerFormat(ABC):
    """How one family of chat templates marks reasoning and tool calls in an answer."""

    @property
    def has_calls(self) -> bool:
        """Whether the format has tool calls. A request with tools is refused if it has none."""
        return True

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Return whether answers to a checkpoint with this chat template have this format.

        At most one format should match a template. An operator must choose if two do.
        """

    @abstractmethod
    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt, or its last 100 characters, ends within reasoning: the template opened it."""

    @abstractmethod
    def parser(
        self, *, reasoning: bool, tools: Tools | None, in_reasoning: bool, special: Collection[str]
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            reasoning: Whether reasoning becomes ``Reasoning``. Otherwise it is content with its marks, as in vLLM
                without a reasoning parser and in SGLang with ``separate_reasoning: false``.
            tools: The offered tools; None if calls are not parsed, and are content.
            in_reasoning: What ``opens_reasoning`` returns for the prompt.
            special: The texts of the tokenizer's special tokens. They are left out of content and reasoning, except
                for marks of the format that are part of a text.
        """
