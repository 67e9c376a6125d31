"""Run an engine in a thread of its own, which takes requests from an event loop and sends outputs back to it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import attrs
from kvframe_engine.contract import EngineError

from kvframe import Embedder, Engine
from kvframe_serve.request_log import LOG
from kvframe_serve.runner import EngineEnded, EngineRequest, Receive

_Job = Callable[[], None]

STEP_SECONDS = 2.0
"""How long the running step has to end when the thread is closed."""

_RANK_FAILED = "the engine has ended, because one of its ranks failed"
"""What clients are told; the exception may hold data of another client."""


@attrs.define
class _Receiver:
    """Who gets a request's outputs, and how many of its samples have not ended."""

    receive: Receive
    num_running: int


class EngineThread:
    """Calls all methods of an engine in one thread.

    Invariant: only this thread calls the engine, except for ``stats`` and what says how long a step has taken, and only
    this thread uses ``_receivers``, until ``fail`` is called.

    Attributes:
        ended_by: Why the engine serves no more although nobody closed it; empty while it serves.
    """

    def __init__(
        self,
        engine: Engine | Embedder,
        loop: asyncio.AbstractEventLoop,
        *,
        note_step: Callable[[float], None] = lambda seconds: None,
        note_failed_step: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            engine: The engine, which this thread closes at its end.
            loop: Where outputs are delivered.
            note_step: Called with the seconds of each step.
            note_failed_step: Called for each step that failed.
            on_end: Called on the event loop when the engine serves no more although nobody closed it.
        """
        self.ended_by = ""
        self._engine = engine
        self._loop = loop
        self._note_step = note_step
        self._note_failed_step = note_failed_step
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._receivers: dict[str, _Receiver] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvframe-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._is_closing

    @property
    def step_seconds(self) -> float:
        """How long the running step has taken; 0 between steps."""
        return self._engine.step_seconds

    async def add(self, request: EngineRequest, receive: Receive) -> str:
        """Add a request and return its id in the engine.

        Args:
            request: The request.
            receive: Is called on the event loop with each output.

        Raises:
            RequestError: The engine refuses the request.
            EngineError: The server is closing (``closed``).
        """
        id_future: Future[str] = Future()

        def job() -> None:
            if not id_future.set_running_or_notify_cancel():
                return  # The client disconnected before its request was added.
            try:
                self._check_open()
                request_id = request.add_to(self._engine)
            except BaseException as error:  # a plugin may raise anything; the thread serves others
                id_future.set_exception(error if isinstance(error, Exception) else _as_error(error))
                return
            self._receivers[request_id] = _Receiver(receive, request.num_samples)
            id_future.set_result(request_id)

        self._jobs.put(job)
        if not self.is_alive and not id_future.done():
            id_future.cancel()
            self._check_open()
        try:
            return await asyncio.wrap_future(id_future)
        except asyncio.CancelledError:
            if not id_future.cancel() and id_future.exception() is None:  # The engine has the request already.
                self.abort(id_future.result())
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request whose client disconnected; its outputs are no longer delivered."""

        def job() -> None:
            if self._receivers.pop(request_id, None) is not None:
                self._engine.abort(request_id)

        self._jobs.put(job)

    def call(self, function: Callable[[Any], None]) -> None:
        """Call a function with the engine, in the engine's thread between two steps; it does not raise."""
        self._jobs.put(partial(function, self._engine))

    def close(self) -> bool:
        """End all requests and close the engine. It may be called twice.

        Returns:
            Whether the thread has ended; False if a step does not end.
        """
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join(STEP_SECONDS)
        return not self._thread.is_alive()

    def fail(self) -> None:
        """End all requests with an error because a rank failed, although this thread may wait for that rank."""
        self.ended_by, self._is_closing = _RANK_FAILED, True
        LOG.error("%s; the server ends", self.ended_by)
        self._end_requests()

    def _check_open(self) -> None:
        """Raise an ``EngineError`` if no requests are served."""
        if not self.is_alive:
            raise EngineError(self.ended_by or "the server is closing", code="closed")

    def _run(self) -> None:
        try:
            while self._take_jobs():
                if self._engine.has_unfinished:
                    self._step()
                if self._engine.is_closed:
                    break
        except BaseException as error:
            LOG.exception("the engine's thread has failed")
            self.ended_by = f"the engine has failed: {type(error).__name__}"
        finally:
            if not self._is_closing:
                self.ended_by = self.ended_by or _RANK_FAILED
                LOG.error("%s; the server ends", self.ended_by)
            self._end()

    def _end(self) -> None:
        """End what waits for the engine, and close it."""
        is_unasked, self._is_closing = not self._is_closing, True
        with contextlib.suppress(Exception):  # it is closed already, or cannot be
            self._engine.close()
        self._end_requests()
        if is_unasked:
            self._call(self._on_end)

    def _end_requests(self) -> None:
        """Answer the requests that were added, or are being added, with an error."""
        event = EngineEnded(error=self.ended_by or "the server is closing")
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            self._call(receiver.receive, event)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job()

    def _take_jobs(self) -> bool:
        """Run the queued jobs; wait for one if no request is unfinished. Return False if the thread is to end."""
        wait = not self._engine.has_unfinished
        while True:
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            job()
            wait = False

    def _step(self) -> None:
        start_time = time.perf_counter()
        try:
            outputs = self._engine.step()
        except BaseException:  # a plugin may raise SystemExit, or KeyboardInterrupt, which no signal raises here
            # The requests of the step have ended with an error, which the next step reports.
            LOG.exception("a step failed")
            self._note_failed_step()
            return
        self._note_step(time.perf_counter() - start_time)
        if outputs:
            self._deliver(outputs)

    def _deliver(self, outputs: Sequence[Any]) -> None:
        """Give outputs to their receivers, all in one turn of the event loop."""
        ready = []
        for output in outputs:
            receiver = self._receivers.get(output.request_id)
            if receiver is None:
                continue
            ready.append((receiver.receive, output))
            receiver.num_running -= output.finish_reason is not None
            if receiver.num_running == 0:
                del self._receivers[output.request_id]

        def deliver() -> None:
            for receive, output in ready:
                receive(output)

        self._call(deliver)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop is closed; there are no clients.
            self._loop.call_soon_threadsafe(function, *arguments)


def _as_error(error: BaseException) -> EngineError:
    return EngineError(f"a plugin raised {type(error).__name__} while the request was added", code="failed")
