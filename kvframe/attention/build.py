"""Building a step's metadata: every chain and every builder runs once for all attention groups that can share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvframe.attention.group import AttentionGroup
from kvframe.attention.identity import Identity
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.order import Permutation, is_ordered, permute
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
        self._groups = tuple(groups)
        # Of each wrapper call: the metadata that it takes, by its place in the step's list, which starts with one per
        # cache group.
        self._calls: list[tuple[int, MetadataWrapper]] = []
        self._ends: list[int] = []
        places: dict[tuple[int, tuple[Identity, ...]], int] = {}
        keys: dict[Any, int] = {}
        self._reuse: list[int] = []
        self._across: list[int] = []
        for group in groups:
            place = group.cache_group
            for length, wrapper in enumerate(group.wrappers, start=1):
                beginning = (group.cache_group, group.wrapper_ids[:length])
                if beginning not in places:
                    places[beginning] = num_cache_groups + len(self._calls)
                    self._calls.append((place, wrapper))
                place = places[beginning]
            self._ends.append(place)
            self._reuse.append(keys.setdefault(group.reuse_key, len(keys)))
            self._across.append(keys.setdefault((group.reuse_key, group.wrapper_ids), len(keys)))

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
        shared: dict[tuple[int, int], BuiltMetadata] = {}
        found = []
        for index, group in enumerate(self._groups):
            common = wrapped[self._ends[index]]
            same = (self._reuse[index], id(common))
            if same not in shared:
                shared[same] = self._build(group, self._across[index], common, shared)
            found.append(shared[same])
        return found

    def _build(
        self,
        group: AttentionGroup,
        across: int,
        common: CommonAttentionMetadata,
        shared: dict[tuple[int, int], BuiltMetadata],
    ) -> BuiltMetadata:
        builder, permutation, num_rows = group.builder, None, common.slot_mapping.shape[0]
        if builder.batch_order is not None and not is_ordered(builder.batch_order, common):
            common, permutation = permute(common, builder.batch_order)
        if builder.table_fields is None:
            return BuiltMetadata(builder.build(common), num_rows, permutation)
        # Cache groups of one block size see the same step but for their tables.
        alike = (across, -common.block_size)
        if alike in shared:
            fields = builder.refreshed_fields(shared[alike].metadata, common)
            return BuiltMetadata(attrs.evolve(shared[alike].metadata, **fields), num_rows, permutation)
        shared[alike] = BuiltMetadata(builder.build(common), num_rows, permutation)
        return shared[alike]
