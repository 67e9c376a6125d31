"""The Ray Serve application: a frontend that speaks OpenAI's interface, and engines."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
from kvframe_serve.application import Task
from kvframe_serve.limits import Limits
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvframe import Stack
from kvframe.contract import StackError
from kvframe_ray.frontend import Frontend
from kvframe_ray.messages import Job
from kvframe_ray.replica import EngineReplica
from kvframe_ray.router import PrefixRouter
from kvframe_ray.scaling import ByWaitingTokens

_KEYS_VARIABLE = "KVFRAME_API_KEYS"
_SPARE_CALLS = 64
"""Calls that a replica takes beside requests: of frontends that follow its cache, and of health checks."""

_ENVIRONMENT = {"env_vars": {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}}
"""Replicas send long prompts, and all that a large cache holds, in one message; Ray's limit is 4 MiB otherwise."""


class Arguments(pydantic.BaseModel):
    """The arguments of ``serve run kvframe_ray:app``.

    Attributes:
        model: The model's folder, the same on every machine, or the id of a repository.
        stack: The stack file, which is read where the command runs.
        replicas: Engines; with ``max_replicas``, the fewest.
        max_replicas: The most engines; between both numbers, Ray starts and ends engines by the tokens that wait.
        waiting_tokens: The tokens of prompts that may wait for one engine before another one is started.
        frontends: Processes that read requests and write answers.
        cpus: CPUs of an engine.
        gpus: GPUs of an engine.
        name: The name that clients use; default: that of the folder, or the repository's id.
        task: ``generate`` or ``embed``; default: what the model is for.
        drain_seconds: What running requests get to end when their replica is replaced or taken away.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str
    stack: str | None = None
    replicas: int = pydantic.Field(default=1, ge=1)
    max_replicas: int | None = pydantic.Field(default=None, ge=1)
    waiting_tokens: int = pydantic.Field(default=16_384, ge=1)
    frontends: int = pydantic.Field(default=1, ge=1)
    cpus: float = 1
    gpus: float = 0
    name: str | None = None
    task: Task | None = None
    drain_seconds: float = pydantic.Field(default=60, ge=0)


def app(args: Mapping[str, Any]) -> Application:
    """Return the application, as in ``serve run kvframe_ray:app model=path/to/model replicas=2``.

    The environment's ``KVFRAME_API_KEYS`` names the keys that are accepted, separated by spaces.
    """
    return make_app(Arguments.model_validate(args), RequestRouterConfig(request_router_class=PrefixRouter))


def make_app(args: Arguments, router: RequestRouterConfig) -> Application:
    """Return the application with any router.

    Args:
        args: The arguments.
        router: How requests are sent to engines.
    """
    stack = with_key(Stack() if args.stack is None else Stack.from_file(args.stack))
    folder = Path(args.model)
    model, name = (str(folder.resolve()), folder.resolve().name) if folder.exists() else (args.model, args.model)
    job = Job(model=model, stack=stack, name=args.name or name, task=args.task)
    max_requests = int(stack.plugins.settings.get("serve", {}).get("max_requests", Limits().max_requests))
    scale: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        policy = AutoscalingPolicy(
            policy_function=ByWaitingTokens,
            policy_kwargs={"target_tokens": args.waiting_tokens, "target_requests": max_requests},
        )
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=args.replicas, max_replicas=args.max_replicas, policy=policy
            )
        }
    engines = serve.deployment(
        EngineReplica,
        name="Engine",
        max_ongoing_requests=max_requests + _SPARE_CALLS,
        graceful_shutdown_timeout_s=args.drain_seconds,
        request_router_config=router,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus, "runtime_env": _ENVIRONMENT},
        **scale,
    )
    frontend = serve.deployment(
        Frontend,
        name="Frontend",
        num_replicas=args.frontends,
        max_ongoing_requests=max_requests + _SPARE_CALLS,
        graceful_shutdown_timeout_s=args.drain_seconds,
        ray_actor_options={"num_cpus": 0, "runtime_env": _ENVIRONMENT},
    )
    keys = tuple(os.environ.get(_KEYS_VARIABLE, "").split())
    application: Application = frontend.bind(engines.bind(job), job, keys)
    return application


def with_key(stack: Stack) -> Stack:
    """Return the stack with a key for cache events, which is drawn here so that all replicas have it.

    Raises:
        StackError: The stack has page stores and no key, and their pages would be lost with a key that is drawn.
    """
    if stack.cache.key is not None:
        return stack
    if stack.page_stores:
        raise StackError(
            f"{stack.source}: with page stores, the engines of a deployment need one key; set key in [cache] to 64 "
            "hexadecimal digits, or to a file of them"
        )
    return stack.with_options(cache={"key": secrets.token_hex(32)})
