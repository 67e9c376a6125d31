"""A tiny model with a tokenizer of bytes, and ``kvframe serve`` as a process that serves it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_START_SECONDS = 120


@attrs.frozen(kw_only=True)
class ServerProcess:
    """A running server.

    Attributes:
        port: Where it listens.
        pid: Its process.
        log: The file with its log.
    """

    port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def memory_mb(self) -> float:
        """The resident memory of the process and its children, shared pages once, in megabytes (10^6 bytes)."""
        return sum(_memory_kib(process) for process in with_children(self.pid)) * 1024 / 1e6

    @property
    def num_descriptors(self) -> int:
        """The open file descriptors of the process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def with_children(process: int) -> Iterator[int]:
    """Yield the id of a process, and those of its children and theirs."""
    yield process
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process}/task"):
            children = Path(f"/proc/{process}/task/{thread}/children").read_text(encoding="ascii")
            for child in children.split():
                yield from with_children(int(child))


def _memory_kib(process: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0  # it ended


def save_model(folder: Path, **config: int) -> Path:
    """Save a tiny Llama whose tokens are bytes, with a chat template; return the folder. Options are its config's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    save_tiny(folder, "llama", vocab_size=len(vocab), eos_token_id=vocab["<end>"], **config)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    )
    fast.save_pretrained(folder)
    return folder


@contextmanager
def served(
    model: Path, folder: Path, *, tables: str = "", keys: Sequence[str] = (), max_files: int | None = None
) -> Iterator[ServerProcess]:
    """Serve a model; yield the server when it answers.

    Args:
        model: The model's folder.
        folder: Where the stack and the log are written.
        tables: The stack, as TOML.
        keys: The API keys; none if everybody is served.
        max_files: The most file descriptors that the server may have.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stack, log = folder / "stack.toml", folder / "server.log"
    stack.write_text(tables or '[cache]\nmemory = "8MiB"\n', encoding="utf-8")
    command = [sys.executable, "-m", "kvframe", "serve", str(model), "--port", str(port), "--stack", str(stack)]
    command += [option for key in keys for option in ("--api-key", key)]
    if max_files is not None:
        command = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        for _ in range(_START_SECONDS * 5):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {log.read_text(encoding='utf-8')[-2000:]}") from None
                time.sleep(0.2)
        yield ServerProcess(port=port, pid=process.pid, log=log)
    finally:
        process.terminate()
        process.wait(60)
