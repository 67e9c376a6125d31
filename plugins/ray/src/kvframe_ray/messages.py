"""What the parts of a deployment send to each other through Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from kvframe_serve.application import Task
from kvframe_serve.limits import Limits
from kvframe_serve.reading.question import ServedModel
from kvframe_serve.runner import EngineRequest

from kvframe import CacheEvent, Stack

DIRECTLY: Mapping[str, Any] = {"_by_reference": False}
"""The option of Ray's handles by which messages go from process to process over gRPC, and not through Ray's objects."""


@attrs.frozen(kw_only=True)
class Asked:
    """A request for the replica that the router chooses.

    Attributes:
        id: The request's id in this deployment.
        request: What the engine is asked for.
    """

    id: str
    request: EngineRequest


@attrs.frozen(kw_only=True)
class ToReplica:
    """A call for one replica.

    Attributes:
        replica: The replica's unique id.
    """

    replica: str


@attrs.frozen(kw_only=True)
class Events:
    """Events of a replica's cache.

    Attributes:
        secret: The secret of the keys in the events.
        events: The events since the last ones, in order. The first ones are all that was cached when the caller began.
    """

    secret: bytes = attrs.field(repr=False)
    events: Sequence[CacheEvent]


@attrs.frozen(kw_only=True)
class Refusal:
    """Why a replica did not take a request.

    Attributes:
        message: The sentence for the client.
        code: The code of the error.
        is_fault: Whether the request is wrong. Otherwise another replica may take it.
    """

    message: str
    code: str
    is_fault: bool


@attrs.frozen(kw_only=True)
class Job:
    """What a deployment serves.

    Attributes:
        model: The model's folder, or the id of a repository.
        stack: The stack.
        name: The name that clients use.
        task: What engines do; None for what the model is for.
    """

    model: str
    stack: Stack
    name: str
    task: Task | None


@attrs.frozen(kw_only=True)
class Model:
    """What a replica serves.

    Attributes:
        job: What it was started for.
        served: The model.
        limits: What is taken from clients, by the stack.
    """

    job: Job
    served: ServedModel
    limits: Limits
