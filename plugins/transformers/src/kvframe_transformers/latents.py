"""Multi-head latent attention: makes modules give their latents to the engine, unexpanded.

Such a module of transformers stores one latent vector per token, and its method ``expand_kv(latents, rotated)`` makes
the keys and values of all heads from it. In a step of the engine, the method returns both arguments unchanged, so that
the attention function gets the tensors that are to be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from kvframe.contract import LayerDescription, ModelError

KIND = "mla"
"""The kind of the cache spec of these layers."""

_EXPAND = "expand_kv"
_KV_UP = "kv_up"
_CHECKED_TOKENS = 3


@attrs.frozen(eq=False)
class Expansion:
    """The arguments and the result of one call of ``expand_kv``.

    Attributes:
        latents: ``[1, 1, num_tokens, latent_size]``.
        rotated: ``[1, 1, num_tokens, rope_size]``.
        key: ``[1, num_heads, num_tokens, nope_size + rope_size]``.
        value: ``[1, num_heads, num_tokens, head_size_v]``.
    """

    latents: torch.Tensor
    rotated: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def is_of(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether these keys and values are the result of this call."""
        return key is self.key and value is self.value

    @property
    def options(self) -> dict[str, Any]:
        """The options of the layer's cache spec."""
        sizes = {"latent_size": self.latents, "rope_size": self.rotated, "head_size_v": self.value}
        return {name: tensor.shape[-1] for name, tensor in sizes.items()}


@contextmanager
def noting_expansions(model: nn.Module, expansions: dict[nn.Module, Expansion]) -> Iterator[None]:
    """Record the last call of ``expand_kv`` of each module of ``model`` inside the block."""

    def noting(module: nn.Module, expand: Callable[..., Any]) -> Callable[..., Any]:
        def noted(latents: torch.Tensor, rotated_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = expand(latents, rotated_keys)
            expansions[module] = Expansion(latents, rotated_keys, key, value)
            return key, value

        return noted

    modules = [module for module in model.modules() if callable(getattr(module, _EXPAND, None))]
    for module in modules:
        setattr(module, _EXPAND, noting(module, getattr(module, _EXPAND)))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _EXPAND)


class Latents:
    """The latent layers of a model, and their modules' own expansions.

    Invariant: between ``switch_on`` and ``switch_off`` each module has an ``expand_kv`` that expands nothing;
    otherwise it has the one of its class.
    """

    def __init__(self, layers: Mapping[str, LayerDescription], modules: Mapping[str, nn.Module], name: str) -> None:
        """Record the latent layers; their modules stay as they are.

        Args:
            layers: A model's layers by name.
            modules: Their modules, by the same names.
            name: The model's name in errors.
        """
        self._layers = {path: layer for path, layer in layers.items() if layer.kind == KIND}
        self._modules: dict[str, Any] = {path: modules[path] for path in self._layers if path in modules}
        self._name = name

    def switch_on(self) -> None:
        """Make every module pass its latents to its attention unchanged."""
        for module in self._modules.values():
            setattr(module, _EXPAND, lambda latents, rotated_keys: (latents, rotated_keys))

    def switch_off(self) -> None:
        """Restore every module's own expansion. Safe to call twice."""
        for module in self._modules.values():
            vars(module).pop(_EXPAND, None)

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters of each layer's backend: ``kv_up: [num_heads, nope_size + head_size_v, latent_size]``.

        Call this while the modules have their own ``expand_kv``: its result is compared with that of the weights.

        Raises:
            ModelError: A module does not expand its latents by the weights of ``kv_b_proj`` alone.
        """
        return {path: {_KV_UP: self._up_projection(path)} for path in self._modules}

    def _up_projection(self, path: str) -> torch.Tensor:
        module, options, query = self._modules[path], self._layers[path].options, self._layers[path].query
        nope_size = query["head_size"] - options["rope_size"]
        shape = query["num_heads"], nope_size + options["head_size_v"], options["latent_size"]
        weight: Any = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if hasattr(weight, "to_local"):
            weight = weight.to_local()  # of the heads of this rank
        if isinstance(weight, torch.Tensor) and weight.shape == (shape[0] * shape[1], shape[2]):
            kv_up = weight.detach().view(shape)
            if _expands_by(module, kv_up, nope_size, options["rope_size"]):
                return kv_up
        raise ModelError(
            f"layer {path!r} of {self._name} ({type(module).__name__}) does not expand its latents by the weights of "
            "kv_b_proj alone; only a model adapter of its own can serve it"
        )


def _expands_by(module: Any, kv_up: torch.Tensor, nope_size: int, rope_size: int) -> bool:
    """Return whether ``kv_up`` gives the same keys and values as the module, for a few random tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> torch.Tensor:
        return torch.randn(1, 1, _CHECKED_TOKENS, size, generator=generator).to(kv_up)

    latents, rotated_keys = draw(kv_up.shape[2]), draw(rope_size)
    with torch.inference_mode():
        expansion = torch.cat([tensor.flatten() for tensor in module.expand_kv(latents, rotated_keys)])
        nope, value = (latents @ kv_up.transpose(1, 2)).tensor_split([nope_size], dim=-1)
        key = torch.cat([nope, rotated_keys.expand(-1, len(kv_up), -1, -1)], dim=-1)
        expected_expansion = torch.cat([key.flatten(), value.flatten()])
        if expansion.shape != expected_expansion.shape:
            return False
        bound = torch.finfo(kv_up.dtype).eps ** 0.5 * expected_expansion.abs().max()
        return bool((expansion - expected_expansion).abs().max() <= bound)
