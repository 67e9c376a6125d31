"""Reading processes: a body is checked, rendered and tokenised beside the server, within bounds of time and memory.

A chat template is a program of the checkpoint's, and a tokenizer may need seconds for a text of megabytes. In the
server's own process either would stop all clients, and nothing could end it. A process is killed if it takes too long,
and another one takes its place. Small bodies never wait for a large one: there are two processes. Owners take turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from kvframe_engine.contract import EngineError

from kvframe.contract import ModelError, RequestError
from kvframe_serve.quotas import BusyError
from kvframe_serve.reading.question import ServedModel
from kvframe_serve.request_log import LOG

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


SMALL_BODY_BYTES = 64 << 10
"""A body of at most so many bytes is read in a few milliseconds."""

_START_SECONDS = 300
"""How long a process may take to load a tokenizer, on a machine that is loading a model."""

_MOST_READS = 3
"""A body is answered within the time of so many readings, those that it waits for included."""

_MEGABYTE = 1 << 20


def prepare() -> None:
    """Begin to import the tokenizers for the reading processes, beside what this process does."""
    from multiprocessing import forkserver

    _context()
    forkserver.ensure_running()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # The process that forks imports the tokenizers once.
    context.set_forkserver_preload(["kvframe_serve.reading.reader"])
    return context


@attrs.define
class _Job:
    kind: str
    body: bytes
    answer: Future[Any] = attrs.field(factory=Future)


class _Turns:
    """The jobs that wait. Owners take turns, so that nobody's bodies wait for all of another's."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._is_ended = False
        self._changed = threading.Condition()

    def put(self, owner: str, job: _Job) -> None:
        with self._changed:
            self._jobs.setdefault(owner, deque()).append(job)
            self._changed.notify()

    def end(self) -> None:
        """Let ``take`` return None when no job waits."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    def take(self) -> _Job | None:
        """Wait for a job and return it; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_ended)
            if not self._jobs:
                return None
            owner, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[owner] = jobs
            return job


class Readers:
    """The reading processes of a server: one for small bodies and one for large ones."""

    def __init__(self, served: ServedModel, *, max_seconds: float, max_memory_mb: int) -> None:
        """Start both processes; ``wait`` waits until they are ready.

        Args:
            served: The model.
            max_seconds: How long a body may take.
            max_memory_mb: How much memory it may take, beside what the tokenizer needs.
        """
        self._most_seconds = _MOST_READS * max_seconds
        self._small, self._large = (_Lane(served, max_seconds, max_memory_mb) for _ in range(2))

    def wait(self) -> None:
        """Wait until both processes have loaded the tokenizer.

        Raises:
            ModelError: The model has no tokenizer.
        """
        for lane in (self._small, self._large):
            lane.wait()

    async def read(self, kind: str, body: bytes, owner: str) -> Any:
        """Return what a method of ``Reader`` returns for a body.

        Args:
            kind: The name of the method.
            body: The bytes of the body.
            owner: Whose body it is; owners take turns.

        Raises:
            RequestError: The body is wrong, or takes too much time or memory.
            BusyError: Too many bodies wait.
            EngineError: The processes cannot be started any more (``closed``).
        """
        lane = self._small if len(body) <= SMALL_BODY_BYTES else self._large
        try:
            async with asyncio.timeout(self._most_seconds):
                return await asyncio.wrap_future(lane.read(kind, body, owner))
        except TimeoutError:
            raise BusyError("too many bodies wait to be read; send fewer at once") from None

    def close(self) -> None:
        """End both processes. It may be called twice."""
        for lane in (self._small, self._large):
            lane.close()


