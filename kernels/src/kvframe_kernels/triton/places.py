"""What the steps of state layers have in common: where their states lie, and the gate of most."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Place = tuple[torch.Tensor, torch.Tensor]
"""Page and place in it of each row's state: ``[num_rows], int64, device`` both."""


def places(source: Place, target: Place) -> dict[str, torch.Tensor]:
    """Return a kernel's arguments that say where states lie and where they go."""
    names = "source_pages", "source_places", "target_pages", "target_places"
    return dict(zip(names, (*source, *target), strict=True))


def strides(tensor: torch.Tensor | None, *names: str) -> dict[str, int]:
    """Return a tensor's strides by these names; 0 if there is none."""
    return dict.fromkeys(names, 0) if tensor is None else dict(zip(names, tensor.stride(), strict=True))


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """Return ``x * sigmoid(x)``."""
    # What is left of x beyond exp(80) is nothing, and exp(89) is no float32.
    return x / (1.0 + tl.exp(tl.minimum(-x, 80.0)))
