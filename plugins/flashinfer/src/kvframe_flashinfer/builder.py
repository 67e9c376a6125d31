"""Plans a step on the host: one FlashInfer wrapper for the decodes, and one for all other requests."""

from __future__ import annotations

from typing import Any

import attrs
import flashinfer
import numpy as np
import torch

from kvframe.contract import (
    PLAIN,
    AttentionMetadataBuilder,
    BatchOrder,
    CommonAttentionMetadata,
    LayerSpec,
    split_batch,
)
from kvframe_flashinfer.pages import IntArray, PageLists
from kvframe_flashinfer.plans import Wrappers, workspace
from kvframe_flashinfer.ranged import has_ranges, mask_batches

MIN_GROUP_FOR_TENSOR_CORES = 4
"""Query heads of a KV head from which on decodes are faster on the tensor cores."""


@attrs.frozen
class Problem:
    """The properties of a group's layers that plans depend on.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_size: Elements of a query, key or value vector.
        query_dtype: The dtype that the kernels compute in.
        stored_dtype: The dtype of the pages.
        scale: Factor on the scores.
        key_scale: Factor on stored keys.
        value_scale: Factor on stored values.
        soft_cap: As in ``QuerySpec``.
        causal: Whether the layers' mask is causal.
        window: As in ``AttentionMask``.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    query_dtype: torch.dtype
    stored_dtype: torch.dtype
    scale: float
    key_scale: float
    value_scale: float
    soft_cap: float | None
    causal: bool
    window: int | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Problem:
        """Return the properties, from any layer of the group."""
        assert layer.spec is not None
        assert layer.query is not None
        key, mask = layer.spec.state_tensors()["k"], layer.spec.mask
        assert mask is not None
        kv_format: Any = layer.spec.kv_format
        is_plain = kv_format.name == PLAIN.name
        return cls(
            num_heads=layer.query.num_heads,
            num_kv_heads=key.shape[1],
            head_size=layer.query.head_size,
            query_dtype=getattr(torch, layer.spec.in_format(PLAIN).state_tensors()["k"].dtype),
            stored_dtype=getattr(torch, key.dtype),
            scale=layer.query.scale,
            key_scale=1.0 if is_plain else kv_format.k_scale,
            value_scale=1.0 if is_plain else kv_format.v_scale,
            soft_cap=layer.query.soft_cap,
            causal=mask.causal,
            window=mask.window,
        )


@attrs.frozen(eq=False)
class Part:
    """Some consecutive requests of a step, with one plan.

    Attributes:
        rows: Their queries, in the packed batch; or their indices there, ``[num_rows], int64, device``.
        pages: The pages that they read.
        query_starts: ``[num_reqs + 1], int32``: the start of each request's queries among these; None for decodes.
        page_size: Tokens per page.
        causal: Whether a query sees only its own and earlier positions.
        window: Tokens that a query sees, including its own; None for all.
        wrapper: FlashInfer's wrapper, with their plan; None until the pages are copied to the device.
    """

    rows: slice | torch.Tensor
    pages: PageLists
    query_starts: IntArray | None
    page_size: int
    causal: bool
    window: int | None
    wrapper: Any = None


@attrs.define(eq=False)
class FlashInferMetadata:
    """The parts of a step, and their plans.

    Attributes:
        parts: The decodes, and the other requests; either may be missing. If a step has ranges of prompts, the other
            requests are two parts.
        num_tokens: Tokens of the batch that belong to requests; they come first.
        keyless_rows: ``[num_rows], int64, device``: the queries of requests without keys; None if there are none.
    """

    parts: tuple[Part, ...] = ()
    num_tokens: int = 0
    keyless_rows: torch.Tensor | None = None


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Plans a step. Graphs cannot be captured, because a plan decides the number of blocks of a kernel launch."""

    batch_order = BatchOrder()
    on_host = frozenset({"block_table"})

    def __init__(self, problem: Problem, device: torch.device, kernels: str) -> None:
        """Keep the properties of the layers.

        Args:
            problem: The layers' properties.
            device: The device of the layers.
            kernels: FlashInfer's name of the kernels for prompts.
        """
        self._problem = problem
        self._device = device
        on_tensor_cores = problem.num_heads // problem.num_kv_heads >= MIN_GROUP_FOR_TENSOR_CORES
        self._prefills = Wrappers(
            lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=kernels)
        )
        self._decodes = Wrappers(
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(device), "NHD", use_tensor_cores=on_tensor_cores
            )
        )

    def load_kernels(self) -> None:
        """Plan a request of one token in both ways, so that missing or uncompilable kernels fail at set-up."""
        one = np.array([0, 1], dtype=np.int32)
        pages = PageLists(one, one[1:], torch.zeros(1, dtype=torch.int32, device=self._device))
        causal, window = self._problem.causal, self._problem.window
        self.finish(
            FlashInferMetadata(tuple(Part(slice(0, 1), pages, starts, 1, causal, window) for starts in (None, one)), 1)
        )

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferMetadata:
        """Return the step's parts."""
        causal = metadata.causal and self._problem.causal
        window = self._problem.window if causal else None
        starts = metadata.query_start_loc_cpu.numpy()
        split = split_batch(metadata, self.batch_order)
        num_decodes = split.num_decodes
        num_reqs = num_decodes + split.num_longer
        if not metadata.seq_lens_cpu.numpy()[:num_decodes].all():
            # The decode kernel divides by zero for a request without keys, which cross attention may have.
            num_decodes = 0
        pages, size = PageLists.of(metadata, window), metadata.block_size
        parts = []
        ranged = has_ranges(metadata) and self._problem.causal
        if num_decodes:
            parts.append(Part(slice(0, num_decodes), pages.part(0, num_decodes), None, size, causal, window))
        if ranged:
            for batch in mask_batches(metadata, num_decodes):
                own = batch.common.query_start_loc_cpu.numpy()
                own_pages = PageLists.of(batch.common, window)
                parts.append(Part(torch.from_numpy(batch.rows), own_pages, own, size, batch.causal, window))
        elif num_reqs > num_decodes:
            own = starts[num_decodes : num_reqs + 1]
            rows = slice(int(own[0]), int(own[-1]))
            parts.append(Part(rows, pages.part(num_decodes, num_reqs), own - own[0], size, causal, window))
        return FlashInferMetadata(tuple(parts), int(starts[-1]), _keyless_rows(metadata))

    def finish(self, built: Any) -> FlashInferMetadata:
        """Return the parts with their plans, which the library makes on the host, with the page lists on the device."""
        planned = FlashInferMetadata((), built.num_tokens, built.keyless_rows)
        planned.parts = tuple(
            attrs.evolve(
                part,
                wrapper=self._plan_decodes(planned, part)
                if part.query_starts is None
                else self._plan_prefills(planned, part, part.query_starts),
            )
            for part in built.parts
        )
        return planned

    def _plan_decodes(self, holder: FlashInferMetadata, part: Part) -> Any:
        problem, wrapper = self._problem, self._decodes.lend(holder)
        wrapper.plan(
            torch.from_numpy(part.pages.starts),
            part.pages.ids,
            torch.from_numpy(part.pages.last_page_lens),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_size,
            part.page_size,
            window_left=-1 if part.window is None else part.window - 1,
            logits_soft_cap=problem.soft_cap,
            q_data_type=problem.query_dtype,
            kv_data_type=problem.stored_dtype,
            sm_scale=problem.scale,
        )
        return wrapper

    def _plan_prefills(self, holder: FlashInferMetadata, part: Part, query_starts: IntArray) -> Any:
        problem, wrapper = self._problem, self._prefills.lend(holder)
        wrapper.plan(
            torch.from_numpy(query_starts),
            torch.from_numpy(part.pages.starts),
            part.pages.ids,
            torch.from_numpy(part.pages.last_page_lens),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_size,
            part.page_size,
            causal=part.causal,
            sm_scale=problem.scale,
            window_left=-1 if part.window is None else part.window - 1,
            logits_soft_cap=problem.soft_cap,
            q_data_type=problem.query_dtype,
            kv_data_type=problem.stored_dtype,
            max_token_per_sequence=int(np.diff(query_starts).max()),
        )
        return wrapper


def _keyless_rows(metadata: CommonAttentionMetadata) -> torch.Tensor | None:
    is_empty = metadata.seq_lens_cpu.numpy() == 0
    if not is_empty.any():
        return None
    counts = np.diff(metadata.query_start_loc_cpu.numpy())
    return torch.from_numpy(is_empty.repeat(counts).nonzero()[0])
