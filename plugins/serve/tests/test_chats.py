"""Chats: the answer is what the engine generates, for every architecture and template; nothing else is in it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from plugins.serve.tests.conftest import Running
from plugins.serve.tests.scripted import save_scripted

Serve = Callable[..., Running]

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
GEMMA = (
    "{%- for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model:"
)
DEEPSEEK = (
    "{%- for message in messages %}{% if message.role == 'user' %}<\uff5cUser\uff5c>{% endif %}"
    "{% if message.role == 'assistant' %}<\uff5cAssistant\uff5c>{% endif %}{{ message.content }}"
    "{% endfor %}<\uff5cAssistant\uff5c>:"
)
MISTRAL = "{%- for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}:"
VICUNA = "{%- for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEMPLATES = {
    "qwen3": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "gemma3_text": (GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "deepseek_v3": (DEEPSEEK, ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")),
    "mistral": (MISTRAL, ("[INST]", "[/INST]")),
    "llama": (VICUNA, ()),
}
SECRET: list[Any] = [{"role": "system", "content": "SECRET"}, {"role": "user", "content": "q"}]


def both_ways(client: openai.OpenAI, **fields: Any) -> tuple[str | None, str | None]:
    """Return a chat's content and reason; a stream gives the same."""
    choice = client.chat.completions.create(model="scripted", **fields).choices[0]
    chunks = [part.choices[0] for part in client.chat.completions.create(model="scripted", stream=True, **fields)]
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    assert (choice.message.content or "", choice.finish_reason) == (streamed, chunks[-1].finish_reason)
    return choice.message.content, choice.finish_reason


@pytest.mark.parametrize(
    ("family", "template"),
    [(family, family) for family in TEMPLATES]
    + [("qwen2", "llama"), ("qwen3", "deepseek_v3"), ("gemma3_text", "qwen3")],
)
def test_the_answer_is_what_was_generated_and_holds_nothing_of_the_prompt(
    serve: Serve, tmp_path: Path, family: str, template: str
) -> None:
    text, special = TEMPLATES[template]
    folder = save_scripted(tmp_path / "scripted", "bcdfgh", template=text, family=family, special=special)
    client = serve(path=folder).client()
    assert ("bcdfgh", "stop") == both_ways(client, messages=SECRET)
    assert ("bcd", "stop") == both_ways(client, messages=SECRET, stop="fg")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "answer", [CALL, CALL[:20], "<tool_call>", "<tool_call>{]</tool_call> yes", "<think>hm</think>x"]
)
def test_without_tools_and_reasoning_the_text_is_answered_as_it_is(serve: Serve, tmp_path: Path, answer: str) -> None:
    template, special = TEMPLATES["qwen3"]
    folder = save_scripted(tmp_path / "scripted", answer, template=template, family="qwen3", special=special)
    client = serve(path=folder).client()
    assert (answer, "stop") == both_ways(client, messages=SECRET)
    content, reason = both_ways(client, messages=SECRET, max_tokens=1)
    assert (True, "length") == (answer.startswith(content or "no"), reason)


def test_a_tool_call_goes_to_the_client_and_back(serve: Serve, tmp_path: Path) -> None:
    template, special = TEMPLATES["qwen3"]
    folder = save_scripted(tmp_path / "scripted", "ok " + CALL, template=template, family="qwen3", special=special)
    running = serve(path=folder)
    client = running.client()
    fields: dict[str, Any] = {"model": "scripted", "messages": list(SECRET), "tools": TOOLS}
    choice = client.chat.completions.create(**fields).choices[0]
    assert "tool_calls" == choice.finish_reason
    call: Any = (choice.message.tool_calls or [None])[0]
    assert ("ok", "weather", '{"city": "Rome"}') == (
        (choice.message.content or "").strip(),
        call.function.name,
        call.function.arguments,
    )
    chunks = [part.choices[0] for part in client.chat.completions.create(stream=True, **fields)]
    called: Any = [call_delta for chunk in chunks for call_delta in chunk.delta.tool_calls or []]
    assert [(0, "weather", '{"city": "Rome"}')] == [
        (call_delta.index, call_delta.function.name, call_delta.function.arguments) for call_delta in called
    ]
    assert "tool_calls" == chunks[-1].finish_reason
    fields["messages"].append(choice.message.model_dump())
    fields["messages"].append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    prompt = tokens_of(running, fields["messages"], TOOLS)
    assert "<|im_start|>assistant\nok<tool_call>" in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt
    assert "tool_calls" == client.chat.completions.create(**fields).choices[0].finish_reason
    plain = client.chat.completions.create(**{**fields, "tool_choice": "none"}).choices[0]
    assert ("ok " + CALL, "stop") == (plain.message.content, plain.finish_reason)


def tokens_of(running: Running, messages: Any, tools: Any = None) -> str:
    """Return a chat as the server writes it."""
    client = running.client()
    body = {"messages": messages, **({"tools": tools} if tools else {})}
    reply: Any = client.post("/../tokenize", body=body, cast_to=object)
    text: Any = client.post("/../detokenize", body={"tokens": reply["tokens"]}, cast_to=object)
    return str(text["prompt"])


