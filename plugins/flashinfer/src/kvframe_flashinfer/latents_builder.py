"""Plans a step over latents on the host: one FlashInfer wrapper for all its requests that have one mask."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from kvframe.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from kvframe_flashinfer.pages import IntArray, PageLists
from kvframe_flashinfer.plans import Wrappers, workspace
from kvframe_flashinfer.ranged import MaskBatch, has_ranges, mask_batches


@attrs.frozen(kw_only=True)
class LatentProblem:
    """The properties of a group's layers that plans depend on.

    Attributes:
        num_heads: Query heads.
        latent_size: Elements of a latent.
        rope_size: Elements of the rotated part of a key.
        dtype: The dtype of the pages, which the kernels compute in.
        scale: Factor on the scores.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    dtype: torch.dtype
    scale: float


@attrs.frozen(eq=False)
class LatentPart:
    """Those requests of a step that have one mask, and their plan.

    Attributes:
        rows: ``[num_rows], int64, device``: where their queries are in the batch; None for the first ones.
        pages: The pages that these requests read.
        query_starts: ``[num_reqs + 1], int32``: the start of each request's queries.
        seq_lens: ``[num_reqs], int32``: tokens of each.
        page_size: Tokens per page.
        causal: Whether a query sees only its own and earlier positions.
        wrapper: FlashInfer's wrapper, with the plan; None until the pages are copied to the device.
    """

    rows: torch.Tensor | None
    pages: PageLists
    query_starts: IntArray
    seq_lens: IntArray
    page_size: int
    causal: bool
    wrapper: Any = None


@attrs.define(eq=False)
class LatentMetadata:
    """A step, and its plans.

    Attributes:
        num_tokens: Tokens of the batch that belong to requests; they come first.
        parts: All requests; none if there are no tokens, and two parts if the step has ranges of prompts.
    """

    num_tokens: int
    parts: tuple[LatentPart, ...]


class LatentMetadataBuilder(AttentionMetadataBuilder):
    """Plans a step. Graphs cannot be captured, because a plan decides the number of blocks of a kernel launch."""

    on_host = frozenset({"block_table"})

    def __init__(self, problem: LatentProblem, device: torch.device, kernels: str) -> None:
        """Keep the properties of the layers.

        Args:
            problem: The layers' properties.
            device: The device of the layers.
            kernels: FlashInfer's name of the kernels.
        """
        self._problem = problem
        self._device = device
        self._wrappers = Wrappers(lambda: BatchMLAPagedAttentionWrapper(workspace(device), backend=kernels))

    def load_kernels(self) -> None:
        """Plan a request of one token, so that kernels that cannot be loaded or compiled fail at set-up."""
        one = np.array([0, 1], dtype=np.int32)
        pages = PageLists(one, one[1:], torch.zeros(1, dtype=torch.int32, device=self._device))
        self.finish(LatentMetadata(1, (LatentPart(None, pages, one, one[1:], 1, causal=True),)))

    def build(self, metadata: CommonAttentionMetadata) -> LatentMetadata:
        """Return the step, not planned yet."""
        num_tokens = int(metadata.query_start_loc_cpu[-1])
        if has_ranges(metadata):
            batches = tuple(mask_batches(metadata))
        else:
            batches = (MaskBatch(metadata, None, metadata.causal),) if num_tokens else ()
        return LatentMetadata(num_tokens, tuple(_part_of(batch) for batch in batches))

    def finish(self, built: Any) -> LatentMetadata:
        """Return the step with its plans, which the library makes on the host, with the page lists on the device."""
        planned = LatentMetadata(built.num_tokens, ())
        planned.parts = tuple(attrs.evolve(part, wrapper=self._plan(planned, part)) for part in built.parts)
        return planned

    def _plan(self, holder: LatentMetadata, part: LatentPart) -> Any:
        problem, wrapper = self._problem, self._wrappers.lend(holder)
        wrapper.plan(
            torch.from_numpy(part.query_starts),
            torch.from_numpy(part.pages.starts),
            part.pages.ids,
            torch.from_numpy(part.seq_lens),
            problem.num_heads,
            problem.latent_size,
            problem.rope_size,
            part.page_size,
            part.causal,
            problem.scale,
            problem.dtype,
            problem.dtype,
        )
        return wrapper


def _part_of(batch: MaskBatch) -> LatentPart:
    starts = batch.common.query_start_loc_cpu.numpy()
    # The requests after the last one with tokens are padding.
    num_reqs = int(np.searchsorted(starts, starts[-1]))
    return LatentPart(
        rows=None if batch.rows is None else torch.from_numpy(batch.rows),
        pages=PageLists.of(batch.common, None).part(0, num_reqs),
        query_starts=starts[: num_reqs + 1],
        seq_lens=batch.common.seq_lens_cpu.numpy()[:num_reqs],
        page_size=batch.common.block_size,
        causal=batch.causal,
    )
