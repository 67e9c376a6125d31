"""The work of a cache core, one class for each kind: set up, done by turns, and checked. No package is needed."""

from __future__ import annotations

import gc
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.cache.checks import TokenIds, count_calls, draw, expect
from benchmarks.cache.core_cases import BLOCK_SIZE, Setting
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

SEED = 5
PASSING = 16 * BLOCK_SIZE
"""Tokens of the prompts that fill a cache beforehand."""


class Work(ABC):
    """A piece of work, set up."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Set it up.

        Args:
            core: The core that does it.
            setting: How its manager is made.
            sizes: The work's sizes.
        """
        self.core, self.setting, self.sizes = core, setting, sizes
        self.random = Random(SEED)
        core.build(setting)

    @abstractmethod
    def turn(self) -> list[float]:
        """Do it a few times; return the seconds of each."""

    @abstractmethod
    def check(self) -> dict[str, Any]:
        """Check what the core holds, and return what else there is to say of it.

        Raises:
            Mistake: It is not what it should be.
        """

    def draw(self) -> TokenIds:
        """Return a prompt's tokens."""
        return draw(self.random, self.sizes["length"])


class Decode(Work):
    """Steps of one token for each request. What is timed at once is a step for each token of a block."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Let others leave cached blocks, compute the prompts, and do a first few steps."""
        super().__init__(core, setting, sizes)
        others = (draw(self.random, PASSING) for _ in range(sizes.get("num_cached", 0) // (PASSING // BLOCK_SIZE)))
        for tokens in others:
            core.pass_through(core.prepare(tokens))
        shared = draw(self.random, sizes.get("shared", 0))
        for _ in range(sizes.get("num_branches", 0)):
            prompt = core.prepare([*shared, *draw(self.random, BLOCK_SIZE)])
            core.compute(prompt, 2048)
            core.let_go(prompt)
        lengths = [sizes["length"] + index % BLOCK_SIZE for index in range(sizes["num_requests"])]
        self.token_ids = [draw(self.random, length) for length in lengths]
        self.prompts = [core.prepare(list(tokens)) for tokens in self.token_ids]
        for prompt in self.prompts:
            core.compute(prompt, sizes.get("chunk", 2048))
        core.generate_from(self.prompts)
        self._steps()

    def turn(self) -> list[float]:
        """Do the steps; a figure is that of one step."""
        return [self._steps() for _ in range(self.sizes["num_cycles"])]

    def _steps(self) -> float:
        steps = [draw(self.random, len(self.prompts)) for _ in range(BLOCK_SIZE)]

        def run() -> None:
            for tokens in steps:
                self.core.step(tokens)

        seconds, _ = timed(run)
        for tokens in steps:
            for whole, token in zip(self.token_ids, tokens, strict=True):
                whole.append(token)
        return seconds / BLOCK_SIZE

    def check(self) -> dict[str, Any]:
        """Hold the blocks of every request against the live ranges, and find each of them by its tokens."""
        calls = count_calls(self._steps) - count_calls(lambda: [draw(self.random, 1) for _ in range(BLOCK_SIZE)])
        ids: list[int] = []
        groups = 0
        for prompt, tokens in zip(self.prompts, self.token_ids, strict=True):
            held = self.core.held(prompt)
            groups = len(held)
            for window, block_ids in held:
                first = 0 if window is None else max(0, len(tokens) - self.core.release_lag - window + 1) // BLOCK_SIZE
                found = [index for index, block_id in enumerate(block_ids) if block_id]
                what = f"blocks held of {len(tokens)} tokens, window {window}"
                expect([*range(first, -(-len(tokens) // BLOCK_SIZE))], found, what)
                ids += filter(None, block_ids)
        expect(len(ids), len(set(ids)), "different blocks of all requests")
        expect(len(ids), self.core.num_held(), "blocks held")
        for tokens in self.token_ids[:BLOCK_SIZE]:
            hit = find(self.core, [*tokens, 0])
            expect(len(tokens) // BLOCK_SIZE * BLOCK_SIZE, hit, f"tokens found of {len(tokens)}")
        return {"num_groups": groups, "num_held": len(ids), "calls_per_request": calls / BLOCK_SIZE / len(self.prompts)}


class Pass(Work):
    """Requests that come, are computed, and go."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Let some go first."""
        super().__init__(core, setting, sizes)
        self.passed: list[TokenIds] = []
        self._pass(sizes["num_before"])

    def turn(self) -> list[float]:
        """Return the seconds of each request."""
        return self._pass(self.sizes["num_calls"])

    def _pass(self, num_requests: int) -> list[float]:
        drawn = [self.draw() for _ in range(num_requests)]
        self.passed += drawn
        prompts = [self.core.prepare([*tokens]) for tokens in drawn]
        return [timed(lambda prompt=prompt: self.core.pass_through(prompt))[0] for prompt in prompts]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held, and that as many prompts as the pool has room for, and not one more, are found."""
        expect(0, self.core.num_held(), "blocks held")
        length = self.sizes["length"]
        num_kept = (self.setting.num_blocks - 1) // (length // BLOCK_SIZE) if self.setting.caching else 0
        num_kept = min(num_kept, len(self.passed))
        found = [find(self.core, tokens) > 0 for tokens in self.passed]
        expect([False] * (len(found) - num_kept) + [True] * num_kept, found, "prompts found")
        expect(
            (length - 1) // BLOCK_SIZE * BLOCK_SIZE * self.setting.caching, find(self.core, self.passed[-1]), "tokens"
        )
        return {"num_kept": num_kept}


def find(core: Core, tokens: TokenIds) -> int:
    """Return how many of a prompt's tokens are cached."""
    prompt = core.prepare([*tokens])
    hit = core.look_up(prompt)
    core.let_go(prompt)
    return hit


class LookUp(Work):
    """Lookups of prompts."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Compute the prompts that are found."""
        super().__init__(core, setting, sizes)
        self.cached = [[*self.draw(), 0] for _ in range(sizes["num_prompts"])]
        for tokens in self.cached:
            prompt = core.prepare([*tokens])
            core.compute(prompt, sizes["chunk"])
            core.let_go(prompt)

    def turn(self) -> list[float]:
        """Return the seconds of each lookup; every one is of another copy of the tokens."""
        return [self._look_up(index) for index in range(self.sizes["num_calls"])]

    def _look_up(self, index: int) -> float:
        core, expected = self.core, self.sizes["length"] * self.sizes["is_hit"]
        tokens = [*self.cached[index % len(self.cached)]] if self.sizes["is_hit"] else [*self.draw(), 0]
        if self.sizes["makes_room"]:
            made: list[Any] = []

            def admit() -> int:
                made.append(core.prepare(tokens))
                return core.admit(made[0])

            seconds, hit = timed(admit)
            prompt = made[0]
        else:
            prompt = core.prepare(tokens)
            seconds, hit = timed(lambda: core.look_up(prompt))
        core.let_go(prompt)
        expect(expected, hit, "tokens found")
        return seconds

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held."""
        expect(0, self.core.num_held(), "blocks held")
        return {}


class Keys(Work):
    """What a lookup needs of a prompt."""

    def turn(self) -> list[float]:
        """Return the seconds of each prompt."""
        prompts = [self.core.receive(self.draw()) for _ in range(self.sizes["num_calls"])]
        return [timed(lambda prompt=prompt: self.core.make_keys(prompt))[0] for prompt in prompts]

    def check(self) -> dict[str, Any]:
        """Return how many tokens there are."""
        return {"num_tokens": self.sizes["length"]}


class Build(Work):
    """A manager with its pool."""

    def turn(self) -> list[float]:
        """Return the seconds of each."""
        return [self._build() for _ in range(self.sizes["num_calls"])]

    def _build(self) -> float:
        # The end of the one before, whose garbage has cycles, is not timed.
        self.core.build(Setting(num_blocks=2))
        gc.collect()
        seconds, _ = timed(lambda: self.core.build(self.setting))
        return seconds

    def check(self) -> dict[str, Any]:
        """Return the bytes of each block, empty and cached."""
        self.core.build(Setting(num_blocks=2))
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        self.core.build(self.setting)
        empty, _ = tracemalloc.get_traced_memory()
        length = self.sizes["length"]
        first = self.draw()
        self.core.pass_through(self.core.prepare([*first]))
        for _ in range((self.setting.num_blocks - 1) // (length // BLOCK_SIZE) - 1):
            self.core.pass_through(self.core.prepare(self.draw()))
        gc.collect()
        cached, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        expect((length - 1) // BLOCK_SIZE * BLOCK_SIZE, find(self.core, first), "tokens found of the first prompt")
        return {
            "empty_bytes_per_block": (empty - before) / self.setting.num_blocks,
            "cached_bytes_per_block": (cached - before) / self.setting.num_blocks,
        }


WORKS: dict[str, type[Work]] = {kind.__name__: kind for kind in (Decode, Pass, LookUp, Keys, Build)}
