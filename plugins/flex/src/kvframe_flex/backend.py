"""The backend: it gathers a step's pages, and calls FlexAttention with the layers' mask function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch.nn.functional import pad

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    Capabilities,
    KVCache,
    LayerSpec,
)
from kvframe_flex.builder import DenseBatch, FlexMetadataBuilder
from kvframe_flex.kernel import Kernel, Scores, keep_static
from kvframe_flex.pages import Visibility

MIN_CUDA_SIZE = 16
"""The smallest size of a vector in FlexAttention's GPU kernels; shorter vectors are padded with zeros."""


@attrs.frozen
class FlexOptions:
    """The backend's options in a stack.

    Attributes:
        compile: Whether kernels are compiled for each new kind of batch: ``auto`` if a compiler is found; ``always``,
            or fail; ``never``, which is slow and needs memory for all scores.
    """

    compile: str = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "always", "never")))


class FlexBackend(AttentionBackend):
    """Serves every type of attention over keys and values that has a mask function."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset(
            {
                "causal",
                "bidirectional",
                "bidirectional_window",
                "window",
                "sink_tokens",
                "chunk",
                "ranges",
                "mask_function",
                "sparse",
            }
        ),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
        preference=-5,
    )
    options_class = FlexOptions
    conformance_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"compile": "never"})

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device, options: Any = None) -> None:
        """Keep the group's layers; raise ``BackendError`` if ``compile`` is ``always`` and there is no compiler."""
        super().__init__(layers, device, options)
        spec, query = layers[0].spec, layers[0].query
        assert spec is not None
        assert query is not None
        sees = spec.mask_function
        assert sees is not None
        live_ranges = spec.live_ranges if spec.is_sparse else None
        self._visibility = Visibility(sees, spec.mask, query.has_sinks, live_ranges)
        self._num_heads = query.num_heads
        self._slopes: torch.Tensor | None = None
        if query.alibi_slopes is not None:
            self._slopes = torch.tensor(query.alibi_slopes, dtype=torch.float32, device=device)
            keep_static(self._slopes)
        self._kernel = Kernel(sees, Scores.of(query), device, (options or FlexOptions()).compile)
        self._scratch: dict[str, torch.Tensor] = {}

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep the layer's tensors; the sizes of its bias are constants of the kernel."""
        super().bind(layer, parameters)
        if layer.name in self.bias_tables:
            keep_static(self.bias_tables[layer.name])

    def make_builder(self) -> FlexMetadataBuilder:
        """Return the builder of the step's dense batches."""
        return FlexMetadataBuilder(self._visibility, self._num_heads, self._kernel.is_compiled)

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Gather each dense batch's pages, and compute its attention.

        The log-sum-exp is the kernel's own; on a CPU, whose compiled kernels return none, it is computed densely.
        """
        size_v = kv_cache["v"].shape[-1]
        bias = self.bias_tables.get(layer.name, self._slopes)
        if sinks is not None:
            sinks = sinks.float()
            keep_static(sinks)
        output = out
        if output is None:
            output = query.new_empty(query.shape[0], query.shape[1], size_v)
        if lse is not None:
            lse.fill_(-math.inf)
            if sinks is not None:
                # Requests without keys are in no dense batch.
                lse.copy_(sinks.expand_as(lse))
        if not any(dense.output_rows is None for dense in metadata.dense_batches):
            output.zero_()
        for dense, pages in zip(metadata.dense_batches, metadata.pages, strict=True):
            rows = query if dense.query_rows is None else query.index_select(0, dense.query_rows)
            rows = rows.view(dense.num_tiles, dense.num_queries, *query.shape[1:]).transpose(1, 2)
            key = self._gather("k", dense, pages, kv_cache["k"], query.dtype)
            value = self._gather("v", dense, pages, kv_cache["v"], query.dtype)
            if self.device.type == "cuda":
                rows, key, value = (_lengthened(each) for each in (rows, key, value))
            result, log_sums = self._kernel(rows, key, value, dense.places, dense.causal, bias, sinks, lse is not None)
            _store(dense, result[..., :size_v].transpose(1, 2), output)
            if lse is not None:
                assert log_sums is not None
                _store(dense, log_sums.transpose(1, 2), lse)
        return output

    def _gather(
        self, name: str, dense: DenseBatch, pages: torch.Tensor, state: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the tiles' tokens of one state tensor, ``[num_tiles, num_kv_heads, num_keys, size]``, strided."""
        shape = len(pages), *state.shape[1:]
        gathered = self._take(name, math.prod(shape), state).view(shape)
        torch.index_select(state, 0, pages, out=gathered)
        tokens = gathered.view(-1, *state.shape[2:])
        tokens.index_fill_(0, dense.hidden, 0)
        return tokens.to(dtype).view(dense.num_tiles, dense.num_keys, *state.shape[2:]).transpose(1, 2)

    def _take(self, name: str, num_elements: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory that later calls reuse, because the system takes long to map fresh pages."""
        scratch = self._scratch.get(name)
        if scratch is None or len(scratch) < num_elements:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                scratch = self._scratch[name] = torch.empty(num_elements, dtype=like.dtype, device=like.device)
        return scratch[:num_elements]


def _lengthened(vectors: torch.Tensor) -> torch.Tensor:
    missing = MIN_CUDA_SIZE - vectors.shape[-1]
    return pad(vectors, (0, missing)) if missing > 0 else vectors


def _store(dense: DenseBatch, result: torch.Tensor, output: torch.Tensor) -> None:
    """Write ``[num_tiles, num_queries, …]`` of a dense batch to its rows of ``[num_tokens, …]``."""
    if dense.output_rows is None:
        output.view(result.shape).copy_(result)
        return
    rows = result.flatten(0, 1)
    output.index_copy_(0, dense.output_rows, rows if dense.outputs is None else rows[dense.outputs])
