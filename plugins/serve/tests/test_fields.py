"""Every field of every body is served or refused by its name: each has a case here that shows what it does."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kvframe_serve.reading import bodies
from kvframe_serve.reading.fields import Fields, accepted_values
from kvframe_serve.reading.question import Question, ServedModel
from kvframe_serve.reading.reader import Reader
from kvframe_transformers.testing import save_tiny

from kvframe import Embedder, Engine, Hints, SamplingParams
from kvframe.contract import RequestError
from plugins.serve.tests.conftest import STACK, Running
from plugins.serve.tests.scripted import save_scripted
from plugins.serve.tests.test_chats import CHATML
from plugins.serve.tests.test_server import post

Serve = Callable[..., Running]
HELLO: list[Any] = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TEMPLATE = (
    CHATML + "{{ reasoning_effort }}{{ message_of }}{% for m in messages %}{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
)


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Return a reader of bodies for a model whose template reads everything."""
    folder = save_scripted(
        tmp_path_factory.mktemp("read") / "m", "bc", template=TEMPLATE, special=("<|im_start|>", "<|im_end|>")
    )
    return Reader(
        ServedModel(
            path=str(folder),
            name="m",
            max_model_len=512,
            most_tokens=400,
            generates=True,
            defaults={},
            max_new_tokens=300,
            max_samples=16,
            max_logprobs=1 << 20,
        )
    )


def completion(reader: Reader, **fields: Any) -> Question:
    return reader.completion(json.dumps({"prompt": "ab", **fields}).encode())


def chat(reader: Reader, **fields: Any) -> Question:
    return reader.chat(json.dumps({"messages": HELLO, **fields}).encode())


def message(reader: Reader, **fields: Any) -> str:
    """Return a chat of one message as it is written."""
    body = {"messages": [{"role": "assistant", **fields}]}
    tokens = reader.tokenize(json.dumps(body).encode())["tokens"]
    return str(reader.detokenize(json.dumps({"tokens": tokens}).encode())["prompt"])


SAMPLED: dict[str, tuple[Any, Callable[[Question], Any], Any]] = {
    "model": ("m", lambda question: question.num_samples, 1),
    "n": (3, lambda question: question.params.n, 3),
    "temperature": (0.5, lambda question: question.params.temperature, 0.5),
    "top_p": (0.5, lambda question: question.params.top_p, 0.5),
    "top_k": (5, lambda question: question.params.top_k, 5),
    "min_p": (0.5, lambda question: question.params.min_p, 0.5),
    "frequency_penalty": (0.5, lambda question: question.params.frequency_penalty, 0.5),
    "presence_penalty": (-1, lambda question: question.params.presence_penalty, -1.0),
    "repetition_penalty": (1.5, lambda question: question.params.repetition_penalty, 1.5),
    "logit_bias": ({"3": -100, "4": 1.5}, lambda question: question.params.logit_bias, {3: -100.0, 4: 1.5}),
    "min_tokens": (5, lambda question: question.params.min_new_tokens, 5),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}, "strict": True}},
        lambda question: question.params.processors,
        {"guided": {"json_schema": {"type": "array"}}},
    ),
    "seed": (5, lambda question: question.params.seed, 5),
    "stop": (["a", "b"], lambda question: question.params.stop, ("a", "b")),
    "stop_token_ids": ([3], lambda question: question.params.stop_token_ids, frozenset({3})),
    "ignore_eos": (True, lambda question: question.params.ignore_eos, True),
    "skip_special_tokens": (False, lambda question: question.params.special_tokens, True),
    "stream": (True, lambda question: question.stream, True),
    "cache_salt": ("s", lambda question: question.cache_salt, "s"),
    "user": ("anna", lambda question: dict(question.logged), {"user": "anna"}),
    "priority": (-3, lambda question: dict(question.hints), {"priority": -3}),
    "keep_seconds": (0, lambda question: dict(question.hints), {"keep_seconds": 0}),
    "session_id": ("chat", lambda question: dict(question.hints), {"session_id": "chat"}),
    "include_cached": (True, lambda question: question.with_cached, True),
    "max_tokens": (7, lambda question: question.params.max_new_tokens, 7),
}
"""For each field that both bodies have: a value, what it changes, and to what."""

