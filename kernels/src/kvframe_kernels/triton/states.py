"""One token's step of selective state spaces (Mamba, Mamba-2) on states in pages.

A step reads each row's state from one page and writes it to another page, or the same one; it moves no more bytes than
that. Kernels over dense states need a gather before and a scatter after, and so move three times as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.places import Place, places, silu, strides

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
    """Compute one token's step of each row's state: ``h = exp(dt A) h + dt B x``, ``y = C h + D x``, with a gate.

    That is equation 2 of Mamba (arXiv 2312.00752) and of Mamba-2 (arXiv 2405.21060), in float32 for all dtypes. The
    gate is ``silu(z)``. Mamba is one head whose ``head_size`` is the layer's width. The ``dt``, ``A`` and ``D`` of
    Mamba-2, which are equal for a whole head, are given expanded, with strides of 0, and are then read once. The tiling
    is that of ``selective_state_update`` in state-spaces/mamba; reading from pages is added.

    Args:
        pages: ``[num_block_ids, num_places, num_heads, head_size, state_size], device``; written to at ``target``.
        source: The place of each row's state before the token.
        target: The place of the state after it; all are different, and none is another row's source.
        x: ``[num_rows, num_heads, head_size], device``.
        dt: ``[num_rows, num_heads, head_size], device``.
        A: ``[num_heads, head_size, state_size], device``.
        B: ``[num_rows, num_groups, state_size], device``; ``num_heads // num_groups`` consecutive heads share one.
        C: ``[num_rows, num_groups, state_size], device``.
        D: ``[num_heads, head_size], device``; None for none.
        z: ``[num_rows, num_heads, head_size], device``; None for no gate.
        dt_bias: ``[num_heads, head_size], device``: added to ``dt``; None for none.
        softplus: Whether ``dt`` goes through a softplus.

    Returns:
        ``[num_rows, num_heads, head_size], device``, in the dtype of ``x``.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        selective_state_launch(pages, source, target, x, dt, A, B, C, D, z, dt_bias, out, softplus).run()
    return out


def selective_state_launch(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor,
    softplus: bool,
) -> Launch:
    """Return the launch of ``selective_state_update``, which writes to ``out``."""
    num_rows, num_heads, head_size = x.shape
    state_size = pages.shape[-1]
    block_n = triton.next_power_of_2(state_size)
    block_p = min(triton.next_power_of_2(head_size), max(1, _TILE // block_n))
    per_element = (dt.stride(2), A.stride(1), A.stride(2), 0 if dt_bias is None else dt_bias.stride(1))
    arguments = {
        "pages": pages,
        **places(source, target),
        "x": x,
        "dt": dt,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "out": out,
        **strides(pages, "s_page", "s_place", "s_head", "s_size", "s_state"),
        **strides(x, "x_row", "x_head", "x_size"),
        **strides(dt, "dt_row", "dt_head", "dt_size"),
        **strides(A, "A_head", "A_size", "A_state"),
        **strides(B, "B_row", "B_group", "B_state"),
        **strides(C, "C_row", "C_group", "C_state"),
        **strides(D, "D_head", "D_size"),
        **strides(z, "z_row", "z_head", "z_size"),
        **strides(dt_bias, "bias_head", "bias_size"),
        **strides(out, "out_row", "out_head", "out_size"),
        "heads_per_group": num_heads // B.shape[1],
        "head_size": head_size,
        "state_size": state_size,
        "HAS_D": D is not None,
        "HAS_Z": z is not None,
        "HAS_BIAS": dt_bias is not None,
        "SOFTPLUS": softplus,
        "TIED": head_size > 1 and not any(per_element),
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
    }
    return Launch(_selective_step, (triton.cdiv(head_size, block_p), num_heads, num_rows), arguments)


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
    """Compute ``selective_state_update`` in plain torch."""
    heads_per_group = x.shape[1] // B.shape[1]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = functional.softplus(step)[..., None] if softplus else step[..., None]
    weight_in, weight_out = (weights.float().repeat_interleave(heads_per_group, 1)[:, :, None] for weights in (B, C))
    state = (step * A.float()).exp() * pages[source].float() + step * weight_in * x.float()[..., None]
    pages[target] = state.to(pages.dtype)
    out = (state * weight_out).sum(-1)
    if D is not None:
        out = out + D.float() * x.float()
    if z is not None:
        out = out * functional.silu(z.float())
    return out.to(x.dtype)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    # log(1 + e), with the rounding error of 1 + e corrected (W. Kahan); a plain log would lose small steps completely.
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


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
    # Distances between pages may need more than 32 bits.
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
        result *= silu(gate)
    tl.store(out + row * out_row + head * out_head + p * out_size, result.to(out.dtype.element_ty), mask=in_p)
