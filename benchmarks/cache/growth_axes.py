"""The sizes that grow, and the work at several values of each. No package is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.cache.cases import Case
from benchmarks.cache.setting import BLOCK_SIZE, KVFRAME, VLLM, Setting, Side, apart, hybrid
from benchmarks.cache.work import Decode, Work
from benchmarks.cache.worst_work import Chain, Turns


@dataclasses.dataclass(frozen=True)
class Axis:
    """A size, and work at several values of it.

    Attributes:
        name: For the command line and the record.
        title: The size.
        words: What stays the same.
        cases: The work at each value.
    """

    name: str
    title: str
    words: str
    cases: Mapping[int, Case]


def _axis(
    name: str, title: str, words: str, values: Iterable[int], make: Callable[[int], tuple[Work, Setting]]
) -> Axis:
    """Return an axis; kvframe has a group for each layer, as vLLM has."""
    cases = {}
    for value in values:
        work, setting = make(value)
        sides = Side(VLLM, "vllm", setting), Side(KVFRAME, "kvframe", apart(setting))
        cases[value] = Case(str(value), "", work, sides)
    return Axis(name, title, words, cases)


def _set(work: Work, **options: Any) -> tuple[Work, Setting]:
    return work, work.make_setting(**options)


def _steps(num_requests: int = 8, length: int = 512, num_cached: int = 0, **options: Any) -> tuple[Work, Setting]:
    work = Decode(length=length, num_requests=num_requests, num_cycles=2, num_cached=num_cached)
    return _set(work, **{"num_blocks": 65_537, **options})


def _full_steps(num_branches: int) -> tuple[Work, Setting]:
    """Return decode steps in a pool that prompts with a common beginning fill: each new block takes another's place."""
    work = Decode(length=512, num_requests=8, num_cycles=2, num_branches=num_branches, shared=8192)
    blocks_per_layer = work.shared // BLOCK_SIZE + num_branches + work.num_requests * (work.length // BLOCK_SIZE - 8)
    return _set(work, windows=hybrid(1, 256), num_blocks=2 * blocks_per_layer + 1, max_model_len=work.shared + 2048)


def standard_axes() -> tuple[Axis, ...]:
    """Return what is measured by default."""
    full = "and the pool is full of cached blocks"
    return (
        _axis(
            "pool",
            "blocks in the pool",
            "4 requests of 256 tokens, full attention",
            (256, 1024, 4096, 16_384, 65_536),
            lambda size: _steps(4, 256, num_blocks=size),
        ),
        _axis(
            "requests",
            "requests",
            "512 tokens each, full attention, 65,536 blocks",
            (1, 4, 16, 64, 256, 1024),
            _steps,
        ),
        _axis(
            "groups",
            "groups",
            "16 requests of 1,536 tokens, one layer of full attention and the others with windows",
            (1, 2, 4, 8, 16, 32, 64),
            lambda size: _steps(16, 1536, windows=hybrid(size - 1, 256), num_blocks=131_073),
        ),
        _axis(
            "length",
            "tokens of each request",
            "8 requests, full attention, 65,536 blocks",
            (256, 1024, 4096, 16_384, 65_536),
            lambda size: _steps(length=size),
        ),
        _axis(
            "cached",
            "blocks cached before",
            "8 requests of 512 tokens, full attention, 65,536 blocks",
            (16, 1024, 4096, 16_384, 61_440),
            lambda size: _steps(num_cached=size),
        ),
        _axis(
            "branches",
            "cached prompts with a common beginning",
            f"8 requests of 512 tokens, a window of 256 and full attention; 8,192 tokens are in common, {full}",
            (10, 100, 1000, 10_000),
            _full_steps,
        ),
        _axis(
            "depth",
            "blocks of a chain, with a branch at each",
            f"Slowest step of 16 tokens of a request of 1,024; a window of 1,024 and full attention, {full}",
            (10, 100, 1000, 10_000),
            lambda size: _set(Chain(depth=size, length=1024, chunk=BLOCK_SIZE)),
        ),
        _axis(
            "turns",
            "turns of a conversation whose reasoning is stripped",
            f"Slowest of the 192 decode steps of a turn; a window of 1,024 and full attention, {full}",
            (10, 30, 100, 300, 1000),
            lambda size: _set(Turns(num_turns=size)),
        ),
    )


def tiny_axis() -> Axis:
    """Return an axis to try the script on, not to measure."""
    return _axis(
        "tiny",
        "groups",
        "2 requests of 64 tokens",
        (1, 2),
        lambda size: _steps(2, 64, windows=hybrid(size - 1, 32), num_blocks=257),
    )
