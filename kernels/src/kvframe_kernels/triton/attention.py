"""Attention over a paged cache, for prefill, extend and decode alike.

``PagedAttention`` holds a layer's properties. Its ``plan`` divides a step into work items on the host. Its ``launches``
are the kernel calls that compute the step. ``kvframe_kernels.attention_reference`` defines the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kvframe_kernels.triton import attention_kernel
from kvframe_kernels.triton.attention_plan import (
    Batch,
    Mask,
    Programs,
    StepPlanner,
    Tiling,
    Work,
    planner_for,
)
from kvframe_kernels.triton.attention_tilings import suitable_tilings
from kvframe_kernels.triton.launch import Launch

LOG2_E = math.log2(math.e)

FORMATS: Mapping[str, int] = {
    "plain": 0,
    "fp8_tensor": 1,
    "fp8_token_head": 2,
    "int8_token_head": 2,
    "int4_token_head": 3,
}
"""The formats of keys and values that the kernel reads, with their kinds in the kernel."""

TENSOR_SCALED, NIBBLES = 1, 3

LEAST_SCALE = 2.0**-100
"""A scale that makes all scores equal in float32, as zero does."""

PARTS_AT_ONCE = 32

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """Attention of layers with equal properties.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Elements of a query and of a key.
        head_size_v: Elements of a value.
        block_size: Tokens per block.
        scale: Factor on the products of queries and keys.
        causal: Whether queries see only their own and earlier positions; a batch may override it, so that they see all.
        window: The number of positions that a query sees, counted back from its own, at most ``UNBOUNDED``; 0 for all.
        num_sink_tokens: Tokens at the start that are seen in spite of the window; at most ``UNBOUNDED``.
        chunk: Tokens of a chunk that its queries stay within: a query at ``n`` sees ``[n - n % chunk, n]``; at most
            ``UNBOUNDED``, 0 for none.
        soft_cap: ``c`` in ``c * tanh(score / c)``; None for none.
        max_distance: The largest distance with its own bias; 0 if there is no learned bias by distance.
        has_slopes: Whether each head's scores lose a slope for each token between query and key.
        format: The format of keys and values, of ``FORMATS``.
        k_scale: The factor on keys stored as ``fp8_tensor``.
        v_scale: Likewise for values.
        num_choosers: If tokens are chosen, the equal groups of KV heads with choices of their own; 0 otherwise.
        num_cores: The device's multiprocessors.
        tilings: Shapes of programs, by ascending rows; None for shapes that suit the sizes.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    scale: float
    causal: bool = True
    window: int = 0
    num_sink_tokens: int = 0
    chunk: int = 0
    soft_cap: float | None = None
    max_distance: int = 0
    has_slopes: bool = False
    format: str = "plain"
    k_scale: float = 1.0
    v_scale: float = 1.0
    num_choosers: int = 0
    num_cores: int = 132
    tilings: tuple[Tiling, ...] | None = None

    @property
    def mask(self) -> Mask:
        """The mask of past tokens."""
        return Mask(self.window, self.chunk)

    def planner(self, dtype: torch.dtype) -> StepPlanner:
        """Return the planner of steps for queries of this dtype; layers that differ only in their masks share it."""
        group = self.num_heads // self.num_kv_heads
        return planner_for(self.num_kv_heads, group, self.tilings_for(dtype), self.num_cores)

    def plan(self, batch: Batch, dtype: torch.dtype) -> Work:
        """Return a step's work.

        Args:
            batch: The step.
            dtype: The dtype of its queries.
        """
        (work,) = self.planner(dtype).plan(batch, (self.mask,))
        return work

    def tilings_for(self, dtype: torch.dtype) -> tuple[Tiling, ...]:
        """Return the shapes of programs, for queries of this dtype."""
        if self.tilings is not None:
            return self.tilings
        size, has_bias = max(self.head_size, self.head_size_v), self.max_distance > 0 or self.has_slopes
        return suitable_tilings(size, dtype.itemsize, self.format, has_bias=has_bias)

    def launches(
        self,
        query: torch.Tensor,
        kv_cache: Mapping[str, torch.Tensor],
        block_table: torch.Tensor,
        numbers: torch.Tensor,
        programs: Sequence[Programs],
        output: torch.Tensor,
        *,
        causal: bool = True,
        has_starts: bool = False,
        sinks: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        range_ends: torch.Tensor | None = None,
    ) -> Iterator[Launch]:
        """Yield the kernel calls that write a step's ``output``, in their order.

        Args:
            query: ``[num_tokens, num_heads, head_size], device``; the last axis is contiguous.
            kv_cache: ``k``, ``v`` and, if the format has them, scales: ``[num_block_ids, block_size, num_kv_heads, …],
                device``, strided over the pool.
            block_table: ``[num_reqs, max_blocks], int32, device``. For chosen tokens (``batch_of_chosen``)
                ``[num_tokens, num_choosers, num_chosen]``: slots, ``block * block_size + offset``; negative for none.
            numbers: The numbers of ``plan``'s result, on the device.
            programs: The programs of ``plan``'s result.
            output: ``[num_tokens, num_heads, head_size_v], device``, contiguous; every row is written.
            causal: Whether the batch is causal.
            has_starts: Whether the batch has hidden tokens.
            sinks: ``[num_heads], device``: learned sink logits; None for none.
            bias: ``[num_heads, 2 * max_distance + 1], float32, device``: added to the scores by distance, after it was
                multiplied by ``log2(e)``; with ``has_slopes`` ``[num_heads], float32, device``, the slopes, likewise
                multiplied. None for none.
            lse: ``[num_tokens, num_heads], float32, device``, contiguous: every row is written: the natural logarithm
                of each softmax's denominator, -inf for a query that sees nothing. None if it is not wanted.
            range_ends: ``[num_tokens], int32, device``: those of the planned batch.
        """
        kind = FORMATS[self.format]
        score_scale = self.scale * (self.k_scale if kind == TENSOR_SCALED else 1.0)
        if score_scale < 0:
            # The kernel needs a positive scale: it takes a row's largest product as that of its largest score.
            query, score_scale = -query, -score_scale
        # The score of a hidden token is the product of minus infinity and the scale.
        score_scale = max(score_scale, LEAST_SCALE)
        soft_cap = 0.0
        if self.soft_cap is not None:
            score_scale, soft_cap = 2 * score_scale / self.soft_cap, self.soft_cap * LOG2_E
        key, value, scale = kv_cache["k"], kv_cache["v"], kv_cache.get("k_scale")
        scale_strides = (0, 0, 0) if scale is None else scale.stride()
        halves = 2 if kind == NIBBLES else 1
        block_d, block_dv = (
            max(16, triton.next_power_of_2(size // halves)) for size in (self.head_size, self.head_size_v)
        )
        sizes = {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.num_heads // self.num_kv_heads,
            "HEAD_SIZE_V": self.head_size_v,
        }
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "key_scale": scale,
            "key_min": kv_cache.get("k_min"),
            "value_scales": kv_cache.get("v_scale"),
            "value_min": kv_cache.get("v_min"),
            "sinks": sinks,
            "bias": bias,
            "output": output,
            "lse": lse,
            "block_table": block_table,
            "range_ends": range_ends,
            "score_scale": score_scale * LOG2_E,
            "value_scale": self.v_scale,
            "soft_cap": soft_cap,
            "table_stride": block_table.stride(0),
            "chooser_stride": block_table.stride(1),
            "table_width": block_table.shape[-1],
            "query_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "key_block_stride": key.stride(0),
            "key_stride": key.stride(1),
            "key_head_stride": key.stride(2),
            "value_block_stride": value.stride(0),
            "value_stride": value.stride(1),
            "value_head_stride": value.stride(2),
            "scale_block_stride": scale_strides[0],
            "scale_stride": scale_strides[1],
            "scale_head_stride": scale_strides[2],
            "HEAD_SIZE": self.head_size,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "BLOCK_SIZE": self.block_size,
            "FORMAT": kind,
            "CAUSAL": causal,
            "WINDOW": self.window if causal else 0,
            "NUM_SINK_TOKENS": self.num_sink_tokens if causal and self.window else 0,
            "CHUNK": self.chunk if causal else 0,
            "HAS_RANGES": causal and range_ends is not None,
            "HAS_STARTS": has_starts,
            "HAS_SOFT_CAP": self.soft_cap is not None,
            "HAS_SINKS": sinks is not None,
            "HAS_LSE": lse is not None,
            "MAX_DISTANCE": self.max_distance,
            "HAS_SLOPES": self.has_slopes,
            "IS_ALIKE": key.stride() == value.stride(),
            "NUM_CHOOSERS": self.num_choosers,
            "DOT_DTYPE": dot_dtype(query.dtype),
            **sizes,
        }
        for shape_programs in programs:
            tiling = shape_programs.tiling
            num_head_programs = self.num_kv_heads * -(-self.num_heads // self.num_kv_heads // shape_programs.heads)
            grid = shape_programs.num_items, num_head_programs
            part_rows = shape_programs.num_slots, num_head_programs, tiling.block_m
            part_output = query.new_empty((*part_rows, self.head_size_v), dtype=torch.float32)
            part_weight = query.new_empty(part_rows, dtype=torch.float32)
            yield Launch(
                attention_kernel.attend,
                grid[::-1] if tiling.mask_all else grid,
                {
                    **arguments,
                    "part_output": part_output,
                    "part_weight": part_weight,
                    "numbers": numbers,
                    "first_item": shape_programs.first_item,
                    "HEADS": shape_programs.heads,
                    "BLOCK_M": tiling.block_m,
                    "BLOCK_N": tiling.block_n,
                    "MASK_ALL": tiling.mask_all,
                },
                tiling.num_warps,
                tiling.num_stages,
            )
            if shape_programs.num_splits:
                yield join_launch(shape_programs, numbers, output, part_output, part_weight, sizes, lse)


def join_launch(
    programs: Programs,
    numbers: torch.Tensor,
    output: torch.Tensor,
    part_output: torch.Tensor,
    part_weight: torch.Tensor,
    sizes: Mapping[str, int],
    lse: torch.Tensor | None = None,
) -> Launch:
    """Return the kernel call that merges the results of split tiles' parts.

    Args:
        programs: The programs that computed the parts.
        numbers: The step's numbers, on the device.
        output: ``[num_tokens, num_heads, head_size_v], device``, contiguous; the rows of split tiles are written.
        part_output: ``[num_slots, num_head_programs, block_m, head_size_v], float32, device``.
        part_weight: ``[num_slots, num_head_programs, block_m], float32, device``.
        sizes: The kernel's constants for the distribution of heads over programs.
        lse: ``[num_tokens, num_heads], float32, device``, contiguous; likewise written. None if it is not wanted.
    """
    head_size_v = output.shape[2]
    return Launch(
        attention_kernel.join_parts,
        (programs.num_splits, programs.split_queries, output.shape[1]),
        {
            **sizes,
            "output": output,
            "lse": lse,
            "part_output": part_output,
            "part_weight": part_weight,
            "numbers": numbers,
            "first_split": programs.first_split,
            "HEADS": programs.heads,
            "HEAD_SIZE_V": head_size_v,
            "BLOCK_M": programs.tiling.block_m,
            "BLOCK_DV": triton.next_power_of_2(head_size_v),
            "BLOCK_PARTS": PARTS_AT_ONCE,
            "HAS_LSE": lse is not None,
        },
    )


def dot_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype in which products are computed: that of the queries, if Triton has it."""
    # In a product, Triton's interpreter reads the bits of bfloat16 as integers.
    return tl.float32 if dtype == torch.bfloat16 and knobs.runtime.interpret else _DOT_DTYPES[dtype]
