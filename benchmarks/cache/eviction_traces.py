"""Request traces in which the choice of evicted blocks matters, drawn from a fixed seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np

from benchmarks.memory.traces import TRACES as LENGTHS
from benchmarks.memory.traces import Conversation, Tokens, draw, draw_tokens

LONGEST = 32_768
"""Tokens of the longest request."""


@attrs.frozen
class TracedRequest:
    """One request: its tokens with the reply, the end of its prompt, and how many tokens begin other requests too."""

    token_ids: Tokens[int]
    prompt_end: int
    num_shared: int = 0


def _length(random: np.random.Generator, median: int, spread: float) -> int:
    return min(LONGEST // 2, max(16, round(median * float(np.exp(spread * random.standard_normal())))))


def _request(random: np.random.Generator, prompt: Tokens[int], reply: int, num_shared: int = 0) -> TracedRequest:
    return TracedRequest(prompt + draw_tokens(random, reply), len(prompt), num_shared)


def document(random: np.random.Generator) -> TracedRequest:
    """Return a long prompt that is sent once."""
    return _request(random, draw_tokens(random, _length(random, 7_000, 0.6)), 180)


def on_one_of(random: np.random.Generator, prompts: Sequence[Tokens[int]]) -> TracedRequest:
    """Return a short question after one of some prompts."""
    shared = prompts[int(random.integers(len(prompts)))]
    return _request(random, shared + draw_tokens(random, _length(random, 200, 0.8)), 130, len(shared))


def _shared_and_scan(size: int) -> list[TracedRequest]:
    random = np.random.default_rng(0)
    prompts = [draw_tokens(random, 2_048) for _ in range(32)]
    return [document(random) if random.random() < 0.4 else on_one_of(random, prompts) for _ in range(2 * size)]


def _bursts(size: int) -> list[TracedRequest]:
    random = np.random.default_rng(1)
    prompts = [draw_tokens(random, 2_048) for _ in range(32)]
    requests: list[TracedRequest] = []
    while len(requests) < 2 * size:
        requests += [on_one_of(random, prompts) for _ in range(150)]
        requests += [document(random) for _ in range(80)]
    return requests


def _turns(conversations: list[Conversation], num_users: int, random: np.random.Generator) -> Iterator[TracedRequest]:
    """Yield the turns of conversations; each of ``num_users`` users holds one conversation after the other."""
    rest = iter(conversations)
    users = [
        (float(random.exponential(num_users)), user, conversation, 0)
        for user, conversation in zip(range(num_users), rest, strict=False)
    ]
    heapq.heapify(users)
    while users:
        time, user, conversation, index = heapq.heappop(users)
        turn = conversation.turns[index]
        yield TracedRequest(conversation.token_ids[: turn.end], turn.prompt_end)
        following, index = (conversation, index + 1) if index + 1 < len(conversation.turns) else (next(rest, None), 0)
        if following is not None:
            heapq.heappush(users, (time + float(random.exponential(num_users)), user, following, index))


def _chats(size: int, *, shared: bool, seed: int = 2) -> list[TracedRequest]:
    lengths = LENGTHS["multi-turn"] if shared else attrs.evolve(LENGTHS["multi-turn"], shared=0, num_shared=0)
    conversations = draw(lengths, size // 2, LONGEST, seed)
    return list(_turns(conversations, 48, np.random.default_rng(seed)))


def _zipf(size: int) -> list[TracedRequest]:
    random = np.random.default_rng(3)
    texts = [draw_tokens(random, _length(random, 1_500, 0.7)) for _ in range(1_000)]
    weights = 1 / np.arange(1, len(texts) + 1) ** 0.9
    ids = random.choice(len(texts), size=2 * size, p=weights / weights.sum())
    return [
        _request(random, texts[index] + draw_tokens(random, _length(random, 100, 0.8)), 130) for index in ids.tolist()
    ]


def _service(size: int) -> list[TracedRequest]:
    random, requests = np.random.default_rng(4), []
    for request in _chats(size, shared=True, seed=4):
        requests += [request, *([document(random)] if random.random() < 0.25 else [])]
    return requests


TRACES: Mapping[str, tuple[str, Callable[[int], list[TracedRequest]]]] = {
    "shared prompts, one-off documents between": (
        "60 % of the requests begin with one of 32 prompts of 2,048 tokens; the others are documents, 7,000 tokens in "
        "the middle, that no request repeats",
        _shared_and_scan,
    ),
    "shared prompts, one-off documents in bursts": (
        "150 requests that begin with one of 32 prompts of 2,048 tokens, then 80 such documents, and so on",
        _bursts,
    ),
    "conversations": ("48 users hold conversations of 2 to 8 turns that share nothing", partial(_chats, shared=False)),
    "conversations on shared prompts": (
        "the same, each on one of 8 prompts of 1,000 tokens",
        partial(_chats, shared=True),
    ),
    "conversations and documents": ("such conversations, and after every fourth turn a one-off document", _service),
    "popular texts": (
        "a question on one of 1,000 texts, 1,500 tokens in the middle; how often each is sent follows Zipf's law with "
        "the exponent 0.9",
        _zipf,
    ),
}
"""By name, a trace in words and the function that draws its requests; its argument scales their number."""
