"""What a prefix tree gives up: cached pages that no hit can use any more, as soon as that comes about.

When a page is given up for others, the hits that need it are lost, and with them the use of pages that only these hits
need: in the same run of tokens, in those that come after it, and in those before. They are freed before anything that
is of use.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvframe.cache.forgetting import NEVER
from kvframe.cache.needs import Pages
from kvframe.cache.owners import Indices
from kvframe.cache.prefix import PrefixNode
from kvframe.cache.tree import PrefixTree
from kvframe.cache.usefulness import Usefulness

MOST_AT_ONCE = 32
"""Runs of tokens that one eviction looks at. If there are more, the next one goes on, before it gives up anything."""
_MOST_COUNTED = 512
"""Runs of which it only looks whether they have all of their pages."""


class Pruning:
    """Takes out of a tree what is lost, and what is of no use without it.

    What it finds out is noted in the nodes: a page that is given up costs no more where many prefixes go on behind it,
    but for those to which something has happened since somebody looked.

    Attributes:
        tree: The tree.
        held: Nodes with pages that are of no use and that somebody held.
    """

    def __init__(self, tree: PrefixTree, usefulness: Usefulness) -> None:
        """Look after a tree.

        Args:
            tree: The tree.
            usefulness: Finds out which pages are of use.
        """
        self.tree = tree
        self._usefulness = usefulness
        self._num_losses = 0
        self._num_left = 0
        self.held: dict[PrefixNode, None] = {}

    # --- what is told -------------------------------------------------------------------------------------------------

    def lost_all(self, owner: int, group: int, num_pages: int) -> bool:
        """Take note that a node lost so many pages, if these are all and nothing hangs on it; return whether so.

        What is of no use then is given up.
        """
        node = self.tree.node(owner)
        if node is None or node.num_pages != num_pages or node.children or node.row >= 0 or self.tree.keeps_ghosts:
            return False
        self._num_losses += 1
        node.num_pages = 0
        self.tree.remove(node)
        parent = node.parent
        if parent is not None and parent.parent is not None and not (parent.is_whole and parent.num_pages):
            self.tree.doubt(parent)
            self.settle()
        return True

    def lost(self, owner: int, group: int, indices: Indices) -> None:
        """Take note that pages of a node were given up."""
        node = self.tree.node(owner)
        assert node is not None
        self._num_losses += 1
        s, _ = self.tree.place[group]
        self.tree.take_out(node, group, indices - node.start // self.tree.sizes[s])
        self.tree.doubt(node, self._usefulness.groups[group].end(int(indices.max())))

    def settle(self) -> None:
        """Give up what is of no use any more."""
        self._num_left = MOST_AT_ONCE
        while self.tree.doubtful and self._num_left > 0:
            node, concerned = self.tree.doubtful.popitem()
            if self.tree.is_there(node):
                self._settle(node, concerned)

    def look_again(self) -> None:
        """Give up what is of no use now, of what was held when it was found to be so too."""
        if self.held:
            for node in self.held:
                self.tree.doubt(node)
            self.held.clear()
        if self.tree.doubtful:
            self.settle()

    def forget(self) -> None:
        """Forget nodes that are gone."""
        self.held.clear()

    # --- which nodes are concerned ------------------------------------------------------------------------------------

    def _settle(self, node: PrefixNode, concerned: int) -> None:
        """Look at a node and, where hits of fewer than ``concerned`` tokens are lost, at those behind and before it."""
        before = node.first_hit
        for each in reversed(self._behind(node, concerned)):
            if concerned == NEVER:
                self._give_up_all(each)
            else:
                self._look_at(each)
            self.tree.remove_if_empty(each)
        self._look_at(node)
        self._look_before(node, before)

    def _behind(self, node: PrefixNode, concerned: int) -> list[PrefixNode]:
        """Return the nodes behind one for which it matters that hits of fewer tokens are lost, parents first."""
        nodes = [node]
        for each in nodes:
            if concerned > each.stop:
                nodes += self._children(each, concerned)
        return nodes[1:]

    def _children(self, node: PrefixNode, concerned: int) -> list[PrefixNode]:
        """Return the children of a node for which it matters that hits of fewer tokens are lost."""
        children = node.children.values()
        if concerned == NEVER:
            return list(children)
        if self.tree.is_whole_to(node):
            # What was lost is there again.
            return []
        if node.safe_behind < concerned:
            found = [child for child in children if child.safe < concerned]
            node.safe_behind = min((child.safe for child in children if child.safe >= concerned), default=NEVER)
        else:
            found = [child for child in node.unseen if child.parent is node and self.tree.is_there(child)]
        for child in found[:_MOST_COUNTED]:
            if child.safe == child.start:
                child.safe = self.tree.safe_if_whole(child)
                node.safe_behind = min(node.safe_behind, child.safe) if child.safe >= concerned else node.safe_behind
        found = [child for child in found if child.safe < concerned and child.seen < self._num_losses]
        node.unseen = found[max(0, self._num_left) :]
        if node.unseen:
            node.safe_behind = min(node.safe_behind, *(child.safe for child in node.unseen))
            self.tree.doubt(node, concerned)
        return found[: max(0, self._num_left)]

    def _look_before(self, node: PrefixNode, before: int) -> None:
        """Look at what comes before a node whose shortest hit was one of ``before`` tokens, if that has changed."""
        while True:
            is_same = before == node.first_hit > 0
            parent = node.parent
            self.tree.remove_if_empty(node)
            if parent is None or parent.parent is None or (parent.is_whole and parent.num_pages):
                return
            if is_same and parent.children:
                return
            node, before = parent, parent.first_hit
            self._look_at(node)

    # --- what is of use -----------------------------------------------------------------------------------------------

    def _look_at(self, node: PrefixNode) -> None:
        """Give up the pages of a node that no hit needs."""
        nodes = [node]
        while nodes:
            child = self._give_up_useless(nodes[-1])
            if child is None:
                nodes.pop()
            else:
                nodes.append(child)

    def _give_up_useless(self, node: PrefixNode) -> PrefixNode | None:
        """Give up the pages of a node that no hit needs; return a child that has to be looked at before, if one has."""
        if node.row >= 0:
            self.tree.catch_up(node)
        self.tree.cut_off(node)
        if self.tree.is_whole_to(node) and self._usefulness.is_end(node.stop):
            self._note(node, self._usefulness.first_end(node.start), self.tree.safe_if_whole(node), is_whole=True)
            return None
        pages = self._pages(node)
        uses = self._usefulness.uses(pages, node.start, node.stop)
        is_whole = uses.first_hit != NEVER and not uses.useless
        if not is_whole and node.children:
            next_hit = self._next_hit(node, pages)
            if isinstance(next_hit, PrefixNode):
                return next_hit
            uses = self._usefulness.uses(pages, node.start, node.stop, next_hit)
        for group, useless in uses.useless.items():
            self._drop(node, group, np.flatnonzero(useless))
        self.tree.cut_off(node)
        safe = min(uses.safe, node.safe_behind, node.stop if node.unseen else NEVER)
        self._note(node, uses.first_hit, safe, is_whole=is_whole)
        return None

    def _note(self, node: PrefixNode, first_hit: int, safe: int, *, is_whole: bool) -> None:
        """Note what was found out of a node, which is one less to look at."""
        self._num_left -= 1
        node.first_hit, node.safe, node.is_whole, node.seen = first_hit, safe, is_whole, self._num_losses
        if node.parent is not None:
            node.parent.safe_behind = min(node.parent.safe_behind, safe)

    def _give_up_all(self, node: PrefixNode) -> None:
        """Give up the pages of a node that no hit ends in or behind."""
        if node.row >= 0:
            self.tree.catch_up(node)
        for group, (s, g) in self.tree.place.items():
            self._drop(node, group, np.flatnonzero(node.pages[s][g]))
        node.first_hit = node.safe = NEVER
        node.is_whole, node.seen = False, self._num_losses

    def _drop(self, node: PrefixNode, group: int, places: npt.NDArray[np.intp]) -> None:
        """Give up pages of a node, by the places of their blocks in it; but not those that somebody holds."""
        if not len(places):
            return
        s, g = self.tree.place[group]
        is_dropped = self.tree.pool.drop(group, node.pages[s][g, places])
        num_dropped = int(np.count_nonzero(is_dropped))
        if num_dropped:
            self.tree.take_out(node, group, places[is_dropped])
        if num_dropped < len(places):
            self.held[node] = None

    def _next_hit(self, node: PrefixNode, pages: Mapping[int, Pages]) -> int | PrefixNode:
        """Return the shortest hit of what comes after a node; or a child of which it is not known."""
        least, shortest = NEVER, self._usefulness.next_end(pages, node.stop)
        if shortest == NEVER:
            return NEVER
        for child in node.children.values():
            if child.first_hit >= least:
                continue
            if not self._knows_first_hit(child):
                if self._num_left > 0:
                    return child
                # Nobody looks any more: as if everything were needed, until the next time.
                self.tree.doubt(node)
                return shortest
            least = min(least, child.first_hit)
            if least <= shortest:
                break
        return least

    def _knows_first_hit(self, node: PrefixNode) -> bool:
        """Return whether what is noted as the shortest hit in a node or behind it is one."""
        if not node.first_hit or node.seen == self._num_losses:
            return node.first_hit > 0
        if node.first_hit > node.stop:
            return node.first_hit == NEVER
        return self._usefulness.is_hit(self._pages(node), node.first_hit)

    def _pages(self, node: PrefixNode) -> dict[int, Pages]:
        """Return per group the pages of the tokens up to a node's end."""
        found = self.tree.pages(self.tree.path(node), node.stop)
        return {group: found[s][g] for group, (s, g) in self.tree.place.items()}
