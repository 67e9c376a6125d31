"""Steps of state layers, of the sizes of published models, and copies of pages."""

from __future__ import annotations

import torch
from kvframe_kernels.triton.conv import conv_launch
from kvframe_kernels.triton.delta import gated_delta_launch
from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.pages import copy_launch
from kvframe_kernels.triton.states import selective_state_launch

ROWS, PAGES = 128, 1024


def tensor(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=of, device="meta")


def launches() -> dict[str, Launch]:
    """Return the launches by name."""
    index = tensor(ROWS, of=torch.int64)
    place = index, index
    by_name = {}
    for name, heads, size, state, groups in (("mamba", 1, 5120, 16, 1), ("mamba_2", 80, 64, 128, 1)):
        activations, per_head = tensor(ROWS, heads, size), (lambda *shape: tensor(*shape, of=torch.float32))
        is_mamba_2 = heads > 1
        by_name[name] = selective_state_launch(
            tensor(PAGES, 1, heads, size, state, of=torch.float32), place, place, activations,
            tensor(ROWS, heads, 1).expand(-1, -1, size) if is_mamba_2 else activations,
            per_head(heads, 1, 1).expand(-1, size, state) if is_mamba_2 else per_head(heads, size, state),
            tensor(ROWS, groups, state), tensor(ROWS, groups, state),
            tensor(heads, 1).expand(-1, size) if is_mamba_2 else tensor(heads, size),
            None if is_mamba_2 else activations,
            per_head(heads, 1).expand(-1, size) if is_mamba_2 else per_head(heads, size),
            activations, True,
        )  # fmt: skip
    x = tensor(ROWS, 5376)
    by_name["conv"] = conv_launch(tensor(PAGES, 1, 5376, 4), place, place, x, tensor(5376, 4), tensor(5376), x, True)
    state, key, value = tensor(PAGES, 1, 32, 128, 128, of=torch.float32), tensor(ROWS, 16, 128), tensor(ROWS, 32, 128)
    for name, gate in (("gated_delta", tensor(ROWS, 32)), ("kimi_delta", tensor(ROWS, 32, 128))):
        beta = tensor(ROWS, 32)
        by_name[name] = gated_delta_launch(state, place, place, key, key, value, gate, beta, value, 0.1, True)
    pool = tensor(1 << 30, of=torch.uint8)
    by_name["copy"] = copy_launch(pool, pool, index, None, num_pages=ROWS, page_bytes=1 << 20, id_bytes=1 << 12)
    return by_name
