"""Runs the served model's prediction heads over the engine's steps, and continues requests with them.

Head ``i`` takes the token at ``p`` and the hidden state after ``p - 1``: of the served model for the first head, of the
head before for the others. So its keys of a token depend on the tokens up to that one only, and lie in the cache at
that token's place: prefix hits, forks, swaps and preemption keep them as they keep the served model's. What a step
needs of the hidden states of the step before lies in the cache as well, as the state of a layer.

As in transformers, one head gives one draft, and each draft is the input of the next head. In a step:

1. ``continue_requests`` lets head ``i`` compute the last known token of each request that generates and the ``i``
   drafts after it, and sample draft ``i + 1``.
2. The served model computes the step, in which these tokens may be drafts.
3. ``follow`` computes every head for the tokens that the step keeps, from the hidden states of the served model. The
   last head leaves out those that it computed in 1, because no other head needs its hidden states. So a model with one
   head computes it once for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.layers import AttentionLayers
from kvframe.cache.block_table import BlockTables
from kvframe.contract.metadata import SEQ_STARTS, Axis, Extension
from kvframe.contract.model import PredictionHeads
from kvframe.contract.order import IntArray
from kvframe.contract.state import StateStep
from kvframe.engine.requests.request import Request
from kvframe.engine.running.draft_runner import NONE_WANTED, DraftRunner, num_done_of, num_kept_of
from kvframe.engine.running.model_runner import ModelRunner
from kvframe.engine.running.next_tokens import FAILED, sample
from kvframe.engine.scheduling.step import Outcomes, ScheduledStep

if TYPE_CHECKING:
    from kvframe.engine.running.model_runner import TokenRunner


class HeadsRunner(DraftRunner):
    """Runs prediction heads.

    Invariant: between steps, the pages of each running request hold the heads' keys of the same tokens as the served
    model's, and the hidden states after the last of them, until the heads are set aside.

    Attributes:
        runner: Runs one head over one batch.
        is_set_aside: Whether a head failed: they then compute nothing more.
    """

    _failure = "a prediction head failed, and the heads are set aside: no drafts"

    def __init__(
        self, heads: PredictionHeads, layers: AttentionLayers, tables: BlockTables, served: TokenRunner
    ) -> None:
        """Take the heads.

        Args:
            heads: The heads, to be attached to ``layers``.
            layers: Their layers: those that attend, and one that keeps hidden states.
            tables: The block tables of all cache groups.
            served: Runs the served model; its steps give the hidden states of all tokens.
        """
        max_num_seqs, max_model_len = served.tokens.shape
        runner = ModelRunner(
            heads,
            layers,
            tables,
            served.device,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            tokens=served.tokens,
            forward=self._forward,
            keeps_all_rows=True,
        )
        super().__init__(runner, layers)
        self._heads, self._tables, self._served = heads, tables, served
        self._num_heads = heads.description.num_prediction_heads
        (self._kept,) = layers.states.values()
        self._inputs: torch.Tensor
        self._head = 0

    def _continue(
        self,
        requests: Sequence[Request],
        rows: IntArray,
        num_known: IntArray,
        counts: IntArray,
        found: list[list[int]],
    ) -> None:
        # A request that was admitted in this step has not been given to the runner yet.
        self.runner.tokens[rows, num_known - 1] = [request.token_ids[-1] for request in requests]
        going_on = np.arange(len(requests))
        kept = self._read(rows, num_known - 1)
        before = kept[:, :0]
        for head in range(min(int(counts.max()), self._num_heads)):
            staying = np.flatnonzero(counts[going_on] > head)
            order = self._layers.order_for(num_known[going_on[staying]] - 1, np.full(len(staying), head + 1))
            staying = staying if order is None else staying[order]
            if len(staying) < len(going_on) or order is not None:
                going_on, places = going_on[staying], self.runner.to_device(staying)
                kept, before = kept[places], before[places]
            if not len(going_on):
                break
            logits, states = self._run_head(
                head,
                rows[going_on],
                num_known[going_on] - 1,
                np.full(len(going_on), head + 1),
                torch.cat([kept[:, head, None], before], dim=1).flatten(0, 1),
                wants_last=True,
            )
            before = states.unflatten(0, (len(going_on), head + 1))
            token_ids = sample(logits, [requests[index] for index in going_on.tolist()], [head] * len(going_on))
            for index, token_id in zip(going_on.tolist(), token_ids, strict=True):
                if token_id == FAILED:
                    counts[index] = 0
                else:
                    found[index].append(token_id)
            self.runner.tokens[rows[going_on], num_known[going_on] + head] = np.maximum(token_ids, 0)

    def follow(self, step: ScheduledStep[Request], outcomes: Outcomes) -> None:
        """Compute the heads for what a step keeps.

        Args:
            step: A step that the served model has computed.
            outcomes: What the served model's runner returned for it.
        """
        if self.is_set_aside:
            return
        num_kept = num_kept_of(step, outcomes)
        places = np.flatnonzero(num_kept)
        if not len(places):
            return
        order = self._layers.order_for(step.num_computed[places], num_kept[places])
        if order is not None:
            places = places[order]
        num_done = num_done_of(step)
        if step.continued:
            num_done[np.array([len(tokens) for tokens in step.continued]) < self._num_heads] = 0
        try:
            with torch.inference_mode():
                self._follow(step.rows[places], step.num_computed[places], num_kept[places], num_done[places])
        except Exception as error:
            self._set_aside(error)

    def _follow(self, rows: IntArray, num_computed: IntArray, num_kept: IntArray, num_done: IntArray) -> None:
        states = self._served.hidden_rows_of(self._served.packed, rows, num_kept)
        moves = self._moves(rows, num_computed, num_kept)
        first_rows, *sources = map(self.runner.to_device, moves.sources)
        kept = self._pages[tuple(sources)]
        after = []
        for head in range(self._num_heads):
            after.append(states)
            # For each token, the hidden state after the one before; that of the last step for a request's first one.
            inputs = states.roll(1, 0).index_copy_(0, first_rows, kept[:, head])
            done = num_done if head == self._num_heads - 1 else None
            _, states = self._run_head(head, rows, num_computed, num_kept, inputs, num_done=done)
        written, *targets = map(self.runner.to_device, moves.targets)
        self._pages.index_put_(tuple(targets), torch.stack(after, dim=1)[written])

    def _run_head(
        self,
        head: int,
        rows: IntArray,
        num_computed: IntArray,
        query_lens: IntArray,
        inputs: torch.Tensor,
        *,
        num_done: IntArray | None = None,
        wants_last: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a head over one batch.

        Args:
            head: The head.
            rows: ``[num_reqs], host``: the requests' rows.
            num_computed: ``[num_reqs], host``: the tokens before those of the batch.
            query_lens: ``[num_reqs], host``: the tokens of the batch.
            inputs: ``[num_tokens, hidden_size], device``: the hidden state before each.
            num_done: ``[num_reqs], host``: how many of them to leave out, the first ones; None for none.
            wants_last: Whether the logits of each request's last token are wanted; a head computes that token.

        Returns:
            The wanted logits, and the head's hidden states ``[num_tokens, hidden_size]``, device; zeros for tokens that
            it did not compute: those that are left out, and the first ones of a request.
        """
        first = head + 1
        starts = np.maximum(num_computed if num_done is None else num_computed + num_done, first)
        counts = num_computed + query_lens - starts
        own: torch.Tensor | None = None
        if not np.array_equal(starts, num_computed):
            first_places = num_computed + query_lens - np.cumsum(query_lens)
            positions = np.arange(len(inputs)) + np.repeat(first_places, query_lens)
            own = self.runner.to_device(np.flatnonzero(positions >= np.repeat(starts, query_lens)))
            is_computed = counts > 0
            rows, starts, counts = rows[is_computed], starts[is_computed], counts[is_computed]
            if not len(rows):
                return inputs[:0], torch.zeros_like(inputs)
        self._head, self._inputs = head, inputs if own is None else inputs[own]
        hidden = torch.full((len(rows),), first, dtype=torch.int32)
        logits = self.runner.forward(
            StepBatch(
                rows=rows,
                num_computed=starts,
                query_lens=counts,
                generating_indices=np.cumsum(counts) - 1 if wants_last else NONE_WANTED,
                extensions={SEQ_STARTS: Extension(hidden, Axis.REQUEST, hidden)},
            )
        )
        states = self.runner.hidden_rows
        assert states is not None
        return logits, states if own is None else torch.zeros_like(inputs).index_copy_(0, own, states)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._heads.forward_head(self._head, input_ids, positions, self._inputs, wanted)

    # --- the hidden states after the last token ---------------------------------------------------------------------

    @property
    def _pages(self) -> torch.Tensor:
        """``[num_block_ids, states_per_block, num_heads, hidden_size], device``."""
        (pages,) = self._kept.pages.values()
        return pages

    def _moves(self, rows: IntArray, num_computed: IntArray, query_lens: IntArray) -> _Moves:
        batch = StepBatch(rows=rows, num_computed=num_computed, query_lens=query_lens, generating_indices=NONE_WANTED)
        (step,) = self._layers.states.steps(batch, self._tables)
        return _Moves.of(step, np.cumsum(query_lens) - query_lens)

    def _read(self, rows: IntArray, num_computed: IntArray) -> torch.Tensor:
        """Return the hidden states after the computed tokens of requests, ``[num_reqs, num_heads, hidden_size]``."""
        moves = self._moves(rows, num_computed, np.ones_like(rows))
        first_rows, *sources = moves.sources
        assert np.array_equal(first_rows, np.arange(len(rows)))
        return self._pages[tuple(map(self.runner.to_device, sources))]


@attrs.frozen(eq=False)
class _Moves:
    """Where a step's hidden states are read and written, on the host.

    Attributes:
        sources: The packed rows of the first tokens of requests that have earlier ones; for each, the page with the
            hidden states before it, and which of the page's states these are.
        targets: The packed rows of the tokens whose hidden states are kept, and likewise where.
    """

    sources: IntArray
    targets: IntArray

    @classmethod
    def of(cls, step: StateStep, starts: IntArray) -> _Moves:
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
