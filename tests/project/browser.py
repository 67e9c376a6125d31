"""Opens pages in Chromium, by its debugging protocol."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from websockets.sync.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--remote-allow-origins=*")


def find_program() -> str | None:
    """Return the path of the first browser that is installed."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


@attrs.define
class Browser:
    """A browser with one page."""

    connection: ClientConnection
    _last: int = 0

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Open a file, on a screen of a width, for a reader who wants light or dark pages."""
        self._call("Page.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        colour_scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[colour_scheme])
        self._call("Page.navigate", url=page.as_uri())
        while json.loads(self.connection.recv(timeout=60)).get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        self.connection.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.connection.recv(timeout=60))
            if answer.get("id") == self._last:
                return answer["result"]


@contextlib.contextmanager
def start(program: str) -> Iterator[Browser]:
    """Start a browser; end it afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([program, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"], **quiet) as process:
            try:
                with connect(_find_page(Path(folder) / "DevToolsActivePort"), max_size=None) as connection:
                    yield Browser(connection)
            finally:
                process.terminate()


def _find_page(file: Path) -> str:
    """Return the address of the only page, once the browser has written its port to a file."""
    for _ in range(600):
        with contextlib.suppress(OSError, IndexError, StopIteration):
            port = file.read_text(encoding="utf-8").splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                pages = json.load(answer)
            return next(str(page["webSocketDebuggerUrl"]) for page in pages if page["type"] == "page")
        threading.Event().wait(0.1)
    raise TimeoutError("the browser opened no page")
