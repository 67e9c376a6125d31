"""One token's step of the gated delta rule on states in pages, for Gated DeltaNet and Kimi's linear attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.places import Place, places, strides

NORM_EPS = 1e-6
"""The number that keeps the norm of queries and keys from zero, as in flash-linear-attention."""


def gated_delta_update(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    *,
    normalise: bool = False,
) -> torch.Tensor:
    """Compute one token's step of each row's state: ``S = exp(g) S``, ``S += k (beta (v - k S))``, ``o = scale q S``.

    That is equation 10 of Gated DeltaNet (arXiv 2412.06464) or, with one gate per channel of the key, Kimi Delta
    Attention (arXiv 2510.26692). The tiling is that of ``fused_recurrent_gated_delta_rule`` in
    fla-org/flash-linear-attention, which takes and returns dense states; here they are read from and written to pages.

    Args:
        pages: ``[num_block_ids, num_places, num_heads, key_size, value_size], device``; written to at ``target``.
        source: The place of each row's state before the token.
        target: The place of the state after it; all are different, and none is another row's source.
        query: ``[num_rows, num_key_heads, key_size], device``; ``num_heads // num_key_heads`` heads in a row share one.
        key: ``[num_rows, num_key_heads, key_size], device``.
        value: ``[num_rows, num_heads, value_size], device``.
        gate: ``[num_rows, num_heads], device``, or ``[num_rows, num_heads, key_size]``: logarithms of decays.
        beta: ``[num_rows, num_heads], device``: the share of the state's value for the key that is replaced.
        scale: The factor on queries.
        normalise: Whether queries and keys are first divided by their length.

    Returns:
        ``[num_rows, num_heads, value_size], device``, in the dtype of ``value``.
    """
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    if len(value):
        gated_delta_launch(pages, source, target, query, key, value, gate, beta, out, scale, normalise).run()
    return out


def gated_delta_launch(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    normalise: bool,
) -> Launch:
    """Return the launch of ``gated_delta_update``, which writes to ``out``."""
    num_rows, num_heads, value_size = value.shape
    key_size = key.shape[-1]
    block_k = triton.next_power_of_2(key_size)
    block_v = min(triton.next_power_of_2(value_size), max(1, 4096 // block_k))
    per_channel = gate.dim() == 3
    arguments = {
        "pages": pages,
        **places(source, target),
        "query": query,
        "key": key,
        "value": value,
        "gate": gate,
        "beta": beta,
        "out": out,
        **strides(pages, "s_page", "s_place", "s_head", "s_key", "s_value"),
        **strides(query, "q_row", "q_head", "q_size"),
        **strides(key, "k_row", "k_head", "k_size"),
        **strides(value, "v_row", "v_head", "v_size"),
        "g_size": 0,
        **strides(gate, *("g_row", "g_head", "g_size")[: gate.dim()]),
        **strides(beta, "b_row", "b_head"),
        **strides(out, "out_row", "out_head", "out_size"),
        "scale": float(scale),
        "heads_per_key": num_heads // key.shape[1],
        "key_size": key_size,
        "value_size": value_size,
        "PER_CHANNEL": per_channel,
        "NORMALISE": normalise,
        "EPS": NORM_EPS,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
    }
    return Launch(_delta_step, (triton.cdiv(value_size, block_v), num_heads, num_rows), arguments)


def gated_delta_update_reference(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    *,
    normalise: bool = False,
) -> torch.Tensor:
    """Compute ``gated_delta_update`` in plain torch."""
    heads_per_key = value.shape[1] // key.shape[1]
    queries, keys = (vectors.float().repeat_interleave(heads_per_key, 1) for vectors in (query, key))
    if normalise:
        queries, keys = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (queries, keys))
    decay = gate.float() if gate.dim() == 3 else gate.float()[..., None]
    state = pages[source].float() * decay.exp()[..., None]
    missing = (value.float() - torch.einsum("rhk,rhkv->rhv", keys, state)) * beta.float()[..., None]
    state = state + keys[..., None] * missing[:, :, None]
    pages[target] = state.to(pages.dtype)
    return torch.einsum("rhk,rhkv->rhv", queries * scale, state).to(value.dtype)


@triton.jit
def _delta_step(  # type: ignore[no-untyped-def]
    pages, source_pages, source_places, target_pages, target_places, query, key, value, gate, beta, out,
    s_page, s_place, s_head, s_key, s_value, q_row, q_head, q_size, k_row, k_head, k_size, v_row, v_head, v_size,
    g_row, g_head, g_size, b_row, b_head, out_row, out_head, out_size, scale, heads_per_key, key_size, value_size,
    PER_CHANNEL: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < key_size, v < value_size
    inside = in_k[:, None] & in_v[None, :]
    tile = head * s_head + k[:, None] * s_key + v[None, :] * s_value
    # Distances between pages may need more than 32 bits.
    source = tl.load(source_pages + row) * s_page + tl.load(source_places + row) * s_place
    target = tl.load(target_pages + row) * s_page + tl.load(target_places + row) * s_place
    state = tl.load(pages + source + tile, mask=inside, other=0.0).to(tl.float32)

    key_head = head // heads_per_key
    query_vector = tl.load(query + row * q_row + key_head * q_head + k * q_size, mask=in_k, other=0.0).to(tl.float32)
    key_vector = tl.load(key + row * k_row + key_head * k_head + k * k_size, mask=in_k, other=0.0).to(tl.float32)
    if NORMALISE:
        query_vector *= tl.rsqrt(tl.sum(query_vector * query_vector, axis=0) + EPS)
        key_vector *= tl.rsqrt(tl.sum(key_vector * key_vector, axis=0) + EPS)
    if PER_CHANNEL:
        decays = tl.load(gate + row * g_row + head * g_head + k * g_size, mask=in_k, other=0.0).to(tl.float32)
        state *= tl.exp(decays)[:, None]
    else:
        state *= tl.exp(tl.load(gate + row * g_row + head * g_head).to(tl.float32))
    new = tl.load(value + row * v_row + head * v_head + v * v_size, mask=in_v, other=0.0).to(tl.float32)
    weight = tl.load(beta + row * b_row + head * b_head).to(tl.float32)
    missing = (new - tl.sum(state * key_vector[:, None], axis=0)) * weight
    state += key_vector[:, None] * missing[None, :]
    tl.store(pages + target + tile, state.to(pages.dtype.element_ty), mask=inside)
    result = tl.sum(state * (query_vector * scale)[:, None], axis=0)
    tl.store(out + row * out_row + head * out_head + v * out_size, result.to(out.dtype.element_ty), mask=in_v)
