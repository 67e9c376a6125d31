"""A replica of the deployment ``Frontend``: the HTTP application of kvframe-serve, which answers with the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
from kvframe_serve.application import Application
from ray import serve
from ray.serve.handle import DeploymentHandle

from kvframe import find_model
from kvframe_ray.engines import RemoteEngines
from kvframe_ray.messages import Job


@serve.ingress()
class Frontend:
    """Reads requests, sends them to engines as token ids, and answers them."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engines: DeploymentHandle[Any], job: Job, keys: Collection[str]
    ) -> None:
        """Wait for an engine, and start what reads requests.

        Args:
            engines: The handle of the engines.
            job: What they serve.
            keys: The keys that are accepted; without keys, every caller is served.
        """
        self._names = (engines.app_name, engines.deployment_name)
        remote = RemoteEngines(engines)
        model = await remote.model(job)
        served = attrs.evolve(model.served, path=str(find_model(Path(job.model), weights=True)))
        self._application = await asyncio.to_thread(Application, served, model.limits, keys=keys, health=self._health)
        self._application.run_by(remote)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; called by Ray after the constructor."""
        return self._application.asgi

    async def _health(self) -> str:
        """Return why requests are not served now; empty if an engine runs."""
        application, deployment = self._names
        status = await asyncio.to_thread(serve.status)
        states = status.applications[application].deployments[deployment].replica_states
        if states.get("RUNNING"):
            return ""
        return f"no engine runs: {', '.join(f'{count} {state}' for state, count in states.items()) or 'there is none'}"

    def __del__(self) -> None:
        """End the processes that read requests; called by Ray after the running requests have ended."""
        if (application := getattr(self, "_application", None)) is not None:
            application.close()
