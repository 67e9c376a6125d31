"""Checks that the parts of a step's metadata fit together: types, shapes, dtypes and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvframe.contract.metadata import (
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
)

if TYPE_CHECKING:
    import torch

_NUMBERS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_size", "num_generating")
_READ_BY_KERNELS = {SEQ_STARTS: Axis.REQUEST, RANGE_ENDS: Axis.TOKEN}
"""The extensions that kernels read, ``int32`` of one dimension, with what this stands for."""
_SWITCHES = ("causal", "static_shapes", "exact_lens")


def find_misfit(metadata: CommonAttentionMetadata, source: CommonAttentionMetadata | None = None) -> str | None:
    """Return which part of a step's metadata does not fit the rest of it; None if all fit.

    Only types, shapes, dtypes and devices are checked, so the check does not wait for the device.

    Args:
        metadata: The metadata, on any device.
        source: The input of the wrapper that made it, whose device and block size it must have; None if no wrapper did.
    """
    import torch  # loaded by now, and not by a plugin's manifest that imports this module

    for name in _NUMBERS:
        if type(getattr(metadata, name)) is not int:
            return f"{name} is {getattr(metadata, name)!r}, not an int"
    for name in _SWITCHES:
        if type(getattr(metadata, name)) is not bool:
            return f"{name} is {getattr(metadata, name)!r}, not a bool"
    slots, generating = metadata.slot_mapping, metadata.generating_indices
    is_known = generating is not None or metadata.generating_indices_cpu is not None
    if not is_known and metadata.num_generating != metadata.num_actual_tokens:
        return f"num_generating is {metadata.num_generating}, and no generating_indices say which tokens generate"
    for name, tensor in (("slot_mapping", slots), ("generating_indices", generating if is_known else slots)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1:
            return f"{name} is {_in_words(tensor)}, not a tensor of one dimension"
    device, cpu = (metadata if source is None else source).slot_mapping.device, torch.device("cpu")
    num_reqs, num_tokens = metadata.num_reqs, slots.shape[0]
    expected = [
        ("query_start_loc", num_reqs + 1, torch.int32, device),
        ("query_start_loc_cpu", num_reqs + 1, torch.int32, cpu),
        ("seq_lens", num_reqs, torch.int32, device),
        ("seq_lens_cpu", num_reqs, torch.int32, cpu),
        ("slot_mapping", num_tokens, torch.int64, device),
    ]
    if generating is not None:
        expected += [
            ("generating_indices", generating.shape[0], torch.int64, device),
            ("generating_indices_cpu", generating.shape[0], torch.int64, cpu),
        ]
    for name, length, dtype, expected_device in expected:
        tensor = getattr(metadata, name)
        if problem := _tensor_misfit(name, tensor, dtype, expected_device):
            return problem
        if tensor.shape != (length,):
            return f"{name} has the shape {list(tensor.shape)}, not [{length}]"
    table = metadata.block_table
    if problem := _tensor_misfit("block_table", table, torch.int32, device):
        return problem
    if table.ndim != 2 or table.shape[0] != num_reqs or not table.shape[1]:
        return f"block_table has the shape {list(table.shape)}, not [{num_reqs}, max_blocks]"
    if source is not None and metadata.block_size != source.block_size:
        return f"block_size is {metadata.block_size}, and a page of the cache group holds {source.block_size} tokens"
    if not isinstance(metadata.extensions, Mapping):
        return f"extensions is {_in_words(metadata.extensions)}, not a mapping"
    rows = {Axis.REQUEST: num_reqs, Axis.TOKEN: num_tokens}
    for name, extension in metadata.extensions.items():
        if problem := _extension_misfit(name, extension, rows, device, cpu):
            return problem
    return None


def _extension_misfit(
    name: str, extension: Any, rows: Mapping[Axis, int], device: torch.device, cpu: torch.device
) -> str | None:
    import torch

    label = f"the extension {name!r}"
    if not isinstance(extension, Extension):
        return f"{label} is {_in_words(extension)}, not an Extension"
    axis = _READ_BY_KERNELS.get(name)
    values, values_cpu, expected = extension.values, extension.values_cpu, rows.get(extension.axis)
    if problem := _tensor_misfit(label, values, None if axis is None else torch.int32, device):
        return problem
    if axis is not None and (extension.axis is not axis or values.ndim != 1):
        return f"{label} has {values.ndim} dimensions, the first for each {extension.axis}, not one for each {axis}"
    if expected is not None and values.shape[:1] != (expected,):
        return f"{label} has the shape {list(values.shape)}, not [{expected}, …]"
    if values_cpu is None:
        return None
    if problem := _tensor_misfit(f"the host copy of {label}", values_cpu, values.dtype, cpu):
        return problem
    if values_cpu.shape != values.shape:
        return f"the host copy of {label} has the shape {list(values_cpu.shape)}, not {list(values.shape)}"
    return None


def _tensor_misfit(name: str, tensor: Any, dtype: torch.dtype | None, device: torch.device) -> str | None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"{name} is {_in_words(tensor)}, not a tensor"
    if dtype is not None and tensor.dtype is not dtype:
        return f"{name} has the dtype {tensor.dtype}, not {dtype}"
    return None if tensor.device == device else f"{name} lies on {tensor.device}, not on {device}"


def _in_words(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of the shape {list(value.shape)}"
    return f"an object of the type {type(value).__name__!r}"
