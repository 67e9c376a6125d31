"""Sparse indexers: modules that keep keys of their own, and choose by them which past tokens attention reads.

An indexer of transformers knows one sequence. It appends its keys to transformers' cache, scores all of them, and
returns the chosen tokens of each query. In a step of the engine, it runs once for each request, on the request's rows
and on a cache that writes and reads the pages of the layer's entry ``index_keys``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from kvframe.contract import AttachedEntry, ChosenTokens, EntryStep, LayerDescription, ModelError, NewTokens
from kvframe_transformers.indexer_kinds import IndexerKind, find_indexer
from kvframe_transformers.names import if_untested
from kvframe_transformers.states import CACHE_NAMES

ENTRY = "index_keys"
"""The name of the entry in which a layer keeps the keys of its indexer, and of the tensor in it."""

_FROM_CHOICE = "build_attention_mask_from_topk"
"""The method by which some attention modules make a mask of the chosen tokens."""


class IndexerCall:
    """The arguments of an indexer, or of a compressor, by name.

    Attributes:
        cache: The name of the argument that takes the cache.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read the signature of its forward."""
        signature = inspect.signature(type(module).forward)
        self._signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        names = [name for name in self._signature.parameters if name in CACHE_NAMES]
        if len(names) != 1:
            raise ModelError(
                f"{type(module).__name__} keeps keys in transformers' cache, and takes it by none or several of "
                f"{', '.join(CACHE_NAMES)}{if_untested()}"
            )
        (self.cache,) = names

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call."""
        bound_arguments = self._signature.bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        return dict(bound_arguments.arguments)


class IndexCache:
    """Stands for transformers' cache, of which it has one layer, with the keys of one indexer."""

    def __init__(self, update: Callable[[torch.Tensor], torch.Tensor], length: Callable[[], int]) -> None:
        """Take what stores new keys and returns all keys of the sequence, and what returns the tokens of it."""
        self._update, self._length = update, length

    @property
    def layers(self) -> Mapping[int, IndexCache]:
        """This cache, for the index of any layer."""
        return _AnyLayer(self)

    @property
    def keys(self) -> torch.Tensor:
        """A tensor whose last dimension but one counts the tokens of the sequence."""
        return torch.empty(1, 1, self._length(), 1, device="meta")

    def get_seq_length(self) -> int:
        """Return the tokens of the sequence, those of the step included."""
        return self._length()

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store new keys, ``[1, num_tokens, …]``, and return those of the whole sequence."""
        return self._update(keys)

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Likewise for keys with heads, ``[1, num_heads, num_tokens, …]``."""
        return self._update(keys.transpose(1, 2)).transpose(1, 2)


class _AnyLayer(dict[int, IndexCache]):
    def __init__(self, cache: IndexCache) -> None:
        super().__init__()
        self._cache = cache

    def __getitem__(self, index: int) -> IndexCache:
        return self._cache


class _Seen(Exception):
    """Ends the probe of an indexer as soon as its keys are known."""


def probe(module: nn.Module, forward: Callable[..., Any], note: Callable[[torch.Size], None]) -> Callable[..., Any]:
    """Return a forward that notes the shape of a token's keys, and returns a result without values.

    Args:
        module: An indexer on the meta device.
        forward: Its own forward.
        note: Takes the shape.
    """
    call, kind = IndexerCall(module), IndexerKind.of(module)

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        def stop(keys: torch.Tensor) -> torch.Tensor:
            note(keys.shape[2:])
            raise _Seen

        arguments = call.bind(args, kwargs)
        tokens = next(iter(arguments.values()))
        with suppress(_Seen):
            forward(**{**arguments, call.cache: IndexCache(stop, lambda: tokens.shape[1])})
        assert kind is not None
        return kind.empty(tokens.shape[1], tokens.device)

    return run


