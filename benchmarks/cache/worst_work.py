"""The works in which a cache core could be slow: deep trees, many branches, identical prompts, far states.

vLLM's process imports this file too, so it imports nothing but Python's library.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.cache.setting import BLOCK_SIZE, Setting, TokenIds, hybrid
from benchmarks.cache.work import CHUNK, Client, Turns, expect, work
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

MAX_ROUNDS = 8
"""The most turns of a work: a conversation grows in each of them, and its pool is made for so many."""


def begin(client: Client, tokens: TokenIds, expected: int) -> Any:
    """Begin a request, so many of whose tokens must be cached; return its prompt."""
    prompt = client.core.prepare([*tokens])
    expect(expected, client.core.begin(prompt), "tokens found of a request that begins")
    return prompt


def _limits_of_turns(sizes: Any) -> dict[str, Any]:
    """Return a pool for what the conversation keeps and two turns more, so that most of the reasoning is evicted."""
    num_kept, num_turns = sizes["length"] + sizes["answered"], sizes["num_turns"] + MAX_ROUNDS
    return {
        "windows": hybrid(1, sizes["window"]),
        "num_blocks": 2 * (num_turns * num_kept + 2 * (num_kept + sizes["reasoned"])) // BLOCK_SIZE + 1,
        "max_model_len": (num_turns + 2) * num_kept + sizes["reasoned"] + 2048,
    }


@work(
    "One layer of full attention and one with a window of {window:,}. Each turn adds {length} tokens of the user to "
    "what is kept, and generates {reasoned} tokens of reasoning and an answer of {answered}. The reasoning is left out "
    "of the next prompt, so that every turn begins a branch. The pool is full: old branches are evicted. Timed is the "
    "slowest decode step of a turn.",
    _limits_of_turns,
)
def turns(
    core: Core, setting: Setting, *, length: int, num_turns: int, reasoned: int, answered: int, window: int
) -> Turns:
    """Continue a conversation after ``num_turns`` turns; each next prompt leaves its reasoning out."""
    client, history, first = Client(core, setting), TokenIds(), TokenIds()

    def draw() -> tuple[TokenIds, TokenIds]:
        return client.draw(length), client.draw(reasoned + answered)

    def keep(question: TokenIds, reply: TokenIds) -> None:
        first.extend([] if first else [*question, *reply])
        history.extend([*question, *reply[reasoned:]])

    for _ in range(num_turns):
        question, reply = draw()
        client.serve([*history, *question, *reply])
        keep(question, reply)

    def turn() -> list[float]:
        question, reply = draw()
        prompt = begin(client, [*history, *question], len(history) - answered)
        core.advance([prompt], len(history) + length)
        core.generate_from([prompt])
        steps = [timed(partial(core.step, [token]))[0] for token in reply]
        core.let_go(prompt)
        keep(question, reply)
        return [max(steps)]

    seconds = turn()
    while (yield seconds):
        seconds = turn()
    expect(len(history) - answered, client.find([*history, 0]), "tokens found of the conversation")
    expect(True, client.find([*first, 0]) <= length, "the oldest reasoning is evicted")
    expect(0, core.num_held(), "blocks held")
    return {}


@work(
    "One layer of full attention and one with a window of {window:,}. Prompts that part at each of {depth:,} blocks of "
    "one chain were computed and fill the pool. A request of {length:,} other tokens comes, is computed, and goes; its "
    "blocks take the place of cached ones. Timed is its slowest step.",
    lambda sizes: {
        "windows": hybrid(1, sizes["window"]),
        "num_blocks": 4 * max(sizes["depth"], sizes["length"] // BLOCK_SIZE) + 1,
        "max_model_len": max(sizes["length"], (sizes["depth"] + 2) * BLOCK_SIZE) + 2048,
    },
)
def chain(core: Core, setting: Setting, *, length: int, depth: int, chunk: int, window: int) -> Turns:
    """Serve requests, ``chunk`` tokens in a step, that evict a chain of ``depth`` blocks with a branch at each."""
    client = Client(core, setting)
    trunk = client.draw(depth * BLOCK_SIZE)
    for index in range(1, depth + 1):
        hit = client.serve([*trunk[: index * BLOCK_SIZE], *client.draw(BLOCK_SIZE)])
        expect((index - 1) * BLOCK_SIZE, hit, "tokens found of the chain")
    expect(depth * BLOCK_SIZE, client.find([*trunk, 0]), "tokens found of the chain")
    seconds: list[float] = []
    while (yield seconds):
        tokens = client.draw(length)
        prompt = begin(client, tokens, 0)
        ends = [min(start + chunk, length) for start in range(0, length, chunk)]
        steps = [timed(partial(core.advance, [prompt], end))[0] for end in ends]
        core.let_go(prompt)
        seconds = [max(steps)]
    expect(length, client.find([*tokens, 0]), "tokens found of the last request")
    expect(0, core.num_held(), "blocks held")
    return {}


@work(
    "Full attention. {num_requests} requests with the same prompt begin at the same time; each step computes {chunk} "
    "tokens of each. Timed is the mean step of a whole prefill.",
    lambda sizes: {
        # The pool has room for all of them, and an eighth more.
        "num_blocks": sizes["num_requests"] * sizes["length"] // BLOCK_SIZE * 9 // 8 + 1,
        "max_num_seqs": sizes["num_requests"] + 1,
        "max_model_len": sizes["length"] + 2048,
    },
)
def lockstep(core: Core, setting: Setting, *, length: int, num_requests: int, chunk: int) -> Turns:
    """Compute identical prompts at the same time."""
    client, seconds = Client(core, setting), list[float]()
    while (yield seconds):
        tokens = client.draw(length)
        prompts = [core.prepare([*tokens]) for _ in range(num_requests)]
        for prompt in prompts:
            expect(0, core.begin(prompt), "tokens found of a prompt that is new")
        steps = [timed(partial(core.advance, prompts, end))[0] for end in range(chunk, length + 1, chunk)]
        for prompt in prompts:
            core.let_go(prompt)
        seconds, slowest = [statistics.fmean(steps)], max(steps)
    expect(length, client.find([*tokens, 0]), "tokens found of the last prompt")
    expect(0, core.num_held(), "blocks held")
    return {"slowest_us": 1e6 * slowest}


@work(
    "One layer of full attention and one with a recurrent state. Keys and values of the whole prompt are cached; of "
    "the states, only those of its first {first:,} tokens are left. Looked up as in the other lookups.",
    lambda sizes: {
        "num_states": 1,
        "num_blocks": sizes["length"] // BLOCK_SIZE * 5 // 4 + 257,
        "max_model_len": 2 * sizes["length"],
    },
)
def far_state(core: Core, setting: Setting, *, length: int, first: int, num_calls: int, chunk: int = CHUNK) -> Turns:
    """Look a prompt up whose states after the token ``first`` are evicted."""
    client = Client(core, setting)
    tokens = client.draw(length)
    client.serve(tokens[:first], chunk)
    early = core.cached_states()
    client.serve(tokens, chunk)
    late = [block_id for block_id in core.cached_states() if block_id not in set(early)]
    expect(True, bool(early and late), "early and late states cached")
    core.lose(late)
    seconds: list[float] = []
    while (yield seconds):
        lookups = [client.look_up([*tokens, 0]) for _ in range(num_calls)]
        expect({first}, {hit for _, hit in lookups}, "tokens found up to the nearest state")
        seconds = [duration for duration, _ in lookups]
    expect(0, core.num_held(), "blocks held")
    return {}
