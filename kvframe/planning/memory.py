"""Refuses an allocation that the machine has no memory for, before the operating system grants it.

Linux grants more than there is, and ends the process when the memory is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvframe.contract.errors import PlanError


def physical_bytes() -> int | None:
    """Return the bytes of memory that the machine has; None if the operating system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_host_bytes(num_bytes: int, sentence: str) -> None:
    """Refuse to take more memory of the host than there is.

    Args:
        num_bytes: What is to be taken.
        sentence: What the error says: what is asked for, and what to do.

    Raises:
        PlanError: The machine has less.
    """
    physical = physical_bytes()
    if physical is not None and num_bytes > physical:
        raise PlanError(f"{sentence}; this machine has {physical} bytes of memory")


@contextmanager
def allocating(num_bytes: int, purpose: str, advice: str, device: str = "the host") -> Iterator[None]:
    """Allocate memory in the body, and refuse in one sentence what cannot be had.

    Args:
        num_bytes: What the body allocates.
        purpose: What it is for (``"to give the cache"``).
        advice: What to ask for instead (``"less memory"``).
        device: Whose memory it is: the host's, a CPU's, which is the same, or another device's.

    Raises:
        PlanError: There is not that much.
    """
    sentence = f"{device} has no {num_bytes} bytes {purpose}; ask for {advice}"
    if device.partition(":")[0] in ("the host", "cpu"):
        check_host_bytes(num_bytes, sentence)
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:  # NumPy's errors and torch's
        raise PlanError(sentence) from error
