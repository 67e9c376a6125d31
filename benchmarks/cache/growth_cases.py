"""What a cache core's time and hits are measured against: sizes that grow, and blocks that are evicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks.cache.core_cases import BLOCK_SIZE, KVFRAME, VLLM, Case, Setting, Side, apart, decode, hybrid
from benchmarks.cache.worst_cases import MAX_ROUNDS as MAX_ROUNDS
from benchmarks.cache.worst_cases import chain, turns

VLLM_DEFAULT = "vLLM, as it is set by default"
SHARES = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
"""Percent of the cached blocks."""

RANDOM_SHARES = (0, 1, 2, 5, 10, 20, 30, 50, 70, 90, 100)
"""Percent of the cached blocks that chance chooses."""
NUM_DRAWS = 10

SPARE_BLOCKS = 64
"""Blocks of each layer beside those that the prompts fill: for the blocks that they begin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A size, and decode steps at several values of it.

    Attributes:
        name: For the command line and the record.
        title: The size.
        words: What stays the same.
        cases: The steps at each value.
    """

    name: str
    title: str
    words: str
    cases: Mapping[int, Case]


def _axis(name: str, title: str, words: str, cases: Mapping[int, Case]) -> Axis:
    return Axis(name=name, title=title, words=words, cases=cases)


def _steps(
    value: int,
    num_requests: int = 8,
    windows: tuple[int | None, ...] = (None,),
    length: int = 512,
    num_blocks: int = 65_537,
    num_cached: int = 0,
) -> Case:
    """Return decode steps, with a group for each layer on both sides."""
    case = decode(str(value), "", num_requests, windows, length=length, num_cycles=2, num_blocks=num_blocks)
    setting = case.sides[0].setting
    own = dataclasses.replace(setting, windows=apart(setting.windows))
    sides = (Side(name=VLLM, engine="vllm", setting=setting), Side(name=KVFRAME, engine="kvframe", setting=own))
    return dataclasses.replace(case, sides=sides, sizes={**case.sizes, "num_cached": num_cached})


def _full_steps(num_branches: int, shared: int = 8192, num_requests: int = 8, length: int = 512) -> Case:
    """Return decode steps in a pool that prompts with a common beginning fill: each new block takes another's place."""
    windows = hybrid(1, 256)
    blocks_per_layer = shared // BLOCK_SIZE + num_branches + num_requests * (length // BLOCK_SIZE - 8)
    case = _steps(num_branches, num_requests, windows, length, len(windows) * blocks_per_layer + 1)
    sides = tuple(
        dataclasses.replace(side, setting=dataclasses.replace(side.setting, max_model_len=shared + 2048))
        for side in case.sides
    )
    return dataclasses.replace(case, sides=sides, sizes={**case.sizes, "shared": shared, "num_branches": num_branches})


def standard_axes() -> tuple[Axis, ...]:
    """Return what is measured by default."""
    return (
        _axis(
            "pool",
            "blocks in the pool",
            "4 requests of 256 tokens, full attention",
            {
                size: _steps(size, num_requests=4, length=256, num_blocks=size)
                for size in (256, 1024, 4096, 16_384, 65_536)
            },
        ),
        _axis(
            "requests",
            "requests",
            "512 tokens each, full attention, 65,536 blocks",
            {size: _steps(size, num_requests=size) for size in (1, 4, 16, 64, 256, 1024)},
        ),
        _axis(
            "groups",
            "groups",
            "16 requests of 1,536 tokens, one layer of full attention and the others with windows",
            {
                size: _steps(size, 16, hybrid(size - 1, 256), length=1536, num_blocks=131_073)
                for size in (1, 2, 4, 8, 16, 32, 64)
            },
        ),
        _axis(
            "length",
            "tokens of each request",
            "8 requests, full attention, 65,536 blocks",
            {size: _steps(size, length=size) for size in (256, 1024, 4096, 16_384, 65_536)},
        ),
        _axis(
            "cached",
            "blocks cached before",
            "8 requests of 512 tokens, full attention, 65,536 blocks",
            {size: _steps(size, num_cached=size) for size in (16, 1024, 4096, 16_384, 61_440)},
        ),
        _axis(
            "branches",
            "cached prompts with a common beginning",
            "8 requests of 512 tokens, a window of 256 and full attention; 8,192 tokens are in common, and the pool is "
            "full of cached blocks",
            {size: _full_steps(size) for size in (10, 100, 1000, 10_000)},
        ),
        _axis(
            "depth",
            "blocks of a chain, with a branch at each",
            "Slowest step of 16 tokens of a request of 1,024; a window of 1,024 and full attention, and the pool is "
            "full of cached blocks",
            {size: chain(str(size), size, length=1024, chunk=BLOCK_SIZE) for size in (10, 100, 1000, 10_000)},
        ),
        _axis(
            "turns",
            "turns of a conversation whose reasoning is stripped",
            "Slowest of the 192 decode steps of a turn; a window of 1,024 and full attention, and the pool is full of "
            "cached blocks",
            {size: turns(str(size), size) for size in (10, 30, 100, 300, 1000)},
        ),
    )


