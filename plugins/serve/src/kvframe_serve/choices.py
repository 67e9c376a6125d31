"""The choices of OpenAI's answers: what one sample of a question generated, in parts or as a whole.

All text is the engine's. A choice of a chat only takes it apart, if the client asks for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvframe_serve.answers import AnswerParser, Content, Reasoning, ToolCall
from kvframe_serve.answers import Part as AnswerPart
from kvframe_serve.generation import Part
from kvframe_serve.logprobs import ChatLogprobs, TextLogprobs, TokenTexts
from kvframe_serve.reading.question import Question


class Choice(ABC):
    """One sample. It gets all its parts in order, and is asked for chunks of a stream, or once for the whole."""

    def __init__(self, index: int) -> None:
        """Take the index of the choice."""
        self._index = index

    def start(self) -> list[dict[str, Any]]:
        """Return the choices of the chunks before the first part."""
        return []

    @abstractmethod
    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """Return the choices of the chunks that a part adds; the last one of the last part has its finish reason."""

    @abstractmethod
    def whole(self, part: Part) -> dict[str, Any]:
        """Return the choice of an answer in one, from a part that has everything."""


class TextChoice(Choice):
    """A choice of ``/v1/completions``."""

    def __init__(self, question: Question, index: int, texts: TokenTexts) -> None:
        """Take the question.

        Args:
            question: What is asked for.
            index: The index of the choice.
            texts: The texts of tokens.
        """
        super().__init__(index)
        self._question = question
        prompt = index // question.params.n
        self._echo = "" if question.echo is None else question.echo[prompt]
        self._prompt = question.prompts[prompt]
        self._logprobs = TextLogprobs(texts, with_top=question.params.top_logprobs > 0)

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """As for the base class."""
        choice = self.whole(part)
        is_needed = choice["text"] or choice["logprobs"] or choice["finish_reason"]
        return [choice] if is_needed else []

    def whole(self, part: Part) -> dict[str, Any]:
        """As for the base class."""
        echo, self._echo = self._echo, ""
        if self._question.only_echo:
            text, part = echo, attrs.evolve(part, token_ids=[], logprobs=[], top_logprobs=[])
        else:
            text = echo + part.text
        logprobs = None
        if self._question.params.logprobs:
            if part.prompt_logprobs is not None:
                self._logprobs.add(self._prompt, part.prompt_logprobs, part.prompt_top_logprobs or ())
            self._logprobs.add(part.token_ids, part.logprobs, part.top_logprobs)
            logprobs = self._logprobs.take()
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": part.finish_reason}


class ChatChoice(Choice):
    """A choice of ``/v1/chat/completions``."""

    def __init__(
        self, question: Question, index: int, texts: TokenTexts, parser: AnswerParser | None, request_id: str
    ) -> None:
        """Take the question.

        Args:
            question: What is asked for.
            index: The index of the choice.
            texts: The texts of tokens.
            parser: Takes the answer apart; None to answer the text as it is.
            request_id: The request's id, of which ids of tool calls are made.
        """
        super().__init__(index)
        self._logprobs = ChatLogprobs(texts) if question.params.logprobs else None
        self._parser = parser
        self._request_id = request_id
        self._num_calls = 0

    def start(self) -> list[dict[str, Any]]:
        """As for the base class."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """As for the base class."""
        deltas = [self._delta(answer_part) for answer_part in self._answer_parts(part)]
        logprobs = self._logprobs.of(part) if self._logprobs is not None and part.token_ids else None
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(delta) for delta in deltas]
        if logprobs is not None:
            chunks[0]["logprobs"] = logprobs
        if part.finish_reason is not None:
            chunks.append({**self._chunk({}), "finish_reason": self._reason(part)})
        return chunks

    def whole(self, part: Part) -> dict[str, Any]:
        """As for the base class."""
        deltas = [self._delta(answer_part) for answer_part in self._answer_parts(part)]
        calls = [
            {key: value for key, value in call.items() if key != "index"}
            for delta in deltas
            for call in delta.get("tool_calls", ())
        ]
        content = "".join(delta.get("content", "") for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._logprobs is None else self._logprobs.of(part),
            "finish_reason": self._reason(part),
        }

    def _answer_parts(self, part: Part) -> Iterable[AnswerPart]:
        if self._parser is None:
            return [Content(part.text)] if part.text else []
        answer_parts = self._parser.feed(part.text)
        return answer_parts if part.finish_reason is None else [*answer_parts, *self._parser.finish()]

    def _delta(self, answer_part: AnswerPart) -> dict[str, Any]:
        if isinstance(answer_part, ToolCall):
            call_id = f"{self._request_id}-call-{self._index}-{self._num_calls}"
            function = {"name": answer_part.name, "arguments": answer_part.arguments}
            self._num_calls += 1
            return {
                "tool_calls": [{"index": self._num_calls - 1, "id": call_id, "type": "function", "function": function}]
            }
        return {"reasoning_content" if isinstance(answer_part, Reasoning) else "content": answer_part.text}

    def _reason(self, part: Part) -> str | None:
        return "tool_calls" if self._num_calls and part.finish_reason == "stop" else part.finish_reason

    def _chunk(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
