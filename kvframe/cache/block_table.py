"""Block tables: for each running request, where its blocks lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTable:
    """One group's block ids, a row for each running request, a column for each of its blocks.

    Invariant: a row's column ``i`` is the block id of the request's block ``i``, or 0, the null page, where that
    block is not resident.

    Attributes:
        block_size: Tokens per block.
        ids: ``[max_num_seqs, max_blocks], int32, host``.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        """Start with every row empty.

        Args:
            max_num_seqs: Rows.
            max_model_len: The longest request, in tokens.
            block_size: Tokens per block.
        """
        self.block_size = block_size
        self.ids: npt.NDArray[np.int32] = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    def write(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Set the columns from ``start`` on."""
        self.ids[row, start : start + len(block_ids)] = block_ids

    def clear(self, row: int, start: int, stop: int) -> None:
        """Point the columns ``[start, stop)`` at the null page."""
        self.ids[row, start:stop] = 0
