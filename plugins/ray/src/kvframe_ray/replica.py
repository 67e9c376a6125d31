"""A replica of the deployment ``Engine``: an engine, its thread, and the streams of its answers and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kvframe_engine.contract import EngineError
from kvframe_serve.application import load_engine, served_model
from kvframe_serve.engine_thread import EngineThread
from kvframe_serve.limits import read_limits
from kvframe_serve.runner import EngineEnded
from kvframe_stores import choose_secret
from ray import serve

from kvframe import find_model
from kvframe.contract import RequestError
from kvframe_ray.feeds import Feeds
from kvframe_ray.messages import Asked, Events, Job, Model, Refusal, ToReplica

WAITING_TOKENS = "waiting_tokens"
"""The number by which a deployment is scaled: tokens of prompts without a generated token, of one replica."""


class EngineReplica:
    """Runs requests of a model."""

    async def __init__(self, job: Job) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model and start its engine."""
        self._id = serve.get_replica_context().replica_id.unique_id
        self._secret = choose_secret(job.stack, ())
        folder = find_model(Path(job.model), weights=True)
        self._engine = load_engine(folder, job.stack, job.task)
        limits = read_limits()
        self._model = Model(job=job, served=served_model(folder, job.name, self._engine, limits), limits=limits)
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(self._engine, loop)
        self._feeds = Feeds(self._thread, loop)
        self._num_waiting_tokens = 0

    async def model(self) -> Model:
        """Return what this replica serves."""
        return self._model

    async def generate(self, asked: Asked) -> AsyncIterator[Any]:
        """Yield a ``Refusal``; or None when the engine has the request, then lists of outputs until all are there.

        The outputs of a request that is not streamed come as one list, after an empty one when its prompt was computed.
        """
        request, num_tokens = asked.request, len(asked.request.prompt)
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._num_waiting_tokens += num_tokens
        request_id = None
        try:
            try:
                request_id = await self._thread.add(request, outputs.put_nowait)
            except (EngineError, RequestError) as error:
                is_closed = isinstance(error, EngineError) and error.code == "closed"
                yield Refusal(message=str(error), code=error.code, is_fault=not is_closed)
                return
            yield None
            held, num_running = [], request.num_samples
            while num_running:
                batch = [await outputs.get()]
                while not outputs.empty():
                    batch.append(outputs.get_nowait())
                if any(isinstance(output, EngineEnded) or output.error for output in batch):
                    num_running = 0
                else:
                    num_running -= sum(output.finish_reason is not None for output in batch)
                if num_tokens:
                    self._num_waiting_tokens -= num_tokens
                    num_tokens = 0
                    self._feeds.note_prompt()
                    if not request.stream:
                        yield []
                held += batch
                if request.stream or not num_running:
                    yield held
                    held = []
        finally:
            self._num_waiting_tokens -= num_tokens
            if request_id is not None:
                self._thread.abort(request_id)

    async def events(self, to: ToReplica) -> AsyncIterator[Events]:
        """Yield the events of the cache as they come.

        Args:
            to: This replica, if it still runs.
        """
        if to.replica != self._id:
            raise LookupError(f"replica {to.replica} does not run any more; this is {self._id}")
        async with aclosing(self._feeds.follow()) as feed:
            async for events in feed:
                yield Events(secret=self._secret, events=events)

    async def stats(self) -> Any:
        """Return the engine's counters."""
        return self._engine.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number that the deployment is scaled by; called by Ray."""
        return {WAITING_TOKENS: float(self._num_waiting_tokens)}

    def check_health(self) -> None:
        """Raise an error if the engine has ended or hangs; called by Ray, which then replaces this replica."""
        if not self._thread.is_alive:
            raise RuntimeError(self._thread.ended_by or "the engine has ended")
        seconds, max_seconds = self._thread.step_seconds, self._engine.stack.engine.max_step_seconds
        if seconds > max_seconds:
            raise RuntimeError(f"a step has been running for {seconds:.0f} seconds")

    def __del__(self) -> None:
        """End the engine; called by Ray after the running requests have ended, or the time for them is over."""
        if (thread := getattr(self, "_thread", None)) is not None:
            thread.close()
