"""What is fetched of a waiting request's prefix from outside of the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import monotonic

import attrs
import numpy as np
import numpy.typing as npt
from kvframe_stores import PageRecords

from kvframe import Pin, PrefixBlocks

_numbers = count()


@attrs.define(eq=False)
class Fetch:
    """The pages of a waiting request on their way from page stores.

    Attributes:
        records: The records in use when it began; None if only host memory has blocks.
        blocks: The request's blocks.
        local: Per group, the blocks that are on the device or in host memory.
        max_seconds: How long the request waits.
        num_tokens: The prefix that the request can continue from when it is done.
        began: When it began to wait, by ``monotonic``.
        number: Its number; no other fetch of this process has the same.
        pages: The pages that arrived, with the names of their stores, by group and block index.
        num_bytes: The bytes of these pages.
        absent: The group and key of each page that no store has.
        pin: Keeps what was brought to the device; None before.
        is_done: Whether nothing more arrives.
        is_cancelled: Whether nothing more is wanted.
    """

    records: PageRecords | None
    blocks: PrefixBlocks
    local: Sequence[npt.NDArray[np.bool_]]
    max_seconds: float
    num_tokens: int = 0
    began: float = attrs.field(factory=monotonic)
    number: int = attrs.field(factory=lambda: next(_numbers))
    pages: dict[tuple[int, int], str] = attrs.field(factory=dict)
    num_bytes: int = 0
    absent: list[tuple[int, bytes]] = attrs.field(factory=list)
    pin: Pin | None = None
    is_done: bool = False
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the request need not wait any longer."""
        return self.is_done or monotonic() > self.began + self.max_seconds
