"""Compressors: modules that make one key of several past tokens, which attention reads beside a window (DeepSeek V4).

A compressor of transformers knows one sequence. It keeps the vectors of the tokens of the last, unfinished group, makes
an entry of each finished group, and returns all entries with a bias for each query. In a step of the engine, it runs
once for each request, on the request's rows and on a cache that writes and reads the pages of the layer's entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from kvframe.contract import AttachedEntry, EntryStep, LayerDescription, NewTokens, lse_dtype
from kvframe_transformers.indexers import IndexerCall, rows_of
from kvframe_transformers.states import names_of

_STORES = "store_compression_weights"
_KV, _GATE = "kv", "gate"
_MAX_SCORES = 1 << 25
"""The most scores at once, unless a single query has more."""


def find_compressor(attention: nn.Module) -> nn.Module | None:
    """Return the compressor of an attention module; None if it has none."""
    compressor = getattr(attention, "compressor", None)
    if isinstance(compressor, nn.Module) and _STORES in names_of(type(compressor)):
        return compressor
    return None


@attrs.frozen
class Compressed:
    """The sizes of what one name of a compressor's cache keeps: ``compressor``, or ``indexer`` for that of its indexer.

    Attributes:
        width: Elements of a token's vector, and of its gate.
        size: Elements of an entry.
    """

    width: int
    size: int


class _Cache:
    """The methods of transformers' cache that compressors call, for one layer and one sequence."""

    @property
    def layers(self) -> Any:
        """This cache, for the index of any layer."""
        return _Any(self)


class _Any:
    def __init__(self, cache: _Cache) -> None:
        self._cache = cache

    def __getitem__(self, index: int) -> _Cache:
        return self._cache


class _NotingCache(_Cache):
    """Notes the sizes of vectors and entries, and keeps nothing."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.widths[name] = kv.shape[2]
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, new_entries: torch.Tensor) -> torch.Tensor:
        self.sizes[name] = new_entries.shape[2]
        return new_entries


def probe(
    module: nn.Module, forward: Callable[..., Any], note: Callable[[Mapping[str, Compressed]], None]
) -> Callable[..., Any]:
    """Return a forward that notes what the compressor keeps, and returns no entries.

    Args:
        module: A compressor on the meta device.
        forward: Its own forward.
        note: Takes the sizes by the names of the cache.
    """
    call = IndexerCall(module)

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        cache = _NotingCache()
        entries, _ = forward(**{**call.bind(args, kwargs), call.cache: cache})
        note({name: Compressed(width, cache.sizes[name]) for name, width in cache.widths.items()})
        return entries, None

    return run


def describe_entries(layer: str, compressor: Any, state_sizes: Mapping[str, Compressed]) -> Sequence[LayerDescription]:
    """Return the entries of a layer with a compressor.

    Args:
        layer: The layer's name.
        compressor: The module.
        state_sizes: What ``probe`` noted.
    """
    group = compressor.compress_rate
    entries = []
    for name, sizes in state_sizes.items():
        # Vectors that are wider than an entry hold a second one, which is used for the next group.
        overlap = group if sizes.width > sizes.size else 0
        tokens = {_KV: (sizes.width,), _GATE: (sizes.width,)}
        options: dict[str, dict[str, Any]] = {
            "unfinished_group": {"group": group, "overlap": overlap, "tensors": tokens},
            "token_entries": {"tokens_per_entry": group, "tensors": {_KV: (sizes.size,)}},
        }
        entries += [
            LayerDescription(
                name=_entry_name(layer, name, kind), kind=kind, options=options[kind], query={}, entry_of=layer
            )
            for kind in options
        ]
    return entries


def _entry_name(layer: str, name: str, kind: str) -> str:
    return f"{layer}/{name}_{'tokens' if kind == 'unfinished_group' else 'entries'}"


@attrs.frozen(eq=False)
class _Kept:
    """One name of a compressor's cache in a step.

    Attributes:
        tokens: The vectors of the tokens of unfinished groups.
        entries: The entries of finished groups.
        position_bias: What the module adds to the gates of a group's tokens.
    """

    tokens: EntryStep
    entries: EntryStep
    position_bias: torch.Tensor


class _PagedCache(_Cache):
    """Keeps the vectors and entries of one request in pages."""

    def __init__(self, kept_states: Mapping[str, _Kept], new: NewTokens, group: int) -> None:
        """Take a request.

        Args:
            kept_states: What is kept, by name.
            new: Its new tokens.
            group: Tokens of a group.
        """
        self._kept, self._request, self._rows, self._group = kept_states, new.request, new.rows, group
        self._first = new.first
        self._start = new.first - new.first % group
        self._stop = new.stop - new.stop % group

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store the vectors of new tokens; return those of the groups that they finish, and the first one's token."""
        tokens = self._kept[name].tokens
        tokens.write(self._rows, **{_KV: kv[0], _GATE: gate[0]})
        groups = tokens.read(self._request, self._start, max(self._start, self._stop))
        return groups[_KV].unsqueeze(0), groups[_GATE].unsqueeze(0), self._start

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the first halves of the vectors and gates of the group before; None if there is none."""
        if not self._start:
            return None, None
        kept_state = self._kept[name]
        before = kept_state.tokens.read(self._request, self._start - self._group, self._start)
        gate = before[_GATE] + kept_state.position_bias
        return before[_KV][None, :, :head_dim], gate[None, :, :head_dim]

    def update_compressor_states(self, name: str, new_entries: torch.Tensor) -> torch.Tensor:
        """Store the entries of the groups that the new tokens finish; return all entries of the sequence."""
        entries = self._kept[name].entries
        if new_entries.shape[1]:
            entries.store(self._request, self._start // self._group, **{_KV: new_entries[0]})
        return entries.read(self._request)[_KV].unsqueeze(0)


@attrs.frozen(eq=False)
class CompressedKeys:
    """What the queries of one request read beside the window.

    Attributes:
        rows: The request's new tokens among the packed ones.
        entries: ``[num_entries, head_size], device``: keys, and values, of all heads.
        bias: ``[num_queries, num_entries], device``: added to the scores; None for nothing.
    """

    rows: slice
    entries: torch.Tensor
    bias: torch.Tensor | None


class CompressorDriver:
    """Runs one compressor over the requests of a step."""

    def __init__(self, layer: str, module: Any, entries: Mapping[str, AttachedEntry]) -> None:
        """Take a compressor.

        Args:
            layer: Its layer's name.
            module: The compressor.
            entries: All attached entries, by their full names.
        """
        self._module, self._forward = module, type(module).forward.__get__(module)
        self.call = IndexerCall(module)
        parts = {"compressor": module, "indexer": getattr(module, "indexer", None)}
        self._entries = {
            name: (
                entries[_entry_name(layer, name, "unfinished_group")],
                entries[_entry_name(layer, name, "token_entries")],
                part,
            )
            for name, part in parts.items()
            if _entry_name(layer, name, "token_entries") in entries
        }

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[CompressedKeys]:
        """Return what each request's queries read beside the window, for the arguments of a packed call."""
        arguments = self.call.bind(args, kwargs)
        kept_states = {
            name: _Kept(tokens.step, entries.step, part.position_bias)
            for name, (tokens, entries, part) in self._entries.items()
        }
        outputs = []
        for new in next(iter(kept_states.values())).tokens.requests:
            request_arguments = {name: rows_of(value, [new.rows]) for name, value in arguments.items()}
            request_arguments[self.call.cache] = _PagedCache(kept_states, new, self._module.compress_rate)
            entries, bias = self._forward(**request_arguments)
            outputs.append(CompressedKeys(new.rows, entries[0, 0], None if bias is None else bias[0, 0]))
        return outputs


