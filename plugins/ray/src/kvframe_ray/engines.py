"""Runs requests in the replicas that Ray's router chooses, and again in another one if a replica is lost."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from kvframe_engine.contract import EngineError
from kvframe_serve.runner import EngineEnded, EngineRequest, Receive
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvframe.contract import RequestError
from kvframe_ray.following import following_of
from kvframe_ray.messages import DIRECTLY, Asked, Job, Model, Refusal

_log = logging.getLogger("kvframe.ray")

MOST_TRIES = 3
"""Replicas that a request may lose: a request that ends the engines it runs in does not end all of them."""

_UPDATE_SECONDS = 0.2
"""The time between two looks at whether a replica for a new job runs."""

_LOST = "the replica that generated the answer was lost; send the request again"
_LOST_OFTEN = f"{MOST_TRIES} replicas were lost while they ran the request"


class RemoteEngines:
    """Runs requests in the replicas of a deployment.

    A request whose replica is lost runs again in another one, unless its client has a part of the answer already.
    """

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        """Take the handle of the deployment."""
        self._engines = engines
        self._generate = engines.options(stream=True, method_name="generate", **DIRECTLY)
        self._directory = following_of(engines.app_name, engines.deployment_name).directory
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def model(self, job: Job) -> Model:
        """Wait for a replica that was started for a job, and return what it serves."""
        while True:
            model: Model = await self._engines.model.remote()
            if model.job == job:
                return model
            await asyncio.sleep(_UPDATE_SECONDS)  # Replicas of an earlier job are being replaced.

    async def add(self, request: EngineRequest, receive: Receive) -> str:
        """Let a replica take a request; return the request's id.

        Raises:
            RequestError: The engine refuses the request.
            EngineError: No replica could take it (``closed``).
        """
        running = _Running(self, Asked(id=uuid.uuid4().hex, request=request), receive)
        await running.start()
        task = asyncio.get_running_loop().create_task(running.deliver())
        self._tasks[running.asked.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(running.asked.id, None))
        return running.asked.id

    def abort(self, request_id: str) -> None:
        """Abort a request whose client disconnected; its outputs are no longer delivered."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def ask(self, asked: Asked) -> Any:
        """Send a request to the replica that the router chooses; return the stream of its answer."""
        return self._generate.remote(asked)

    def note_begun(self, asked: Asked) -> None:
        """Record that the prompt of a request was computed."""
        self._directory.begin(asked.id)


class _Running:
    """A request that runs in a replica, or in one after another."""

    def __init__(self, engines: RemoteEngines, asked: Asked, receive: Receive) -> None:
        self.asked = asked
        self._engines = engines
        self._receive = receive
        self._num_lost = 0
        self._stream: Any = None

    async def start(self) -> None:
        """Let a replica take the request."""
        while True:
            self._stream = self._engines.ask(self.asked)
            try:
                refusal: Refusal | None = await anext(self._stream)
            except asyncio.CancelledError:
                self._stream.cancel()
                raise
            except RayActorError:
                self._lose()
                continue
            except RayServeException as error:
                raise EngineError(f"no engine can take the request: {error}", code="closed") from error
            if refusal is None:
                return
            if refusal.is_fault:
                raise RequestError(refusal.message, code=refusal.code)
            self._lose()

    async def deliver(self) -> None:
        """Deliver the outputs as they come."""
        try:
            while not await self._deliver_one_stream():
                self._lose()
                await self.start()
        except (EngineError, RequestError) as error:
            self._receive(EngineEnded(error=str(error)))

    async def _deliver_one_stream(self) -> bool:
        """Deliver the outputs of a replica; return False if it was lost before the first one."""
        has_begun = False
        try:
            async for outputs in self._stream:
                if not has_begun:
                    self._engines.note_begun(self.asked)
                    if outputs and isinstance(outputs[-1], EngineEnded):
                        return False
                has_begun = has_begun or bool(outputs)
                for output in outputs:
                    self._receive(output)
                    await asyncio.sleep(0)  # its reader takes it, so that few are unread
        except asyncio.CancelledError:
            self._stream.cancel()
            raise
        except RayActorError:
            if not has_begun:
                return False
            self._receive(EngineEnded(error=_LOST))
        except Exception as error:
            _log.exception("the answer of a replica cannot be read")
            self._receive(EngineEnded(error=f"the engine's replica has failed: {type(error).__name__}"))
        return True

    def _lose(self) -> None:
        """Count a lost replica."""
        self._num_lost += 1
        if self._num_lost == MOST_TRIES:
            raise EngineError(_LOST_OFTEN, code="failed")
