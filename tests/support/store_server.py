"""A real Valkey or Redis server, which a test starts on a free port of this machine and ends."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType

import valkey

from tests.support.ports import free_port

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
MISSING = "there is no valkey-server and no redis-server on PATH: apt-get install redis-server"
STARTING_SECONDS, LOOK_SECONDS = 60, 0.02


class StoreServer:
    """A server that keeps its data in memory, and ends with the block that it is the context of."""

    def __init__(self, folder: Path, *options: str, tls: dict[str, Path] | None = None) -> None:
        """Choose a port; start nothing.

        Args:
            folder: An empty folder for the server's socket and log. Its path must be short, because sockets' paths are.
            options: Further options of the program (``"--requirepass"``, ``"x"``).
            tls: The files ``ca``, ``certificate`` and ``key``, for a server that talks TLS only.
        """
        self.port = free_port()
        self.socket = folder / "s"
        self._folder = folder
        self._tls = tls
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the TCP port."""
        return f"{'valkeys' if self._tls else 'valkey'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        assert PROGRAM is not None, MISSING
        ports = ["--port", str(self.port)]
        if self._tls:
            files = [f"--tls-{name}-file" for name in ("cert", "key", "ca-cert")]
            paths = [str(self._tls[name]) for name in ("certificate", "key", "ca")]
            ports = ["--port", "0", "--tls-port", str(self.port)]
            ports += [text for pair in zip(files, paths, strict=True) for text in pair]
        command = [
            PROGRAM,
            "--bind",
            "127.0.0.1",
            *ports,
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            *self._options,
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        for _ in range(round(STARTING_SECONDS / LOOK_SECONDS)):
            if self._listens():
                return
            if self._process.poll() is not None:
                break
            threading.Event().wait(LOOK_SECONDS)
        raise RuntimeError(f"{PROGRAM} does not start: {(self._folder / 'log').read_text()}")

    def stop(self) -> None:
        """End the server at once, as a crash would; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let the process answer nothing, with its connections open, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._signal(signal.SIGCONT)

    def client(self, **options: object) -> valkey.Valkey:
        """Return a client over the Unix socket, which the caller closes."""
        return valkey.Valkey(unix_socket_path=str(self.socket), **options)  # type: ignore[arg-type]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def __enter__(self) -> StoreServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
