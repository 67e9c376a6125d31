"""FlashInfer's wrappers, which hold the plan of a batch, lent to one step's metadata each."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for results of parts of long requests."""


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the memory for parts of results, ``[WORKSPACE_BYTES], uint8, device``; all wrappers use it by turns."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Wrappers:
    """Wrappers of one kind. Each is lent to an object, and comes back when nobody holds that object any more.

    A step may be built in several parts before the first one runs, and a wrapper holds one plan at a time.
    Invariant: no wrapper is lent to two objects that are alive.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Take what makes another wrapper."""
        self._make = make
        self._free: deque[Any] = deque()

    def lend(self, holder: object) -> Any:
        """Return a wrapper for as long as ``holder`` lives; the one that has been free for longest."""
        wrapper = self._free.popleft() if self._free else self._make()
        weakref.finalize(holder, self._free.append, wrapper)
        return wrapper
