"""The works that a cache core is measured on. Each sets a core up, does turns, and checks the core at the end.

vLLM's process imports this file too, so it imports nothing but Python's library.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.cache.setting import BLOCK_SIZE, Mistake, Setting, TokenIds
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

SEED, VOCABULARY = 5, 1 << 17
CHUNK = 2048
"""Tokens of a step that computes a prompt."""

Facts = dict[str, Any]
Turns = Generator[list[float], bool, Facts]
"""A running work. ``next`` sets it up; ``send(True)`` does a turn and returns its times in seconds; ``send(False)``
checks the core and returns facts about it."""


def expect(expected: Any, actual: Any, what: str) -> None:
    """Raise ``Mistake`` if two values differ."""
    if actual != expected:
        raise Mistake(f"{what}: {actual} instead of {expected}")


@dataclass(frozen=True)
class Work:
    """A kind of work: ``run`` starts it on a core, with a setting and the work's sizes.

    Attributes:
        words: What is timed, for people; names of sizes stand in braces.
        limits: Returns those fields of the setting that follow from the sizes.
    """

    name: str
    run: Callable[..., Turns]
    words: str
    limits: Callable[[Mapping[str, Any]], dict[str, Any]]


def work(
    words: str, limits: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda sizes: {}
) -> Callable[[Callable[..., Turns]], Work]:
    """Turn the decorated function into a kind of work."""
    return lambda run: Work(run.__name__, run, words, limits)


class Client:
    """Sends random requests to a core that is built for a setting."""

    def __init__(self, core: Core, setting: Setting) -> None:
        """Build the core's manager."""
        self.core, self._random = core, Random(SEED)
        core.build(setting)

    def draw(self, num_tokens: int) -> TokenIds:
        """Return random tokens."""
        return self._random.choices(range(VOCABULARY), k=num_tokens)

    def serve(self, tokens: TokenIds, chunk: int = CHUNK) -> int:
        """Serve a prompt to its end, ``chunk`` tokens in a step; return how many of its tokens were cached."""
        prompt = self.core.prepare([*tokens])
        hit = self.core.compute(prompt, chunk)
        self.core.let_go(prompt)
        return hit

    def look_up(self, tokens: TokenIds) -> tuple[float, int]:
        """Return the seconds of a lookup, and how many of the prompt's tokens are cached; the last one never is."""
        prompt = self.core.prepare([*tokens])
        seconds, hit = timed(lambda: self.core.look_up(prompt))
        self.core.let_go(prompt)
        return seconds, hit

    def find(self, tokens: TokenIds) -> int:
        """Return how many of a prompt's tokens are cached."""
        return self.look_up(tokens)[1]


