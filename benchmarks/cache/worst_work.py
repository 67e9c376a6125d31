"""The work of the cases in which a cache core could be slow. No package is needed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.cache.checks import TokenIds, draw, expect
from benchmarks.cache.core_cases import BLOCK_SIZE, Setting
from benchmarks.cache.work import Work, find
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core


class Turns(Work):
    """A conversation. Its reasoning is stripped before each next turn, so that every turn begins a branch."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Compute all turns but those that are timed, and one like these."""
        super().__init__(core, setting, sizes)
        self.kept: TokenIds = []
        self.first: TokenIds = []
        self.begins: list[float] = []
        self.frees: list[float] = []
        for _ in range(sizes["num_turns"]):
            asked, reply = self._draw()
            prompt = core.prepare([*self.kept, *asked, *reply])
            core.compute(prompt, 2048)
            core.let_go(prompt)
            self._keep(asked, reply)
        self.turn()

    def _draw(self) -> tuple[TokenIds, TokenIds]:
        sizes = self.sizes
        return draw(self.random, sizes["asked"]), draw(self.random, sizes["reasoned"] + sizes["answered"])

    def _keep(self, asked: TokenIds, reply: TokenIds) -> None:
        self.first = self.first or [*asked, *reply]
        self.kept += [*asked, *reply[self.sizes["reasoned"] :]]

    def turn(self) -> list[float]:
        """Return the seconds of the slowest decode step of one more turn."""
        core = self.core
        asked, reply = self._draw()
        prompt = core.prepare([*self.kept, *asked])
        begin, hit = timed(lambda: core.begin(prompt))
        num_tokens = len(self.kept) + len(asked)
        expect(len(self.kept) - self.sizes["answered"], hit, "tokens found of the conversation")
        core.advance([prompt], num_tokens)
        core.generate_from([prompt])
        steps = [timed(lambda token=token: core.step([token]))[0] for token in reply]
        free, _ = timed(lambda: core.let_go(prompt))
        self._keep(asked, reply)
        self.begins.append(begin)
        self.frees.append(free)
        return [max(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held, that the conversation is found, and that its oldest reasoning is not."""
        expect(0, self.core.num_held(), "blocks held")
        found = find(self.core, [*self.kept, 0])
        expect(len(self.kept) - self.sizes["answered"], found, "tokens found of the conversation")
        oldest = find(self.core, [*self.first, 0])
        expect(True, oldest <= self.sizes["asked"], "the oldest reasoning is evicted")
        return {"lookup_us": _median(self.begins[1:]), "release_us": _median(self.frees[1:])}


class Chain(Work):
    """A chain of blocks with a branch at each of them, and requests whose blocks take the place of these."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Compute all branches."""
        super().__init__(core, setting, sizes)
        self.begins: list[float] = []
        self.frees: list[float] = []
        depth = sizes["depth"]
        trunk = draw(self.random, depth * BLOCK_SIZE)
        for index in range(1, depth + 1):
            prompt = core.prepare([*trunk[: index * BLOCK_SIZE], *draw(self.random, BLOCK_SIZE)])
            hit = core.compute(prompt, 2048)
            expect((index - 1) * BLOCK_SIZE, hit, "tokens found of the chain")
            core.let_go(prompt)
        expect(depth * BLOCK_SIZE, find(core, [*trunk, 0]), "tokens found of the chain")
        self.last: TokenIds = []

    def turn(self) -> list[float]:
        """Return the seconds of the slowest step of a request."""
        core, length, chunk = self.core, self.sizes["length"], self.sizes["chunk"]
        self.last = self.draw()
        prompt = core.prepare([*self.last])
        begin, hit = timed(lambda: core.begin(prompt))
        expect(0, hit, "tokens found of a request that is like no other")
        ends = [min(start + chunk, length) for start in range(0, length, chunk)]
        steps = [timed(lambda end=end: core.advance([prompt], end))[0] for end in ends]
        free, _ = timed(lambda: core.let_go(prompt))
        self.begins.append(begin)
        self.frees.append(free)
        return [max(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held and the last request is found."""
        expect(0, self.core.num_held(), "blocks held")
        expect(self.sizes["length"], find(self.core, [*self.last, 0]), "tokens found of the last request")
        return {"lookup_us": _median(self.begins), "release_us": _median(self.frees)}


class Lockstep(Work):
    """Identical prompts, computed at the same time."""

    last: TokenIds
    slowest: float

    def turn(self) -> list[float]:
        """Return the seconds of the mean step."""
        core, length, chunk = self.core, self.sizes["length"], self.sizes["chunk"]
        self.last = self.draw()
        prompts = [core.prepare([*self.last]) for _ in range(self.sizes["num_requests"])]
        for prompt in prompts:
            expect(0, core.begin(prompt), "tokens found of a prompt that is new")
        steps = [timed(lambda end=end: core.advance(prompts, end))[0] for end in range(chunk, length + 1, chunk)]
        for prompt in prompts:
            core.let_go(prompt)
        self.slowest = max(steps)
        return [statistics.fmean(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held and the last prompt is found."""
        expect(0, self.core.num_held(), "blocks held")
        expect(self.sizes["length"], find(self.core, [*self.last, 0]), "tokens found of the last prompt")
        return {"slowest_us": 1e6 * self.slowest}


class FarState(Work):
    """Lookups of a prompt whose later states are evicted: an early one is left."""

    def __init__(self, core: Core, setting: Setting, sizes: Mapping[str, int]) -> None:
        """Compute the prompt's beginning, then all of it, and lose the states that came after the beginning."""
        super().__init__(core, setting, sizes)
        self.tokens = self.draw()
        for tokens in (self.tokens[: sizes["first"]], self.tokens):
            prompt = core.prepare([*tokens])
            core.compute(prompt, sizes["chunk"])
            core.let_go(prompt)
            if len(tokens) == sizes["first"]:
                early = set(core.cached_states())
        late = [each for each in core.cached_states() if each not in early]
        expect(True, bool(early and late), "early and late states cached")
        core.lose(late)

    def turn(self) -> list[float]:
        """Return the seconds of each lookup."""
        return [self._look_up() for _ in range(self.sizes["num_calls"])]

    def _look_up(self) -> float:
        core = self.core
        prompt = core.prepare([*self.tokens, 0])
        seconds, hit = timed(lambda: core.look_up(prompt))
        core.let_go(prompt)
        expect(self.sizes["first"], hit, "tokens found up to the nearest state")
        return seconds

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held."""
        expect(0, self.core.num_held(), "blocks held")
        return {}


def _median(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds)


WORST_WORKS: dict[str, type[Work]] = {kind.__name__: kind for kind in (Turns, Chain, Lockstep, FarState)}
