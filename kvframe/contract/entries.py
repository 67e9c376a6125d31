"""Entries: what a layer keeps beside its main state, and where a step reads and writes it.

A layer keeps several things of the past: latents and index keys, a window and compressed tokens. Each is an *entry*
with a cache spec, a live range, pages and a block table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs
import torch

from kvframe.contract.errors import ModelError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots, split_slots

Pages = Mapping[str, torch.Tensor]
Rows = dict[str, torch.Tensor]


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
    def query_start_loc(self) -> tuple[int, ...]:
        """Where each request's new tokens start among the packed ones; one number more than there are requests."""
        return tuple(self.metadata.query_start_loc_cpu.tolist())

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """The tokens of each request after the step."""
        return tuple(self.metadata.seq_lens_cpu.tolist())

    @property
    def entries_per_block(self) -> int:
        """Entries in a page."""
        return self.metadata.block_size // self.tokens_per_entry

    @cached_property
    def slots(self) -> Slots:
        """Where the entry of each new token is stored; negative for a token with which none is complete."""
        flat, count = self.metadata.slot_mapping, self.tokens_per_entry
        if count == 1:
            return Slots(flat, self.metadata.block_size)
        blocks, offsets = split_slots(flat.clamp(min=0), self.metadata.block_size)
        is_complete = (flat >= 0) & ((offsets + 1) % count == 0)
        entries = blocks * self.entries_per_block + offsets.div(count, rounding_mode="floor")
        return Slots(entries.masked_fill(~is_complete, -1), self.entries_per_block)

    def write(self, rows: slice = slice(None), **entries: torch.Tensor) -> None:
        """Store the entries of the step's tokens, or of some of them.

        Args:
            rows: The packed tokens, all of them unless given.
            entries: By name, ``[num_rows, *shape], device``: a row for each of these tokens. If there is one entry for
                several tokens, the row of the last of them is stored, and the other rows are not read.

        Raises:
            ModelError: The names, or the shapes, are not those of the entry's state.
        """
        slots = self.slots
        blocks, offsets = slots.blocks[rows], slots.offsets[rows]
        wanted = {name: (len(blocks), *pages.shape[2:]) for name, pages in self.pages.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in entries.items()}
        if shapes != wanted:
            raise ModelError(f"an entry is written with {shapes}, and it keeps {wanted}")
        for name, pages in self.pages.items():
            pages.index_put_((blocks, offsets), entries[name].to(pages.dtype))

    def read(self, request: int, start: int = 0, stop: int | None = None) -> Rows:
        """Return entries of a request, by name ``[num_entries, *shape], device``: copies, those of this step included.

        Args:
            request: The request's row in the batch.
            start: The first entry. Only entries whose tokens are live may be read.
            stop: The entry after the last one; None for all that the request has after the step.
        """
        stop = self.seq_lens[request] // self.tokens_per_entry if stop is None else stop
        size = self.entries_per_block
        first = start // size
        blocks = self.metadata.block_table[request, first : -(-stop // size)]
        part = slice(start - first * size, stop - first * size)
        return {name: pages.index_select(0, blocks).flatten(0, 1)[part] for name, pages in self.pages.items()}
