"""Count what each hint of requests buys: tokens that the cache finds, and steps that urgent requests wait.

No model is loaded. See benchmarks/README.md.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import click
import numpy as np
import torch
from kvframe_engine.requests.request import Request
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.tiers.move import HOST
from kvframe_engine.tiers.stored_pages import StoredPages
from kvframe_engine.tiers.tiers import Tiers

from benchmarks.cache.eviction import BOUND, COUNTED_FROM, block_ids, make_plan, make_policy_of, most_found
from benchmarks.cache.eviction_traces import LONGEST, TracedRequest, document, on_one_of
from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from benchmarks.memory.traces import TRACES as LENGTHS
from benchmarks.memory.traces import Conversation, Tokens, draw, draw_tokens
from kvframe import Hints, KVCacheManager, SamplingParams, load_plugins
from kvframe.attention.storage import HostStorage
from kvframe.cache.hints import NO_HINTS
from kvframe.contract import FCFS
from tests.support.stores import SHELVES, Shelf, ShelfStore

SIZE = 500
POOLS = (64 * 1024, 128 * 1024, 256 * 1024)
"""The cache's capacities in tokens."""

TIERS = (HOST, "shelf")
"""The tiers: host memory, and a page store."""

TIERED = ("no hints", "one-off", "sessions")
"""The hints with which tiers are replayed."""

ONE_OFF, BATCH = Hints(keep_seconds=0), Hints(priority=1)


@attrs.frozen
class Sent:
    """A request of a trace: when it is sent, whether it is a turn, a document or of a batch; of a turn, whether it is
    the last one of its conversation, and the number of that.
    """  # noqa: D205

    seconds: float
    kind: str
    request: TracedRequest
    is_last: bool = False
    session: int = 0


def _turns(
    conversations: Sequence[Conversation], num_users: int, random: np.random.Generator, gap: Callable[[], float]
) -> Iterator[Sent]:
    """Yield the turns of conversations; each of ``num_users`` users holds one conversation after the other."""
    rest = iter(enumerate(conversations))
    users = [(float(random.uniform(0, num_users)), user, next(rest), 0) for user in range(num_users)]
    heapq.heapify(users)
    while users:
        seconds, user, (session, conversation), index = heapq.heappop(users)
        turn, is_last = conversation.turns[index], index + 1 == len(conversation.turns)
        request = TracedRequest(conversation.token_ids[: turn.end], turn.prompt_end)
        yield Sent(seconds, "turn", request, is_last, session)
        following = next(rest, None) if is_last else (session, conversation)
        if following is not None:
            heapq.heappush(users, (seconds + gap(), user, following, 0 if is_last else index + 1))


def _chats(size: int, random: np.random.Generator) -> Iterator[Sent]:
    lengths = attrs.evolve(LENGTHS["multi-turn"], shared=0, num_shared=0)
    return _turns(draw(lengths, size, LONGEST, 2), 48, random, lambda: float(random.exponential(48)))


def _chats_and_documents(size: int) -> list[Sent]:
    random, sent = np.random.default_rng(5), []
    for each in _chats(size, random):
        sent.append(each)
        if random.random() < 0.25:
            sent.append(Sent(each.seconds, "document", document(random)))
    return sent


