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

import attrs
import torch
from torch import nn

from kvframe.contract import AttachedEntry, ChosenTokens, EntryStep, LayerDescription, ModelError, NewTokens
from kvframe_transformers.names import if_untested
from kvframe_transformers.states import CACHE_NAMES, names_of

ENTRY = "index_keys"
"""The name of the entry in which a layer keeps the keys of its indexer, and of the tensor in it."""

_FROM_CHOICE = "build_attention_mask_from_topk"
"""The method by which some attention modules make a mask of the chosen tokens."""


@attrs.frozen
class IndexerKind:
    """How an indexer is called, and what it returns.

    Attributes:
        max_chosen: The most tokens or blocks that it chooses for a query.
        block_size: Tokens of a chosen block; 1 for tokens.
        num_choosers: Its choices for each query.
        mask_dims: The dimensions of the mask that it takes: 2 for a row per token, 3 or 4 for a row per query and a
            column per key; 0 for none.
        returns_mask: Whether it returns a mask, and not indices.
    """

    max_chosen: int
    block_size: int = 1
    num_choosers: int = 1
    mask_dims: int = 3
    returns_mask: bool = False

    @classmethod
    def of(cls, module: Any) -> IndexerKind | None:
        """Return the kind of an indexer by its own numbers; None if they are others."""
        numbers = vars(module)
        if {"token_budget", "compress_ratio"} <= numbers.keys():
            return cls(module.token_budget + module.compress_ratio - 1, mask_dims=4, returns_mask=True)
        if {"topk_blocks", "block_size", "num_heads"} <= numbers.keys():
            return cls(module.topk_blocks, module.block_size, module.num_heads, mask_dims=0)
        if {"index_topk", "index_kpool"} <= numbers.keys():
            tail = module.index_kpool - 1 if module.index_kpool_always_select_tail else 0
            return cls(module.index_topk + tail, mask_dims=2)
        return cls(module.index_topk) if "index_topk" in numbers else None

    @property
    def choice(self) -> dict[str, int]:
        """The field ``choice`` of the query side of layers that read what it chooses."""
        fields = {"max_chosen": self.max_chosen, "block_size": self.block_size, "num_choosers": self.num_choosers}
        return {name: number for name, number in fields.items() if name == "max_chosen" or number != 1}

    def empty(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return a result without values: ``[1, num_tokens, max_chosen]``, or as the module's own is laid out."""
        if self.returns_mask:
            return torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=device)
        if self.block_size > 1:
            return torch.empty(1, self.num_choosers, num_tokens, self.max_chosen, dtype=torch.int64, device=device)
        return torch.empty(1, num_tokens, self.max_chosen, dtype=torch.int32, device=device)

    @property
    def takes_batches(self) -> bool:
        """Whether it takes several sequences, whose keys are followed by others that their queries do not see."""
        return not self.returns_mask and self.mask_dims != 2

    def mask(self, positions: torch.Tensor, num_keys: int) -> torch.Tensor | None:
        """Return a mask, True for what queries see; None if it takes none.

        Args:
            positions: ``[num_requests, num_queries], device``: those of the queries.
            num_keys: Keys of the longest request.
        """
        if not self.mask_dims:
            return None
        if self.mask_dims == 2:
            return torch.ones_like(positions, dtype=torch.bool)
        seen = torch.arange(num_keys, device=positions.device) <= positions[..., None]
        return seen if self.mask_dims == 3 else seen.unsqueeze(1)

    def indices(self, result: torch.Tensor) -> torch.Tensor:
        """Return what is chosen, ``[num_requests, num_new, num_choosers, at most max_chosen], int32``; -1 for none."""
        if self.block_size > 1:
            return result.transpose(1, 2).int()
        if not self.returns_mask:
            return result.unsqueeze(2).int()
        chosen = result[:, 0]
        num_keys = chosen.shape[-1]
        positions = torch.arange(num_keys, device=chosen.device, dtype=torch.int32).expand_as(chosen)
        # The chosen ones come first, because the others are larger than any position.
        first = positions.masked_fill(~chosen, num_keys).sort(-1).values[..., : self.max_chosen]
        return first.masked_fill(first == num_keys, -1).unsqueeze(2)


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
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


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
        alike: dict[Any, list[NewTokens]] = {}
        for new in step.requests:
            alike.setdefault(new.stop - new.first if self.kind.takes_batches else (new.request,), []).append(new)
        parts = [(some, self._choose_for(step, some, arguments)) for some in alike.values()]
        width = max((part.shape[-1] for _, part in parts), default=1)
        indices = tokens.new_full((tokens.shape[1], self.kind.num_choosers, width), -1, dtype=torch.int32)
        for some, part in parts:
            for new, chosen in zip(some, part, strict=True):
                indices[new.rows, :, : part.shape[-1]] = chosen
        return ChosenTokens(indices, self.kind.block_size)

    def nothing(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ChosenTokens:
        """Return a choice of nothing for the arguments of a packed call."""
        tokens = next(iter(self._call.bind(args, kwargs).values()))
        empty = tokens.new_full((tokens.shape[1], self.kind.num_choosers, 1), -1, dtype=torch.int32)
        return ChosenTokens(empty, self.kind.block_size)

    def _choose_for(self, step: EntryStep, some: Sequence[NewTokens], arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return what requests with equally many new tokens read, ``[num_requests, num_new, num_choosers, …]``."""
        lengths, num_queries = [new.stop for new in some], some[0].stop - some[0].first
        longest, device = max(lengths), arguments_device(arguments)

        def update(keys: torch.Tensor) -> torch.Tensor:
            for new, own_keys in zip(some, keys, strict=True):
                step.write(new.rows, **{ENTRY: own_keys})
            return step.read_together([new.request for new in some])[ENTRY]

        own = {name: rows_of(value, [new.rows for new in some]) for name, value in arguments.items()}
        own[self._call.cache] = IndexCache(update, lambda: longest)
        # The positions of the queries, and the keys that each of them sees.
        positions = torch.tensor([new.first for new in some], device=device)[:, None]
        positions = positions + torch.arange(num_queries, device=device)
        if "attention_mask" in own:
            own["attention_mask"] = self.kind.mask(positions, longest)
        if self._rotary is not None:
            full = torch.arange(longest, device=device).view(1, 1, -1).expand(3, 1, -1)
            own["position_embeddings"] = self._rotary(next(iter(own.values())), full)
        indices = self.kind.indices(self._forward(**own))
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
        return tuple(rows_of(each, rows) for each in value)
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
            chosen = self.chosen[attention] = (
                driver.nothing(args, kwargs) if self._is_noting else driver.choose(args, kwargs)
            )
            if driver.kind.returns_mask:
                return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=chosen.indices.device)
            indices = chosen.indices.transpose(0, 1)  # [num_choosers, num_tokens, …]
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

    def read_by(self, attention: nn.Module, given: Any, block_size: int) -> ChosenTokens:
        """Return what an attention module reads: what its own indexer chose, or an earlier one.

        Args:
            attention: The module.
            given: What came with its call: ``[1, num_tokens, max_chosen]``.
            block_size: Tokens of a chosen block.

        Raises:
            ModelError: Nothing came with its call.
        """
        own = self.chosen.get(attention)
        if own is not None:
            return own
        if not isinstance(given, torch.Tensor) or given.ndim != 3:
            raise ModelError(f"{type(attention).__name__} reads chosen tokens, and got none with its call")
        return ChosenTokens(given[0].unsqueeze(1).int(), block_size)


def find_indexer(attention: nn.Module) -> nn.Module | None:
    """Return the indexer of an attention module; None if it has none."""
    indexer = getattr(attention, "indexer", None)
    return indexer if isinstance(indexer, nn.Module) else None


def keeps_index_keys(module: nn.Module) -> bool:
    """Return whether a module is an indexer of a known kind, which keeps keys in transformers' cache."""
    return IndexerKind.of(module) is not None and bool(names_of(type(module)) & {"update_indexer", "update_index"})


def reads_choices(attention: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether an attention module reads chosen tokens: of its own indexer, or of an earlier layer's.

    Args:
        attention: The module.
        inputs: What came with its call.
    """
    indexer = find_indexer(attention)
    if indexer is not None and keeps_index_keys(indexer):
        return True
    return getattr(attention, "skip_topk", False) is True or inputs.get("indices") is not None


def _rotary_above(path: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the nearest module above a path that makes position embeddings."""
    while path:
        path = path.rpartition(".")[0]
        rotary = getattr(modules[path], "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            return rotary
    raise ModelError(f"the model has no module that makes position embeddings{if_untested()}")
