"""Attention over paged latents in Triton.

For decodes, attention is absorbed: a latent is read once, as key and value of all heads. For prompts, latents are first
expanded to keys and values, for a few heads at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kvframe_kernels.triton.mla import LatentAttention
from kvframe_kernels.triton.pages import copy_pages
from kvframe_kernels.triton.write import write_kv

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMetadataBuilder,
    Capabilities,
    GraphCapture,
    KVCache,
    LayerSpec,
    MoreInputs,
    PageCopier,
    Slots,
)
from kvframe_triton.backend import num_cores
from kvframe_triton.builder import TritonMetadata
from kvframe_triton.chosen import ChosenMetadata, ChosenMetadataBuilder
from kvframe_triton.latents_builder import ExpandedMetadata, Forms, LatentMetadata, LatentMetadataBuilder

KV_UP = "kv_up"
"""The layer's parameter ``[num_heads, nope_size + head_size_v, latent_size]``. It turns a latent into a head's key, and
its value. The query's head size is ``nope_size`` plus the size of the rotated part, which comes last."""


class TritonMLABackend(AttentionBackend):
    """Serves layers that keep latents (``kvframe-mla``), decodes and prompts alike."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "ranges"}),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        state=frozenset({"latent"}),
        separate_value_size=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
        capture=GraphCapture.ALWAYS,
        preference=10,
    )
    conformance_form = "kvframe_mla.testing:Latents"

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return that there is no CUDA device; None if there is one."""
        return None if torch.cuda.is_available() else "needs a CUDA device; torch sees none"

    @classmethod
    def page_copier(cls) -> PageCopier:
        """Return the kernel that copies pages."""
        return copy_pages

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        """Keep the group's layers; raise ``BackendError`` if their sizes are inconsistent."""
        super().__init__(layers, device)
        spec, query = layers[0].spec, layers[0].query
        assert spec is not None
        assert query is not None
        # The spec is defined in another distribution, so its fields are accessed by name.
        sizes: Any = spec
        self._head_size_v: int = sizes.head_size_v
        self._choice = query.choice
        self._nope_size = query.head_size - sizes.rope_size
        self._dtype: torch.dtype = getattr(torch, spec.state_tensors()["latent"].dtype)
        attention = LatentAttention(
            num_heads=query.num_heads,
            latent_size=sizes.latent_size,
            rope_size=sizes.rope_size,
            block_size=spec.block_size,
            scale=query.scale,
            by_token=query.choice is not None,
            num_cores=num_cores(device),
        )
        self._forms = Forms(latents=attention, nope_size=self._nope_size, head_size_v=self._head_size_v)

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the builder of the step's work items."""
        if self._choice is not None:
            return ChosenMetadataBuilder(self._forms.latents, self._dtype, self._choice)
        return LatentMetadataBuilder(self._forms, self._dtype)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store new tokens' latents and rotated parts.

        Args:
            key: ``[num_tokens, 1, latent_size], device``: the latents.
            value: ``[num_tokens, 1, rope_size], device``: the rotated parts.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """
        latent = kv_cache["latent"].unsqueeze(2)
        parts = latent.split_with_sizes([self._forms.latents.latent_size, self._forms.latents.rope_size], dim=-1)
        write_kv(key, value, {"k": parts[0], "v": parts[1]}, slots.indices)

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
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Compute the first tokens in the absorbed form, the others in the expanded one; chosen ones all absorbed."""
        kv_up = self.parameters[layer.name][KV_UP].to(query.dtype)
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = out
        if output is None:
            output = query.new_empty(*query.shape[:2], self._head_size_v)
        latent = kv_cache["latent"]
        if more is not None:
            assert isinstance(metadata, ChosenMetadata)
            assert more.chosen is not None
            table = metadata.slots(layer, more.chosen)[:, 0]
            step = TritonMetadata(table, metadata.numbers, metadata.programs, causal=False, has_starts=False)
            self._absorbed(query, latent, kv_up, step, None, output, lse)
            return output
        assert isinstance(metadata, LatentMetadata)
        size = metadata.num_absorbed
        if size:
            lse_part = None if lse is None else lse[:size]
            step, range_ends = metadata.absorbed, metadata.range_ends
            self._absorbed(query[:size], latent, kv_up, step, range_ends, output[:size], lse_part)
        if metadata.expanded is not None:
            lse_part = None if lse is None else lse[size:]
            range_ends = None if metadata.range_ends is None else metadata.range_ends[size:]
            self._expanded(query[size:], latent, kv_up, metadata.expanded, range_ends, output[size:], lse_part)
        return output

    def _absorbed(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        kv_up: torch.Tensor,
        step: TritonMetadata,
        range_ends: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend to latents; queries are first multiplied by the up-projection, outputs afterwards."""
        attention = self._forms.latents
        key_up, value_up = kv_up.split_with_sizes([self._nope_size, self._head_size_v], dim=1)
        nope, rotated = query.tensor_split([self._nope_size], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)
        found = query.new_empty(*query.shape[:2], attention.latent_size)
        for launch in attention.launches(
            absorbed,
            rotated,
            latent,
            step.block_table,
            step.numbers,
            step.programs,
            found,
            causal=step.causal,
            has_starts=step.has_starts,
            range_ends=range_ends,
            lse=lse,
        ):
            launch.run()
        torch.bmm(found.transpose(0, 1), value_up.transpose(1, 2), out=output.transpose(0, 1))

    def _expanded(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        kv_up: torch.Tensor,
        expanded: ExpandedMetadata,
        range_ends: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Expand the latents to keys and values for a few heads at a time, and attend to these."""
        attention, step = expanded.attention, expanded.metadata
        latent_size, nope_size = self._forms.latents.latent_size, self._nope_size
        tokens = latent.index_select(0, expanded.pages).to(query.dtype)
        latents, rotated = tokens.tensor_split([latent_size], dim=-1)
        for first in range(0, query.shape[1], attention.num_heads):
            heads = slice(first, first + attention.num_heads)
            made = (latents.flatten(0, 1) @ kv_up[heads].flatten(0, 1).T).view(
                *latents.shape[:2], attention.num_heads, -1
            )
            key = made.new_empty(*made.shape[:3], attention.head_size)
            key[..., :nope_size] = made[..., :nope_size]
            key[..., nope_size:] = rotated.unsqueeze(2)
            # The kernels write to contiguous memory: to the output itself if they compute all heads at once.
            is_whole = attention.num_heads == query.shape[1]
            found = output if is_whole else query.new_empty(query.shape[0], attention.num_heads, self._head_size_v)
            found_lse = lse
            if lse is not None and not is_whole:
                found_lse = lse.new_empty(query.shape[0], attention.num_heads)
            for launch in attention.launches(
                query[:, heads],
                {"k": key, "v": made[..., nope_size:]},
                step.block_table,
                step.numbers,
                step.programs,
                found,
                causal=step.causal,
                has_starts=step.has_starts,
                range_ends=range_ends,
                lse=found_lse,
            ):
                launch.run()
            if not is_whole:
                output[:, heads] = found
                if lse is not None and found_lse is not None:
                    lse[:, heads] = found_lse
