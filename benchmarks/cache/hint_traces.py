"""Traces of requests with a clock, and which of their requests have hints."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from benchmarks.cache.eviction_traces import LONGEST, TracedRequest, document, on_one_of
from benchmarks.memory.traces import TRACES as LENGTHS
from benchmarks.memory.traces import Conversation, Tokens, draw, draw_tokens
from kvframe import Hints
from kvframe.cache.hints import NO_HINTS

ONE_OFF, BATCH = Hints(keep_seconds=0), Hints(priority=1)


@attrs.frozen
class Arrival:
    """A request of a trace: its time, its kind (``turn``, ``document`` or ``batch``), and the session of a turn."""

    seconds: float
    kind: str
    request: TracedRequest
    is_last: bool = False
    session: int = 0


def _turns(
    conversations: Sequence[Conversation], num_users: int, random: np.random.Generator, gap: Callable[[], float]
) -> Iterator[Arrival]:
    """Yield the turns of conversations; each of ``num_users`` users holds one conversation after the other."""
    rest = iter(enumerate(conversations))
    users = [(float(random.uniform(0, num_users)), user, next(rest), 0) for user in range(num_users)]
    heapq.heapify(users)
    while users:
        seconds, user, (session, conversation), index = heapq.heappop(users)
        turn, is_last = conversation.turns[index], index + 1 == len(conversation.turns)
        request = TracedRequest(conversation.token_ids[: turn.end], turn.prompt_end)
        yield Arrival(seconds, "turn", request, is_last, session)
        following = next(rest, None) if is_last else (session, conversation)
        if following is not None:
            heapq.heappush(users, (seconds + gap(), user, following, 0 if is_last else index + 1))


def _chats(size: int, random: np.random.Generator) -> Iterator[Arrival]:
    lengths = attrs.evolve(LENGTHS["multi-turn"], shared=0, num_shared=0)
    return _turns(draw(lengths, size, LONGEST, 2), 48, random, lambda: float(random.exponential(48)))


def _chats_and_documents(size: int) -> list[Arrival]:
    random, trace = np.random.default_rng(5), []
    for arrival in _chats(size, random):
        trace.append(arrival)
        if random.random() < 0.25:
            trace.append(Arrival(arrival.seconds, "document", document(random)))
    return trace


def _agents(size: int) -> list[Arrival]:
    random, trace = np.random.default_rng(6), []
    lengths = attrs.evolve(LENGTHS["multi-turn"], shared=0, num_shared=0, turns=(6, 16), more=300)
    conversations = draw(lengths, size // 2, LONGEST, 6)
    for arrival in _turns(conversations, 24, random, lambda: float(random.uniform(5, 60))):
        trace.append(arrival)
        if random.random() < 0.25:
            trace.append(Arrival(arrival.seconds, "document", document(random)))
    return trace


def _rewriting_agents(size: int) -> list[Arrival]:
    random, num_agents, session = np.random.default_rng(9), 24, 0
    trace: list[Arrival] = []

    def text(median: int) -> Tokens[int]:
        return draw_tokens(random, max(8, round(median * float(np.exp(0.7 * random.standard_normal())))))

    system = draw_tokens(random, 1_000)
    agents = [(float(random.uniform(0, num_agents)), agent) for agent in range(num_agents)]
    contexts, num_left, sessions = [system] * num_agents, [0] * num_agents, [0] * num_agents
    heapq.heapify(agents)
    while len(trace) < 6 * size:
        seconds, agent = heapq.heappop(agents)
        if not num_left[agent]:
            session += 1
            sessions[agent], num_left[agent] = session, int(random.integers(12, 40))
            contexts[agent] = system + text(200)
        num_left[agent] -= 1
        prompt, reply = contexts[agent], text(370)
        request = TracedRequest(prompt + reply, len(prompt))
        trace.append(Arrival(seconds, "turn", request, not num_left[agent], sessions[agent]))
        if random.random() < 0.25:
            trace.append(Arrival(seconds, "document", document(random)))
        longer = prompt + reply + text(400)
        contexts[agent] = longer if len(longer) <= 10_000 else system + draw_tokens(random, 1_200)
        heapq.heappush(agents, (seconds + float(random.uniform(5, 60)), agent))
    return trace


def _batch_beside_chats(size: int) -> list[Arrival]:
    random, trace = np.random.default_rng(7), []
    texts = [draw_tokens(random, 2_048) for _ in range(64)]
    for index, arrival in enumerate(_chats(size, random)):
        trace.append(arrival)
        if index % 200 >= 100:  # a batch runs half of the time
            trace.append(Arrival(arrival.seconds, "batch", on_one_of(random, texts)))
    return trace


TRACES: Mapping[str, tuple[str, float, Callable[[int], list[Arrival]]]] = {
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


def _last_or_kept(seconds: float, arrival: Arrival) -> Hints:
    return ONE_OFF if arrival.is_last else Hints(keep_seconds=seconds)


HINTED: Mapping[str, Callable[[float, Arrival], Hints]] = {
    "no hints": lambda seconds, arrival: NO_HINTS,
    "one-off": lambda seconds, arrival: ONE_OFF if arrival.kind == "document" else NO_HINTS,
    "batch": lambda seconds, arrival: BATCH if arrival.kind == "batch" else NO_HINTS,
    "turns": lambda seconds, arrival: Hints(keep_seconds=seconds) if arrival.kind == "turn" else NO_HINTS,
    "all": lambda seconds, arrival: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": _last_or_kept(seconds, arrival),
    }[arrival.kind],
    "sessions": lambda seconds, arrival: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": attrs.evolve(_last_or_kept(seconds, arrival), session_id=str(arrival.session)),
    }[arrival.kind],
    "no times": lambda seconds, arrival: {
        "document": ONE_OFF,
        "batch": BATCH,
        "turn": Hints(keep_seconds=0 if arrival.is_last else None, session_id=str(arrival.session)),
    }[arrival.kind],
}
"""Which requests have hints. In ``all``, senders also say that a conversation is over."""
