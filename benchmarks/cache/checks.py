"""What every work of a cache core needs: drawn tokens, counted calls, and checks. No package is needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from random import Random
from typing import Any

VOCABULARY = 1 << 17
TokenIds = list[int]


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
