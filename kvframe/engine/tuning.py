"""Measures how long backends take for a layer, in steps of a cache that has only this layer."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import AttentionLayers
from kvframe.attention.staging import HOST
from kvframe.attention.storage import KVCacheStorage
from kvframe.cache.manager import KVCacheManager
from kvframe.config.options import Rule, Use
from kvframe.config.stack import Stack
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import RELATIVE_BIAS, TOKENS, KVCacheSpec, LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS
from kvframe.loading.registry import Registry
from kvframe.planning.groups import Grouping, group_layers
from kvframe.planning.memory import check_host_bytes
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from kvframe.selection.times import MeasuredTime

Clock = Callable[[], float]
"""Returns seconds."""

Draw = Callable[..., torch.Tensor]
"""``draw(*shape)`` returns random numbers of ordinary size."""


class StoredForm(Protocol):
    """How to draw state other than keys and values, with the interface of ``kvframe.testing.state.StateForm``."""

    def draw(self, spec: KVCacheSpec, num_tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``key`` and the ``value`` that ``write_kv`` takes for ``num_tokens`` tokens."""

    def draw_parameters(self, layer: LayerSpec, draw: Draw) -> dict[str, torch.Tensor]:
        """Return a layer's learned tensors."""


NUM_REPEATS = 7
"""The number of timed steps for each kind of batch; their median is the result."""

MAX_SECONDS = 3.0
"""No further step of a kind of batch is timed after those so far have taken this long."""

CHUNK = 512
"""Tokens by which a request grows at a time. Its dead pages are freed in between."""


