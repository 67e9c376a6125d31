"""Resuming: rows that begin from pages which lie elsewhere, in host memory or wherever a prefix was saved."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.inputs import InputIndex
from kvframe.cache.prefix import Namespace
from kvframe.cache.refusals import too_many_tokens
from kvframe.cache.rows import RowState
from kvframe.cache.tree import PrefixTree
from kvframe.plan import KVCachePlan


@attrs.frozen
class SwappedBlocks:
    """A request's blocks while they lie elsewhere.

    Attributes:
        copies: Per group, where its copies lie, by block index; 0 where nothing was resident.
        num_computed: Its computed tokens.
        state: What its row had beside.
    """

    copies: list[list[int]]
    num_computed: int
    state: RowState


class Resumer:
    """Begins rows from copies of their blocks, sharing pages of the cache that hold the same.

    Invariant: it keeps nothing; a row that it began is as if the request had never left it, once its pages are filled.
    """

    def __init__(
        self, plan: KVCachePlan, coordinator: KVCacheCoordinator, tree: PrefixTree, inputs: InputIndex
    ) -> None:
        """Begin rows of a coordinator.

        Args:
            plan: How long requests are.
            coordinator: Whose rows they are.
            tree: Where published blocks of tokens are found.
            inputs: Where those of inputs are.
        """
        self._max_tokens = plan.max_model_len
        self._coordinator = coordinator
        self._tree = tree
        self._inputs = inputs

    def find(self, namespace: Namespace, token_ids: Sequence[int], swapped: SwappedBlocks) -> list[list[int]]:
        """Return per group, by block index, the pages that hold the same as a request's copies; 0 for none.

        Args:
            namespace: Whom it shares with.
            token_ids: Its tokens.
            swapped: Its copies.
        """
        match = self._tree.match(namespace, token_ids, swapped.num_computed)
        of_stack = self._tree.pages(match, match.length)
        found = []
        for index, copies in enumerate(swapped.copies):
            if index in self._tree.place:
                s, g = self._tree.place[index]
                known = of_stack[s][g].tolist()
            else:
                known = self._known_input(swapped, index)
            known += [0] * (len(copies) - len(known))
            found.append([page if copy else 0 for copy, page in zip(copies, known, strict=False)])
        return found

    def _known_input(self, swapped: SwappedBlocks, group: int) -> list[int]:
        for each in swapped.state.inputs:
            known = self._inputs.known(each) if each.group == group else None
            if known is not None and each.sequence not in swapped.state.missing:
                return list(known.tolist())
        return []

    def resume(
        self, row: int, swapped: SwappedBlocks, num_tokens: int, found: Sequence[Sequence[int]] | None
    ) -> list[list[int]] | None:
        """Begin a request again as it was, with room for its tokens ``[0, num_tokens)``.

        Args:
            row: A free row.
            swapped: What it was.
            num_tokens: The tokens to make room for.
            found: Pages to share, as ``find`` returns them; None for none.

        Returns:
            Per group, the block ids of the pages that have to be filled from the copies, 0 elsewhere; None, and nothing
            changed, if there are not enough pages.

        Raises:
            RequestError: These are more tokens than the plan is for; nothing changed.
            SpecError: A spec answers wrongly where the request goes on; nothing changed.
        """
        if num_tokens > self._max_tokens:
            raise too_many_tokens(num_tokens, self._max_tokens)
        if found is None:
            found = [[0] * len(copies) for copies in swapped.copies]
        self._coordinator.begin_row(row, swapped.num_computed, swapped.state.copy())
        # First of all, so that nothing of it is evicted to make room.
        for group, pages in enumerate(found):
            self._coordinator.reference_blocks(row, group, np.array(pages, dtype=np.int32))
        to_fill = [
            [place for place, (copy, page) in enumerate(zip(copies, pages, strict=True)) if copy and not page]
            for copies, pages in zip(swapped.copies, found, strict=True)
        ]
        try:
            given = self._coordinator.allocator.allocate_for_return(row, num_tokens, to_fill)
        except BaseException:
            self._coordinator.release_row(row)
            raise
        if given is None:
            self._coordinator.release_row(row)
            return None
        filled = [[0] * len(copies) for copies in swapped.copies]
        for group, block_ids in enumerate(given):
            for place, page in zip(to_fill[group], block_ids.tolist(), strict=False):
                filled[group][place] = page
        return filled
