"""The store's options."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvframe.contract import KVFrameError, OpenPageStore, PageStore, parse_bytes, shown
from kvframe_disk.folder import Folder
from kvframe_disk.open_store import OpenDiskStore

LEAST_SIZE = 2**20
"""The smallest bound of a folder, in bytes."""

_DAY = 24 * 60 * 60


def _as_path(path: Any) -> Path:
    if not isinstance(path, str | Path) or not os.fspath(path).strip() or "\0" in os.fspath(path):
        raise ValueError(f"path must be the path of a folder, not {shown(path)}")
    return Path(path)


def _as_bytes(size: Any) -> int:
    try:
        num_bytes = parse_bytes(size)
    except KVFrameError as error:
        raise ValueError(f"size: {error}") from error
    if num_bytes < LEAST_SIZE:
        raise ValueError(f"size must be at least {LEAST_SIZE >> 20} MiB, not {shown(size)}")
    return num_bytes


def _is_days(store: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not (is_number and value > 0):
        raise ValueError(f"max_unused_days must be a number of days above 0, not {shown(value)}")


@attrs.frozen(kw_only=True)
class DiskStore(PageStore):
    """A folder of this machine, which engines share that run at the same time or after each other.

    Attributes:
        path: The folder. It is made if it does not exist; ``~`` is the user's home.
        size: The most bytes of the folder, such as ``"20GiB"``.
        max_unused_days: After how many days without use records are removed; None for never.
    """

    name: ClassVar[str] = "disk"

    path: Path = attrs.field(converter=_as_path)
    size: int = attrs.field(converter=_as_bytes)
    max_unused_days: float | None = attrs.field(default=30.0, validator=_is_days)

    def open(self, origin: str) -> OpenPageStore:
        """Return the open folder.

        Raises:
            OSError: The folder cannot be made or used, in one sentence.
        """
        max_unused = math.inf if self.max_unused_days is None else self.max_unused_days * _DAY
        return OpenDiskStore(Folder(self.path), origin, max_bytes=self.size, max_unused_seconds=max_unused)

    @property
    def capacity(self) -> int:
        """The most bytes of records."""
        return self.size

    def local_secret(self) -> bytes:
        """Return the folder's secret, made at the first call.

        Raises:
            OSError: The secret cannot be made or read, or other users can read it, in one sentence.
        """
        return Folder(self.path).secret()
