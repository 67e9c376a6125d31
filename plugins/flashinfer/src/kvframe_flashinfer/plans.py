"""FlashInfer's wrappers, each of which holds the plan of a batch; a wrapper is lent to one step's metadata."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended size of the memory for partial results of long requests."""


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the memory for partial results, ``[WORKSPACE_BYTES], uint8, device``; all wrappers share it in turns."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Wrappers:
    """Wrappers of one kind. A wrapper is lent to an object, and is free again when that object is garbage-collected.

    A step may be built in several parts before the first one runs, and a wrapper holds one plan at a time.
    Invariant: no wrapper is lent to two live objects.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Keep the function that makes a wrapper."""
        self._make = make
        self._free: deque[Any] = deque()

    def lend(self, holder: object) -> Any:
        """Return a wrapper for as long as ``holder`` is alive; the one that has been free for longest."""
        wrapper = self._free.popleft() if self._free else self._make()
        weakref.finalize(holder, self._free.append, wrapper)
        return wrapper
