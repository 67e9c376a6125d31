"""Writes of keys and values of 128 elements, in every format."""

from __future__ import annotations

import torch
from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.write import FORMATS, write_launch

CODES = {"fp8_tensor": torch.float8_e4m3fn, "fp8_token_head": torch.float8_e4m3fn, "int8_token_head": torch.int8}
NUM_PAGES, BLOCK_SIZE, NUM_HEADS, SIZE, NUM_TOKENS = 1024, 16, 8, 128, 256


def launches() -> dict[str, Launch]:
    """Return the launches by name."""
    return {
        f"{name}-{str(dtype)[6:]}": _launch(name, dtype)
        for name in FORMATS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }


def _launch(name: str, dtype: torch.dtype) -> Launch:
    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    pages = NUM_PAGES, BLOCK_SIZE, NUM_HEADS
    kv_cache = {}
    for side in "kv":
        if name == "int4_token_head":
            kv_cache[side] = tensor(*pages, SIZE // 2, of=torch.uint8)
            kv_cache[f"{side}_scale"] = kv_cache[f"{side}_min"] = tensor(*pages, of=torch.float16)
        else:
            kv_cache[side] = tensor(*pages, SIZE, of=CODES.get(name, dtype))
            if name.endswith("token_head"):
                kv_cache[f"{side}_scale"] = tensor(*pages, of=torch.float32)
    slots = tensor(NUM_TOKENS, of=torch.int64)
    new = tensor(NUM_TOKENS, NUM_HEADS, SIZE)
    return write_launch(new, new, kv_cache, (slots, slots), name)
