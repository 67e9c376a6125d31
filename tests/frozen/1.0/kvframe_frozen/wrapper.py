"""A wrapper that leaves out the requests without new tokens. Replace ``__call__`` by your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
import numpy as np
import torch

from kvframe.contract import (
    CommonAttentionMetadata,
    FieldUse,
    MetadataWrapper,
)


@attrs.frozen(kw_only=True)
class FrozenWrapper(MetadataWrapper):
    """Leaves out the requests without new tokens."""

    name: ClassVar[str] = "frozen_wrapper"

    # What happens to each field; one that a later version adds is refused, and never lost.
    fields: ClassVar[Mapping[str, FieldUse]] = {
        "num_reqs": FieldUse.RESET,
        "num_actual_tokens": FieldUse.CARRY,
        "max_query_len": FieldUse.CARRY,
        "max_seq_len": FieldUse.CARRY,
        "query_start_loc": FieldUse.RESET,
        "query_start_loc_cpu": FieldUse.RESET,
        "seq_lens": FieldUse.SLICE,
        "seq_lens_cpu": FieldUse.SLICE,
        "block_table": FieldUse.SLICE,
        "slot_mapping": FieldUse.CARRY,
        "block_size": FieldUse.CARRY,
        "num_generating": FieldUse.CARRY,
        "generating_indices": FieldUse.CARRY,
        "generating_indices_cpu": FieldUse.CARRY,
        "causal": FieldUse.CARRY,
        "exact_lens": FieldUse.CARRY,
        # How many requests are left depends on the batch, so a captured graph cannot hold them.
        "static_shapes": FieldUse.REJECT,
    }
    extensions: ClassVar[Mapping[str, FieldUse]] = {
        "lengths": FieldUse.SLICE,
    }

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch of the other requests. It waits for no device, and loops over no requests."""
        starts = metadata.query_start_loc_cpu.numpy()
        busy = np.flatnonzero(starts[1:] > starts[:-1])
        if len(busy) in (0, metadata.num_reqs):
            return metadata
        starts_cpu = torch.from_numpy(np.append(starts[busy], starts[-1:]))
        rows_cpu = torch.from_numpy(busy)
        device = metadata.seq_lens.device
        rows = rows_cpu.to(device, non_blocking=True)
        return attrs.evolve(
            metadata,
            num_reqs=len(busy),
            query_start_loc=starts_cpu.to(device, non_blocking=True),
            query_start_loc_cpu=starts_cpu,
            seq_lens=metadata.seq_lens.index_select(0, rows),
            seq_lens_cpu=metadata.seq_lens_cpu.index_select(0, rows_cpu),
            block_table=metadata.block_table.index_select(0, rows),
            extensions=self.pass_extensions(metadata, requests=rows, requests_cpu=rows_cpu),
        )
