"""The connector's part in vLLM's scheduler: which prefixes requests continue from, what is loaded, what is saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from time import monotonic
from typing import Any

import attrs
from kvframe_stores import PageRecords
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from kvframe_vllm.transfer.lookup import Lookup, StoreLookups
from kvframe_vllm.transfer.messages import Load, Pages, StepTransfers
from kvframe_vllm.transfer.setup import Transfer

LEAST_WAIT = 0.25
"""Seconds that a request waits for the stores' answer, and for its pages at least, before it is computed."""

SECONDS_PER_TOKEN = 1e-3
"""How much longer it waits for its pages, for each token that they save."""

MAX_KNOWN = 1 << 20
"""Keys of pages that are remembered as stored."""

CLOSE_SECONDS = 5.0
_LOG = logging.getLogger("vllm.kvframe")


@attrs.define(eq=False)
class RequestState:
    """What is known of a request.

    Attributes:
        request: vLLM's request.
        may_load: Whether the stores are asked for it; not again after they failed it.
        lookup: What they were asked; None before, and after the request got its blocks.
        num_local: The tokens of its prefix that vLLM has, when it was last asked for.
        loading: What is being loaded.
        num_saved: Per group, the blocks that were looked at for saving.
    """

    request: Any
    may_load: bool
    lookup: Lookup | None = None
    num_local: int = 0
    loading: Load | None = None
    num_saved: list[int] = attrs.field(factory=list)


