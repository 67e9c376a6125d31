"""Attention over paged latents in Triton: absorbed, so that one read of a latent is key and value of all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kvframe_kernels.triton.mla import LatentAttention
from kvframe_kernels.triton.write import write_kv

from kvframe.attention.backend import AttentionBackend, Capabilities, KVCache
from kvframe.attention.metadata import SEQ_STARTS
from kvframe.errors import BackendError
from kvframe.specs import LayerSpec
from kvframe_triton.backend import num_cores
from kvframe_triton.builder import TritonMetadata, TritonMetadataBuilder

KV_UP = "kv_up"
"""The layer's parameter ``[num_heads, nope_size + head_size_v, latent_size]``: what makes a head's key, then its value,
of a latent. The query's head size is ``nope_size``, and behind it the rotated part."""


class TritonMLABackend(AttentionBackend):
    """Serves layers that keep latents (``kvframe-mla``), decodes and prompts alike."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset({"causal"}),
        extensions=frozenset({SEQ_STARTS}),
        state=frozenset({"latent"}),
        separate_value_size=True,
        preference=10,
    )
    conformance_form = "kvframe_mla.testing:Latents"

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return that there is no CUDA device, if there is none."""
        return None if torch.cuda.is_available() else "needs a CUDA device; torch sees none"

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        """Take the group's layers; raises ``BackendError`` where sizes do not fit together."""
        super().__init__(layers, device)
        spec, query = layers[0].spec, layers[0].query
        assert spec is not None
        assert query is not None
        # The spec is another distribution's: its fields are known by name.
        sizes: Any = spec
        self._head_size_v: int = sizes.head_size_v
        self._nope_size = query.head_size - sizes.rope_size
        self._dtype: torch.dtype = getattr(torch, spec.state_tensors()["latent"].dtype)
        self._attention = LatentAttention(
            num_heads=query.num_heads,
            latent_size=sizes.latent_size,
            rope_size=sizes.rope_size,
            block_size=spec.block_size,
            scale=query.scale,
            num_cores=num_cores(device),
        )
        self._up: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if self._nope_size < 1:
            raise BackendError(
                f"layer {layers[0].name!r} has queries of {query.head_size} elements, which leave nothing beside the "
                f"rotated part of {sizes.rope_size}"
            )

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take ``kv_up`` of a layer; raises ``BackendError`` where it is missing or of another shape."""
        attention = self._attention
        expected = attention.num_heads, self._nope_size + self._head_size_v, attention.latent_size
        found = tuple(parameters[KV_UP].shape) if KV_UP in parameters else None
        if found != expected:
            raise BackendError(f"layer {layer.name!r} needs the parameter {KV_UP} of shape {expected}, and got {found}")
        super().bind(layer, parameters)
        key_up, value_up = parameters[KV_UP].split_with_sizes([self._nope_size, self._head_size_v], dim=1)
        self._up[layer.name] = key_up, value_up.transpose(1, 2)

    def make_builder(self) -> TritonMetadataBuilder:
        """Return the builder of the step's work items."""
        return TritonMetadataBuilder(self._attention, self._dtype, self.device)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store new tokens' latents and rotated parts.

        Args:
            key: ``[num_tokens, 1, latent_size], device``: the latents.
            value: ``[num_tokens, 1, rope_size], device``: the rotated parts.
            kv_cache: The layer's state tensors; written to.
            slots: Block id and offset of each token, ``[num_tokens], int64, device`` both.
        """
        latent = kv_cache["latent"].unsqueeze(2)
        parts = latent.split_with_sizes([self._attention.latent_size, self._attention.rope_size], dim=-1)
        write_kv(key, value, {"k": parts[0], "v": parts[1]}, slots)

    def forward(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Launch the kernels of the step, with the up-projection multiplied into queries before and outputs behind."""
        assert isinstance(metadata, TritonMetadata)
        if layer.name not in self._up:
            raise BackendError(f"layer {layer.name!r} attends to latents, and its model bound no {KV_UP}")
        key_up, value_up = (each.to(query.dtype) for each in self._up[layer.name])
        query = query if query.stride(-1) == 1 else query.contiguous()
        nope, rotated = query.tensor_split([self._nope_size], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)
        latents = query.new_empty(*query.shape[:2], self._attention.latent_size)
        launches = self._attention.launches(
            absorbed,
            rotated,
            kv_cache["latent"],
            metadata.block_table,
            metadata.work,
            latents,
            causal=metadata.causal,
            has_starts=metadata.has_starts,
        )
        for launch in launches:
            launch.run()
        return torch.bmm(latents.transpose(0, 1), value_up).transpose(0, 1)
