"""Sizes in bytes, as operators write them: a number, or a text such as ``"20GiB"``."""

from __future__ import annotations

import re

from kvframe.contract.errors import StackError, shown

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?")
_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}

MAX_SIZE = 2**60
"""The largest number of bytes: more than any machine has."""


def parse_bytes(size: str | int) -> int:
    """Return a size in bytes: of ``"2GiB"``, ``"512 MB"``, ``"1.5GiB"``, or a number of bytes.

    Raises ``StackError`` if it is not a size, is less than one byte, or is more than ``MAX_SIZE``.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is None:
            raise StackError(
                f"{shown(size)} is not a size; write a number of bytes, or one with a unit of {', '.join(_UNITS)}"
            )
        # A number of too many digits is infinite.
        num_bytes = int(min(float(match[1]) * _UNITS[match[2] or "B"], 2 * MAX_SIZE))
    if num_bytes < 1:
        raise StackError(f"a size must be at least one byte, not {shown(size)}")
    if num_bytes > MAX_SIZE:
        raise StackError(f"a size must be at most {MAX_SIZE >> 40} TiB, not {shown(size)}")
    return num_bytes
