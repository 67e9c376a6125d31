"""Paged attention: decode and prefill of every format, and the features that change the kernel."""

from __future__ import annotations

from typing import Any

import torch
from kvframe_kernels.triton.attention import PagedAttention
from kvframe_kernels.triton.attention_plan import Programs
from kvframe_kernels.triton.launch import Launch

STORED = {
    "plain": torch.bfloat16,
    "fp8_tensor": torch.float8_e4m3fn,
    "fp8_token_head": torch.float8_e4m3fn,
    "int8_token_head": torch.int8,
    "int4_token_head": torch.uint8,
}
ENDS = None
"""The shape for decodes and those for prompts, instead of a slice of all shapes."""
TOGETHER: dict[str, dict[str, Any]] = {
    "float16-page=128-window-soft_cap-sinks-int4_in_float16-head_size=64": {
        "dtype": torch.float16,
        "block_size": 128,
        "window": 1024,
        "num_sink_tokens": 4,
        "soft_cap": 30.0,
        "has_sinks": True,
        "format": "int4_token_head",
        "head_size": 64,
        "shapes": slice(0, 1),
    },
    "chunk-bias-int8_token_head": {
        "chunk": 8192,
        "max_distance": 128,
        "format": "int8_token_head",
        "shapes": slice(0, 1),
    },
    "bidirectional-multi_query-int4_token_head": {
        "causal": False,
        "group": 71,
        "format": "int4_token_head",
        "shapes": slice(2, 3),
    },
}
"""Launches with many of the features, so that usual runs compile few."""

NUM_PAGES, NUM_TOKENS, NUM_KV_HEADS = 1024, 4096, 8


def launches() -> dict[str, Launch]:
    """Return the launches by name."""
    by_name: dict[str, Launch] = {}

    def add(name: str, **options: Any) -> None:
        by_name.update({f"{name}-{kind}": launch for kind, launch in _launches(**options).items()})

    for kv_format in STORED:
        add(kv_format, format=kv_format)
        add(f"{kv_format}-head_size=256", format=kv_format, head_size=256, shapes=slice(0, None, 2))
        add(f"{kv_format}-head_size=64", format=kv_format, head_size=64, shapes=ENDS)
    for head_size in (512, 576):
        add(f"head_size={head_size}", head_size=head_size, shapes=slice(-1, None))
    add("float32", dtype=torch.float32)
    by_name["join"] = by_name.pop("float32-join")
    add("float16", dtype=torch.float16, shapes=ENDS)
    add("page=128", block_size=128, shapes=ENDS)
    add("window", window=1024, num_sink_tokens=4, shapes=ENDS)
    add("window-ranges", window=1024, has_ranges=True, shapes=ENDS)
    add("chunk", chunk=8192, shapes=slice(-1, None))
    add("bidirectional", causal=False, shapes=slice(-1, None))
    add("soft_cap-sinks", soft_cap=30.0, has_sinks=True, shapes=ENDS)
    add("bias", max_distance=128, shapes=ENDS)
    add("slopes", has_slopes=True, shapes=ENDS)
    add("chosen", num_choosers=2, causal=False, shapes=ENDS)
    add("multi_query", group=71, shapes=slice(2, None))
    for name, options in TOGETHER.items():
        (by_name[name],) = _launches(**options).values()
    return by_name


def _launches(
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = 128,
    group: int = 4,
    block_size: int = 16,
    has_sinks: bool = False,
    has_ranges: bool = False,
    shapes: slice | None = slice(None),
    **options: Any,
) -> dict[str, Launch]:
    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    num_heads = NUM_KV_HEADS * group
    attention = PagedAttention(
        num_heads=num_heads,
        num_kv_heads=NUM_KV_HEADS,
        head_size=head_size,
        head_size_v=head_size,
        block_size=block_size,
        scale=head_size**-0.5,
        **options,
    )
    kv_format = attention.format
    kv_dtype = STORED[kv_format] if kv_format != "plain" else dtype
    elements = head_size // (2 if kv_format == "int4_token_head" else 1)
    cache = {name: tensor(NUM_PAGES, block_size, NUM_KV_HEADS, elements, of=kv_dtype) for name in ("k", "v")}
    if kv_format.endswith("token_head"):
        names = ("k_scale", "v_scale", "k_min", "v_min") if kv_format.startswith("int4") else ("k_scale", "v_scale")
        of = torch.float16 if kv_format.startswith("int4") else torch.float32
        cache |= {name: tensor(NUM_PAGES, block_size, NUM_KV_HEADS, of=of) for name in names}
    bias = tensor(num_heads, of=torch.float32) if attention.has_slopes else None
    if attention.max_distance:
        bias = tensor(num_heads, 2 * attention.max_distance + 1, of=torch.float32)
    by_name = {}
    tilings = attention.tilings_for(dtype)
    ends = tilings[:1] + tuple(tiling for tiling in tilings[1:] if not tiling.mask_all)
    for tiling in ends if shapes is None else tilings[shapes]:
        programs = Programs(
            tiling=tiling,
            heads=min(group, 64),
            first_item=0,
            num_items=64,
            num_slots=16,
            first_split=512,
            num_splits=8,
            split_queries=1,
        )
        attend, join = attention.launches(
            tensor(NUM_TOKENS, num_heads, head_size),
            cache,
            tensor(*((64, attention.num_choosers, 2048) if attention.num_choosers else (64, 512)), of=torch.int32),
            tensor(544, of=torch.int32),
            [programs],
            tensor(NUM_TOKENS, num_heads, head_size),
            causal=attention.causal,
            sinks=tensor(num_heads) if has_sinks else None,
            bias=bias,
            range_ends=tensor(NUM_TOKENS, of=torch.int32) if has_ranges else None,
        )
        by_name[f"rows={tiling.block_m}" if tiling.mask_all else f"prompt-rows={tiling.block_m}"] = attend
    if dtype == torch.float32:
        by_name["join"] = join
    return by_name