def tiny_axes() -> tuple[Axis, ...]:
    """Return an axis to try the script on, not to measure."""
    cases = {size: _steps(size, 2, hybrid(size - 1, 32), length=64, num_blocks=257) for size in (1, 2)}
    return (_axis("tiny", "groups", "2 requests of 64 tokens", cases),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """Prompts whose blocks are evicted.

    Attributes:
        name: For the command line and the record.
        title: For the plot and the page.
        windows: The model.
        sizes: Of the study.
        shares: The percent of the cached blocks that are evicted.
    """

    name: str
    title: str
    windows: tuple[int | None, ...]
    sizes: Mapping[str, int]
    shares: tuple[int, ...] = SHARES

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides, each with a pool that the prompts just fill."""
        blocks_per_prompt = self.sizes["length"] // BLOCK_SIZE
        num_blocks = self.sizes["num_prompts"] * blocks_per_prompt + SPARE_BLOCKS
        setting = Setting(
            windows=self.windows,
            num_blocks=len(self.windows) * num_blocks + 1,
            max_num_seqs=num_blocks // blocks_per_prompt + 2,
            max_model_len=2 * self.sizes["length"],
        )
        fewer = dataclasses.replace(setting, keeps_all=False)
        return (
            Side(name=VLLM, engine="vllm", setting=setting),
            Side(name=VLLM_DEFAULT, engine="vllm", setting=fewer),
            Side(name=KVFRAME, engine="kvframe", setting=setting),
        )


def standard_populations() -> tuple[Population, ...]:
    """Return what is measured by default."""
    models = {"full": ("full attention", (None,)), "hybrid": ("a window of 1,024 and full attention", (None, 1024))}
    many = {"length": 4096, "num_prompts": 16, "chunk": 2048}
    ways = {
        "one": ("one prompt", {**many, "num_prompts": 1}),
        "many": ("16 prompts", many),
        "visited": ("16 prompts, and 32 that end somewhere in one of these", {**many, "num_visits": 32}),
    }
    return tuple(
        Population(name=f"{model}-{way}", title=f"{about}: {how}", windows=windows, sizes=sizes)
        for model, (about, windows) in models.items()
        for way, (how, sizes) in ways.items()
    )


def tiny_populations() -> tuple[Population, ...]:
    """Return prompts to try the script on, not to measure."""
    sizes = {"length": 128, "num_prompts": 2, "chunk": 64}
    return (Population(name="tiny", title="tiny", windows=(None, 32), sizes=sizes, shares=(0, 50, 100)),)


def siblings() -> Population:
    """Return five prompts that begin alike, of a model with windows."""
    sizes = {"shared": 8192, "own": 256, "num_prompts": 5, "chunk": 2048, "length": 8448}
    return Population(name="siblings", title="five prompts that share 8,192 tokens", windows=(None, 1024), sizes=sizes)
