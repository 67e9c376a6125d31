"""The choices of OpenAI's answers: what one sample of a request generated, as a whole or in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import attrs
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
    response_events_to_chunks,
)

from kvframe import RequestOutput, SamplingParams
from kvframe_serve import logprobs
from kvframe_serve.logprobs import TokenTexts


@attrs.frozen(kw_only=True)
class Asking:
    """What the choices of one request have in common.

    Attributes:
        request_id: Its id, as its client sees it.
        tokenizer: The model's tokenizer.
        model: What transformers' parsers of answers read of the model: its config.
        texts: The texts of the vocabulary's tokens.
        params: How it is sampled.
        token_ids: Its prompt.
        tools: The tools that a chat may call, or None.
        suffix: The text after a completion.
    """

    request_id: str
    tokenizer: PreTrainedTokenizerBase
    model: Any
    texts: TokenTexts
    params: SamplingParams
    token_ids: list[int]
    tools: Any = None
    suffix: str = ""


class Choice(ABC):
    """One sample. It is asked for its parts, output by output, or once for the whole."""

    def __init__(self, asking: Asking, index: int) -> None:
        """Take the request, and the index of the sample."""
        self._asking = asking
        self._index = index

    def start(self) -> list[dict[str, Any]]:
        """Return the choices of the chunks before the first output."""
        return []

    @abstractmethod
    def parts(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the chunks that an output adds; the last one of the last output has its reason."""

    @abstractmethod
    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the choice of an answer in one, from the only output that this sample is asked with."""


class TextChoice(Choice):
    """A choice of ``/v1/completions``."""

    _offset = 0

    def parts(self, output: RequestOutput) -> list[dict[str, Any]]:
        """As for the base class."""
        is_last = output.finish_reason is not None
        text = output.new_text + (self._asking.suffix if is_last else "")
        found = self._logprobs(output)
        return [self._choice(text, found, output.finish_reason)] if text or found or is_last else []

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """As for the base class."""
        return self._choice(output.text + self._asking.suffix, self._logprobs(output), output.finish_reason)

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        asking = self._asking
        if not asking.params.logprobs:
            return None
        found = logprobs.of_text(asking.texts, output, self._offset, with_top=asking.params.top_logprobs > 0)
        self._offset += sum(map(len, found["tokens"]))
        return found

    def _choice(self, text: str, found: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": found, "finish_reason": reason}


class ChatChoice(Choice):
    """A choice of ``/v1/chat/completions``. Reasoning and tool calls are parsed as transformers does it."""

    def __init__(self, asking: Asking, index: int) -> None:
        """As for the base class."""
        super().__init__(asking, index)
        self._parser: Any = None
        self._raw: Any = None
        self._num_calls = 0

    def start(self) -> list[dict[str, Any]]:
        """As for the base class."""
        asking = self._asking
        self._parser = build_response_parser(asking.tokenizer, asking.model, asking.token_ids, tools=asking.tools)
        chunks = [self._chunk({"role": "assistant", "content": ""})]
        if self._parser is not None:
            # A parser reads the special tokens, which the engine's text leaves out.
            self._raw = DecodeStream([], skip_special_tokens=False)
            chunks += map(self._chunk, self._deltas(self._parser.initial_events))
        return chunks

    def parts(self, output: RequestOutput) -> list[dict[str, Any]]:
        """As for the base class."""
        deltas = self._new_deltas(output)
        found = self._logprobs(output) if output.new_token_ids else None
        if found is not None and not deltas:
            deltas = [{"content": ""}]
        chunks = list(map(self._chunk, deltas))
        if found is not None:
            chunks[0]["logprobs"] = found
        if output.finish_reason is not None:
            chunks.append({**self._chunk({}), "finish_reason": self._reason(output)})
        return chunks

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """As for the base class."""
        asking = self._asking
        content, reasoning, calls = parse_assistant_message(
            asking.tokenizer,
            asking.model,
            list(output.token_ids),
            input_ids=asking.token_ids,
            cleaned_content=output.text,
            tools=asking.tools,
        )
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = list(map(self._call, calls))
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._reason(output),
        }

    def _new_deltas(self, output: RequestOutput) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": output.new_text}] if output.new_text else []
        tokenizer: Any = self._asking.tokenizer
        text = "".join(self._raw.step(tokenizer.backend_tokenizer, each) or "" for each in output.new_token_ids)
        events = list(self._parser.feed(text)) if text else []
        if output.finish_reason is not None:
            with suppress(ValueError, RuntimeError):  # the text ended within a structured part
                events += self._parser.finalize()[1]
        return self._deltas(events)

    def _deltas(self, events: Iterable[Any]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for item in response_events_to_chunks(list(events)):
            if isinstance(item, ToolCall):
                deltas.append({"tool_calls": [{"index": self._num_calls, **self._call(item)}]})
            else:
                deltas.append({"reasoning_content" if isinstance(item, ReasoningText) else "content": str(item)})
        return deltas

    def _call(self, call: ToolCall) -> dict[str, Any]:
        call_id = f"{self._asking.request_id}_tool_call_{self._index}_{self._num_calls}"
        self._num_calls += 1
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _reason(self, output: RequestOutput) -> str | None:
        return "tool_calls" if self._num_calls else output.finish_reason

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        return logprobs.of_chat(self._asking.texts, output) if self._asking.params.logprobs else None

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
