"""Keeps the hidden states after the last token of each request, from which prediction heads continue it.

They lie in the cache as the state of a layer. So prefix hits, forks and preemption keep them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from kvframe import BlockTables, Layers, StepBatch
from kvframe.contract.order import IntArray
from kvframe.contract.state import StateStep
from kvframe_engine.running.model_runner import NONE_WANTED


class LastHiddenStates:
    """The pages of the layer that keeps hidden states, and the places of requests in them."""

    def __init__(self, kept: Layers, tables: BlockTables, to_device: Callable[[IntArray], torch.Tensor]) -> None:
        """Take the layer.

        Args:
            kept: The layer, alone.
            tables: The block tables of all cache groups.
            to_device: Copies to the device of the pages.
        """
        self._states, self._tables, self._to_device = kept.states, tables, to_device
        (self._layer,) = kept.states.values()

    @property
    def pages(self) -> torch.Tensor:
        """``[num_block_ids, states_per_block, num_heads, hidden_size], device``."""
        (pages,) = self._layer.pages.values()
        return pages

    def moves(self, rows: IntArray, num_computed: IntArray, query_lens: IntArray) -> Moves:
        """Return where the hidden states of a step are read and written.

        Args:
            rows: ``[num_reqs], host``: the requests' rows.
            num_computed: ``[num_reqs], host``: the tokens before those of the step.
            query_lens: ``[num_reqs], host``: the tokens of the step.
        """
        batch = StepBatch(rows=rows, num_computed=num_computed, query_lens=query_lens, generating_indices=NONE_WANTED)
        (step,) = self._states.steps(batch, self._tables)
        return Moves.of(step, np.cumsum(query_lens) - query_lens)

    def read(self, rows: IntArray, num_computed: IntArray) -> torch.Tensor:
        """Return the hidden states after the computed tokens of requests.

        Args:
            rows: ``[num_reqs], host``: the requests' rows.
            num_computed: ``[num_reqs], host``: their computed tokens, at least one each.

        Returns:
            ``[num_reqs, num_heads, hidden_size], device``.
        """
        first_rows, *sources = self.moves(rows, num_computed, np.ones_like(rows)).sources
        assert np.array_equal(first_rows, np.arange(len(rows)))
        return self.pages[tuple(map(self._to_device, sources))]


@attrs.frozen(eq=False)
class Moves:
    """Where a step's hidden states are read and written, on the host.

    Attributes:
        sources: The packed rows of the first tokens of requests that have earlier ones; for each, the page with the
            hidden states before it, and which of the page's states these are.
        targets: The packed rows of the tokens whose hidden states are kept, and likewise where.
    """

    sources: IntArray
    targets: IntArray

    @classmethod
    def of(cls, step: StateStep, starts: IntArray) -> Moves:
        """Return the moves of a step.

        Args:
            step: The step; its tensors lie on the host.
            starts: ``[num_reqs]``: the first packed row of each request.
        """
        first_rows = {*starts.tolist()}
        return cls(
            _columns(
                [(each.rows, each.source_pages, each.source_places) for each in step.rounds[:1]],
                [(run.start, *run.source) for run in step.runs if run.source is not None and run.start in first_rows],
            ),
            _columns(
                [(each.rows, each.target_pages, each.target_places) for each in step.rounds],
                [(run.stop - 1, *run.target) for run in step.runs],
            ),
        )


def _columns(
    rounds: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], runs: Sequence[tuple[int, int, int]]
) -> IntArray:
    """Return the columns of rounds and runs as one array, ``[3, num_rows]``."""
    parts = [np.stack([each.numpy() for each in columns]) for columns in rounds]
    return np.concatenate([*parts, np.array(runs, dtype=np.int64).reshape(-1, 3).T], axis=1)
