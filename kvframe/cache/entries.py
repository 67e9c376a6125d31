"""The entries of the request table: what the cache manager knows of each request beside its blocks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NoReturn

import attrs

from kvframe.cache.lookup import PrefixHit
from kvframe.cache.prefix import Namespace
from kvframe.cache.refusals import not_in_table


@attrs.define
class Entry:
    """A request.

    Attributes:
        row: Its row in the block tables; while it is swapped out, the one that it had.
        token_ids: Its tokens, as whoever has it keeps them.
        namespace: Whom it shares with.
        uncounted: What was found when it started, until it runs: a request that waits for room is looked up again and
            again.
        asked_tokens: Its tokens that were looked up then; 0 where nothing was looked for.
        num_resets: Resets of the prefix cache before it started.
    """

    row: int
    token_ids: Sequence[int]
    namespace: Namespace
    uncounted: PrefixHit
    asked_tokens: int
    num_resets: int


class Entries(dict[str, Entry]):
    """The requests in the table, by name; asked for another one, it says what is wrong with the name."""

    def __init__(self, swapped: Container[str]) -> None:
        """Start with none.

        Args:
            swapped: The names of requests that are swapped out, as they are at any time.
        """
        super().__init__()
        self._swapped = swapped

    def __missing__(self, request_id: str) -> NoReturn:
        raise not_in_table(request_id, request_id in self._swapped)
