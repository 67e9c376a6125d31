"""Host arithmetic of the practical torch backend: a step as tiles, the pages that each reads, dense batches of them.

Everything is NumPy over all tiles at once; a step's cost must not grow with a Python loop over its requests.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.attention.metadata import SEQ_STARTS, CommonAttentionMetadata
from kvframe.specs import AttentionMask

MAX_PIECE_KEYS = 1 << 16
"""Gathered tokens of a piece of more than one tile: bounds the gathered copy's memory."""

IntArray = npt.NDArray[np.signedinteger[Any]]


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each, ``[num_tiles]`` throughout.

    Attributes:
        request: The row of the batch.
        first_row: Where the tile's queries start in the packed batch.
        position: The first query's position in its request.
        num_queries: The tile's queries, at least one.
        seq_len: Tokens of the request after the step.
        seq_start: The request's first token that is not hidden; None where no request hides any.
    """

    request: IntArray
    first_row: IntArray
    position: IntArray
    num_queries: IntArray
    seq_len: IntArray
    seq_start: IntArray | None

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata) -> Tiles:
        """Return one tile for each request with a new token."""
        starts, seq_len = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy()
        first_row = starts[:-1]
        num_new = starts[1:] - first_row
        seq_start = None
        if SEQ_STARTS in metadata.extensions:
            values_cpu = metadata.extensions[SEQ_STARTS].values_cpu
            assert values_cpu is not None
            seq_start = values_cpu.numpy()
        tiles = cls(np.arange(len(seq_len), dtype=np.int32), first_row, seq_len - num_new, num_new, seq_len, seq_start)
        return tiles if num_new.all() else tiles.take(num_new.nonzero()[0])

    def __len__(self) -> int:
        return len(self.request)

    def take(self, index: IntArray | slice) -> Tiles:
        """Return the tiles at ``index``."""
        return Tiles(
            self.request[index],
            self.first_row[index],
            self.position[index],
            self.num_queries[index],
            self.seq_len[index],
            None if self.seq_start is None else self.seq_start[index],
        )

    def split(self, max_queries: int) -> Tiles:
        """Return the tiles, those of more than ``max_queries`` queries cut."""
        counts = -(-self.num_queries // max_queries)
        index = np.arange(len(self)).repeat(counts)
        first = counts.cumsum() - counts
        skipped = ((np.arange(len(index)) - first[index]) * max_queries).astype(np.int32)
        cut = self.take(index)
        return attrs.evolve(
            cut,
            first_row=cut.first_row + skipped,
            position=cut.position + skipped,
            num_queries=np.minimum(cut.num_queries - skipped, max_queries),
        )


@attrs.frozen(eq=False)
class Spans:
    """The pages that tiles read, ``[num_tiles]`` throughout but for the hidden tokens.

    A tile reads its top pages, then the pages of its sinks, each downwards, so that what it repeats for padding is a
    page at the far end of its past: as a rule one that its queries see all of.

    Attributes:
        top: The block behind the last one that is read.
        num_top: Blocks read from there on downwards.
        sink_gap: Blocks left out between those and the sinks' blocks; None without sink tokens.
        num_pages: Blocks read, sinks included.
        hidden: ``[3, num_tiles, num_ranges]``: tokens that no query of the tile sees, as the page that they lie in, in
            the order of reading, and the range of offsets in it.
    """

    top: IntArray
    num_top: IntArray
    sink_gap: IntArray | None
    num_pages: IntArray
    hidden: IntArray

    @classmethod
    def of(cls, tiles: Tiles, mask: AttentionMask, causal: bool, block_size: int) -> Spans:
        """Return what tiles of a batch read.

        Args:
            tiles: The tiles.
            mask: The layers' mask.
            causal: Whether queries see only their own and earlier positions; if not, the mask does not matter.
            block_size: Tokens per block.
        """
        window = mask.window if causal else None
        num_sink_tokens = mask.num_sink_tokens if window is not None else 0
        stop = tiles.position + tiles.num_queries if causal else tiles.seq_len
        top = (stop + (block_size - 1)) // block_size
        seq_start = low = tiles.seq_start
        if window is not None:
            low = np.maximum(tiles.position - (window - 1), 0 if seq_start is None else seq_start)
        num_ranges = 1 if low is None else 2 if not num_sink_tokens else 3 if seq_start is None else 5
        hidden = np.empty((3, len(tiles), num_ranges), dtype=np.int32)
        pages, begins, ends = hidden
        pages[:, 0], begins[:, 0], ends[:, 0] = 0, stop - (top - 1) * block_size, block_size
        if low is None:
            return cls(top, top, None, top, hidden)
        first = low // block_size
        num_top, first_token = top - first, first * block_size
        pages[:, 1], begins[:, 1], ends[:, 1] = num_top - 1, 0, low - first_token
        if not num_sink_tokens:
            return cls(top, num_top, None, num_top, hidden)
        begins[:, 1] = np.maximum(num_sink_tokens - first_token, 0)
        sinks_end = np.minimum(first, -(-num_sink_tokens // block_size))
        first_sink: Any = 0 if seq_start is None else np.minimum(seq_start // block_size, sinks_end)
        num_sinks = sinks_end - first_sink
        pages[:, 2], ends[:, 2] = num_top, np.where(num_sinks > 0, block_size, 0)
        begins[:, 2] = num_sink_tokens - (sinks_end - 1) * block_size
        if seq_start is not None:
            pages[:, 3], begins[:, 3], ends[:, 3] = num_top - 1, 0, seq_start - first_token
            pages[:, 4], begins[:, 4] = num_top + num_sinks - 1, 0
            ends[:, 4] = np.where(num_sinks > 0, seq_start - first_sink * block_size, 0)
        return cls(top, num_top, first - sinks_end, num_top + num_sinks, hidden)

    def take(self, index: IntArray | slice) -> Spans:
        """Return the spans at ``index``."""
        return Spans(
            self.top[index],
            self.num_top[index],
            None if self.sink_gap is None else self.sink_gap[index],
            self.num_pages[index],
            self.hidden[:, index],
        )

    def write_blocks(self, part: slice, first_index: IntArray, places: IntArray, upwards: bool) -> None:
        """Write where in a block table the blocks stand that tiles read, the last one repeated for padding.

        Args:
            part: The tiles.
            first_index: ``[num_tiles]``: where each tile's row starts in the table.
            places: ``[num_tiles, num_pages], int32``; written to.
            upwards: Whether they read them upwards.
        """
        num_pages = self.num_pages[part]
        columns: Any = np.arange(places.shape[1], dtype=np.int32)
        if np.minimum.reduce(num_pages) < places.shape[1]:
            columns = np.minimum(columns, (num_pages - 1)[:, None], out=places)
        if upwards:
            np.add(columns, first_index[:, None], out=places)
            return
        if self.sink_gap is not None:
            columns = columns + (columns >= self.num_top[part][:, None]) * self.sink_gap[part][:, None]
        np.subtract((self.top[part] + (first_index - 1))[:, None], columns, out=places)

    def upwards(self) -> Spans:
        """Return the same without sinks, for reading upwards: the last page is then repeated for padding."""
        assert self.sink_gap is None
        hidden = self.hidden.copy()
        hidden[0] = (self.num_pages - 1)[:, None] - hidden[0]
        return attrs.evolve(self, hidden=hidden)

    def hidden_slots(self, first_page: IntArray, block_size: int) -> IntArray:
        """Return the hidden tokens.

        Args:
            first_page: ``[num_tiles], int64``: where each tile's pages start among all that are gathered.
            block_size: Tokens per block.

        Returns:
            ``[num_hidden], int64``: places among all tokens that are gathered, in no order.
        """
        pages, begins, ends = self.hidden
        # Offsets come first: NumPy is fast along the other dimension, which is long.
        offset = np.arange(block_size)[:, None]
        is_hidden = offset < ends.ravel()
        is_hidden &= offset >= begins.ravel()
        places = ((pages + first_page[:, None]) * block_size).ravel() + offset
        # They are scattered: taking them by index is faster than by the mask itself.
        slots: IntArray = places.take(is_hidden.ravel().nonzero()[0])
        return slots

    def repeats_hidden(self, index: IntArray) -> npt.NDArray[np.bool_]:
        """Return for the tiles at ``index`` whether the page that each repeats for padding has hidden tokens."""
        pages, begins, ends = self.hidden[:, index]
        repeated: npt.NDArray[np.bool_] = ((pages == self.num_pages[index, None] - 1) & (begins < ends)).any(1)
        return repeated


@attrs.frozen(eq=False)
class Gathers:
    """What the batches that tiles are cut into gather, one batch after the other.

    Attributes:
        widths: Pages per tile of each batch.
        cuts: Where each batch's pages start, and the end.
        padding: ``[num_padding], int64``: pages that are there for padding.
        hidden: ``[num_hidden], int64``: tokens that no query of their tile sees and that may hold anything.
        hidden_cuts: Where each batch's start among these, and the end.
        has_unseen: For each batch, whether it has any of the two.
    """

    widths: list[int]
    cuts: list[int]
    padding: IntArray
    hidden: IntArray
    hidden_cuts: list[int]
    has_unseen: list[bool]

    @classmethod
    def of(cls, spans: Spans, bounds: list[int], block_size: int) -> Gathers:
        """Return what is gathered for tiles in order.

        Args:
            spans: The pages of the tiles.
            bounds: Where each batch starts, and the end.
            block_size: Tokens per block.
        """
        num_pages, starts = spans.num_pages, bounds[:-1]
        widths = np.maximum.reduceat(num_pages, starts)
        counts = [stop - start for start, stop in itertools.pairwise(bounds)]
        width = widths.repeat(counts)
        first_page = width.cumsum() - width
        cuts = np.array([*first_page[starts].tolist(), first_page[-1] + width[-1]])
        hidden = spans.hidden_slots(first_page, block_size)
        missing = width - num_pages
        padded = missing.nonzero()[0]
        padding, has_padding = padded, [False] * len(counts)
        if len(padded):
            has_padding = np.logical_or.reduceat(missing > 0, starts).tolist()
            missing = missing[padded]
            padding = ranges((first_page + num_pages)[padded], missing)
            unclean = padding[spans.repeats_hidden(padded).repeat(missing)]
            repeated = unclean[:, None] * block_size + np.arange(block_size)
            hidden = np.concatenate([hidden, repeated.ravel()])
        hidden_cuts = [0, len(hidden)]
        if len(counts) > 1:
            hidden.sort()
            hidden_cuts = np.searchsorted(hidden, cuts * block_size).tolist()
        has_unseen = [
            has_any or first < last
            for has_any, (first, last) in zip(has_padding, itertools.pairwise(hidden_cuts), strict=True)
        ]
        return cls(widths.tolist(), cuts.tolist(), padding, hidden, hidden_cuts, has_unseen)

    def batch_hidden(self, block_size: int) -> IntArray:
        """Return ``hidden`` as places among the tokens of each batch."""
        if len(self.widths) == 1:
            return self.hidden
        counts = [stop - start for start, stop in itertools.pairwise(self.hidden_cuts)]
        hidden: IntArray = self.hidden - np.multiply(self.cuts[:-1], block_size).repeat(counts)
        return hidden


def cut_batches(num_queries: IntArray, num_keys: IntArray, free_padding: int) -> tuple[IntArray | None, list[int]]:
    """Cut tiles into dense batches, in which padding is less than half of the keys and the queries, or little.

    Args:
        num_queries: ``[num_tiles]``: queries of each tile.
        num_keys: ``[num_tiles]``: tokens that each reads.
        free_padding: Tokens that a batch of single queries may read in vain.

    Returns:
        The order of tiles, None where they stay as they are; where each batch starts in it, and the end.
    """
    num_tiles, longest, widest = len(num_keys), int(np.maximum.reduce(num_keys)), int(np.maximum.reduce(num_queries))
    if num_tiles == 1:
        return None, [0, 1]
    if num_tiles * longest <= MAX_PIECE_KEYS:
        uniform = 2 * int(np.minimum.reduce(num_keys)) > longest
        if widest == 1:
            uniform = uniform or num_tiles * longest - int(np.add.reduce(num_keys)) <= free_padding
        elif uniform:
            uniform = 2 * int(np.minimum.reduce(num_queries)) > widest
        if uniform:
            return None, [0, num_tiles]
    # Lengths within (longest / 2, longest], (longest / 4, longest / 2], … are not mixed; nor such numbers of queries.
    kind = np.frexp(longest // num_keys)[1]
    if widest > 1:
        kind += 64 * np.frexp(widest // num_queries)[1]
    order = np.lexsort((-num_keys, kind))
    kinds, keys = kind[order].tolist(), num_keys[order]
    bounds = [0]
    while bounds[-1] < num_tiles:
        start = bounds[-1]
        last = start + max(1, MAX_PIECE_KEYS // int(keys[start]))
        bounds.append(min(last, bisect_right(kinds, kinds[start], start)))
    return order, bounds


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return ``[start, start + length)`` of each pair, one after the other."""
    ends = lengths.cumsum()
    first: IntArray = (starts - ends + lengths).repeat(lengths)
    return first + np.arange(len(first))
