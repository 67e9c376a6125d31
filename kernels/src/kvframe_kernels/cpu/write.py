"""Writing keys and values into pages on a CPU, by the compiled kernels, in every format."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from kvframe_kernels.cpu.attention import DTYPES, _Plane, _plane
from kvframe_kernels.cpu.build import load_library

FORMATS: Mapping[str, int] = {
    "plain": 0,
    "fp8_tensor": 1,
    "fp8_token_head": 2,
    "int8_token_head": 3,
    "int4_token_head": 4,
}
"""The formats that the kernels write, with their numbers in the kernels."""


class _Side(ctypes.Structure):
    """``Side`` of ``src/write.h``."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride", "size", "dtype")),
        *((name, _Plane) for name in ("codes", "scales", "mins")),
        ("scale", ctypes.c_double),
    ]


class _Write(ctypes.Structure):
    """``Write`` of ``src/write.h``, field by field."""

    _fields_ = [
        ("key", _Side),
        ("value", _Side),
        *((name, ctypes.c_void_p) for name in ("blocks", "offsets")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "format", "num_threads")),
    ]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: Mapping[str, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
    format_name: str = "plain",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new tokens' keys and values, bit for bit as the format's own torch code does.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``, host; a dtype that is not in ``DTYPES`` is converted to float32.
        value: ``[num_tokens, num_kv_heads, head_size_v]``, host.
        kv_cache: The layer's state tensors by name, ``[num_block_ids, block_size, num_kv_heads, …]``, host, with any
            strides, except that the last of ``k`` and ``v`` is 1; written to.
        slots: Block id and offset of each token, ``[num_tokens], int64``, both on the host. If several tokens have one
            slot, as padded tokens do, any of them is stored.
        format_name: The format, of ``FORMATS``.
        k_scale: For ``fp8_tensor``, the factor by which stored keys are multiplied when they are read.
        v_scale: Likewise for values.

    Raises:
        BuildError: The kernels cannot be built on this machine.
        ValueError: The elements of a stored vector are not adjacent, or the kernels do not write their dtype.
    """
    blocks, offsets = (part.contiguous() for part in slots)
    sources = [
        _source(vectors, kv_cache[side].dtype if format_name == "plain" else None)
        for side, vectors in (("k", key), ("v", value))
    ]
    write = _Write(
        key=_side("k", sources[0], kv_cache, k_scale),
        value=_side("v", sources[1], kv_cache, v_scale),
        blocks=blocks.data_ptr(),
        offsets=offsets.data_ptr(),
        num_tokens=key.shape[0],
        num_heads=key.shape[1],
        format=FORMATS[format_name],
        num_threads=torch.get_num_threads(),
    )
    load_library().kvframe_write(ctypes.byref(write))


def _source(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the tensor to read: in the stored dtype if nothing is encoded, otherwise in one that the kernels read."""
    if dtype is None:
        dtype = tensor.dtype if tensor.dtype in DTYPES else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"the pages are {dtype}; in the plain format the kernels write {', '.join(map(str, DTYPES))}")
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _side(side: str, source: torch.Tensor, kv_cache: Mapping[str, torch.Tensor], scale: float) -> _Side:
    codes = kv_cache[side]
    if codes.stride(-1) != 1 and codes.shape[-1] > 1:
        raise ValueError(f"elements of {side} must be adjacent in its pages, not {codes.stride(-1)} apart")
    return _Side(
        source=source.data_ptr(),
        token_stride=source.stride(0),
        head_stride=source.stride(1),
        size=source.shape[-1],
        dtype=DTYPES[source.dtype],
        codes=_plane(codes),
        scales=_plane(kv_cache.get(f"{side}_scale")),
        mins=_plane(kv_cache.get(f"{side}_min")),
        scale=scale,
    )
