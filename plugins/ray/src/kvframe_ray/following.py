"""Follows the caches of all replicas, so that the directory of this process knows them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection
from typing import Any

from ray.serve.handle import DeploymentHandle

from kvframe_ray.directory import Directory
from kvframe_ray.messages import DIRECTLY, ToReplica

_log = logging.getLogger("kvframe.ray")

_RETRY_SECONDS = 0.5
"""The time until a replica is followed again whose events have ended."""


class Following:
    """Follows replicas: all routers that a process has for a deployment share one.

    Invariant: each running replica has one task in ``_tasks``.

    Attributes:
        directory: What is known of the replicas.
    """

    def __init__(self, application: str, deployment: str) -> None:
        """Follow no replica yet."""
        self.directory = Directory()
        self._application = application
        self._deployment = deployment
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._handle: asyncio.Task[Any] | None = None

    def update(self, replicas: Collection[str]) -> None:
        """Follow these replicas, and no others. It is called on the event loop of Ray's routers."""
        if self._handle is None:
            # A handle's constructor waits for this event loop, so another thread calls it.
            self._handle = asyncio.get_running_loop().create_task(asyncio.to_thread(self._make_handle))
        for replica in [*self._tasks]:
            if replica not in replicas:
                self._tasks.pop(replica).cancel()
        for replica in replicas:
            if replica not in self._tasks:
                self._tasks[replica] = asyncio.get_running_loop().create_task(self._follow(replica))

    async def _follow(self, replica: str) -> None:
        """Apply the events of a replica as they come; if they end, begin again with all that it has cached."""
        assert self._handle is not None
        handle = await asyncio.shield(self._handle)
        while True:
            stream = handle.remote(ToReplica(replica=replica))
            try:
                async for message in stream:
                    self.directory.apply(replica, message.secret, message.events)
            except Exception as error:  # The replica has ended or is unreachable, whatever Ray raises for that.
                _log.info("replica %s cannot be followed: %s", replica, type(error).__name__)
            finally:
                stream.cancel()
                self.directory.remove(replica)
            await asyncio.sleep(_RETRY_SECONDS)

    def _make_handle(self) -> Any:
        handle: Any = DeploymentHandle(self._deployment, self._application)
        return handle.options(method_name="events", stream=True, **DIRECTLY)


_FOLLOWING: dict[tuple[str, str], Following] = {}
_CREATING = threading.Lock()


def following_of(application: str, deployment: str) -> Following:
    """Return what follows the replicas of a deployment in this process."""
    with _CREATING:
        return _FOLLOWING.setdefault((application, deployment), Following(application, deployment))
