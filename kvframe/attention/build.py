"""Builds what the layers read in a step: each wrapper chain and builder runs once for all groups that can share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.attention.group import AttentionGroup
from kvframe.attention.request_order import Permutation, is_ordered, permute
from kvframe.attention.returned import build_all, refresh_fields, replace_fields, step_failure
from kvframe.attention.wrapping import WrapperCall
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder
from kvframe.contract.slots import Slots
from kvframe.contract.state import StateStep
from kvframe.selection.choice import Identity
from kvframe.selection.refusals import Refusal


@attrs.define(eq=False)
class Build:
    """What one builder makes in a step, for one attention group or for several that read the same.

    Attributes:
        reuse: The number of the builder.
        common: What it builds from: wrapped metadata, in the order of requests that it asks for; None once it ran.
        num_rows: Query rows that a layer has to give, padding included.
        permutation: The permutation into the order that the builder asks for; None if the batch is in that order.
        like: The index of an earlier build that differs only in block tables and slots; None if there is none.
        built: What the builder made.
    """

    reuse: int
    common: CommonAttentionMetadata | None
    num_rows: int
    permutation: Permutation | None
    like: int | None
    built: Any = None

    def take(self) -> CommonAttentionMetadata:
        """Return what the builder builds from, and drop it, so that it is not copied to the device."""
        common, self.common = self.common, None
        assert common is not None
        return common


@attrs.define(eq=False)
class PreparedStep:
    """What the host made for a step: everything that is copied to the device.

    Attributes:
        builds: What builders have made on the host, or will make on the device.
        build_indices: For each attention group, the index of its build.
        slots: For each cache group that stores something, where it stores what the step computes.
        states: What the state layers compute; empty if there are none.
        kept_rows: ``[num_kept], int64``: the rows of the packed batch that the skipped layers compute; None for all.
    """

    builds: list[Build]
    build_indices: tuple[int, ...]
    slots: Mapping[int, Slots] = MappingProxyType({})
    states: Sequence[StateStep] = ()
    kept_rows: torch.Tensor | None = None


@attrs.frozen(eq=False)
class GroupMetadata:
    """What one attention group's layers read in a step.

    Attributes:
        metadata: What the backend's builder made.
        num_rows: Query rows that a layer has to give, padding included.
        permutation: The permutation into the order that the backend asks for; None if the batch is in that order.
        slots: Where the layers store what they are given; None if they store nothing.
    """

    metadata: Any
    num_rows: int
    permutation: Permutation | None
    slots: Slots | None


class GroupStep:
    """What one attention group holds while a step runs.

    Attributes:
        group: The group.
        index: Its index among the attention groups.
        read: What its layers read in the step that was begun last.
        audited: The step's metadata, by which choices of tokens are checked; None if they are not.
    """

    def __init__(self, group: AttentionGroup, index: int = 0) -> None:
        self.group, self.index = group, index
        self.audited: CommonAttentionMetadata | None = None
        self.read = GroupMetadata(None, 0, None, None)


@attrs.frozen(eq=False)
class _Reader:
    """One attention group, with numbers that are equal for groups that can share work.

    Attributes:
        group: The group.
        metadata_index: The index of its wrapped metadata in the step's list of metadata.
        reuse: The number of its builder: equal for groups that can read the same built metadata.
        chain: The number of its chain and sequence: equal for groups, of any cache group, that apply equal wrappers to
            metadata of one sequence.
        not_causal: Why its backend cannot take a batch that is not causal; None if it can.
    """

    group: AttentionGroup
    metadata_index: int
    reuse: int
    chain: int
    not_causal: Refusal | None


@attrs.frozen(eq=False)
class _Builder:
    """A builder, and which of its optional methods are its own: the default ones are not called.

    Attributes:
        builder: The builder.
        is_on_host: Whether it builds before the copy to the device.
        builds_together: Whether its class builds for all its builders together.
        finishes: Whether it finishes on the device what it built.
    """

    builder: AttentionMetadataBuilder
    is_on_host: bool
    builds_together: bool
    finishes: bool

    @classmethod
    def of(cls, builder: AttentionMetadataBuilder) -> _Builder:
        """Return the builder with what its class implements."""
        is_on_host = builder.on_host is not None
        return cls(builder, is_on_host, _overrides(builder, "build_together"), _overrides(builder, "finish"))


def _overrides(builder: AttentionMetadataBuilder, method: str) -> bool:
    """Return whether a builder's class does not have the default method."""
    owner = next(base for base in type(builder).__mro__ if method in vars(base))
    return owner is not AttentionMetadataBuilder


