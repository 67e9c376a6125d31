"""Runs of block ids equal those of a naive reading of the table, also at its very end."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_chunked_local.block_runs import BlockRuns


def select(table: torch.Tensor, places: list[tuple[int, int]], num_columns: int, num_padding: int) -> torch.Tensor:
    """Return the runs that begin at these requests and blocks, then equally many copies of the first run as padding."""
    requests, first_blocks = np.array([*sorted(places), *[(0, 0)] * num_padding], dtype=np.int32).T
    runs = BlockRuns(table)
    starts = runs.starts(requests, first_blocks)
    on_device = torch.from_numpy(starts)
    return runs.select(on_device, starts, num_columns)


@given(data=st.data(), num_reqs=st.integers(1, 3), max_blocks=st.integers(1, 6), num_padding=st.integers(0, 2))
def test_a_run_holds_the_ids_that_follow_in_its_row(
    data: st.DataObject, num_reqs: int, max_blocks: int, num_padding: int
) -> None:
    table = torch.arange(1, num_reqs * max_blocks + 1, dtype=torch.int32).view(num_reqs, max_blocks)
    num_columns = data.draw(st.integers(1, max_blocks))
    place = st.tuples(st.integers(0, num_reqs - 1), st.integers(0, max_blocks - 1))
    places = data.draw(st.lists(place, min_size=1, max_size=8))
    ids = select(table, places, num_columns, num_padding)
    assert (len(places) + num_padding, num_columns) == ids.shape
    for (request, block), row in zip(sorted(places), ids.tolist(), strict=False):
        expected = table[request, block : block + num_columns].tolist()
        assert expected == row[: len(expected)]


def test_runs_past_a_row_and_past_the_table_hold_ids_of_the_table() -> None:
    memory = torch.tensor([[1, 2, 3, -1], [4, 5, 6, -1]], dtype=torch.int32)
    places = [(0, 2), (1, 1), (1, 2), (1, 2)]
    rows = select(memory[:, :3], places, num_columns=3, num_padding=0).tolist()
    assert [[3], [5, 6], [6], [6]] == [row[: 3 - block] for (_, block), row in zip(places, rows, strict=True)]
    assert {1, 2, 3, 4, 5, 6} >= {block for row in rows for block in row}
