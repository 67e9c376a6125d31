"""One token's step of selective state spaces, on states that lie in pages: Mamba, Mamba-2, their convolution.

A step reads each row's state from one page and writes it to another, or the same: that is the least there is to move.
With a gather in front and a scatter behind, as kernels over dense states need them, it is three times as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

Place = tuple[torch.Tensor, torch.Tensor]
"""Page and place in it of each row's state: ``[num_rows], int64, device`` both."""

_TILE = 4096
"""Elements of a state that one program holds, in registers."""


def selective_state_update(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    softplus: bool = False,
) -> torch.Tensor:
    """Take one token's step of each row's state: ``h = exp(dt A) h + dt B x``, ``y = C h + D x``, gated by ``silu(z)``.

    That is equation 2 of Mamba (arXiv 2312.00752) and of Mamba-2 (arXiv 2405.21060), in float32 whatever the dtypes.
    Mamba is one head whose ``head_size`` is the layer's width. What a model has one of for a whole head (the ``dt``,
    ``A`` and ``D`` of Mamba-2) is given expanded, with strides of 0, and then read once. The tiling is that of
    ``selective_state_update`` in state-spaces/mamba; the indices of pages are our own.

    Args:
        pages: ``[num_block_ids, num_places, num_heads, head_size, state_size], device``; written to at ``target``.
        source: Where each row's state before the token lies.
        target: Where the state after it goes; no two are one, and none is another row's source.
        x: ``[num_rows, num_heads, head_size], device``.
        dt: ``[num_rows, num_heads, head_size], device``.
        A: ``[num_heads, head_size, state_size], device``.
        B: ``[num_rows, num_groups, state_size], device``; ``num_heads // num_groups`` heads in a row share one.
        C: ``[num_rows, num_groups, state_size], device``.
        D: ``[num_heads, head_size], device``; None for none.
        z: ``[num_rows, num_heads, head_size], device``; None for no gate.
        dt_bias: ``[num_heads, head_size], device``: added to ``dt``; None for none.
        softplus: Whether ``dt`` goes through a softplus.

    Returns:
        ``[num_rows, num_heads, head_size], device``, in the dtype of ``x``.
    """
    num_rows, num_heads, head_size = x.shape
    state_size = pages.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_rows:
        return out
    block_n = triton.next_power_of_2(state_size)
    block_p = min(triton.next_power_of_2(head_size), max(1, _TILE // block_n))
    tied = head_size > 1 and dt.stride(2) == A.stride(1) == A.stride(2) == 0
    _selective_step[(triton.cdiv(head_size, block_p), num_heads, num_rows)](
        pages, *source, *target, x, dt, A, B, C, D, z, dt_bias, out,
        *pages.stride(), *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(),
        *((0, 0) if D is None else D.stride()), *((0, 0, 0) if z is None else z.stride()),
        *((0, 0) if dt_bias is None else dt_bias.stride()), *out.stride(),
        num_heads // B.shape[1], head_size, state_size,
        HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=softplus, TIED=tied,
        BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out


def selective_state_update_reference(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    softplus: bool = False,
) -> torch.Tensor:
    """Do what ``selective_state_update`` does, in plain torch."""
    heads_per_group = x.shape[1] // B.shape[1]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = functional.softplus(step)[..., None] if softplus else step[..., None]
    weight_in, weight_out = (each.float().repeat_interleave(heads_per_group, 1)[:, :, None] for each in (B, C))
    state = (step * A.float()).exp() * pages[source].float() + step * weight_in * x.float()[..., None]
    pages[target] = state.to(pages.dtype)
    out = (state * weight_out).sum(-1)
    if D is not None:
        out = out + D.float() * x.float()
    if z is not None:
        out = out * functional.silu(z.float())
    return out.to(x.dtype)


def conv_update(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Take one token's step of a short causal convolution over each channel, and shift its inputs by one.

    The algorithm is that of ``causal_conv1d_update`` in Dao-AILab/causal-conv1d; the indices of pages are our own.

    Args:
        pages: ``[num_block_ids, num_places, num_channels, num_inputs], device``: the last inputs, the latest last;
            written to at ``target``.
        source: Where each row's inputs before the token lie.
        target: Where those after it go; no two are one, and none is another row's source.
        x: ``[num_rows, num_channels], device``: the token's input.
        weight: ``[num_channels, width], device``, with ``width <= num_inputs + 1``.
        bias: ``[num_channels], device``; None for none.
        silu: Whether the output goes through a SiLU.

    Returns:
        ``[num_rows, num_channels], device``, in the dtype of ``x``.
    """
    num_rows, num_channels = x.shape
    num_inputs, width = pages.shape[-1], weight.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_rows:
        return out
    block_l = triton.next_power_of_2(num_inputs + 1)
    block_c = min(triton.next_power_of_2(num_channels), max(1, 2048 // block_l))
    _conv_step[(triton.cdiv(num_channels, block_c), num_rows)](
        pages, *source, *target, x, weight, bias, out,
        *pages.stride(), *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), out.stride(0),
        num_channels, num_inputs, width,
        HAS_BIAS=bias is not None, SILU=silu, BLOCK_C=block_c, BLOCK_L=block_l, num_warps=4,
    )  # fmt: skip
    return out


def conv_update_reference(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Do what ``conv_update`` does, in plain torch."""
    inputs = torch.cat([pages[source].float(), x.float()[..., None]], dim=-1)
    pages[target] = inputs[..., 1:].to(pages.dtype)
    out = (inputs[..., -weight.shape[-1] :] * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    return (functional.silu(out) if silu else out).to(x.dtype)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    # log(1 + e) with the rounding of 1 + e taken out again (W. Kahan); a plain log loses small steps altogether.
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _selective_step(  # type: ignore[no-untyped-def]
    pages, source_pages, source_places, target_pages, target_places, x, dt, A, B, C, D, z, dt_bias, out,
    s_page, s_place, s_head, s_size, s_state, x_row, x_head, x_size, dt_row, dt_head, dt_size, A_head, A_size, A_state,
    B_row, B_group, B_state, C_row, C_group, C_state, D_head, D_size, z_row, z_head, z_size, bias_head, bias_size,
    out_row, out_head, out_size, heads_per_group, head_size, state_size,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, TIED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < head_size, n < state_size
    inside = in_p[:, None] & in_n[None, :]
    tile = head * s_head + p[:, None] * s_size + n[None, :] * s_state
    # Pages may lie further apart than 32 bits count.
    source = tl.load(source_pages + row) * s_page + tl.load(source_places + row) * s_place
    target = tl.load(target_pages + row) * s_page + tl.load(target_places + row) * s_place
    state = tl.load(pages + source + tile, mask=inside, other=0.0).to(tl.float32)

    value = tl.load(x + row * x_row + head * x_head + p * x_size, mask=in_p, other=0.0).to(tl.float32)
    group = head // heads_per_group
    weight_in = tl.load(B + row * B_row + group * B_group + n * B_state, mask=in_n, other=0.0).to(tl.float32)
    weight_out = tl.load(C + row * C_row + group * C_group + n * C_state, mask=in_n, other=0.0).to(tl.float32)
    if TIED:
        step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
        if HAS_BIAS:
            step += tl.load(dt_bias + head * bias_head).to(tl.float32)
        if SOFTPLUS:
            step = _softplus(step)
        decay = tl.exp(step * tl.load(A + head * A_head).to(tl.float32))
        state = state * decay + (step * value)[:, None] * weight_in[None, :]
    else:
        step = tl.load(dt + row * dt_row + head * dt_head + p * dt_size, mask=in_p, other=0.0).to(tl.float32)
        if HAS_BIAS:
            step += tl.load(dt_bias + head * bias_head + p * bias_size, mask=in_p, other=0.0).to(tl.float32)
        if SOFTPLUS:
            step = _softplus(step)
        rate = tl.load(A + head * A_head + p[:, None] * A_size + n[None, :] * A_state, mask=inside, other=0.0)
        decay = tl.exp(step[:, None] * rate.to(tl.float32))
        state = state * decay + (step * value)[:, None] * weight_in[None, :]
    tl.store(pages + target + tile, state.to(pages.dtype.element_ty), mask=inside)

    result = tl.sum(state * weight_out[None, :], axis=1)
    if HAS_D:
        result += value * tl.load(D + head * D_head + p * D_size, mask=in_p, other=0.0).to(tl.float32)
    if HAS_Z:
        gate = tl.load(z + row * z_row + head * z_head + p * z_size, mask=in_p, other=0.0).to(tl.float32)
        result *= _silu(gate)
    tl.store(out + row * out_row + head * out_head + p * out_size, result.to(out.dtype.element_ty), mask=in_p)


@triton.jit
def _conv_step(  # type: ignore[no-untyped-def]
    pages, source_pages, source_places, target_pages, target_places, x, weight, bias, out,
    s_page, s_place, s_channel, s_input, x_row, x_channel, w_channel, w_input, b_channel, out_row,
    num_channels, num_inputs, width,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_L)
    in_c = c < num_channels
    source = tl.load(source_pages + row) * s_page + tl.load(source_places + row) * s_place
    target = tl.load(target_pages + row) * s_page + tl.load(target_places + row) * s_place
    before = in_c[:, None] & (at < num_inputs)[None, :]
    old = tl.load(pages + source + c[:, None] * s_channel + at[None, :] * s_input, mask=before, other=0.0)
    new = tl.load(x + row * x_row + c * x_channel, mask=in_c, other=0.0)
    inputs = tl.where((at == num_inputs)[None, :], new[:, None].to(old.dtype), old)
    tap = at - (num_inputs + 1 - width)
    taps = in_c[:, None] & ((tap >= 0) & (tap < width))[None, :]
    weights = tl.load(weight + c[:, None] * w_channel + tap[None, :] * w_input, mask=taps, other=0.0)
    # Every input moves to where another thread may still have to read one.
    tl.debug_barrier()
    moved = in_c[:, None] & ((at > 0) & (at <= num_inputs))[None, :]
    tl.store(pages + target + c[:, None] * s_channel + (at - 1)[None, :] * s_input, inputs, mask=moved)

    latest = new.to(tl.float32)
    exact = tl.where((at == num_inputs)[None, :], latest[:, None], old.to(tl.float32))
    result = tl.sum(exact * weights.to(tl.float32), axis=1)
    if HAS_BIAS:
        result += tl.load(bias + c * b_channel, mask=in_c, other=0.0).to(tl.float32)
    if SILU:
        result = _silu(result)
    tl.store(out + row * out_row + c, result.to(out.dtype.element_ty), mask=in_c)
