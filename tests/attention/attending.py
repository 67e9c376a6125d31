"""Runs attention layers over a real paged cache for two steps of random requests, and computes the dense result."""

from __future__ import annotations

import types
import zlib
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from kvframe_testing.reference import dense_attention, visible_tokens

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import Layers
from kvframe.attention.storage import KVCacheStorage, LocalCaches
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.config.stack import Stack
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import AttentionMask, AttentionSpec, KVCacheSpec, LayerSpec, QuerySpec, TokenRange
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import Skipping, find_skippable_layers
from tests.support.layers import share_caches

CPU = torch.device("cpu")
QUERY = QuerySpec(num_heads=2, head_size=4, scale=0.5)
Outputs = dict[str, torch.Tensor]
MIXED = [(9, 1), (0, 7), (5, 3), (13, 1), (0, 2), (21, 6)]
SKIPPING = Stack.from_mapping({"model": {"prefill_skipping": "decode_only"}})


@attrs.frozen(kw_only=True)
class LocalSpec(AttentionSpec):
    """A window, with a mask that kernels support and a full form."""

    kind = "local"

    window: int = 3

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        start = max(0, n - self.window + 1)
        return ((start, n),) if start < n else ()

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=self.window)

    def retain_all(self) -> FullAttentionSpec:
        return full()


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)


def local(window: int = 3) -> LocalSpec:
    return LocalSpec(block_size=4, num_kv_heads=1, head_size=4, window=window)


def layer(name: str, spec: KVCacheSpec, shares_with: str | None = None) -> LayerSpec:
    query = attrs.evolve(QUERY, head_size=getattr(spec, "head_size", QUERY.head_size))
    return LayerSpec(name=name, spec=spec, query=query, shares_with=shares_with)


def eight_layers() -> tuple[LayerSpec, ...]:
    """Return the worked example: four layers with caches, and four that read them, two of these at the model's end."""
    layers = [layer(f"L{index}", local() if index % 2 else full()) for index in range(8)]
    return share_caches(layers, {"L2": "L0", "L3": "L1", "L6": "L4", "L7": "L5"})


def close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    return torch.allclose(expected, found, rtol=1e-4, atol=1e-5)


