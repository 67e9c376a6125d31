"""The reference for the compiled kernels, in plain torch: it computes one request and one query head at a time.

The kernels compute the same with the online softmax of Milakov and Gimelshein (arXiv 1805.02867), in tiles as in
FlashAttention-2 (Dao, arXiv 2307.08691), with keys split as in FlashDecoding (Dao et al., 2023), over pages as in
vLLM's PagedAttention (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import torch

from kvframe_kernels.cpu.attention import NO_SCALES, Batch, Scales, Scoring


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scales: Scales = NO_SCALES,
    dtype: torch.dtype = torch.float32,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``kvframe_kernels.cpu.attention.paged_attention`` in ``dtype``; it has the same arguments."""
    key = numbers(key, scales.key_scale, scales.key_min, dtype) * scoring.key_factor
    value = numbers(value, scales.value_scale, scales.value_min, dtype) * scoring.value_factor
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    hidden = [0] * len(lens) if batch.seq_starts is None else batch.seq_starts.tolist()
    for request, (start, stop, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if start == stop or length == hidden[request]:
            continue
        tokens = torch.arange(hidden[request], length)
        blocks = batch.block_table[request, tokens // key.shape[1]].long()
        keys, values = (state[blocks, tokens % key.shape[1]] for state in (key, value))
        positions = length - (stop - start) + torch.arange(stop - start)
        visible = None
        if batch.causal:
            visible = _visible(positions, tokens, scoring)
            if batch.range_ends is not None:
                later = tokens[None] > positions[:, None]
                visible |= later & (tokens[None] < batch.range_ends[start:stop, None])
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // key.shape[2])
            scores = query[start:stop, head].to(dtype) @ keys[:, kv_head].T * scoring.scale
            if scoring.soft_cap is not None:
                scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
            if bias is not None:
                far = bias.shape[1] // 2
                distance = (tokens[None] - positions[:, None]).clamp(-far, far)
                scores = scores + bias[head, far + distance].to(dtype)
            if slopes is not None:
                scores = scores - slopes[head].to(dtype) * (tokens[None] - positions[:, None]).abs()
            if visible is not None:
                scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(dtype).expand(stop - start, 1)], dim=1)
            weights = torch.softmax(scores, dim=-1)[:, : len(tokens)]
            # Values of unseen tokens may be anything, including NaN.
            is_visible = torch.ones(len(tokens), dtype=torch.bool) if visible is None else visible.any(0)
            output[start:stop, head] = (weights[:, is_visible] @ values[is_visible, kv_head]).to(query.dtype)
    return output


def numbers(
    codes: torch.Tensor, scale: torch.Tensor | None, low: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers of codes, ``code * scale + low``, in ``dtype``; a byte of two codes has the low half first."""
    if codes.dtype == torch.uint8:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    values = codes.to(dtype)
    if scale is not None:
        values = values * scale.to(dtype).unsqueeze(-1)
    return values if low is None else values + low.to(dtype).unsqueeze(-1)


def _visible(positions: torch.Tensor, tokens: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return which earlier tokens the queries at these positions see, ``[num_queries, num_tokens], bool``."""
    positions, tokens = positions[:, None], tokens[None]
    visible = tokens <= positions
    if scoring.window is not None:
        visible &= (tokens > positions - scoring.window) | (tokens < scoring.num_sink_tokens)
    if scoring.chunk is not None:
        visible &= tokens >= positions - positions % scoring.chunk
    return visible
