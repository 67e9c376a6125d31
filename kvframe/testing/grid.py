"""The cases that a backend must compute, made from what it declares.

Each feature is crossed with every kind of batch, at the block sizes and lengths where paged kernels go wrong: a length
one below, at and one above a block's end. What a backend refuses is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch

from kvframe.attention.backend import Capabilities
from kvframe.specs import AttentionMask, AttentionSpec, LayerSpec, QuerySpec, TokenRange, align_up

SCALE = 0.4
"""Not the inverse root of any head size, so that a backend that assumes that one is found."""

SOFT_CAP = 2.0
"""Low enough to bend most scores."""

MAIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The first of these that a backend stores is the dtype of all cases that are not about dtypes."""

MAIN_MASKS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "window=5-sink_tokens=3": {"window": 5, "num_sink_tokens": 3},
    "bidirectional": {"causal": False},
}
"""The masks that each further feature and dtype is crossed with."""


@attrs.frozen(kw_only=True)
class GridSpec(AttentionSpec):
    """Any mask that kernels have a name for, and one that they have none for.

    Attributes:
        window: As in ``AttentionMask``.
        num_sink_tokens: As in ``AttentionMask``.
        causal: As in ``AttentionMask``.
        chunk: Tokens of a chunk that its queries stay within, which only live ranges say; None for none.
    """

    kind: ClassVar[str] = "conformance_grid"

    window: int | None = None
    num_sink_tokens: int = 0
    causal: bool = True
    chunk: int | None = None

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the chunk's tokens, or the sinks and the window."""
        if self.chunk is not None:
            start, sinks = n - n % self.chunk, 0
        else:
            start = 0 if self.window is None else max(0, n - self.window + 1)
            sinks = min(self.num_sink_tokens, start)
        return tuple(part for part in ((0, sinks), (start, n)) if part[0] < part[1])

    @property
    def mask(self) -> AttentionMask | None:
        """The mask; None for a chunk."""
        if self.chunk is not None:
            return None
        return AttentionMask(causal=self.causal, window=self.window, num_sink_tokens=self.num_sink_tokens)


@attrs.frozen
class Request:
    """One request's part in a step.

    Attributes:
        num_computed: Tokens whose state is in the cache.
        num_new: Tokens that the step computes.
    """

    num_computed: int
    num_new: int

    @property
    def seq_len(self) -> int:
        """Tokens after the step."""
        return self.num_computed + self.num_new


