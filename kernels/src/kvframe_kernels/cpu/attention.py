"""Paged attention on a CPU, by the compiled kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import attrs
import torch

from kvframe_kernels.cpu.build import load_library

DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of queries, with their numbers in the kernels."""

STORED: Mapping[torch.dtype, int] = {**DTYPES, torch.float8_e4m3fn: 3, torch.int8: 4, torch.uint8: 5}
"""The dtypes of keys and values, with their numbers in the kernels; ``uint8`` stands for two codes of four bits."""

PLANES = ("key", "value", "key_scale", "value_scale", "key_min", "value_min")

PART_TOKENS = 256
"""The fewest keys of a work item: computing it must take longer than handing it to a thread."""

MOST_TOKENS = 2**31 - 1
"""A length greater than that of any sequence: lengths have 32 bits."""


class _Plane(ctypes.Structure):
    """``Plane`` of ``src/step.h``."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        *((f"{name}_stride", ctypes.c_int64) for name in ("block", "token", "head")),
    ]


class _Step(ctypes.Structure):
    """``Step`` of ``src/step.h``, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "output")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, _Plane) for name in PLANES),
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "seq_starts", "block_table")),
        ("range_ends", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sinks", "bias", "slopes", "lse")),
        *((name, ctypes.c_int64) for name in ("max_distance", "num_reqs", "num_tokens", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v")),
        *((name, ctypes.c_int64) for name in ("query_dtype", "stored_dtype", "scale_dtype")),
        *((name, ctypes.c_int64) for name in ("causal", "window", "num_sink_tokens", "chunk")),
        *((name, ctypes.c_int64) for name in ("num_threads", "part_tokens")),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap", "value_factor")),
    ]


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """The queries and pages of a step. All tensors are int32, on the host.

    Query ``i`` of request ``r`` is at position ``seq_lens[r] - query_len[r] + i``.

    Attributes:
        query_start_loc: ``[num_reqs + 1]``: the start of each request's queries in the packed batch.
        seq_lens: ``[num_reqs]``: keys of each request.
        block_table: ``[num_reqs, max_blocks]``: block ids by block index.
        seq_starts: ``[num_reqs]``: keys before this one are hidden; None if none are.
        causal: Whether queries see only their own and earlier positions, within the mask; if not, all keys.
        range_ends: ``[num_tokens]``: a causal query in a range of queries that all see one another also sees the later
            keys before this one, the end of its range; 0 for a query in none. None if there are no ranges.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    seq_starts: torch.Tensor | None = None
    causal: bool = True
    range_ends: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class Scoring:
    """A layer's changes to the products of queries and keys.

    Attributes:
        scale: The factor on them.
        soft_cap: The ``c`` of ``c * tanh(score / c)``, which follows; None for no cap.
        window: Tokens that a causal query sees, including its own; None for all.
        num_sink_tokens: Tokens at the start that are seen in spite of the window.
        chunk: A causal query at ``n`` sees ``[n - n % chunk, n]``; None for no chunks.
        key_factor: The factor on all stored keys.
        value_factor: The factor on all stored values.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    key_factor: float = 1.0
    value_factor: float = 1.0


@attrs.frozen(kw_only=True, eq=False)
class Scales:
    """The scales of codes: a number is ``code * scale + min``, for each token and head.

    All are ``[num_block_ids, block_size, num_kv_heads]``, host, with any strides, and all float32 or all float16. None
    stands for a scale of 1 and a minimum of 0.
    """

    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    key_min: torch.Tensor | None = None
    value_min: torch.Tensor | None = None


NO_SCALES = Scales()


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scales: Scales = NO_SCALES,
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of packed queries over the pages of their requests.

    ``kvframe_kernels.cpu.reference.paged_attention`` computes the same in plain torch.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, host; rows after the last request are padding.
        key: ``[num_block_ids, block_size, num_kv_heads, head_size]``, host, in a dtype of ``STORED``; any strides,
            except that the last is 1. In ``uint8`` it is half as long: byte ``j`` has element ``j`` in its low half and
            element ``j + head_size / 2`` in its high half.
        value: ``[num_block_ids, block_size, num_kv_heads, head_size_v]``, likewise, in the dtype of ``key``.
        batch: The requests.
        scoring: The layer's scale, cap and mask.
        sinks: ``[num_heads]``: learned sink logits; None for none.
        bias: ``[num_heads, 2 * max_distance + 1]``: added to the scores by the distance of a key from its query; larger
            distances use the nearest entry. None for none.
        scales: The scales of keys and values that are codes.
        lse: ``[num_tokens, num_heads], float32``, host, contiguous, written to: the natural logarithm of each softmax's
            denominator, -inf for a query that sees nothing. None if it is not wanted.
        out: Where to write the result, contiguous; None for a new tensor.
        slopes: ``[num_heads]``: what each head's scores lose for each token between query and key; None for nothing.

    Returns:
        ``[num_tokens, num_heads, head_size_v]``, in the query's dtype; zeros for padding and queries that see no key.

    Raises:
        BuildError: The kernels cannot be built on this machine.
        ValueError: The kernels do not support a dtype, a stride or a number of heads.
    """
    library = load_library()
    query, key, value = (
        _readable("query", query, DTYPES),
        _readable("key", key, STORED),
        _readable("value", value, STORED),
    )
    if key.dtype != value.dtype:
        raise ValueError(f"keys are {key.dtype} and values are {value.dtype}; they must have one dtype")
    starts, lens = _whole("query_start_loc", batch.query_start_loc), _whole("seq_lens", batch.seq_lens)
    hidden = None if batch.seq_starts is None else _whole("seq_starts", batch.seq_starts)
    range_ends = None if batch.range_ends is None else _whole("range_ends", batch.range_ends)
    table = batch.block_table
    if table.dtype != torch.int32 or (table.stride(1) != 1 and table.shape[1] > 1):
        raise ValueError(f"block_table must be int32 with adjacent columns, not {table.dtype} of {table.stride()}")
    sinks = None if sinks is None else sinks.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    slopes = None if slopes is None else slopes.float().contiguous()
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[2]
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads equally")
    head_size_v = value.shape[-1] * (2 if value.dtype == torch.uint8 else 1)
    output = query.new_empty(num_tokens, num_heads, head_size_v) if out is None else out
    of_scales = [scales.key_scale, scales.value_scale, scales.key_min, scales.value_min]
    scale_dtype = next((tensor.dtype for tensor in of_scales if tensor is not None), torch.float32)
    step = _Step(
        query=query.data_ptr(),
        output=output.data_ptr(),
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        **{name: _plane(tensor) for name, tensor in zip(PLANES, [key, value, *of_scales], strict=True)},
        query_start_loc=starts.data_ptr(),
        seq_lens=lens.data_ptr(),
        seq_starts=None if hidden is None else hidden.data_ptr(),
        block_table=table.data_ptr(),
        range_ends=None if range_ends is None else range_ends.data_ptr(),
        block_table_stride=table.stride(0),
        sinks=None if sinks is None else sinks.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        slopes=None if slopes is None else slopes.data_ptr(),
        lse=None if lse is None else lse.fill_(-math.inf).data_ptr(),
        max_distance=0 if bias is None else bias.shape[1] // 2,
        num_reqs=lens.shape[0],
        num_tokens=num_tokens,
        block_size=key.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        query_dtype=DTYPES[query.dtype],
        stored_dtype=STORED[key.dtype],
        scale_dtype=DTYPES[scale_dtype],
        causal=batch.causal,
        window=min(scoring.window or 0, MOST_TOKENS),
        num_sink_tokens=min(scoring.num_sink_tokens, MOST_TOKENS),
        chunk=min(scoring.chunk or 0, MOST_TOKENS),
        num_threads=torch.get_num_threads(),
        part_tokens=PART_TOKENS,
        scale=scoring.scale * scoring.key_factor,
        soft_cap=scoring.soft_cap or 0.0,
        value_factor=scoring.value_factor,
    )
    library.kvframe_attention(ctypes.byref(step))
    if lse is not None and sinks is not None:
        torch.logaddexp(lse, sinks, out=lse)
    return output


def _plane(tensor: torch.Tensor | None) -> _Plane:
    if tensor is None:
        return _Plane()
    item, (block, token, head, *_) = tensor.element_size(), tensor.stride()
    return _Plane(tensor.data_ptr(), item * block, item * token, item * head)


def _readable(name: str, tensor: torch.Tensor, dtypes: Mapping[torch.dtype, int]) -> torch.Tensor:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; the kernels read {', '.join(map(str, dtypes))}")
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {tensor.dtype}")
    return tensor.contiguous()
