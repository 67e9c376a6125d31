"""Refuses an allocation for which the machine has too little memory, before the operating system grants it.

Linux grants more memory than there is, and ends the process when it uses the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvframe.contract.errors import PlanError

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNCHECKED_BYTES = 1 << 20
"""The largest allocation that is not checked: every process that runs torch has this memory."""


def physical_bytes() -> int | None:
    """Return the bytes of memory that this process may use; None if the operating system does not say.

    That is the machine's memory, or in a container the smallest limit of the process's control groups.
    """
    limits = [limit for limit, _ in _control_groups()]
    with suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def free_bytes() -> int:
    """Return the bytes of memory that this process can still allocate: free in the machine and in its control groups.

    Raises ``AttributeError`` or ``ValueError`` if the operating system does not say.
    """
    unused_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(0, min([unused_bytes, *(limit - used_bytes for limit, used_bytes in _control_groups())]))


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each control group that limits this process's memory.

    ``usage`` includes cached files. They are subtracted, because the kernel drops them first.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
    """
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, used_file, cached_key = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_file, used_file = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached_key = "total_inactive_file"
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container, the path may be the host's, and only the root exists.
        for group in {root, folder, *(parent for parent in folder.parents if root in parent.parents)}:
            numbers = [int(text) for name in (limit_file, used_file) for text in _lines(group / name) if text.isdigit()]
            if len(numbers) == 2:  # a missing file or "max" means that there is no limit
                stats = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
                yield numbers[0], numbers[1] - int(stats.get(cached_key, 0))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []


def check_host_bytes(num_bytes: int, sentence: str) -> None:
    """Raise ``PlanError`` with a sentence if the host has less memory than is to be allocated."""
    physical = physical_bytes() if num_bytes > _UNCHECKED_BYTES else None
    if physical is not None and num_bytes > physical:
        raise PlanError(f"{sentence}; this process may use {physical} bytes of memory")


@contextmanager
def allocating(num_bytes: int, purpose: str, advice: str, device: str = "the host") -> Iterator[None]:
    """Raise one clear ``PlanError`` if an allocation in the body fails.

    Args:
        num_bytes: The bytes that the body allocates.
        purpose: What the memory is for (``"to give the cache"``).
        advice: What to ask for instead (``"less memory"``).
        device: The owner of the memory: the host (also for a CPU), or another device.
    """
    sentence = f"{device} has no {num_bytes} bytes {purpose}; ask for {advice}"
    if device.partition(":")[0] in ("the host", "cpu"):
        check_host_bytes(num_bytes, sentence)
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:  # NumPy's errors and torch's
        raise PlanError(sentence) from error
