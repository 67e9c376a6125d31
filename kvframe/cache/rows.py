"""Rows: the groups of a plan that are treated alike, and the counts in the row of each running request."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.input_index import InputBlocks
from kvframe.cache.live_range import NEVER, LiveRange
from kvframe.contract.specs import KVCacheSpec
from kvframe.planning.answers import Answers
from kvframe.planning.plan import KVCachePlan, PlannedGroup

Rows = npt.NDArray[np.int64]
"""``[n], int64, host``: rows of the block tables, each once."""
Counts = npt.NDArray[np.int64]
"""``[n], int64, host``: a number of tokens for each row."""


@attrs.frozen(eq=False)
class GroupKinds:
    """The groups of a plan by the state that they store.

    Attributes:
        plan: The plan; the number of its slabs may change.
        tables: The block tables of all groups.
        of_tokens: Those that keep state of requests' own tokens; the others keep state of inputs.
        stacks: The block tables of ``of_tokens``.
        sparse: The groups of tokens that store few blocks: their types say at each step which ones. The others are
            dense: they store every block that a step computes.
        live: For each group of tokens, by its index, when its blocks die.
        asked: The answers of the types whose live ranges no mask says: they are checked as far as requests get.
        has_inputs: Whether some group keeps state of inputs.
        is_plain: Whether every group is dense, and none of inputs.
    """

    plan: KVCachePlan
    tables: BlockTables
    of_tokens: tuple[PlannedGroup, ...]
    stacks: tuple[TableStack, ...]
    sparse: tuple[PlannedGroup, ...]
    live: Mapping[int, LiveRange]
    asked: tuple[Answers, ...]
    has_inputs: bool
    is_plain: bool

    @classmethod
    def of(cls, plan: KVCachePlan, tables: BlockTables) -> GroupKinds:
        """Return the groups of a plan, whose block tables are ``tables``."""
        of_tokens = tuple(group for group in plan.groups if not group.is_of_input)
        sparse = tuple(g for g in of_tokens if type(g.spec).stored_blocks is not KVCacheSpec.stored_blocks)
        # Groups of one type have one live range, which is worked out once.
        of_type = {group.spec.group_key: group.answers for group in of_tokens}
        live = {key: LiveRange.of(answers, plan.max_model_len) for key, answers in of_type.items()}
        has_inputs = len(of_tokens) < len(plan.groups)
        return cls(
            plan=plan,
            tables=tables,
            of_tokens=of_tokens,
            stacks=tuple(stack for stack in tables.stacks if not plan.groups[stack.groups[0]].is_of_input),
            sparse=sparse,
            live={group.index: live[group.spec.group_key] for group in of_tokens},
            asked=tuple(answers for key, answers in of_type.items() if not live[key].is_by_mask),
            has_inputs=has_inputs,
            is_plain=not sparse and not has_inputs,
        )


@attrs.define
class RowState:
    """The objects of a row beside its numbers.

    Attributes:
        inputs: Its blocks in the groups of inputs.
        missing: The inputs whose state is not computed.
        branch: Where its tokens part from those of an earlier request; 0 if nothing is known.
    """

    inputs: tuple[InputBlocks, ...] = ()
    missing: frozenset[str] = frozenset()
    branch: int = 0

    def copy(self) -> RowState:
        """Return the same for another row."""
        return self if self is PLAIN else attrs.evolve(self)


PLAIN = RowState()
"""The state of a row that has nothing beside its numbers."""


class RowNumbers:
    """The counts of each row, among them the numbers of tokens at which something happens next.

    Invariant: a row needs work only when its computed tokens reach one of these numbers. It lacks no page for its
    tokens ``[0, capacity)``; below ``next_death`` computed tokens none of its blocks dies, and below
    ``next_publication`` none of its blocks becomes findable.

    ``computed_of``, ``blocks_of``, ``capacity_of``, ``death_of`` and ``publication_of`` are views of these arrays, in
    which single numbers are read and written several times as fast.

    Attributes:
        num_computed: ``[max_num_seqs], int64, host``: computed tokens.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: blocks, dead ones included: the columns of the block
            tables that are in use.
        capacity: ``[max_num_seqs], int64, host``.
        next_death: Likewise; it may be too early, never too late.
        next_publication: Likewise; the publisher sets it.
        states: What each row has beside.
    """

    def __init__(self, num_groups: int, max_num_seqs: int) -> None:
        self.num_computed, self.capacity = np.zeros((2, max_num_seqs), dtype=np.int64)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.next_death, self.next_publication = np.full((2, max_num_seqs), NEVER, dtype=np.int64)
        self.computed_of, self.capacity_of = self.num_computed.data, self.capacity.data
        self.blocks_of = self.num_blocks.data
        self.death_of, self.publication_of = self.next_death.data, self.next_publication.data
        self.states: list[RowState] = [PLAIN] * max_num_seqs