@attrs.frozen(kw_only=True)
class Case:
    """One step of one layer.

    Attributes:
        name: What it is about (``"window=5-block=16-decode"``).
        layer: The layer; its spec is an attention spec.
        requests: The batch.
        causal: The batch's ``causal``.
        num_padding: Padded rows and padded tokens behind the batch.
    """

    name: str
    layer: LayerSpec
    requests: tuple[Request, ...]
    causal: bool = True
    num_padding: int = 0

    @property
    def spec(self) -> AttentionSpec:
        """The layer's cache spec."""
        assert isinstance(self.layer.spec, AttentionSpec)
        return self.layer.spec

    @property
    def query(self) -> QuerySpec:
        """The layer's query side."""
        assert self.layer.query is not None
        return self.layer.query

    @property
    def query_dtype(self) -> torch.dtype:
        """The cache's dtype where models compute in it, else bfloat16."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype if dtype.itemsize > 1 else torch.bfloat16


def make_cases(capabilities: Capabilities, device: str = "cpu") -> tuple[Case, ...]:
    """Return every case that a backend with these capabilities must compute on ``device``."""
    found: list[Case] = []
    for name, layer in make_layers(capabilities):
        if not capabilities.refusals(layer, device):
            cases = list(_cases(name, layer))
            found += cases
            if name.startswith("full-block") and "bidirectional" in capabilities.masks:
                found += [attrs.evolve(case, name=f"{case.name}-not_causal", causal=False) for case in cases]
    return tuple(found)


def make_layers(capabilities: Capabilities) -> Iterator[tuple[str, LayerSpec]]:
    """Yield every layer of the grid with its name: masks by block sizes, features by masks, head sizes, dtypes.

    Sizes and dtypes are some that the capabilities allow; masks and features are all that there are.
    """
    dtypes = [name for name in MAIN_DTYPES if name in capabilities.dtypes]
    dtypes += sorted(name for name in capabilities.dtypes.difference(dtypes) if getattr(torch, name).is_floating_point)
    block_sizes = sorted({align_up(size, capabilities.block_size_multiple) for size in (1, 16, 17)})
    medium = align_up(16, capabilities.block_size_multiple)
    head_size = min(capabilities.head_sizes or {8})
    for block_size in block_sizes:
        for mask, options in _masks(block_size).items():
            yield f"{mask}-block={block_size}", _layer(dtypes[0], block_size, head_size, options)
    for mask, options in MAIN_MASKS.items():
        for feature, changes in _features(head_size).items():
            yield f"{mask}-{feature}", _layer(dtypes[0], medium, head_size, {**options, **changes})
    for size in sorted(capabilities.head_sizes or {40}):
        yield f"full-head_size={size}", _layer(dtypes[0], medium, size, {})
    for dtype in dtypes[1:]:
        for mask, options in MAIN_MASKS.items():
            yield f"{mask}-{dtype}", _layer(dtype, medium, head_size, options)
        scored = {"soft_cap": SOFT_CAP, "has_sinks": True}
        yield f"full-{dtype}-soft_cap-learned_sinks", _layer(dtype, medium, head_size, scored)


def make_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch by name, with lengths around the ends of blocks."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 41})
    return {
        "prefill": tuple(Request(0, length) for length in ends),
        "extend": tuple(Request(length, new) for length in ends for new in (2, block_size + 1)),
        "decode": tuple(Request(length, 1) for length in (0, *ends)),
        "mixed": (Request(41, 1), Request(0, 19), Request(23, 7), Request(block_size, 1), Request(0, 1)),
        "uneven": (Request(300, 1), Request(9, 140), Request(2, 1), Request(0, 3)),
    }


def _cases(name: str, layer: LayerSpec) -> Iterator[Case]:
    assert layer.spec is not None
    for batch, requests in make_batches(layer.spec.block_size).items():
        yield Case(name=f"{name}-{batch}", layer=layer, requests=requests)
        if batch in ("decode", "mixed"):
            yield Case(name=f"{name}-{batch}-padded", layer=layer, requests=requests, num_padding=3)


def _layer(dtype: str, block_size: int, head_size: int, options: Mapping[str, Any]) -> LayerSpec:
    """Return a layer of usual sizes, changed by options of its spec and its query side."""
    of_query = {field.name for field in attrs.fields(QuerySpec)}
    stored: dict[str, Any] = {"num_kv_heads": 2, "head_size": head_size, "dtype": dtype, "block_size": block_size}
    query: dict[str, Any] = {"num_heads": 4, "head_size": head_size, "scale": SCALE}
    for name, value in options.items():
        (query if name in of_query else stored)[name] = value
    return LayerSpec(name="layer", spec=GridSpec(**stored), query=QuerySpec(**query))


def _masks(block_size: int) -> dict[str, Mapping[str, Any]]:
    windows = sorted({1, 5, block_size, block_size + 1})
    return {
        **MAIN_MASKS,
        **{f"window={window}": {"window": window} for window in windows},
        "window=1-sink_tokens=2": {"window": 1, "num_sink_tokens": 2},
        f"window=6-sink_tokens={block_size + 1}": {"window": 6, "num_sink_tokens": block_size + 1},
        "chunk=6": {"chunk": 6},
    }


def _features(head_size: int) -> dict[str, Mapping[str, Any]]:
    return {
        "multi_head": {"num_kv_heads": 4},
        "multi_query": {"num_kv_heads": 1},
        "soft_cap": {"soft_cap": SOFT_CAP},
        "learned_sinks": {"has_sinks": True},
        "short_values": {"head_size_v": head_size // 2},
        "everything": {"head_size_v": head_size + 8, "soft_cap": SOFT_CAP, "has_sinks": True, "num_heads": 6},
    }
