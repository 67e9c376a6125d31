"""What a prefix tree consists of: runs of tokens and the pages of their blocks, and where requests stand among them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER
from kvframe.errors import RequestError

TOKEN_BYTES = 4
_LONG = 1024
"""Tokens that are not copied more often than they have to be."""

Namespace = tuple[str, bytes]
"""A salt, and what stands for a request's inputs: requests of different ones share nothing."""


class PrefixNode:
    """A run of tokens ``[start, stop)`` of a prefix.

    Attributes:
        owner: Its number as the owner of pages; ``NO_OWNER`` for a root.
        parent: The node before it; None for a root.
        start: Its first token; a multiple of the tree's unit.
        stop: The token after its last; likewise.
        tokens: Its token ids, as four bytes each; perhaps of tokens behind ``stop`` too.
        pages: Per table stack ``[num_groups, num_blocks], int32``: the pages of the blocks that end in it, 0 for none.
        num_pages: How many these are.
        children: What comes after it, by the bytes of their first unit.
        row: The running request that it grows with; -1 for none.
        namespace: Of a root, whose prefixes hang on it; else None.
    """

    __slots__ = (
        "children",
        "namespace",
        "num_pages",
        "owner",
        "pages",
        "parent",
        "row",
        "start",
        "stop",
        "tokens",
    )

    def __init__(
        self, parent: PrefixNode | None, start: int, owner: int = NO_OWNER, namespace: Namespace | None = None
    ) -> None:
        self.owner = owner
        self.parent = parent
        self.start = self.stop = start
        self.tokens = b""
        self.pages: list[npt.NDArray[np.int32]] = []
        self.num_pages = 0
        self.children: dict[bytes, PrefixNode] = {}
        self.row = -1
        self.namespace = namespace


class Match(NamedTuple):
    """How far a request's tokens are known.

    Attributes:
        nodes: The nodes along its tokens, from the first.
        length: Tokens that are known, a multiple of the tree's unit.
    """

    nodes: tuple[PrefixNode, ...]
    length: int


NO_MATCH = Match((), 0)


@attrs.define(eq=False)
class Cursor:
    """Where a running request's published blocks end.

    Attributes:
        namespace: Whom it shares with.
        node: The node that its offset lies in, or lay in; None to look for it from the root.
        offset: Tokens up to which its full blocks were offered.
        leaf: The node that grows with it; None while its tokens are those of others.
        tokens: Its token ids; they grow, and those that are computed stay as they are.
    """

    namespace: Namespace
    node: PrefixNode | None
    offset: int
    tokens: Sequence[int]
    leaf: PrefixNode | None = None


def as_bytes(tokens: Sequence[int], start: int = 0, stop: int | None = None) -> bytes:
    """Return token ids, those of ``[start, stop)``, as four bytes each.

    Raises:
        RequestError: One of them is no token id, or is not there (``bad_token``).
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        if stop is None:
            data = tokens.tobytes()
        else:
            # To cut an array copies it once more, which takes less than a view of it where it is short. A view is not
            # kept, not even by an error: while it lives nobody can add tokens.
            data = (tokens[start:stop] if stop - start < _LONG else memoryview(tokens)[start:stop]).tobytes()
    else:
        try:
            data = array("I", tokens if stop is None else tokens[start:stop]).tobytes()
        except (OverflowError, TypeError):
            raise _unreadable(tokens, num_readable(tokens)) from None
    if stop is not None and len(data) != TOKEN_BYTES * (stop - start):
        raise _unreadable(tokens, len(tokens))
    return data


def num_readable(tokens: Sequence[int]) -> int:
    """Return how many tokens come before the first one that is no token id."""
    for place, token in enumerate(tokens):
        try:
            array("I", (token,))
        except (OverflowError, TypeError):
            return place
    return len(tokens)


def _unreadable(tokens: Sequence[int], place: int) -> RequestError:
    if place < len(tokens):
        why = f"{tokens[place]!r} is no token id; give whole numbers in [0, 2**32)"
    else:
        why = f"there are {place} token ids of more tokens that are computed; give them all"
    return RequestError(why, code="bad_token")
