"""One token's step of the short convolutions before state layers, on inputs that are stored in pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.places import Place, places, strides
from kvframe_kernels.triton.places import silu as gated


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
    """Compute one token's step of a short causal convolution over each channel, and shift its inputs by one.

    The algorithm is that of ``causal_conv1d_update`` in Dao-AILab/causal-conv1d; reading from pages is added.

    Args:
        pages: ``[num_block_ids, num_places, num_channels, num_inputs], device``: the last inputs, the latest last;
            written to at ``target``.
        source: The place of each row's inputs before the token.
        target: The place of each row's inputs after it; all are different, and none is another row's source.
        x: ``[num_rows, num_channels], device``: the token's input.
        weight: ``[num_channels, width], device``, with ``width <= num_inputs + 1``.
        bias: ``[num_channels], device``; None for none.
        silu: Whether the output goes through a SiLU.

    Returns:
        ``[num_rows, num_channels], device``, in the dtype of ``x``.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        conv_launch(pages, source, target, x, weight, bias, out, silu).run()
    return out


def conv_launch(
    pages: torch.Tensor,
    source: Place,
    target: Place,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    silu: bool,
) -> Launch:
    """Return the launch of ``conv_update``, which writes to ``out``."""
    num_rows, num_channels = x.shape
    num_inputs, width = pages.shape[-1], weight.shape[-1]
    block_l = triton.next_power_of_2(num_inputs + 1)
    block_c = min(triton.next_power_of_2(num_channels), max(1, 1024 // block_l))
    arguments = {
        "pages": pages,
        **places(source, target),
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        **strides(pages, "s_page", "s_place", "s_channel", "s_input"),
        **strides(x, "x_row", "x_channel"),
        **strides(weight, "w_channel", "w_input"),
        **strides(bias, "b_channel"),
        "out_row": out.stride(0),
        "num_channels": num_channels,
        "num_inputs": num_inputs,
        "width": width,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "BLOCK_C": block_c,
        "BLOCK_L": block_l,
    }
    return Launch(_conv_step, (triton.cdiv(num_channels, block_c), num_rows), arguments)


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
    """Compute ``conv_update`` in plain torch."""
    inputs = torch.cat([pages[source].float(), x.float()[..., None]], dim=-1)
    pages[target] = inputs[..., 1:].to(pages.dtype)
    out = (inputs[..., -weight.shape[-1] :] * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    return (functional.silu(out) if silu else out).to(x.dtype)


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
    # An input is written to a place that another thread may still have to read.
    tl.debug_barrier()
    moved = in_c[:, None] & ((at > 0) & (at <= num_inputs))[None, :]
    tl.store(pages + target + c[:, None] * s_channel + (at - 1)[None, :] * s_input, inputs, mask=moved)

    latest = new.to(tl.float32)
    exact = tl.where((at == num_inputs)[None, :], latest[:, None], old.to(tl.float32))
    result = tl.sum(exact * weights.to(tl.float32), axis=1)
    if HAS_BIAS:
        result += tl.load(bias + c * b_channel, mask=in_c, other=0.0).to(tl.float32)
    if SILU:
        result = gated(result)
    tl.store(out + row * out_row + c, result.to(out.dtype.element_ty), mask=in_c)
