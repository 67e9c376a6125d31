"""The attention function that transformers calls while an engine runs a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from transformers import AttentionInterface

from kvframe.errors import ModelError
from kvframe.model.description import LayerDescription
from kvframe_transformers.discovery import scale_of

RUN_TIME = "kvframe"
"""The attention implementation of an attached model. It has no mask implementation, so that no mask is built."""


class RunLayer(Protocol):
    """One attention layer of an engine, as ``AttentionLayers`` holds it."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: ``[num_tokens, num_heads, head_size]`` to ``[num_tokens, num_heads, head_size_v]``, device."""


@attrs.frozen(eq=False)
class Route:
    """Where one attention module's calls go, and what every call must agree with.

    Attributes:
        layer: The engine's layer.
        name: The layer's name.
        scale: The factor on the query-key products that it was planned with.
        soft_cap: Likewise, its soft cap.
        shares: Whether it reads another layer's cache and stores nothing itself.
    """

    layer: RunLayer
    name: str
    scale: float
    soft_cap: float | None
    shares: bool

    @classmethod
    def of(cls, description: LayerDescription, layer: RunLayer) -> Route:
        """Return the route from the layer that ``description`` planned to ``layer``."""
        return cls(
            layer=layer,
            name=description.name,
            scale=description.query["scale"],
            soft_cap=description.query["soft_cap"],
            shares=description.shares_with is not None,
        )


Routes = Mapping[nn.Module, Route]
"""The routes of one loaded model, by the attention module itself."""

_ROUTES: ContextVar[Routes] = ContextVar("kvframe_transformers_routes")


@contextmanager
def routed(routes: Routes) -> Iterator[None]:
    """Send the attention of the model that runs inside the block along ``routes``."""
    token = _ROUTES.set(routes)
    try:
        yield
    finally:
        _ROUTES.reset(token)


def _run_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the engine's layer.

    Args:
        module: The model's attention module.
        query: ``[1, num_heads, num_tokens, head_size], device``.
        key: ``[1, num_kv_heads, num_tokens, head_size], device``.
        value: ``[1, num_kv_heads, num_tokens, head_size_v], device``.
        attention_mask: Not used: the engine's metadata says which tokens are seen.
        scaling: Factor on the query-key products.
        softcap: Soft cap of the scores.
        s_aux: ``[num_heads], device``: learned sink logits.

    Returns:
        ``[1, num_tokens, num_heads, head_size_v], device``, and no attention weights.
    """
    try:
        route = _ROUTES.get()[module]
    except LookupError:
        raise ModelError(
            f"{type(module).__name__} ran outside of the engine that it is attached to; close the engine (or detach "
            "the model) before calling the model directly"
        ) from None
    if scale_of(scaling, query.shape[-1]) != route.scale or softcap != route.soft_cap:
        raise ModelError(
            f"layer {route.name!r} asks for scale {scaling} and soft cap {softcap}, but was planned with "
            f"{route.scale} and {route.soft_cap}; its checkpoint and its config do not belong together"
        )
    out = (
        route.layer(query[0].transpose(0, 1), None, None, s_aux)
        if route.shares
        else route.layer(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux)
    )
    return out.unsqueeze(0), None


AttentionInterface.register(RUN_TIME, _run_attention)