class MetadataPlan:
    """The wrapper calls and builders of a step, found once at set-up.

    Wrappers that several chains of a cache group begin with are applied once. Attention groups with the same wrapped
    metadata and equal builders share what is built. If only block tables and slots differ, as between cache groups, the
    builder replaces the fields that depend on these. Nothing is kept from one step to the next.
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
            pages: For each cache group, a state tensor of its layers. Its length is the number of block ids. If it is
                missing, block ids are not checked for being too large.
            audited: Whether the results of wrappers are checked on the device too; then each step waits for it.
        """
        # Each wrapper call, and the index of the metadata that it takes. A step's list of metadata begins with one for
        # each cache group; each call appends its result.
        self._calls: list[tuple[int, WrapperCall]] = []
        self._readers: list[_Reader] = []
        self._builders: dict[int, _Builder] = {}
        self._audited = audited
        index_of: dict[tuple[int, tuple[Identity, ...]], int] = {}
        layers_after: dict[int, list[str]] = {}
        numbers: dict[Hashable, int] = {}
        for group in groups:
            index = group.cache_group
            for length, wrapper in enumerate(group.wrappers, start=1):
                beginning = (group.cache_group, group.wrapper_ids[:length])
                if beginning not in index_of:
                    index_of[beginning] = num_cache_groups + len(self._calls)
                    layers = layers_after[index_of[beginning]] = []
                    call = WrapperCall(wrapper, layers, pages.get(group.cache_group))
                    self._calls.append((index, call))
                index = index_of[beginning]
                layers_after[index].extend(layer.name for layer in group.layers)
            reuse = numbers.setdefault(group.reuse_key, len(numbers))
            chain = numbers.setdefault((group.sequence, group.wrapper_ids), len(numbers))
            self._readers.append(_Reader(group, index, reuse, chain, group.not_causal))
            self._builders.setdefault(reuse, _Builder.of(group.builder))
        self._finishes = any(builder.finishes for builder in self._builders.values())

    def prepare(self, metadata: Sequence[CommonAttentionMetadata]) -> PreparedStep:
        """Apply every chain, reorder requests for builders that ask for it, and run the builders of the host.

        Args:
            metadata: A step, one value per cache group. If it lies on the host, one copy can bring the result to the
                device.

        Raises:
            WrapperError: A wrapper cannot take the step.
            BackendError: The step says for each request whether it is causal (``causal_per_request``). Or the result of
                a chain is not causal, and the backend takes causal batches only; or it has upper bounds of lengths, and
                the builder needs exact ones (``inexact_lens``). Or a builder raised something (``failed``).
        """
        for common in metadata:
            if type(common.causal) is not bool:
                raise BackendError(
                    f"causal is {type(common.causal).__name__!r}, and not a bool: a batch is causal as a whole, or not",
                    code="causal_per_request",
                )
        wrapped = list(metadata)
        for index, call in self._calls:
            wrapped.append(call.audit(wrapped[index]) if self._audited else call(wrapped[index]))
        sharing = _Sharing()
        build_indices = tuple(sharing.build_of(reader, wrapped[reader.metadata_index]) for reader in self._readers)
        self._run(sharing.builds, [build for build in sharing.builds if self._builders[build.reuse].is_on_host])
        return PreparedStep(sharing.builds, build_indices)

    def build(self, prepared: PreparedStep) -> list[GroupMetadata]:
        """Run the builders that did not run on the host, and return what each attention group reads.

        Args:
            prepared: What ``prepare`` returned, its tensors on the device.

        Raises:
            BackendError: A builder raised something (``failed``).
        """
        builds, slots = prepared.builds, prepared.slots
        self._run(builds, [build for build in builds if build.common is not None])
        built = self._finish(builds) if self._finishes else [build.built for build in builds]
        return [
            GroupMetadata(
                built[index], builds[index].num_rows, builds[index].permutation, slots.get(reader.group.cache_group)
            )
            for index, reader in zip(prepared.build_indices, self._readers, strict=True)
        ]

    def _run(self, builds: Sequence[Build], unbuilt: Sequence[Build]) -> None:
        """Make some of a step's builds: first those that stand for others, then those that differ in tables only."""
        together: dict[type[AttentionMetadataBuilder], list[Build]] = {}
        for build in unbuilt:
            if build.like is not None:
                continue
            builder = self._builders[build.reuse]
            if builder.builds_together:
                together.setdefault(type(builder.builder), []).append(build)
                continue
            try:
                build.built = builder.builder.build(build.take())
            except BaseException as error:
                raise self._failure([build], "build", error) from error
        for builder_class, alike in together.items():
            try:
                results = build_all(
                    builder_class, [(self._builders[member.reuse].builder, member.take()) for member in alike]
                )
            except BaseException as error:
                raise self._failure(alike, "build_together", error) from error
            for build, result in zip(alike, results, strict=True):
                build.built = result
        for build in unbuilt:
            if build.like is not None:
                builder, result = self._builders[build.reuse], builds[build.like].built
                try:
                    build.built = refresh_fields(builder.builder, result, build.take())
                except BaseException as error:
                    raise self._failure([build], "refreshed_fields", error) from error

    def _finish(self, builds: Sequence[Build]) -> list[Any]:
        """Return the result of each build, after its builder's ``finish``."""
        finished: list[Any] = []
        for build in builds:
            builder = self._builders[build.reuse]
            if not builder.finishes:
                finished.append(build.built)
            elif build.like is None:
                try:
                    finished.append(builder.builder.finish(build.built))
                except BaseException as error:
                    raise self._failure([build], "finish", error) from error
            else:
                fields = {name: getattr(build.built, name) for name in builder.builder.table_fields or ()}
                finished.append(replace_fields(builder.builder, finished[build.like], fields))
        return finished

    def _failure(self, builds: Iterable[Build], method: str, error: BaseException) -> BaseException:
        """Return the error for what the builders raised."""
        numbers = {build.reuse for build in builds}
        groups = [reader.group for reader in self._readers if reader.reuse in numbers]
        layers = [layer.name for group in groups for layer in group.layers]
        return step_failure(groups[0].backend_name, layers, f"its builder's {method}", error)


