"""Runs the served model's prediction heads over the engine's steps, and continues requests with them.

Head ``i`` takes the token at ``p`` and the hidden state after ``p - 1``: of the served model for the first head, of the
head before for the others. So its keys of a token depend on the tokens up to that one only, and lie in the cache at
that token's place: prefix hits, forks and preemption keep them as they keep the served model's. What a step
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

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvframe import BlockTables, Layers, StepBatch
from kvframe.contract.metadata import SEQ_STARTS, Axis, Extension
from kvframe.contract.model import PredictionHeads
from kvframe.contract.order import IntArray
from kvframe_engine.graphs.sizes import Generating
from kvframe_engine.requests.request import Request
from kvframe_engine.running.draft_runner import DraftRunner, num_done_of, num_kept_of
from kvframe_engine.running.last_hidden_states import LastHiddenStates
from kvframe_engine.running.model_runner import ModelRunner
from kvframe_engine.running.next_tokens import FAILED, sample
from kvframe_engine.scheduling.step import Outcomes, ScheduledStep

if TYPE_CHECKING:
    from kvframe_engine.graphs.sizes import UsualStep
    from kvframe_engine.graphs.step_graphs import Forward, StepGraphs
    from kvframe_engine.running.model_runner import TokenRunner


class HeadsRunner(DraftRunner):
    """Runs prediction heads.

    Invariant: between steps, the pages of each running request hold the heads' keys of the same tokens as the served
    model's, and the hidden states after the last of them, until the heads are set aside.

    Attributes:
        runners: What runs each head over a batch. Each has graphs of its own, if there are any.
        is_set_aside: Whether a head failed: they then compute nothing more.
    """

    _failure = "a prediction head failed, and the heads are set aside: no drafts"

    def __init__(
        self,
        heads: PredictionHeads,
        layers: Layers,
        kept: Layers,
        tables: BlockTables,
        served: TokenRunner,
        make_graphs: Callable[[Forward, Collection[UsualStep]], StepGraphs | None],
        query_lens: Collection[int],
    ) -> None:
        """Take the heads.

        Args:
            heads: The heads, to be attached to ``layers``.
            layers: Their attention layers.
            kept: The layer that keeps hidden states, alone.
            tables: The block tables of all cache groups.
            served: Runs the served model; its steps give the hidden states of all tokens.
            make_graphs: Makes the graphs of a head, if the stack asks for graphs: ``make_graphs(forward, steps)``,
                where ``steps`` are the kinds of steps that it usually computes.
            query_lens: The numbers of tokens of a request that the stack captures.
        """
        self._heads, self._served, self._tables = heads, served, tables
        self._num_heads = heads.description.num_prediction_heads
        self._last = LastHiddenStates(kept, tables, served.to_device)
        self._inputs: torch.Tensor
        max_num_seqs, max_model_len = served.tokens.shape
        self.runners: list[ModelRunner] = []
        for head in range(self._num_heads):
            forward = partial(self._forward, head)
            # It continues requests, and computes what steps keep: one token of a request, or that and its drafts.
            stored = dict.fromkeys((*query_lens, 1 + head, 1 + self._num_heads))
            steps = [(1 + head, Generating.LAST), *((query_len, Generating.STORED) for query_len in stored)]
            # The layers of all heads decide together what can be captured.
            has_graphs = head == 0 or self.runners[0].graphs is not None
            runner = ModelRunner(
                heads,
                layers,
                tables,
                served.device,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                graphs=make_graphs(forward, steps) if has_graphs else None,
                tokens=served.tokens,
                forward=forward,
                keeps_all_rows=True,
            )
            self.runners.append(runner)
        super().__init__(self.runners[0], layers)
        sizes = [runner.graphs.max_num_tokens for runner in self.runners if runner.graphs is not None]
        # Graphs read a step's hidden states where they were captured.
        with torch.inference_mode():  # as all hidden states are made: compiled code distinguishes other tensors
            self._static = self._last.pages.new_zeros(max(sizes, default=0), self._last.pages.shape[-1])

    def warm_up(self) -> None:
        """Capture the usual graphs of all heads. The first tokens of a request are hidden from each."""
        for head, runner in enumerate(self.runners):
            if runner.graphs is not None:
                runner.graphs.capture_usual(self._tables, num_hidden=head + 1)

    def drop_graphs(self) -> None:
        """Forget the captured graphs of all heads."""
        for runner in self.runners:
            runner.drop_graphs()

    def _continue(
        self,
        requests: Sequence[Request],
        rows: IntArray,
        num_known: IntArray,
        counts: IntArray,
        token_runs: list[list[int]],
    ) -> None:
        # A request that was admitted in this step has not been given to the runner yet.
        self.runner.tokens[rows, num_known - 1] = [request.token_ids[-1] for request in requests]
        going_on = np.arange(len(requests))
        hidden_states = self._last.read(rows, num_known - 1)
        before = hidden_states[:, :0]
        for head in range(min(int(counts.max()), self._num_heads)):
            staying = np.flatnonzero(counts[going_on] > head)
            # Requests with equally many tokens need no order.
            if len(staying) < len(going_on):
                going_on, staying_rows = going_on[staying], self.runner.to_device(staying)
                hidden_states, before = hidden_states[staying_rows], before[staying_rows]
            if not len(going_on):
                break
            logits, states = self._run_head(
                head,
                rows[going_on],
                num_known[going_on] - 1,
                np.full(len(going_on), head + 1),
                torch.cat([hidden_states[:, head, None], before], dim=1).flatten(0, 1),
                wants_last=True,
            )
            before = states.unflatten(0, (len(going_on), head + 1))
            token_ids = sample(logits, [requests[index] for index in going_on.tolist()], [head] * len(going_on))
            for index, token_id in zip(going_on.tolist(), token_ids, strict=True):
                if token_id == FAILED:
                    counts[index] = 0
                else:
                    token_runs[index].append(token_id)
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
        indices = np.flatnonzero(num_kept)
        if not len(indices):
            return
        order = self._layers.order_for(num_kept[indices])
        if order is not None:
            indices = indices[order]
        num_done = num_done_of(step)
        if step.continued:
            num_done[np.array([len(tokens) for tokens in step.continued]) < self._num_heads] = 0
        try:
            with torch.inference_mode():
                self._follow(step.rows[indices], step.num_computed[indices], num_kept[indices], num_done[indices])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._set_aside(error)

    def _follow(self, rows: IntArray, num_computed: IntArray, num_kept: IntArray, num_done: IntArray) -> None:
        states = self._served.hidden_rows_of(self._served.packed, rows, num_kept)
        moves = self._last.moves(rows, num_computed, num_kept)
        first_rows, *sources = map(self.runner.to_device, moves.sources)
        hidden_states = self._last.pages[tuple(sources)]
        after = []
        for head in range(self._num_heads):
            after.append(states)
            # For each token, the hidden state after the one before; that of the last step for a request's first one.
            inputs = states.roll(1, 0).index_copy_(0, first_rows, hidden_states[:, head])
            num_last_done = num_done if head == self._num_heads - 1 else None
            _, states = self._run_head(head, rows, num_computed, num_kept, inputs, num_done=num_last_done)
        written, *targets = map(self.runner.to_device, moves.targets)
        self._last.pages.index_put_(tuple(targets), torch.stack(after, dim=1)[written])

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
        own_rows: torch.Tensor | None = None
        if not np.array_equal(starts, num_computed):
            first_places = num_computed + query_lens - np.cumsum(query_lens)
            positions = np.arange(len(inputs)) + np.repeat(first_places, query_lens)
            own_rows = self.runner.to_device(np.flatnonzero(positions >= np.repeat(starts, query_lens)))
            is_computed = counts > 0
            rows, starts, counts = rows[is_computed], starts[is_computed], counts[is_computed]
            if not len(rows):
                return inputs[:0], torch.zeros_like(inputs)
        self._give(inputs if own_rows is None else inputs[own_rows])
        hidden = torch.full((len(rows),), first, dtype=torch.int32)
        logits = self.runners[head].forward(
            StepBatch(
                rows=rows,
                num_computed=starts,
                query_lens=counts,
                generating_indices=np.cumsum(counts) - 1,
                extensions={SEQ_STARTS: Extension(hidden, Axis.REQUEST, hidden)},
            ),
            wants_logits=wants_last,
        )
        states = self.runners[head].hidden_rows
        assert states is not None
        return logits, states if own_rows is None else torch.zeros_like(inputs).index_copy_(0, own_rows, states)

    def _give(self, inputs: torch.Tensor) -> None:
        """Keep the hidden states that the next forward reads."""
        self._inputs = inputs
        if len(inputs) <= len(self._static):
            self._static[: len(inputs)] = inputs

    def _forward(
        self, head: int, input_ids: torch.Tensor, positions: torch.Tensor, wanted_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(input_ids)
        inputs = self._static[:num_tokens] if num_tokens <= len(self._static) else self._inputs
        return self._heads.forward_head(head, input_ids, positions, inputs, wanted_indices)