class _Lane:
    """One reading process, and the thread that waits for it.

    Invariant: only the thread uses the process and its connection.
    """

    def __init__(self, served: ServedModel, max_seconds: float, max_memory_mb: int) -> None:
        self._served = served
        self._max_seconds = max_seconds
        self._max_memory_mb = max_memory_mb
        self._turns = _Turns()
        self._ready: Future[None] = Future()
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvframe-reading", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._ready.result()

    def read(self, kind: str, body: bytes, owner: str) -> Future[Any]:
        job = _Job(kind, body)
        if self._is_closed:
            job.answer.set_exception(EngineError("the server is closing", code="closed"))
        else:
            self._turns.put(owner, job)
        return job.answer

    def close(self) -> None:
        self._is_closed = True
        self._turns.end()
        if self._process is not None:
            self._process.kill()  # the thread may wait for it
        self._thread.join()

    def _run(self) -> None:
        try:
            self._start()
            self._ready.set_result(None)
        except Exception as error:
            self._is_closed = True
            self._ready.set_exception(error)
        while (job := self._turns.take()) is not None:
            if not job.answer.set_running_or_notify_cancel():
                continue  # its client has gone away
            try:
                job.answer.set_result(self._ask(job))
            except Exception as error:
                job.answer.set_exception(error)
        self._end_process()

    def _start(self) -> None:
        """Start a process and wait until it has loaded the tokenizer."""
        context = _context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._served, self._max_memory_mb), name="kvframe-reading", daemon=True
        )
        self._process.start()
        theirs.close()
        if self._is_closed:
            self._process.kill()
        kind, *details = self._receive(_START_SECONDS) or ("failed", "its process ended, or did not start in time")
        if kind != "ready":
            self._end_process()
            raise ModelError(f"{self._served.path} has no tokenizer, which a server needs: {details[0]}")

    def _ask(self, job: _Job) -> Any:
        if self._is_closed:
            raise EngineError("the server is closing", code="closed")
        if self._process is None:
            self._restart()
        assert self._connection is not None
        with suppress(OSError):  # the process has ended, and the answer says so
            self._connection.send((job.kind, job.body))
        answer = self._receive(self._max_seconds)
        if answer is None:
            is_alive = self._process.is_alive()
            self._end_process()
            limit = f"{self._max_seconds:g} seconds" if is_alive else f"{self._max_memory_mb} MB of memory"
            LOG.warning("a body of %d bytes could not be read within %s", len(job.body), limit)
            raise RequestError(f"reading the body takes more than {limit}; send less", code="too_slow_to_read")
        kind, *details = answer
        if kind == "refused":
            raise RequestError(details[0], code=details[1])
        if kind == "failed":
            LOG.error("a body of %d bytes could not be read: %s", len(job.body), details[0])
            raise EngineError(f"the body could not be read: {details[0]}", code="failed")
        return details[0]

    def _restart(self) -> None:
        try:
            self._start()
        except ModelError as error:
            raise EngineError(f"the server can read no bodies: {error}", code="closed") from error

    def _receive(self, seconds: float) -> Any:
        """Return what the process says next; None if it says nothing in time, or has ended."""
        assert self._connection is not None
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            self._process.join(1)
            return None

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# --- inside a reading process -----------------------------------------------------------------------------------------


def _serve(connection: Connection[Any, Any], served: ServedModel, max_memory_mb: int) -> None:
    """Answer bodies until the server is gone."""
    # The server ends this process: the signals of a terminal or a service manager reach both, and it may still read.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # The threads of a pool would not start within the bound of memory, and one body is read at a time.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from kvframe_serve.reading.reader import Reader

    try:
        reader = Reader(served)
    except Exception as error:
        connection.send(("failed", str(error)))
        return
    _limit_memory(max_memory_mb)
    connection.send(("ready",))
    with suppress(EOFError, OSError):
        while True:
            kind, body = connection.recv()
            connection.send(_answer(reader, kind, body, max_memory_mb))


def _answer(reader: Any, kind: str, body: bytes, max_memory_mb: int) -> tuple[Any, ...]:
    try:
        return ("read", getattr(reader, kind)(body))
    except RequestError as error:
        return ("refused", str(error), error.code)
    except MemoryError:
        return ("refused", f"reading the body takes more than {max_memory_mb} MB of memory; send less", "too_large")
    except RecursionError:
        return ("refused", "the body is nested too deeply", "bad_body")
    except BaseException as error:  # the tokenizers library raises errors that are no Exception
        return ("failed", f"{type(error).__name__}: {error}")


def _limit_memory(megabytes: int) -> None:
    """Let this process take so much memory more than it has; only Linux says how much it has."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            max_bytes = pages * resource.getpagesize() + megabytes * _MEGABYTE
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
