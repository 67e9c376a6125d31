"""A conformance case: one step of one layer, as plain values."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from kvframe.attention.wrapper import WrapperChain
from kvframe.specs import AttentionMask, AttentionSpec, LayerSpec, QuerySpec, TokenRange


@attrs.frozen(kw_only=True)
class GridSpec(AttentionSpec):
    """Any mask that kernels have a name for, and one that they have none for.

    Attributes:
        window: As in ``AttentionMask``.
        num_sink_tokens: As in ``AttentionMask``.
        causal: As in ``AttentionMask``.
        chunk: As in ``AttentionMask``.
        stride: The fixed pattern of Sparse Transformers (arXiv 1904.10509), which only live ranges say: a query sees
            its run of ``stride`` tokens and the last token of each run before; None for none.
    """

    kind: ClassVar[str] = "conformance_grid"

    window: int | None = None
    num_sink_tokens: int = 0
    causal: bool = True
    chunk: int | None = None
    stride: int | None = None

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the chunk's tokens, the pattern's, or the sinks and the window."""
        run = self.stride or self.chunk
        if run is not None:
            start = n - n % run
            lasts = range(run - 1, start, run) if self.stride else ()
            parts = [*((last, last + 1) for last in lasts), (start, n)]
        else:
            start = 0 if self.window is None else max(0, n - self.window + 1)
            parts = [(0, min(self.num_sink_tokens, start)), (start, n)]
        return tuple(part for part in parts if part[0] < part[1])

    @property
    def mask(self) -> AttentionMask | None:
        """The mask; None for the fixed pattern."""
        if self.stride is not None:
            return None
        return AttentionMask(
            causal=self.causal, window=self.window, num_sink_tokens=self.num_sink_tokens, chunk=self.chunk
        )

    def retain_all(self) -> GridSpec:
        """Return full attention over the same keys and values."""
        return attrs.evolve(self, window=None, num_sink_tokens=0, chunk=None, stride=None)


@attrs.frozen
class Request:
    """One request's part in a step.

    Attributes:
        num_computed: Tokens whose state is in the cache.
        num_new: Tokens that the step computes.
        num_generating: How many of these generate, the last ones: one of a prefill that completes its prompt, none of
            one that does not, all of a decode with draft tokens.
        num_hidden: Tokens at its start, of those in the cache, that its queries do not see (``SEQ_STARTS``).
        num_keys: Tokens of another sequence, all in the cache, that its queries attend to instead of those of their
            own; None where they attend to their own. Alike for all requests of a step.
    """

    num_computed: int
    num_new: int
    num_generating: int = 1
    num_hidden: int = 0
    num_keys: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens, after the step, of the sequence that its queries attend to."""
        return self.num_computed + self.num_new if self.num_keys is None else self.num_keys

    @property
    def num_cached(self) -> int:
        """How many of these are in the cache before the step."""
        return self.num_computed if self.num_keys is None else self.num_keys


@attrs.frozen(kw_only=True)
class Case:
    """One step of one layer.

    Attributes:
        name: What it is about (``"window=5-block=16-decode"``).
        layer: The layer, as the model has it; its spec is an attention spec.
        requests: The batch.
        causal: The batch's ``causal``.
        num_padding: Padded requests, tokens and generating rows behind the batch, which then has ``static_shapes``.
        wrappers: The layer's wrapper chain, as a stack gives it.
    """

    name: str
    layer: LayerSpec
    requests: tuple[Request, ...]
    causal: bool = True
    num_padding: int = 0
    wrappers: WrapperChain = ()

    @property
    def is_cross(self) -> bool:
        """Whether the keys are of another sequence than the queries."""
        return self.requests[0].num_keys is not None

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