def _agents(size: int) -> list[Sent]:
    random, sent = np.random.default_rng(6), []
    lengths = attrs.evolve(LENGTHS["multi-turn"], shared=0, num_shared=0, turns=(6, 16), more=300)
    conversations = draw(lengths, size // 2, LONGEST, 6)
    for each in _turns(conversations, 24, random, lambda: float(random.uniform(5, 60))):
        sent.append(each)
        if random.random() < 0.25:
            sent.append(Sent(each.seconds, "document", document(random)))
    return sent


def _rewriting_agents(size: int) -> list[Sent]:
    random, num_agents, session = np.random.default_rng(9), 24, 0
    sent: list[Sent] = []

    def text(median: int) -> Tokens[int]:
        return draw_tokens(random, max(8, round(median * float(np.exp(0.7 * random.standard_normal())))))

    system = draw_tokens(random, 1_000)
    agents = [(float(random.uniform(0, num_agents)), agent) for agent in range(num_agents)]
    contexts, num_left, sessions = [system] * num_agents, [0] * num_agents, [0] * num_agents
    heapq.heapify(agents)
    while len(sent) < 6 * size:
        seconds, agent = heapq.heappop(agents)
        if not num_left[agent]:
            session += 1
            sessions[agent], num_left[agent] = session, int(random.integers(12, 40))
            contexts[agent] = system + text(200)
        num_left[agent] -= 1
        prompt, reply = contexts[agent], text(370)
        request = TracedRequest(prompt + reply, len(prompt))
        sent.append(Sent(seconds, "turn", request, not num_left[agent], sessions[agent]))
        if random.random() < 0.25:
            sent.append(Sent(seconds, "document", document(random)))
        longer = prompt + reply + text(400)
        contexts[agent] = longer if len(longer) <= 10_000 else system + draw_tokens(random, 1_200)
        heapq.heappush(agents, (seconds + float(random.uniform(5, 60)), agent))
    return sent


def _batch_beside_chats(size: int) -> list[Sent]:
    random, sent = np.random.default_rng(7), []
    texts = [draw_tokens(random, 2_048) for _ in range(64)]
    for index, each in enumerate(_chats(size, random)):
        sent.append(each)
        if index % 200 >= 100:  # a batch runs half of the time
            sent.append(Sent(each.seconds, "batch", on_one_of(random, texts)))
    return sent


TRACES: Mapping[str, tuple[str, float, Callable[[int], list[Sent]]]] = {
    "chats": (
        "48 users chat, and answer after 48 seconds on average (exponential), and after every fourth turn a one-off "
        "document; turns hint 150 seconds, within which 96 % of the next turns come",
        150.0,
        _chats_and_documents,
    ),
    "agents": (
        "24 agents of 6 to 16 turns, which wait for tools for 5 to 60 seconds, and such documents; turns hint 60 "
        "seconds",
        60.0,
        _agents,
    ),
    "rewriting agents": (
        "24 agents of 12 to 39 turns that share a system prompt, with such pauses and documents; a context of 10,000 "
        "tokens is replaced by a summary of 1,200; turns hint 60 seconds",
        60.0,
        _rewriting_agents,
    ),
    "batch": (
        "48 users who chat as in the first trace, and during half of the time a batch: after each turn a question on "
        "one of 64 texts of 2,048 tokens; turns hint 150 seconds",
        150.0,
        _batch_beside_chats,
    ),
}
"""By name, a trace in words, for how many seconds its turns are kept, and the function that draws it."""


def _last_or_kept(seconds: float, sent: Sent) -> Hints:
    return ONE_OFF if sent.is_last else Hints(keep_seconds=seconds)


HINTED: Mapping[str, Callable[[float, Sent], Hints]] = {
    "no hints": lambda seconds, sent: NO_HINTS,
    "one-off": lambda seconds, sent: ONE_OFF if sent.kind == "document" else NO_HINTS,
    "batch": lambda seconds, sent: BATCH if sent.kind == "batch" else NO_HINTS,
    "turns": lambda seconds, sent: Hints(keep_seconds=seconds) if sent.kind == "turn" else NO_HINTS,
    "all": lambda seconds, sent: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": _last_or_kept(seconds, sent),
    }[sent.kind],
    "sessions": lambda seconds, sent: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": attrs.evolve(_last_or_kept(seconds, sent), session_id=str(sent.session)),
    }[sent.kind],
    "no times": lambda seconds, sent: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": Hints(keep_seconds=0 if sent.is_last else None, session_id=str(sent.session)),
    }[sent.kind],
}
"""Which requests have hints. In ``all``, senders also say that a conversation is over."""


def replay(sent: Sequence[Sent], policy: str, num_tokens: int, hints: Callable[[Sent], Hints]) -> dict[str, Any]:
    """Serve requests one after the other; return what the counted ones found, by kind, and the processor seconds."""
    clock = [0.0]
    plan = make_plan(num_tokens)
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=make_policy_of(policy), now=lambda: clock[0])
    first, found, began = int(COUNTED_FROM * len(sent)), Counter[str](), time.process_time()
    for index, each in enumerate(sent):
        request, clock[0] = each.request, each.seconds
        hit = manager.start("request", request.token_ids[: request.prompt_end])
        if not manager.extend("request", len(request.token_ids)):
            raise RuntimeError("the pool is too small for a single request")
        manager.commit("request", request.token_ids, len(request.token_ids))
        manager.free("request", hints=hints(each))
        if index >= first:
            found[each.kind] += hit
    return {"found": dict(found), "seconds": time.process_time() - began}


def run(name: str, size: int) -> dict[str, Any]:
    """Return what is found of a trace in pools of all sizes, with hints of some requests."""
    words, seconds, make = TRACES[name]
    sent = make(size)
    first, requests = int(COUNTED_FROM * len(sent)), [each.request for each in sent]
    blocks, counted = block_ids(requests), Counter[str]()
    for each in sent[first:]:
        counted[each.kind] += each.request.prompt_end
    pools = {}
    for num_tokens in POOLS:
        sides: dict[str, Any] = {"lru": replay(sent, "lru", num_tokens, lambda each: NO_HINTS)}
        for hinted, hints_of in HINTED.items():
            sides[hinted] = replay(sent, "scan_resistant", num_tokens, partial(hints_of, seconds))
        sides[BOUND] = {"found": {"all": most_found(requests, blocks, num_tokens, first)}}
        pools[str(num_tokens)] = sides
    return {"words": words, "requests": len(sent), "counted": dict(counted), "pools": pools}


