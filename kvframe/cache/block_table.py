"""Block tables: for each running request, where its blocks lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.specs import TOKENS
from kvframe.planning.memory import allocating

ROW_BYTES = 200
"""About what is kept of each row beside its blocks, by all who keep something."""


@attrs.frozen(eq=False)
class BlockTable:
    """One group's block ids, a row for each running request, a column for each of its blocks.

    Invariant: a row's column ``i`` is the block id of the request's block ``i``, or 0, the null page, if that block is
    not resident.

    Attributes:
        block_size: Tokens per block.
        ids: ``[max_num_seqs, max_blocks], int32, host``.
        rows: Its rows ``[max_blocks], int32, host``, views that are read and written in half the time of ``ids[row]``.
    """

    block_size: int
    ids: npt.NDArray[np.int32]
    rows: Sequence[npt.NDArray[np.int32]] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Make the views."""
        object.__setattr__(self, "rows", [*self.ids])


@attrs.frozen(eq=False)
class TableStack:
    """The block tables of all groups with one block size that keep state of one sequence, as one array.

    Attributes:
        block_size: Tokens per block.
        sequence: Which sequence of a request the blocks are of.
        groups: The groups' indices, in the array's order.
        ids: ``[num_groups, max_num_seqs, max_blocks], int32, host``; each group's ``BlockTable.ids`` is a view of it.
        flat: ``[num_groups * max_num_seqs * max_blocks], int32, host``: the same array.
        index: ``[num_groups], int64, host``: ``groups`` as an array.
    """

    block_size: int
    sequence: str
    groups: tuple[int, ...]
    ids: npt.NDArray[np.int32]
    flat: npt.NDArray[np.int32] = attrs.field(init=False, repr=False)
    index: npt.NDArray[np.int64] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """See the array as one row, and keep the groups as an array too."""
        object.__setattr__(self, "flat", self.ids.reshape(-1))
        object.__setattr__(self, "index", np.array(self.groups, dtype=np.int64))

    def at(
        self, places: npt.NDArray[np.int64] | int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return where the blocks of groups at ``places`` lie in ``flat``, which is faster to index: ``[n]`` each."""
        _, num_rows, num_blocks = self.ids.shape
        at: npt.NDArray[np.int64] = (places * num_rows + rows) * num_blocks + blocks
        return at


class BlockTables:
    """The block tables of all groups, by group index.

    Invariant: the tables of equal block size and sequence lie in one array, so that a step reads all of them at once.

    Attributes:
        stacks: The arrays, one for each block size and sequence.
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
            group: BlockTable(stack.block_size, stack.ids[place])
            for stack in self.stacks
            for place, group in enumerate(stack.groups)
        }
        self._tables = tuple(tables[group] for group in range(len(block_sizes)))

    def __getitem__(self, group: int) -> BlockTable:
        return self._tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)
