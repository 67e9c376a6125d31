"""Read the body of a request: its sampling parameters. Fields that are not served are refused."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import attrs
from transformers import PreTrainedTokenizerBase

from kvframe import SamplingParams
from kvframe.contract import RequestError, shown

SALT_FIELD = "cache_salt"
"""The field of a body that names the request's cache salt."""

_OWN_FIELDS = {"top_k", "ignore_eos", SALT_FIELD}
"""Fields that OpenAI's interface does not have; its client sends them as ``extra_body``."""

_SAMPLING = {"temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "n"}
_LENGTHS = ("max_completion_tokens", "max_tokens")
_OTHER = {"model", "stream", "user", "logprobs"}
_CHAT = {"messages", "tools", "chat_template_kwargs", "top_logprobs"}
_COMPLETION = {"prompt", "suffix"}

_DEFAULTS: Mapping[str, Collection[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "store": (False,),
}
"""Fields that are accepted only with values that change nothing."""


_TEMPLATE_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "load_audio_from_video"
}
"""Arguments of the tokenizer's method that a client may not set."""


def check_body(body: Mapping[str, Any], *, is_chat: bool) -> None:
    """Refuse a body with unknown fields, or with values that are not served.

    Args:
        body: The client's JSON object.
        is_chat: Whether the body is that of a chat completion.

    Raises:
        RequestError: There is such a field (``bad_params``), or no messages or prompt (``empty_prompt``).
    """
    known = _SAMPLING | set(_LENGTHS) | _OTHER | _OWN_FIELDS | set(_DEFAULTS) | (_CHAT if is_chat else _COMPLETION)
    for name, value in body.items():
        if name not in known:
            raise RequestError(
                f"the field {shown(name)} is unknown; known are {', '.join(sorted(known))}", "bad_params"
            )
        if name in _DEFAULTS and value is not None and value not in _DEFAULTS[name]:
            raise RequestError(f"{name} = {shown(value)} is not served; leave it out", code="bad_params")
    for name in ("stream", "ignore_eos"):
        if not isinstance(body.get(name) or False, bool):
            raise RequestError(f"{name} must be true or false, not {shown(body[name])}", code="bad_params")
    if is_chat:
        _check_messages(body.get("messages"))
        _check_template_options(body.get("chat_template_kwargs"), body.get("tools"))
    elif not _is_text(body.get("prompt")):
        raise RequestError(f"prompt must be a text, not {shown(body.get('prompt'))}", code="empty_prompt")
    if not _is_text(body.get("suffix") or ""):
        raise RequestError(f"suffix must be a text, not {shown(body['suffix'])}", code="bad_params")


def _is_text(value: Any) -> bool:
    """Return whether a value is a text; JSON can hold halves of characters, which are none."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(value, str)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, not {shown(messages)}", "empty_prompt")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message is an object with a role and a content, not {shown(message)}", "bad_params")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        is_text = all(isinstance(each, dict) and each.get("type") == "text" for each in parts)
        if not isinstance(content, str | list | None) or not is_text:
            raise RequestError(f"a message's content is text, or parts of text, not {shown(content)}", "bad_params")


def _check_template_options(options: Any, tools: Any) -> None:
    is_plain = (
        all(isinstance(each, str | bool | int | float | None) for each in (options or {}).values())
        if isinstance(options, dict | None)
        else False
    )
    taken = sorted(set(options or ()) & _TEMPLATE_ARGUMENTS) if is_plain else []
    if not is_plain or taken:
        what = f"sets {taken[0]!r}" if taken else f"is {shown(options)}"
        raise RequestError(
            f"chat_template_kwargs {what}: it is an object of values for the model's chat template", code="bad_params"
        )
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise RequestError(f"tools must be a list of objects, not {shown(tools)}", code="bad_params")


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a body asks for the counts of tokens at the end of a stream."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def read_params(
    body: Mapping[str, Any], defaults: Mapping[str, Any], most_tokens: int, *, is_chat: bool
) -> SamplingParams:
    """Return the sampling parameters of a body.

    Args:
        body: A body that ``check_body`` accepted.
        defaults: The parameters that the body does not name.
        most_tokens: The most tokens that a request may generate.
        is_chat: Whether it is of a chat completion.

    Raises:
        RequestError: A parameter is wrong (``bad_params``).
    """
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    length = next((body[name] for name in _LENGTHS if body.get(name) is not None), None)
    if length is not None:
        given["max_new_tokens"] = length
    given |= _chat_logprobs(body) if is_chat else _text_logprobs(body)
    try:
        params = SamplingParams(**{**defaults, **given})
    except RequestError as error:
        # The client knows its own fields, not the engine's.
        said = str(error).replace("max_new_tokens", "max_tokens")
        raise RequestError(said if is_chat else said.replace("top_logprobs", "logprobs"), code=error.code) from error
    if length is not None and params.max_new_tokens > most_tokens:
        raise RequestError(
            f"max_tokens = {params.max_new_tokens} is more than this server generates, {most_tokens}", code="bad_params"
        )
    return attrs.evolve(params, max_new_tokens=min(params.max_new_tokens, most_tokens))


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a chat's ``logprobs``, which is true or false, and ``top_logprobs``, a number."""
    found = {name: body[name] for name in ("logprobs", "top_logprobs") if body.get(name) is not None}
    if "top_logprobs" in found and found.get("logprobs") is not True:
        raise RequestError("top_logprobs is given without logprobs: true", code="bad_params")
    return found


def _text_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a completion's ``logprobs``, which is the number of most likely tokens."""
    count = body.get("logprobs")
    if count is None or count is False:
        return {}
    return {"logprobs": True, "top_logprobs": count}
