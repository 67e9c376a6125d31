"""The server answers OpenAI's client as the engine would, for many clients at once, and refuses what is wrong."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
from kvframe_serve.limits import Limits
from kvframe_serve.plugin import HINT_LIMITS, NUMBERS
from kvframe_serve.request_log import LOG
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvframe import Engine, Hints, SamplingParams
from kvframe.contract import StackError
from plugins.serve.tests.conftest import STACK, Running
from tests.support.waiting import eventually

Serve = Callable[..., Running]
PROMPTS = [f"prompt number {index} of sixty-four: " * (1 + index % 4) for index in range(64)]


def expected(checkpoint: Path, prompts: list[str], **params: Any) -> list[str]:
    """Return the texts that an engine alone gives."""
    with Engine.from_pretrained(checkpoint, stack=STACK) as engine:
        return [output.text for output in engine.generate(prompts, SamplingParams(**params))]


def stats(running: Running) -> Any:
    return running.server.engine.stats()


def test_completions_are_those_of_the_engine(client: openai.OpenAI, checkpoint: Path) -> None:
    text = expected(checkpoint, ["once upon"], max_new_tokens=12)[0]
    answer = client.completions.create(model="tiny", prompt="once upon", max_tokens=12)
    assert (text, "length") == (answer.choices[0].text, answer.choices[0].finish_reason)
    assert answer.usage is not None
    assert (9, 12, 21) == (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    parts = list(client.completions.create(model="tiny", prompt="once upon", max_tokens=12, stream=True))
    assert text == "".join(part.choices[0].text for part in parts)
    assert "length" == parts[-1].choices[0].finish_reason
    assert {None} == {part.usage for part in parts}
    *_, last = client.completions.create(
        model="tiny", prompt="once upon", max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    assert ([], answer.usage) == (last.choices, last.usage)


def test_chats_go_through_the_template(client: openai.OpenAI, checkpoint: Path) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    text = expected(checkpoint, ["s:be brief;u:hello;a:"], max_new_tokens=10)[0]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=10)
    assert text == answer.choices[0].message.content
    parts = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, stream=True))
    assert text == "".join(part.choices[0].delta.content or "" for part in parts)
    loud = expected(checkpoint, ["s:be brief;u:hello;a:!"], max_new_tokens=10)[0]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, extra_body={"chat_template_kwargs": {"loud": True}}
    )
    assert loud == answer.choices[0].message.content != text


def test_each_request_has_its_own_parameters(client: openai.OpenAI, checkpoint: Path) -> None:
    option_sets: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 7, "max_tokens": 11},
        {"temperature": 1.2, "seed": 8, "top_p": 0.8, "extra_body": {"top_k": 9}, "max_tokens": 14},
        {"max_tokens": 5},
    ]
    texts = [
        expected(checkpoint, ["x y"], temperature=0.9, seed=7, max_new_tokens=11)[0],
        expected(checkpoint, ["x y"], temperature=1.2, seed=8, top_p=0.8, top_k=9, max_new_tokens=14)[0],
        expected(checkpoint, ["x y"], max_new_tokens=5)[0],
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = list(
            pool.map(
                lambda options: client.completions.create(model="tiny", prompt="x y", **options).choices[0].text,
                option_sets,
            )
        )
    assert texts == answers


def test_samples_are_those_of_the_engine(client: openai.OpenAI, checkpoint: Path) -> None:
    fields: dict[str, Any] = {"model": "tiny", "n": 3, "temperature": 1, "seed": 5, "max_tokens": 9}
    texts = expected(checkpoint, ["x y"], n=3, temperature=1, seed=5, max_new_tokens=9)
    assert 3 == len(set(texts))
    answer = client.completions.create(prompt="x y", **fields)
    assert [(0, texts[0]), (1, texts[1]), (2, texts[2])] == [(choice.index, choice.text) for choice in answer.choices]
    assert answer.usage is not None
    assert (3, 27) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    parts = [part.choices[0] for part in client.completions.create(prompt="x y", stream=True, **fields)]
    assert texts == ["".join(part.text for part in parts if part.index == index) for index in range(3)]
    assert ["length"] * 3 == [part.finish_reason for part in parts if part.finish_reason]
    messages: Any = [{"role": "user", "content": "hello"}]
    texts = expected(checkpoint, ["u:hello;a:"], n=3, temperature=1, seed=5, max_new_tokens=9)
    chat = client.chat.completions.create(messages=messages, **fields)
    assert texts == [choice.message.content for choice in chat.choices]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=messages, stream=True, **fields)]
    assert texts == [
        "".join(choice.delta.content or "" for choice in chunks if choice.index == index) for index in range(3)
    ]
    assert {0, 1, 2} == {choice.index for choice in chunks if choice.finish_reason == "length"}


def logprobs_of(checkpoint: Path, prompt: str, count: int) -> list[tuple[bytes, float, list[tuple[bytes, float]]]]:
    """Return each token that an engine alone generates, its log-probability, and those of the likeliest tokens."""
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    letters = sorted(alphabet)
    with Engine.from_pretrained(checkpoint, stack=STACK) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=count, logprobs=True, top_logprobs=2))

    def byte(token: int) -> bytes:
        return bytes([alphabet[letters[token]]])

    assert output.logprobs is not None
    assert output.top_logprobs is not None
    return [
        (byte(token), value, [(byte(text), of) for text, of in top.items()])
        for token, value, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True)
    ]


def test_log_probabilities_of_a_chat_are_those_of_the_engine(client: openai.OpenAI, checkpoint: Path) -> None:
    logprobs = logprobs_of(checkpoint, "u:hello;a:", 8)
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    }

    def read(content: Any) -> Any:
        assert all(token.token == bytes(token.bytes).decode(errors="replace") for token in content)
        return [
            (bytes(token.bytes), token.logprob, [(bytes(top.bytes), top.logprob) for top in token.top_logprobs])
            for token in content
        ]

    answer = client.chat.completions.create(**fields).choices[0]
    assert answer.logprobs is not None
    assert logprobs == read(answer.logprobs.content)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields)]
    assert logprobs == read([token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content])
    assert answer.message.content == "".join(chunk.delta.content or "" for chunk in chunks)
    plain = client.chat.completions.create(**{**fields, "top_logprobs": None}).choices[0].logprobs
    assert plain is not None
    assert [(data, value, []) for data, value, _ in logprobs] == read(plain.content)


def test_log_probabilities_of_a_completion_are_those_of_the_engine(client: openai.OpenAI, checkpoint: Path) -> None:
    logprobs = logprobs_of(checkpoint, "x y", 8)
    tokens = [data.decode(errors="replace") for data, _, _ in logprobs]
    tops = [{data.decode(errors="replace"): value for data, value in reversed(top)} for _, _, top in logprobs]
    fields: dict[str, Any] = {"model": "tiny", "prompt": "x y", "max_tokens": 8, "logprobs": 2}
    answer = client.completions.create(**fields).choices[0].logprobs
    assert (tokens, [value for _, value, _ in logprobs], tops) == (
        answer.tokens,
        answer.token_logprobs,
        answer.top_logprobs,
    )
    assert [0, 1, 2, 3, 4, 5, 6, 7] == answer.text_offset
    parts = [part.choices[0].logprobs for part in client.completions.create(stream=True, **fields)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(answer, name) == [value for part in parts if part for value in getattr(part, name)]
    alone = client.completions.create(**{**fields, "logprobs": 0}).choices[0].logprobs
    assert (answer.token_logprobs, None) == (alone.token_logprobs, alone.top_logprobs)
    assert client.completions.create(**{**fields, "logprobs": None}).choices[0].logprobs is None


def test_a_client_that_leaves_ends_all_its_samples(serve: Serve) -> None:
    running = serve()
    slow_down(running, 0.01)
    stream = running.client().completions.create(
        model="tiny", prompt="x", n=3, temperature=1, max_tokens=400, stream=True
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: not any(stats(running).blocks_held))
    assert 0 < stats(running).generated_tokens < 3 * 400
    eventually(lambda: stats(running).num_running == 0)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, checkpoint: Path) -> None:
    text = expected(checkpoint, ["x y"], max_new_tokens=20)[0]
    stop = text[6:8]
    answer = client.completions.create(model="tiny", prompt="x y", max_tokens=20, stop=[stop])
    assert (text[: text.index(stop)], "stop") == (answer.choices[0].text, answer.choices[0].finish_reason)
    parts = list(client.completions.create(model="tiny", prompt="x y", max_tokens=20, stop=stop, stream=True))
    assert text[: text.index(stop)] == "".join(part.choices[0].text for part in parts)
    assert "stop" == parts[-1].choices[0].finish_reason


def test_sixty_four_streams_one_of_which_goes_away_and_one_asks_nonsense(serve: Serve, checkpoint: Path) -> None:
    running = serve()
    slow_down(running, 0.005)
    texts = expected(checkpoint, PROMPTS, max_new_tokens=40)
    client = running.client()

    def ask(index: int) -> str:
        if index == 13:
            with pytest.raises(openai.BadRequestError, match="temperature must be 0"):
                client.completions.create(model="tiny", prompt=PROMPTS[13], temperature=-3, stream=True)
            return texts[13]
        count = 400 if index == 21 else 40
        stream = client.completions.create(model="tiny", prompt=PROMPTS[index], max_tokens=count, stream=True)
        parts = []
        for part in stream:
            parts.append(part.choices[0].text)
            if index == 21:
                stream.close()
                return texts[21]
        return "".join(parts)

    with ThreadPoolExecutor(64) as pool:
        assert texts == list(pool.map(ask, range(64)))
    eventually(lambda: not any(stats(running).blocks_held))
    # The client that went away asked for 400 tokens.
    assert 62 * 40 < stats(running).generated_tokens < 62 * 40 + 400


def slow_down(running: Running, seconds: float) -> None:
    """Let each step take some time more."""
    model: Any = running.server.engine.model
    forward = model.forward

    def slow(*tensors: Any) -> Any:
        threading.Event().wait(seconds)
        return forward(*tensors)

    model.forward = slow


def test_a_client_that_stops_waiting_ends_its_request(serve: Serve) -> None:
    running = serve()
    slow_down(running, 0.01)
    client = running.client().with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt="x", max_tokens=490)
    eventually(lambda: not any(stats(running).blocks_held))
    assert 0 < stats(running).generated_tokens < 490
    eventually(lambda: running.server._application.quota.num_used == 0)


def test_a_client_that_closes_its_stream_ends_its_request(serve: Serve) -> None:
    running = serve()
    slow_down(running, 0.01)
    stream = running.client().completions.create(model="tiny", prompt="x", max_tokens=490, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: not any(stats(running).blocks_held))
    assert 0 < stats(running).generated_tokens < 490
    eventually(lambda: running.server._application.quota.num_used == 0)


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def said(content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


WRONG: list[tuple[str, Any, int, str]] = [
    ("completions", {"prompt": "a", "model": "other"}, 404, "there is no model 'other'; this server serves 'tiny'"),
    ("completions", {"prompt": ["a", 3]}, 400, "prompt must be a text, token ids, or a list of texts or of token ids"),
    ("completions", {"prompt": []}, 400, "the prompt is empty"),
    ("completions", {}, 400, "prompt is missing"),
    ("completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("completions", {"prompt": ["a", ""]}, 400, "the prompt is empty"),
    ("completions", {"prompt": [-1]}, 400, "-1 is not a token id"),
    ("completions", {"prompt": [1 << 70]}, 400, "is not a token id"),
    ("completions", {"prompt": [300]}, 400, "300 is not a token id; the model has [0, 256)"),
    ("completions", {"prompt": "a" * 600}, 400, "the prompt has 600 tokens"),
    ("completions", {"prompt": "a" * 5000}, 400, "the prompt has 5,000 bytes, and this server reads at most 4,096"),
    ("completions", {"prompt": ["a"] * 300}, 400, "a request has 1 to 256 prompts and samples of them"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n must be a whole number of at least 1, not 0"),
    ("completions", {"prompt": "a", "n": 1000}, 400, "a request has 1 to 256 prompts and samples of them"),
    ("completions", {"prompt": "a", "n": 200}, 400, "n must be at most 128, not 200"),
    ("completions", {"prompt": "a", "n": "2"}, 400, "n must be a valid integer, not '2'"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs must be at most 20, not 21"),
    ("completions", {"prompt": "a", "logprobs": -1}, 400, "logprobs must be a whole number of at least 0, not -1"),
    ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs must be a valid integer, not True"),
    (
        "completions",
        {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 490},
        400,
        "log-probabilities, and holds at most",
    ),
    ("completions", {"prompt": "a", "top_logprobs": 2}, 400, "the field 'top_logprobs' is unknown"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of = 3 is not served"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix = 'b' is not served"),
    ("completions", {"prompt": "a", "frequency_penalty": 2.5}, 400, "frequency_penalty must be from -2 to 2"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be a whole number of at least 1, not 0"),
    ("completions", {"prompt": "a", "max_tokens": -5}, 400, "max_tokens must be a whole number of at least 1, not -5"),
    ("completions", {"prompt": "a", "max_tokens": 5000}, 400, "more than this server generates, 4096"),
    (
        "completions",
        {"prompt": "abc", "max_tokens": 510},
        400,
        "the prompt has 3 tokens and max_tokens is 510, but the model's context has 512; ask for at most 509 tokens",
    ),
    ("completions", {"prompt": "a", "temperature": "warm"}, 400, "temperature must be a valid number, not 'warm'"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature must be 0"),
    ("completions", {"prompt": "a", "top_k": -2}, 400, "top_k must be a whole number of at least 0, not -2"),
    ("completions", {"prompt": "a", "stop": [3]}, 400, "stop must be a text or a list of texts, not [3]"),
    ("completions", {"prompt": "a", "stop": ""}, 400, "stop must hold non-empty strings"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}, "stream": False}, 400, "without stream"),
    ("completions", {"prompt": "a", "stream_options": {"include": True}}, 400, "'stream_options.include' is unknown"),
    ("completions", {"prompt": "a", "cache_salt": 5}, 400, "cache_salt must be a valid string, not 5"),
    ("completions", {"prompt": "a", "beam_width": 5}, 400, "the field 'beam_width' is unknown"),
    ("completions", [1, 2], 400, "must be a JSON object"),
    ("completions", 7, 400, "must be a JSON object"),
    ("chat/completions", {"messages": []}, 400, "messages must hold at least one message"),
    ("chat/completions", {"messages": ["hi"]}, 400, "messages[0] must be an object, not 'hi'"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role is missing"),
    ("chat/completions", said(5), 400, "messages[0].content must be text, or parts of text, not 5"),
    ("chat/completions", said([{"type": "image_url"}]), 400, "messages[0].content must be text, or parts of text"),
    ("chat/completions", said([{"type": "text"}]), 400, "messages[0].content must be text, or parts of text"),
    ("chat/completions", said(weight=1), 400, "the field 'messages[0].weight' is unknown"),
    ("chat/completions", said(audio={}), 400, "messages[0].audio = {} is not served"),
    ("chat/completions", said(name="anna"), 400, "messages[0].name is ignored by the model's chat template"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "roles are system"),
    ("chat/completions", {**HELLO, "chat_template_kwargs": {"tokenize": False}}, 400, "may not set 'tokenize'"),
    ("chat/completions", {**HELLO, "chat_template_kwargs": {"think": True}}, 400, "does not read 'think'"),
    ("chat/completions", {**HELLO, "chat_template_kwargs": {"loud": [1]}}, 400, "must be an object of plain values"),
    ("chat/completions", {**HELLO, "reasoning_effort": "high"}, 400, "does not read 'reasoning_effort'"),
    ("chat/completions", {**HELLO, "tools": "none"}, 400, "tools must be a valid array, not 'none'"),
    (
        "chat/completions",
        {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "the model's chat template does not read 'tools'; leave it out",
    ),
    ("chat/completions", {**HELLO, "tool_choice": "required"}, 400, "tool_choice must be 'auto' or 'none'"),
    ("chat/completions", {**HELLO, "include_reasoning": True}, 400, "no format of answers is known"),
    ("chat/completions", {**HELLO, "logprobs": 3}, 400, "logprobs must be a valid boolean, not 3"),
    ("chat/completions", {**HELLO, "top_logprobs": 3}, 400, "top_logprobs is given without logprobs: true"),
    ("chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs must be at most 20"),
    ("chat/completions", {**HELLO, "n": -2}, 400, "n must be a whole number of at least 1, not -2"),
    ("chat/completions", {**HELLO, "max_tokens": 3, "max_completion_tokens": 4}, 400, "differ; give one of them"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, 400, "must be a valid array"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "function is missing"),
    ("chat/completions", {"messages": [{"role": "assistant"}]}, 400, "refuses the messages"),
    ("chat/completions", {"messages": [called("[" * 100_000)]}, 400, "arguments are the JSON of an object"),
    ("chat/completions", {"messages": [called("{}")]}, 400, "does not read tool calls; leave them out"),
    ("completions", {"prompt": "a", "\ud800": 1}, 400, "must be a JSON object"),
    ("completions", {"prompt": "\ud800"}, 400, "must be a JSON object"),
    ("embeddings", {"input": "a"}, 400, "this server generates tokens; start one with `kvframe serve --task embed`"),
    ("responses", {"input": "a"}, 404, "Not Found"),
]


def post(running: Running, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{running.url}{path}", body, {"content-type": "application/json", **headers}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_bad_input_is_refused_in_one_sentence(serve: Serve) -> None:
    running = serve()
    for path, body, status, message in WRONG:
        for stream in (False, True):
            sent_body = {"stream": stream, **body} if isinstance(body, dict) else body
            code, answer = post(running, f"/v1/{path}", json.dumps(sent_body).encode())
            assert (status, message in answer["error"]["message"]) == (code, True), (body, code, answer)
    assert 400 == post(running, "/v1/completions", b"{not json")[0]
    assert 400 == post(running, "/v1/chat/completions", b'{"tools": ' + b"[" * 100_000)[0]
    assert 413 == post(running, "/v1/completions", b"x" * (5 << 20))[0]
    for path in ("/reset", "/load_model"):
        assert 404 == post(running, path, b"{}")[0]
    assert 0 == stats(running).steps
    # Nothing of it did harm.
    assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')[0]


def test_only_callers_with_a_key_are_served(serve: Serve) -> None:
    running = serve(keys=["first", "second"])
    for key in ("first", "second"):
        running.client(key).completions.create(model="tiny", prompt="x", max_tokens=1)
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        running.client("third").completions.create(model="tiny", prompt="x", max_tokens=1)
    with urllib.request.urlopen(f"{running.url}/health") as answer:
        assert {"status": "ok"} == json.loads(answer.read())


def test_callers_share_no_prefixes_unless_they_have_one_key_and_salt(serve: Serve) -> None:
    running = serve()
    prompt = "a prompt of several blocks, which another caller must not find " * 3

    def hits(key: str, header: str | None = None, body: str | None = None) -> int:
        before = stats(running).cached_prompt_tokens
        client = running.client(key, default_headers={} if header is None else {"x-cache-salt": header})
        extra = {} if body is None else {"cache_salt": body}
        client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)
        return int(stats(running).cached_prompt_tokens - before)

    assert [0, 0, 0, 0] == [hits("anna"), hits("ben"), hits("anna", header="s"), hits("anna", body="t")]
    assert all([hits("anna"), hits("ben"), hits("anna", header="s"), hits("anna", body="t")])
    # No caller can name the salt that another key makes.
    own = stats(running)
    assert 0 == hits("cleo", header="anna"), own


def test_more_requests_than_the_most_are_told_to_try_again(serve: Serve) -> None:
    running = serve({"max_requests": 2})
    slow_down(running, 0.005)
    client, go = running.client(), threading.Event()

    def hold() -> None:
        for _ in client.completions.create(model="tiny", prompt="x", max_tokens=480, stream=True):
            if go.is_set():
                return

    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(hold) for _ in range(2)]
        eventually(lambda: running.server._application.quota.num_used == 2)
        with pytest.raises(openai.RateLimitError, match="2 of the 2 samples that one key may have at once"):
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        go.set()
        for request in requests:
            request.result(30)
    eventually(lambda: running.server._application.quota.num_used == 0)
    client.completions.create(model="tiny", prompt="x", max_tokens=1)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_requests": 0},
        {"max_tokens": 3},
        {"max_new_tokens": True},
        {"max_keep_seconds": -1},
        {"min_priority": 0.5},
        {"key_limits": {"secret-key": {"min_priority": 0}}},
        {"key_limits": {"0123abcd": {"max_requests": 1}}},
        {"key_limits": {"0123abcd": 5}},
    ],
)
def test_wrong_limits_are_refused(serve: Serve, limits: dict[str, Any]) -> None:
    with pytest.raises(StackError, match=r"\[plugin.serve\] takes max_requests, max_requests_per_key, max_new_tokens"):
        serve(limits)


def test_hints_are_limited_by_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the body nor a header makes a request more urgent than its key may be, or keeps its prefix for longer."""
    trusted = hashlib.blake2b(b"trusted", digest_size=16).hexdigest()[:8]
    limits = {"max_keep_seconds": 60, "key_limits": {trusted: {"min_priority": -5, "max_keep_seconds": 600}}}
    running = serve(limits, keys=("trusted", "other"), engine={"scheduling": "priority"})
    added_hints: list[tuple[str, Hints]] = []
    add = running.server.engine.add_request

    def watched(*prompt: Any, hints: Hints, owner: str, **options: Any) -> Any:
        added_hints.append((owner[:8], hints))
        return add(*prompt, hints=hints, owner=owner, **options)  # type: ignore[call-arg]

    monkeypatch.setattr(running.server.engine, "add_request", watched)
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("trusted", {"priority": -9, "keep_seconds": 9000}, {}),
        ("other", {"priority": -9, "keep_seconds": 9000}, {}),
        ("other", {}, {"X-Request-Priority": "-9", "X-Keep-Seconds": "1e9"}),
        ("other", {"priority": 2}, {"X-Request-Priority": "7", "X-Keep-Seconds": "0"}),
        ("other", {"session_id": "chat", "keep_seconds": 61}, {"X-Session-ID": "other"}),
        ("other", {}, {"X-Session-ID": "agent"}),
        ("other", {}, {}),
    ]
    for key, body, headers in requests:
        client = running.client(key)
        client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body=body, extra_headers=headers)
    assert trusted == added_hints[0][0] != added_hints[1][0]
    assert [
        Hints(priority=-5, keep_seconds=600),
        Hints(keep_seconds=60),
        Hints(keep_seconds=60),
        Hints(priority=2, keep_seconds=0),
        Hints(session_id="chat", keep_seconds=60),
        Hints(session_id="agent"),
        Hints(),
    ] == [hints for _, hints in added_hints]
    with pytest.raises(openai.BadRequestError, match="the header x-request-priority must be a number, not 'high'"):
        running.client("other").completions.create(
            model="tiny", prompt="x", max_tokens=1, extra_headers={"X-Request-Priority": "high"}
        )
    for body in (b'{"prompt": "x", "keep_seconds": 1e999}', b'{"prompt": "x", "keep_seconds": NaN}'):
        assert 400 == post(running, "/v1/completions", body, authorization="Bearer other")[0]
    for seconds in ("nan", "inf", "-1"):
        status, refusal = post(
            running, "/v1/completions", b"{}", authorization="Bearer other", **{"x-keep-seconds": seconds}
        )
        assert (400, "bad_hints") == (status, refusal["error"]["code"])
    with pytest.raises(openai.BadRequestError, match="session_id must be a string of at most 1,024 characters"):
        client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body={"session_id": "x" * 1025})


