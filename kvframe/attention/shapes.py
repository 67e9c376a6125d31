"""Whether the parts of a step's metadata go together: what is checked of whatever a wrapper hands on."""

from __future__ import annotations

from kvframe.attention.metadata import Axis, CommonAttentionMetadata


def find_misfit(metadata: CommonAttentionMetadata) -> str | None:
    """Return which part of a step's metadata has another shape than the rest of it demands; None if all fit.

    Only shapes are looked at, so that nobody waits for a device. What values say is for the conformance kit to check.

    Args:
        metadata: The metadata, on any device.
    """
    num_reqs, num_tokens = metadata.num_reqs, len(metadata.slot_mapping)
    num_generating = len(metadata.generating_indices)
    for name, tensor, length in (
        ("query_start_loc", metadata.query_start_loc, num_reqs + 1),
        ("query_start_loc_cpu", metadata.query_start_loc_cpu, num_reqs + 1),
        ("seq_lens", metadata.seq_lens, num_reqs),
        ("seq_lens_cpu", metadata.seq_lens_cpu, num_reqs),
        ("slot_mapping", metadata.slot_mapping, num_tokens),
        ("generating_indices", metadata.generating_indices, num_generating),
        ("generating_indices_cpu", metadata.generating_indices_cpu, num_generating),
    ):
        if tensor.shape != (length,):
            return f"{name} has the shape {list(tensor.shape)}, not [{length}]"
    if metadata.block_table.ndim != 2 or len(metadata.block_table) != num_reqs:
        return f"block_table has the shape {list(metadata.block_table.shape)}, not [{num_reqs}, …]"
    for name, extension in metadata.extensions.items():
        expected = {Axis.REQUEST: num_reqs, Axis.TOKEN: num_tokens}.get(extension.axis)
        if expected is not None and extension.values.shape[:1] != (expected,):
            return f"the extension {name} has the shape {list(extension.values.shape)}, not [{expected}, …]"
    return None
