"""The work of a cache core, one class for each kind: its sizes, its words, how it is done and how it is checked.

No package is needed: vLLM's process imports this file too.
"""

from __future__ import annotations

import gc
import tracemalloc
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.cache.setting import BLOCK_SIZE, Setting
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

SEED, VOCABULARY = 5, 1 << 17
CHUNK = 2048
"""Tokens of a step that computes a prompt."""

PASSING = 16 * BLOCK_SIZE
"""Tokens of the prompts that fill a cache beforehand."""

TokenIds = list[int]


class Mistake(Exception):
    """A core does not hold or find what it should."""


def expect(expected: Any, found: Any, what: str) -> None:
    """Raise ``Mistake`` if two values differ."""
    if found != expected:
        raise Mistake(f"{what}: {found} instead of {expected}")


@dataclass(kw_only=True)
class Work(ABC):
    """A piece of work. Its fields are its sizes; it is set up once, done by turns, and checked at the end.

    Attributes:
        length: Tokens of a prompt.
    """

    length: int

    text: ClassVar[str] = ""
    """What is timed, for people; the names of sizes stand in braces."""

    @property
    def words(self) -> str:
        """What is timed, for people."""
        return self.text.format(**asdict(self))

    def make_setting(self, **options: Any) -> Setting:
        """Return how a core is set up for it."""
        return Setting(**options)

    def set_up(self, core: Core, setting: Setting) -> None:
        """Build the manager of a core and do what comes before the first turn."""
        self.core, self.setting, self.random = core, setting, Random(SEED)
        core.build(setting)

    @abstractmethod
    def turn(self) -> list[float]:
        """Do it a few times; return the seconds of each."""

    def check(self) -> dict[str, Any]:
        """Return what there is to say of the core at the end.

        Raises:
            Mistake: It does not hold or find what it should.
        """
        expect(0, self.core.num_held(), "blocks held")
        return {}

    def draw(self, num_tokens: int) -> TokenIds:
        """Return random tokens."""
        return self.random.choices(range(VOCABULARY), k=num_tokens)

    def serve(self, tokens: TokenIds, chunk: int = CHUNK) -> int:
        """Let a prompt come, be computed in steps of ``chunk`` tokens, and go; return how many tokens were cached."""
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


