"""The message with which rank 0 sends a step to the other ranks: batch, tokens, and changed entries of block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import BlockTables, StepBatch
from kvframe.contract.model import ModelInput
from kvframe.contract.order import IntArray
from kvframe.contract.specs import TOKENS

Entries = tuple[IntArray, npt.NDArray[np.int32]]
"""Places in a stack's ``flat``, and the block ids there."""


class TableEntries:
    """Finds the entries of block tables that were not sent to the other ranks yet.

    Invariant: ``_sent`` holds the entries of the other ranks' tables.
    """

    def __init__(self, tables: BlockTables) -> None:
        """Start with empty tables on the other ranks.

        Args:
            tables: The tables of rank 0.
        """
        self._stacks = tables.stacks
        self._sent = [np.zeros_like(stack.ids) for stack in tables.stacks]

    def take(self, batch: StepBatch) -> list[Entries]:
        """Return for each stack the changed entries that a batch reads, and record them as sent."""
        longest = int((batch.num_computed + batch.query_lens).max())
        entries_of_stacks: list[Entries] = []
        for stack, sent in zip(self._stacks, self._sent, strict=True):
            width = -(-longest // stack.block_size) if stack.sequence == TOKENS else stack.ids.shape[2]
            ids = stack.ids[:, batch.rows, :width]
            groups, requests, blocks = np.nonzero(ids != sent[:, batch.rows, :width])
            entry_indices = stack.at(groups, batch.rows[requests], blocks)
            sent.reshape(-1)[entry_indices] = stack.flat[entry_indices]
            entries_of_stacks.append((entry_indices, stack.flat[entry_indices]))
        return entries_of_stacks


@attrs.frozen(kw_only=True)
class StepMessage:
    """A step as the other ranks receive it.

    Attributes:
        rows: As in ``StepBatch``.
        num_computed: As in ``StepBatch``.
        query_lens: As in ``StepBatch``.
        generating_indices: As in ``StepBatch``.
        logits_indices: The packed tokens whose logits are wanted; None if they are the generating ones.
        tokens: ``[num_tokens], int64``: the packed tokens.
        input_lens: As in ``StepBatch``.
        stores_input: As in ``StepBatch``.
        new_inputs: By sequence and row, the inputs that the step computes.
        entries: For each stack of block tables, what changed.
        range_ends: As in ``StepBatch``.
    """

    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    generating_indices: IntArray
    logits_indices: IntArray | None
    tokens: IntArray
    input_lens: Mapping[str, IntArray]
    stores_input: Mapping[str, npt.NDArray[np.bool_]]
    new_inputs: Mapping[str, Mapping[int, ModelInput]]
    entries: Sequence[Entries]
    range_ends: IntArray | None = None

    @classmethod
    def of(
        cls,
        batch: StepBatch,
        logits_indices: IntArray,
        new_inputs: Mapping[str, Mapping[int, ModelInput]],
        tokens: IntArray,
        entries: TableEntries,
    ) -> StepMessage:
        """Return the message for a batch.

        Args:
            batch: The batch.
            logits_indices: The packed tokens whose logits are wanted.
            new_inputs: By sequence and row, the inputs that the step computes.
            tokens: ``[max_num_seqs, max_model_len], int64``: the tokens of each row.
            entries: The changes of block tables.
        """
        requests, positions = batch.token_positions
        return cls(
            rows=batch.rows,
            num_computed=batch.num_computed,
            query_lens=batch.query_lens,
            generating_indices=batch.generating_indices,
            logits_indices=None if logits_indices is batch.generating_indices else logits_indices,
            tokens=tokens[batch.rows[requests], positions],
            input_lens=dict(batch.input_lens),
            stores_input=dict(batch.stores_input),
            new_inputs={name: dict(each) for name, each in new_inputs.items()},
            entries=entries.take(batch),
            range_ends=batch.range_ends,
        )

    def batch(self) -> StepBatch:
        """Return the batch."""
        return StepBatch(
            rows=self.rows,
            num_computed=self.num_computed,
            query_lens=self.query_lens,
            generating_indices=self.generating_indices,
            input_lens=self.input_lens,
            stores_input=self.stores_input,
            range_ends=self.range_ends,
        )
