"""Chosen tokens for the kernels: each query of each chooser becomes a request, and each token that it reads a page."""

from __future__ import annotations

import math

import torch
from kvframe_kernels.cpu.attention import Batch

from kvframe.contract import ChosenPlaces, KVCache


def as_pages(kv_cache: KVCache, places: ChosenPlaces) -> tuple[KVCache, Batch]:
    """Return a layer's state as pages of one token, and the batch of the queries.

    Keys and values stay in place if their strides are equal and 32 bits number the pages. Otherwise the tokens that are
    read are copied.

    Args:
        kv_cache: The layer's state tensors, each ``[num_block_ids, block_size, num_kv_heads, …]``.
        places: Where the chosen tokens lie.
    """
    num_tokens, num_choosers, num_chosen = places.seen.shape
    # The tokens that are read come first.
    order = torch.argsort(places.seen, dim=-1, descending=True, stable=True)
    blocks, offsets = places.blocks.gather(-1, order), places.offsets.gather(-1, order)
    heads_of_chooser = kv_cache["k"].shape[2] // num_choosers
    chooser = torch.arange(num_choosers).view(1, -1, 1)
    block, token, head, *_ = kv_cache["k"].stride()
    unit = math.gcd(block, token, head * heads_of_chooser)
    are_alike = len({(tensor.stride(), tensor.dtype) for tensor in kv_cache.values()}) == 1
    if are_alike and len(kv_cache["k"]) * block // unit < 2**31:
        ids = (blocks * block + offsets * token + chooser * (head * heads_of_chooser)) // unit
        pages = {name: _pages_of(tensor, unit, heads_of_chooser) for name, tensor in kv_cache.items()}
    else:
        heads = (chooser * heads_of_chooser)[..., None] + torch.arange(heads_of_chooser)
        index = blocks[..., None], offsets[..., None], heads
        pages = {name: tensor[index].flatten(0, 2).unsqueeze(1) for name, tensor in kv_cache.items()}
        ids = torch.arange(places.seen.numel()).view(-1, num_chosen)
    num_requests = num_tokens * num_choosers
    batch = Batch(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=places.seen.sum(-1, dtype=torch.int32).flatten(),
        block_table=ids.view(num_requests, num_chosen).int(),
        causal=False,
    )
    return pages, batch


def _pages_of(tensor: torch.Tensor, unit: int, num_heads: int) -> torch.Tensor:
    """Return a view of a state tensor with a page at every ``unit`` elements, each of one token."""
    _, _, head, element = tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    own = (num_heads - 1) * head + (tensor.shape[-1] - 1) * element
    num_pages = (last - own) // unit + 1
    return tensor.as_strided((num_pages, 1, num_heads, tensor.shape[-1]), (unit, unit, head, element))
