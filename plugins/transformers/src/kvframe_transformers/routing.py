"""The attention function that transformers calls while an engine runs a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvframe.contract import (
    AttachedLayer,
    ChosenTokens,
    LayerDescription,
    ModelError,
    lse_dtype,
    merge_attention,
)
from kvframe_transformers.by_content import ByContent
from kvframe_transformers.direct_attention import DirectAttention, replacing
from kvframe_transformers.discovery import scale_of
from kvframe_transformers.operators import OpaqueAttention
from kvframe_transformers.states import Forward
from kvframe_transformers.temperature import Temperature

OPAQUE = "kvframe_attend"
"""The attribute of a compiled model's attention modules for an object that the compiler must not trace."""

RUN_TIME = "kvframe"
"""The attention implementation of an attached model. It has no mask implementation, so that no mask is built."""

RUN_TIME_DIRECT = "kvframe_direct"
"""The same for a model with modules that compute attention, or choose tokens, by a mask: they need some mask."""


@attrs.frozen(eq=False)
class Route:
    """The target of one attention module's calls, and the values that every call must agree with.

    Attributes:
        layer: The engine's layer.
        name: The layer's name.
        scale: The planned factor on the query-key products.
        soft_cap: The planned soft cap.
        shares: Whether it reads another layer's cache and stores nothing itself.
        temperature: The factor on its queries by position, if there is one.
        skipped: Whether it computes only the rows that a step keeps.
        chosen_block_size: Tokens of the blocks that are chosen for its queries; None if it reads all tokens.
        merged: Whether it also reads what the module's compressor made.
    """

    layer: AttachedLayer
    name: str
    scale: float
    soft_cap: float | None
    shares: bool
    temperature: Temperature | None = None
    skipped: bool = False
    chosen_block_size: int | None = None
    merged: bool = False

    @classmethod
    def of(
        cls,
        description: LayerDescription,
        layer: AttachedLayer,
        temperature: Temperature | None = None,
        skipped: bool = False,
    ) -> Route:
        """Return the route from the layer that ``description`` planned to ``layer``."""
        return cls(
            layer=layer,
            name=description.name,
            scale=description.query["scale"],
            soft_cap=description.query["soft_cap"],
            shares=description.shares_with is not None,
            temperature=temperature,
            skipped=skipped,
            chosen_block_size=choice.get("block_size", 1) if (choice := description.query.get("choice")) else None,
            merged=description.query.get("merged", False),
        )


Routes = Mapping[nn.Module, Sequence[Route]]
"""The routes of one loaded model, by attention module: one for each of its calls in a forward."""


def routes_by_module(routes: Mapping[str, Route], modules: Mapping[str, nn.Module]) -> Routes:
    """Return the routes of each module in the order of its calls.

    Args:
        routes: By layer, in the order they run.
        modules: The modules, by layer.
    """
    by_module: dict[nn.Module, list[Route]] = {}
    for layer, route in routes.items():
        by_module.setdefault(modules[layer], []).append(route)
    return by_module


@attrs.frozen(eq=False)
class RunningStep:
    """The running step, for the attention and the hooks of a model.

    Attributes:
        routes: The targets of its attention calls.
        positions: ``[num_tokens], int64, device``: of the packed tokens.
        kept_rows: ``[num_kept], int64, device``: the packed tokens that the skipped layers compute; None for all.
        by_content: The model's indexers and compressors; None for none.
        num_calls: The calls so far of each module that attends several times.
    """

    routes: Routes
    positions: torch.Tensor
    kept_rows: torch.Tensor | None = None
    by_content: ByContent | None = None
    num_calls: dict[nn.Module, int] = attrs.field(factory=dict)


_STEP: ContextVar[RunningStep | None] = ContextVar("kvframe_transformers_step", default=None)


def running_step() -> RunningStep | None:
    """Return the running step; None if a model runs outside of its engine."""
    return _STEP.get()


