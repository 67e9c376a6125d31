"""Dead blocks: which of a row's blocks no later token needs, and giving their pages back as soon as it is so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import BlockTables
from kvframe.cache.forgetting import NEVER, MovingGroups
from kvframe.cache.free_pages import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.pool import BlockPool
from kvframe.cache.publishing import Publisher
from kvframe.cache.room import Room
from kvframe.cache.rows import BlockRange, RowNumbers, Rows, RowState
from kvframe.errors import SpecError
from kvframe.plan import PlannedGroup


class DeadBlocks:
    """Releases what died, and says when a row's next block dies (``RowNumbers.next_death``).

    Invariant: after ``bury`` a row holds pages only of blocks that are live, or that its next tokens are written into.

    Attributes:
        first_death: The computed tokens from which on a block of a row that begins without a token dies.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        pool: BlockPool,
        tables: BlockTables,
        numbers: RowNumbers,
        publisher: Publisher | None,
        room: Room,
    ) -> None:
        """Give pages back to a pool; every row is one without a token.

        Args:
            kinds: The groups.
            pool: The pages.
            tables: One block table per group.
            numbers: What is counted of each row.
            publisher: Who keeps dead blocks findable; None if nobody does.
            room: Who works out anew up to where there is room, for whom fewer pages change it.
        """
        self._asked, self._sparse, self._is_plain = kinds.asked, kinds.sparse, kinds.is_plain
        self._stacks = kinds.stacks
        self._moving: list[MovingGroups | None] = []
        for stack in kinds.stacks:
            found = [(place, kinds.forgetting.get(group)) for place, group in enumerate(stack.groups)]
            of_stack = [(place, each) for place, each in found if each is not None and (each.window or each.chunk)]
            self._moving.append(MovingGroups(of_stack, len(numbers.states)) if of_stack else None)
        self._pool = pool
        self._tables = tables
        self._publisher = publisher
        self._room = room
        self._num_blocks, self._states = numbers.num_blocks, numbers.states
        self._next_death, self._death_of = numbers.next_death, numbers.death_of
        deaths = [int(moving.next_death(moving.dead[:, :1])[0]) for moving in self._moving if moving is not None]
        self.first_death = -1 if self._asked else min(deaths, default=NEVER)
        self._next_death[...] = self.first_death

    def begin(self, row: int, num_computed: int, state: RowState) -> None:
        """Take note of a row that begins, with exactly those blocks that are live after its computed tokens."""
        for group in self._asked:
            state.live.setdefault(group.index, ((0, num_computed // group.block_size),))
        for moving in self._moving:
            if moving is not None:
                moving.start(row, num_computed)
        self._note_next(row, is_asked=bool(self._asked or state.inputs))

    def clear(self, row: int) -> None:
        """Let a row be as one without a token."""
        self._death_of[row] = self.first_death
        for moving in self._moving:
            if moving is not None:
                moving.clear(row)

    # --- burying ------------------------------------------------------------------------------------------------------

    def bury(self, row: int, num_computed: int) -> None:
        """Release what no token needs after those that are computed. Inputs are computed with the first, and stay."""
        if self._is_plain:
            self._bury_plain(np.array([row]), np.array([num_computed]))
        else:
            self._bury_row(row, num_computed)

    def _bury_row(self, row: int, num_computed: int) -> None:
        """Release what no token of a row needs any more, group by group."""
        if self._publisher is not None and not self._pool.is_short:
            # Else what the row passes is freed with it: there are more useful pages to keep.
            self._publisher.refresh(row)
        state = self._states[row]
        if state.missing:
            state.missing = frozenset()
            self._room.note(row)
        for s, moving in enumerate(self._moving):
            if moving is not None:
                for place, kind, before in zip(moving.places, moving.types, moving.dead[:, row].tolist(), strict=True):
                    dead = kind.dead(num_computed)
                    if dead > before:
                        self._release_range(row, self._stacks[s].groups[place], before, dead)
                np.maximum(moving.dead[:, row], moving.dead_at(np.array([num_computed]))[:, 0], out=moving.dead[:, row])
        for group in self._asked:
            self._bury_asked(row, group, state, num_computed)
        self._note_next(row, is_asked=bool(self._asked))
        if self._sparse:
            self._room.note(row)

    def bury_rows(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Release what no token of several rows needs any more; plain rows together.

        Args:
            rows: ``[n], int64, host``, each once.
            num_computed: ``[n], int64, host``.
        """
        if self._is_plain:
            self._bury_plain(rows, num_computed)
            return
        for row, count in zip(rows.tolist(), num_computed.tolist(), strict=True):
            self._bury_row(row, count)

    def _bury_plain(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Release what no token of plain rows needs any more, of all rows and groups together."""
        next_death: npt.NDArray[np.int64] | None = None
        for s, moving in enumerate(self._moving):
            if moving is None:
                continue
            before, after = moving.dead.take(rows, axis=1), moving.dead_at(num_computed)
            np.maximum(before, after, out=after)
            died = after - before
            most = np.maximum.reduce(died, axis=None)
            if most > 1:
                self._bury_runs(rows, num_computed, np.maximum.reduce(died) > 1)
                return
            if most:
                (which,) = died.reshape(-1).nonzero()
                blocks = before.reshape(-1)[which]
                if len(moving.types) == 1:
                    self._release_each(s, int(moving.places[0]), rows[which], blocks)
                else:
                    kinds, which = np.divmod(which, len(rows))
                    self._release_each(s, moving.places[kinds], rows[which], blocks)
                moving.dead[:, rows] = after
            nearest = moving.next_death(after)
            next_death = nearest if next_death is None else np.minimum(next_death, nearest)
        self._next_death[rows] = NEVER if next_death is None else next_death

    def _bury_runs(self, rows: Rows, num_computed: npt.NDArray[np.int64], has_runs: npt.NDArray[np.bool_]) -> None:
        """Release what no token of plain rows needs any more, where a chunk of a prompt killed several blocks of some.

        Args:
            rows: As of ``bury_rows``.
            num_computed: Likewise.
            has_runs: ``[n], bool, host``: in which rows.
        """
        for row, count in zip(rows[has_runs].tolist(), num_computed[has_runs].tolist(), strict=True):
            self._bury_row(row, count)
        if not has_runs.all():
            self._bury_plain(rows[~has_runs], num_computed[~has_runs])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _note_next(self, row: int, *, is_asked: bool) -> None:
        """Work out when the next block of a row dies; of one that is asked, whenever tokens are computed."""
        if is_asked:
            self._death_of[row] = -1
            return
        nearest = NEVER
        for moving in self._moving:
            if moving is not None:
                nearest = min(nearest, int(moving.next_death(moving.dead[:, [row]])[0]))
        self._death_of[row] = nearest

    def _bury_asked(self, row: int, group: PlannedGroup, state: RowState, num_computed: int) -> None:
        """Release the dead blocks of a row in a group whose live ranges are asked."""
        index, count = group.index, int(self._num_blocks[group.index, row])
        try:
            live = group.answers.live_blocks(num_computed)
        except SpecError as error:
            # It keeps all its blocks, and gets none for another token.
            state.fault = error
            self._room.note(row)
            return
        # The block that the next token is written into stays, live or not.
        current = num_computed // group.block_size
        is_live = live and live[-1][1] >= current
        kept = (*live[:-1], (live[-1][0], count)) if is_live else (*live, (current, count))
        before = state.live[index]
        if before and before[-1][1] < count:
            before = (*before[:-1], (before[-1][0], count))
        # Where few blocks are stored, each step says which: those beyond its end are of tokens that were refused.
        for start, stop in _difference(before, live if group in self._sparse else kept):
            self._release_range(row, index, start, stop)
        state.live[index] = kept

    def _release_range(self, row: int, index: int, start: int, stop: int) -> None:
        """Release blocks ``[start, stop)`` of a row in a group."""
        ids = self._tables[index].ids[row, start:stop]
        if self._publisher is not None:
            self._publisher.pass_range(row, index, start, ids)
        release_resident(self._pool, index, ids)
        ids[...] = 0

    def _release_each(self, s: int, places: Rows | int, rows: Rows, blocks: npt.NDArray[np.int64]) -> None:
        """Release blocks of groups of a stack and of rows, each named by its place, row and index."""
        stack = self._stacks[s]
        at = stack.at(places, rows, blocks)
        ids = stack.flat[at]
        if np.count_nonzero(ids) < len(ids):
            is_held = ids != 0
            rows, blocks, at, ids = rows[is_held], blocks[is_held], at[is_held], ids[is_held]
            places = places if isinstance(places, int) else places[is_held]
        if not len(ids):
            return
        stack.flat[at] = 0
        groups = stack.groups[places] if isinstance(places, int) else stack.index[places]
        if self._publisher is not None:
            self._publisher.release_passed(s, places, rows, blocks, at, ids, groups)
        else:
            self._pool.release(ids, groups)


def release_resident(pool: BlockPool, group: int, ids: BlockIds) -> None:
    """Release the pages of a group that are there, in order.

    Args:
        pool: The pages.
        group: The group.
        ids: ``[n], int32, host``: what a block table says, 0 for none; it is not kept.
    """
    held = ids.copy() if np.count_nonzero(ids) == len(ids) else ids[ids != 0]
    if len(held):
        pool.release(held, group)


def _difference(whole: Sequence[BlockRange], kept: Sequence[BlockRange]) -> list[BlockRange]:
    """Return the parts of ``whole`` outside ``kept``; both are sorted and disjoint."""
    if whole and kept and whole[0] == kept[0] and len(whole) == len(kept) == 1:
        return []
    left = []
    for start, stop in whole:
        for keep_start, keep_stop in kept:
            if keep_stop <= start or stop <= keep_start:
                continue
            if start < keep_start:
                left.append((start, keep_start))
            start = max(start, keep_stop)
        if start < stop:
            left.append((start, stop))
    return left
