"""Answer questions in a process of its own: set a work up on one engine's cache core, do turns of it, and check it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.cache.cases import WORKS
from benchmarks.cache.setting import Setting
from benchmarks.cache.work import Turns

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

_M_TRIM_THRESHOLD = -1
_LARGE, _SMALL, _ARENA = 8192, 256, 256 << 10
"""Bytes of an object that Python asks the C library for, of an object in an arena of its own, and of an arena."""


def make_core(engine: str) -> Core:
    """Return the core of an engine."""
    if engine == "vllm":
        from benchmarks.cache.vllm_core import VLLM

        vllm: Any = VLLM()  # It has the same methods.
        core: Core = vllm
        return core
    from benchmarks.cache.kvframe_core import KVFrame

    return KVFrame()


class Answers:
    """Answers the questions of ``cache/core.py``; ``works`` are the cores and works that were set up, by side."""

    def __init__(self, make: Callable[[], Core]) -> None:
        """Start without a work; ``make`` makes the core of each."""
        self._make = make
        self.works: dict[str, tuple[Core, Turns]] = {}
        self.kept_memory: list[bytes] = []

    def __call__(self, question: dict[str, Any]) -> Any:
        """Set a work up, do a turn of it, or check it and remove it."""
        side = question["side"]
        if question["do"] == "set up":
            core, setting = self._make(), question["setting"]
            setting = Setting(**{**setting, "windows": tuple(setting["windows"])})
            turns = WORKS[question["work"]].run(core, setting, **question["sizes"])
            next(turns)
            self.works[side] = core, turns
            # As in an engine that is set up, the garbage collector no longer looks at what exists now.
            gc.collect()
            gc.freeze()
            return None
        if question["do"] == "turn":
            return self.works[side][1].send(True)
        _, turns = self.works.pop(side)
        try:
            turns.send(False)
        except StopIteration as end:
            gc.unfreeze()
            gc.collect()
            return end.value
        raise AssertionError("the work goes on")


def touch_memory(num_bytes: int) -> list[bytes]:
    """Use so much memory in large and in small objects, and release it, as a process that has served for a while.

    Memory that the system gives to a process for the first time costs more than anything that is measured here.

    Returns:
        Small objects that keep Python's arenas allocated as long as they live.
    """
    with suppress(AttributeError):
        # glibc then keeps free memory instead of returning it to the system.
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    large = [bytes(_LARGE) for _ in range(num_bytes // _LARGE)]
    del large
    return [bytes(_SMALL) for _ in range(num_bytes // _SMALL)][:: _ARENA // _SMALL]


def load(engine: str) -> tuple[dict[str, str], Answers]:
    """Return the version of ``kvframe`` or, in its environment, of ``vllm``, and the answering object."""
    answers = Answers(lambda: make_core(engine))
    answers.kept_memory = touch_memory(256 << 20)
    return make_core(engine).describe(), answers
