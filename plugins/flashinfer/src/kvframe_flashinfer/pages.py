"""A step's pages in FlashInfer's form: one list of page ids, request by request, and the start of each request."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract import CommonAttentionMetadata

IntArray = npt.NDArray[np.signedinteger[Any]]


@attrs.frozen(eq=False)
class PageLists:
    """The pages of a batch's requests, from the first page that a window reaches on.

    Earlier pages are not in the lists, so neither the null page nor tokens before a window are ever read.

    Attributes:
        starts: ``[num_reqs + 1], int32``: the start of each request's pages in ``ids``.
        last_page_lens: ``[num_reqs], int32``: tokens in each request's last page; 0 for a request without pages.
        ids: ``[starts[-1]], int32, device``: block ids; on the host until they are copied.
    """

    starts: IntArray
    last_page_lens: IntArray
    ids: torch.Tensor

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, window: int | None) -> PageLists:
        """Return the pages of all requests of a batch.

        Args:
            metadata: The batch, on the host.
            window: Tokens that a query sees, including its own; None for all.
        """
        block_size, table = metadata.block_size, metadata.block_table
        seq_lens = metadata.seq_lens_cpu.numpy()
        first = np.zeros_like(seq_lens)
        if window is not None:
            first_query = seq_lens - np.diff(metadata.query_start_loc_cpu.numpy())
            first = np.maximum(first_query - (window - 1), 0) // block_size
        counts = -(-seq_lens // block_size) - first
        starts = np.zeros(len(seq_lens) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        last_page_lens = np.where(counts > 0, seq_lens - (first + counts - 1) * block_size, 0).astype(np.int32)
        # The index of each page in the flattened block table.
        places = np.arange(starts[-1]) + np.repeat(
            np.arange(len(seq_lens)) * table.shape[1] + first - starts[:-1], counts
        )
        return cls(starts, last_page_lens, table.reshape(-1).index_select(0, torch.from_numpy(places.astype(np.int32))))

    def part(self, start: int, stop: int) -> PageLists:
        """Return the pages of the requests ``[start, stop)``."""
        starts = self.starts[start : stop + 1]
        ids = self.ids[int(starts[0]) : int(starts[-1])]
        return PageLists(starts - starts[0], self.last_page_lens[start:stop], ids)
