"""The connector's part in a worker of vLLM: moves pages between the worker's memory and the page stores."""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kvframe_stores import PageRecords, PageWriter, SealedStore, StoreCounts

from kvframe_vllm.names import installed
from kvframe_vllm.transfer.loader import PageLoader
from kvframe_vllm.transfer.messages import Load, Pages
from kvframe_vllm.transfer.pages import GroupPages, group_pages, layout_of
from kvframe_vllm.transfer.setup import Transfer

CLOSE_SECONDS = 5.0
"""How long a worker that ends waits for its stores."""

BYTES_AT_ONCE = 16 << 20
"""Bytes of pages that are copied together."""

_LOG = logging.getLogger("vllm.kvframe")


class PageMover:
    """Loads and saves the pages of one worker. vLLM's thread calls every method, and alone touches its memory.

    Attributes:
        texts: The texts by which these pages are told from others.
        counts: What is counted of each store.
    """

    def __init__(
        self, transfer: Transfer, caches: Mapping[str, torch.Tensor], num_blocks: int, origin: Sequence[str]
    ) -> None:
        """Start the threads that use the stores.

        Args:
            transfer: The stores and the groups.
            caches: The cache of each layer, ``[num_blocks, ...]``, device.
            num_blocks: The number of blocks.
            origin: Texts that tell this worker's model and rank from others.
        """
        self._pages: list[GroupPages] = group_pages(transfer, caches, num_blocks)
        self.texts = (*origin, layout_of(transfer, caches))
        self.counts = {store.name: StoreCounts() for store in transfer.stores}
        self._records = PageRecords(transfer.secret, self.texts)
        self._writer = PageWriter([SealedStore(store, self.counts[store.name]) for store in transfer.stores])
        stores = [SealedStore(store, self.counts[store.name]) for store in transfer.stores]
        self._loader = PageLoader(stores, self._records, [pages.page_bytes for pages in self._pages])
        self._is_open = True
        # vLLM does not end a worker that runs in the user's process, and threads do not outlive it.
        atexit.register(self.close)
        _LOG.info("prefixes are kept in page stores: %s", ", ".join(self.counts))

    def begin(self, loads: Sequence[Load]) -> None:
        """Begin to read pages."""
        for load in loads:
            self._loader.put(load)

    def finish(self) -> tuple[set[str], set[str]]:
        """Write the pages that arrived to vLLM's memory, and return the requests whose loads ended, and failed."""
        ended, failed = set(), set()
        for load, pages in self._loader.take_ended():
            ended.add(load.request_id)
            if pages is None:
                failed.add(load.request_id)
                continue
            for group, wanted, read in zip(self._pages, load.groups, pages, strict=True):
                if wanted.block_ids:
                    group.write(wanted.block_ids, torch.from_numpy(read))
        return ended, failed

    def save(self, saves: Sequence[Pages]) -> None:
        """Copy pages, and queue them for the stores; drop them if too many wait."""
        for index, (group, pages) in enumerate(zip(self._pages, saves, strict=True)):
            at_once = max(1, BYTES_AT_ONCE // group.page_bytes)
            for start in range(0, len(pages.keys), at_once):
                keys, block_ids = pages.keys[start : start + at_once], pages.block_ids[start : start + at_once]
                if self._writer.free_bytes:
                    self._writer.put(self._records, index, keys, group.read(block_ids))
                else:
                    self._writer.drop(len(keys))

    def close(self) -> None:
        """Write what is queued, for some seconds at most, and close the stores."""
        if self._is_open:
            self._is_open = False
            self._loader.close(CLOSE_SECONDS)
            self._writer.close(CLOSE_SECONDS)
            atexit.unregister(self.close)


def origin_of(config: Any, weights: Sequence[str], rank: str) -> list[str]:
    """Return the texts that tell a worker's model from others.

    Args:
        config: vLLM's configuration.
        weights: The digests of the models that were loaded.
        rank: The worker's rank, and the number of ranks.
    """
    described = config.model_config.hf_config.to_dict()
    public = {key: value for key, value in described.items() if not key.startswith("_")}
    return [
        f"vllm: {installed()}",
        f"model: {json.dumps(public, sort_keys=True, default=str)}",
        f"dtype: {config.model_config.dtype}",
        f"weights: {', '.join(weights)}",
        f"rank: {rank}",
    ]
