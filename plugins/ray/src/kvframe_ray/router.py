"""Ray Serve's request router: it sends each request to the replica that can answer it first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvframe_ray.following import following_of
from kvframe_ray.messages import Asked, ToReplica
from kvframe_ray.placement import order_replicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by the exact prefixes that replicas have cached, and by what they have still to do.

    Attributes:
        directory: What this process knows of the replicas.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the process's knowledge of the deployment; called by Ray after the constructor."""
        following = following_of(self._deployment_id.app_name, self._deployment_id.name)
        self._following = following
        self.directory = following.directory
        # By Ray's id of a request: its id in the directory, and the replica for which it counts there.
        self._sent: dict[str, tuple[str, str]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas; called by Ray when they change."""
        super().update_replicas(replicas)
        self._following.update({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica; called by Ray when a call finds that it has died."""
        super().on_replica_actor_died(replica_id)
        self.directory.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are asked to take a request; called by Ray."""
        asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(asked, ToReplica) and asked.replica in by_id:
            return [[by_id[asked.replica]]]
        lengths = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        loads = self.directory.loads(lengths)
        if not isinstance(asked, Asked) or pending_request is None:
            return [[by_id[name]] for name in order_replicas(0, {}, loads)]
        hits = self.hits(asked)
        order = order_replicas(len(asked.request.prompt), hits, loads)
        self._send(pending_request, asked, order[0], hits)
        return [[by_id[name]] for name in order]

    def hits(self, asked: Asked) -> Mapping[str, int]:
        """Return how many tokens of a prompt each replica would find."""
        return self.directory.hits(asked.request)

    def _send(self, pending_request: PendingRequest, asked: Asked, replica: str, hits: Mapping[str, int]) -> None:
        """Count a request before its replica has it, for the requests that are routed meanwhile."""
        internal_id = pending_request.metadata.internal_request_id
        num_tokens = len(asked.request.prompt) - hits.get(replica, 0)
        self.directory.send(asked.id, asked.request, replica, num_tokens)
        self._sent[internal_id] = asked.id, replica

        def forget_if_cancelled(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                self._forget(internal_id)

        pending_request.future.add_done_callback(forget_if_cancelled)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request for the replica that has taken it, if that is not the first choice; called by Ray."""
        asked = pending_request.args[0] if pending_request.args else None
        sent = self._sent.get(pending_request.metadata.internal_request_id)
        replica = replica_id.unique_id
        if isinstance(asked, Asked) and sent != (asked.id, replica):
            self._send(pending_request, asked, replica, self.hits(asked))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no longer; called by Ray when it was answered or has failed, and when it was rejected."""
        _, replica = self._sent.get(internal_request_id, ("", ""))
        if replica == replica_id.unique_id:  # Otherwise it was rejected there, and was sent to another one since.
            self._forget(internal_request_id)

    def _forget(self, internal_request_id: str) -> None:
        if sent := self._sent.pop(internal_request_id, None):
            self.directory.end(*sent)