@contextmanager
def running(step: RunningStep) -> Iterator[None]:
    """Make ``step`` the running step inside the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _run_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by the engine's layer.

    Args:
        module: The model's attention module.
        query: ``[1, num_heads, num_tokens, head_size], device``.
        key: ``[1, num_kv_heads, num_tokens, head_size], device``; for latents ``[1, 1, num_tokens, latent_size]``.
        value: ``[1, num_kv_heads, num_tokens, head_size_v], device``; likewise ``[1, 1, num_tokens, rope_size]``.
        attention_mask: Not used: the engine's metadata contain the mask. Of some modules that read chosen tokens, the
            choices of an earlier layer.
        scaling: Factor on the query-key products.
        softcap: Soft cap of the scores.
        s_aux: ``[num_heads], device``: learned sink logits.
        indices: ``[1, num_tokens, max_chosen], device``: the tokens that an earlier layer chose.

    Returns:
        ``[1, num_tokens, num_heads, head_size_v], device``, and no attention weights.
    """
    if torch.compiler.is_compiling():
        opaque: OpaqueAttention = getattr(module, OPAQUE)
        output = opaque(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux)
        return output.unsqueeze(0), None
    step, route = _route_of(module)
    if scale_of(scaling, query.shape[-1]) != route.scale or softcap != route.soft_cap:
        raise ModelError(
            f"layer {route.name!r} asks for scale {scaling} and soft cap {softcap}, but was planned with "
            f"{route.scale} and {route.soft_cap}; its checkpoint and its config do not belong together"
        )
    choice = None
    if route.chosen_block_size is not None:
        assert step.by_content is not None
        choice = step.by_content.indexers.read_by(
            module, attention_mask if indices is None else indices, route.chosen_block_size
        )
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if route.merged:
        assert step.by_content is not None
        lse = rows[0].new_empty(rows[0].shape[:2], dtype=lse_dtype(rows[0].dtype))
        own_output = route.layer(*rows, s_aux, lse=lse)
        output, other_lse = step.by_content.compressors.attend(module, rows[0], route.scale)
        return merge_attention([own_output, output], [lse, other_lse])[0].unsqueeze(0), None
    return _attend(step, route, *rows, s_aux, choice).unsqueeze(0), None


def direct_forward(module: nn.Module, forward: Forward) -> Forward:
    """Return the forward in a step of a module that computes attention itself."""

    def attend(attention: DirectAttention, value: torch.Tensor) -> torch.Tensor:
        query, key = attention.query.to(value.dtype), attention.key.to(value.dtype)
        return _run_attention(module, query, key, value, scaling=attention.scale)[0].transpose(1, 2)

    return replacing(forward, attend)


def attend_now(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by the engine's layer, in the running step; arguments and result as for ``AttentionLayer``.

    Args:
        module: The model's attention module.
        query: The module's query.
        key: The module's key; not used if the layer shares another layer's cache.
        value: Likewise.
        sinks: The module's sinks.
    """
    return _attend(*_route_of(module), query, key, value, sinks)


def _attend(
    step: RunningStep,
    route: Route,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    choice: ChosenTokens | None = None,
) -> torch.Tensor:
    if route.temperature is not None:
        leaves_rows_out = route.skipped and step.kept_rows is not None
        query = route.temperature.scale(query, step.positions[step.kept_rows] if leaves_rows_out else step.positions)
    stored_tensors = (None, None) if route.shares else (key, value)
    if choice is not None:
        return route.layer(query, *stored_tensors, sinks, chosen=choice)
    return route.layer(query, *stored_tensors, sinks)


def _route_of(module: nn.Module) -> tuple[RunningStep, Route]:
    step = _STEP.get()
    routes = None if step is None else step.routes.get(module)
    if step is None or routes is None:
        raise ModelError(
            f"{type(module).__name__} attends in a step, and is no layer that the model's adapter described: serving "
            "it takes a model adapter of its own"
        )
    if len(routes) == 1:
        return step, routes[0]
    number = step.num_calls[module] = step.num_calls.get(module, 0) + 1
    if number > len(routes):
        raise ModelError(f"layer {routes[0].name!r} attends {number} times in a step; {len(routes)} were planned")
    return step, routes[number - 1]


def _no_mask(*, batch_size: int, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Return what changes no score that it is added to, in the shape of a mask."""
    return torch.zeros(()).expand(batch_size, 1, q_length, kv_length)


AttentionInterface.register(RUN_TIME, _run_attention)
AttentionInterface.register(RUN_TIME_DIRECT, _run_attention)
AttentionMaskInterface.register(RUN_TIME_DIRECT, _no_mask)
