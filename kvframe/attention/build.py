"""Builds a step's metadata: each wrapper chain and builder runs once for all attention groups that can share it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.attention.group import AttentionGroup
from kvframe.attention.request_order import Permutation, is_ordered, permute
from kvframe.attention.returned import build_all, refresh_fields, replace_fields
from kvframe.attention.step_failures import step_failure
from kvframe.attention.trust import WrapperCall
from kvframe.contract.backend import AttentionMetadataBuilder, Refusal
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder
from kvframe.selection.identity import Identity


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
        chain: Equal for groups with equal chains that keep state of one sequence, of any cache group.
        not_causal: Why its backend cannot take a batch that is not causal; None if it can.
    """

    group: AttentionGroup
    place: int
    reuse: int
    chain: int
    not_causal: Refusal | None


class MetadataPlan:
    """What has to be worked out in a step, found once at set-up.

    Chains of one cache group that begin alike share their beginning. Groups that end with the very same wrapped
    metadata and can read the same built metadata share it; those of another cache group take it over with their own
    block table. Nothing is kept from one step to the next.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        num_cache_groups: int,
        pages: Mapping[int, torch.Tensor] = MappingProxyType({}),
        *,
        audited: bool = False,
    ) -> None:
        """Take the groups.

        Args:
            groups: All attention groups.
            num_cache_groups: All cache groups.
            pages: By cache group, a state tensor of its layers, as long as there are pages that block ids may name;
                without it, ids are not checked for being too high.
            audited: Whether the results of wrappers are checked on the device too; then each step waits for it.
        """
        # Of each wrapper call: the metadata that it takes, by its place in the step's list, which starts with one per
        # cache group.
        self._calls: list[tuple[int, WrapperCall]] = []
        self._recipes: list[_Recipe] = []
        self._builders: dict[int, AttentionMetadataBuilder] = {}
        self._audited = audited
        places: dict[tuple[int, tuple[Identity, ...]], int] = {}
        readers: dict[int, list[str]] = {}
        numbers: dict[Hashable, int] = {}
        for group in groups:
            place = group.cache_group
            for length, wrapper in enumerate(group.wrappers, start=1):
                beginning = (group.cache_group, group.wrapper_ids[:length])
                if beginning not in places:
                    places[beginning] = num_cache_groups + len(self._calls)
                    layers = readers[places[beginning]] = []
                    call = WrapperCall(wrapper, layers, pages.get(group.cache_group))
                    self._calls.append((place, call))
                place = places[beginning]
                readers[place].extend(layer.name for layer in group.layers)
            reuse = numbers.setdefault(group.reuse_key, len(numbers))
            chain = numbers.setdefault((group.sequence, group.wrapper_ids), len(numbers))
            self._recipes.append(_Recipe(group, place, reuse, chain, group.not_causal))
            self._builders.setdefault(reuse, group.builder)

    def prepare(self, metadata: Sequence[CommonAttentionMetadata]) -> PreparedMetadata:
        """Apply every chain, put requests into the order that a builder asks for, and build what is built on the host.

        Args:
            metadata: A step, one value per cache group; on the host, if the tensors of what
                comes out are to go to the device together.

        Raises:
            WrapperError: A wrapper cannot take the step.
            BackendError: What comes out of a chain is not causal, and its backend takes causal batches only; or a
                builder raised something (``failed``).
        """
        wrapped = list(metadata)
        for place, call in self._calls:
            wrapped.append(call.audit(wrapped[place]) if self._audited else call(wrapped[place]))
        step = _Step()
        keys = tuple(step.ask(recipe, wrapped[recipe.place]) for recipe in self._recipes)
        at_once = {key: need for key, need in step.needs.items() if self._builders[key[0]].on_host}
        later = {key: need for key, need in step.needs.items() if key not in at_once}
        built = self._run(at_once, step.refreshed)
        num_rows = {key: need.num_rows for key, need in step.needs.items()}
        permutations = {key: need.permutation for key, need in step.needs.items() if need.permutation is not None}
        return PreparedMetadata(keys, built, later, step.refreshed, num_rows, permutations)

    def build(self, prepared: PreparedMetadata) -> list[BuiltMetadata]:
        """Return what each attention group reads: the builders of a class build together, then what needs other tables.

        Args:
            prepared: What ``prepare`` returned, its tensors where the builders are to find them.
        """
        there = {**prepared.built, **self._run(prepared.needs, prepared.refreshed)}
        found = {
            key: BuiltMetadata(finished, prepared.num_rows[key], prepared.permutations.get(key))
            for key, finished in self._finish(there, prepared.refreshed).items()
        }
        return [found[key] for key in prepared.keys]

    def _finish(self, there: Mapping[Key, Any], refreshed: Mapping[Key, Key]) -> dict[Key, Any]:
        finished = {}
        for key, built in there.items():
            if key not in refreshed:
                try:
                    finished[key] = self._builders[key[0]].finish(built)
                except Exception as error:
                    raise self._failure([key], "finish", error) from error
        for key in there.keys() & refreshed.keys():
            other, built = refreshed[key], there[key]
            if finished[other] is there[other]:
                finished[key] = built
            else:
                builder = self._builders[key[0]]
                fields = {name: getattr(built, name) for name in builder.table_fields or ()}
                finished[key] = replace_fields(builder, finished[other], fields)
        return finished

    def _run(self, needs: Mapping[Key, _Need], refreshed: Mapping[Key, Key]) -> dict[Key, Any]:
        built: dict[Key, Any] = {}
        together: dict[type[AttentionMetadataBuilder], list[Key]] = {}
        for key in needs:
            if key not in refreshed:
                together.setdefault(type(self._builders[key[0]]), []).append(key)
        for builder_class, keys in together.items():
            pairs = [(self._builders[key[0]], needs[key].common) for key in keys]
            try:
                built.update(zip(keys, build_all(builder_class, pairs), strict=True))
            except Exception as error:
                raise self._failure(keys, "build_together", error) from error
        for key, need in needs.items():
            if key in refreshed:
                try:
                    built[key] = refresh_fields(self._builders[key[0]], built[refreshed[key]], need.common)
                except Exception as error:
                    raise self._failure([key], "refreshed_fields", error) from error
        return built

    def _failure(self, keys: Sequence[Key], method: str, error: Exception) -> Exception:
        """Return the error for what the builders of these needs raised."""
        groups = [recipe.group for recipe in self._recipes if recipe.reuse in {key[0] for key in keys}]
        layers = [layer.name for group in groups for layer in group.layers]
        return step_failure(groups[0].backend_name, layers, f"its builder's {method}", error)


Key = tuple[int, int]
"""The number of a reuse key, and what tells wrapped metadata apart within a step."""


@attrs.frozen(eq=False)
class _Need:
    """What is to be built for one or more groups.

    Attributes:
        common: Their wrapped metadata, in the order of requests that their builder asked for.
        num_rows: Query rows that their layers have to give.
        permutation: How it came into that order; None if it was.
    """

    common: CommonAttentionMetadata
    num_rows: int
    permutation: Permutation | None


@attrs.frozen(eq=False)
class PreparedMetadata:
    """A step: wrapped, ordered, and built as far as that is done on the host.

    Attributes:
        keys: For each attention group, what it needs.
        built: What builders made.
        needs: What there is to be built.
        refreshed: Of all needs, those that differ from another in tables only, and from which.
        num_rows: Of all needs, the query rows that their layers have to give.
        permutations: Of those that came into another order, how.
    """

    keys: tuple[Key, ...]
    built: Mapping[Key, Any]
    needs: Mapping[Key, _Need]
    refreshed: Mapping[Key, Key]
    num_rows: Mapping[Key, int]
    permutations: Mapping[Key, Permutation]


class _Step:
    """What one step needs.

    Attributes:
        needs: By key.
        refreshed: The needs that differ from another in tables only, and from which.
    """

    def __init__(self) -> None:
        self.needs: dict[Key, _Need] = {}
        self.refreshed: dict[Key, Key] = {}
        self._first: dict[tuple[int, int, int], Key] = {}
        self._ordered: dict[tuple[BatchOrder, int, int], tuple[CommonAttentionMetadata, Permutation]] = {}

    def ask(self, recipe: _Recipe, common: CommonAttentionMetadata) -> Key:
        """Note what a group needs, unless another group needs the same; return its key."""
        key = (recipe.reuse, id(common))
        if key in self.needs:
            return key
        if recipe.not_causal is not None and not common.causal:
            group = recipe.group
            raise BackendError(
                f"backend {group.backend_name!r}, of layer {group.layers[0].name!r}, cannot take a batch that is not "
                f"causal: it {recipe.not_causal.reason}; give such layers another backend",
                code=recipe.not_causal.code,
            )
        builder, num_rows, permutation = recipe.group.builder, common.slot_mapping.shape[0], None
        if builder.batch_order is not None and not is_ordered(builder.batch_order, common):
            common, permutation = self._permute(builder.batch_order, recipe.chain, common)
        self.needs[key] = _Need(common, num_rows, permutation)
        if builder.table_fields is not None:
            # Behind equal chains, cache groups of one sequence and block size see the same step but for their tables.
            first = self._first.setdefault((recipe.reuse, recipe.chain, common.block_size), key)
            if first != key:
                self.refreshed[key] = first
        return key

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
