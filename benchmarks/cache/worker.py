"""One engine's cache core in a process of its own, which sets works up, does turns of them and checks them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.cache.cases import WORKS
from benchmarks.cache.setting import Setting
from benchmarks.cache.work import Work

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

_M_TRIM_THRESHOLD = -1
_LARGE, _SMALL, _ARENA = 8192, 256, 256 << 10
"""Bytes: of a piece that Python asks the system's allocator for, of one from an arena of its own, and of an arena."""


def make_core(engine: str) -> Core:
    """Return the core of an engine."""
    if engine == "vllm":
        from benchmarks.cache.vllm_core import VLLM

        vllm: Any = VLLM()  # it has the same verbs
        core: Core = vllm
        return core
    from benchmarks.cache.kvframe_core import KVFrame

    return KVFrame()


class Answers:
    """Answers to questions, with works set up in between.

    Attributes:
        works: Those that are set up, by the name of the side that does them.
        kept_memory: What ``touch_memory`` returned.
    """

    def __init__(self, make: Callable[[], Core]) -> None:
        """Start with nothing set up.

        Args:
            make: Makes a core; each work has one of its own.
        """
        self._make = make
        self.works: dict[str, Work] = {}
        self.kept_memory: list[bytes] = []

    def __call__(self, question: dict[str, Any]) -> Any:
        """Set a work up, do a turn of one, or check one and give it up."""
        side = question["side"]
        match question["do"]:
            case "set up":
                work = WORKS[question["work"]](**question["sizes"])
                setting = question["setting"]
                work.set_up(self._make(), Setting(**{**setting, "windows": tuple(setting["windows"])}))
                self.works[side] = work
                # The collector of garbage is to forget what is there, as in an engine that is set up.
                gc.collect()
                gc.freeze()
                return None
            case "turn":
                return self.works[side].turn()
            case _:
                facts = self.works.pop(side).check()
                gc.unfreeze()
                gc.collect()
                return facts


def touch_memory(num_bytes: int) -> list[bytes]:
    """Let a process have used so much memory before, as one that has served for a while: large and small pieces.

    What the system gives to a process for the first time costs more than anything that is measured here.

    Args:
        num_bytes: How much of each.

    Returns:
        Small pieces that keep Python's own memory from being given back as long as they live.
    """
    with suppress(AttributeError):
        # Of glibc: memory that is free is not given back to the system.
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    large = [bytes(_LARGE) for _ in range(num_bytes // _LARGE)]
    del large
    return [bytes(_SMALL) for _ in range(num_bytes // _SMALL)][:: _ARENA // _SMALL]


def load(engine: str) -> tuple[dict[str, str], Answers]:
    """Return the versions of ``kvframe`` or, in its environment, ``vllm``, and what answers questions."""
    answers = Answers(lambda: make_core(engine))
    answers.kept_memory = touch_memory(256 << 20)
    return make_core(engine).describe(), answers
