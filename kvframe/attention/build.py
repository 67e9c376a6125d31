"""Building a step's metadata: every chain and every builder runs once for all attention groups that can share it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import attrs

from kvframe.attention.group import AttentionGroup
from kvframe.attention.identity import Identity
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.order import BatchOrder, Permutation, is_ordered, permute
from kvframe.attention.wrapper import MetadataWrapper, apply_wrapper


@attrs.frozen(eq=False)
class BuiltMetadata:
    """What one attention group's layers read in a step.

    Attributes:
        metadata: What the backend's builder made.
        num_rows: Query rows that a layer has to give, padding included.
        permutation: The way into the order of tokens that the backend asked for, and back; None if it is the batch's.
    """

    metadata: Any
    num_rows: int
    permutation: Permutation | None


@attrs.frozen(eq=False)
class _Recipe:
    """How one group's metadata comes about, with small numbers for what it has in common with other groups'.

    Attributes:
        group: The group.
        place: Where the end of its chain stands in the step's list of metadata.
        reuse: Equal for groups that read the same metadata if theirs is wrapped to the same.
        chain: Equal for groups with equal chains, of any cache group.
    """

    group: AttentionGroup
    place: int
    reuse: int
    chain: int


class MetadataPlan:
    """What has to be worked out in a step, found once at set-up.

    Chains of one cache group that begin alike share their beginning. Groups that end with the very same wrapped
    metadata and can read the same built metadata share it; those of another cache group take it over with their own
    block table. Nothing is kept from one step, or one sub-batch, to the next.
    """

    def __init__(self, groups: Sequence[AttentionGroup], num_cache_groups: int) -> None:
        """Take the groups.

        Args:
            groups: All attention groups.
            num_cache_groups: All cache groups.
        """
        # Of each wrapper call: the metadata that it takes, by its place in the step's list, which starts with one per
        # cache group.
        self._calls: list[tuple[int, MetadataWrapper]] = []
        self._recipes: list[_Recipe] = []
        places: dict[tuple[int, tuple[Identity, ...]], int] = {}
        numbers: dict[Hashable, int] = {}
        for group in groups:
            place = group.cache_group
            for length, wrapper in enumerate(group.wrappers, start=1):
                beginning = (group.cache_group, group.wrapper_ids[:length])
                if beginning not in places:
                    places[beginning] = num_cache_groups + len(self._calls)
                    self._calls.append((place, wrapper))
                place = places[beginning]
            reuse = numbers.setdefault(group.reuse_key, len(numbers))
            chain = numbers.setdefault(group.wrapper_ids, len(numbers))
            self._recipes.append(_Recipe(group, place, reuse, chain))

    def build(self, metadata: Sequence[CommonAttentionMetadata]) -> list[BuiltMetadata]:
        """Return what each attention group reads, for a step or a sub-batch of one.

        Args:
            metadata: The batch, one value per cache group.

        Raises:
            WrapperError: A wrapper cannot take the step.
        """
        wrapped = list(metadata)
        for place, wrapper in self._calls:
            wrapped.append(apply_wrapper(wrapper, wrapped[place]))
        step = _Step()
        return [step.build(recipe, wrapped[recipe.place]) for recipe in self._recipes]


class _Step:
    """What one step, or sub-batch, has built so far."""

    def __init__(self) -> None:
        self._same: dict[tuple[int, int], BuiltMetadata] = {}
        self._alike: dict[tuple[int, int, int], Any] = {}
        self._ordered: dict[tuple[BatchOrder, int, int], tuple[CommonAttentionMetadata, Permutation]] = {}

    def build(self, recipe: _Recipe, common: CommonAttentionMetadata) -> BuiltMetadata:
        """Return a group's metadata, from what there is as far as possible."""
        key = (recipe.reuse, id(common))
        built = self._same.get(key)
        if built is None:
            num_rows, permutation = common.slot_mapping.shape[0], None
            order = recipe.group.builder.batch_order
            if order is not None and not is_ordered(order, common):
                common, permutation = self._permute(order, recipe.chain, common)
            built = self._same[key] = BuiltMetadata(self._build(recipe, common), num_rows, permutation)
        return built

    def _build(self, recipe: _Recipe, common: CommonAttentionMetadata) -> Any:
        builder = recipe.group.builder
        if builder.table_fields is None:
            return builder.build(common)
        # Behind equal chains, cache groups of one block size see the same step but for their tables.
        key = (recipe.reuse, recipe.chain, common.block_size)
        first = self._alike.get(key)
        if first is not None:
            return attrs.evolve(first, **builder.refreshed_fields(first, common))
        built = self._alike[key] = builder.build(common)
        return built

    def _permute(
        self, order: BatchOrder, chain: int, common: CommonAttentionMetadata
    ) -> tuple[CommonAttentionMetadata, Permutation]:
        key = (order, chain, common.block_size)
        first = self._ordered.get(key)
        if first is None:
            first = self._ordered[key] = permute(common, order)
            return first
        permuted, permutation = first
        tables = attrs.evolve(
            permuted,
            block_table=common.block_table.index_select(0, permutation.requests),
            slot_mapping=common.slot_mapping.index_select(0, permutation.tokens),
        )
        return tables, permutation
