"""Turns the body of a request into what it asks for: it checks every field, writes chats as text, and tokenises."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from transformers import (
    AutoTokenizer,
    LlamaConfig,  # noqa: F401  # loads what every config needs before the processes are forked, which takes seconds
)

from kvframe import Hints, SamplingParams
from kvframe.contract import RequestError, shown
from kvframe_serve.answers import find_format
from kvframe_serve.reading.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    Message,
    ResponseFormat,
    SampledBody,
    TokenizeBody,
    Tool,
)
from kvframe_serve.reading.chat import ChatWriter, template_of
from kvframe_serve.reading.fields import read_fields
from kvframe_serve.reading.question import EmbeddingQuestion, Parsing, Question, ServedModel

UNKNOWN_MODEL = "model_not_found"
"""The code of the error for another model's name."""

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
)
"""Fields that are parameters of the engine, with the same names and meanings."""

_LOGGED = ("user", "prompt_cache_key", "safety_identifier")
_MOST_MARKS = 4
"""The most messages of a chat with ``cache_control``: the chat is written once more for each."""

_COMPLETION_TOKENS = 16
"""The generated tokens of a completion without a length, as in OpenAI's interface."""


class Reader:
    """Reads bodies for one model."""

    def __init__(self, served: ServedModel) -> None:
        """Load the model's tokenizer."""
        self._served = served
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            served.path, local_files_only=True, trust_remote_code=False
        )
        self._chat = ChatWriter(self._tokenizer)
        self._format = find_format(template_of(self._tokenizer), served.answers)
        # No token has more bytes of text than its own name, except unknown ones, which may stand for any.
        longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        self._most_bytes = max(longest * served.max_model_len, 4096)

    def completion(self, body: bytes) -> Question:
        """Read the body of a completion.

        Raises:
            RequestError: It is wrong.
        """
        fields = read_fields(CompletionBody, body)
        self._check_model(fields)
        only_echo = fields.max_tokens == 0 and bool(fields.echo)
        length = 1 if only_echo else fields.max_tokens
        logprobs: dict[str, Any] = {}
        if fields.logprobs is not None:
            logprobs = {"logprobs": True, "top_logprobs": fields.logprobs, "prompt_logprobs": bool(fields.echo)}
        prompts = [self._tokens(prompt, fields.add_special_tokens is not False) for prompt in _each(fields.prompt)]
        params = self._params(fields, length, prompts, logprobs, _COMPLETION_TOKENS)
        echo = None
        if fields.echo:
            echo = tuple(
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=True)
                for prompt in _each(fields.prompt)
            )
        boundaries = tuple(fields.cache_boundaries or ())
        return self._question(fields, prompts, params, echo=echo, only_echo=only_echo, boundaries=boundaries)

    def chat(self, body: bytes) -> Question:
        """Read the body of a chat.

        Raises:
            RequestError: It is wrong.
        """
        fields = read_fields(ChatBody, body)
        self._check_model(fields)
        if fields.top_logprobs is not None and fields.logprobs is not True:
            raise RequestError("top_logprobs is given without logprobs: true", code="bad_params")
        lengths = {value for value in (fields.max_tokens, fields.max_completion_tokens) if value is not None}
        if len(lengths) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ; give one of them", code="bad_params")
        tools = fields.tools if fields.tools and fields.tool_choice != "none" else None
        options = dict(fields.chat_template_kwargs or {})
        if fields.reasoning_effort is not None:
            options["reasoning_effort"] = fields.reasoning_effort
        text = self._text_of(fields.messages, tools, options)
        prompts = [self._tokens(text, add_special_tokens=False)]
        logprobs = {"logprobs": bool(fields.logprobs), "top_logprobs": fields.top_logprobs or 0}
        params = self._params(fields, next(iter(lengths), None), prompts, logprobs, None)
        parsing = None
        if tools is not None or fields.include_reasoning:
            if self._format is None:
                raise RequestError(
                    "no format of answers is known for the model's chat template, so neither reasoning nor tool calls "
                    "can be parsed; name one as answers in the stack's [plugin.serve]",
                    code="no_answer_format",
                )
            if tools is not None and not self._format.has_calls:
                raise RequestError(
                    "the format of answers of the model's chat template has no tool calls; leave tools out, or name a "
                    "format as answers in the stack's [plugin.serve]",
                    code="no_answer_format",
                )
            parsing = Parsing(
                reasoning=bool(fields.include_reasoning),
                tools=None if tools is None else {tool.function.name: tool.function.parameters or {} for tool in tools},
                in_reasoning=self._format.opens_reasoning(text),
            )
        boundaries = self._boundaries(fields.messages, tools, options, prompts[0])
        return self._question(fields, prompts, params, parsing=parsing, boundaries=boundaries)

    def embedding(self, body: bytes) -> EmbeddingQuestion:
        """Read the body of a request for embeddings.

        Raises:
            RequestError: It is wrong.
        """
        fields = read_fields(EmbeddingBody, body)
        self._check_model(fields)
        prompts = tuple(self._tokens(prompt, add_special_tokens=True) for prompt in _each(fields.input))
        self._check_count(len(prompts))
        return EmbeddingQuestion(
            prompts=prompts,
            as_base64=fields.encoding_format == "base64",
            cache_salt=fields.cache_salt or "",
            hints=_hints(fields),
            logged=_logged(fields),
        )

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Answer with the tokens of a text or a chat.

        Raises:
            RequestError: The body is wrong.
        """
        fields = read_fields(TokenizeBody, body)
        self._check_model(fields)
        if (fields.prompt is None) == (fields.messages is None):
            raise RequestError("give a prompt or messages, one of them", code="bad_params")
        if fields.messages is None:
            field_names = [name for name in ("tools", "chat_template_kwargs") if getattr(fields, name) is not None]
            if field_names:
                raise RequestError(f"{field_names[0]} is for messages", code="bad_params")
            tokens = self._tokens(fields.prompt or "", fields.add_special_tokens is not False)
        elif fields.add_special_tokens is not None:
            raise RequestError("add_special_tokens is for a prompt: a chat template writes its own", code="bad_params")
        else:
            text = self._text_of(fields.messages, fields.tools, fields.chat_template_kwargs)
            tokens = self._tokens(text, add_special_tokens=False)
        return {"count": len(tokens), "max_model_len": self._served.max_model_len, "tokens": tokens.tolist()}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Answer with the text of tokens.

        Raises:
            RequestError: The body is wrong.
        """
        fields = read_fields(DetokenizeBody, body)
        self._check_model(fields)
        tokens = self._checked_ids(fields.tokens)
        # A model may have more tokens than its tokenizer has texts for.
        limit = max(len(self._tokenizer), self._served.vocab_size)
        if tokens and max(tokens) >= limit:
            raise RequestError(f"{max(tokens)} is not a token id; the model has [0, {limit})", code="bad_token")
        return {"prompt": self._tokenizer.decode(tokens, skip_special_tokens=bool(fields.skip_special_tokens))}

    # --- parts of bodies ----------------------------------------------------------------------------------------------

    def _check_model(self, fields: Body) -> None:
        if fields.model not in (None, self._served.name):
            raise RequestError(
                f"there is no model {shown(fields.model)}; this server serves {self._served.name!r}",
                code=UNKNOWN_MODEL,
            )

    def _text_of(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, options: Mapping[str, Any] | None
    ) -> str:
        """Return a chat as text; one of more messages than the context has tokens is refused before it is written."""
        if len(messages) > self._served.max_model_len:
            raise RequestError(
                f"the chat has {len(messages):,} messages, and the model's context {self._served.max_model_len:,} "
                "tokens",
                code="prompt_too_long",
            )
        return self._chat.write(messages, tools, options)

    def _boundaries(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Mapping[str, Any],
        token_ids: array[int],
    ) -> tuple[int, ...]:
        """Return how many tokens of a chat are common to all chats that begin with it up to each marked message."""
        marked = [index for index, message in enumerate(messages) if message.cache_control is not None]
        if len(marked) > _MOST_MARKS:
            raise RequestError(
                f"{len(marked)} messages have cache_control, and {_MOST_MARKS} may have it", code="bad_params"
            )
        found = set()
        for index in marked:
            text = self._text_of(messages[: index + 1], tools, options)
            pairs = zip(token_ids, self._tokens(text, add_special_tokens=False), strict=False)
            found.add(next((place for place, (one, other) in enumerate(pairs) if one != other), len(token_ids)))
        return tuple(sorted(found - {0}))

    def _tokens(self, prompt: str | Sequence[int], add_special_tokens: bool) -> array[int]:
        """Return the tokens of a prompt, which may be far too long for the tokenizer."""
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token", code="empty_prompt")
        if not isinstance(prompt, str):
            return self._checked_ids(prompt)
        num_bytes = len(prompt.encode())
        if num_bytes > self._most_bytes:
            raise RequestError(
                f"the prompt has {num_bytes:,} bytes, and this server reads at most {self._most_bytes:,}: the model's "
                f"context has {self._served.max_model_len:,} tokens",
                code="prompt_too_long",
            )
        return array("I", self._tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])

    def _checked_ids(self, token_ids: Sequence[int]) -> array[int]:
        try:
            return array("I", token_ids)
        except OverflowError:
            wrong = next(token for token in token_ids if not 0 <= token < 1 << 32)
            raise RequestError(f"{shown(wrong)} is not a token id", code="bad_token") from None

    def _check_count(self, num_samples: int) -> None:
        max_samples = self._served.max_samples
        if not 1 <= num_samples <= max_samples:
            raise RequestError(
                f"a request has 1 to {max_samples} prompts and samples of them, and this one has {num_samples}; send "
                "several requests",
                code="bad_params",
            )

    def _params(
        self,
        fields: SampledBody,
        length: int | None,
        prompts: Sequence[array[int]],
        logprobs: Mapping[str, Any],
        default_length: int | None,
    ) -> SamplingParams:
        """Return the sampling parameters of a body.

        Args:
            fields: The body.
            length: The most generated tokens that it names, or None.
            prompts: Its prompts.
            logprobs: Which log-probabilities it asks for.
            default_length: The most generated tokens without a length; None for what the context leaves.
        """
        limits = self._served
        names = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
        if fields.top_k is not None:
            names["top_k"] = max(fields.top_k, 0) if fields.top_k >= -1 else fields.top_k
        if fields.min_tokens is not None:
            names["min_new_tokens"] = fields.min_tokens
        if fields.logit_bias is not None:
            names["logit_bias"] = _by_token(fields.logit_bias)
        longest = max(map(len, prompts), default=0)
        num_left = limits.max_model_len - longest
        if length is None:
            default = limits.defaults.get("max_new_tokens", default_length)
            fitting = min(num_left, limits.most_tokens - longest)
            names["max_new_tokens"] = max(1, min(fitting, limits.max_new_tokens, default or fitting))
        else:
            names["max_new_tokens"] = length
        if (form := fields.response_format) is not None and (processor := _guided_by(form)):
            names["processors"] = {"guided": processor}
        if fields.skip_special_tokens is False:
            names["special_tokens"] = True
        try:
            params = SamplingParams(**{**limits.defaults, **names, **logprobs})
        except RequestError as error:
            # The client knows its own fields, not the engine's.
            message = str(error).replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
            if "prompt_logprobs" in logprobs:
                message = message.replace("top_logprobs", "logprobs")
            raise RequestError(message, code=error.code) from error
        if params.max_new_tokens > limits.max_new_tokens:
            raise RequestError(
                f"max_tokens = {params.max_new_tokens} is more than this server generates, {limits.max_new_tokens}",
                code="bad_params",
            )
        if length is not None and 0 < num_left < length:
            raise RequestError(
                f"the prompt has {longest} tokens and max_tokens is {length}, but the model's context has "
                f"{limits.max_model_len}; ask for at most {num_left} tokens",
                code="too_many_tokens",
            )
        self._check_count(len(prompts) * params.n)
        self._check_logprobs(params, sum(map(len, prompts)), len(prompts))
        return params

    def _check_logprobs(self, params: SamplingParams, num_prompt_tokens: int, num_prompts: int) -> None:
        """Refuse an answer with so many log-probabilities that it would fill the memory."""
        if not params.logprobs:
            return
        num_tokens = num_prompts * params.n * params.max_new_tokens
        num_tokens += num_prompt_tokens * params.n if params.prompt_logprobs else 0
        count = num_tokens * (1 + params.top_logprobs)
        if count > self._served.max_logprobs:
            raise RequestError(
                f"the answer could hold {count:,} log-probabilities, and holds at most "
                f"{self._served.max_logprobs:,}; ask for fewer tokens, samples or likeliest tokens",
                code="bad_params",
            )

    def _question(
        self, fields: SampledBody, prompts: Sequence[array[int]], params: SamplingParams, **more: Any
    ) -> Question:
        options = fields.stream_options
        if options is not None and not fields.stream:
            raise RequestError("stream_options is given without stream: true", code="bad_params")
        if more.get("parsing") is not None:
            # The marks of reasoning and of tool calls are special tokens in many models.
            params = attrs.evolve(params, special_tokens=True)
        return Question(
            prompts=tuple(prompts),
            params=params,
            stream=bool(fields.stream),
            with_usage=options is not None and bool(options.include_usage),
            cache_salt=fields.cache_salt or "",
            hints=_hints(fields),
            with_cached=bool(fields.include_cached),
            logged=_logged(fields),
            **more,
        )


