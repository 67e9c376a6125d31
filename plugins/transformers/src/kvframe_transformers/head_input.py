"""Notes hidden states of a step: those that a model's head is called with, or those of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class HeadInput:
    """A hook on a head. A compiled model runs it as part of its graph, if it was made before the compilation."""

    def __init__(self, head: nn.Module) -> None:
        """Hook the head."""
        self._rows: torch.Tensor | None = None
        self._handle = head.register_forward_pre_hook(self._note)

    def take(self) -> torch.Tensor | None:
        """Return what the head was last called with, ``[num_rows, hidden_size]``, once."""
        rows, self._rows = self._rows, None
        return None if rows is None else rows[0]

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._rows = None

    def _note(self, head: nn.Module, args: Any) -> None:
        self._rows = args[0]


class BodyOutput:
    """A hook on a model without its head. A compiled model runs it as part of its graph, as for ``HeadInput``."""

    def __init__(self, body: nn.Module) -> None:
        """Hook the body."""
        self._rows: torch.Tensor | None = None
        self._handle = body.register_forward_hook(self._note)

    def take(self) -> torch.Tensor | None:
        """Return what the body last returned, ``[num_tokens, hidden_size]``, once."""
        rows, self._rows = self._rows, None
        return None if rows is None else rows[0]

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._rows = None

    def _note(self, body: nn.Module, args: Any, output: Any) -> None:
        self._rows = output[0]
