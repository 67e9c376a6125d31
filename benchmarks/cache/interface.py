"""What the benchmarks ask of a cache core, in its own process and environment. No package is needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from benchmarks.cache.core_cases import Setting

VOCABULARY = 1 << 17
TokenIds = list[int]


class Core(Protocol):
    """A cache core, called as its engine's scheduler calls it. A *prompt* is whatever it takes for a request.

    Attributes:
        release_lag: Tokens by which it releases later what a window has passed.
    """

    release_lag: int

    def describe(self) -> dict[str, str]:
        """Return the versions that its figures depend on."""

    def build(self, setting: Setting) -> None:
        """Make the manager; what an earlier one holds is given up."""

    def receive(self, token_ids: TokenIds) -> Any:
        """Return a prompt as it arrives: nothing is made for its lookup."""

    def make_keys(self, prompt: Any) -> Any:
        """Return what a lookup needs of a prompt."""

    def prepare(self, token_ids: TokenIds) -> Any:
        """Return a prompt that is ready for a lookup."""

    def look_up(self, prompt: Any) -> int:
        """Return the tokens of a prompt that need not be computed."""

    def admit(self, prompt: Any) -> int:
        """Look a prompt up, take its cached blocks and make room for the rest of its tokens; return what was cached."""

    def begin(self, prompt: Any) -> int:
        """Look a prompt up and take its cached blocks, now or with the first tokens; return what was cached."""

    def advance(self, prompts: Sequence[Any], num_tokens: int) -> None:
        """Do a step in which each prompt that has begun is computed as far as ``num_tokens``."""

    def compute(self, prompt: Any, chunk: int) -> int:
        """Look a prompt up and compute the rest, ``chunk`` tokens in a step; return what was cached."""

    def pass_through(self, prompt: Any) -> None:
        """Look a prompt up, compute the rest in one step, and let the request go."""

    def let_go(self, prompt: Any) -> None:
        """End a request, or a lookup, and release what it holds."""

    def generate_from(self, prompts: Sequence[Any]) -> None:
        """Take note of who takes part in steps; all are computed."""

    def step(self, token_ids: TokenIds) -> None:
        """Do a decode step: room for one more token of each request, then its id, then it is computed."""

    def grow(self, prompt: Any, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens of a prompt, which stay uncomputed; False if there is none."""

    def held(self, prompt: Any) -> list[tuple[int | None, list[int]]]:
        """Return each group's window, and the request's block ids in it, 0 where a block is not held."""

    def num_held(self) -> int:
        """Return the blocks that requests hold."""

    def cached(self) -> list[Any]:
        """Return what names each cached block, while nothing is computed."""

    def cached_states(self) -> list[Any]:
        """Return what names each cached block that holds a recurrent state, while nothing is computed."""

    def lose(self, blocks: Sequence[Any]) -> None:
        """Give up cached blocks; some of them may have gone with others."""

    def num_evicted(self) -> int:
        """Return a count that grows by one with each cached block that is given up, while nothing is computed."""


def draw(random: Random, num_tokens: int) -> TokenIds:
    """Return random tokens."""
    return random.choices(range(VOCABULARY), k=num_tokens)


def count_calls(run: Callable[[], Any]) -> int:
    """Return how many functions written in Python ``run`` calls."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def settle() -> None:
    """Let the collector of garbage forget what is there, as engines do when they are set up."""
    gc.collect()
    gc.freeze()


class Mistake(Exception):
    """A core does not hold or find what it should."""


def expect(expected: Any, found: Any, what: str) -> None:
    """Raise if two values differ.

    Raises:
        Mistake: They do.
    """
    if found != expected:
        raise Mistake(f"{what}: {found} instead of {expected}")
