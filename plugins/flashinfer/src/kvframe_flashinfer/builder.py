"""Planning a step on the host: decodes by one wrapper, all other requests by another."""

from __future__ import annotations

from typing import Any

import attrs
import flashinfer
import numpy as np
import torch

from kvframe.attention.backend import AttentionMetadataBuilder
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.order import BatchOrder, split_batch
from kvframe.formats import PLAIN
from kvframe.specs import LayerSpec
from kvframe_flashinfer.pages import IntArray, PageLists
from kvframe_flashinfer.plans import Wrappers, workspace

MIN_GROUP_FOR_TENSOR_CORES = 4
"""Query heads of a KV head from which on decodes are faster on the tensor cores; below, on the others."""


@attrs.frozen
class Problem:
    """What of a group's layers the plans depend on.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_size: Elements of a query, key or value vector.
        query_dtype: What the kernels compute in.
        stored_dtype: What pages hold.
        scale: Factor on the scores.
        key_scale: Factor on stored keys.
        value_scale: Factor on stored values.
        soft_cap: As in ``QuerySpec``.
        causal: Whether the layers' mask is.
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
        """Return what any layer of the group says."""
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
    """Some requests of a step, side by side.

    Attributes:
        rows: Their queries, in the packed batch.
        wrapper: FlashInfer's wrapper, with their plan.
    """

    rows: slice
    wrapper: Any


@attrs.define(eq=False)
class FlashInferMetadata:
    """A step's plans.

    Attributes:
        parts: The decodes, and the other requests; either may be missing.
    """

    parts: tuple[Part, ...] = ()


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Plans a step. Graphs cannot be captured: a plan decides how many blocks a kernel is launched with."""

    batch_order = BatchOrder()
    on_host = True

    def __init__(self, problem: Problem, device: torch.device, kernels: str) -> None:
        """Take what the layers have in common.

        Args:
            problem: The layers' sizes.
            device: Where they run.
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
        """Plan a request of one token in both ways, so that what cannot be loaded or compiled fails at set-up."""
        pages = PageLists(
            np.array([0, 1], dtype=np.int32),
            np.array([1], dtype=np.int32),
            torch.zeros(1, dtype=torch.int32),
        )
        holder = FlashInferMetadata()
        self._plan_decodes(holder, pages, 1, self._problem.window)
        self._plan_prefills(holder, pages, np.array([0, 1], dtype=np.int32), 1, self._problem.causal)

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferMetadata:
        """Return the step's plans."""
        causal = metadata.causal and self._problem.causal
        window = self._problem.window if causal else None
        built = FlashInferMetadata()
        starts = metadata.query_start_loc_cpu.numpy()
        split = split_batch(metadata, self.batch_order)
        num_decodes = split.num_decodes
        num_reqs = num_decodes + split.num_extends + split.num_prefills
        if not metadata.seq_lens_cpu.numpy()[:num_decodes].all():
            # Its decode kernel divides by zero where a request, over keys of another sequence, has none.
            num_decodes = 0
        pages = PageLists.of(metadata, window, self._device)
        parts = []
        if num_decodes:
            wrapper = self._plan_decodes(built, pages.part(0, num_decodes), metadata.block_size, window)
            parts.append(Part(slice(0, num_decodes), wrapper))
        if num_reqs > num_decodes:
            own = starts[num_decodes : num_reqs + 1]
            wrapper = self._plan_prefills(
                built, pages.part(num_decodes, num_reqs), own - own[0], metadata.block_size, causal
            )
            parts.append(Part(slice(int(own[0]), int(own[-1])), wrapper))
        built.parts = tuple(parts)
        return built

    def _plan_decodes(self, holder: FlashInferMetadata, pages: PageLists, page_size: int, window: int | None) -> Any:
        problem, wrapper = self._problem, self._decodes.lend(holder)
        wrapper.plan(
            torch.from_numpy(pages.starts),
            pages.ids,
            torch.from_numpy(pages.last_page_lens),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_size,
            page_size,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=problem.soft_cap,
            q_data_type=problem.query_dtype,
            kv_data_type=problem.stored_dtype,
            sm_scale=problem.scale,
        )
        return wrapper

    def _plan_prefills(
        self, holder: FlashInferMetadata, pages: PageLists, query_starts: IntArray, page_size: int, causal: bool
    ) -> Any:
        problem, wrapper = self._problem, self._prefills.lend(holder)
        wrapper.plan(
            torch.from_numpy(query_starts),
            torch.from_numpy(pages.starts),
            pages.ids,
            torch.from_numpy(pages.last_page_lens),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_size,
            page_size,
            causal=causal,
            sm_scale=problem.scale,
            window_left=-1 if problem.window is None or not causal else problem.window - 1,
            logits_soft_cap=problem.soft_cap,
            q_data_type=problem.query_dtype,
            kv_data_type=problem.stored_dtype,
            max_token_per_sequence=int(np.diff(query_starts).max()),
        )
        return wrapper