class Bench:
    """Layers, set up as in an engine.

    Attributes:
        layers: The layers.
        attention: The run-time layers.
        manager: The cache.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        stack: Stack | None = None,
        plugins: Sequence[types.ModuleType] = (),
        *,
        hybrid: bool = True,
    ) -> None:
        stack = Stack() if stack is None else stack
        self.layers = tuple(layers)
        self.grouping = group_layers(layers, hybrid=hybrid)
        plan = plan_cache(self.grouping, memory_bytes=200_000, max_model_len=64, max_num_batched_tokens=64)
        storage = KVCacheStorage(plan, self.grouping, CPU)
        storage.poison()
        self.manager = KVCacheManager(plan, max_num_seqs=8, prefix_caching=False)
        skipped = () if stack.model.prefill_skipping is None else find_skippable_layers(layers)
        choices = select_backends(
            layers, stack, load_plugins(stack.plugins, plugins).registry, "cpu", Skipping(tuple(skipped))
        )
        scratch = LocalCaches(layers, CPU, max_tokens=64, max_reqs=8)
        scratch.is_poisoned = True
        audited = stack.cache.audit
        self.attention = Layers(layers, choices, self.grouping, storage.views, CPU, skipped, scratch, audited=audited)

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names of each attention group's layers."""
        return [tuple(layer.name for layer in group.layers) for group in self.attention.groups]

    def run(
        self,
        requests: Sequence[tuple[int, int]],
        generating: Sequence[int] | None = None,
    ) -> Outputs:
        """Compute each request's first tokens in one step and its next ones in another; return the second outputs.

        Args:
            requests: For each request, the tokens of the first step (may be 0) and of the second one.
            generating: The packed tokens of the second step that generate; each request's last one unless given.
        """
        fresh = [index for index, (num_computed, _) in enumerate(requests) if num_computed]
        for index in range(len(requests)):
            self.manager.start(str(index), [0] * 64)
        try:
            if fresh:
                self._step(fresh, [0] * len(fresh), [requests[index][0] for index in fresh], None)
            for index in fresh:
                self.manager.commit(str(index), [0] * 64, requests[index][0])
            computed, new = zip(*requests, strict=True)
            return self._step(range(len(requests)), computed, new, generating)
        finally:
            self._free(requests)

    def metadata(self, requests: Sequence[tuple[int, int]]) -> tuple[CommonAttentionMetadata, ...]:
        """Return the metadata of a step, without running it; each request is as for ``run``."""
        for index, lengths in enumerate(requests):
            self.manager.start(str(index), [0] * 64)
            assert self.manager.extend(str(index), sum(lengths))
        computed, new = zip(*requests, strict=True)
        metadata = self._build(range(len(requests)), computed, new, None)
        self._free(requests)
        return metadata

    def _free(self, requests: Sequence[tuple[int, int]]) -> None:
        for index in range(len(requests)):
            self.manager.free(str(index))

    def _step(
        self,
        requests: Sequence[int],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        generating: Sequence[int] | None,
    ) -> Outputs:
        for request, computed, new in zip(requests, num_computed, num_new, strict=True):
            assert self.manager.extend(str(request), computed + new)
        self.attention.begin_step(self._build(requests, num_computed, num_new, generating))
        return self._run_layers(requests, num_computed, num_new)

    def _build(
        self,
        requests: Sequence[int],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        generating: Sequence[int] | None,
    ) -> tuple[CommonAttentionMetadata, ...]:
        batch = StepBatch(
            rows=np.array([self.manager.row(str(request)) for request in requests]),
            num_computed=np.array(num_computed),
            query_lens=np.array(num_new),
            generating_indices=np.cumsum(num_new) - 1 if generating is None else np.array(generating),
        )
        return (*build_metadata(batch, self.manager.tables, CPU), *self.attention.local.metadata(batch))

    def _run_layers(self, requests: Sequence[int], num_computed: Sequence[int], num_new: Sequence[int]) -> Outputs:
        outputs = {}
        for spec in self.layers:
            query, key, value = (
                torch.cat(
                    [
                        draw(spec.name if part == "q" else self.owner(spec), part, request)[start : start + count]
                        for request, start, count in zip(requests, num_computed, num_new, strict=True)
                    ]
                )
                for part in "qkv"
            )
            if spec.name in self.attention.skipped and self.attention.kept_rows is not None:
                query = query[self.attention.kept_rows]
            outputs[spec.name] = self.attention[spec.name](query, key, value)
        return outputs

    def owner(self, spec: LayerSpec) -> str:
        """Return the layer whose cache a layer reads."""
        return self.grouping.follows.get(spec.name, spec.name)

    def dense(self, spec: LayerSpec, requests: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the output of a layer's second step by the definition of attention."""
        assert spec.spec is not None
        outputs = []
        for request, (computed, new) in enumerate(requests):
            total = computed + new
            query = draw(spec.name, "q", request)[computed:total]
            key, value = (draw(self.owner(spec), part, request)[:total] for part in "kv")
            sees_all = spec.spec.mask is not None and not spec.spec.mask.causal
            visible = torch.ones(new, total).bool() if sees_all else visible_tokens(spec.spec, computed, total)
            outputs.append(dense_attention(QUERY, query, key, value, visible))
        return torch.cat(outputs)


def draw(name: str, part: str, request: int) -> torch.Tensor:
    """Return a layer's queries, keys or values of a request: ``[64, num_heads, 4]``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {part} {request}".encode()))
    return torch.randn(64, 2 if part == "q" else 1, 4, generator=generator)
