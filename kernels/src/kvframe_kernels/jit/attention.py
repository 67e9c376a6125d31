"""Paged attention on a CPU by loops that numba compiles; ``kvframe_kernels.attention_reference`` defines its result."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import torch

from kvframe_kernels.jit.plan import Mask, Work
from kvframe_kernels.jit.threads import run

STORED = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Each dtype, with the NumPy dtype in which the loops get it."""


@attrs.frozen(eq=False)
class Batch:
    """A step as the loops read it.

    Attributes:
        work: The work items.
        block_table: ``[num_reqs, max_blocks], int32``.
        mask: The mask of the step.
        range_ends: ``[num_tokens], int32``: each causal query also sees the later tokens before this one, as ``work``
            was planned; None if no query does.
    """

    work: Work
    block_table: torch.Tensor
    mask: Mask
    range_ends: torch.Tensor | None = None


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention over pages in place.

    The first call for a dtype compiles the loops, in about five seconds; numba caches them for later processes.

    Args:
        query: ``[num_tokens, num_heads, head_size], CPU``.
        key: ``[num_block_ids, block_size, num_kv_heads, head_size]``, float32, bfloat16 or float16, strided.
        value: ``[num_block_ids, block_size, num_kv_heads, head_size_v]``, likewise.
        batch: The step.
        scale: Factor on the products.
        soft_cap: ``c`` in ``c * tanh(x / c)``; None for none.
        sinks: ``[num_heads]``: learned sink logits; None for none.
        bias: ``[num_heads, 2 * max_distance + 1], float32``: entry ``i`` is added to the score of a token
            ``i - max_distance`` after the query. Or ``[num_heads, 1]``: what each head's scores lose for each token
            between query and key. None for none.
        lse: ``[num_tokens, num_heads], float32, CPU``, contiguous, written to: the natural logarithm of each softmax's
            denominator, -inf for a query that sees nothing. None if it is not wanted.
        out: Where to write the result, contiguous; None for a new tensor.

    Returns:
        ``[num_tokens, num_heads, head_size_v]``, in the query's dtype.
    """
    num_tokens, num_heads, head_size = query.shape
    work = batch.work
    num_parts = int(work.first_part[-1])
    # Rows without a work item stay zero. The loops write float32.
    if out is None or out.dtype != torch.float32:
        outputs = torch.zeros(num_tokens, num_heads, value.shape[-1])
    else:
        outputs = out.zero_()
    part_outputs = np.empty((num_parts, num_heads, value.shape[-1]), np.float32)
    sums = np.empty((num_parts, num_heads, 2), np.float32)
    key_memory, key_strides = _memory(key)
    value_memory, value_strides = _memory(value)
    table = batch.block_table.contiguous()
    biases = torch.empty(num_heads, 0) if bias is None else bias.float().contiguous()
    ends = torch.empty(0, dtype=torch.int32) if batch.range_ends is None else batch.range_ends.contiguous()
    logits = torch.empty(0) if sinks is None else sinks.float().contiguous()
    sizes = {
        "num_items": len(work.items),
        "num_reqs": table.shape[0],
        "max_blocks": table.shape[1],
        "num_tokens": num_tokens,
        "num_parts": num_parts,
        "num_heads": num_heads,
        "num_kv_heads": key.shape[2],
        "head_size": head_size,
        "value_size": value.shape[3],
        "num_biases": biases.shape[1],
        "num_sinks": len(logits),
        "num_lse": 0 if lse is None else num_tokens,
        "num_range_ends": len(ends),
        "key_elements": len(key_memory),
        "value_elements": len(value_memory),
        "block_size": key.shape[1],
        "causal": batch.mask.causal,
        "window": batch.mask.window,
        "chunk": batch.mask.chunk,
    }
    arrays = {
        "items": work.items,
        "query": (query.float() * scale).contiguous().numpy(),
        "key": key_memory,
        "value": value_memory,
        "key_strides": key_strides,
        "value_strides": value_strides,
        "table": table.numpy(),
        "bias": biases.numpy(),
        "range_ends": ends.numpy(),
        "sinks": logits.numpy(),
        "outputs": outputs.numpy(),
        "part_outputs": part_outputs,
        "sums": sums,
        "lse": np.empty((0, num_heads), np.float32) if lse is None else lse.fill_(-math.inf).numpy(),
    }
    run(key_memory.dtype, sizes, arrays, soft_cap or 0.0, work.num_threads)
    if num_parts:
        _join_parts(outputs.numpy(), part_outputs, sums, work.first_part, arrays["sinks"], arrays["lse"])
    if lse is not None and sinks is not None:
        torch.logaddexp(lse, logits, out=lse)
    if out is None:
        return outputs.to(query.dtype)
    return out if outputs is out else out.copy_(outputs)


def _join_parts(outputs: Any, part_outputs: Any, sums: Any, first_part: Any, sinks: Any, lse: Any) -> None:
    """Merge the parts of split queries, by the formula of the online softmax.

    Args:
        outputs: ``[num_tokens, num_heads, head_size_v], float32``: the rows of split queries are written.
        part_outputs: ``[num_parts, num_heads, head_size_v], float32``: as ``loops.attend`` writes it.
        sums: ``[num_parts, num_heads, 2], float32``: likewise, of its ``sums``.
        first_part: ``[num_tokens + 1], int64``: the first part of each query; a query that is not split has no parts.
        sinks: ``[num_heads], float32``: learned sink logits, or ``[0]`` for none.
        lse: ``[num_tokens, num_heads], float32``: the rows of split queries are written, without sinks;
            ``[0, num_heads]`` if it is not wanted.
    """
    counts = np.diff(first_part)
    split = np.flatnonzero(counts)
    starts = first_part[split]
    maximum = np.maximum.reduceat(sums[..., 0], starts)
    share = np.exp(sums[..., 0] - maximum.repeat(counts[split], axis=0))
    weight = np.add.reduceat(share * sums[..., 1], starts)
    if len(lse):
        lse[split] = np.where(weight == 0, -np.inf, maximum + np.log(np.where(weight == 0, 1, weight)))
    if len(sinks):
        weight += np.exp(np.minimum(sinks - maximum, 80))
    totals = np.add.reduceat(share[..., None] * part_outputs, starts)
    outputs[split] = totals / np.where(weight == 0, 1, weight)[..., None]


def _memory(state: torch.Tensor) -> tuple[Any, Any]:
    """Return the memory from a state tensor's first element on, and its strides without the last, which is 1."""
    if state.stride(3) != 1:
        state = state.contiguous()
    state = state.view(STORED[state.dtype])
    num_elements = state.untyped_storage().nbytes() // state.element_size() - int(state.storage_offset())
    return state.as_strided((num_elements,), (1,)).numpy(), np.array(state.stride()[:3])
