"""Rank 0's pages on their way between the device and page stores; what moves there moves on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from kvframe_engine.ranks.leader import Leader
from kvframe_engine.ranks.links import Failure
from kvframe_engine.tiers.stored_pages import StoredPages


class LeadingPages(StoredPages):
    """Moves every rank's share of pages. A page is found, and was read, if every rank's share was.

    The thread that fetches asks the other ranks' threads aside, so steps go on while any of them waits for a store.
    """

    def __init__(self, leader: Leader, *arguments: Any) -> None:
        """Take the arguments of ``StoredPages``."""
        super().__init__(*arguments)
        self._leader = leader

    def give(
        self, group: int, keys: Sequence[bytes], block_ids: Sequence[int], max_queued_bytes: int | None = None
    ) -> None:
        """Copy pages of a group from the device on every rank, and queue them for the stores."""
        self._leader.send_command("give", group, [*keys], [*block_ids], max_queued_bytes)
        super().give(group, keys, block_ids, max_queued_bytes)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is queued on any rank, for some seconds at most; return whether nothing is."""
        deadline = monotonic() + seconds
        is_flushed = super().flush(seconds)
        if self._leader.is_over:
            return is_flushed
        other_answers = self._leader.request("flush", max(0.0, deadline - monotonic()))
        return all([is_flushed, *other_answers.values()])

    def find(self, store: int, pages: Sequence[tuple[int, bytes]]) -> list[bool]:
        """Return which pages a store has for every rank."""
        return self._on_all("find", super().find, store, [*pages])

    def read(self, store: int, fetch: int, group: int, blocks: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """Read pages of a group on every rank; return which of them were read on all."""
        return self._on_all("read", super().read, store, fetch, group, [*blocks], [*keys])

    def write(self, fetch: int, group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages that were read to the device of every rank."""
        self._leader.send_command("write", fetch, group, [*blocks], [*block_ids])
        super().write(fetch, group, blocks, block_ids)

    def release(self, fetch: int) -> None:
        """Drop what was read for a fetch on every rank."""
        if fetch in self._read_pages:
            with suppress(OSError):  # the other ranks have ended
                self._leader.send_command("release", fetch)
        super().release(fetch)

    def _on_all(self, call: str, call_here: Callable[..., list[bool]], *arguments: Any) -> list[bool]:
        """Call a method on every rank at the same time; return where all answered with True."""
        self._leader.ask_aside(call, *arguments)
        try:
            answers = [call_here(*arguments)]
        finally:
            # Also if this rank fails: the next call's answers come after these.
            other_answers = self._leader.answers_aside()
        for rank, answer in enumerate(other_answers, 1):
            if isinstance(answer, Failure):
                raise RuntimeError(f"rank {rank}: {answer.sentence}")
            answers.append(answer)
        return [all(answers_of_page) for answers_of_page in zip(*answers, strict=True)]