COMPLETION: dict[str, tuple[Any, Callable[[Question], Any], Any]] = {
    **SAMPLED,
    "prompt": (["ab", "c"], lambda question: [len(prompt) for prompt in question.prompts], [2, 1]),
    "echo": (True, lambda question: question.echo, ("ab",)),
    "cache_boundaries": ([1, 2], lambda question: question.boundaries, (1, 2)),
    "logprobs": (2, lambda question: (question.params.logprobs, question.params.top_logprobs), (True, 2)),
}
CHAT: dict[str, tuple[Any, Callable[[Question], Any], Any]] = {
    **SAMPLED,
    "messages": (HELLO * 2, lambda question: len(question.prompts[0]), 29),
    "max_completion_tokens": (7, lambda question: question.params.max_new_tokens, 7),
    "logprobs": (True, lambda question: question.params.logprobs, True),
    "tools": ([TOOL], lambda question: question.parsing and question.parsing.tools, {"f": {}}),
    "include_reasoning": (True, lambda question: question.parsing and question.parsing.reasoning, True),
    "prompt_cache_key": ("k", lambda question: dict(question.logged), {"prompt_cache_key": "k"}),
    "safety_identifier": ("k", lambda question: dict(question.logged), {"safety_identifier": "k"}),
}
MORE = {
    "stream_options": "with stream",
    "top_logprobs": "with logprobs",
    "tool_choice": "with tools",
    "reasoning_effort": "in the text",
    "chat_template_kwargs": "in the text",
    "add_special_tokens": "in the tokens",
}
"""Fields that have a test of their own."""


def served(kind: type[Fields]) -> set[str]:
    return {name for name in kind.model_fields if accepted_values(kind, name) is None}


def test_every_served_field_has_a_case() -> None:
    assert served(bodies.CompletionBody) == set(COMPLETION) | {"stream_options", "add_special_tokens"}
    assert served(bodies.ChatBody) == set(CHAT) | set(MORE) - {"add_special_tokens"}
    assert served(bodies.Message) == {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "cache_control",
    }
    of_texts = {"model", "input", "encoding_format", "cache_salt", "user"}
    assert served(bodies.EmbeddingBody) == of_texts | {"priority", "keep_seconds", "session_id"}
    assert served(bodies.TokenizeBody) == {
        "model",
        "prompt",
        "messages",
        "tools",
        "chat_template_kwargs",
        "add_special_tokens",
    }
    assert served(bodies.DetokenizeBody) == {"model", "tokens", "skip_special_tokens"}


@pytest.mark.parametrize("name", COMPLETION)
def test_a_field_of_a_completion_does_what_it_says(reader: Reader, name: str) -> None:
    value, read, expected = COMPLETION[name]
    assert expected == read(completion(reader, **{name: value}))
    if name not in ("model", "prompt"):
        assert expected != read(completion(reader))


@pytest.mark.parametrize("name", CHAT)
def test_a_field_of_a_chat_does_what_it_says(reader: Reader, name: str) -> None:
    value, read, expected = CHAT[name]
    assert expected == read(chat(reader, **{name: value}))
    if name != "model":
        assert expected != read(chat(reader))


def test_fields_that_go_together(reader: Reader) -> None:
    assert completion(reader, stream=True, stream_options={"include_usage": True}).with_usage
    assert not completion(reader, stream=True, stream_options={"include_usage": False}).with_usage
    assert 4 == chat(reader, logprobs=True, top_logprobs=4).params.top_logprobs
    assert 0 == chat(reader, top_k=-1).params.top_k
    assert {} == chat(reader, response_format={"type": "text"}).params.processors
    assert {"guided": {"json_object": True}} == chat(reader, response_format={"type": "json_object"}).params.processors
    assert chat(reader, tools=[TOOL], tool_choice="none").parsing is None
    assert len(chat(reader).prompts[0]) == len(chat(reader, tools=[TOOL], tool_choice="none").prompts[0])
    plain = len(chat(reader).prompts[0])
    assert [4, 3] == [
        len(chat(reader, **fields).prompts[0]) - plain
        for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"message_of": "day"}})
    ]


