"""The work in which a cache core could be slow: deep trees, many branches, identical prompts, far states.

No package is needed: vLLM's process imports this file too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.cache.setting import BLOCK_SIZE, Setting, hybrid
from benchmarks.cache.work import CHUNK, TokenIds, Work, expect
from benchmarks.harness.process import timed

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

MAX_ROUNDS = 8
"""Conversations go on in each round, in pools that are made for so many."""


@dataclass(kw_only=True)
class Request(Work):
    """Requests one by one: the slowest step is timed, and so are the lookup and the release."""

    def set_up(self, core: Core, setting: Setting) -> None:
        """Build the manager."""
        super().set_up(core, setting)
        self.begins: list[float] = []
        self.frees: list[float] = []

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held, and return the medians of the lookups and releases."""
        super().check()
        lookup, release = (1e6 * statistics.median(seconds) for seconds in (self.begins, self.frees))
        return {"lookup_us": lookup, "release_us": release}

    def begin(self, tokens: TokenIds, expected: int) -> Any:
        """Return a prompt that has begun; so many of its tokens must be cached."""
        prompt = self.core.prepare([*tokens])
        seconds, hit = timed(lambda: self.core.begin(prompt))
        expect(expected, hit, "tokens found of a request that begins")
        self.begins.append(seconds)
        return prompt

    def end(self, prompt: Any) -> None:
        """Let a request go."""
        self.frees.append(timed(lambda: self.core.let_go(prompt))[0])


