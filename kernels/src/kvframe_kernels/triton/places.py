"""Shared by the steps of state layers: the places of their states in pages, and the SiLU gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Place = tuple[torch.Tensor, torch.Tensor]
"""The page of each row's state, and its place in the page: both ``[num_rows], int64, device``."""


def places(source: Place, target: Place) -> dict[str, torch.Tensor]:
    """Return a kernel's arguments for the places of the states that it reads and writes."""
    names = "source_pages", "source_places", "target_pages", "target_places"
    return dict(zip(names, (*source, *target), strict=True))


def strides(tensor: torch.Tensor | None, *names: str) -> dict[str, int]:
    """Return a tensor's strides by these names; 0 for a tensor that is None."""
    return dict.fromkeys(names, 0) if tensor is None else dict(zip(names, tensor.stride(), strict=True))


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """Return ``x * sigmoid(x)``."""
    # exp(89) exceeds float32, and x / exp(80) is practically 0.
    return x / (1.0 + tl.exp(tl.minimum(-x, 80.0)))
