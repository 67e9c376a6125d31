"""FlashInfer's attention over latents, in the absorbed form: a latent is read once, as key and value of all heads.

Its kernels follow FlashMLA (https://github.com/deepseek-ai/FlashMLA) and DeepSeek-V2 (arXiv 2405.04434, 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvframe.contract import RANGE_ENDS, AttentionBackend, Capabilities, KVCache, LayerSpec, Slots
from kvframe_flashinfer.backend import FlashInferBackend, FlashInferOptions
from kvframe_flashinfer.latents_builder import LatentMetadata, LatentMetadataBuilder, LatentProblem

KV_UP = "kv_up"
"""The layer's parameter ``[num_heads, nope_size + head_size_v, latent_size]``. It turns a latent into a head's key, and
its value. The query's head size is ``nope_size`` plus the size of the rotated part, which comes last."""


class FlashInferMLABackend(AttentionBackend):
    """Serves layers that keep latents of DeepSeek's sizes (``kvframe-mla``), on pages of any size."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        masks=frozenset({"causal", "ranges"}),
        extensions=frozenset({RANGE_ENDS}),
        state=frozenset({"latent"}),
        separate_value_size=True,
        returns_lse=True,
        spec_sizes={"latent_size": frozenset({512}), "rope_size": frozenset({64})},
        preference=5,
    )
    options_class = FlashInferOptions
    conformance_form = "kvframe_mla.testing:Latents"

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why the device cannot be used, or why there are no kernels for it; None if it can be used."""
        return FlashInferBackend.unusable_reason()

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device, options: FlashInferOptions) -> None:
        """Keep the group's layers, and let FlashInfer load their kernels, or compile them once, which takes minutes.

        Raises:
            BackendError: The layers' sizes are inconsistent.
        """
        super().__init__(layers, device, options)
        # The spec is defined in another distribution, so its fields are accessed by name.
        spec: Any = layers[0].spec
        query = layers[0].query
        assert query is not None
        self._head_size_v: int = spec.head_size_v
        self._nope_size = query.head_size - spec.rope_size
        self._problem = LatentProblem(
            num_heads=query.num_heads,
            latent_size=spec.latent_size,
            rope_size=spec.rope_size,
            dtype=getattr(torch, spec.state_tensors()["latent"].dtype),
            scale=query.scale,
        )
        self._builder = LatentMetadataBuilder(self._problem, device, options.kernels)
        self._builder.load_kernels()

    def make_builder(self) -> LatentMetadataBuilder:
        """Return the step's builder, which plans."""
        return self._builder

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store new tokens' latents and rotated parts.

        Args:
            key: ``[num_tokens, 1, latent_size], device``: the latents.
            value: ``[num_tokens, 1, rope_size], device``: the rotated parts.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """
        latent = kv_cache["latent"]
        latent.index_put_(slots.indices, torch.cat([key, value], dim=-1)[:, 0].to(latent.dtype))

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
        """Compute attention by the step's plans, which apply the up-projection to queries before, to outputs after."""
        assert isinstance(metadata, LatentMetadata)
        problem, num_tokens = self._problem, metadata.num_tokens
        output = query.new_empty(*query.shape[:2], self._head_size_v) if out is None else out
        output[num_tokens:] = 0
        if lse is not None:
            lse.fill_(-math.inf)
        if not metadata.parts:
            return output
        kv_up = self.parameters[layer.name][KV_UP].to(problem.dtype)
        key_up, value_up = kv_up.split_with_sizes([self._nope_size, self._head_size_v], dim=1)
        nope, rotated = query[:num_tokens].to(problem.dtype).tensor_split([self._nope_size], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)
        latents, rotated_keys = kv_cache["latent"].split_with_sizes([problem.latent_size, problem.rope_size], dim=-1)
        found = absorbed.new_empty(absorbed.shape)
        # The kernel reads 16 bytes at a time, and the rotated part of a row may begin at any element.
        rotated = rotated.contiguous()
        for part in metadata.parts:
            rows = slice(num_tokens) if part.rows is None else part.rows
            own = found[rows]
            result = part.wrapper.run(
                absorbed[rows], rotated[rows], latents, rotated_keys, out=own, return_lse=lse is not None
            )
            if lse is not None:
                # The logarithms have base 2.
                lse[rows] = result[1] * math.log(2)
            if part.rows is not None:
                found[rows] = own
        wanted = output[:num_tokens].transpose(0, 1)
        if wanted.dtype == problem.dtype:
            torch.bmm(found.transpose(0, 1), value_up.transpose(1, 2), out=wanted)
        else:
            wanted.copy_(torch.bmm(found.transpose(0, 1), value_up.transpose(1, 2)))
        return output
