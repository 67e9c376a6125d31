"""Draws layers and steps at random from all that the contract lets through, and a host with no byte to spare.

``draw_case`` returns a case of the conformance kit. So the kit runs the backend on it and compares the result with the
reference. Its memory without live state holds NaN, and kernels that are built with a sanitizer report what they read
or write beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from kvframe_testing.case import Case, Request
from kvframe_testing.grid import SCALE, chain_refusals, in_format, make_layer, share_cache, usual_dtypes
from kvframe_testing.hosts import KVFRAME, LAYOUTS, Host, Memory, OtherHost
from kvframe_testing.state import KEYS_AND_VALUES, StateForm, form_of

from kvframe.cache.manager import KVCacheManager
from kvframe.contract import AttentionBackend, Capabilities, KVFormat, LayerSpec, SpecError
from kvframe.contract.formats import STATE_ALIGNMENT_BYTES, align_up
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.selection.choice import WrapperChain
from kvframe.selection.refusals import find_not_causal, find_refusals

MOST_ITEMS = 60_000
"""Scores of a case, times its heads: what the reference computes in about a tenth of a second."""


@attrs.frozen(kw_only=True)
class Sizes:
    """The largest sizes to draw.

    Attributes:
        head: Elements of a head.
        kv_heads: KV heads.
        group: Query heads of a KV head.
        requests: Requests of a step.
        new: New tokens of a request.
        computed: Tokens of a request that are in the cache.
    """

    head: int = 300
    kv_heads: int = 6
    group: int = 12
    requests: int = 9
    new: int = 90
    computed: int = 400


USUAL = Sizes()
SMALL = Sizes(head=40, kv_heads=3, group=4, requests=3, new=9, computed=40)
"""For kernels that are interpreted."""


def draw_case(
    seed: int,
    backend_class: type[AttentionBackend],
    device: str = "cpu",
    formats: Sequence[KVFormat] = (),
    chain: WrapperChain = (),
    sizes: Sizes = USUAL,
) -> tuple[Case, Host]:
    """Return a case that a backend serves, and the host that it runs in; the same for the same seed.

    Args:
        seed: The seed.
        backend_class: The backend.
        device: Its device.
        formats: Formats other than the plain one, which some cases are stored in.
        chain: Wrappers that drop the tokens that do not generate, for some of the cases.
        sizes: The largest sizes.
    """
    rng = random.Random(seed)
    capabilities, form = backend_class.capabilities, form_of(backend_class)
    while True:
        layer = _draw_layer(rng, capabilities, form, sizes, formats)
        if layer is not None and not find_refusals(capabilities, layer, device):
            break
    requests, causal = _draw_requests(rng, layer, capabilities, sizes)
    wrappers: WrapperChain = ()
    shared = share_cache(layer)
    if rng.random() < 0.2 and chain and causal and not chain_refusals(chain, shared, capabilities, device):
        layer = shared
        requests = tuple(attrs.evolve(each, num_generating=rng.randint(0, each.num_new)) for each in requests)
        wrappers = chain
    case = Case(
        name=f"seed={seed}",
        layer=layer,
        requests=requests,
        causal=causal,
        num_padding=rng.choice((0, 0, 1, 7)),
        wrappers=wrappers,
        form=form,
    )
    return case, rng.choice((KVFRAME, TightHost(seed), TightHost(seed), OtherHost(rng.choice([*LAYOUTS]))))


def usual_case(backend_class: type[AttentionBackend]) -> Case:
    """Return a case of a decode and a prompt, with vectors that all kernels read as a whole."""
    form = form_of(backend_class)
    options: dict[str, Any] = {"head_size": 64} if form is KEYS_AND_VALUES else {}
    layer = make_layer(backend_class.capabilities, form, **options)
    return Case(name="usual", layer=layer, requests=(Request(40, 1), Request(0, 20)), form=form)


def traits_of(case: Case, host: Host) -> tuple[str, ...]:
    """Return words for the properties of a case; a record counts the cases of each word."""
    mask, query = case.spec.mask, case.query
    assert mask is not None
    optional = {
        "soft cap": query.soft_cap is not None,
        "learned sinks": query.has_sinks,
        "relative bias": query.relative_bias is not None,
        "ALiBi": query.alibi_slopes is not None,
        "chosen tokens": query.choice is not None and query.choice.unit == "tokens",
        "chosen blocks": query.choice is not None and query.choice.unit == "blocks",
        "keys of another sequence": case.is_cross,
        "hidden tokens": any(each.num_hidden for each in case.requests),
        "ranges": any(each.ranges for each in case.requests),
        "padding": case.num_padding > 0,
        "dropped tokens": bool(case.wrappers),
        "a batch that is not causal": not case.causal,
        "one request": len(case.requests) == 1,
        "decodes only": all(each.num_new == 1 for each in case.requests),
    }
    return (
        *(f"mask {feature}" for feature in sorted(mask.features)),
        f"dtype {str(case.stored_dtype).removeprefix('torch.')}",
        f"format {case.spec.kv_format.name}",
        f"host {type(host).__name__}",
        *(name for name, is_so in optional.items() if is_so),
    )


def _size(rng: random.Random, most: int, *usual: int) -> int:
    """Return a size from 1 to ``most``: often a small or a usual one, which is not more."""
    return rng.choice((rng.randint(1, most), rng.randint(1, min(8, most)), *(size for size in usual if size <= most)))


def _draw_layer(
    rng: random.Random, capabilities: Capabilities, form: StateForm, sizes: Sizes, formats: Sequence[KVFormat]
) -> LayerSpec | None:
    """Return a layer with any mask, scores, sizes and format; None if its parts do not go together."""
    kv_heads, group = _size(rng, sizes.kv_heads, 1, 2), _size(rng, sizes.group, 1, 4)
    if sizes is USUAL and rng.random() < 0.03:
        kv_heads, group = 1, rng.choice((40, 71, 300))
    head_size = _size(rng, sizes.head, 16, 32, 64, 128, 256)
    options: dict[str, Any] = {
        "num_heads": kv_heads * group,
        "block_size": _size(rng, 40, 1, 16, 32) * capabilities.block_size_multiple,
        "dtype": rng.choice(usual_dtypes(capabilities)),
        "scale": SCALE * math.sqrt(8 / head_size) * rng.choice((1, 1, 1, 0, -1)),
    }
    if form is KEYS_AND_VALUES:
        options |= {"num_kv_heads": kv_heads, "head_size": head_size}
        if rng.random() < 0.2:
            options["head_size_v"] = _size(rng, sizes.head)
    options |= rng.choice(
        (
            {},
            {"causal": False},
            {"causal": False, "window": _window(rng), "lookahead": _window(rng) - 1},
            {"window": _window(rng)},
            {"window": _window(rng), "num_sink_tokens": rng.choice((_size(rng, 50), _window(rng)))},
            {"chunk": _window(rng)},
        )
    )
    if rng.random() < 0.2:
        options["soft_cap"] = rng.choice((2.0, 0.5, 50.0))
    if rng.random() < 0.2:
        options["has_sinks"] = True
    if rng.random() < 0.15:
        buckets = _size(rng, 40) + 4
        both = rng.random() < 0.5
        options["relative_bias"] = {
            "num_buckets": buckets,
            "max_distance": buckets + rng.choice((1, 9, 200)),
            "bidirectional": both,
        }
    elif rng.random() < 0.15:
        options["alibi_slopes"] = tuple(rng.uniform(-0.2, 0.6) for _ in range(3))
    elif capabilities.choices and rng.random() < 0.2:
        options["choice"] = _draw_choice(rng, kv_heads if form is KEYS_AND_VALUES else 1)
    layer = make_layer(capabilities, form, **options)
    if formats and rng.random() < 0.4:
        try:
            return in_format(layer, rng.choice(formats))
        except SpecError:
            return None
    return layer


def _draw_choice(rng: random.Random, kv_heads: int) -> dict[str, int]:
    choosers = [number for number in range(1, kv_heads + 1) if kv_heads % number == 0]
    return {
        "max_chosen": _size(rng, 80, 1, 16),
        "block_size": rng.choice((1, _size(rng, 40))),
        "num_choosers": rng.choice(choosers),
    }


def _window(rng: random.Random) -> int:
    return rng.choice((1, 2, rng.randint(1, 60), rng.randint(1, 60), 2**31 - 1, 2**31, 2**40))


def _draw_requests(
    rng: random.Random, layer: LayerSpec, capabilities: Capabilities, sizes: Sizes
) -> tuple[tuple[Request, ...], bool]:
    """Return a step's requests, and whether the batch is causal."""
    assert layer.spec is not None
    assert layer.query is not None
    mask = layer.spec.mask
    assert mask is not None
    query = layer.query
    reads_own_tokens = any((query.relative_bias, query.alibi_slopes, query.choice))
    is_cross = mask.sees_all and not reads_own_tokens and rng.random() < 0.4
    both_ways = mask == type(mask)() and rng.random() < 0.1 and find_not_causal(capabilities) is None
    causal = not is_cross and not both_ways
    in_ranges = mask.causal and causal and "ranges" in capabilities.masks and rng.random() < 0.3
    hides = "seq_starts" in capabilities.extensions and rng.random() < 0.25
    size, kind = layer.spec.block_size, rng.choice(("any", "any", "decodes", "prompts"))
    requests: list[Request] = []
    items = 0
    for _ in range(_size(rng, sizes.requests)):
        num_new = 1 if kind == "decodes" else _size(rng, sizes.new, size, size + 1, 4, 5)
        computed = 0 if kind == "prompts" else rng.choice((0, _size(rng, sizes.computed, size, size - 1 or 1)))
        num_keys = rng.choice((0, _size(rng, sizes.computed, size))) if is_cross else None
        request = Request(0 if is_cross else computed, num_new, num_keys=num_keys)
        items += num_new * request.seq_len * layer.query.num_heads
        if items > MOST_ITEMS and requests:
            break
        changes: dict[str, Any] = {}
        if hides:
            changes["num_hidden"] = rng.randint(0, num_keys if num_keys is not None else computed)
        if in_ranges and num_new > 1:
            changes["ranges"] = _draw_ranges(rng, computed, computed + num_new)
        requests.append(attrs.evolve(request, **changes))
    return tuple(requests), causal


