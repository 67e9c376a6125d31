"""Planning a step over latents on the host: all its requests by one wrapper."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from kvframe.attention.backend import AttentionMetadataBuilder
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe_flashinfer.pages import IntArray, PageLists
from kvframe_flashinfer.plans import Wrappers, workspace


@attrs.frozen(kw_only=True)
class LatentProblem:
    """What of a group's layers the plans depend on.

    Attributes:
        num_heads: Query heads.
        latent_size: Elements of a latent.
        rope_size: Elements of the rotated part of a key.
        dtype: What pages hold, and the kernels compute in.
        scale: Factor on the scores.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    dtype: torch.dtype
    scale: float


@attrs.define(eq=False)
class LatentMetadata:
    """A step's plan.

    Attributes:
        num_tokens: Tokens of the batch that belong to requests; they come first.
        wrapper: FlashInfer's wrapper, with the plan; None if there are no such tokens.
    """

    num_tokens: int
    wrapper: Any = None


class LatentMetadataBuilder(AttentionMetadataBuilder):
    """Plans a step. Graphs cannot be captured: a plan decides how many blocks a kernel is launched with."""

    on_host = True

    def __init__(self, problem: LatentProblem, device: torch.device, kernels: str) -> None:
        """Take what the layers have in common.

        Args:
            problem: The layers' sizes.
            device: Where they run.
            kernels: FlashInfer's name of the kernels.
        """
        self._problem = problem
        self._device = device
        self._wrappers = Wrappers(lambda: BatchMLAPagedAttentionWrapper(workspace(device), backend=kernels))

    def load_kernels(self) -> None:
        """Plan a request of one token, so that what cannot be loaded or compiled fails at set-up."""
        one = np.array([0, 1], dtype=np.int32)
        pages = PageLists(one, one[1:], torch.zeros(1, dtype=torch.int32))
        self._plan(LatentMetadata(1), pages, one, one[1:], 1, causal=True)

    def build(self, metadata: CommonAttentionMetadata) -> LatentMetadata:
        """Return the step's plan."""
        starts = metadata.query_start_loc_cpu.numpy()
        built = LatentMetadata(int(starts[-1]))
        if built.num_tokens:
            # What lies behind the last request with tokens fills a batch up.
            num_reqs = int(np.searchsorted(starts, built.num_tokens))
            built.wrapper = self._plan(
                built,
                PageLists.of(metadata, None, self._device).part(0, num_reqs),
                starts[: num_reqs + 1],
                metadata.seq_lens_cpu.numpy()[:num_reqs],
                metadata.block_size,
                causal=metadata.causal,
            )
        return built

    def _plan(
        self,
        holder: LatentMetadata,
        pages: PageLists,
        query_starts: IntArray,
        seq_lens: IntArray,
        page_size: int,
        *,
        causal: bool,
    ) -> Any:
        problem, wrapper = self._problem, self._wrappers.lend(holder)
        wrapper.plan(
            torch.from_numpy(query_starts),
            torch.from_numpy(pages.starts),
            pages.ids,
            torch.from_numpy(seq_lens),
            problem.num_heads,
            problem.latent_size,
            problem.rope_size,
            page_size,
            causal,
            problem.scale,
            problem.dtype,
            problem.dtype,
        )
        return wrapper
