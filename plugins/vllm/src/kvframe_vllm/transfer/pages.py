"""The bytes of pages in vLLM's memory: a page is one block of all layers of a group, one after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvframe.contract import BackendError
from kvframe_vllm.transfer.setup import Transfer


class GroupPages:
    """The pages of one group.

    Attributes:
        page_bytes: The size of a page.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the cache of each layer, ``[num_blocks, ...]``, device."""
        self._tensors = tensors
        self._sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        self.page_bytes = sum(self._sizes)

    def read(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of pages, ``[n, page_bytes], uint8``, CPU."""
        num, parts = len(block_ids), []
        for tensor in self._tensors:
            blocks = tensor[torch.tensor(block_ids, device=tensor.device)].contiguous()
            parts.append(blocks.reshape(num, -1).view(torch.uint8))
        return torch.cat(parts, dim=1).cpu()

    def write(self, block_ids: Sequence[int], pages: torch.Tensor) -> None:
        """Write pages, ``[n, page_bytes], uint8``, CPU."""
        parts = pages.split(self._sizes, dim=1)
        for tensor, part in zip(self._tensors, parts, strict=True):
            values = part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            blocks = values.reshape(len(block_ids), *tensor.shape[1:]).to(tensor.device)
            tensor[torch.tensor(block_ids, device=tensor.device)] = blocks


def group_pages(transfer: Transfer, caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[GroupPages]:
    """Return the pages of each group.

    Raises:
        BackendError: vLLM divides a layer's blocks further, so that a block is not one entry of its cache.
    """
    for name in (name for names in transfer.layers for name in names):
        if len(caches[name]) != num_blocks:
            raise BackendError(
                f"layer {name!r} has {len(caches[name])} entries for {num_blocks} blocks, and KVFrameConnector reads "
                "blocks that are one entry each; start vLLM with another --block-size"
            )
    return [GroupPages([caches[name] for name in names]) for names in transfer.layers]


def layout_of(transfer: Transfer, caches: Mapping[str, torch.Tensor]) -> str:
    """Return a text that is equal for caches whose pages have the same bytes for the same values."""
    groups: list[dict[str, Any]] = [
        {
            "spec": f"{group.inner.kind}: {group.inner!r}",
            "layers": {name: [str(caches[name].dtype), *caches[name].shape[1:]] for name in names},
        }
        for group, names in zip(transfer.groups, transfer.layers, strict=True)
    ]
    return "layout: " + json.dumps(groups)
