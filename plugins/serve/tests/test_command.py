"""``kvframe serve`` as a process: a port serves once, signals end streams in a sentence, and unsafe values are said."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner
from kvframe_serve.command import serve
from kvframe_serve.server import Server

from tests.programs import start_program
from tests.support.ports import free_port


class Forked:
    """The server in a fork of a process that has imported torch; used like ``subprocess.Popen``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``python ARGUMENTS``."""
        reading, writing = os.pipe()
        try:
            self._process = start_program(arguments, {2: writing}, environment=environment)
        finally:
            os.close(writing)
        self.stderr = os.fdopen(reading)
        self.kill = self._process.kill
        self.wait = self._process.join
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it ends; return an empty output, because output is not recorded, and what it said."""
        log = self.stderr.read()
        self.stderr.close()
        self._process.join(timeout)
        return "", log


def start(
    checkpoint: Path, port: int, *options: str, environment: Mapping[str, str] | None = None, shell: str = ""
) -> Forked | subprocess.Popen[str]:
    """Start a server, in a process of its own if a command of the shell comes first."""
    arguments = ["-m", "kvframe", "serve", str(checkpoint), "--port", str(port), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    if not shell:
        return Forked(arguments, environment)
    command = ["sh", "-c", f'{shell}; exec "$@"', "sh", sys.executable, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)


@contextmanager
def serving(checkpoint: Path, tmp_path: Path, *options: str, shell: str = "") -> Iterator[tuple[Any, int, list[str]]]:
    """Start a server; yield it with its port and what it said until it serves."""
    lines = []
    stack = tmp_path / "stack.toml"
    stack.write_text('[cache]\nmemory = "4MiB"\n')
    server = start(checkpoint, 0, "--stack", str(stack), *options, shell=shell)
    assert server.stderr is not None
    for line in server.stderr:
        lines.append(line)
        if line.startswith("serving "):
            break
    port = urllib.parse.urlsplit(lines[-1].split()[-1]).port
    assert port
    try:
        for _ in range(1000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            threading.Event().wait(0.01)
        yield server, port, lines
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def ask(port: int, path: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


LONG = {"prompt": "x", "max_tokens": 490, "stream": True, "ignore_eos": True}


def test_ctrl_c_ends_running_streams_and_a_port_serves_once(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, "--grace", "0") as (server, port, lines):
        described = ["model:       tiny, to generate\n", "runs on:     cpu, float32\n"]
        assert described == [line for line in lines if line.startswith(("model:", "runs on:"))]
        assert f"serving tiny on http://127.0.0.1:{port}/v1\n" == lines[-1]
        second = start(checkpoint, port)
        _, log = second.communicate()
        assert 2 == second.returncode
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port" in log
        with ask(port, "/v1/completions", LONG) as answer:
            first = answer.readline()
            server.send_signal(signal.SIGINT)
            rest = answer.read().decode()
        assert first.startswith(b"data: {")
        assert "the server is closing" in rest
        assert rest.endswith("data: [DONE]\n\n")
        _, log = server.communicate()
        assert (130, False) == (server.returncode, "Traceback" in log), log


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_lets_running_requests_end(checkpoint: Path, tmp_path: Path, name: str) -> None:
    with serving(checkpoint, tmp_path, "--grace", "60") as (server, port, _):
        with ask(port, "/v1/completions", LONG) as answer:
            answer.readline()
            server.send_signal(getattr(signal, name))
            rest = answer.read().decode()
        assert '"finish_reason":"length"' in rest
        _, log = server.communicate()
        assert (-getattr(signal, name), False) == (server.returncode, "Traceback" in log), log


def test_options_replace_the_stack_s_own_values(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--memory", "2MiB", "--max-model-len", "128", "--device", "cpu", "--dtype", "float64", "--grace", "0")
    with serving(checkpoint, tmp_path, *options) as (_, _, lines):
        described = [line.split(":")[1].strip() for line in lines if line.startswith(("runs on:", "cache:", "concurr"))]
    assert ["cpu, float64", "2 MiB"] == described[:2]
    assert described[2].endswith("requests of 128 tokens")
    wrong = start(checkpoint, 1, "--dtype", "fp4")
    _, log = wrong.communicate()
    assert (2, True) == (wrong.returncode, "--dtype must be one of 'auto', 'float64'" in log), log


def test_a_second_ctrl_c_ends_without_a_traceback_also_in_the_background(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, "--grace", "60", shell="trap '' INT") as (server, port, _):
        with ask(port, "/v1/completions", LONG) as answer:
            answer.readline()
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGINT)
            _, log = server.communicate()
        assert (130, False) == (server.returncode, "Traceback" in log), log


def test_the_grace_ends_for_clients_that_neither_read_nor_send(checkpoint: Path, tmp_path: Path) -> None:
    with ExitStack() as clients, serving(checkpoint, tmp_path, "--grace", "1") as (server, port, _):
        half, unread = (clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        body = json.dumps({**LONG, "n": 8, "temperature": 1, "logprobs": 20}).encode()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 10)
        unread.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        unread.recv(100)
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
        assert (-signal.SIGTERM, False) == (server.returncode, "Traceback" in log), log


def test_answers_do_not_wait_for_the_acknowledgement_of_a_packet(checkpoint: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, port, _ = stack.enter_context(serving(checkpoint, tmp_path))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
        assert 1 == no_delay_of(server.pid)


def test_more_connections_at_once_than_there_are_descriptors_close_the_oldest(checkpoint: Path, tmp_path: Path) -> None:
    with ExitStack() as stack, serving(checkpoint, tmp_path, shell="ulimit -n 64") as (server, port, _):
        assert 200 == health(port)  # its start is complete
        idle = [stack.enter_context(socket.socket()) for _ in range(200)]
        server.send_signal(signal.SIGSTOP)  # so that all of them wait when it accepts next
        for client in idle:
            client.connect(("127.0.0.1", port))
        server.send_signal(signal.SIGCONT)
        assert 200 == health(port)
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
        assert "out of system resource" not in log


def health(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
        return int(answer.status)


def no_delay_of(process: int) -> int:
    """Return TCP_NODELAY of the accepted connection of another process."""
    for file in Path(f"/proc/{process}/fd").iterdir():
        if os.readlink(file).startswith("socket:"):
            descriptor = os.pidfd_open(process)
            try:
                copy = _copied(descriptor, int(file.name))
            finally:
                os.close(descriptor)
            with socket.socket(fileno=copy) as connection:
                if (
                    connection.family == socket.AF_INET
                    and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
                ):
                    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    raise AssertionError("the process has no connection")


def _copied(process: int, descriptor: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(438, process, descriptor, 0))  # pidfd_getfd


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["--api-key", ""], {}, "--api-key is empty; leave it out to serve every caller"),
        ([], {"KVFRAME_API_KEYS": ""}, "KVFRAME_API_KEYS is set and holds no key; unset it to serve every caller"),
        (["--host", ""], {}, "--host is empty; write 0.0.0.0 to listen on all addresses"),
        (["--host", "203.0.113.1"], {}, "cannot listen on 203.0.113.1:8000: "),
    ],
)
def test_what_would_serve_everybody_or_nobody_is_refused_before_the_model_is_loaded(
    tmp_path: Path, options: list[str], environment: dict[str, str], message: str
) -> None:
    server = start(tmp_path / "none", 8000, *options, environment=environment)
    _, log = server.communicate()
    assert (2, True) == (server.returncode, message in log), log


def test_a_repository_is_downloaded_and_served_by_its_id(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[object] = []
    served: list[str] = []

    def download(repository: str, *, revision: str | None, **_: object) -> str:
        downloads.extend((repository, revision))
        return str(checkpoint)

    async def run(self: Server, listener: socket.socket, *, grace: float) -> None:
        served.append(self.name)
        listener.close()
        self.close()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(Server, "run", run)
    result = CliRunner().invoke(serve, ["acme/tiny@v1", "--port", str(free_port())], catch_exceptions=False)
    assert (0, ["acme/tiny", "v1"], ["acme/tiny@v1"]) == (result.exit_code, downloads, served)


def test_a_server_that_whoever_reaches_may_use_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Server, listener: socket.socket, *, grace: float) -> None:
        listener.close()
        self.close()

    monkeypatch.setattr(Server, "run", run)
    port = free_port()

    def said(*options: str) -> str:
        options = (str(checkpoint), "--port", str(port), *options)
        return CliRunner().invoke(serve, options, catch_exceptions=False).stderr

    warning = f"WARNING: whoever reaches 0.0.0.0:{port} is served, since there is no --api-key"
    assert warning in said("--host", "0.0.0.0")
    assert "WARNING" not in said("--host", "0.0.0.0", "--api-key", "k")
    assert "WARNING" not in said()
