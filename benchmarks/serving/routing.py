"""Simulate many engines behind a router: exact prefixes, the power of two choices, or turns. No model is loaded.

See benchmarks/README.md.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import attrs
import click
from kvframe_ray.directory import Directory
from kvframe_ray.placement import order_replicas
from kvframe_serve.runner import EngineRequest

from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark, progress
from benchmarks.memory.traces import TRACES, Conversation, Lengths, draw
from kvframe import FullAttentionSpec, KVCacheManager, group_layers, plan_cache
from kvframe.contract import LayerSpec

SECRET = bytes(32)
LONGEST = 8_192
PROMPT_TOKENS_A_SECOND, REPLY_TOKENS_A_SECOND = 10_000, 40
POOL_TOKENS = 40_000
"""Tokens that the cache of one engine holds."""

SHARED = Lengths(prompt=200, prompt_spread=0.8, reply=100, reply_spread=0.6, shared=2_000, num_shared=64)
ALONE = Lengths(prompt=1_000, prompt_spread=0.8, reply=100, reply_spread=0.6)
CHOSEN_TRACES = {
    "multi-turn": (TRACES["multi-turn"], 12),
    "shared prefixes": (SHARED, 12),
    "shared prefixes, engines busy": (attrs.evolve(SHARED, num_shared=1_600), 40),
    "nothing shared": (ALONE, 12),
}
"""The lengths of conversations, and the users for each engine."""

PREFIX, KNOWN = "exact prefixes", "exact prefixes, none expected"
TWO, TURNS = "power of two choices", "round robin"
POLICIES = (PREFIX, KNOWN, TWO, TURNS)


class Engine:
    """One simulated engine: it computes prompts one after the other, and generates beside that."""

    def __init__(self, name: str) -> None:
        """Begin with an empty cache."""
        self.name = name
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
        plan = plan_cache(
            group_layers([LayerSpec(name="layer", spec=spec)]),
            memory_bytes=POOL_TOKENS * 32,
            max_model_len=LONGEST,
            max_num_batched_tokens=2_048,
        )
        self.cache = KVCacheManager(plan, max_num_seqs=256)
        self.take_events = self.cache.record_events(SECRET).take
        self.waiting: deque[Request] = deque()
        self.is_computing = False


@attrs.define(eq=False)
class Request:
    """One turn of a conversation.

    Attributes:
        id: Its name.
        user: The index of its user.
        conversation: The conversation.
        turn: The index of the turn.
        asked_at: When it came, in seconds.
        engine: The engine that it was sent to.
    """

    id: str
    user: int
    conversation: Conversation
    turn: int
    asked_at: float
    engine: Engine

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens of the prompt."""
        return self.conversation.token_ids[: self.conversation.turns[self.turn].prompt_end]


Choose = Callable[[str, EngineRequest], str]