@pytest.mark.parametrize("tool_calls", [None, []])
def test_an_answer_can_be_appended_to_the_chat(serve: Serve, tmp_path: Path, tool_calls: Any) -> None:
    template, special = TEMPLATES["qwen3"]
    folder = save_scripted(tmp_path / "scripted", "bcdfgh", template=template, family="qwen3", special=special)
    running = serve(path=folder)
    reply = running.client().chat.completions.create(model="scripted", messages=SECRET).choices[0].message
    messages = [*SECRET, {**reply.model_dump(), "tool_calls": tool_calls}, {"role": "user", "content": "r"}]
    assert "<|im_start|>assistant\nbcdfgh<|im_end|>\n<|im_start|>user\nr<|im_end|>\n" in tokens_of(running, messages)
    assert ("bcdfgh", "stop") == both_ways(running.client(), messages=messages)


def test_content_beside_tool_calls_is_kept(serve: Serve, tmp_path: Path) -> None:
    template, special = TEMPLATES["qwen3"]
    folder = save_scripted(tmp_path / "scripted", "bcdfgh", template=template, family="qwen3", special=special)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "let me see", "tool_calls": [call]}]
    assert '<|im_start|>assistant\nlet me see<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>' in (
        tokens_of(serve(path=folder), messages)
    )


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_told_apart_if_the_client_asks_for_it(serve: Serve, tmp_path: Path, opened: bool) -> None:
    template, special = TEMPLATES["qwen3"]
    if opened:
        template = template.replace("assistant:", "assistant\n<think>\n")
    answer = "I count.\n</think>\n\nThree" if opened else "<think>\nI count.\n</think>\n\nThree"
    folder = save_scripted(
        tmp_path / "scripted", answer, template=template, family="qwen3", special=special, after="\n" if opened else ":"
    )
    client = serve(path=folder).client()
    assert (answer, "stop") == both_ways(client, messages=SECRET)
    fields: dict[str, Any] = {"messages": SECRET, "extra_body": {"include_reasoning": True}}
    message: Any = client.chat.completions.create(model="scripted", **fields).choices[0].message
    assert ("I count.", "Three") == (message.reasoning_content.strip(), message.content.strip())
    chunks = [part.choices[0] for part in client.chat.completions.create(model="scripted", stream=True, **fields)]
    parts: Any = [chunk.delta for chunk in chunks]
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    assert (message.reasoning_content, message.content) == (reasoning, "".join(part.content or "" for part in parts))


def test_an_end_token_is_never_in_the_text(serve: Serve, tmp_path: Path) -> None:
    template, special = TEMPLATES["qwen3"]
    folder = save_scripted(tmp_path / "scripted", "bcdfgh", template=template, family="qwen3", special=special)
    client = serve(path=folder).client()
    for extra, tools in itertools.product(
        ({}, {"include_reasoning": True}, {"skip_special_tokens": False}), (None, TOOLS)
    ):
        fields: dict[str, Any] = {"messages": SECRET, "extra_body": extra}
        assert ("bcdfgh", "stop") == both_ways(client, **fields, **({"tools": tools} if tools else {}))


def test_tools_are_refused_if_the_format_has_no_calls(serve: Serve, tmp_path: Path) -> None:
    template = "{{ tools | tojson }}<think>{{ messages[0].tool_calls }}{{ messages[-1].content }}:"
    folder = save_scripted(tmp_path / "scripted", "bc<think>d", template=template)
    client = serve(path=folder).client()
    fields: dict[str, Any] = {"model": "scripted", "messages": SECRET}
    with pytest.raises(openai.BadRequestError, match="of the model's chat template has no tool calls; leave tools out"):
        client.chat.completions.create(**fields, tools=TOOLS)
    reply: Any = client.chat.completions.create(**fields, extra_body={"include_reasoning": True}).choices[0].message
    assert "bc<think>d" == reply.content


# --- answers of a form ------------------------------------------------------------------------------------------------

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


def test_an_answer_is_of_the_schema_that_is_asked_for(serve: Serve, tmp_path: Path) -> None:
    # Alone, it answers with other characters.
    folder = save_scripted(tmp_path / "m", "bc", template=CHATML)
    client = serve(path=folder).client()
    fields: dict[str, Any] = {
        "model": "m",
        "messages": SECRET,
        "temperature": 1,
        "max_tokens": 60,
        "n": 3,
    }
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
    for choice in client.chat.completions.create(**fields, response_format=form).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or "")["age"], int)
        else:
            assert (choice.message.content or "").lstrip().startswith("{")
    for choice in client.chat.completions.create(**fields, response_format={"type": "json_object"}).choices:
        assert (choice.message.content or "").lstrip().startswith("{")
    for wrong, says in (
        ({"type": "json_schema"}, "goes with the type 'json_schema'"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": AGE}}, "goes with the type 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}, "cannot be followed"),
        ({"type": "xml"}, "must be 'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": AGE, "description": "x"}}, "is not served"),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(says)):
            client.chat.completions.create(**fields, response_format=wrong)
