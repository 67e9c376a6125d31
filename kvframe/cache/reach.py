"""What cached pages are good for: the longest prefix that can be continued from, by live ranges alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.plan import PlannedGroup

Pages = npt.NDArray[np.int32]
"""``[num_blocks], int32``: a page for each block of a prefix, 0 for none."""


def longest_alone(group: PlannedGroup, pages: Pages, num_tokens: int) -> int:
    """Return the longest prefix of at most ``num_tokens`` tokens that a group holds the live range of."""
    size, live_blocks = group.block_size, group.answers.live_blocks
    num_tokens = min(num_tokens // size, len(pages)) * size
    while num_tokens:
        for start, stop in live_blocks(num_tokens):
            part = pages[start:stop]
            if np.count_nonzero(part) < len(part):
                # By the law of forgetting, what is live is live for every shorter prefix that it lies in.
                missing = start + int((part == 0).argmax())
                num_tokens = missing * size
                break
        else:
            break
    return num_tokens


def longest_of_all(held: Sequence[tuple[PlannedGroup, Pages]], most: int) -> int:
    """Return the longest prefix of at most ``most`` tokens that every group holds the live range of."""
    alignment = math.lcm(*(group.block_size for group, _ in held)) if held else 1
    num_tokens = most - most % alignment
    while num_tokens:
        shorter = min(longest_alone(group, pages, num_tokens) for group, pages in held)
        if shorter == num_tokens:
            break
        num_tokens = shorter - shorter % alignment
    return num_tokens