def make_batches(context: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the batches to measure, by kind. A batch has a pair for each request: computed tokens and new tokens.

    Args:
        context: Tokens of the longest request, at least 8.
    """
    decode = (context - 1, 1)
    return {
        "decode": (decode,) * 16,
        "prefill": ((0, context),),
        "mixed": ((context // 2, context // 4), *(decode,) * 8),
    }


def is_measured(choice: Choice) -> bool:
    """Return whether there is a choice: several backends can serve the layer, and it attends to its own past tokens."""
    spec = choice.wrapped.spec
    assert spec is not None
    return len(able_backends(choice)) > 1 and spec.keeps_past and spec.sequence == TOKENS


def able_backends(choice: Choice) -> list[str]:
    """Return the backends that can serve a layer, with their distributions."""
    return [candidate.name for candidate in choice.candidates if not candidate.refusals]


def check_measurable(layer: LayerSpec, device: torch.device, context: int) -> None:
    """Refuse a context that needs more memory than the host has, before anything is allocated.

    Args:
        layer: The layer, as the model has it.
        device: The device to measure on.
        context: Tokens of the longest request.

    Raises:
        PlanError: The cache, the tokens and the queries of a batch take more memory than this process may use.
    """
    grouping, query = group_layers([attrs.evolve(layer, shares_with=None)]), layer.query
    assert query is not None
    for requests in make_batches(context).values():
        num_bytes = 8 * context * len(requests)
        if device.type == "cpu":
            num_bytes += 4 * query.num_heads * query.head_size * sum(new for _, new in requests)
            num_bytes += _plan(grouping, requests).total_bytes
        check_host_bytes(
            num_bytes,
            f"the host has no {num_bytes} bytes to measure {len(requests)} requests of {context} tokens; give a "
            "smaller --context",
        )


def measure(
    layer: LayerSpec,
    backend: str,
    stack: Stack,
    registry: Registry,
    device: torch.device,
    context: int,
    clock: Clock,
    num_layers: int = 1,
) -> MeasuredTime:
    """Measure a backend on a layer, in a cache of its own.

    Args:
        layer: The layer, as the model has it.
        backend: The backend's registered name, with its distribution.
        stack: The stack, for the layer's wrapper chain.
        registry: Where names are looked up.
        device: The device to measure on.
        context: Tokens of the longest request.
        clock: Returns the time in seconds.
        num_layers: How many such layers share a step's metadata.

    Returns:
        The median seconds of a step, per layer, by kind of batch.

    Raises:
        KVFrameError: The backend cannot be set up, or refuses a step.
    """
    owner = attrs.evolve(layer, shares_with=None)
    (choice,) = select_backends([owner], _only(backend, layer, stack, registry), registry, device.type)
    form = _form_of(registry.backends.load(backend))
    batches = make_batches(context)
    grouping = group_layers([owner])
    return MeasuredTime(
        {
            kind: _measure_batch(owner, choice, grouping, requests, device, clock, num_layers, form)
            for kind, requests in batches.items()
        }
    )


def _form_of(backend_class: type[AttentionBackend]) -> StoredForm | None:
    """Return how a backend describes the state that it reads; None for a backend that reads keys and values."""
    if backend_class.conformance_form is None:
        return None
    module, _, name = backend_class.conformance_form.partition(":")
    form: StoredForm = getattr(importlib.import_module(module), name)()
    return form


def _only(backend: str, layer: LayerSpec, stack: Stack, registry: Registry) -> Stack:
    """Return a stack that gives a layer this backend, and those wrappers of its chain that drop no tokens."""
    assert layer.spec is not None
    uses = stack.rule_for(layer.name, layer.spec.kind).wrappers
    uses = tuple(map(Use, layer.spec.default_wrappers)) if uses is None else uses
    kept = tuple(use for use in uses if DROPS_TOKENS not in registry.wrappers.load(use.name).effects)
    engine = attrs.evolve(stack.engine, measured_times=False, prefill_skipping=None)
    return attrs.evolve(stack, engine=engine, rules=(Rule(layers="*", wrappers=kept, backend=Use(backend)),))


def _measure_batch(
    layer: LayerSpec,
    choice: Choice,
    grouping: Grouping,
    requests: Sequence[tuple[int, int]],
    device: torch.device,
    clock: Clock,
    num_layers: int,
    form: StoredForm | None,
) -> float:
    plan = _plan(grouping, requests)
    manager = KVCacheManager(plan, max_num_seqs=len(requests), prefix_caching=False)
    storage = KVCacheStorage(plan, grouping, device)
    layers = AttentionLayers([layer], [choice], grouping, storage.views, device)
    batch = _give_pages(manager, requests)
    metadata = build_metadata(batch, manager.tables, HOST)
    tensors = _Tensors.draw(layer, int(batch.query_lens.sum()), device, form)
    attention = layers[layer.name]
    if tensors.parameters:
        attention.bind(tensors.parameters)

    def step() -> float:
        start = clock()
        layers.begin_step(metadata, batch=batch, tables=manager.tables)
        for _ in range(num_layers):
            attention(tensors.query, tensors.key, tensors.value, tensors.sinks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    with torch.inference_mode():
        step()
        times = [step()]
        while len(times) < NUM_REPEATS and sum(times) < MAX_SECONDS:
            times.append(step())
    return statistics.median(times) / num_layers


def _plan(grouping: Grouping, requests: Sequence[tuple[int, int]]) -> KVCachePlan:
    (group,) = grouping.groups
    longest = max(computed + new for computed, new in requests)
    num_blocks = sum(group.spec.peak_blocks(computed + new, max(new, CHUNK)) for computed, new in requests)
    return plan_cache(
        grouping,
        memory_bytes=group.page_bytes * 2 * (num_blocks + 8),
        max_model_len=longest,
        max_num_batched_tokens=max(longest, CHUNK),
    )


def _give_pages(manager: KVCacheManager, requests: Sequence[tuple[int, int]]) -> StepBatch:
    """Give requests their pages alternately, as an engine does, so that each request's pages are scattered."""
    longest = max(computed + new for computed, new in requests)
    for name in range(len(requests)):
        manager.start(str(name), [0] * longest)
    for end in range(CHUNK, longest + CHUNK, CHUNK):
        for name, (computed, _) in enumerate(requests):
            if end - CHUNK < computed:
                is_extended = manager.extend(str(name), min(end, computed))
                assert is_extended
                manager.commit(str(name), [0] * longest, min(end, computed))
    for name, (computed, new) in enumerate(requests):
        is_extended = manager.extend(str(name), computed + new)
        assert is_extended
    num_computed, query_lens = np.array(requests).T
    return StepBatch(
        rows=np.array([manager.row(str(name)) for name in range(len(requests))]),
        num_computed=num_computed,
        query_lens=query_lens,
        generating_indices=np.cumsum(query_lens) - 1,
    )


@attrs.frozen(eq=False)
class _Tensors:
    """The arguments of a layer's call: random numbers of ordinary size.

    Attributes:
        query: ``[num_tokens, num_heads, head_size], device``.
        key: ``[num_tokens, num_kv_heads, head_size], device``; for another form of state, as the form draws it.
        value: ``[num_tokens, num_kv_heads, head_size_v], device``; likewise.
        sinks: ``[num_heads], device``; None unless the layer has them.
        parameters: The layer's learned tensors, if the core or the form knows them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    parameters: Mapping[str, torch.Tensor]

    @classmethod
    def draw(cls, layer: LayerSpec, num_tokens: int, device: torch.device, form: StoredForm | None) -> _Tensors:
        """Draw the tensors; raise ``BackendError`` if there is no form, and the layer stores no keys and values."""
        spec, query = layer.spec, layer.query
        assert spec is not None
        assert query is not None
        stored = spec.in_format(PLAIN).state_tensors()
        if form is None and not {"k", "v"} <= set(stored):
            raise BackendError(
                f"a {spec.kind!r} layer stores no keys and values, and this backend has no conformance_form that draws "
                "what it stores"
            )
        dtype = getattr(torch, next(iter(stored.values())).dtype)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)

        if form is None:
            key, value = (draw(num_tokens, *stored[name].shape[1:]) for name in ("k", "v"))
        else:
            key, value = form.draw(spec, num_tokens, draw)
        bias = query.relative_bias
        learned = {} if bias is None else {RELATIVE_BIAS: draw(bias.num_buckets, query.num_heads)}
        return cls(
            query=draw(num_tokens, query.num_heads, query.head_size),
            key=key,
            value=value,
            sinks=draw(query.num_heads) if query.has_sinks else None,
            parameters={**learned, **({} if form is None else form.draw_parameters(layer, draw))},
        )