def test_the_fields_of_a_message_reach_the_template(reader: Reader) -> None:
    prompt = message(
        reader,
        content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        name="anna",
        tool_calls=[CALL],
        tool_call_id="8",
        reasoning_content="hm",
    )
    assert prompt.startswith("<|im_start|>assistant\none\ntwo<tool_call>\n")
    for part in ('{"name": "f", "arguments": {"a": 1}}', "<think>hm</think>", "anna", "8"):
        assert part in prompt


def test_a_mark_in_a_chat_says_what_other_chats_begin_with(reader: Reader) -> None:
    def marked(*contents: str, mark: int = 0) -> Question:
        messages: list[dict[str, Any]] = [{"role": "user", "content": content} for content in contents]
        messages[mark]["cache_control"] = {"type": "ephemeral"}
        return chat(reader, messages=messages)

    question, other = marked("system", "q"), marked("system", "another")
    (boundary,) = question.boundaries
    assert question.boundaries == other.boundaries
    assert question.prompts[0][:boundary] == other.prompts[0][:boundary]
    assert boundary > len(chat(reader, messages=[{"role": "user", "content": ""}]).prompts[0]) / 2
    assert marked("a", "b", mark=1).boundaries[0] > marked("a", "b").boundaries[0]
    with pytest.raises(RequestError, match="5 messages have cache_control, and 4 may have it"):
        chat(reader, messages=[{**HELLO[0], "cache_control": {"type": "ephemeral"}}] * 5)
    with pytest.raises(RequestError, match="type must be 'ephemeral'"):
        chat(reader, messages=[{**HELLO[0], "cache_control": {"type": "for ever"}}])


def test_wrong_hints_are_refused_by_their_names(reader: Reader) -> None:
    for fields, why in (
        ({"priority": 2**40}, "priority must be a whole number from"),
        ({"keep_seconds": -1}, "keep_seconds must be a number of seconds, at least 0, or None, not -1"),
    ):
        with pytest.raises(RequestError, match=why) as refusal:
            completion(reader, **fields)
        assert "bad_hints" == refusal.value.code
    with pytest.raises(RequestError, match="priority must be a valid integer"):
        completion(reader, priority="high")


def refused_value(accepted: list[Any]) -> Any:
    return next(value for value in ("other", 17, True) if value not in accepted)


def refused_fields() -> Iterator[tuple[str, type[Fields], str]]:
    for reading, kind in (
        ("completion", bodies.CompletionBody),
        ("chat", bodies.ChatBody),
        ("embedding", bodies.EmbeddingBody),
    ):
        for name in sorted(set(kind.model_fields) - served(kind)):
            yield reading, kind, name


NEEDED = {"completion": {"prompt": "a"}, "chat": {"messages": HELLO}, "embedding": {"input": "a"}}


@pytest.mark.parametrize(("reading", "kind", "name"), [*refused_fields()])
def test_a_field_that_is_not_served_is_refused_unless_it_changes_nothing(
    reader: Reader, reading: str, kind: type[Fields], name: str
) -> None:
    accepted = accepted_values(kind, name) or []
    read = getattr(reader, reading)
    without = read(json.dumps(NEEDED[reading]).encode())
    for value in accepted:
        assert without == read(json.dumps({**NEEDED[reading], name: value}).encode())
    wrong = refused_value(accepted)
    with pytest.raises(RequestError, match=re.escape(f"{name} = {wrong!r} is not served; leave it out")):
        read(json.dumps({**NEEDED[reading], name: wrong}).encode())


@pytest.mark.parametrize("reading", ["completion", "chat", "embedding", "tokenize", "detokenize"])
def test_an_unknown_field_is_refused(reader: Reader, reading: str) -> None:
    body = {**NEEDED, "tokenize": {"prompt": "a"}, "detokenize": {"tokens": [1]}}[reading]
    getattr(reader, reading)(json.dumps(body).encode())
    with pytest.raises(RequestError, match="the field 'weight' is unknown"):
        getattr(reader, reading)(json.dumps({**body, "weight": 1}).encode())


def test_a_chat_without_a_length_gets_what_the_context_and_the_cache_leave(reader: Reader) -> None:
    assert 300 == chat(reader).params.max_new_tokens
    assert 16 == completion(reader).params.max_new_tokens
    prompt = "x" * 200
    assert 400 - len(chat(reader, messages=[{"role": "user", "content": prompt}]).prompts[0]) == (
        chat(reader, messages=[{"role": "user", "content": prompt}]).params.max_new_tokens
    )


