"""What is fetched of a waiting request's prefix from outside of the device."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import PageRecords, Pin, PrefixBlocks

Page = npt.NDArray[np.uint8]
"""The bytes of a page: ``[page_bytes], uint8, host``."""


@attrs.define(eq=False)
class Fetch:
    """The pages of a waiting request on their way from page stores.

    Attributes:
        records: Makes the keys of records; None if only host memory has blocks.
        blocks: The request's blocks.
        local: Per group, the blocks that are on the device or in host memory.
        max_seconds: How long the request waits.
        num_tokens: The prefix that the request can continue from when it is done.
        began: When it began to wait, by ``monotonic``.
        pages: The pages that arrived, each with the name of its store, by group and block index.
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
    pages: dict[tuple[int, int], tuple[str, Page]] = attrs.field(factory=dict)
    absent: list[tuple[int, bytes]] = attrs.field(factory=list)
    pin: Pin | None = None
    is_done: bool = False
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the request need not wait any longer."""
        return self.is_done or monotonic() > self.began + self.max_seconds

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that arrived."""
        return sum(page.nbytes for _, page in self.pages.values())
