"""The state that the layers of a case store: keys and values, or another form.

A backend that reads other state than keys and values names its own form (``AttentionBackend.conformance_form``). It is
then checked on the same grid, against the same reference.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import AttentionMask, AttentionSpec, KVCacheSpec, LayerSpec, TokenRange

SOFT_CAP = 2.0
"""A soft cap low enough to change most scores."""

BIAS_SIZES: Mapping[str, Any] = {"num_buckets": 8, "max_distance": 20}
"""A bias with exact distances, ranges of distances, and distances beyond them, all within the batches."""

ALIBI_SLOPES = (0.6, 0.3, 0.15, 0.06)
"""The slopes of the four heads of a case; all of them change most scores."""

HEAD_SIZES = frozenset({64, 128, 256})
NUM_HEADS = 32
NUM_KV_HEADS = (8, 4, 1)
"""Sizes of real models."""

Draw = Callable[..., torch.Tensor]
"""``draw(*shape)`` returns random numbers of ordinary size, in the dtype that a model computes in."""


@attrs.frozen(kw_only=True, slots=False)
class AnyMask:
    """Any mask that kernels have a name for, and two without a name: a base class for the specs of stored state.

    Attributes:
        stride: The fixed pattern of Sparse Transformers (arXiv 1904.10509), which no ``AttentionMask`` can express: a
            query sees its run of ``stride`` tokens and the last token of each run before; None for no pattern.
        has_function: Whether the spec has a mask function for that pattern.
        dilation: A query sees every ``dilation``-th token of a window of as many times ``window`` tokens (Longformer,
            arXiv 2004.05150), whose other tokens are live too; 1 for a window without gaps.
    """

    window: int | None = None
    num_sink_tokens: int = 0
    causal: bool = True
    chunk: int | None = None
    stride: int | None = None
    has_function: bool = False
    dilation: int = 1
    lookahead: int | None = None

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the chunk's tokens, the pattern's, or the sinks and the window."""
        run = self.stride or self.chunk
        if run is not None:
            start = n - n % run
            last_tokens = range(run - 1, start, run) if self.stride else ()
            parts = [*((last, last + 1) for last in last_tokens), (start, n)]
        else:
            start = 0 if self.window is None else max(0, n - (self.window - 1) * self.dilation)
            parts = [(0, min(self.num_sink_tokens, start)), (start, n)]
        return tuple(part for part in parts if part[0] < part[1])

    # Typed as Any, here and below, so that it can come before each spec type in the bases.
    @property
    def mask(self) -> Any:
        """The mask; None for the fixed pattern and for a dilated window."""
        if self.stride is not None or self.is_sparse:
            return None
        return AttentionMask(
            causal=self.causal,
            window=self.window,
            num_sink_tokens=self.num_sink_tokens,
            chunk=self.chunk,
            lookahead=self.lookahead,
        )

    @property
    def mask_function(self) -> Any:
        """The mask's function; for the fixed pattern its own, if ``has_function``; for a dilated window its own."""
        if self.is_sparse:
            return self._sees_dilated
        if self.stride is None:
            return self.mask.sees
        return self._sees_pattern if self.has_function else None

    def _sees_pattern(self, query: Any, key: Any) -> Any:
        assert self.stride is not None
        run = self.stride
        return (key <= query) & ((key // run == query // run) | (key % run == run - 1))

    @property
    def is_sparse(self) -> bool:
        """Whether the window has gaps."""
        return self.dilation > 1

    def _sees_dilated(self, query: Any, key: Any) -> Any:
        assert self.window is not None
        distance = query - key
        return (distance >= 0) & (distance < self.window * self.dilation) & (distance % self.dilation == 0)

    def retain_all(self) -> Any:
        """Return full attention over the same state."""
        return attrs.evolve(self, window=None, num_sink_tokens=0, chunk=None, stride=None, dilation=1)


@attrs.frozen(kw_only=True)
class GridSpec(AnyMask, AttentionSpec):
    """Keys and values, under any mask."""

    kind: ClassVar[str] = "conformance_grid"


class StateForm(ABC):
    """The form of the state that a case's layers store, and the keys and values that the state stands for.

    Attributes:
        spec_class: The layers' cache spec: a subclass of ``AnyMask`` and of the stored state's spec.
    """

    spec_class: ClassVar[type[KVCacheSpec]]

    @abstractmethod
    def sizes(self, head_size: int) -> dict[str, Any]:
        """Return the usual sizes of the stored state for this head size, as fields of ``spec_class``."""

    def usual_head_size(self, limits: Mapping[str, frozenset[int]]) -> int:
        """Return a small head size that fits the sizes that a backend is limited to."""
        return 8

    def real_sizes(self, head_sizes: frozenset[int] | None) -> Mapping[str, Mapping[str, Any]]:
        """Return sizes of real models by name, as fields of ``spec_class`` and of ``QuerySpec``."""
        sizes = sorted(HEAD_SIZES if head_sizes is None else HEAD_SIZES & head_sizes or head_sizes)
        return {f"head_size={size}": {"head_size": size, "num_heads": NUM_HEADS} for size in sizes}

    @abstractmethod
    def features(self, head_size: int) -> Mapping[str, Mapping[str, Any]]:
        """Return other sizes that a backend must serve, by name; fields of ``QuerySpec`` may be among them."""

    @abstractmethod
    def head_size_v(self, spec: KVCacheSpec) -> int:
        """Return the length of a head's value, which is also that of its output."""

    @abstractmethod
    def draw(self, spec: KVCacheSpec, num_tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``key`` and the ``value`` that ``write_kv`` takes for ``num_tokens`` tokens."""

    def draw_parameters(self, layer: LayerSpec, draw: Draw) -> dict[str, torch.Tensor]:
        """Return a layer's learned tensors; none by default."""
        return {}

    def expand(
        self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values by which attention is defined, of the results of ``draw`` and ``draw_parameters``.

        They are ``[num_tokens, num_kv_heads, head_size]`` and ``[num_tokens, num_kv_heads, head_size_v]``.
        """
        return key, value

    def magnitudes(
        self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the magnitudes in which rounding errors of ``expand``'s keys and values are counted.

        The default holds for keys and values that are sums of products of stored numbers and parameters: the sums of
        the products' magnitudes. The arguments are those of ``expand``, or their magnitudes; the results have the same
        shapes.
        """
        return self.expand(layer, key.abs(), value.abs(), parameters)


class KeysAndValues(StateForm):
    """One key and one value per token and KV head."""

    spec_class = GridSpec

    def sizes(self, head_size: int) -> dict[str, Any]:
        """Return two KV heads; the queries have four heads."""
        return {"num_kv_heads": 2, "head_size": head_size}

    def real_sizes(self, head_sizes: frozenset[int] | None) -> Mapping[str, Mapping[str, Any]]:
        """Return each head size with several numbers of KV heads."""
        return {
            f"{name}-num_kv_heads={num_kv_heads}": {**options, "num_kv_heads": num_kv_heads}
            for name, options in super().real_sizes(head_sizes).items()
            for num_kv_heads in NUM_KV_HEADS
        }

    def features(self, head_size: int) -> Mapping[str, Mapping[str, Any]]:
        """Return other numbers of KV heads and other sizes of values."""
        return {
            "multi_head": {"num_kv_heads": 4},
            "multi_query": {"num_kv_heads": 1},
            "relative_bias-multi_head": {"relative_bias": BIAS_SIZES, "num_kv_heads": 4},
            "short_values": {"head_size_v": head_size // 2},
            "everything": {"head_size_v": head_size + 8, "soft_cap": SOFT_CAP, "has_sinks": True, "num_heads": 6},
        }

    def head_size_v(self, spec: KVCacheSpec) -> int:
        """Return the size of the state ``v``."""
        return spec.in_format(PLAIN).state_tensors()["v"].shape[-1]

    def draw(self, spec: KVCacheSpec, num_tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[num_tokens, num_kv_heads, head_size]`` and ``[num_tokens, num_kv_heads, head_size_v]``."""
        tensors = spec.in_format(PLAIN).state_tensors()
        return draw(num_tokens, *tensors["k"].shape[1:]), draw(num_tokens, *tensors["v"].shape[1:])


KEYS_AND_VALUES = KeysAndValues()


def form_of(backend_class: type[AttentionBackend]) -> StateForm:
    """Return the form of the state that a backend reads."""
    if backend_class.conformance_form is None:
        return KEYS_AND_VALUES
    module, _, name = backend_class.conformance_form.partition(":")
    form: StateForm = getattr(importlib.import_module(module), name)()
    return form
