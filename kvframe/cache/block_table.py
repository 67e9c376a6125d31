"""Block tables: for each running request, a row of block ids in each group, and the row's counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputBlocks, Namespace
from kvframe.cache.live_range import NEVER, LiveRange
from kvframe.contract.specs import TOKENS, KVCacheSpec
from kvframe.planning.answers import Answers
from kvframe.planning.memory import allocating
from kvframe.planning.plan import KVCachePlan, PlannedGroup

Rows = npt.NDArray[np.int64]
"""``[n], int64, host``: rows of the block tables, each once."""
Counts = npt.NDArray[np.int64]
"""``[n], int64, host``: a number of tokens for each row."""
ROW_BYTES = 200
"""About the bytes of each row in all parts of the cache, without its blocks."""


@attrs.frozen(eq=False)
class BlockTable:
    """One group's block ids: a row for each running request, a column for each of its blocks.

    Invariant: a row's column ``i`` is the block id of the request's block ``i``, or 0, the null page, if that block is
    not resident.

    Attributes:
        block_size: Tokens per block.
        ids: ``[max_num_seqs, max_blocks], int32, host``.
    """

    block_size: int
    ids: npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class TableStack:
    """The block tables of all groups with one block size that keep state of one sequence, as one array.

    Attributes:
        groups: The groups' indices, in the array's order; ``index`` is the same as an array.
        ids: ``[num_groups, max_num_seqs, max_blocks], int32, host``; each group's ``BlockTable.ids`` is a view of it.
        flat: The same array in one dimension.
    """

    block_size: int
    sequence: str
    groups: tuple[int, ...]
    ids: npt.NDArray[np.int32]
    flat: npt.NDArray[np.int32] = attrs.field(init=False, repr=False)
    index: npt.NDArray[np.int64] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Make the flat view, and the array of groups."""
        object.__setattr__(self, "flat", self.ids.reshape(-1))
        object.__setattr__(self, "index", np.array(self.groups, dtype=np.int64))

    def at(
        self, group_indices: npt.NDArray[np.int64] | int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return ``[n]``: the indices in ``flat``, which is faster to index, of blocks of some groups of the stack."""
        _, num_rows, num_blocks = self.ids.shape
        at: npt.NDArray[np.int64] = (group_indices * num_rows + rows) * num_blocks + blocks
        return at


class BlockTables:
    """The block tables of all groups, by group index.

    Invariant: the tables of equal block size and sequence lie in one of ``stacks``: a step reads all of them at once.

    Attributes:
        first_tokens: ``[max_num_seqs], int64, host`` of each group that keeps a part of a prompt, by its index: the
            first token of each row that it still has, which is 0 until the row gives up tokens.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        sequences: Sequence[str] | None = None,
        max_input_lens: Mapping[str, int] | None = None,
    ) -> None:
        """Start with every row of every table empty; raise a ``PlanError`` if the machine has no memory for them.

        Each group keeps state of its sequence in ``sequences``, requests' own tokens unless given, of at most as many
        tokens as ``max_input_lens`` says; ``block_sizes`` says for each group how many tokens a block has.
        """
        max_lens = {**(max_input_lens or {}), TOKENS: max_model_len}
        groups_of: dict[tuple[int, str], list[int]] = {}
        for group, block_size in enumerate(block_sizes):
            groups_of.setdefault((block_size, TOKENS if sequences is None else sequences[group]), []).append(group)
        shapes = {
            kind: (len(groups), max_num_seqs, -(-max_lens[kind[1]] // kind[0])) for kind, groups in groups_of.items()
        }
        num_bytes = max_num_seqs * ROW_BYTES + 4 * sum(map(math.prod, shapes.values()))
        with allocating(num_bytes, f"for {max_num_seqs} block tables", "a smaller max_num_seqs or max_model_len"):
            self.stacks = tuple(
                TableStack(block_size, sequence, tuple(groups), np.zeros(shapes[block_size, sequence], dtype=np.int32))
                for (block_size, sequence), groups in groups_of.items()
            )
        tables = {
            group: BlockTable(stack.block_size, stack.ids[index])
            for stack in self.stacks
            for index, group in enumerate(stack.groups)
        }
        self._tables = tuple(tables[group] for group in range(len(block_sizes)))
        self.first_tokens: dict[int, Counts] = {}

    def __getitem__(self, group: int) -> BlockTable:
        return self._tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


@attrs.frozen(eq=False)
class GroupKinds:
    """The groups of a plan by the state that they store.

    Attributes:
        plan: The plan; the number of its slabs may change.
        tables: The block tables of all groups.
        token_groups: Those that keep state of requests' own tokens.
        input_groups: The others.
        stacks: The block tables of ``token_groups``.
        sparse: The groups of tokens that store few blocks, which their types choose at each step. The others are dense:
            they store every block that a step computes.
        live: For each group of tokens, by its index, when its blocks die.
        budgets: For each group that keeps a part of a prompt, by its index, how many tokens it keeps.
        asked_answers: The answers of the types whose live ranges no mask gives. They are checked up to the longest
            request.
        is_plain: Whether every group is dense, none of inputs, and nothing depends on the length of prompts.
    """

    plan: KVCachePlan
    tables: BlockTables
    token_groups: tuple[PlannedGroup, ...]
    input_groups: tuple[PlannedGroup, ...]
    stacks: tuple[TableStack, ...]
    sparse: tuple[PlannedGroup, ...]
    live: Mapping[int, LiveRange]
    budgets: Mapping[int, int]
    asked_answers: tuple[Answers, ...]
    is_plain: bool

    @classmethod
    def of(cls, plan: KVCachePlan, tables: BlockTables) -> GroupKinds:
        """Return the groups of a plan and their block tables, ``tables``."""
        token_groups = tuple(group for group in plan.groups if not group.is_of_input)
        sparse = tuple(g for g in token_groups if type(g.spec).stored_blocks is not KVCacheSpec.stored_blocks)
        # Groups of one type have one live range, which is worked out once.
        answers_of = {group.spec.group_key: group.answers for group in token_groups}
        live = {key: LiveRange.of(answers, plan.max_model_len) for key, answers in answers_of.items()}
        input_groups = tuple(group for group in plan.groups if group.is_of_input)
        return cls(
            plan=plan,
            tables=tables,
            token_groups=token_groups,
            input_groups=input_groups,
            stacks=tuple(stack for stack in tables.stacks if not plan.groups[stack.groups[0]].is_of_input),
            sparse=sparse,
            live={group.index: live[group.spec.group_key] for group in token_groups},
            budgets={g.index: g.spec.prompt_budget for g in token_groups if g.spec.prompt_budget is not None},
            asked_answers=tuple(answers for key, answers in answers_of.items() if not live[key].is_by_mask),
            is_plain=not sparse and not input_groups,
        )

    def needed_blocks(self, num_tokens: int, inputs: Iterable[InputBlocks]) -> list[npt.NDArray[np.bool_]]:
        """Return per group ``[num_blocks], bool, host``: the blocks that a request needs to continue after a prefix.

        Of inputs, it needs all blocks.
        """
        needed_blocks = []
        for group in self.plan.groups:
            is_needed = np.zeros(0 if group.is_of_input else num_tokens // group.block_size, dtype=np.bool_)
            for start, stop in group.answers.live_blocks(num_tokens) if len(is_needed) else ():
                is_needed[start:stop] = True
            needed_blocks.append(is_needed)
        for blocks in inputs:
            needed_blocks[blocks.group] = np.ones(blocks.num_blocks, dtype=np.bool_)
        return needed_blocks


@attrs.define(eq=False)
class RowState:
    """The request of a row, without the row's numbers.

    Attributes:
        token_ids: Its tokens: the caller appends to this sequence, and does not change computed ones.
        inputs: Its blocks in the groups of inputs.
        missing_inputs: The inputs whose state is not computed.
        branch: The length of the prefix that an earlier request has too, if it is longer than the hit; otherwise 0.
        first_tokens: Once it gave up tokens of its prompt, by group, the first token that it still has. It publishes
            nothing more then, because what it computes depends on its choice.
    """

    namespace: Namespace = ("", b"")
    token_ids: Sequence[int] = ()
    inputs: tuple[InputBlocks, ...] = ()
    missing_inputs: frozenset[str] = frozenset()
    branch: int = 0
    first_tokens: Mapping[int, int] = attrs.field(factory=dict)


NO_REQUEST = RowState()
"""The state of a free row."""


class RowNumbers:
    """The counts of each row, and the numbers of computed tokens at which the row needs work.

    Invariant: a row needs work only when its computed tokens reach one of these numbers. It lacks no page for its
    tokens ``[0, capacity)``; below ``next_death`` computed tokens none of its blocks dies, and below
    ``next_publication`` none of its blocks becomes findable.

    Attributes:
        num_computed: ``[max_num_seqs], int64, host``: computed tokens.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: blocks, dead ones included: the columns of the block
            tables that are in use.
        capacity: ``[max_num_seqs], int64, host``.
        next_death: Likewise; it may be too early, never too late.
        next_publication: Likewise; the publisher sets it.
        states: The request of each row.
    """

    def __init__(self, num_groups: int, max_num_seqs: int) -> None:
        self.num_computed, self.capacity = np.zeros((2, max_num_seqs), dtype=np.int64)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.next_death, self.next_publication = np.full((2, max_num_seqs), NEVER, dtype=np.int64)
        self.states: list[RowState] = [NO_REQUEST] * max_num_seqs
