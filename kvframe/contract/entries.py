"""Entries: what a layer keeps beside its main state, and where a step reads and writes it.

A layer keeps several things of the past: latents and index keys, a window and compressed tokens. Each is an *entry*
with a cache spec, a live range, pages and a block table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import attrs
import torch

from kvframe.contract.errors import ModelError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots

Pages = Mapping[str, torch.Tensor]
Rows = dict[str, torch.Tensor]


@attrs.frozen
class NewTokens:
    """The new tokens of one request in a step.

    Attributes:
        request: The request's row in the batch.
        rows: Its new tokens among the packed ones.
        first: The position of the first of them.
        stop: The position after the last of them: the tokens of the request after the step.
    """

    request: int
    rows: slice
    first: int
    stop: int


@attrs.frozen(eq=False, slots=False)
class EntryStep:
    """One entry of a layer in a step: its pages, and where the step's requests have their entries in them.

    If a type has one entry for several tokens (``KVCacheSpec.tokens_per_entry``), entry ``i`` is that of the tokens
    ``[i * m, (i + 1) * m)``, and it exists as soon as the last of these is computed. A request of ``n`` tokens has
    ``n // m`` entries.

    Attributes:
        pages: The state tensors by name, each ``[num_block_ids, entries_per_block, *shape], device``.
        metadata: The step, for the cache group of the entry, with exact lengths on the host.
        tokens_per_entry: Tokens for which there is one entry.
    """

    pages: Pages
    metadata: CommonAttentionMetadata
    tokens_per_entry: int = 1

    @cached_property
    def requests(self) -> tuple[NewTokens, ...]:
        """The requests that have new tokens."""
        bounds, lens = self.metadata.query_start_loc_cpu.tolist(), self.metadata.seq_lens_cpu.tolist()
        return tuple(
            NewTokens(request, slice(start, stop), lens[request] - (stop - start), lens[request])
            for request, (start, stop) in enumerate(pairwise(bounds))
            if start < stop
        )

    @property
    def entries_per_block(self) -> int:
        """Entries in a page."""
        return self.metadata.block_size // self.tokens_per_entry

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.metadata.slot_mapping, self.metadata.block_size)

    def write(self, rows: slice = slice(None), **entries: torch.Tensor) -> None:
        """Store an entry for each of the step's tokens, or for some of them: for a type with an entry for each token.

        Args:
            rows: The packed tokens, all of them unless given.
            entries: By name, ``[num_rows, *shape], device``; ``ModelError`` if names or shapes are not the entry's.
        """
        blocks, offsets = self._slots.blocks[rows], self._slots.offsets[rows]
        self._store(blocks, offsets, len(blocks) if self.tokens_per_entry == 1 else 0, entries)

    def store(self, request: int, start: int, **entries: torch.Tensor) -> None:
        """Store consecutive entries of a request.

        Args:
            request: The request's row in the batch.
            start: The first entry.
            entries: By name, ``[num_entries, *shape], device``; ``ModelError`` as for ``write``, or if the tokens of an
                entry are not all computed with this step.
        """
        count = min((len(tensor) for tensor in entries.values()), default=0)
        num_entries = int(self.metadata.seq_lens_cpu[request]) // self.tokens_per_entry
        index = torch.arange(start, start + count, device=self.metadata.block_table.device)
        blocks = self.metadata.block_table[request, index // self.entries_per_block].long()
        self._store(blocks, index % self.entries_per_block, min(count, num_entries - start), entries)

    def _store(self, blocks: torch.Tensor, offsets: torch.Tensor, count: int, entries: Rows) -> None:
        expected_shapes = {name: (count, *pages.shape[2:]) for name, pages in self.pages.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in entries.items()}
        if shapes != expected_shapes:
            raise ModelError(f"an entry is written with {shapes}, and it keeps {expected_shapes} here")
        for name, pages in self.pages.items():
            pages.index_put_((blocks, offsets), entries[name].to(pages.dtype))

    def read(self, request: int, start: int = 0, stop: int | None = None) -> Rows:
        """Return entries of a request, by name ``[num_entries, *shape], device``: copies, those of this step included.

        Args:
            request: The request's row in the batch.
            start: The first entry. Only entries whose tokens are live may be read.
            stop: The entry after the last one; None for all that the request has after the step.
        """
        if stop is None:
            stop = int(self.metadata.seq_lens_cpu[request]) // self.tokens_per_entry
        size = self.entries_per_block
        first_block = start // size
        blocks = self.metadata.block_table[request, first_block : -(-stop // size)]
        part = slice(start - first_block * size, stop - first_block * size)
        return {name: pages.index_select(0, blocks).flatten(0, 1)[part] for name, pages in self.pages.items()}

    def read_together(self, requests: Sequence[int]) -> Rows:
        """Return the entries of several requests, by name ``[num_requests, max_entries, *shape], device``: copies.

        Args:
            requests: Their rows in the batch. Their entries are live from the first one on. What follows the last
                entry of a request means nothing, and may be NaN.
        """
        longest = max(int(self.metadata.seq_lens_cpu[request]) for request in requests) // self.tokens_per_entry
        num_blocks = -(-longest // self.entries_per_block)
        index = torch.tensor(requests, device=self.metadata.block_table.device)
        blocks = self.metadata.block_table[index, :num_blocks]
        return {
            name: pages.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).flatten(1, 2)[:, :longest]
            for name, pages in self.pages.items()
        }
