"""Attention temperatures that grow with the position: taken over from modules that read positions off their cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

_SWITCH = "attn_temperature_tuning"


@attrs.frozen
class Temperature:
    """A factor on each query, by its position: ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))``.

    Source: Llama 4, after https://huggingface.co/papers/2501.19399.

    Attributes:
        floor_scale: Tokens from one value to the next.
        attn_scale: How much it grows.
    """

    floor_scale: float
    attn_scale: float

    def scale(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the queries times their factors.

        Args:
            query: ``[num_tokens, num_heads, head_size], device``.
            positions: ``[num_tokens], int64, device``.
        """
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        factors = torch.log1p(steps) * self.attn_scale + 1.0
        return (query * factors[:, None, None]).to(query.dtype)


def temperature_of(module: nn.Module) -> Temperature | None:
    """Return the temperature that a module would apply by the length of its cache; None if it applies none."""
    attributes: Any = module
    if not getattr(module, _SWITCH, False) or getattr(module, "use_rope", False):
        return None
    return Temperature(floor_scale=attributes.floor_scale, attn_scale=attributes.attn_scale)


class Temperatures:
    """The temperatures of a model's attention modules, and the modules' own switches for them.

    A packed batch has no cache whose length would be a position, so while the model is attached the modules' own
    temperatures are off and the queries are scaled by ``of``.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note what ``modules`` apply; nothing is switched."""
        self.of: Mapping[nn.Module, Temperature] = {
            module: found for module in modules if (found := temperature_of(module)) is not None
        }
        self._original = {module: getattr(module, _SWITCH) for module in self.of}

    def switch_off(self) -> None:
        """Let no module apply its temperature."""
        for module in self._original:
            setattr(module, _SWITCH, False)

    def switch_on(self) -> None:
        """Give every module its temperature back."""
        for module, value in self._original.items():
            setattr(module, _SWITCH, value)
