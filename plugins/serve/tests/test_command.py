"""``kvframe serve`` as a process: a port serves once, and Ctrl-C ends streams in a sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner
from kvframe_serve.command import serve
from kvframe_serve.server import Server


def start(checkpoint: Path, port: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvframe", "serve", str(checkpoint), "--port", str(port), *options]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
    )


def test_ctrl_c_ends_running_streams_and_a_port_serves_once(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stack = tmp_path / "stack.toml"
    stack.write_text('[cache]\nmemory = "4MiB"\n')
    server = start(checkpoint, port, "--stack", str(stack), "--grace", "0")
    assert server.stderr is not None
    for line in server.stderr:
        if "Application startup complete" in line:
            break
    second = start(checkpoint, port)
    _, said = second.communicate()
    assert 2 == second.returncode
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port" in said
    asked = {"prompt": "x", "max_tokens": 490, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        server.send_signal(signal.SIGINT)
        rest = answer.read().decode()
    assert first.startswith(b"data: {")
    assert "the server is closing" in rest
    assert rest.endswith("data: [DONE]\n\n")
    _, said = server.communicate()
    assert (130, False) == (server.returncode, "Traceback" in said), said


def test_a_wrong_address_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    server = start(tmp_path / "none", 8000, "--host", "203.0.113.1")
    _, said = server.communicate()
    assert (2, True) == (server.returncode, "cannot listen on 203.0.113.1:8000: " in said)


def test_a_repository_is_downloaded_and_served_by_its_id(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    served: list[str] = []

    def download(repository: str, *, revision: str | None, **_: object) -> str:
        asked.extend((repository, revision))
        return str(checkpoint)

    async def run(self: Server, place: socket.socket, *, grace: float) -> None:
        served.append(self.served.name)
        place.close()
        self.close()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(Server, "run", run)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = CliRunner().invoke(serve, ["acme/tiny@v1", "--port", str(port)], catch_exceptions=False)
    assert (0, ["acme/tiny", "v1"], ["acme/tiny@v1"]) == (result.exit_code, asked, served)
