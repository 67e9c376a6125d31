"""Compares a packed run with dense attention, for a model whose layers have other attention types than its own.

Its own forward attends by other masks, so it says nothing about such a run. Here each prompt runs alone, and the layers
compute attention without pages, backends and wrappers: over all of its tokens, under what the live ranges show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from kvframe.contract.choice import ChosenTokens
from kvframe.contract.errors import ModelError
from kvframe.contract.formats import PLAIN
from kvframe.contract.model import AttachedEntry, AttachedLayer, AttachedState
from kvframe.contract.specs import TOKENS, KVCacheSpec, LayerSpec
from kvframe_engine.assembly import Assembly
from kvframe_engine.self_check import run_packed

_PROMPT_LENS = (5, 9)
_MAX_LOCAL = 64
"""The longest prompt exceeds sizes of types up to this one."""


def check_densely(assembly: Assembly, layers: Sequence[LayerSpec], retyped: Sequence[str]) -> None:
    """Raise ``ModelError`` if a packed run differs from dense attention by more than rounding explains.

    Args:
        assembly: The set-up; its model is attached to its layers, before and after.
        layers: The layer specs that it was made of.
        retyped: The names of the layers whose types are not the model's own, at least one.

    Raises:
        ModelError: The two runs differ, or the model has an encoder or bidirectional prompts and cannot be compared.
    """
    model, name = assembly.model, assembly.model.description.name
    if model.description.max_input_lens:
        raise ModelError(
            f"{name} has an encoder and layers of other types, such as {retyped[0]!r}; the self-check cannot compare "
            "such a model: set self_check = false in the stack's [engine]"
        )
    if model.description.bidirectional_prompts:
        raise ModelError(
            f"all tokens of a prompt of {name} see each other, and layers such as {retyped[0]!r} have other types; the "
            "self-check cannot compare such a model: set self_check = false in the stack's [engine]"
        )
    specs = {layer.name: layer for layer in layers}
    prompts = _make_prompts(assembly, [spec for each in retyped if (spec := specs[each].spec) is not None])
    packed = run_packed(assembly, prompts)
    model.detach()
    try:
        model.attach(_DenseLayers(assembly, specs))
        dense = [run_packed(assembly, [prompt], in_one_step=True)[0] for prompt in prompts]
    finally:
        model.detach()
        model.attach(assembly.layers)
    stored = [each.dtype for each in packed] + [each for each in assembly.layers.dtypes if each.is_floating_point]
    # Models of any dtype compute some parts in float32.
    allowed = max(8 * torch.finfo(torch.float32).eps, *(float(torch.finfo(dtype).eps ** 0.5) for dtype in stored))
    worst = max(_difference(ours, theirs) for ours, theirs in zip(packed, dense, strict=True))
    if not worst <= allowed:
        raise ModelError(
            f"{name}, with the types of its layers such as {retyped[0]!r} replaced, gives other outputs in a packed "
            "batch than with dense attention under the live ranges of these types (relative difference "
            f"{worst:.1e}, allowed {allowed:.1e})"
        )


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    if ours.shape != theirs.shape or not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


def _make_prompts(assembly: Assembly, specs: Sequence[KVCacheSpec]) -> list[list[int]]:
    """Return prompts of random tokens; the longest one exceeds the sizes of the types."""
    sizes = [size for spec in specs for size in attrs.astuple(spec, recurse=False) if type(size) is int]
    crossing = max((2 * size + 5 for size in sizes if size <= _MAX_LOCAL), default=0)
    lengths = [min(length, assembly.max_model_len) for length in (*_PROMPT_LENS, max(_PROMPT_LENS[-1], crossing))]
    generator = torch.Generator().manual_seed(0)
    vocab_size = assembly.model.description.vocab_size or 2
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


class _DenseLayers:
    """Layers for a model that runs one whole prompt alone; states, and other state than keys and values, are paged."""

    def __init__(self, assembly: Assembly, specs: Mapping[str, LayerSpec]) -> None:
        self._paged, self._specs = assembly.layers, specs
        self._follows = assembly.setup.grouping.follows
        self._stored: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.skipped: tuple[str, ...] = self._paged.skipped
        self.dtypes: frozenset[torch.dtype] = self._paged.dtypes
        self.kept_rows: torch.Tensor | None = None

    @property
    def states(self) -> Mapping[str, AttachedState]:
        """The layers that keep a state, as the engine has them."""
        return self._paged.states

    @property
    def entries(self) -> Mapping[str, AttachedEntry]:
        """The entries that the model reads, as the engine has them."""
        return self._paged.entries

    def __getitem__(self, name: str, /) -> AttachedLayer:
        """Return a layer."""
        layer = self._specs[name]
        if not _is_dense(layer):
            return self._paged[name]
        return _DenseLayer(layer, self._stored, self._follows.get(name, name))


def _is_dense(layer: LayerSpec) -> bool:
    spec, query = layer.spec, layer.query
    if spec is None or query is None or query.relative_bias is not None or spec.sequence != TOKENS:
        return False
    if query.choice is not None or query.merged:
        return False
    return {*spec.in_format(PLAIN).state_tensors()} == {"k", "v"}


class _DenseLayer:
    """Attention of all tokens of a prompt at once, in float64, by its definition."""

    def __init__(self, layer: LayerSpec, stored: dict[str, tuple[torch.Tensor, torch.Tensor]], owner: str) -> None:
        self._layer, self._stored, self._owner = layer, stored, owner

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take nothing: the layer has no learned bias."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        *,
        chosen: ChosenTokens | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from position 0 on: ``[num_tokens, num_heads, head_size]``. A layer that is merged is not dense."""
        layer = self._layer
        assert layer.spec is not None
        assert layer.query is not None
        if self._owner == layer.name:
            assert key is not None
            assert value is not None
            self._stored[layer.name] = key.double(), value.double()
        keys, values = self._stored[self._owner]
        if layer.spec.defines_attention:
            more = {name: tensor.double() for name, tensor in (inputs or {}).items()}
            return layer.spec.dense_attention(layer, query.double(), keys, values, more).to(query.dtype)
        group_size = query.shape[1] // keys.shape[1]
        keys, values = (tensor.repeat_interleave(group_size, dim=1) for tensor in (keys, values))
        scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * layer.query.scale
        if layer.query.soft_cap is not None:
            scores = layer.query.soft_cap * torch.tanh(scores / layer.query.soft_cap)
        if layer.query.alibi_slopes is not None:
            positions = torch.arange(len(query), device=scores.device)
            distances = (positions[:, None] - positions).abs()
            scores = scores - scores.new_tensor(layer.query.alibi_slopes)[:, None, None] * distances
        visible = _visible(layer.spec, len(query)).to(scores.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(query)]
        return torch.einsum("hqt,thd->qhd", weights, values).to(query.dtype)


def _visible(spec: KVCacheSpec, num_tokens: int) -> torch.Tensor:
    """Return which tokens each query of a prompt sees, ``[num_tokens, num_tokens], bool``."""
    mask = spec.mask
    if mask is not None and not mask.causal:
        positions = torch.arange(num_tokens)
        return torch.as_tensor(mask.sees(positions[:, None], positions[None, :]))
    visible = torch.eye(num_tokens, dtype=torch.bool)
    for position in range(num_tokens):
        for start, stop in spec.live_ranges(position):
            visible[position, start:stop] = True
    if spec.is_sparse:
        function = spec.mask_function
        assert function is not None
        positions = torch.arange(num_tokens)
        visible &= function(positions[:, None], positions[None, :])
    return visible
