"""Moves the tokens that layers keep of a prompt into pages of their own, when the prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvframe.contract.backend import KVCache
from kvframe.contract.errors import SpecError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.answers import ask_live_ranges
from kvframe.planning.groups import Grouping


class KeptTokens:
    """Chooses, layer by layer, which tokens of a prompt stay, and copies them (``TokenMover``).

    Each layer's keys and values are read once, and those that stay are written once. Both happen between two steps.
    """

    def __init__(self, layers: Sequence[LayerSpec], grouping: Grouping, views: Mapping[str, KVCache]) -> None:
        """Take the layers.

        Args:
            layers: All layers and entries.
            grouping: The cache groups.
            views: The state tensors of each.
        """
        self._group_of = {layer.name: grouping.group_of(layer.name).index for layer in layers if layer.name in views}
        self._layers = [
            layer
            for layer in layers
            if layer.spec is not None and layer.spec.prompt_budget is not None and layer.shares_with is None
        ]
        self._views = views

    def __call__(self, num_tokens: int, blocks: Sequence[Sequence[int]], pages: Mapping[int, Sequence[int]]) -> None:
        """Copy what each layer keeps of a prompt to other pages, as its last tokens.

        Args:
            num_tokens: Tokens of the prompt, all of them computed.
            blocks: The block ids of its request, by group.
            pages: For each group that gives up tokens, the pages of the tokens that stay.
        """
        for layer in self._layers:
            spec, group = layer.spec, self._group_of[layer.name]
            assert spec is not None
            assert spec.prompt_budget is not None
            if group in pages:
                state = _read(self._views[layer.name], spec, blocks[group], ((0, num_tokens),))
                positions = choose_tokens(layer, spec.prompt_budget, state, self._entries(layer, num_tokens, blocks))
                self._write(layer, spec, num_tokens, state, positions, pages[group])

    def _entries(
        self, layer: LayerSpec, num_tokens: int, blocks: Sequence[Sequence[int]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        assert layer.spec is not None
        entries = {}
        for name, spec in layer.spec.entries.items():
            full_name = f"{layer.name}/{name}"
            group_blocks = blocks[self._group_of[full_name]]
            entries[name] = _read(self._views[full_name], spec, group_blocks, ask_live_ranges(spec, num_tokens))
        return entries

    def _write(
        self,
        layer: LayerSpec,
        spec: KVCacheSpec,
        num_tokens: int,
        state: Mapping[str, torch.Tensor],
        kept_positions: torch.Tensor,
        pages: Sequence[int],
    ) -> None:
        num_heads, num_kept = kept_positions.shape
        heads = torch.arange(num_heads, device=kept_positions.device)
        first_token = num_tokens - num_kept
        positions = torch.arange(first_token, num_tokens, device=kept_positions.device)
        block_indices = positions // spec.block_size - first_token // spec.block_size
        ids = torch.tensor(pages, device=kept_positions.device)[block_indices]
        for name, tensor in self._views[layer.name].items():
            tensor[ids, positions % spec.block_size] = state[name][kept_positions.T, heads]


def _read(
    views: KVCache, spec: KVCacheSpec, blocks: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the state of tokens of a request, by name ``[num_tokens, *shape]``."""
    parts_of = {name: [tensor[:0].flatten(0, 1)] for name, tensor in views.items()}  # no token may be live
    for start, stop in ranges:
        first_block = start // spec.block_size
        ids = blocks[first_block : -(-stop // spec.block_size)]
        for name, tensor in views.items():
            rows = tensor.index_select(0, torch.tensor(ids, device=tensor.device)).flatten(0, 1)
            parts_of[name].append(rows[start - first_block * spec.block_size : stop - first_block * spec.block_size])
    return {name: torch.cat(parts) for name, parts in parts_of.items()}


def choose_tokens(
    layer: LayerSpec,
    num_kept: int,
    state: Mapping[str, torch.Tensor],
    entries: Mapping[str, Mapping[str, torch.Tensor]],
) -> torch.Tensor:
    """Return the checked answer of ``KVCacheSpec.choose_kept``, which takes the same arguments.

    Returns:
        ``[num_kv_heads, num_kept], int64, device``: positions, ascending for each head.

    Raises:
        SpecError: They are not tokens of the prompt, each once for a head.
        PluginError: The type raised something.
    """
    spec = layer.spec
    assert spec is not None
    num_tokens, num_heads = state["k"].shape[:2]
    label = f"the cache spec {spec.kind!r} of layer {layer.name!r}: choose_kept()"
    with torch.no_grad():
        positions: Any = call(label, spec.choose_kept, layer, num_kept, state, entries)
    if (
        not isinstance(positions, torch.Tensor)
        or positions.shape != (num_heads, num_kept)
        or positions.dtype != torch.int64
        or positions.device != state["k"].device
    ):
        shown = (
            f"{[*positions.shape]} of {positions.dtype}"
            if isinstance(positions, torch.Tensor)
            else safe_repr(positions)
        )
        raise SpecError(f"{label} must return [{num_heads}, {num_kept}] of torch.int64 on the device, not {shown}")
    ascending = positions.sort(dim=-1).values
    if ascending[:, 0].min() < 0 or ascending[:, -1].max() >= num_tokens or (ascending.diff(dim=-1) < 1).any():
        raise SpecError(f"{label} must return positions in [0, {num_tokens}), each once for a head, not {positions}")
    return ascending
