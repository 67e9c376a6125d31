"""Attention over paged latents in the absorbed form, for decodes and other queries that read latents in place.

``LatentAttention`` holds a layer's properties. Its ``plan`` divides a step into work items on the host, as for keys and
values. Its ``launches`` are the one to four kernel calls that compute the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton

from kvframe_kernels.triton import mla_kernel
from kvframe_kernels.triton.attention import LOG2_E, dot_dtype, join_launch
from kvframe_kernels.triton.attention_plan import (
    ALL,
    Batch,
    Programs,
    StepPlanner,
    Tiling,
    Work,
    planner_for,
)
from kvframe_kernels.triton.launch import Launch


def heads_per_program(num_heads: int, max_heads: int) -> int:
    """Return the largest number of query heads per program, up to ``max_heads``, that divides ``num_heads``."""
    return next(heads for heads in range(min(num_heads, max_heads), 0, -1) if num_heads % heads == 0)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention over latents, of layers with equal properties.

    Attributes:
        num_heads: Query heads.
        latent_size: Elements of a latent.
        rope_size: Elements of the rotated part after it.
        block_size: Tokens per block.
        scale: Factor on the products of queries and keys.
        causal: Whether queries see only their own and earlier positions; a batch may override it, so that they see all.
        by_token: Whether queries read chosen tokens.
        num_cores: The device's multiprocessors.
        tilings: Shapes of programs, by ascending rows; None for shapes that suit the sizes.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    block_size: int
    scale: float
    causal: bool = True
    by_token: bool = False
    num_cores: int = 132
    tilings: tuple[Tiling, ...] | None = None

    def plan(self, batch: Batch, dtype: torch.dtype) -> Work:
        """Return a step's work.

        Args:
            batch: The step.
            dtype: The dtype of its queries.
        """
        (work,) = self.planner(dtype).plan(batch, (ALL,))
        return work

    def tilings_for(self, dtype: torch.dtype) -> tuple[Tiling, ...]:
        """Return the shapes of programs, for queries of this dtype."""
        block_size = 1 if self.by_token else self.block_size
        return self.tilings or suitable_tilings(self.latent_size, dtype.itemsize, block_size)

    def planner(self, dtype: torch.dtype) -> StepPlanner:
        """Return the planner of steps, for which each program's share of the heads is a KV head."""
        heads = self.heads_for(dtype)
        return planner_for(self.num_heads // heads, heads, self.tilings_for(dtype), self.num_cores)

    def heads_for(self, dtype: torch.dtype) -> int:
        """Return the query heads of a program, for queries of this dtype."""
        return heads_per_program(self.num_heads, self.tilings_for(dtype)[-1].block_m)

    def launches(
        self,
        absorbed: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
        block_table: torch.Tensor,
        numbers: torch.Tensor,
        programs: Sequence[Programs],
        output: torch.Tensor,
        *,
        causal: bool = True,
        has_starts: bool = False,
        range_ends: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Iterator[Launch]:
        """Yield the kernel calls that write a step's ``output``, in their order.

        Args:
            absorbed: ``[num_tokens, num_heads, latent_size], device``: the part of the queries that is not rotated,
                multiplied by the matrix that makes keys of latents; the last axis is contiguous.
            rotated: ``[num_tokens, num_heads, rope_size], device``: their rotated part; likewise.
            latent: ``[num_block_ids, block_size, latent_size + rope_size], device``, strided over the pool.
            block_table: ``[num_reqs, max_blocks], int32, device``. For chosen tokens (``batch_of_chosen``)
                ``[num_tokens, num_chosen]``: their slots, ``block * block_size + offset``; negative for none.
            numbers: The numbers of ``plan``'s result, on the device.
            programs: The programs of ``plan``'s result.
            output: ``[num_tokens, num_heads, latent_size], device``, contiguous; every row is written. The caller
                multiplies it by the matrix that makes values of latents.
            causal: Whether the batch is causal.
            has_starts: Whether the batch has hidden tokens.
            range_ends: ``[num_tokens], int32, device``: those of the planned batch.
            lse: ``[num_tokens, num_heads], float32, device``, contiguous: every row is written: the natural logarithm
                of the softmax's denominator; -inf for a query that sees nothing. None if it is not wanted.
        """
        heads = self.heads_for(absorbed.dtype)
        num_head_programs = self.num_heads // heads
        sizes = {
            "NUM_KV_HEADS": num_head_programs,
            "GROUP": heads,
            "HEADS": heads,
            "HEAD_SIZE_V": self.latent_size,
        }
        arguments = {
            "absorbed": absorbed,
            "rotated": rotated,
            "latent": latent,
            "output": output,
            "lse": lse,
            "block_table": block_table,
            "range_ends": range_ends,
            "score_scale": self.scale * LOG2_E,
            "table_stride": block_table.stride(0),
            "table_width": block_table.shape[1],
            "absorbed_stride": absorbed.stride(0),
            "absorbed_head_stride": absorbed.stride(1),
            "rotated_stride": rotated.stride(0),
            "rotated_head_stride": rotated.stride(1),
            "block_stride": latent.stride(0),
            "token_stride": latent.stride(1),
            "ROPE_SIZE": self.rope_size,
            "BLOCK_L": max(16, triton.next_power_of_2(self.latent_size)),
            "BLOCK_R": max(16, triton.next_power_of_2(self.rope_size)),
            "BLOCK_SIZE": self.block_size,
            "CAUSAL": causal,
            "HAS_STARTS": has_starts,
            "HAS_RANGES": causal and range_ends is not None,
            "HAS_LSE": lse is not None,
            "BY_TOKEN": self.by_token,
            "DOT_DTYPE": dot_dtype(absorbed.dtype),
            **sizes,
        }
        for shape_programs in programs:
            tiling = shape_programs.tiling
            part_rows = shape_programs.num_slots, num_head_programs, tiling.block_m
            part_output = output.new_empty((*part_rows, self.latent_size), dtype=torch.float32)
            part_weight = output.new_empty(part_rows, dtype=torch.float32)
            yield Launch(
                mla_kernel.attend_latents,
                (shape_programs.num_items, num_head_programs),
                {
                    **arguments,
                    "part_output": part_output,
                    "part_weight": part_weight,
                    "numbers": numbers,
                    "first_item": shape_programs.first_item,
                    "BLOCK_M": tiling.block_m,
                    "BLOCK_N": tiling.block_n,
                },
                tiling.num_warps,
                tiling.num_stages,
            )
            if shape_programs.num_splits:
                yield join_launch(shape_programs, numbers, output, part_output, part_weight, sizes, lse)


def suitable_tilings(latent_size: int, item_bytes: int, block_size: int) -> tuple[Tiling, ...]:
    """Return shapes of programs, by ascending rows, that fit a Hopper multiprocessor's registers and shared memory.

    Args:
        latent_size: Elements of a latent.
        item_bytes: Bytes of an element of the queries.
        block_size: Tokens per block.
    """
    if item_bytes > 2 or latent_size > 512:
        return (_tiling(block_m=16, block_n=16, num_warps=8, num_stages=2, programs_per_core=1),)
    # The sums of 64 rows of 512 elements fill the registers of two warp groups, and two stages fill the shared memory.
    # If each token's page has to be looked up, more tokens at a time would spill.
    block_n, num_stages = (64, 2) if block_size % 64 == 0 else (32, 3)
    return (
        _tiling(block_m=16, block_n=32, num_warps=4, num_stages=3, programs_per_core=2),
        _tiling(block_m=64, block_n=block_n, num_warps=8, num_stages=num_stages, programs_per_core=1),
    )


_tiling = partial(Tiling, min_split=256, mask_all=True)


def attend_latents_reference(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    block_table: torch.Tensor,
    batch: Batch,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``LatentAttention`` in plain torch; arguments as for its ``launches`` and ``plan``.

    Returns:
        The output, and the log-sum-exp, ``[num_tokens, num_heads], float32``.
    """
    latent_size = absorbed.shape[-1]
    output = torch.zeros_like(absorbed, memory_format=torch.contiguous_format)
    lse = torch.full(absorbed.shape[:2], -math.inf, device=absorbed.device)
    starts = [0] * len(batch.seq_lens) if batch.seq_starts is None else batch.seq_starts.tolist()
    for index, (seq_len, hidden) in enumerate(zip(batch.seq_lens.tolist(), starts, strict=True)):
        rows = slice(int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1]))
        tokens = torch.arange(hidden, seq_len, device=latent.device)
        block_size = latent.shape[1]
        vectors = latent[block_table[index, tokens // block_size].long(), tokens % block_size].float()
        query = torch.cat([absorbed[rows], rotated[rows]], dim=-1).float()
        scores = torch.einsum("qhd,td->hqt", query, vectors) * scale
        if batch.causal:
            stops = torch.arange(seq_len - len(query), seq_len, device=latent.device) + 1
            if batch.range_ends is not None:
                stops = torch.maximum(stops, torch.from_numpy(batch.range_ends[rows]).to(stops))
            scores = scores.masked_fill(tokens >= stops[:, None], float("-inf"))
        lse[rows] = scores.logsumexp(-1).T
        shares = scores.softmax(-1).nan_to_num(0)
        output[rows] = torch.einsum("hqt,tl->qhl", shares, vectors[:, :latent_size]).to(output.dtype)
    return output, lse
