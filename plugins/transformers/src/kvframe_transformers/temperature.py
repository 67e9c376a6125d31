"""Attention temperatures: factors on queries that grow with the position (Llama 4), computed for a packed batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

_SWITCH, _STEP = "attn_temperature_tuning", "floor_scale"
_SHORT_STEP = 4


@attrs.frozen(eq=False)
class Temperature:
    """A module's factor on each query: ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))``.

    Source: Llama 4, after https://huggingface.co/papers/2501.19399.

    Attributes:
        module: The module that has ``floor_scale`` and ``attn_scale``.
    """

    module: Any

    def scale(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the queries times their factors.

        Args:
            query: ``[num_tokens, num_heads, head_size], device``.
            positions: ``[num_tokens], int64, device``.
        """
        steps = torch.floor((positions.float() + 1.0) / self.module.floor_scale)
        factors: torch.Tensor = torch.log1p(steps) * self.module.attn_scale + 1.0
        return (query * factors[:, None, None]).to(query.dtype)


def temperature_of(module: nn.Module) -> Temperature | None:
    """Return the temperature that a module would compute from the length of its cache; None if it applies none."""
    if not getattr(module, _SWITCH, False) or getattr(module, "use_rope", False):
        return None
    return Temperature(module)


class Temperatures:
    """The temperatures of a model's attention modules, and the modules' own switches for them.

    A packed batch has no cache whose length is a position. So in a step of the engine, the modules' own temperatures
    are off and ``of`` scales the queries.

    Attributes:
        of: The temperature of each module that applies one.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Record the temperatures of ``modules``; nothing is switched."""
        self.of: Mapping[nn.Module, Temperature] = {
            module: temperature for module in modules if (temperature := temperature_of(module)) is not None
        }
        self._original = {module: getattr(module, _SWITCH) for module in self.of}

    def switch_off(self) -> None:
        """Switch every module's temperature off."""
        for module in self._original:
            setattr(module, _SWITCH, False)

    def switch_on(self) -> None:
        """Switch every module's temperature on."""
        for module, value in self._original.items():
            setattr(module, _SWITCH, value)

    @contextmanager
    def in_short_steps(self) -> Iterator[None]:
        """Make the factors change every few tokens inside the block, both in the modules and in ``of``.

        The factors of published models change every few thousand tokens, so a short prompt would not test the formula.
        """
        original = {module: getattr(module, _STEP) for module in self.of}
        try:
            for module in original:
                setattr(module, _STEP, _SHORT_STEP)
            yield
        finally:
            for module, value in original.items():
                setattr(module, _STEP, value)
