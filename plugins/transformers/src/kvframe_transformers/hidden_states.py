"""Notes hidden states of a step: those that a model's head is called with, or those of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class HiddenStates:
    """A hook on a module. A compiled model runs it as part of its graph, if it was made before the compilation."""

    def __init__(self, module: nn.Module, *, takes_output: bool) -> None:
        """Hook a module.

        Args:
            module: The model's head, or the model without its head.
            takes_output: Whether its output is noted, as of the model without its head, and not its input.
        """
        self.takes_output = takes_output
        self._rows: torch.Tensor | None = None
        self._handle = module.register_forward_hook(self._note)

    def take(self) -> torch.Tensor | None:
        """Return what was last noted, ``[num_rows, hidden_size]``, once."""
        rows, self._rows = self._rows, None
        return None if rows is None else rows[0]

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._rows = None

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        self._rows = output[0] if self.takes_output else args[0]