# --- tiers ------------------------------------------------------------------------------------------------------------


def replay_with_tiers(sent: Sequence[Sent], tier: str, hints: Callable[[Sent], Hints]) -> dict[str, int]:
    """Serve requests with a tier beside a small pool; return the tokens found, and the bytes written and brought back.

    Host memory is twice as large as the pool, and the store has no bound.
    """
    clock, plan = [0.0], make_plan(POOLS[0])
    pool = torch.zeros(plan.total_bytes, dtype=torch.uint8)
    host = HostStorage(plan, pool, 2 * plan.num_slabs) if tier == HOST else None
    manager = KVCacheManager(
        plan, max_num_seqs=1, eviction=make_policy_of("scan_resistant"), host_pages=host, now=lambda: clock[0]
    )
    SHELVES["hints"] = Shelf()
    storage: Any = SimpleNamespace(pool=pool, plan=plan)
    stores = [ShelfStore(shelf="hints")]
    pages = None if tier == HOST else StoredPages(storage, stores, bytes(32), lambda: ["trace"])
    tiers = Tiers(manager, host, pages, bytes(32))
    found = 0
    for each in sent:
        tokens, clock[0] = each.request.token_ids, each.seconds
        prompt = tokens[: each.request.prompt_end]
        request: Any = SimpleNamespace(
            uses_prefix=True, forks_from=None, is_swapped=False, fetch=None, keeps_part=False, ranges=(),
            cache_tokens=prompt, token_ids=prompt, cache_salt="", input_sequences={}, num_prompt_tokens=len(prompt),
        )  # fmt: skip
        tiers.begin(request)
        while not tiers.is_ready(request):
            tiers.wait()
        if request.fetch is not None:
            tiers.restore(request)
        found += manager.start("request", prompt)
        tiers.drop(request)
        if not manager.extend("request", len(tokens)):
            raise RuntimeError("the pool is too small for a single request")
        manager.commit("request", tokens, len(tokens))
        manager.free("request", hints=hints(each))
        tiers.flush(60)
    counts = tiers.stats()
    tiers.close()
    written, brought = counts["host_blocks_stored"], counts["restored_blocks"][tier]
    if tier != HOST:
        written = counts["stores"][tier].bytes_written // plan.groups[0].page_bytes
    return {"found": found, "blocks_written": written, "blocks_brought": brought}


def run_tiers(name: str, size: int) -> dict[str, Any]:
    """Return what tiers do beside the smallest pool, with hints of some requests."""
    _, seconds, make = TRACES[name]
    sent = make(size)
    sides = {
        hinted: {tier: replay_with_tiers(sent, tier, partial(HINTED[hinted], seconds)) for tier in TIERS}
        for hinted in TIERED
    }
    return {"prompt_tokens": sum(each.request.prompt_end for each in sent), "sides": sides}


# --- waiting ----------------------------------------------------------------------------------------------------------


