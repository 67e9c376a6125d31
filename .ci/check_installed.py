"""Run what READMEs show, and an example, by the installed packages: in an empty folder, without the clone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "plugins/engine/README.md", "plugins/serve/README.md")
LEFT_OUT = ("pip install ", "make ", "git clone ", "python3 -m venv ", ".venv/bin/")
"""What begins the commands that are not run: they set up an environment."""

MODEL = """
import shutil, sys
from pathlib import Path
sys.path.insert(0, "examples/demo")
from make_model import Recipe, make_model
make_model(Path(".cache/demo-model"), Recipe(steps=1))
shutil.copytree(".cache/demo-model", "path/to/model")
"""
START_S = 120


def main() -> None:
    """Check where the packages come from, then run everything."""
    ours = [dist for dist in importlib.metadata.distributions() if dist.name.startswith("kvframe")]
    sources = {dist.name: json.loads(dist.read_text("direct_url.json") or "{}").get("url", "") for dist in ours}
    from_elsewhere = [name for name, url in sources.items() if not url.startswith("file://")]
    assert ours, "nothing of kvframe is installed"
    assert not from_elsewhere, f"not of the wheels built here: {', '.join(from_elsewhere)}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder, "examples"))
        os.chdir(folder)
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run("a model of one training step", sys.executable, "-c", MODEL)
        shown = {readme: [*blocks((ROOT / readme).read_text(encoding="utf-8"))] for readme in READMES}
        for readme, parts in shown.items():
            for language, text in parts:
                if match := re.match(r"# file: (\S+)\n", text):
                    Path(match[1]).write_text(text, encoding="utf-8")
                elif language == "python" and "openai" not in text:
                    run(f"{readme}: Python", sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{text}")
                for command in commands(language, text):
                    if " serve " in command:
                        (client,) = (text for language, text in parts if "openai" in text)
                        with served(command) as address:
                            run(f"{readme}: its client", sys.executable, "-c", client.replace(":8000", address))
                    else:
                        run(f"{readme}: {command}", "bash", "-c", command)
        run("examples/run_a_model.py", sys.executable, "examples/run_a_model.py")
    print(f"{len(ours)} packages, {len(READMES)} READMEs and an example: all right")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the fenced blocks of a page: the language and the text."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(language: str, text: str) -> Iterator[str]:
    """Yield the commands of a block, apart from those that set up an environment."""
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE) if language == "console" else text.splitlines()
    for line in lines if language in ("console", "sh") else ():
        if line and not line.startswith(LEFT_OUT):
            yield line


def run(title: str, *command: str) -> None:
    """Run a command that has to succeed; print its output only if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{title}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    print(f"ok: {title}", flush=True)


@contextmanager
def served(command: str) -> Iterator[str]:
    """Run a server on a free port until the block ends; yields the end of its address, such as ``:40123``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen(["bash", "-c", f"exec {command.replace('8000', str(port))}"]) as server:
        try:
            ends = time.monotonic() + START_S
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, f"{command} ended"
                assert time.monotonic() < ends, f"{command} does not answer"
                time.sleep(0.2)
            yield f":{port}"
        finally:
            server.terminate()


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
