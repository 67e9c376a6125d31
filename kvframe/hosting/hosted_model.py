"""What another serving engine asks that runs a model on its own pages: the layers of each cache group, live blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import attrs
import numpy as np
import torch

from kvframe.attention.layers import Layers, check_on_host_pages
from kvframe.cache.live_range import LiveRange
from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.contract.errors import BackendError
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.hosting.setup import Setup
from kvframe.loading.registry import Registry
from kvframe.planning.answers import Answers
from kvframe.selection.skipping import find_skippable_layers

T = TypeVar("T")


class HostedModel:
    """The attention layers of a model, or of one rank, set up by a stack for the memory of another engine.

    Attributes:
        layers: By name, in the model's order.
        skipped: The layers for which the host computes only the tokens that generate.
    """

    def __init__(
        self,
        description: ModelDescription,
        stack: Stack,
        registry: Registry,
        dtype: torch.dtype,
        *,
        stored: Mapping[str, Mapping[str, torch.dtype]],
        skips: bool = False,
        is_part: bool = False,
    ) -> None:
        """Make the layer specs.

        Args:
            description: The layers, as the host knows them.
            stack: The rules. They may give a layer another type.
            registry: Where kinds, backends and wrappers are looked up.
            dtype: The model's dtype.
            stored: For each layer, the state tensors that the host's pages hold, with their dtypes, such as
                ``{"k": torch.float16, "v": torch.float16}``.
            skips: Whether the host leaves out tokens that do not generate in the layers that can.
            is_part: Whether other ranks have layers that are not described here, so that a rule may match none.

        Raises:
            BackendError: A layer's spec stores something else than the host's pages hold. Or the host leaves out
                tokens, and the stack names no wrapper for that, or the other way round. Or the stack names a
                proposer (``drafts``), which kvframe's own engine calls.
            StackError: A rule matches no layer, or gives a spec an unknown option.
            SpecError: A layer's kind is not registered, or its options do not fit.
        """
        if stack.model.drafts is not None:
            raise BackendError(
                f"{stack.source}: model.drafts names {stack.model.drafts.name!r}, and only kvframe's own engine calls "
                "proposers; leave the key out, and use what the host has for drafts",
                code="drafts",
            )
        if is_part:
            stack = attrs.evolve(stack, rules=tuple(attrs.evolve(rule, optional=True) for rule in stack.rules))
        layers = Setup.of(description, stack, registry, dtype=_name(dtype)).layers
        for layer in layers:
            check_on_host_pages(layer)
            _check_stored(layer, stored[layer.name])
        skippable, wrapper = find_skippable_layers(layers), stack.model.prefill_skipping
        if skippable and skips != (wrapper is not None):
            host_behaviour = "does, and no wrapper is named" if skips else "does not, and a wrapper is named"
            raise BackendError(
                f"layers such as {skippable[0]!r} can leave out the tokens that do not generate; the host "
                f"{host_behaviour} in model.prefill_skipping of the stack: set both or neither"
            )
        self._stack, self._registry = stack, registry
        self.layers: Mapping[str, LayerSpec] = {layer.name: layer for layer in layers}
        self.skipped = frozenset(skippable if skips else ())

    def serve(self, names: Sequence[str], block_size: int, device: torch.device) -> Layers:
        """Choose wrappers and backends for layers that share one cache group of the host.

        Args:
            names: The layers, in the order they run. A layer whose cache one of them reads may be served elsewhere.
            block_size: Tokens in a block of the host's group.
            device: Where the host computes.

        Raises:
            BackendError: As for ``Layers.on_host_pages``.
            WrapperError: As for ``Layers.on_host_pages``.
        """
        layers = [self._in_blocks(name, block_size) for name in names]
        owners = {layer.shares_with for layer in layers if layer.shares_with is not None} - {*names}
        return Layers.on_host_pages(
            layers,
            self._stack,
            self._registry,
            device,
            skipped=self.skipped & {*names},
            owners=[self._in_blocks(name, block_size) for name in sorted(owners)],
        )

    def _in_blocks(self, name: str, block_size: int) -> LayerSpec:
        layer = self.layers[name]
        assert layer.spec is not None  # checked at set-up
        return attrs.evolve(layer, spec=attrs.evolve(layer.spec, block_size=block_size))


def _check_stored(layer: LayerSpec, page_dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise if the host's pages do not hold what a layer stores."""
    tensors = {} if layer.spec is None else layer.spec.state_tensors()
    spec_dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    page_dtype_names = {name: _name(dtype) for name, dtype in page_dtypes.items()}
    if spec_dtypes != page_dtype_names or layer.spec is None or layer.spec.kv_format.name != "plain":
        spec_text, page_text = (
            ", ".join(f"{name} ({dtype_names[name]})" for name in sorted(dtype_names))
            for dtype_names in (spec_dtypes, page_dtype_names)
        )
        raise BackendError(
            f"layer {layer.name!r} stores {spec_text or 'nothing'}, and its pages in the host hold {page_text}, as "
            "they are; choose a cache spec, cache.dtype and cache.format that store these"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class LiveBlocks:
    """The live blocks of every request whose cache has one spec, by the number of tokens that are computed.

    Nothing of a request is kept here. The spec is asked once, at set-up.
    """

    def __init__(self, spec: KVCacheSpec, max_tokens: int) -> None:
        """Compute when each block dies.

        Args:
            spec: The spec, with the block size of the engine's manager.
            max_tokens: The most tokens of a request.
        """
        live = LiveRange.of(Answers(spec), max_tokens)
        order = np.argsort(live.deaths, kind="stable")
        self._block_size, self._deaths = spec.block_size, live.deaths
        self._order: list[int] = order.tolist()
        self._sorted: list[int] = live.deaths[order].tolist()

    def at(self, num_computed: int) -> list[int]:
        """Return the full blocks that the token after ``num_computed`` tokens needs, ascending."""
        live: list[int] = np.flatnonzero(self._deaths[: num_computed // self._block_size] > num_computed).tolist()
        return live

    def died(self, before: int, num_computed: int) -> list[int]:
        """Return the blocks that no token needs after ``num_computed`` tokens, and one needed after ``before`` tokens.

        They are in the order in which they died. Each of them is full: a block that is not is needed.
        """
        return self._order[bisect_right(self._sorted, before) : bisect_right(self._sorted, num_computed)]

    def longest_hit(self, find: Callable[[int], T | None], max_tokens: int, step: int) -> list[T | None]:
        """Return the blocks of the longest prefix, a multiple of ``step`` tokens, whose live blocks are all cached.

        A block that is dead stays dead. So a missing block is missing to every shorter prefix that has it, and the
        search goes on at its start.

        Args:
            find: Returns what the engine has cached of a block of the request, or None; asked once for each block.
            max_tokens: The most tokens of the prefix.
            step: A multiple of the block size.

        Returns:
            For each block of the prefix, what ``find`` returned; None if the block is dead.
        """
        find = cache(find)
        length = max_tokens // step * step
        while length:
            live = self.at(length)
            missing = next((block for block in live if find(block) is None), None)
            if missing is None:
                hit: list[T | None] = [None] * (length // self._block_size)
                for block in live:
                    hit[block] = find(block)
                return hit
            length = missing * self._block_size // step * step
        return []