def test_every_limit_is_a_key_of_the_stack_file() -> None:
    assert {*NUMBERS, *HINT_LIMITS, "answers", "key_limits"} == {field.name for field in attrs.fields(Limits)}


def test_a_failing_step_fails_its_requests_and_no_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = serve()
    client, engine = running.client(), running.server.engine
    model: Any = engine.model
    forward, failures = model.forward, [RuntimeError("the device is gone")]

    def failing(*tensors: Any) -> Any:
        if failures:
            raise failures.pop()
        return forward(*tensors)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(openai.InternalServerError, match="the step that computed this request failed"):
        client.completions.create(model="tiny", prompt="x", max_tokens=3)
    failures.append(RuntimeError("the device is gone"))
    with pytest.raises(openai.APIError, match="the step that computed this request failed"):
        list(client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True))
    assert 3 == client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens  # type: ignore[union-attr]


def test_the_log_says_how_each_request_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(LOG, "handlers", [handler])
    monkeypatch.setattr(LOG, "level", logging.INFO)
    running = serve()
    bodies = [
        {"prompt": "x", "max_tokens": 2, "user": "anna b"},
        {"prompt": "x", "best_of": 3},
        {"prompt": "x", "stream": True},
        {"prompt": "x"},
    ]

    def ask(index: int) -> None:
        headers = {"X-Request-Id": f"id{index}"}
        request = urllib.request.Request(f"{running.url}/v1/completions", json.dumps(bodies[index]).encode(), headers)
        try:
            answer = urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            answer.read()
        eventually(lambda: any(f"id=id{index} " in line for line in lines))

    ask(0)
    ask(1)

    def failing(*_tensors: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(running.server.engine.model, "forward", failing)
    ask(2)
    ask(3)
    requests = [dict(word.split("=", 1) for word in line.split()[1:]) for line in lines if line.startswith("request ")]
    answered = {"path": "/v1/completions", "status": "200", "user": "anna_b", "generated_tokens": "2"}
    assert answered.items() <= requests[0].items()
    assert {"status": "400", "refused": "bad_params"}.items() <= requests[1].items()
    assert ["200", "500"] == [request["status"] for request in requests[2:]]
    for request in requests[2:]:
        assert request["failed"].startswith("the_step_that_computed_this_request_failed")


def test_a_server_that_closes_ends_its_streams_and_refuses_others(serve: Serve) -> None:
    running = serve()
    slow_down(running, 0.005)
    stream = running.client().completions.create(model="tiny", prompt="x", max_tokens=490, stream=True)
    next(iter(stream))
    running.server.end_requests()
    with pytest.raises(openai.APIError, match="the server is closing"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="the server is closing"):
        running.client().completions.create(model="tiny", prompt="x")
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(f"{running.url}/health")
    refused.value.close()


def test_metrics_count_what_was_served(serve: Serve) -> None:
    running = serve()
    running.client().completions.create(model="tiny", prompt="x y z", max_tokens=6)
    with urllib.request.urlopen(f"{running.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert {"kvframe_generated_tokens_total 6.0", "kvframe_prompt_tokens_total 5.0", "kvframe_requests 0.0"} < set(
        lines
    )
    assert "kvframe_step_seconds_count 6.0" in lines
    assert {"kvframe_requests_running 0.0", "kvframe_requests_waiting 0.0"} < set(lines)
    for name in (
        "blocks_held",
        "pool_bytes_held",
        "blocks_evicted_total",
        "lookup_times_limiting_total",
        "lookup_found_tokens_total",
    ):
        assert f'kvframe_{name}{{group="0",kind="full_attention"}} 0.0' in lines
    for name in ("evictions", "preemptions", "draft_tokens", "accepted_draft_tokens"):
        assert f"kvframe_{name}_total 0.0" in lines
    assert 'kvframe_lookup_asked_tokens_total{group="0",kind="full_attention"} 5.0' in lines


def test_metrics_say_what_tiers_did(serve: Serve, tmp_path: Path) -> None:
    cache = {"memory": "4MiB", "host_memory": "1MiB", "disk": {"path": str(tmp_path / "pages"), "size": "16MiB"}}
    prompt = "a prompt of several blocks, which is found again " * 3

    def ask() -> tuple[int, dict[str, float]]:
        running = serve(cache=cache)
        usage = running.client().completions.create(model="tiny", prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        eventually(lambda: list((tmp_path / "pages").glob("*/records/*")) != [])
        with urllib.request.urlopen(f"{running.url}/metrics") as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if line[0] != "#"]
        running.close()
        return usage.prompt_tokens_details.cached_tokens, {name: float(value) for name, _, value in lines}

    num_cached, first = ask()
    assert (0, 0) == (num_cached, first["kvframe_restored_tokens_total"])
    num_cached, second = ask()
    assert 144 == num_cached == second["kvframe_restored_tokens_total"]
    assert (9, 0) == tuple(
        second[f'kvframe_tier_blocks_restored_total{{tier="{tier}"}}'] for tier in ("disk", "host_memory")
    )
    assert second['kvframe_tier_bytes_read_total{tier="disk"}'] > 0
    for name in ("blocks_dropped", "blocks_refused", "failures"):
        assert 0 == second[f'kvframe_tier_{name}_total{{tier="disk"}}']
    for name in ("blocks_stored", "blocks_dropped"):
        assert 0 == second[f'kvframe_tier_{name}_total{{tier="host_memory"}}']
    assert {"kvframe_host_blocks", "kvframe_waits_in_vain_total"} < second.keys()
    assert 'kvframe_tier_blocks_refused_total{tier="host_memory"}' not in second


def test_without_tiers_no_tier_is_counted(serve: Serve) -> None:
    with urllib.request.urlopen(f"{serve().url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert [] == [line for line in lines if "tier=" in line or line.startswith("kvframe_host_blocks")]
