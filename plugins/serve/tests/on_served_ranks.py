"""A program that serves a model over two ranks until they end, and prints what clients got, for ``test_served_ranks``.

The ranks are forked after everything is imported. Their reading processes come from one server of forks.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from kvframe_serve import server  # noqa: F401  # imported before the processes are forked
from kvframe_serve.reading.process import prepare

from kvframe import Engine, SamplingParams, Stack
from tests.support.ports import free_port

MOST_SECONDS = 120
"""How long the ranks may take to end; those that are refused start first."""

LONG = {"prompt": "x", "max_tokens": 490, "ignore_eos": True}

BREAK = "KVFRAME_TEST_BREAK"
"""The environment variable with a path. Attention raises in a rank once there is a file of this path and its number."""

PROMPT, NUM_TOKENS = "once upon", 12

Result = dict[str, Any]


class Client:
    """Asks the server of two ranks."""

    def __init__(self, port: int) -> None:
        """Take the server's port."""
        self.port = port

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to a request, which may be a refusal."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as refusal:
            return refusal

    def health(self) -> int | str:
        """Return the status of ``/health``, or that nothing listens."""
        try:
            with self.ask("/health") as answer:
                return int(answer.status)
        except (OSError, http.client.HTTPException):
            return "closed"

    def wait(self, is_alive: Callable[[], bool]) -> bool:
        """Wait until the server answers, and return whether it does."""
        while self.health() != 200:
            if not is_alive():
                return False
            threading.Event().wait(0.05)
        return True

    def complete(self) -> str:
        """Return what is generated after a prompt."""
        with self.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": NUM_TOKENS}) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def stream_during(self, act: Callable[[], None]) -> Result:
        """Act while a stream and another request run, and return the answers to both."""
        with ThreadPoolExecutor() as pool, self.ask("/v1/completions", {**LONG, "stream": True}) as answer:
            first = answer.readline().decode()
            full_answer = pool.submit(self.whole)
            while self._num_running() < 2:
                threading.Event().wait(0.01)
            act()
            try:
                rest = answer.read().decode()
            except http.client.IncompleteRead as error:
                rest = f"{error.partial.decode()} (cut)"
            return {
                "first": first,
                "end": rest.split("\n\n")[-3:],
                "whole": full_answer.result(),
                "health": self.health(),
            }

    def _num_running(self) -> int:
        with self.ask("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(int(float(line.split()[1])) for line in lines if line.startswith("kvframe_requests_running "))

    def whole(self) -> Any:
        """Return the status and the body of the answer to a request without a stream, or why there is none."""
        try:
            with self.ask("/v1/completions", LONG) as answer:
                return [answer.status, answer.read().decode()]
        except (OSError, http.client.HTTPException) as error:
            return repr(error)


class Ranks:
    """Two forked ranks that serve."""

    def __init__(self, models: list[Path], stack: Path, port: int, folder: Path) -> None:
        """Start both ranks."""
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", BREAK: str(folder / "break")}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.client = Client(port)
        self.codes: dict[int, int] = {}
        self._folder = folder
        options = ["--stack", str(stack), "--port", str(port), "--grace", "60"]
        self._processes = [
            _fork(rank, ["serve", str(model), *options], folder / f"said{rank}") for rank, model in enumerate(models)
        ]

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self._processes[rank], number)

    def break_attention(self, rank: int) -> None:
        """Let the attention of a rank raise from its next step on."""
        (self._folder / f"break{rank}").touch()

    def are_alive(self) -> bool:
        """Return whether no rank has ended."""
        for rank, process in enumerate(self._processes):
            if rank not in self.codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return not self.codes

    def wait(self) -> Result:
        """Wait until both have ended; as torchrun does, end all with SIGTERM after one has failed."""
        is_told = False
        for _ in range(MOST_SECONDS * 100):
            self.are_alive()
            if len(self.codes) == 2:
                break
            if any(self.codes.values()) and not is_told:
                is_told = True
                for rank in {0, 1} - set(self.codes):
                    self.send(rank, signal.SIGTERM)
            threading.Event().wait(0.01)
        for rank in {0, 1} - set(self.codes):
            self.send(rank, signal.SIGKILL)  # the exit code says that it has not ended
            os.waitpid(self._processes[rank], 0)
            self.codes[rank] = -signal.SIGKILL
        logs = [(self._folder / f"said{rank}").read_text() for rank in (0, 1)]
        return {"codes": [self.codes[rank] for rank in (0, 1)], "said": logs}


def _fork(rank: int, arguments: list[str], log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code: Any = 70
    with suppress(BaseException):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # until the process ends
        try:
            sys.argv = ["kvframe", *arguments]
            runpy.run_module("kvframe", run_name="__main__")
        except SystemExit as end:
            code = end.code
    with suppress(BaseException):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


# --- what happens to the ranks ----------------------------------------------------------------------------------------


def end_all(ranks: Ranks) -> Result:
    """Send SIGTERM to both while a stream runs, as torchrun does when it gets it itself."""
    with ranks.client.ask("/v1/completions", {**LONG, "max_tokens": 100, "stream": True}) as answer:
        answer.readline()
        for rank in (1, 0):
            ranks.send(rank, signal.SIGTERM)
        return {"rest": answer.read().decode()}


def raise_on_1(ranks: Ranks) -> Result:
    """Let a step raise on rank 1 alone, and add a request while rank 0 waits for it."""
    late: list[Any] = []

    def act() -> None:
        ranks.break_attention(1)
        late.append(ranks.client.whole())

    return {**ranks.client.stream_during(act), "late": late[0]}


def kill_1(ranks: Ranks) -> Result:
    """Kill rank 1."""
    return ranks.client.stream_during(lambda: ranks.send(1, signal.SIGKILL))


RUNS: Mapping[str, Callable[[Ranks], Result]] = {run.__name__: run for run in (end_all, raise_on_1, kill_1)}


def text_of_one_process(model: Path, stack: Path) -> str:
    """Return what one process generates; it imports what ranks need before they are forked."""
    with Engine.from_pretrained(model, stack=Stack.from_file(stack)) as engine:
        return engine.generate([PROMPT], SamplingParams(max_new_tokens=NUM_TOKENS))[0].text


def run(act: Callable[[Ranks], Result] | None, models: list[Path], stack: Path) -> Result:
    """Serve models over ranks until they end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        ranks = Ranks(models, stack, port, Path(scratch))
        try:
            result: Result = {}
            if act is not None and ranks.client.wait(ranks.are_alive):
                result = {"text": ranks.client.complete(), **act(ranks)}
        finally:
            ended = ranks.wait()
        return {**result, **ended}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    prepare()
    # The forked ranks use this one, which is no child of theirs.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # type: ignore[attr-defined]
    vars(forkserver)["ensure_running"] = forkserver._forkserver.ensure_running  # type: ignore[attr-defined]
    stack, served = folder / "stack.toml", folder / "tiny"
    os.environ[BREAK] = str(folder / "none")
    results: Result = {"text": text_of_one_process(served, stack)}
    results |= {name: run(act, [served, served], stack) for name, act in RUNS.items()}
    results["different"] = run(None, [served, folder / "other"], stack)
    print(json.dumps(results))
