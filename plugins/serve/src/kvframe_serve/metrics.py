"""Prometheus metrics of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvframe import Engine

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_prompt_tokens": "Prompt tokens that a cached prefix covered.",
    "computed_tokens": "Tokens computed, again after a preemption.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Times that a running request was preempted.",
    "swaps": "Preemptions whose state was kept in host memory.",
    "evictions": "Cached blocks that were evicted.",
    "steps": "Steps completed.",
    "draft_tokens": "Draft tokens computed.",
    "accepted_draft_tokens": "Draft tokens that requests took.",
}


_LOOKUPS = {
    "asked_tokens": "Tokens that were looked up in a group.",
    "found_tokens": "Tokens that a group alone could have continued from.",
    "hit_tokens": "Tokens that every group could continue from.",
    "times_limiting": "Lookups in which another group could have continued after more tokens.",
}


class EngineMetrics(Collector):
    """Reads an engine's counters whenever they are asked for; it costs nothing otherwise."""

    def __init__(self, engine: Engine, num_running: Any) -> None:
        """Take the engine.

        Args:
            engine: The engine.
            num_running: Returns the number of requests that clients wait for.
        """
        self._engine = engine
        self._num_running = num_running

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        stats = self._engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvframe_{name}", text, value=getattr(stats, name))
        yield GaugeMetricFamily("kvframe_requests", "Requests that clients wait for.", value=self._num_running())
        yield GaugeMetricFamily("kvframe_prefix_hit_rate", "Share of prompt tokens found.", value=stats.prefix_hit_rate)
        yield GaugeMetricFamily("kvframe_cache_bytes", "Bytes of the KV cache.", value=stats.cache_bytes)
        held = GaugeMetricFamily("kvframe_blocks_held", "Blocks of requests and pins.", labels=["group"])
        for group, blocks in enumerate(stats.blocks_held):
            held.add_metric([str(group)], blocks)
        yield held
        for name, text in _LOOKUPS.items():
            family = CounterMetricFamily(f"kvframe_lookup_{name}", text, labels=["group", "kind"])
            for group, lookups in enumerate(stats.lookups):
                family.add_metric([str(group), lookups.kind], getattr(lookups, name))
            yield family