class PrefixScheduler:
    """Decides what the workers move.

    The blocks that a prefix needs are those that its spec's live range says, in every group. vLLM has all of them up to
    its own hit. So the blocks after it are looked up, the longest prefix is taken whose live blocks are there in every
    group, and these blocks are loaded.
    """

    def __init__(self, transfer: Transfer, *, loads: bool, saves: bool) -> None:
        """Begin without stores, until ``connect``.

        Args:
            transfer: The stores and the groups.
            loads: Whether this engine takes pages from the stores.
            saves: Whether it gives them pages.
        """
        self._transfer, self._loads_pages, self._saves_pages = transfer, loads, saves
        self._groups = transfer.groups
        self._step = math.lcm(*(group.block_size for group in self._groups))
        self._requests: dict[str, RequestState] = {}
        self._lookups: StoreLookups | None = None
        self._loads: list[Load] = []
        # The pages that the stores have, as far as this engine knows; the oldest first.
        self._known: dict[tuple[int, bytes], None] = {}
        self._is_on = True
        self._hash_block_size = self._null_block = 0

    def bind(self, block_pool: Any) -> None:
        """Learn of vLLM's block pool in how many tokens it hashes, and which block stands for none."""
        self._hash_block_size, self._null_block = block_pool.hash_block_size, block_pool.null_block.block_id

    def connect(self, origins: Sequence[tuple[str, ...]]) -> None:
        """Begin to ask the stores, for the pages of ranks with these origins."""
        if self._loads_pages:
            records = [PageRecords(self._transfer.secret, texts) for texts in origins]
            self._lookups = StoreLookups(self._transfer.stores, records)

    def add(self, request: Any) -> None:
        """Take a new request.

        vLLM's hashes name adapters by their names, and inputs by names that a caller may choose. So the pages of such a
        request are valid for this engine only.
        """
        if request.lora_request is None and not request.mm_features and request.prompt_embeds is None:
            self._requests[request.request_id] = RequestState(
                request, may_load=self._loads_pages, num_saved=[0] * len(self._groups)
            )

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    # --- what is loaded -----------------------------------------------------------------------------------------------

    def count_found(self, request: Any, num_local: int) -> int | None:
        """Return how many tokens after vLLM's own hit a request can continue from; None while the stores are asked."""
        state = self._requests.get(request.request_id)
        most = (request.num_tokens - 1) // self._step * self._step
        if state is None or not state.may_load or self._lookups is None or not self._is_on or most <= num_local:
            return 0
        if state.lookup is None:
            state.lookup = Lookup(self._keys_after(request, num_local, most), monotonic() + LEAST_WAIT)
            self._lookups.put(state.lookup)
        if not state.lookup.is_over:
            return None
        if not state.lookup.is_done:
            return 0
        self._note_known(state.lookup)
        state.num_local = num_local
        return max(0, self._longest(state.lookup, num_local, most) - num_local)

    def take_blocks(self, request: Any, block_ids: Sequence[Sequence[int]], num_found: int) -> None:
        """Load the pages of ``num_found`` tokens into the blocks that a request got for them."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.lookup = None
        if not num_found:
            return
        num_tokens = state.num_local + num_found
        groups = []
        for group, ids in zip(self._groups, block_ids, strict=True):
            first, hashes = state.num_local // group.block_size, self._hashes(request, group.block_size)
            needed = [block for block in group.live_blocks.at(num_tokens) if block >= first]
            groups.append(Pages([hashes[block] for block in needed], [ids[block] for block in needed]))
        state.loading = Load(request.request_id, groups, LEAST_WAIT + num_found * SECONDS_PER_TOKEN)
        self._loads.append(state.loading)

    def note_failed(self, request_ids: set[str]) -> None:
        """Compute requests whose pages did not arrive; what they compute is saved again."""
        for state in (self._requests[name] for name in request_ids if name in self._requests):
            state.may_load = False
            if state.loading is not None:
                for group, pages in enumerate(state.loading.groups):
                    for key in pages.keys:
                        self._known.pop((group, key), None)

    def _keys_after(self, request: Any, num_local: int, most: int) -> list[dict[int, bytes]]:
        keys = []
        for group in self._groups:
            hashes = self._hashes(request, group.block_size)
            blocks = range(num_local // group.block_size, min(most // group.block_size, len(hashes)))
            keys.append({block: hashes[block] for block in blocks})
        return keys

    def _longest(self, lookup: Lookup, num_local: int, most: int) -> int:
        """Return the tokens of the longest prefix whose live blocks are in vLLM or in stores, in every group."""
        num_tokens, before = most, -1
        while num_tokens != before:
            before = num_tokens
            for group, present in zip(self._groups, lookup.present, strict=True):
                num_in_vllm = num_local // group.block_size

                def find(block: int, num: int = num_in_vllm, present: set[int] = present) -> bool | None:
                    return True if block < num or block in present else None

                hit = group.live_blocks.longest_hit(find, num_tokens, self._step)
                num_tokens = len(hit) * group.block_size
        return num_tokens

    def _note_known(self, lookup: Lookup) -> None:
        """Remember which pages need not be saved, and which have to be saved again."""
        is_one = len(self._transfer.stores) == 1  # with more, one of them may lack what another has
        for group, (keys, present) in enumerate(zip(lookup.keys, lookup.present, strict=True)):
            for block, key in keys.items():
                if block not in present:
                    self._known.pop((group, key), None)
                elif is_one:
                    self._known[group, key] = None

    # --- what is saved ------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepTransfers:
        """Return what the workers move in the step that vLLM has scheduled."""
        loads, self._loads = self._loads, []
        saves = [Pages() for _ in self._groups]
        if self._saves_pages and self._is_on:
            for request_id, num_scheduled in output.num_scheduled_tokens.items():
                if (state := self._requests.get(request_id)) is not None:
                    self._plan_saves(state, num_scheduled, output.kv_connector_block_state, saves)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return StepTransfers(loads, saves)

    def _plan_saves(self, state: RequestState, num_scheduled: int, blocks: Any, saves: Sequence[Pages]) -> None:
        """Save the blocks of known tokens that are full after a step and that the stores lack."""
        request = state.request
        num_tokens = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        block_ids = None
        for index, group in enumerate(self._groups):
            hashes = self._hashes(request, group.block_size)
            num_full = min(num_tokens // group.block_size, len(hashes))
            if num_full <= state.num_saved[index]:
                continue
            block_ids = blocks.get_block_ids(request.request_id) if block_ids is None else block_ids
            for block in range(state.num_saved[index], num_full):
                key, block_id = hashes[block], block_ids[index][block]
                if block_id != self._null_block and (index, key) not in self._known:
                    saves[index].keys.append(key)
                    saves[index].block_ids.append(block_id)
                    self._known[index, key] = None
            state.num_saved[index] = num_full

    def _hashes(self, request: Any, block_size: int) -> Any:
        return resolve_block_hashes(request.block_hashes, self._hash_block_size, block_size)

    # --- the end ------------------------------------------------------------------------------------------------------

    def switch_off(self) -> None:
        """Use the stores no longer: vLLM may have other weights than those by which pages are named."""
        if self._is_on:
            _LOG.warning("vLLM cleared its caches, and its weights may differ now: page stores are no longer used")
        self._is_on = False

    def close(self) -> None:
        """End the thread."""
        if self._lookups is not None:
            self._lookups.close(CLOSE_SECONDS)
            self._lookups = None
