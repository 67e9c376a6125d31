"""Which blocks that running requests let go of may be of no use to others, though nobody gave up anything of theirs.

A hit needs a block together with others. What a request computed from its beginning, or from what it found, was all
there together. Not so where it freed some of what it passed, or goes on behind what is not there or not its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.prefix import PrefixNode
from kvframe.cache.tree import PrefixTree
from kvframe.plan import PlannedGroup
from kvframe.specs import KVCacheSpec

Rows = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int64]


class Doubts:
    """What has to be known of rows for it. Whatever it tells the tree to doubt is looked at when room is needed."""

    def __init__(self, tree: PrefixTree, groups: Sequence[PlannedGroup], num_computed: npt.NDArray[np.int64]) -> None:
        """Doubt nothing.

        Args:
            tree: The tree.
            groups: All groups of the plan.
            num_computed: ``[max_num_seqs], int64, host``: the computed tokens of each row, as they are at any time.
        """
        self._tree = tree
        self._num_computed, self._computed_of = num_computed, num_computed.data
        # Where blocks of groups end differently, the end of a request may be of no use.
        self._ends_alike = len(set(tree.sizes)) <= 1
        default = KVCacheSpec.stored_blocks
        self._sparse = frozenset(group.index for group in groups if type(group.spec).stored_blocks is not default)
        # Per row, whether what comes before some of its blocks is not there or not its own.
        self._has_gaps = np.zeros(len(num_computed), dtype=np.bool_)
        # Per row, how many tokens were computed when it last passed a block that was freed, and before that, at the
        # most, one that was kept; and whether it kept one since.
        self._freed_at = np.zeros(len(num_computed), dtype=np.int64)
        self._kept_at = np.zeros(len(num_computed), dtype=np.int64)
        self._keeps = np.zeros(len(num_computed), dtype=np.bool_)
        # Per row, whether it has gaps or freed something: usually none has.
        self._is_wary = np.zeros(len(num_computed), dtype=np.bool_)
        self._all = self._has_gaps, self._freed_at, self._kept_at, self._keeps, self._is_wary
        # Single ones are read and written several times as fast in these.
        self._gaps_of, self._keeps_of, self._wary_of = self._has_gaps.data, self._keeps.data, self._is_wary.data
        self._freed_at_of = self._freed_at.data

    def begin(self, row: int, *, has_gaps: bool) -> None:
        """Begin with a row that has passed nothing, as a new one or one that ended.

        Args:
            row: The row.
            has_gaps: Whether it has less than a request that computed as much.
        """
        if has_gaps or self._tree.keeps_ghosts:
            self.find_gaps(row)

    def fork(self, row: int, new_row: int) -> None:
        """Begin with a row that has what another one has."""
        for each in self._all:
            each[new_row] = each[row]

    def find_gaps(self, row: int) -> None:
        """Take note that what comes before a row's next blocks is not there, or not its own."""
        self._gaps_of[row] = self._wary_of[row] = True

    def keep(self, rows: Rows, blocks: Blocks, s: int, owners: npt.NDArray[np.int32]) -> None:
        """Take note of blocks that rows let go of and that stay; doubt those that may never have been of use.

        What was freed before a block's first token was computed, no hit needs together with it.

        Args:
            rows: ``[n], int64, host``: the rows.
            blocks: ``[n], int64, host``: a block of each.
            s: The table stack of their groups.
            owners: ``[n], int32, host``: who published each.
        """
        self._keeps[rows] = True
        if np.count_nonzero(self._is_wary):
            is_doubtful = self._has_gaps[rows] | (blocks * self._tree.sizes[s] < self._freed_at[rows])
            for owner in np.unique(owners[is_doubtful]).tolist():
                self._doubt(self._tree.node(owner))

    def keep_of(self, row: int, blocks: Blocks, s: int, pages: npt.NDArray[np.int32]) -> None:
        """Take note of several blocks of one row, as ``keep`` does."""
        self._keeps_of[row] = True
        if self._wary_of[row]:
            self.keep(np.full(len(blocks), row), blocks, s, self._tree.pool.owners(pages))

    def free(self, rows: Rows, blocks: Blocks, s: int, leaves: npt.NDArray[np.int32]) -> None:
        """Take note of blocks that rows let go of and that do not stay; doubt what a hit needed together with them.

        Args:
            rows: As of ``keep``.
            blocks: Likewise.
            s: Likewise.
            leaves: ``[n], int32, host``: the owner numbers of the nodes that grow with the rows.
        """
        num_computed, keeps = self._num_computed[rows], self._keeps[rows]
        self._freed_at[rows], self._is_wary[rows] = num_computed, True
        if np.count_nonzero(keeps):
            self._kept_at[rows[keeps]] = num_computed[keeps]
            self._keeps[rows] = False
        for leaf in set(leaves[blocks * self._tree.sizes[s] < self._kept_at[rows]].tolist()):
            self._doubt(self._tree.node(leaf))

    def minds(self, group: int) -> bool:
        """Return whether it matters that a block of a group is freed: not where few are stored."""
        return group not in self._sparse

    def end(self, row: int, node: PrefixNode | None) -> None:
        """Take note that a row ends; doubt the node at its end if no hit ends behind all that it freed, or none can."""
        if not self._wary_of[row] and self._ends_alike:
            self._keeps_of[row] = False
            return
        step = self._tree.unit
        if self._gaps_of[row] or not self._ends_alike or self._freed_at_of[row] > self._computed_of[row] // step * step:
            self._doubt(node)
            # It may have put blocks back in any node before.
            while node is not None:
                if not node.first_hit:
                    self._doubt(node)
                node = node.parent
        for each in self._all:
            each[row] = 0

    def _doubt(self, node: PrefixNode | None) -> None:
        if node is not None and self._tree.is_there(node):
            self._tree.doubt(node)