class IndexDriver:
    """Runs one indexer over the requests of a step."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], entry: AttachedEntry, rotary: nn.Module | None
    ) -> None:
        """Take an indexer.

        Args:
            module: The indexer.
            forward: Its own forward.
            entry: Where its keys are kept.
            rotary: What makes position embeddings, for an indexer that takes those of all keys.
        """
        kind = IndexerKind.of(module)
        assert kind is not None
        self.kind = kind
        self._call, self._forward, self._entry, self._rotary = IndexerCall(module), forward, entry, rotary

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ChosenTokens:
        """Return what the step's queries read, for the arguments of a packed call."""
        step, arguments = self._entry.step, self._call.bind(args, kwargs)
        tokens = next(iter(arguments.values()))
        requests_by_length: dict[Any, list[NewTokens]] = {}
        for new in step.requests:
            requests_by_length.setdefault(
                new.stop - new.first if self.kind.takes_batches else (new.request,), []
            ).append(new)
        parts = [(requests, self._choose_for(step, requests, arguments)) for requests in requests_by_length.values()]
        width = max((part.shape[-1] for _, part in parts), default=1)
        indices = tokens.new_full((tokens.shape[1], self.kind.num_choosers, width), -1, dtype=torch.int32)
        for requests, part in parts:
            for new, request_choice in zip(requests, part, strict=True):
                indices[new.rows, :, : part.shape[-1]] = request_choice
        return ChosenTokens(indices, self.kind.block_size)

    def nothing(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ChosenTokens:
        """Return a choice of nothing for the arguments of a packed call."""
        tokens = next(iter(self._call.bind(args, kwargs).values()))
        empty = tokens.new_full((tokens.shape[1], self.kind.num_choosers, 1), -1, dtype=torch.int32)
        return ChosenTokens(empty, self.kind.block_size)

    def _choose_for(self, step: EntryStep, requests: Sequence[NewTokens], arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return what requests with equally many new tokens read, ``[num_requests, num_new, num_choosers, …]``."""
        lengths, num_queries = [new.stop for new in requests], requests[0].stop - requests[0].first
        longest, device = max(lengths), arguments_device(arguments)

        def update(keys: torch.Tensor) -> torch.Tensor:
            for new, own_keys in zip(requests, keys, strict=True):
                step.write(new.rows, **{ENTRY: own_keys})
            return step.read_together([new.request for new in requests])[ENTRY]

        request_arguments = {name: rows_of(value, [new.rows for new in requests]) for name, value in arguments.items()}
        request_arguments[self._call.cache] = IndexCache(update, lambda: longest)
        # The positions of the queries, and the keys that each of them sees.
        positions = torch.tensor([new.first for new in requests], device=device)[:, None]
        positions = positions + torch.arange(num_queries, device=device)
        if "attention_mask" in request_arguments:
            request_arguments["attention_mask"] = self.kind.mask(positions, longest)
        if self._rotary is not None:
            full = torch.arange(longest, device=device).view(1, 1, -1).expand(3, 1, -1)
            request_arguments["position_embeddings"] = self._rotary(next(iter(request_arguments.values())), full)
        indices = self.kind.indices(self._forward(**request_arguments))
        # With fewer live tokens than are chosen, the rest are later ones.
        last = positions.div(self.kind.block_size, rounding_mode="floor")
        return indices.masked_fill(indices > last[..., None, None], -1)


def arguments_device(arguments: Mapping[str, Any]) -> torch.device:
    """Return the device of a call's tokens, its first argument."""
    device: torch.device = next(iter(arguments.values())).device
    return device


def rows_of(value: Any, rows: Sequence[slice]) -> Any:
    """Return the rows of some requests, equally many of each, of an argument whose tensors are ``[1, num_tokens, …]``.

    They are ``[num_requests, num_rows, …]``.
    """
    if isinstance(value, tuple):
        return tuple(rows_of(item, rows) for item in value)
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    return torch.cat([value[:, part] for part in rows]) if len(rows) > 1 else value[:, rows[0]]


class Indexers:
    """The indexers of a model, which choose for the engine's steps inside ``switch_on`` and ``switch_off``.

    Attributes:
        chosen: What each attention module's own indexer chose in the running step.
    """

    def __init__(
        self, layers: Sequence[LayerDescription], modules: Mapping[str, nn.Module], entries: Mapping[str, AttachedEntry]
    ) -> None:
        """Find the indexers; they stay as they are.

        Args:
            layers: The layers and their entries.
            modules: All modules of the model, by path.
            entries: The attached entries, by their full names.
        """
        self.chosen: dict[nn.Module, ChosenTokens] = {}
        self._is_noting = False
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._masking: list[nn.Module] = []
        reading = {layer.name for layer in layers if layer.query.get("choice")}
        for path in reading:
            if hasattr(modules[path], _FROM_CHOICE):
                self._masking.append(modules[path])
        for layer in layers:
            if layer.entry_of is None or not layer.name.endswith(f"/{ENTRY}"):
                continue
            attention = modules[layer.entry_of]
            module = find_indexer(attention)
            assert module is not None
            kind = IndexerKind.of(module)
            rotary = _rotary_above(layer.entry_of, modules) if kind is not None and kind.returns_mask else None
            driver = IndexDriver(module, type(module).forward.__get__(module), entries[layer.name], rotary)
            self._forwards[module] = self._choosing(attention, driver)

    def __bool__(self) -> bool:
        return bool(self._forwards)

    def _choosing(self, attention: nn.Module, driver: IndexDriver) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            choice = self.chosen[attention] = (
                driver.nothing(args, kwargs) if self._is_noting else driver.choose(args, kwargs)
            )
            if driver.kind.returns_mask:
                return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=choice.indices.device)
            indices = choice.indices.transpose(0, 1)  # [num_choosers, num_tokens, …]
            return indices.unsqueeze(0) if driver.kind.block_size > 1 else indices

        return run

    def switch_on(self, *, noting: bool) -> None:
        """Let every indexer choose for the running step.

        Args:
            noting: Whether the step has no cache, and only the calls of layers are noted: then nothing is chosen.
        """
        self._is_noting = noting
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward
        for module in self._masking:
            vars(module)[_FROM_CHOICE] = lambda topk_indices, **_: topk_indices

    def switch_off(self) -> None:
        """Restore every indexer. Safe to call twice."""
        self.chosen.clear()
        for module in self._forwards:
            vars(module).pop("forward", None)
        for module in self._masking:
            vars(module).pop(_FROM_CHOICE, None)

    def read_by(self, attention: nn.Module, passed_indices: Any, block_size: int) -> ChosenTokens:
        """Return what an attention module reads: what its own indexer chose, or an earlier one.

        Args:
            attention: The module.
            passed_indices: What came with its call: ``[1, num_tokens, max_chosen]``.
            block_size: Tokens of a chosen block.

        Raises:
            ModelError: Nothing came with its call.
        """
        own_choice = self.chosen.get(attention)
        if own_choice is not None:
            return own_choice
        if not isinstance(passed_indices, torch.Tensor) or passed_indices.ndim != 3:
            raise ModelError(f"{type(attention).__name__} reads chosen tokens, and got none with its call")
        return ChosenTokens(passed_indices[0].unsqueeze(1).int(), block_size)


def _rotary_above(path: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the nearest module above a path that makes position embeddings."""
    while path:
        path = path.rpartition(".")[0]
        rotary = getattr(modules[path], "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            return rotary
    raise ModelError(f"the model has no module that makes position embeddings{if_untested()}")