@dataclass(kw_only=True)
class Turns(Request):
    """A conversation. Its reasoning is left out of each next prompt, so that every turn begins a branch.

    Attributes:
        length: Tokens that the user adds in each turn.
        num_turns: Turns before the first one that is timed.
        reasoned: Tokens of reasoning in each turn.
        answered: Tokens of each answer.
        window: Of the layer with a window.
    """

    length: int = 64
    num_turns: int
    reasoned: int = 128
    answered: int = 64
    window: int = 1024

    text = (
        "One layer of full attention and one with a window of {window:,}. Each turn adds {length} "
        "tokens of the user to what is kept, and generates {reasoned} tokens of reasoning and an answer of "
        "{answered}. The reasoning is left out of the next prompt, so that every turn begins a branch. The "
        "pool is full: old branches are evicted. Timed is the slowest decode step of a turn."
    )

    def make_setting(self, **options: Any) -> Setting:
        """Return a pool for what the conversation keeps at its end and two turns: most of the reasoning is evicted."""
        kept = self.length + self.answered
        num_tokens = (self.num_turns + MAX_ROUNDS) * kept + 2 * (kept + self.reasoned)
        return Setting(
            windows=hybrid(1, self.window),
            num_blocks=2 * num_tokens // BLOCK_SIZE + 1,
            max_model_len=(self.num_turns + MAX_ROUNDS + 2) * kept + self.reasoned + 2048,
            **options,
        )

    def set_up(self, core: Core, setting: Setting) -> None:
        """Compute all turns but those that are timed, and one like these."""
        super().set_up(core, setting)
        self.kept: TokenIds = []
        self.first: TokenIds = []
        for _ in range(self.num_turns):
            asked, reply = self._draw()
            self.serve([*self.kept, *asked, *reply])
            self._keep(asked, reply)
        self.turn()
        self.begins.clear()
        self.frees.clear()

    def _draw(self) -> tuple[TokenIds, TokenIds]:
        return self.draw(self.length), self.draw(self.reasoned + self.answered)

    def _keep(self, asked: TokenIds, reply: TokenIds) -> None:
        self.first = self.first or [*asked, *reply]
        self.kept += [*asked, *reply[self.reasoned :]]

    def turn(self) -> list[float]:
        """Return the seconds of the slowest decode step of one more turn."""
        asked, reply = self._draw()
        prompt = self.begin([*self.kept, *asked], len(self.kept) - self.answered)
        self.core.advance([prompt], len(self.kept) + len(asked))
        self.core.generate_from([prompt])
        steps = [timed(lambda token=token: self.core.step([token]))[0] for token in reply]
        self.end(prompt)
        self._keep(asked, reply)
        return [max(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that the conversation is found, and that its oldest reasoning is not."""
        expect(len(self.kept) - self.answered, self.find([*self.kept, 0]), "tokens found of the conversation")
        expect(True, self.find([*self.first, 0]) <= self.length, "the oldest reasoning is evicted")
        return super().check()


@dataclass(kw_only=True)
class Chain(Request):
    """A chain of blocks with a branch at each of them, and requests whose blocks take the place of these.

    Attributes:
        depth: Blocks of the chain.
        chunk: Tokens of a step.
        window: Of the layer with a window.
    """

    length: int = 2048
    depth: int
    chunk: int = CHUNK
    window: int = 1024

    text = (
        "One layer of full attention and one with a window of {window:,}. Prompts that part at each of "
        "{depth:,} blocks of one chain were computed and fill the pool. A request of {length:,} other "
        "tokens comes, is computed, and goes; its blocks take the place of cached ones. Timed is its slowest step."
    )

    def make_setting(self, **options: Any) -> Setting:
        """Return a pool that the branches fill."""
        return Setting(
            windows=hybrid(1, self.window),
            num_blocks=4 * max(self.depth, self.length // BLOCK_SIZE) + 1,
            max_model_len=max(self.length, (self.depth + 2) * BLOCK_SIZE) + 2048,
            **options,
        )

    def set_up(self, core: Core, setting: Setting) -> None:
        """Compute all branches."""
        super().set_up(core, setting)
        trunk = self.draw(self.depth * BLOCK_SIZE)
        for index in range(1, self.depth + 1):
            hit = self.serve([*trunk[: index * BLOCK_SIZE], *self.draw(BLOCK_SIZE)])
            expect((index - 1) * BLOCK_SIZE, hit, "tokens found of the chain")
        expect(self.depth * BLOCK_SIZE, self.find([*trunk, 0]), "tokens found of the chain")
        self.last: TokenIds = []

    def turn(self) -> list[float]:
        """Return the seconds of the slowest step of a request."""
        self.last = self.draw(self.length)
        prompt = self.begin(self.last, 0)
        ends = [min(start + self.chunk, self.length) for start in range(0, self.length, self.chunk)]
        steps = [timed(lambda end=end: self.core.advance([prompt], end))[0] for end in ends]
        self.end(prompt)
        return [max(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that the last request is found."""
        expect(self.length, self.find([*self.last, 0]), "tokens found of the last request")
        return super().check()


@dataclass(kw_only=True)
class Lockstep(Work):
    """Identical prompts, computed at the same time.

    Attributes:
        num_requests: How many.
        chunk: Tokens of each in a step.
    """

    num_requests: int = 8
    chunk: int = 256

    text = (
        "Full attention. {num_requests} requests with the same prompt begin at the same time; each step "
        "computes {chunk} tokens of each. Timed is the mean step of a whole prefill."
    )

    def make_setting(self, **options: Any) -> Setting:
        """Return a pool that has room for all of them, and an eighth more."""
        num_blocks = self.num_requests * self.length // BLOCK_SIZE * 9 // 8 + 1
        limits: dict[str, Any] = {"max_num_seqs": self.num_requests + 1, "max_model_len": self.length + 2048}
        return Setting(num_blocks=num_blocks, **limits, **options)

    def turn(self) -> list[float]:
        """Return the seconds of the mean step."""
        core, chunk = self.core, self.chunk
        self.last = self.draw(self.length)
        prompts = [core.prepare([*self.last]) for _ in range(self.num_requests)]
        for prompt in prompts:
            expect(0, core.begin(prompt), "tokens found of a prompt that is new")
        steps = [timed(lambda end=end: core.advance(prompts, end))[0] for end in range(chunk, self.length + 1, chunk)]
        for prompt in prompts:
            core.let_go(prompt)
        self.slowest = max(steps)
        return [statistics.fmean(steps)]

    def check(self) -> dict[str, Any]:
        """Hold that nothing is held and the last prompt is found."""
        expect(self.length, self.find([*self.last, 0]), "tokens found of the last prompt")
        return {**super().check(), "slowest_us": 1e6 * self.slowest}


@dataclass(kw_only=True)
class FarState(Work):
    """Lookups of a prompt whose later states are evicted: an early one is left.

    Attributes:
        first: Tokens up to the state that is left.
        chunk: Tokens of a step that computes the prompt.
        num_calls: Lookups of a turn.
    """

    first: int = 2048
    chunk: int = CHUNK
    num_calls: int = 4

    text = (
        "One layer of full attention and one with a recurrent state. Keys and values of the whole prompt are "
        "cached; of the states, only those of its first {first:,} tokens are left. Looked up as in the other "
        "lookups."
    )

    def make_setting(self, **options: Any) -> Setting:
        """Return a pool with room for the prompt and its states."""
        num_blocks = self.length // BLOCK_SIZE * 5 // 4 + 257
        return Setting(num_states=1, num_blocks=num_blocks, max_model_len=2 * self.length, **options)

    def set_up(self, core: Core, setting: Setting) -> None:
        """Compute the prompt's beginning, then all of it, and lose the states that came after the beginning."""
        super().set_up(core, setting)
        self.tokens = self.draw(self.length)
        self.serve(self.tokens[: self.first], self.chunk)
        early = core.cached_states()
        self.serve(self.tokens, self.chunk)
        late = [each for each in core.cached_states() if each not in set(early)]
        expect(True, bool(early and late), "early and late states cached")
        core.lose(late)

    def turn(self) -> list[float]:
        """Return the seconds of each lookup."""
        found = [self.look_up([*self.tokens, 0]) for _ in range(self.num_calls)]
        expect({self.first}, {hit for _, hit in found}, "tokens found up to the nearest state")
        return [seconds for seconds, _ in found]