@dataclass(kw_only=True)
class Decode(Work):
    """Steps of one token for each request. What is timed at once is a step for each token of a block.

    Attributes:
        num_requests: Requests that decode; every next one has a token more, up to 15.
        num_cycles: Timed runs of 16 steps in a turn.
        num_cached: Blocks that others leave cached before.
        num_branches: Prompts with a common beginning that are cached before.
        shared: Tokens of that beginning.
    """

    num_requests: int
    num_cycles: int
    num_cached: int = 0
    num_branches: int = 0
    shared: int = 0

    text = (
        "One step of {num_requests} requests: each gets room for one more token; then the token is noted, "
        "with its id, as computed: a block that it fills becomes findable, and a page that a window has passed is "
        "released. Prompts have {length:,} tokens and up to 15 more, so that in every step one in 16 begins "
        "a block."
    )

    def make_setting(self, **options: Any) -> Setting:
        """Return a pool and limits for all steps."""
        limits = {"max_num_seqs": self.num_requests + 1, "max_model_len": self.length + 2048}
        return Setting(**{"num_blocks": 262_145, **limits, **options})

    def set_up(self, core: Core, setting: Setting) -> None:
        """Let others leave cached blocks, compute the prompts, and do a first few steps."""
        super().set_up(core, setting)
        for _ in range(self.num_cached * BLOCK_SIZE // PASSING):
            self.serve(self.draw(PASSING))
        shared = self.draw(self.shared)
        for _ in range(self.num_branches):
            self.serve([*shared, *self.draw(BLOCK_SIZE)])
        self.token_ids = [self.draw(self.length + index % BLOCK_SIZE) for index in range(self.num_requests)]
        self.prompts = [core.prepare([*tokens]) for tokens in self.token_ids]
        for prompt in self.prompts:
            core.compute(prompt, CHUNK)
        core.generate_from(self.prompts)
        self._steps()

    def turn(self) -> list[float]:
        """Do the steps; a figure is that of one step."""
        return [self._steps() for _ in range(self.num_cycles)]

    def _steps(self) -> float:
        steps = [self.draw(self.num_requests) for _ in range(BLOCK_SIZE)]

        def run() -> None:
            for tokens in steps:
                self.core.step(tokens)

        seconds, _ = timed(run)
        for tokens in steps:
            for whole, token in zip(self.token_ids, tokens, strict=True):
                whole.append(token)
        return seconds / BLOCK_SIZE

    def check(self) -> dict[str, Any]:
        """Hold the blocks of every request against the live ranges, and find some requests by their tokens."""
        ids: list[int] = []
        for prompt, tokens in zip(self.prompts, self.token_ids, strict=True):
            held = self.core.held(prompt)
            for window, block_ids in held:
                first = 0 if window is None else max(0, len(tokens) - self.core.release_lag - window + 1) // BLOCK_SIZE
                found = [index for index, block_id in enumerate(block_ids) if block_id]
                what = f"blocks held of {len(tokens)} tokens, window {window}"
                expect([*range(first, -(-len(tokens) // BLOCK_SIZE))], found, what)
                ids += filter(None, block_ids)
        expect(len(ids), len(set(ids)), "different blocks of all requests")
        expect(len(ids), self.core.num_held(), "blocks held")
        for tokens in self.token_ids[:BLOCK_SIZE]:
            whole = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            expect(whole, self.find([*tokens, 0]), f"tokens found of {len(tokens)}")
        return {"num_groups": len(held), "num_held": len(ids)}


@dataclass(kw_only=True)
class Pass(Work):
    """Requests that come, are computed in one step, and go.

    Attributes:
        num_calls: Requests of a turn.
        num_before: Requests before the first turn.
        what_stays: The end of the words: what becomes of a request's blocks.
    """

    num_calls: int = 64
    num_before: int = 8
    what_stays: str = "."

    text = (
        "One request of {length:,} tokens that nothing is cached of: looked up, given room for all its "
        "tokens, noted as computed, and let go{what_stays}"
    )

    def set_up(self, core: Core, setting: Setting) -> None:
        """Let some requests go first."""
        super().set_up(core, setting)
        self.passed: list[TokenIds] = []
        self._pass(self.num_before)

    def turn(self) -> list[float]:
        """Return the seconds of each request."""
        return self._pass(self.num_calls)

    def _pass(self, num_requests: int) -> list[float]:
        drawn = [self.draw(self.length) for _ in range(num_requests)]
        self.passed += drawn
        prompts = [self.core.prepare([*tokens]) for tokens in drawn]
        return [timed(lambda prompt=prompt: self.core.pass_through(prompt))[0] for prompt in prompts]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held, and that as many prompts as the pool has room for, and not one more, are found."""
        num_kept = (self.setting.num_blocks - 1) // (self.length // BLOCK_SIZE) if self.setting.caching else 0
        num_kept = min(num_kept, len(self.passed))
        found = [self.find(tokens) for tokens in self.passed]
        whole = (self.length - 1) // BLOCK_SIZE * BLOCK_SIZE
        expect([False] * (len(found) - num_kept) + [True] * num_kept, [hit > 0 for hit in found], "prompts found")
        expect(whole * self.setting.caching, found[-1], "tokens found")
        return super().check()


@dataclass(kw_only=True)
class LookUp(Work):
    """Lookups of prompts.

    Attributes:
        num_prompts: Prompts that are computed before.
        num_calls: Lookups of a turn.
        is_hit: Whether these prompts are looked up, each with one more token, or others that are not cached.
    """

    num_prompts: int = 4
    num_calls: int = 24
    is_hit: bool = True

    @property
    def words(self) -> str:
        """What is timed, for people."""
        cached = f"whose first {self.length:,} tokens are cached" if self.is_hit else "that is not cached"
        return (
            f"A prompt {cached}: looked up; its keys, where the lookup needs some, are ready. vLLM's call returns the "
            "blocks, kvframe's the number of tokens."
        )

    def set_up(self, core: Core, setting: Setting) -> None:
        """Compute the prompts that are found."""
        super().set_up(core, setting)
        self.cached = [[*self.draw(self.length), 0] for _ in range(self.num_prompts)]
        for tokens in self.cached:
            self.serve(tokens)

    def turn(self) -> list[float]:
        """Return the seconds of each lookup; every one is of another copy of the tokens."""
        return [self._look_up(index) for index in range(self.num_calls)]

    def _look_up(self, index: int) -> float:
        tokens = self.cached[index % len(self.cached)] if self.is_hit else [*self.draw(self.length), 0]
        seconds, hit = self.look_up(tokens)
        expect(self.length * self.is_hit, hit, "tokens found")
        return seconds


@dataclass(kw_only=True)
class Keys(Work):
    """What a lookup needs of a prompt.

    Attributes:
        num_calls: Prompts of a turn.
    """

    num_calls: int = 16

    text = "From a list of token ids: what the lookup needs of it."

    def turn(self) -> list[float]:
        """Return the seconds of each prompt."""
        prompts = [self.core.receive(self.draw(self.length)) for _ in range(self.num_calls)]
        return [timed(lambda prompt=prompt: self.core.make_keys(prompt))[0] for prompt in prompts]


@dataclass(kw_only=True)
class Build(Work):
    """A manager with its pool.

    Attributes:
        num_calls: Managers of a turn.
    """

    num_calls: int = 3

    text = (
        "The manager with its pool, for one request at a time, from a plan that is made before. Then the bytes for "
        "each block, as Python and NumPy count them, when it is new, and when requests have filled it with cached "
        "blocks and gone."
    )

    def turn(self) -> list[float]:
        """Return the seconds of each."""
        return [self._build() for _ in range(self.num_calls)]

    def _build(self) -> float:
        # The end of the one before, whose garbage has cycles, is not timed.
        self.core.build(Setting(num_blocks=2))
        gc.collect()
        return timed(lambda: self.core.build(self.setting))[0]

    def check(self) -> dict[str, Any]:
        """Return the bytes of each block, empty and cached."""
        self.core.build(Setting(num_blocks=2))
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        self.core.build(self.setting)
        empty, _ = tracemalloc.get_traced_memory()
        first = self.draw(self.length)
        self.core.pass_through(self.core.prepare([*first]))
        for _ in range((self.setting.num_blocks - 1) // (self.length // BLOCK_SIZE) - 1):
            self.core.pass_through(self.core.prepare(self.draw(self.length)))
        gc.collect()
        cached, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        expect((self.length - 1) // BLOCK_SIZE * BLOCK_SIZE, self.find(first), "tokens found of the first prompt")
        return {
            "empty_bytes_per_block": (empty - before) / self.setting.num_blocks,
            "cached_bytes_per_block": (cached - before) / self.setting.num_blocks,
        }
