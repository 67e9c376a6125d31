"""Clients that send halves, read nothing, ask for everything or send what takes long: others are served as before.

A longer form, with more connections and its figures, is ``python -m benchmarks.serving.hostile``.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from kvframe_serve.generation import MOST_UNREAD
from kvframe_serve.quotas import BusyError, Quota, Share

from kvframe.contract import KVFrameError
from plugins.serve.tests.conftest import Running
from plugins.serve.tests.test_server import post, slow_down, stats
from tests.support.waiting import eventually

Serve = Callable[..., Running]


def connect(running: Running, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
    client.settimeout(30)
    return client


def request_bytes(body: Mapping[str, Any], path: str = "/v1/completions", **headers: str) -> bytes:
    text = json.dumps(body).encode()
    lines = {"Host": "x", "Content-Length": str(len(text)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + text


def is_healthy(running: Running) -> bool:
    with urllib.request.urlopen(f"{running.url}/health", timeout=10) as answer:
        return bool(json.loads(answer.read()) == {"status": "ok"})


def num_used(running: Running) -> int:
    return running.server._application.quota.num_used


def read_all(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(1 << 16):
        data += part
    return data


def test_halves_of_bodies_use_no_quota(serve: Serve) -> None:
    running = serve({"max_requests": 4, "client_seconds": 2})
    with ExitStack() as stack:
        halves = [connect(running, stack) for _ in range(40)]
        for half in halves:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: len(running.server._connections._waiting) >= 40)
        assert is_healthy(running)
        assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')[0]
        assert [b"408"] * 40 == [read_all(half).split()[1] for half in halves]


@pytest.mark.parametrize(
    "payload", [b"", b"POST /v1/completions HTTP/1.1\r\nHost", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_idle_connections_are_closed(serve: Serve, payload: bytes) -> None:
    running = serve({"client_seconds": 1})
    with ExitStack() as stack:
        client = connect(running, stack)
        client.sendall(payload)
        try:
            data = read_all(client)
        except ConnectionResetError:
            data = b""
        assert payload.startswith(b"GET") or data == b""
        eventually(lambda: not running.server._connections._open)


def test_more_connections_than_there_may_be_close_the_oldest_idle_one(serve: Serve) -> None:
    running = serve({"max_connections": 8})
    with ExitStack() as stack:
        idle = [connect(running, stack) for _ in range(40)]
        assert is_healthy(running)
        assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')[0]
        assert 8 >= len(running.server._connections._open)
        assert b"" == idle[0].recv(1)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_halves_of_bodies_are_closed_before_others_are_refused(serve: Serve) -> None:
    running = serve({"max_connections": 8})
    with ExitStack() as stack:
        halves = [connect(running, stack) for _ in range(40)]
        for half in halves:
            with suppress(ConnectionError):  # closed already
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert all(map(is_closed, halves[:32]))
        assert is_healthy(running)
        assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')[0]


def test_a_request_that_runs_is_not_closed_for_others(serve: Serve) -> None:
    running = serve({"max_connections": 2})
    slow_down(running, 0.005)
    with ExitStack() as stack:
        client = connect(running, stack)
        client.sendall(request_bytes({"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}))
        client.recv(1)
        for _ in range(5):
            connect(running, stack)
            assert is_healthy(running)
        assert b'"finish_reason":"length"' in read_all_of_stream(client)


def test_a_stream_that_is_not_read_ends_and_gives_its_quota_back(serve: Serve) -> None:
    running = serve({"client_seconds": 2})
    with ExitStack() as stack:
        client = connect(running, stack)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        body = {"prompt": "x", "max_tokens": 490, "n": 16, "temperature": 1, "logprobs": 20, "stream": True}
        client.sendall(request_bytes(body))
        eventually(lambda: num_used(running) == 16)
        eventually(lambda: num_used(running) == 0)
        eventually(lambda: not running.server._connections._open)
        eventually(lambda: not any(stats(running).blocks_held))


def test_what_waits_for_a_client_is_bounded(serve: Serve) -> None:
    running = serve({"client_seconds": 60})
    with ExitStack() as stack:
        client = connect(running, stack)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        body = {"prompt": "x", "max_tokens": 490, "n": 64, "temperature": 1, "logprobs": 20, "stream": True}
        assert 64 * 490 * 21 > 4 * MOST_UNREAD
        client.sendall(request_bytes(body))
        eventually(lambda: num_used(running) == 64)
        eventually(lambda: num_used(running) == 0)
        assert stats(running).generated_tokens < 64 * 490
        assert b"the client does not read its answer" in read_all_of_stream(client)


def read_all_of_stream(client: socket.socket) -> bytes:
    data = bytearray()
    while b"data: [DONE]" not in data[-100:]:
        part = client.recv(1 << 20)
        assert part, data[-1000:]
        data += part
    return bytes(data)


def test_one_key_cannot_use_all_of_a_quota_and_samples_count(serve: Serve) -> None:
    running = serve({"max_requests": 8}, keys=["anna", "ben"])
    slow_down(running, 0.005)
    with ExitStack() as stack:
        client = connect(running, stack)
        body = {"prompt": "x", "max_tokens": 480, "n": 4, "temperature": 1, "stream": True}
        client.sendall(request_bytes(body, Authorization="Bearer anna"))
        eventually(lambda: num_used(running) == 4)
        with pytest.raises(openai.RateLimitError, match="4 of the 4 samples that one key may have at once") as refused:
            running.client("anna").completions.create(model="tiny", prompt="x", max_tokens=1)
        assert "1" == refused.value.response.headers["retry-after"]
        running.client("ben").completions.create(model="tiny", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError, match="this request has 4 more"):
            running.client("ben").completions.create(model="tiny", prompt="x", max_tokens=1, n=5)


def test_of_requests_that_need_a_whole_quota_one_is_served() -> None:
    quota = Quota("samples", max_total=8, max_per_key=8)
    requests = [Share(quota, "anna") for _ in range(3)]
    for request in requests:
        request.grow(1)  # its body is there
    served = []
    for request in requests:
        with suppress(BusyError):
            request.grow(8)
            served.append(request)
    assert ([requests[-1]], 8) == (served, quota.num_used)


def test_a_stream_that_has_ended_holds_no_place_though_it_is_not_read(serve: Serve) -> None:
    running = serve({"max_requests": 2})
    with ExitStack() as stack:
        for _ in range(5):
            client = connect(running, stack)
            client.sendall(request_bytes({"prompt": "x", "max_tokens": 8, "n": 2, "temperature": 1, "stream": True}))
            client.recv(1)
            eventually(lambda: num_used(running) == 0)


def test_a_text_that_cannot_fit_is_refused_by_its_bytes(serve: Serve) -> None:
    running = serve()
    status, answer = post(running, "/v1/completions", json.dumps({"prompt": "a" * (4 << 20 >> 1)}).encode())
    assert (400, "prompt_too_long") == (status, answer["error"]["code"])


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
FILLS = "{% set ns = namespace(x='x' * 1000) %}{% for a in range(90000) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


def with_template(template: str, checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint into a folder, with another chat template."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(template)
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LARGE_CHAT = json.dumps({"messages": [{"role": "user", "content": "x" * (100 << 10)}]}).encode()
"""A body that does not wait with small ones."""


def test_reading_a_long_body_holds_nobody_up(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    running = serve({"read_seconds": 3}, path=with_template(LOOPS, checkpoint, tmp_path), name="tiny")
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(post(running, "/v1/chat/completions", LARGE_CHAT)[0]))
    asking.start()
    answered = 0
    while asking.is_alive():
        assert is_healthy(running)
        assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0]
        answered += 1
    asking.join()
    assert ([400], True) == (statuses, answered > 3)


def test_keys_take_turns_when_large_bodies_are_read(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    path = with_template(LOOPS, checkpoint, tmp_path)
    running = serve({"read_seconds": 4}, path=path, name="tiny", keys=["anna", "ben"])
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(post(running, "/v1/chat/completions", LARGE_CHAT, Authorization="Bearer anna")[0])

    hostile = [threading.Thread(target=ask) for _ in range(8)]
    for thread in hostile:
        thread.start()
    eventually(lambda: num_used(running) == 8)
    large = json.dumps({"prompt": "a" * (100 << 10), "max_tokens": 1}).encode()
    status, answer = post(running, "/v1/completions", large, Authorization="Bearer ben")
    assert (400, "prompt_too_long") == (status, answer["error"]["code"])
    assert 5 <= num_used(running)
    for thread in hostile:
        thread.join()
    assert {400, 429} == {*statuses}


def test_the_bytes_of_bodies_are_bounded(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    path = with_template(LOOPS, checkpoint, tmp_path)
    running = serve({"read_seconds": 2, "max_body_bytes": 150 << 10}, path=path, name="tiny", keys=["anna", "ben"])
    with ExitStack() as stack:
        clients = [connect(running, stack) for _ in range(14)]
        for client in clients:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(LARGE_CHAT)}\r\n"
            client.sendall(f"{head}Authorization: Bearer anna\r\n\r\n".encode() + LARGE_CHAT)
        eventually(lambda: num_used(running) == 11)
        status, _ = post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', Authorization="Bearer ben")
        assert 200 == status
        assert 3 == sum(b"bytes of bodies that one key may have" in read_some(client) for client in clients)


def read_some(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n{" not in data and (part := client.recv(1 << 16)):
        data += part
    return data


def test_a_chat_of_more_messages_than_tokens_fit_is_refused_before_it_is_written(serve: Serve) -> None:
    running = serve({"read_seconds": 60})
    body = {"messages": [{"role": "user", "content": "x"}] * 513}
    for path in ("/v1/chat/completions", "/tokenize"):
        status, answer = post(running, path, json.dumps(body).encode())
        assert (400, "the chat has 513 messages, and the model's context 512 tokens") == (
            status,
            answer["error"]["message"],
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOPS, "reading the body takes more than 1 seconds"),
        (FILLS, "reading the body takes more than 64 MB of memory"),
    ],
)
def test_a_template_that_does_not_end_is_ended(
    serve: Serve, checkpoint: Path, tmp_path: Path, template: str, message: str
) -> None:
    path = with_template(template, checkpoint, tmp_path)
    running = serve({"read_seconds": 1, "read_memory_mb": 64}, path=path, name="tiny")
    hello = b'{"messages": [{"role": "user", "content": "x"}]}'
    for _ in range(2):
        status, answer = post(running, "/v1/chat/completions", hello)
        assert (400, True) == (status, message in answer["error"]["message"]), answer
    assert 200 == post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), KVFrameError("no"), MemoryError()])
def test_a_plugin_that_raises_anything_fails_its_step_only(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    running = serve()
    model: Any = running.server.engine.model
    forward, errors = model.forward, [error]

    def failing(*tensors: Any) -> Any:
        if errors:
            raise errors.pop()
        return forward(*tensors)

    monkeypatch.setattr(model, "forward", failing)
    client = running.client()
    with pytest.raises(openai.InternalServerError, match="the step that computed this request failed"):
        client.completions.create(model="tiny", prompt="x", max_tokens=3)
    assert is_healthy(running)
    assert 3 == client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens  # type: ignore[union-attr]
    with urllib.request.urlopen(f"{running.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert {"kvframe_failed_steps_total 1.0", "kvframe_failed_requests_total 1.0"} < set(lines)


def test_health_says_that_a_step_hangs(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = serve(engine={"max_step_seconds": 1})
    model: Any = running.server.engine.model
    forward, go, inside = model.forward, threading.Event(), threading.Event()

    def hanging(*tensors: Any) -> Any:
        inside.set()
        go.wait()
        return forward(*tensors)

    monkeypatch.setattr(model, "forward", hanging)
    asking = threading.Thread(target=lambda: post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}'))
    asking.start()
    inside.wait()
    assert is_healthy(running)
    eventually(lambda: running.server.engine.step_seconds > 1)
    status, answer = 0, {}
    try:
        urllib.request.urlopen(f"{running.url}/health", timeout=10)
    except urllib.error.HTTPError as error:
        status, answer = error.code, json.loads(error.read())
    assert (503, True) == (status, answer["status"].startswith("a step has been running for "))
    go.set()
    asking.join()


def test_a_key_may_be_sent_with_any_case_of_the_scheme(serve: Serve) -> None:
    running = serve(keys=["anna"])
    for scheme, status in (("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401)):
        code, _ = post(running, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', Authorization=f"{scheme} anna")
        assert status == code
