"""The cases of the cache benchmarks: a work with its sizes, and the sides that do it. Imports only Python's library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.cache.setting import Setting, Side, hybrid, sides
from benchmarks.cache.work import Work, build, decode, keys, look_up, serve
from benchmarks.cache.worst_work import chain, far_state, lockstep, turns

WORKS = {work.name: work for work in (decode, serve, look_up, keys, build, turns, chain, lockstep, far_state)}
AT_MOST_TWICE = 0.5
"""The aim of the cases that could be slow: at most twice the time of vLLM's manager."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A work with its sizes, and the cores that do it; the others are compared with the first.

    Attributes:
        title: The title on the page.
        words: What is timed, for people.
        aim: How many times as fast as the first side kvframe is to be; None for no aim.
    """

    name: str
    title: str
    work: Work
    sizes: Mapping[str, int]
    sides: tuple[Side, ...]
    words: str = ""
    aim: float | None = None


def setting_of(work: Work, sizes: Mapping[str, int], **options: Any) -> Setting:
    """Return the setting of a work: the fields that follow from its sizes, and ``options`` instead of some of them."""
    return Setting(**{**work.limits(sizes), **options})


def _case(
    name: str, title: str, work: Work, sizes: Mapping[str, int], aim: float | None = None, **options: Any
) -> Case:
    """Return a case. If it has windows, kvframe also does it with a group for each layer; decodes also one by one."""
    forced, one_by_one = len(options.get("windows", ())) > 1, work is decode
    case_sides = sides(setting_of(work, sizes, **options), forced=forced, one_by_one=one_by_one)
    return Case(name, title, work, sizes, case_sides, work.words.format(**sizes), aim)


def _slow(name: str, title: str, work: Work, **sizes: int) -> Case:
    """Return a case in which a cache core could be slow."""
    return _case(name, title, work, sizes, AT_MOST_TWICE)


DECODE = {"length": 2048, "num_requests": 256, "num_cycles": 4}
FEW = DECODE | {"num_requests": 32}
SHORT = DECODE | {"length": 512, "num_cycles": 2}
SERVE = {"length": 2048, "num_calls": 64, "num_before": 8}
HIT, MISS = {"length": 8192, "num_prompts": 4, "num_calls": 24}, {"length": 8192, "num_prompts": 0, "num_calls": 24}
LONG_MISS = {"length": 131_072, "num_prompts": 0, "num_calls": 4}
KEYS, BUILD = {"length": 8192, "num_calls": 16}, {"length": 2048, "num_calls": 3}
TURNS = {"length": 64, "reasoned": 128, "answered": 64, "window": 1024}
CHAIN = {"length": 2048, "chunk": 2048, "window": 1024}
LOCKSTEP = {"length": 131_072, "num_requests": 8, "chunk": 256}
FAR_STATE = {"length": 131_072, "first": 2048, "num_calls": 4}


def standard_cases() -> tuple[Case, ...]:
    """Return the cases that are measured by default."""
    six, many, one_window = hybrid(5), hybrid(40), {"windows": (1024,), "max_model_len": 262_144}
    step, full = "Decode step, 256 requests", ", 8,192 tokens cached"
    of_six, of_many = "5 layers with windows and 1 full", "40 layers with windows and 1 full"
    of_short = f"{step} of 512 tokens, 40 layers with windows of 256 and 1 full"
    of_states = f"{step}, one layer of full attention and one with a recurrent state"
    of_ranges = f"{step}, one layer with a window that only its live ranges say"
    of_long = "Prefix lookup of 131,072 tokens, nothing cached, one layer with a window"
    of_turns = "Slowest decode step of a conversation after {} turns with reasoning"
    branches = "Slowest step among {:,} branches of one chain, {:,} tokens a step"
    chains = {
        "chain-500": CHAIN | {"depth": 500},
        "chain-4000": CHAIN | {"depth": 4000, "length": 16_384},
        "chain-4000-blocks": CHAIN | {"depth": 4000, "length": 4096, "chunk": 16},
    }
    return (
        _case("decode-256x1", f"{step}, full attention", decode, DECODE, 20),
        _case("decode-256x6", f"{step}, {of_six}", decode, DECODE, 40, windows=six),
        _case("decode-32x41", f"Decode step, 32 requests, {of_many}", decode, FEW, 40, windows=many),
        _case("decode-256x41", of_short, decode, SHORT, windows=hybrid(40, 256), num_blocks=655_361),
        _case("decode-256-state", of_states, decode, DECODE, 20, num_states=1),
        _case("decode-256-no-mask", of_ranges, decode, DECODE, 20, windows=(1024,), has_masks=False),
        _case("pass-uncached", "2,048 tokens, caching off", serve, SERVE, 5, caching=False),
        _case("pass-cached", "2,048 tokens, caching on", serve, SERVE, 8),
        _case(
            "pass-evicting",
            "2,048 tokens, every block evicts another",
            serve,
            SERVE | {"num_before": 80},
            7,
            num_blocks=8_193,
        ),
        _case("hit-1", f"Prefix lookup{full}, full attention", look_up, HIT, 20),
        _case("hit-6", f"Prefix lookup{full}, {of_six}", look_up, HIT, 20, windows=six),
        _case("miss-1", "Prefix lookup, nothing cached, full attention", look_up, MISS, 1),
        _case("miss-6", f"Prefix lookup, nothing cached, {of_six}", look_up, MISS, 1, windows=six),
        _case("miss-long", of_long, look_up, LONG_MISS, 1, **one_window),
        _case("keys", "Prefix keys of 8,192 tokens", keys, KEYS, 5, num_blocks=257),
        _case("build", "Build a pool of 131,073 blocks", build, BUILD, 10, max_num_seqs=1, max_model_len=4096),
        *(_slow(f"turns-{count}", of_turns.format(count), turns, **TURNS, num_turns=count) for count in (25, 100, 300)),
        *(_slow(name, branches.format(size["depth"], size["chunk"]), chain, **size) for name, size in chains.items()),
        _slow("lockstep", "Step of 8 identical prompts of 131,072 tokens", lockstep, **LOCKSTEP),
        _slow("far-state", "Prefix lookup of 131,072 tokens, the nearest state after 2,048", far_state, **FAR_STATE),
    )


def tiny_cases() -> tuple[Case, ...]:
    """Return small cases that try the script."""
    windows, few = hybrid(2, 32), {"length": 64, "num_calls": 3}
    steps = {"length": 64, "num_requests": 4, "num_cycles": 1}
    hit, miss = few | {"num_prompts": 2}, few | {"num_prompts": 0}
    return (
        _case("tiny-decode", "Decode step, tiny", decode, steps, windows=windows, num_blocks=1024),
        _case("tiny-state", "Decode step, tiny", decode, steps, num_states=1, num_blocks=1024),
        _case("tiny-no-mask", "Decode step, tiny", decode, steps, windows=(32,), has_masks=False, num_blocks=1024),
        _case("tiny-pass", "Pass", serve, few | {"num_before": 32}, 1, num_blocks=65),
        _case("tiny-pass-uncached", "Pass", serve, few | {"num_before": 32}, caching=False, num_blocks=65),
        _case("tiny-hit", "Prefix lookup, tiny", look_up, hit, 1, windows=windows, num_blocks=257),
        _case("tiny-miss", "Prefix lookup, tiny", look_up, miss, 1, windows=windows, num_blocks=257),
        _case("tiny-keys", "Keys", keys, few, num_blocks=257),
        _case("tiny-build", "Build", build, {"length": 256, "num_calls": 3}, num_blocks=257),
        _slow("tiny-turns", "Turns", turns, num_turns=32, length=16, reasoned=32, answered=16, window=128),
        _slow("tiny-chain", "Chain", chain, depth=8, length=64, chunk=32, window=32),
        _slow("tiny-lockstep", "Lockstep", lockstep, length=64, num_requests=2, chunk=16),
        _slow("tiny-far-state", "State", far_state, length=128, first=64, chunk=32, num_calls=1),
    )