def _each(prompts: Any) -> Sequence[str | Sequence[int]]:
    """Return the prompts of a field that holds one or several."""
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
        return [prompts]
    several: Sequence[str | Sequence[int]] = prompts
    return several


def _by_token(biases: Mapping[str, float]) -> dict[int | str, float]:
    """Return biases by token id, as the keys of a JSON object are texts; a key that is no number stays a text."""
    return {int(token) if token.isdecimal() and len(token) < 20 else token: bias for token, bias in biases.items()}


def _guided_by(form: ResponseFormat) -> dict[str, Any]:
    """Return the options of the logits processor for a form; empty for any text."""
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise RequestError(
            "response_format.json_schema goes with the type 'json_schema', and is needed there", code="bad_params"
        )
    if form.json_schema is not None:
        return {"json_schema": form.json_schema.schema_}
    return {"json_object": True} if form.type == "json_object" else {}


def _hints(fields: SampledBody | EmbeddingBody) -> dict[str, Any]:
    """Return the hints of a body, by name.

    Raises:
        RequestError: A hint is wrong (``bad_hints``).
    """
    names = [field.name for field in attrs.fields(Hints)]
    hints = {name: value for name in names if (value := getattr(fields, name)) is not None}
    Hints(**hints)
    return hints


def _logged(fields: Body) -> dict[str, str]:
    return {name: value for name in _LOGGED if (value := getattr(fields, name, None)) is not None}
