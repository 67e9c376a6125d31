"""Serve a tiny model with engines on Ray Serve, by each router, and let users talk to it. See benchmarks/README.md."""

from __future__ import annotations

import functools
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import click
from kvframe_ray.deploying import Arguments, make_app
from kvframe_ray.messages import Asked
from kvframe_ray.router import PrefixRouter
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from benchmarks.harness import options
from benchmarks.harness.record import benchmark, by_turns, counted, in_columns, progress
from benchmarks.serving.ray_page import AT_ONCE, REPLY_TOKENS, TRACES, write_report
from benchmarks.serving.ray_processes import processor_seconds
from benchmarks.serving.running import save_model
from tests.support.ray_cluster import ray_cluster


@attrs.frozen
class Setting:
    """A model, how many engines serve it, and for what.

    Attributes:
        config: The sizes of the model.
        memory: The cache of each engine.
        replicas: The engines.
        traces: What users ask.
    """

    config: Mapping[str, int]
    memory: str
    replicas: int
    traces: Sequence[str]


SETTINGS: Mapping[str, Setting] = {
    # Large enough that prompts take longer to compute than Ray takes to send them.
    "4 engines of 6 million parameters": Setting(
        {"max_position_embeddings": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
        "64MiB",
        4,
        TRACES,
    ),
    "2 engines of 32 million parameters": Setting(
        {"max_position_embeddings": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8},
        "256MiB",
        2,
        TRACES[-1:],
    ),
}
STACK = """
[cache]
memory = "{memory}"
[limits]
max_model_len = 1536
"""


class TurnsRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests to one replica after the other."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin with the first replica."""
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the next replica first."""
        replicas = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        start = next(self._turns) % len(replicas)
        return [[replica] for replica in (*replicas[start:], *replicas[:start])]


class KnownRouter(PrefixRouter):
    """Chooses by the prefixes that replicas have cached, and expects nothing of prompts that they have to compute."""

    def hits(self, asked: Asked) -> Mapping[str, int]:
        """Return how many tokens of a prompt each replica would find, by its events."""
        return self.directory.known_hits(asked.request)


ROUTERS: Mapping[str, Callable[[], RequestRouterConfig]] = {
    "power of two choices": RequestRouterConfig,
    "exact prefixes": lambda: RequestRouterConfig(request_router_class=PrefixRouter),
    "exact prefixes, none expected": lambda: RequestRouterConfig(request_router_class=KnownRouter),
    "round robin": lambda: RequestRouterConfig(request_router_class=TurnsRouter),
}

Talk = list[list[int]]
"""The token ids that each turn of a conversation adds."""


def draw_talks(trace: str, num_talks: int, number: int) -> list[Talk]:
    """Return the conversations of a trace in the round of a number; equal calls give equal ones."""
    generator = random.Random(f"{trace} {number}")

    def tokens(number: int) -> list[int]:
        return [generator.randrange(256) for _ in range(number)]

    if trace == "multi-turn":
        return [[tokens(400), *(tokens(60) for _ in range(5))] for _ in range(num_talks)]
    if trace == "shared prefixes":
        shared = [tokens(1_000) for _ in range(max(1, num_talks // 2))]
        return [[[*generator.choice(shared), *tokens(60)]] for _ in range(3 * num_talks)]
    return [[tokens(600)] for _ in range(3 * num_talks)]


def ask(url: str, prompt: Sequence[int]) -> tuple[float, int, list[int]]:
    """Stream an answer; return the seconds to its first token, the tokens that were found, and the answer's tokens."""
    body = {
        "prompt": [*prompt],
        "max_tokens": REPLY_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start, first, cached = time.perf_counter(), 0.0, 0
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    # The tokens of a random model's answer say nothing: the next turn has as many others.
    return first, cached, [0] * REPLY_TOKENS


def run_talks(url: str, talks: Sequence[Talk]) -> dict[str, Any]:
    """Let users talk, several at once; return the figures."""
    firsts: list[float] = []
    counts = {"prompt_tokens": 0, "hit_tokens": 0}
    lock = threading.Lock()

    def talk(turns: Talk) -> None:
        text: list[int] = []
        for turn in turns:
            text += turn
            first, cached, reply = ask(url, text)
            with lock:
                firsts.append(first)
                counts["prompt_tokens"] += len(text)
                counts["hit_tokens"] += cached
            text += reply

    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(talk, talks))
    seconds = time.perf_counter() - start
    return {
        **counts,
        "requests": len(firsts),
        "first_token_ms": 1e3 * statistics.median(firsts),
        "tokens_per_s": (counts["prompt_tokens"] + REPLY_TOKENS * len(firsts)) / seconds,
    }


def deploy(arguments: Arguments, router: str, url: str) -> str:
    """Deploy an application with a router; return its address."""
    path = f"/{name_of(router)}"
    serve.run(make_app(arguments, ROUTERS[router]()), name=name_of(router), route_prefix=path)
    ask(url + path, [0] * 20)
    return url + path


def name_of(router: str) -> str:
    """Return the name of the application with a router."""
    return router.replace(" ", "-").replace(",", "")


@benchmark("ray_serve", write_report)
@options.repeats(7, flag="--rounds")
@options.choose("--router", "routers", ROUTERS)
@options.choose("--setting", "settings", SETTINGS)
@click.option("--talks", type=click.IntRange(1), default=12, show_default=True, help="The number of conversations.")
def main(rounds: int, routers: Sequence[str], settings: Sequence[str], talks: int) -> dict[str, Any]:
    """Serve by all routers, which take turns; write one JSON file and one page."""
    results: dict[str, Any] = {}
    num_rounds = rounds * sum(len(SETTINGS[name].traces) for name in settings)
    with progress("routers", num_rounds) as advance:
        for name in settings:
            setting = SETTINGS[name]
            traces = _run_setting(setting, routers, rounds, talks, advance)
            results[name] = {"replicas": setting.replicas, "memory": setting.memory, "traces": traces}
    return {"repeats": rounds, "settings": results}


def _run_setting(
    setting: Setting, routers: Sequence[str], rounds: int, talks: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Serve a model by all routers; return the figures of each trace."""
    figures_by_trace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        stack = Path(folder, "stack.toml")
        stack.write_text(STACK.format(memory=setting.memory), encoding="utf-8")
        arguments = Arguments(
            model=str(save_model(Path(folder, "tiny"), **setting.config)),
            stack=str(stack),
            replicas=setting.replicas,
            cpus=0,
            drain_seconds=1,
        )
        with ray_cluster() as url:
            urls = {router: deploy(arguments, router, url) for router in routers}
            time.sleep(2)  # frontends begin to follow the engines
            for trace in setting.traces:
                # Nothing is found of an earlier round or trace, because tokens differ.
                run = functools.partial(_run_round, urls, trace, talks)
                turns = counted(by_turns([*urls], rounds, run, advance, warm_up=True))
                figures_by_trace[trace] = {router: in_columns(figures) for router, figures in turns.items()}
    return figures_by_trace


def _run_round(urls: Mapping[str, str], trace: str, num_talks: int, router: str, number: int) -> dict[str, Any]:
    before = processor_seconds()
    figures = run_talks(urls[router], draw_talks(trace, num_talks, number))
    after, application = processor_seconds(), name_of(router)
    names = {"frontend_ms": f"{application}:Frontend", "engines_ms": f"{application}:Engine", "all_ms": "all"}
    for column, name in names.items():
        figures[column] = 1e3 * (after[name] - before[name]) / figures["requests"]
    return figures


if __name__ == "__main__":
    main()