def _draw_ranges(rng: random.Random, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    ends = sorted(rng.sample(range(start, stop + 1), k=min(rng.choice((2, 2, 4)), stop - start + 1)))
    return tuple((ends[index], ends[index + 1]) for index in range(0, len(ends) - 1, 2))


class TightHost(OtherHost):
    """An other host whose memory ends with the last state of its last page, which a request owns.

    Its block table has a column for each block of the longest request, and no more. Queries, keys and values lie head
    by head, or have gaps between their rows.
    """

    def __init__(self, seed: int = 0) -> None:
        """Take a number that decides how rows lie."""
        super().__init__("tight")
        self._is_head_major = seed % 2 == 1

    def begin(self, case: Case, manager: KVCacheManager, device: torch.device) -> Memory:
        """Return memory for the null page and the pages that requests have, the state tensors one after the other."""
        ids = np.unique(manager.tables[0].ids)
        ids = ids[ids != 0]
        self._num_pages = 1 + len(ids)
        page_of = np.zeros(1 + ids.max(initial=0), dtype=np.int64)
        page_of[ids] = np.random.default_rng(len(ids)).permutation(np.arange(1, self._num_pages))
        self._page_of = torch.from_numpy(page_of).to(device)
        state = case.spec.state_tensors()
        sizes = [self._num_pages * each.num_bytes for each in state.values()]
        starts = np.cumsum([0, *(align_up(size, STATE_ALIGNMENT_BYTES) for size in sizes[:-1])]).tolist()
        pool = torch.empty(starts[-1] + sizes[-1], dtype=torch.uint8, device=device)
        views = {
            name: pool[start : start + size].view(getattr(torch, each.dtype)).view(self._num_pages, *each.shape)
            for (name, each), start, size in zip(state.items(), starts, sizes, strict=True)
        }
        return Memory(pool, {case.layer.name: views})

    def metadata(self, metadata: CommonAttentionMetadata, *, exact: bool) -> CommonAttentionMetadata:
        """Return metadata with its own pages, and exact lengths; entries after a last block name the last page.

        Upper bounds of lengths would need more columns.
        """
        width = metadata.block_table.shape[1]
        table = self._page_of[metadata.block_table.long()].to(metadata.block_table.dtype)
        num_blocks = -(-metadata.seq_lens.long() // metadata.block_size)
        is_stale = torch.arange(width, device=table.device) >= num_blocks[:, None]
        return attrs.evolve(
            metadata,
            block_table=table.masked_fill(is_stale, self._num_pages - 1),
            slot_mapping=self.slots(metadata.slot_mapping, metadata.block_size).flat,
        )

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same rows in another order of memory."""
        if self._is_head_major and tensor.ndim == 3:
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return super().rows(tensor)


class WrongHost(TightHost):
    """A host whose block tables name a page that is not there, which a check of kernels has to find."""

    def metadata(self, metadata: CommonAttentionMetadata, *, exact: bool) -> CommonAttentionMetadata:
        """Return metadata whose blocks all lie after the last page."""
        found = super().metadata(metadata, exact=exact)
        return attrs.evolve(found, block_table=torch.full_like(found.block_table, self._num_pages))
