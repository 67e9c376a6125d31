"""Entries that layers keep beside their main state: their groups' metadata, as the model or a backend reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from kvframe.attention.build import GroupStep
from kvframe.attention.group import AttentionGroup
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.entries import EntryStep
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import Grouping
from kvframe.selection.choice import Identity

_NAME = "entries"


class EntryBuilder(AttentionMetadataBuilder):
    """Keeps the batch metadata, with copies of its own of the lengths on the host."""

    on_host = frozenset()

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the step; a host may overwrite its own buffers before the layers run."""
        return attrs.evolve(
            metadata,
            query_start_loc_cpu=metadata.query_start_loc_cpu.clone(),
            seq_lens_cpu=metadata.seq_lens_cpu.clone(),
        )


class EntryStore(AttentionBackend):
    """Stands for a backend in the groups of entries, which no query attends to."""

    def make_builder(self) -> EntryBuilder:
        """Return a builder that keeps the step."""
        return EntryBuilder()

    def attend(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Raise: an entry is read by its layer."""
        raise BackendError("an entry of a layer does not attend")


def form_entry_groups(
    entries: Iterable[LayerSpec], grouping: Grouping, device: torch.device
) -> tuple[AttentionGroup, ...]:
    """Return a group for the entries of each cache group, which share their metadata.

    Args:
        entries: The entries.
        grouping: The cache groups.
        device: Where the layers run.
    """
    members: dict[int, list[LayerSpec]] = {}
    for entry in entries:
        members.setdefault(grouping.group_of(entry.name).index, []).append(entry)
    groups = []
    for index, layers in members.items():
        store = EntryStore(layers, device)
        groups.append(
            AttentionGroup(
                cache_group=index,
                layers=tuple(layers),
                wrapped=layers[0],
                wrappers=(),
                wrapper_ids=(),
                backend_name=_NAME,
                backend_id=Identity("kvframe", _NAME),
                backend=store,
                builder=store.make_builder(),
                not_causal=None,
            )
        )
    return tuple(groups)


class AttachedEntryLayer:
    """One entry of a layer at run time: its pages, and its group's step."""

    def __init__(self, entry: LayerSpec, pages: KVCache, step: GroupStep) -> None:
        assert entry.spec is not None
        self._pages, self._group, self._tokens_per_entry = pages, step, entry.spec.tokens_per_entry
        self._step: EntryStep | None = None

    @property
    def step(self) -> EntryStep:
        """Where the running step's requests have the entry."""
        metadata = self._group.read.metadata
        if self._step is None or self._step.metadata is not metadata:
            self._step = EntryStep(self._pages, metadata, self._tokens_per_entry)
        return self._step
