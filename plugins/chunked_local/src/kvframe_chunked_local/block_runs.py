"""Copies runs of consecutive block ids from a block table."""

from __future__ import annotations

import numpy as np
import torch

from kvframe_chunked_local.virtual_requests import IntArray


class BlockRuns:
    """All runs of consecutive block ids of a block table, identified by their offset in the table's memory.

    With a stride of one element between rows, the table's memory is the array of all its runs. So one ``index_select``
    copies any number of runs.
    """

    def __init__(self, table: torch.Tensor) -> None:
        """Keep a block table, ``[num_reqs, max_blocks], int32, device``."""
        # Contiguous, so that the entries after a row's end are valid ids, which a backend may look up.
        self._table = table.contiguous()

    def starts(self, requests: IntArray, first_blocks: IntArray) -> IntArray:
        """Return the offsets of the runs that begin at these blocks of these requests."""
        return requests * self._table.shape[1] + first_blocks

    def select(self, starts: torch.Tensor, starts_cpu: IntArray, num_columns: int) -> torch.Tensor:
        """Return runs; a run that exceeds its row continues with other ids of the table.

        Args:
            starts: ``[num_runs], int32, device``: ascending offsets, then any number of zeros.
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
        # Runs that exceed the whole table have no entries after it: one copy for all runs with one start.
        for start in {*late.tolist()}:
            rows = np.flatnonzero(starts_cpu == start)
            shift = start - last
            found[rows[0] : rows[-1] + 1, :-shift] = runs[last, shift:]
        return found