class _Sharing:
    """Finds what has to be built in a step: one build for all groups that read the same.

    Attributes:
        builds: The builds so far.
    """

    def __init__(self) -> None:
        self.builds: list[Build] = []
        self._index_of: dict[tuple[int, int], int] = {}
        self._first_index_of: dict[tuple[int, int, int], int] = {}
        self._ordered: dict[tuple[BatchOrder, int, int], tuple[CommonAttentionMetadata, Permutation]] = {}

    def build_of(self, reader: _Reader, common: CommonAttentionMetadata) -> int:
        """Return the index of the build that a group reads: another group's if it reads the same, or a new one."""
        key = (reader.reuse, id(common))
        known_index = self._index_of.get(key)
        if known_index is not None:
            return known_index
        self._check_taken(reader, common)
        builder, num_rows, permutation = reader.group.builder, common.slot_mapping.shape[0], None
        if builder.batch_order is not None and not is_ordered(builder.batch_order, common):
            common, permutation = self._permute(builder.batch_order, reader.chain, common)
        index, like = len(self.builds), None
        if builder.table_fields is not None:
            # After equal chains, only the tables differ between cache groups of one sequence and block size.
            first_index = self._first_index_of.setdefault((reader.reuse, reader.chain, common.block_size), index)
            like = None if first_index == index else first_index
        self.builds.append(Build(reader.reuse, common, num_rows, permutation, like))
        self._index_of[key] = index
        return index

    def _check_taken(self, reader: _Reader, common: CommonAttentionMetadata) -> None:
        """Raise ``BackendError`` for a batch that a group's backend or builder does not take."""
        if reader.not_causal is not None and not common.causal:
            raise _refused(reader.group, f"is not causal: it {reader.not_causal.reason}", reader.not_causal.code)
        if reader.group.builder.needs_exact_lens and not common.exact_lens:
            problem = "has only upper bounds of its lengths on the host: its metadata builder needs exact ones"
            raise _refused(reader.group, problem, "inexact_lens")

    def _permute(
        self, order: BatchOrder, chain: int, common: CommonAttentionMetadata
    ) -> tuple[CommonAttentionMetadata, Permutation]:
        key = (order, chain, common.block_size)
        pair = self._ordered.get(key)
        if pair is None:
            pair = self._ordered[key] = permute(common, order)
            return pair
        permuted, permutation = pair
        tables = attrs.evolve(
            permuted,
            block_table=common.block_table.index_select(0, permutation.requests),
            slot_mapping=common.slot_mapping.index_select(0, permutation.tokens),
        )
        return tables, permutation


def _refused(group: AttentionGroup, problem: str, code: str) -> BackendError:
    return BackendError(
        f"backend {group.backend_name!r}, of layer {group.layers[0].name!r}, cannot take a batch that {problem}; give "
        "such layers another backend",
        code=code,
    )