class Simulation:
    """Users that hold one conversation after the other, over many engines."""

    def __init__(self, policy: str, conversations: Iterable[Conversation], num_engines: int, num_users: int) -> None:
        """Take the router's policy and the load."""
        self._engines = {f"engine{index}": Engine(f"engine{index}") for index in range(num_engines)}
        self._directory = Directory()
        self._ongoing = dict.fromkeys(self._engines, 0)
        self._random = random.Random(0)
        random.seed(0)  # order_replicas breaks ties by the module's generator
        self._turns = count()
        find = {PREFIX: self._directory.hits, KNOWN: self._directory.known_hits}.get(policy)
        self._choose: Choose = self._by_two if policy == TWO else self._by_turns
        if find is not None:
            self._choose = partial(self._by_prefix, find)
        self._conversations = iter(conversations)
        self._num_users = num_users
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ids = count()
        self.now = 0.0
        self.prompt_tokens = self.hit_tokens = 0
        self.first_token_seconds: list[float] = []

    # --- the router ---------------------------------------------------------------------------------------------------

    def _by_prefix(self, find: Callable[[EngineRequest], dict[str, int]], name: str, request: EngineRequest) -> str:
        hits, num_tokens = find(request), len(request.prompt)
        engine = order_replicas(num_tokens, hits, self._directory.loads(self._ongoing))[0]
        self._directory.send(name, request, engine, num_tokens - hits.get(engine, 0))
        return engine

    def _by_two(self, name: str, request: EngineRequest) -> str:
        engines = self._random.sample([*self._engines], min(2, len(self._engines)))
        return min(engines, key=self._ongoing.__getitem__)

    def _by_turns(self, name: str, request: EngineRequest) -> str:
        return f"engine{next(self._turns) % len(self._engines)}"

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all conversations have ended."""
        for user in range(self._num_users):
            self._at(self._random.random() * 10, lambda user=user: self._begin(user))  # type: ignore[misc]
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _begin(self, user: int) -> None:
        conversation = next(self._conversations, None)
        if conversation is not None:
            self._ask(user, conversation, 0)

    def _ask(self, user: int, conversation: Conversation, turn: int) -> None:
        request_id = f"request{next(self._ids)}"
        prompt = conversation.token_ids[: conversation.turns[turn].prompt_end]
        engine = self._engines[self._choose(request_id, EngineRequest(prompt=prompt, options={}))]
        self._ongoing[engine.name] += 1
        engine.waiting.append(Request(request_id, user, conversation, turn, self.now, engine))
        self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        """Begin to compute the next prompt of an engine, if it computes none and has the blocks."""
        if engine.is_computing or not engine.waiting:
            return
        request, cache = engine.waiting[0], engine.cache
        prompt = request.conversation.token_ids[: request.conversation.turns[request.turn].end]
        num_prompt = len(request.prompt)
        num_found = cache.start(request.id, prompt[:num_prompt])
        if not cache.extend(request.id, len(prompt)):
            cache.free(request.id)
            return  # until a request ends
        engine.waiting.popleft()
        engine.is_computing = True
        self.prompt_tokens += num_prompt
        self.hit_tokens += num_found
        self._at(self.now + (num_prompt - num_found) / PROMPT_TOKENS_A_SECOND, lambda: self._computed(request, prompt))

    def _computed(self, request: Request, tokens: Sequence[int]) -> None:
        engine, num_prompt = request.engine, len(request.prompt)
        engine.cache.commit(request.id, tokens, num_prompt)
        self._deliver(engine)
        self._directory.begin(request.id)
        self.first_token_seconds.append(self.now - request.asked_at)
        engine.is_computing = False
        self._at(self.now + (len(tokens) - num_prompt) / REPLY_TOKENS_A_SECOND, lambda: self._ended(request, tokens))
        self._admit(engine)

    def _ended(self, request: Request, tokens: Sequence[int]) -> None:
        engine = request.engine
        engine.cache.commit(request.id, tokens, len(tokens) - 1)
        engine.cache.free(request.id)
        self._deliver(engine)
        self._directory.end(request.id, engine.name)
        self._ongoing[engine.name] -= 1
        turn, conversation = request.turn + 1, request.conversation
        if turn < len(conversation.turns):
            pause = conversation.turns[turn].pause / 10
            self._at(self.now + pause, lambda: self._ask(request.user, conversation, turn))
        else:
            self._begin(request.user)
        self._admit(engine)

    def _deliver(self, engine: Engine) -> None:
        self._directory.apply(engine.name, SECRET, engine.take_events())


def simulate(policy: str, trace: str, num_engines: int, per_user: int) -> dict[str, Any]:
    """Run a trace by one policy; return the row of the record."""
    lengths, users_of_an_engine = CHOSEN_TRACES[trace]
    num_users = num_engines * users_of_an_engine
    conversations = draw(lengths, num_users * per_user, LONGEST)
    simulation = Simulation(policy, conversations, num_engines, num_users)
    simulation.run()
    seconds = sorted(simulation.first_token_seconds)
    return {
        "policy": policy,
        "trace": trace,
        "requests": len(seconds),
        "prompt_tokens": simulation.prompt_tokens,
        "hit_tokens": simulation.hit_tokens,
        "first_token_ms": 1e3 * statistics.median(seconds),
        "first_token_ms_99": 1e3 * seconds[len(seconds) * 99 // 100],
        "seconds": simulation.now,
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = (
        f"{record['engines']} engines with a cache of {POOL_TOKENS:,} tokens each; an engine computes "
        f"{PROMPT_TOKENS_A_SECOND:,} tokens of prompts per second, and generates {REPLY_TOKENS_A_SECOND} tokens per "
        "second for each request."
    )
    parts = []
    for trace in dict.fromkeys(row["trace"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["trace"] == trace]
        parts += [
            f"## {trace}",
            f"{CHOSEN_TRACES[trace][1]} users for each engine, {rows[0]['requests']:,} requests, "
            f"{rows[0]['prompt_tokens']:,} prompt tokens.",
            table(
                (
                    "router",
                    "hit tokens",
                    "share",
                    "first token, median",
                    "first token, 99 of 100",
                    "all answered after",
                ),
                [
                    (
                        row["policy"],
                        f"{row['hit_tokens']:,}",
                        f"{row['hit_tokens'] / row['prompt_tokens']:.1%}",
                        f"{row['first_token_ms']:,.0f} ms",
                        f"{row['first_token_ms_99']:,.0f} ms",
                        f"{row['seconds']:,.0f} s",
                    )
                    for row in rows
                ],
            ),
        ]
    return page(
        heading("Routers of many engines", record, ".", note, how="Simulated"),
        "Hits are prompt tokens that the engine did not compute. Exact prefixes are the router of `kvframe-ray`; if "
        "none are expected, it knows nothing of prompts that engines have not computed yet.",
        *parts,
    )


@benchmark("routing", write_report)
@options.choose("--trace", "traces", CHOSEN_TRACES)
@click.option("--engines", type=click.IntRange(2), default=64, show_default=True, help="The number of engines.")
@click.option("--per-user", type=click.IntRange(1), default=4, show_default=True, help="Conversations of each user.")
def main(traces: Sequence[str], engines: int, per_user: int) -> dict[str, Any]:
    """Run the traces by each router; write one JSON file and one page."""
    jobs = [(policy, trace) for trace in traces for policy in POLICIES]
    rows = []
    with progress("routers", len(jobs)) as advance:
        for policy, trace in jobs:
            rows.append(simulate(policy, trace, engines, per_user))
            advance(1)
    return {"engines": engines, "rows": rows}


if __name__ == "__main__":
    main()
