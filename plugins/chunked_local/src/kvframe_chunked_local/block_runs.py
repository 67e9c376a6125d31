"""Runs of block ids, cut out of a block table."""

from __future__ import annotations

import numpy as np
import torch

from kvframe_chunked_local.pieces import IntArray


class BlockRuns:
    """All runs of consecutive block ids of a block table, by where in the table's memory they start.

    Every run lies in the table as it is. Seen with a stride of one element from row to row, the table is the array of
    all its runs, and one ``index_select`` copies those that are asked for.
    """

    def __init__(self, table: torch.Tensor) -> None:
        """Take a block table, ``[num_reqs, max_blocks], int32, device``."""
        # Rows side by side, so that what follows a row is an id too, which a backend may look up in vain.
        self._table = table.contiguous()

    def starts(self, requests: IntArray, first_blocks: IntArray) -> IntArray:
        """Return where the runs start that begin at these blocks of these requests."""
        return requests * self._table.shape[1] + first_blocks

    def requests(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the requests whose runs start there."""
        return starts.div(self._table.shape[1], rounding_mode="floor")

    def select(self, starts: torch.Tensor, starts_cpu: IntArray, num_columns: int) -> torch.Tensor:
        """Return runs; one that reaches past the end of its row goes on with other ids of the table.

        Args:
            starts: ``[num_runs], int32, device``: growing; after those, any number of zeros.
            starts_cpu: The same on the host.
            num_columns: Blocks of a run, at most ``max_blocks``.

        Returns:
            ``[num_runs, num_columns], int32, device``.
        """
        last = self._table.numel() - num_columns
        runs = self._table.as_strided((last + 1, num_columns), (1, 1))
        late = starts_cpu[starts_cpu > last]
        if len(late) == 0:
            return runs.index_select(0, starts)
        found = runs.index_select(0, starts.clamp(max=last))
        # Runs past the end of the whole table, where nothing follows: one copy for all that start at one block.
        for start in {*late.tolist()}:
            rows = np.flatnonzero(starts_cpu == start)
            shift = start - last
            found[rows[0] : rows[-1] + 1, :-shift] = runs[last, shift:]
        return found