def test_tokens_and_text_of_a_text_and_a_chat(serve: Serve, checkpoint: Path) -> None:
    running = serve()
    status, answer = post(running, "/tokenize", b'{"prompt": "ab"}')
    assert (200, 2, 512) == (status, answer["count"], answer["max_model_len"])
    assert (200, {"prompt": "ab"}) == post(running, "/detokenize", json.dumps({"tokens": answer["tokens"]}).encode())
    chatted = post(
        running, "/tokenize", json.dumps({"messages": HELLO, "chat_template_kwargs": {"loud": True}}).encode()
    )
    text = post(running, "/detokenize", json.dumps({"tokens": chatted[1]["tokens"]}).encode())[1]["prompt"]
    assert "u:x;a:!" == text
    for wrong, expected_message in (
        ({}, "give a prompt or messages"),
        ({"prompt": "a", "messages": HELLO}, "give a prompt or messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools is for messages"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens is for a prompt"),
    ):
        status, answer = post(running, "/tokenize", json.dumps(wrong).encode())
        assert (400, True) == (status, expected_message in answer["error"]["message"]), answer


def test_tokens_that_the_model_does_not_have_are_refused_and_not_left_out(serve: Serve) -> None:
    running = serve()
    for wrong in (10**6, 2**31, -1, 2**40):
        status, answer = post(running, "/detokenize", json.dumps({"tokens": [1, wrong]}).encode())
        assert (400, True) == (status, f"{wrong} is not a token id" in answer["error"]["message"]), answer
    assert (200, {"prompt": ""}) == post(running, "/detokenize", b'{"tokens": []}')


def test_prompts_in_lists_are_answered_in_their_order(client: openai.OpenAI, checkpoint: Path) -> None:
    prompts = ["ab", "cde", "f"]
    with Engine.from_pretrained(checkpoint, stack=STACK) as engine:
        params = SamplingParams(n=2, temperature=1, seed=3, max_new_tokens=6)
        texts = [output.text for output in engine.generate(prompts, params)]
    fields: dict[str, Any] = {"model": "tiny", "n": 2, "temperature": 1, "seed": 3, "max_tokens": 6}
    answer = client.completions.create(prompt=prompts, **fields)
    assert [(index, text) for index, text in enumerate(texts)] == [
        (choice.index, choice.text) for choice in answer.choices
    ]
    assert answer.usage is not None
    assert (6, 36) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    ids = [post_tokens(client, prompt) for prompt in prompts]
    assert texts == [choice.text for choice in client.completions.create(prompt=ids, **fields).choices]
    assert texts[:2] == [choice.text for choice in client.completions.create(prompt=ids[0], **fields).choices]
    parts = [part.choices[0] for part in client.completions.create(prompt=prompts, stream=True, **fields)]
    assert texts == ["".join(part.text for part in parts if part.index == index) for index in range(6)]


def post_tokens(client: Any, prompt: str) -> Any:
    return client.post("/../tokenize", body={"prompt": prompt}, cast_to=object)["tokens"]


def test_an_echo_has_the_prompt_and_its_log_probabilities(client: openai.OpenAI, checkpoint: Path) -> None:
    with Engine.from_pretrained(checkpoint, stack=STACK) as engine:
        params = SamplingParams(max_new_tokens=3, logprobs=True, top_logprobs=2, prompt_logprobs=True)
        (output,) = engine.generate(["hello"], params)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    expected = [*output.prompt_logprobs, *output.logprobs]
    for prompt in ("hello", post_tokens(client, "hello")):
        fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
        choice = client.completions.create(**fields).choices[0]
        logprobs = choice.logprobs
        assert ("hello" + output.text, expected) == (choice.text, logprobs.token_logprobs)
        assert [*"hello"] == logprobs.tokens[:5]
        assert (None, 2, True) == (
            logprobs.top_logprobs[0],
            min(len(top) for top in logprobs.top_logprobs[1:]),
            all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True)),
        )
        assert [0, 1, 2, 3, 4, 5, 6, 7] == logprobs.text_offset
        parts = [part.choices[0] for part in client.completions.create(stream=True, **fields)]
        assert choice.text == "".join(part.text for part in parts)
        assert expected == [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
    only = client.completions.create(**{**fields, "max_tokens": 0})
    assert ("hello", list(output.prompt_logprobs), 0) == (
        only.choices[0].text,
        only.choices[0].logprobs.token_logprobs,
        only.usage.completion_tokens,
    )


def test_cached_tokens_are_counted(serve: Serve) -> None:
    client = serve().client()
    prompt = "a prompt of several blocks, which is found again " * 3

    def cached() -> int:
        usage: Any = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert [0, 144] == [cached(), cached()]


def test_an_answer_says_where_cached_tokens_came_from(serve: Serve) -> None:
    client = serve().client()

    def cached(**more: Any) -> list[Any]:
        answer: Any = client.completions.create(
            model="tiny", prompt=["a prompt of several blocks, " * 3, "b" * 40], max_tokens=1, extra_body=more
        )
        return getattr(answer.usage.prompt_tokens_details, "cached", [])

    assert [] == cached()
    first, second = cached(include_cached=True)
    assert (80, 80, 0, []) == tuple(
        first[name] for name in ("cached_tokens", "device_tokens", "restored_tokens", "restored_from")
    )
    assert (32, 32, "") == (second["cached_tokens"], second["known_tokens"], second["why"])
    assert 80 == cached(include_cached=True, cache_boundaries=[16, 17])[0]["cached_tokens"]
    with pytest.raises(openai.BadRequestError, match="whole numbers from 1 to its number of tokens"):
        cached(cache_boundaries=[999])


def test_models_are_named(client: openai.OpenAI) -> None:
    assert ["tiny"] == [model.id for model in client.models.list()]
    assert "tiny" == client.models.retrieve("tiny").id
    with pytest.raises(Exception, match="there is no model 'other'; this server serves 'tiny'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_embeddings_are_those_of_the_embedder(
    serve: Serve, checkpoint: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "llama":
        folder, task = checkpoint, "embed"
    else:
        folder, task = tmp_path / "bert", None
        for file in checkpoint.iterdir():
            if "token" in file.name:
                folder.mkdir(exist_ok=True)
                (folder / file.name).write_bytes(file.read_bytes())
        save_tiny(folder, family, vocab_size=256)
    running = serve(path=folder, task=task)
    client, add, added_hints = running.client(), running.server.engine.add_request, []
    texts = ["one text", "another"]
    with Embedder.from_pretrained(folder, stack=STACK) as embedder:
        expected = [output.embedding for output in embedder.embed(texts)]
    answer = client.embeddings.create(model=folder.name, input=texts, encoding_format="float")
    # The server may compute them in two steps, whose sums are in another order.
    for vector, item in zip(expected, answer.data, strict=True):
        assert vector is not None
        assert list(vector) == pytest.approx(item.embedding, abs=1e-5)
    assert (15, 15) == (answer.usage.prompt_tokens, answer.usage.total_tokens)
    single = client.embeddings.create(model=folder.name, input=post_tokens(client, texts[0]))
    assert [pytest.approx(list(expected[0] or ()), rel=1e-6)] == [item.embedding for item in single.data]

    def watched(*text: Any, hints: Hints, **options: Any) -> Any:
        added_hints.append(hints)
        return add(*text, hints=hints, **options)

    monkeypatch.setattr(running.server.engine, "add_request", watched)
    raw: Any = client.post(
        "/embeddings",
        body={"input": texts[0], "encoding_format": "base64", "user": "u", "cache_salt": "s", "priority": 1},
        cast_to=object,
    )
    assert [Hints(priority=1)] == added_hints
    data = base64.b64decode(raw["data"][0]["embedding"])
    assert pytest.approx(list(expected[0] or ()), rel=1e-6) == list(struct.unpack(f"<{len(data) // 4}f", data))
    with pytest.raises(Exception, match="this server makes embeddings; start one with `kvframe serve --task generate`"):
        client.completions.create(model=folder.name, prompt="a")


def test_the_description_of_the_interface_has_every_field(serve: Serve) -> None:
    running = serve()
    description: Any = running.client().get("/../openapi.json", cast_to=object)
    for path, kind in (("/v1/completions", bodies.CompletionBody), ("/v1/chat/completions", bodies.ChatBody)):
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(kind.model_fields) == set(schema["properties"])
    assert {"Message", "Tool", "StreamOptions"} <= set(description["components"]["schemas"])
