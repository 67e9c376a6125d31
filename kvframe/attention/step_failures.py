"""Errors for what a backend or builder raises in a step: they name the backend, the layer and the line."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb

import torch

from kvframe.contract.capture import NotReplayableError
from kvframe.contract.errors import BackendError, KVFrameError, shown
from kvframe.contract.foreign import safe_text


def step_failure(backend: str, layers: Sequence[str], method: str, error: BaseException) -> BaseException:
    """Return the error that a backend's method ends a step with.

    Args:
        backend: The backend's registered name.
        layers: The layers that it was called for.
        method: What was called (``"forward"``).
        error: What it raised. Returned as they are: errors of kvframe, those that the capture of a graph handles, and
            ``KeyboardInterrupt``, which comes from the user.
    """
    if isinstance(error, KVFrameError | NotReplayableError | torch.OutOfMemoryError | KeyboardInterrupt):
        return error
    others = f" and {len(layers) - 1} others" if len(layers) > 1 else ""
    *_, (frame, line) = walk_tb(error.__traceback__)
    return BackendError(
        f"backend {backend!r}, of layer {layers[0]!r}{others}: {method}() failed in line {line} of "
        f"{shown(frame.f_globals.get('__name__'))}: {safe_text(error)}",
        code="failed",
    )
