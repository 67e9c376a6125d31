"""Plans a step over latents on the host: one FlashInfer wrapper for all its requests."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from kvframe.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from kvframe_flashinfer.pages import IntArray, PageLists
from kvframe_flashinfer.plans import Wrappers, workspace


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


@attrs.define(eq=False)
class LatentMetadata:
    """A step, and its plan.

    Attributes:
        num_tokens: Tokens of the batch that belong to requests; they come first.
        pages: The pages that these requests read.
        query_starts: ``[num_reqs + 1], int32``: the start of each request's queries.
        seq_lens: ``[num_reqs], int32``: tokens of each.
        page_size: Tokens per page.
        causal: Whether a query sees only its own and earlier positions.
        wrapper: FlashInfer's wrapper, with the plan; None if there are no tokens, and until the pages are copied to the
            device.
    """

    num_tokens: int
    pages: PageLists
    query_starts: IntArray
    seq_lens: IntArray
    page_size: int
    causal: bool
    wrapper: Any = None


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
        self.finish(LatentMetadata(1, pages, one, one[1:], 1, causal=True))

    def build(self, metadata: CommonAttentionMetadata) -> LatentMetadata:
        """Return the step, not planned yet."""
        starts = metadata.query_start_loc_cpu.numpy()
        # The requests after the last one with tokens are padding.
        num_reqs = int(np.searchsorted(starts, starts[-1]))
        return LatentMetadata(
            num_tokens=int(starts[-1]),
            pages=PageLists.of(metadata, None).part(0, num_reqs),
            query_starts=starts[: num_reqs + 1],
            seq_lens=metadata.seq_lens_cpu.numpy()[:num_reqs],
            page_size=metadata.block_size,
            causal=metadata.causal,
        )

    def finish(self, built: Any) -> LatentMetadata:
        """Return the step with its plan, which the library makes on the host, with the page list on the device."""
        planned: LatentMetadata = attrs.evolve(built)
        if planned.num_tokens:
            planned.wrapper = self._plan(planned)
        return planned

    def _plan(self, step: LatentMetadata) -> Any:
        problem, wrapper = self._problem, self._wrappers.lend(step)
        wrapper.plan(
            torch.from_numpy(step.query_starts),
            torch.from_numpy(step.pages.starts),
            step.pages.ids,
            torch.from_numpy(step.seq_lens),
            problem.num_heads,
            problem.latent_size,
            problem.rope_size,
            step.page_size,
            step.causal,
            problem.scale,
            problem.dtype,
            problem.dtype,
        )
        return wrapper