class Compressors:
    """The compressors of a model, which run over the engine's steps inside ``switch_on`` and ``switch_off``."""

    def __init__(
        self, layers: Sequence[LayerDescription], modules: Mapping[str, nn.Module], entries: Mapping[str, AttachedEntry]
    ) -> None:
        """Find the compressors; they stay as they are.

        Args:
            layers: The layers and their entries.
            modules: All modules of the model, by path.
            entries: The attached entries, by their full names.
        """
        self._read: dict[nn.Module, list[CompressedKeys]] = {}
        self._is_noting = False
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        for layer in layers:
            module = find_compressor(modules[layer.name]) if layer.query.get("merged") else None
            if module is not None:
                driver = CompressorDriver(layer.name, module, entries)
                self._forwards[module] = self._running(modules[layer.name], driver)

    def __bool__(self) -> bool:
        return bool(self._forwards)

    def _running(self, attention: Any, driver: CompressorDriver) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            self._read[attention] = [] if self._is_noting else driver.run(args, kwargs)
            tokens = next(iter(driver.call.bind(args, kwargs).values()))
            # What it returns is appended to the window's keys: nothing.
            return tokens.new_empty(1, 1, 0, attention.head_dim), None

        return run

    def switch_on(self, *, noting: bool) -> None:
        """Let every compressor run over the running step.

        Args:
            noting: Whether the step has no cache, and only the calls of layers are noted.
        """
        self._is_noting = noting
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward

    def switch_off(self) -> None:
        """Restore every compressor. Safe to call twice."""
        self._read.clear()
        for module in self._forwards:
            vars(module).pop("forward", None)

    def attend(self, attention: nn.Module, query: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention of a step's queries over the entries, and its log-sum-exp.

        Args:
            attention: The module whose compressor ran.
            query: ``[num_tokens, num_heads, head_size], device``.
            scale: The factor on the products.
        """
        output, dtype = torch.zeros_like(query), lse_dtype(query.dtype)
        lse = query.new_full(query.shape[:2], -math.inf, dtype=dtype)
        for keys in self._read[attention]:
            if not len(keys.entries):
                continue
            entries = keys.entries.to(dtype)
            step = max(1, _MAX_SCORES // (query.shape[1] * len(entries)))
            for first in range(keys.rows.start, keys.rows.stop, step):
                rows = slice(first, min(first + step, keys.rows.stop))
                scores = query[rows].to(dtype) @ entries.T * scale
                if keys.bias is not None:
                    own_rows = slice(rows.start - keys.rows.start, rows.stop - keys.rows.start)
                    scores = scores + keys.bias[own_rows, None].to(dtype)
                lse[rows] = scores.logsumexp(-1)
                weights = (scores - lse[rows].masked_fill(lse[rows] == -math.inf, 0)[..., None]).exp()
                output[rows] = (weights @ entries).to(query.dtype)
        return output, lse
