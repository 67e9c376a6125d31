"""Latents for the conformance kit: how to draw them, and the keys and values that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from kvframe_testing.state import AnyMask, Draw, StateForm

from kvframe.contract import KVCacheSpec, LayerSpec
from kvframe_mla.spec import KV_UP, MLASpec


@attrs.frozen(kw_only=True)
class LatentGridSpec(AnyMask, MLASpec):
    """Latents, under any mask."""

    kind: ClassVar[str] = "mla_conformance_grid"


class Latents(StateForm):
    """A latent and a rotated part per token, for all heads; the up-projection turns them into keys and values."""

    spec_class = LatentGridSpec

    def sizes(self, head_size: int) -> dict[str, Any]:
        """Return sizes that all differ; the larger part of a key is made from the latent."""
        return {"latent_size": head_size + 4, "rope_size": head_size // 4, "head_size_v": head_size // 2}

    def usual_head_size(self, limits: Mapping[str, frozenset[int]]) -> int:
        """Return a head size that is larger than the rotated part."""
        return 8 + min(limits.get("rope_size", {0}))

    def real_sizes(self, head_sizes: frozenset[int] | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the sizes of DeepSeek-V3 and of MiniCPM3."""
        sizes = {
            "latent_size=512": {"head_size": 192, "latent_size": 512, "rope_size": 64, "head_size_v": 128},
            "latent_size=256": {"head_size": 96, "latent_size": 256, "rope_size": 32, "head_size_v": 64},
        }
        return {name: {**options, "num_heads": 32} for name, options in sizes.items()}

    def features(self, head_size: int) -> Mapping[str, Mapping[str, Any]]:
        """Return values longer than keys, a latent that is more expensive absorbed, one that never is, and one head."""
        return {
            "long_values": {"head_size_v": head_size + 8},
            "large_latent": {"latent_size": 8 * head_size},
            "small_latent": {"latent_size": 2, "rope_size": head_size - 1},
            "one_head": {"num_heads": 1},
            "no_rotated_part": {"rope_size": 0},
        }

    def head_size_v(self, spec: KVCacheSpec) -> int:
        """Return the size in the spec."""
        assert isinstance(spec, MLASpec)
        return spec.head_size_v

    def draw(self, spec: KVCacheSpec, num_tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[num_tokens, 1, latent_size]`` and ``[num_tokens, 1, rope_size]``."""
        assert isinstance(spec, MLASpec)
        return draw(num_tokens, 1, spec.latent_size), draw(num_tokens, 1, spec.rope_size)

    def draw_parameters(self, layer: LayerSpec, draw: Draw) -> dict[str, torch.Tensor]:
        """Return an up-projection that makes vectors of ordinary size."""
        assert isinstance(layer.spec, MLASpec)
        assert layer.query is not None
        return {KV_UP: draw(*layer.spec.parameters(layer.query)[KV_UP]) * layer.spec.latent_size**-0.5}

    def expand(
        self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each head's key, with the rotated part after it, and its value."""
        assert isinstance(layer.spec, MLASpec)
        num_heads, nope_size = len(parameters[KV_UP]), parameters[KV_UP].shape[1] - layer.spec.head_size_v
        nope, values = torch.einsum("til,hdl->thd", key, parameters[KV_UP]).tensor_split([nope_size], dim=-1)
        return torch.cat([nope, value.expand(-1, num_heads, -1)], dim=-1), values
