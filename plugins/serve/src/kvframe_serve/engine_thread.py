"""Run an engine in a thread of its own, which takes requests from an event loop and sends outputs back to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import attrs

from kvframe import Engine, RequestOutput, SamplingParams
from kvframe.contract import EngineError

_log = logging.getLogger("kvframe.serve")

Receive = Callable[[RequestOutput], None]
"""Takes a request's outputs, on the event loop; the last one of each sample has a ``finish_reason``."""

_Job = Callable[[], None]


@attrs.define
class _Receiver:
    """Who gets a request's outputs, and how many of its samples have not ended."""

    receive: Receive
    num_running: int


class EngineThread:
    """Calls all methods of an engine in one thread.

    Invariant: only this thread calls the engine, except for ``stats``, and only this thread uses ``_receivers``.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, note_step: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """Start the thread.

        Args:
            engine: The engine, which this thread closes at its end.
            loop: Where outputs are delivered.
            note_step: Called with the seconds of each step.
        """
        self._engine = engine
        self._loop = loop
        self._note_step = note_step
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._receivers: dict[str, _Receiver] = {}
        self._thread = threading.Thread(target=self._run, name="kvframe-engine", daemon=True)
        self._is_closing = False
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._is_closing

    async def add(
        self, token_ids: Sequence[int], params: SamplingParams, receive: Receive, *, cache_salt: str = ""
    ) -> str:
        """Add a request and return its id in the engine.

        Args:
            token_ids: The prompt.
            params: The sampling parameters.
            receive: Is called on the event loop with each output.
            cache_salt: As for ``Engine.add_request``.

        Raises:
            RequestError: The engine refuses the request.
            EngineError: The server is closing (``closed``).
        """
        if not self.is_alive:
            raise EngineError("the server is closing", code="closed")
        added: Future[str] = Future()

        def job() -> None:
            if not added.set_running_or_notify_cancel():
                return  # The client disconnected before its request was added.
            try:
                request_id = self._engine.add_request(token_ids, params, cache_salt=cache_salt)
            except Exception as error:
                added.set_exception(error)
                return
            self._receivers[request_id] = _Receiver(receive, params.n)
            added.set_result(request_id)

        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            if not added.cancel() and added.exception() is None:  # The engine has the request already.
                self.abort(added.result())
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request whose client disconnected; its outputs are no longer delivered."""

        def job() -> None:
            if self._receivers.pop(request_id, None) is not None:
                self._engine.abort(request_id)

        self._jobs.put(job)

    def close(self) -> None:
        """End all requests and close the engine. It may be called twice."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_jobs():
                if self._engine.has_unfinished:
                    self._step()
        finally:
            self._is_closing = True
            self._engine.close()
            unended = list(self._receivers)
            self._deliver([_ended_by_close(request_id) for request_id in unended])

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
        started = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception:
            # The requests of the step have ended with an error, which the next step reports.
            _log.exception("a step failed")
            return
        self._note_step(time.perf_counter() - started)
        if outputs:
            self._deliver(outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
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

        with contextlib.suppress(RuntimeError):  # The event loop is closed; there are no clients.
            self._loop.call_soon_threadsafe(deliver)


def _ended_by_close(request_id: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, prompt_token_ids=(), finish_reason="error", error="the server is closing"
    )
