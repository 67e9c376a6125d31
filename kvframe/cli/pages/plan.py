"""The page of a plan: what each group keeps along a growing sequence, and where the bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.cli.live_range import describe_live_range
from kvframe.cli.render import compact_names

if TYPE_CHECKING:
    from kvframe.contract.specs import KVCacheSpec
    from kvframe.hosting.setup import Setup
    from kvframe.planning.groups import KVCacheGroup

_NUM_SAMPLES = 160
_MOST_RANGES = 40
"""The most parts of a live range that are drawn; the first and the last are kept."""

_NEARLY_EQUAL = 1.5


def page_of_plan(setup: Setup, starts: bool, concurrency: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data of a plan's page.

    Args:
        setup: The set-up of the model, or of a rank's share.
        starts: Whether the memory holds a cache at all.
        concurrency: How many requests of some lengths fit.
    """
    facts = {
        "num_layers": len(setup.description.layers),
        "max_model_len": setup.max_model_len,
        "dtype": setup.stack.model.dtype,
        "groups": [],
        "samples": [],
        "concurrency": [],
        "tiers": [],
    }
    if not starts or not setup.plan.groups:
        return facts
    cache_plan = setup.plan
    return {
        **facts,
        "total_bytes": cache_plan.total_bytes,
        "num_slabs": cache_plan.num_slabs,
        "slab_bytes": cache_plan.slab_bytes,
        "waste_fraction": cache_plan.waste_fraction,
        "groups": [
            {
                "kind": group.spec.kind,
                "num_layers": len(group.layers),
                "layers": compact_names(group.layers),
                "needs": describe_live_range(group.spec, cache_plan.max_model_len),
                "block_size": group.block_size,
                "page_bytes": group.page_bytes,
                "pages_per_slab": group.pages_per_slab,
                "peak_blocks": group.peak_blocks,
            }
            for group in cache_plan.groups
        ],
        "samples": _samples(setup),
        "concurrency": list(concurrency),
        "tiers": [attrs.asdict(tier) for tier in setup.tiers()],
    }


def _samples(setup: Setup) -> list[dict[str, Any]]:
    """Return what a sequence keeps at some lengths, in bytes by group, and in caches of other engines."""
    from kvframe.planning.groups import group_layers

    full, equal = group_layers(setup.all_layers, hybrid=False).groups, _EqualGroups.of(setup.grouping.groups)
    samples, groups = [], setup.plan.groups
    for n in _lengths(setup.max_model_len):
        num_bytes = [_held_bytes(group.spec, group.page_bytes, n) for group in groups]
        samples.append(
            {
                "n": n,
                "ranges": [_drawn(group.spec.live_ranges(n)) for group in groups],
                "bytes": num_bytes,
                "total": sum(num_bytes),
                "all_full": sum(_held_bytes(group.spec, group.page_bytes, n) for group in full),
                "equal_groups": equal.held_bytes(n),
            }
        )
    return samples


def _lengths(longest: int) -> list[int]:
    """Return lengths from 0 to the longest, closer to each other at the start, where windows fill."""
    steps = range(_NUM_SAMPLES + 1)
    return sorted({round(longest * (step / _NUM_SAMPLES) ** 2) for step in steps})


def _held_bytes(spec: KVCacheSpec, page_bytes: int, n: int) -> int:
    return spec.num_resident_blocks(n, 0) * page_bytes


def _drawn(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(ranges) <= _MOST_RANGES:
        return list(ranges)
    return [*ranges[: _MOST_RANGES // 2], *ranges[-_MOST_RANGES // 2 :]]


@attrs.frozen
class _EqualGroups:
    """A model in groups of equally many layers with equal pages, by the arithmetic of vLLM's hybrid cache manager.

    Its source is vLLM's design page docs/design/hybrid_kv_cache_manager.md: layers of one kind are divided into groups
    of as many layers as the rarest kind has, and layers with smaller pages get longer blocks.
    """

    specs: tuple[tuple[KVCacheSpec, int], ...]
    """The spec of each kind of layers, with its blocks' tokens, and its number of groups."""
    page_bytes: int

    @classmethod
    def of(cls, groups: Sequence[KVCacheGroup]) -> _EqualGroups:
        counts = [len(group.layers) for group in groups]
        size = max(counts) if max(counts) < _NEARLY_EQUAL * min(counts) else min(counts)
        part = max(group.page_bytes // len(group.layers) for group in groups)
        specs = []
        for group in groups:
            longer = group.spec.block_size * part * len(group.layers) // group.page_bytes
            spec = group.spec if group.spec.is_per_block else attrs.evolve(group.spec, block_size=longer)
            specs.append((spec, -(-len(group.layers) // size)))
        return cls(tuple(specs), size * part)

    def held_bytes(self, n: int) -> int:
        return sum(_held_bytes(spec, self.page_bytes, n) * count for spec, count in self.specs)