@work(
    "One step of {num_requests} requests: each gets room for one more token; then the token is noted, with its id, as "
    "computed: a block that it fills becomes findable, and a page that a window has passed is released. Prompts have "
    "{length:,} tokens and up to 15 more, so that in every step one in 16 begins a block.",
    lambda sizes: {
        "num_blocks": 262_145,
        "max_num_seqs": sizes["num_requests"] + 1,
        "max_model_len": sizes["length"] + 2048,
    },
)
def decode(
    core: Core,
    setting: Setting,
    *,
    length: int,
    num_requests: int,
    num_cycles: int,
    num_branches: int = 0,
    shared: int = 0,
) -> Turns:
    """Decode a token of each request in each step. A time is that of one step, the mean over a block's 16 steps.

    A turn has ``num_cycles`` such runs. A prompt is one token longer than the one before, up to 15 tokens more than
    ``length``. First, ``num_branches`` prompts are cached that begin with the same ``shared`` tokens.
    """
    client = Client(core, setting)
    beginning = client.draw(shared)
    for _ in range(num_branches):
        client.serve([*beginning, *client.draw(BLOCK_SIZE)])
    texts = [client.draw(length + index % BLOCK_SIZE) for index in range(num_requests)]
    prompts = [core.prepare([*tokens]) for tokens in texts]
    for prompt in prompts:
        core.compute(prompt, CHUNK)
    core.generate_from(prompts)

    def cycle() -> float:
        steps = [client.draw(num_requests) for _ in range(BLOCK_SIZE)]

        def run() -> None:
            for tokens in steps:
                core.step(tokens)

        seconds, _ = timed(run)
        for tokens in steps:
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
        return seconds / BLOCK_SIZE

    seconds = [cycle()]
    while (yield seconds):
        seconds = [cycle() for _ in range(num_cycles)]
    ids: list[int] = []
    for prompt, tokens in zip(prompts, texts, strict=True):
        held_blocks = core.held(prompt)
        for window, block_ids in held_blocks:
            first = 0 if window is None else max(0, len(tokens) - core.release_lag - window + 1) // BLOCK_SIZE
            held_indices = [index for index, block_id in enumerate(block_ids) if block_id]
            what = f"blocks held of {len(tokens)} tokens, window {window}"
            expect([*range(first, -(-len(tokens) // BLOCK_SIZE))], held_indices, what)
            ids += filter(None, block_ids)
    expect(len(ids), len(set(ids)), "different blocks of all requests")
    expect(len(ids), core.num_held(), "blocks held")
    for tokens in texts[:BLOCK_SIZE]:
        num_full_tokens = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        expect(num_full_tokens, client.find([*tokens, 0]), f"tokens found of {len(tokens)}")
    return {"num_groups": len(held_blocks), "num_held": len(ids)}


@work(
    "One request of {length:,} tokens that nothing is cached of: looked up, given room for all its tokens, noted as "
    "computed, and let go. With caching on, its blocks stay findable; in a full pool, each block evicts another."
)
def serve(core: Core, setting: Setting, *, length: int, num_calls: int, num_before: int) -> Turns:
    """Serve ``num_calls`` requests in a turn, after ``num_before`` ones; each is computed in one step."""
    client, texts = Client(core, setting), list[TokenIds]()

    def serve_some(num_requests: int) -> list[float]:
        new_texts = [client.draw(length) for _ in range(num_requests)]
        texts.extend(new_texts)
        prompts = [core.prepare([*tokens]) for tokens in new_texts]
        return [timed(partial(core.pass_through, prompt))[0] for prompt in prompts]

    seconds = serve_some(num_before)
    while (yield seconds):
        seconds = serve_some(num_calls)
    # The newest prompts are found, as many as fit into the pool, and no other one.
    num_kept = (setting.num_blocks - 1) // (length // BLOCK_SIZE) if setting.caching else 0
    num_kept = min(num_kept, len(texts))
    hits = [client.find(tokens) for tokens in texts]
    expect([False] * (len(hits) - num_kept) + [True] * num_kept, [hit > 0 for hit in hits], "prompts found")
    expect((length - 1) // BLOCK_SIZE * BLOCK_SIZE * setting.caching, hits[-1], "tokens found")
    expect(0, core.num_held(), "blocks held")
    return {}


@work(
    "A prompt of {length:,} tokens and one more is looked up: a copy of one of {num_prompts} cached prompts, or one "
    "that is not cached if there are none. The keys that the lookup needs are ready. vLLM's call returns the blocks, "
    "kvframe's the number of tokens."
)
def look_up(core: Core, setting: Setting, *, length: int, num_prompts: int, num_calls: int) -> Turns:
    """Look up copies of ``num_prompts`` cached prompts, or prompts that are not cached if it is 0."""
    client = Client(core, setting)
    cached = [[*client.draw(length), 0] for _ in range(num_prompts)]
    for tokens in cached:
        client.serve(tokens)
    seconds: list[float] = []
    while (yield seconds):
        prompts = [cached[index % num_prompts] if cached else [*client.draw(length), 0] for index in range(num_calls)]
        lookups = [client.look_up(tokens) for tokens in prompts]
        expect({length if cached else 0}, {hit for _, hit in lookups}, "tokens found")
        seconds = [duration for duration, _ in lookups]
    expect(0, core.num_held(), "blocks held")
    return {}


@work("From a list of token ids: what the lookup needs of it.")
def keys(core: Core, setting: Setting, *, length: int, num_calls: int) -> Turns:
    """Make the keys of prompts, which a lookup needs."""
    client, seconds = Client(core, setting), list[float]()
    while (yield seconds):
        prompts = [core.receive(client.draw(length)) for _ in range(num_calls)]
        seconds = [timed(partial(core.make_keys, prompt))[0] for prompt in prompts]
    return {}


@work(
    "The manager with its pool, for one request at a time, from a plan that is made before. Then the bytes for each "
    "block, as Python and NumPy count them, when it is new, and when requests have filled it with cached blocks and "
    "gone."
)
def build(core: Core, setting: Setting, *, length: int, num_calls: int) -> Turns:
    """Build the manager; the facts are its bytes for each block, new and after prompts have filled the cache."""
    client, seconds = Client(core, setting), list[float]()

    def forget() -> None:
        # The last manager's end is not timed; its garbage has cycles.
        core.build(Setting(num_blocks=2))
        gc.collect()

    def build_one() -> float:
        forget()
        return timed(lambda: core.build(setting))[0]

    while (yield seconds):
        seconds = [build_one() for _ in range(num_calls)]
    forget()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    core.build(setting)
    empty, _ = tracemalloc.get_traced_memory()
    first = client.draw(length)
    core.pass_through(core.prepare([*first]))
    for _ in range((setting.num_blocks - 1) // (length // BLOCK_SIZE) - 1):
        core.pass_through(core.prepare(client.draw(length)))
    gc.collect()
    cached, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expect((length - 1) // BLOCK_SIZE * BLOCK_SIZE, client.find(first), "tokens found of the first prompt")
    return {
        "empty_bytes_per_block": (empty - before) / setting.num_blocks,
        "cached_bytes_per_block": (cached - before) / setting.num_blocks,
    }