def wait(policy: str, size: int) -> dict[str, Any]:
    """Serve a batch and urgent requests that come meanwhile; return the steps from arrival to the first token."""
    random, steps = np.random.default_rng(8), [0]
    chosen = FCFS if policy == "fcfs" else load_plugins().registry.scheduling_policies.load(policy)()
    manager = KVCacheManager(make_plan(64 * 1024), max_num_seqs=32)
    made: Scheduler[Request] = Scheduler(
        manager, max_num_seqs=32, max_num_batched_tokens=2048, policy=chosen, now=lambda: 0.05 * steps[0]
    )
    arrivals: dict[str, int] = {}
    firsts: dict[str, int] = {}
    requests: list[Request] = []

    def add(kind: str, num_tokens: int, num_new: int, hints: Hints) -> None:
        params = SamplingParams(max_new_tokens=num_new)
        name, tokens = f"{kind}{len(requests)}", draw_tokens(random, num_tokens)
        requests.append(
            Request.create(name, tokens, params, eos_token_ids=frozenset(), max_model_len=LONGEST, hints=hints)
        )
        arrivals[name] = steps[0]
        made.add(requests[-1])

    for _ in range(size // 2):
        add("batch", 2_000, 200, Hints(priority=1))
    began = time.process_time()
    while made.has_work:
        if random.random() < 0.05 and len(requests) < size:
            add("urgent", 500, 100, NO_HINTS)
        step = made.schedule()
        steps[0] += 1
        if step is not None:
            for request in made.complete(step, [7] * len(step.generating)):
                firsts.setdefault(request.request_id, steps[0])
    waits = {
        kind: sorted(firsts[name] - arrivals[name] for name in firsts if name.startswith(kind))
        for kind in ("urgent", "batch")
    }
    return {
        "steps": steps[0],
        "seconds_a_step": (time.process_time() - began) / steps[0],
        "preemptions": made.stats.preemptions,
        "median": {kind: statistics.median(each) for kind, each in waits.items()},
        "longest": {kind: each[-1] for kind, each in waits.items()},
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    sides = ("lru", *HINTED)
    parts = []
    for name, trace in record["traces"].items():
        counted = trace["counted"]
        rows = []
        for pool, of_sides in trace["pools"].items():
            best = 100 * of_sides[BOUND]["found"]["all"] / sum(counted.values())
            of_all = [f"{100 * sum(of_sides[side]['found'].values()) / sum(counted.values()):.1f}" for side in sides]
            rows.append((f"{int(pool) // 1024} Ki", "all", *of_all, f"{best:.1f}"))
            for kind, tokens in counted.items():
                if kind != "document":
                    shares = [f"{100 * of_sides[side]['found'].get(kind, 0) / tokens:.1f}" for side in sides]
                    rows.append(("", kind, *shares, ""))
        parts += [
            f"### {name}",
            f"{trace['words'][0].upper()}{trace['words'][1:]}. {trace['requests']:,} requests.",
            table(("pool", "requests", *sides, BOUND), rows),
        ]
    waiting = [
        (
            policy,
            *(f"{each[figure][kind]:g}" for kind in ("urgent", "batch") for figure in ("median", "longest")),
            f"{each['steps']:,}",
            f"{each['preemptions']:,}",
            f"{1e6 * each['seconds_a_step']:.0f}",
        )
        for policy, each in record["waiting"].items()
    ]
    tiers = [
        (
            name,
            {HOST: "host memory"}.get(tier, "page store"),
            hinted,
            f"{100 * counts['found'] / trace['prompt_tokens']:.1f}",
            f"{counts['blocks_written']:,}",
            f"{counts['blocks_written'] / max(1, counts['blocks_brought']):.2f}",
        )
        for name, trace in record["tiers"].items()
        for tier in TIERS
        for hinted in TIERED
        for counts in [trace["sides"][hinted][tier]]
    ]
    costs = [
        f"{sum(pool[side]['seconds'] for trace in record['traces'].values() for pool in trace['pools'].values()):.1f}"
        for side in sides
    ]
    return page(
        heading("Hints", record, ".", "What is found depends on no machine.", how="Replayed"),
        "## Prompt tokens that are found",
        "In % of the counted prompt tokens: by `lru`, by `scan_resistant` with hints of some requests, and at best. "
        "*one-off*: documents hint `keep_seconds=0`; *batch*: the batch's requests hint `priority=1`; *turns*: turns "
        "hint how long their prefix is needed; *all*: these three, and the last turn of a conversation hints "
        "`keep_seconds=0`; *sessions*: as *all*, and turns name their `session_id`; *no times*: as *sessions*, but "
        "only last turns hint a time.",
        *parts,
        "## Steps until the first token",
        "A batch of prompts of 2,000 tokens (`priority=1`) is sent at once; urgent ones of 500 come one by one. A step "
        "takes 0.05 seconds of the policy's clock. The last column is processor time of the scheduler and the cache.",
        table(
            ("", "urgent: median", "longest", "batch: median", "longest", "steps of all", "preemptions", "µs a step"),
            waiting,
        ),
        "## Tiers",
        f"Beside a pool of {POOLS[0] // 1024} Ki tokens, host memory of twice that size, or a page store without a "
        "bound. What is found is in % of the prompt tokens; blocks have 16 tokens.",
        table(("trace", "tier", "hints", "found", "blocks written", "written per block brought back"), tiers),
        "## Processor seconds of the replays",
        table(sides, [costs]),
    )


@benchmark("hints", write_report, cases="traces")
@options.choose("--trace", "names", TRACES)
@click.option(
    "--size", type=click.IntRange(min=50), default=SIZE, show_default=True, help="Scales the number of requests."
)
def main(names: tuple[str, ...], size: int) -> dict[str, Any]:
    """Count the tokens and the steps that hints of requests save; write one JSON file and one page."""
    waiting = {policy: wait(policy, size) for policy in ("fcfs", "priority")}
    traces = {name: run(name, size) for name in names}
    tiers = {name: run_tiers(name, size // 3) for name in names}
    return {"size": size, "waiting": waiting, "traces": traces, "tiers": tiers}


if __name__ == "__main__":
    main()
