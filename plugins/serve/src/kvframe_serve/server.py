"""Put an engine, its thread and the HTTP application together, and serve until the process is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from kvframe import Embedder, Engine, Stack
from kvframe.contract import shown
from kvframe_serve.application import Application, Task, load_engine, served_model
from kvframe_serve.connections import Connections
from kvframe_serve.engine_thread import STEP_SECONDS, EngineThread
from kvframe_serve.limits import read_limits
from kvframe_serve.metrics import EngineMetrics

_ENDING_SECONDS = 1.0
"""How long answers have to be sent after the requests of a closing server have ended."""

_MOST_NOT_ACCEPTED = 2048
"""Connections that may wait in the system until the server accepts them."""

_MOMENT_SECONDS = 0.01
"""The time between two looks at whether all answers have been sent."""


class Server:
    """Serves one model by OpenAI's interface.

    Attributes:
        app: The ASGI application.
        engine: The engine, which only the server's thread calls.
        ended_by: Why the engine serves no more although nobody closed it; empty otherwise.
    """

    def __init__(
        self,
        path: Path,
        *,
        stack: Stack | None = None,
        name: str | None = None,
        keys: Collection[str] = (),
        task: Task | None = None,
    ) -> None:
        """Load a model and make its engine.

        Args:
            path: A model's folder, with a tokenizer.
            stack: The stack; the default stack unless given. Its ``[plugin.serve]`` limits requests.
            name: The name that clients use; the folder's name unless given.
            keys: The keys that are accepted; without keys, every caller is served.
            task: What the server does; unless given, what the model is for.

        Raises:
            KVFrameError: The stack, the model or the memory is wrong, or the model has no tokenizer.
        """
        self.engine: Engine | Embedder = load_engine(path, stack, task)
        self._has_keys = bool(keys)
        self._thread: EngineThread | None = None
        self._uvicorn: _Uvicorn | None = None
        try:
            self._limits = limits = read_limits()
            served = served_model(path, name, self.engine, limits)
            self._application = application = Application(served, limits, keys=keys, health=self._health)
        except BaseException:
            self.engine.close()
            raise
        application.registry.register(EngineMetrics(self.engine, lambda: application.quota.num_used))
        self._connections = Connections(max_connections=limits.max_connections, client_seconds=limits.client_seconds)
        self.app: Any = application.asgi

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self._application.served.name

    @property
    def ended_by(self) -> str:
        """Why the engine serves no more although nobody closed it; empty otherwise."""
        return "" if self._thread is None else self._thread.ended_by

    def health(self) -> str:
        """Return why requests are not served now; empty if they are."""
        thread = self._thread
        if thread is None or not thread.is_alive:
            return self.ended_by or "the server is closing"
        seconds, max_seconds = thread.step_seconds, self.engine.stack.engine.max_step_seconds
        return f"a step has been running for {seconds:.0f} seconds" if seconds > max_seconds else ""

    async def _health(self) -> str:
        return self.health()

    def describe(self) -> Mapping[str, str]:
        """Return what is served, and how: what a start prints."""
        engine, served = self.engine, self._application.served
        backends = sorted({choice.backend for choice in engine.choices})
        concurrency = engine.plan.max_concurrency(served.max_model_len) if engine.plan.groups else None
        defaults = {name: value for name, value in served.defaults.items() if name != "max_new_tokens"}
        lines = {
            "model": f"{served.name}, to {'generate' if served.generates else 'embed'}",
            "runs on": f"{engine.stack.model.device}, {engine.stack.model.dtype}",
            "backends": ", ".join(backends) or "none",
            "cache": f"{engine.plan.total_bytes / (1 << 20):,.0f} MiB",
            "concurrency": f"{concurrency} requests of {served.max_model_len:,} tokens"
            if concurrency
            else "not limited",
            "keys": "accepted ones only" if self._has_keys else "none: every caller is served",
        }
        if served.generates:
            defaults_text = ", ".join(f"{name} {shown(value, 60)}" for name, value in defaults.items())
            lines["sampling"] = f"{defaults_text or 'greedy'} unless a request says otherwise (generation_config.json)"
        return lines

    async def run(self, listener: socket.socket, *, grace: float = 5.0) -> None:
        """Serve until the process is told to end.

        Args:
            listener: A bound socket, which this closes.
            grace: Seconds that running requests then get to end; the others end with an error.
        """
        config = uvicorn.Config(
            self.app,
            http=self._connections.make,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # asyncio accepts as many connections in one turn as may wait, before Connections can close any of them.
            backlog=1,
            timeout_keep_alive=self._limits.client_seconds,
            timeout_graceful_shutdown=grace + STEP_SECONDS + 2 * _ENDING_SECONDS,  # type: ignore[arg-type]
        )
        self._uvicorn = _Uvicorn(config, self, grace)
        self._start(asyncio.get_running_loop())
        try:
            await self._uvicorn.serve([listener])
        finally:
            self.close()

    def stop(self) -> None:
        """Let ``run`` end, as after SIGTERM. It may be called in any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def close(self) -> None:
        """End all requests, the engine and the reading processes. It may be called twice."""
        self.end_requests()
        self._application.close()

    def end_requests(self) -> None:
        """End all requests and the engine."""
        if self._thread is not None:
            self._thread.close()
        else:
            self.engine.close()

    def close_connections(self) -> None:
        """Close all connections, unsent bytes or not."""
        self._connections.abort()

    def _end_with_a_rank(self) -> None:
        """Answer all requests with an error, before this process ends because a rank failed."""
        assert self._thread is not None
        assert self._uvicorn is not None
        self._thread.fail()
        while self._uvicorn.server_state.tasks:
            time.sleep(_MOMENT_SECONDS)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread; outputs are delivered in ``loop``."""
        thread = self._thread = EngineThread(
            self.engine,
            loop,
            note_step=self._application.times.step,
            note_failed_step=self._application.times.failed_step,
            on_end=self.stop,
        )
        self.engine.on_failed_rank = self._end_with_a_rank
        self._application.run_by(thread)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, whose requests end with an error some time after the process was told to end."""

    def __init__(self, config: uvicorn.Config, server: Server, grace: float) -> None:
        super().__init__(config)
        self._server = server
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; a terminal that goes away ends the server as SIGTERM does."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_MOST_NOT_ACCEPTED)
        if hasattr(signal, "SIGHUP"):
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close, after the running requests have ended or the time for them is over."""

        async def end_requests() -> None:
            await asyncio.sleep(self._grace)
            await asyncio.to_thread(self._server.end_requests)
            await asyncio.sleep(_ENDING_SECONDS)
            self._server.close_connections()

        ending = asyncio.ensure_future(end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            # A signal that is raised again after this ends the process.
            await asyncio.to_thread(self._server.close)
            if tasks := set(self.server_state.tasks):  # after a second Ctrl-C, nobody has waited for them
                await asyncio.wait(tasks, timeout=_ENDING_SECONDS)
            self._server.close_connections()
            if hasattr(signal, "SIGHUP"):
                with contextlib.suppress(ValueError, RuntimeError):
                    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
