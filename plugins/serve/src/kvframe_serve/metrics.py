"""Report an engine's counters as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Histogram
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


_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics(Collector):
    """Reads an engine's counters whenever they are asked for. A step only adds its own time."""

    def __init__(self, engine: Engine, num_asking: Callable[[], int]) -> None:
        """Take the engine.

        Args:
            engine: The engine.
            num_asking: Returns the number of requests that clients wait for.
        """
        self._engine = engine
        self._num_asking = num_asking
        self._steps = Histogram(
            "kvframe_step_seconds", "Seconds of each step of the engine.", registry=None, buckets=_STEP_BUCKETS
        )

    def note_step(self, seconds: float) -> None:
        """Record the time of a step."""
        self._steps.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        stats = self._engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvframe_{name}", text, value=getattr(stats, name))
        yield GaugeMetricFamily("kvframe_requests", "Requests that clients wait for.", value=self._num_asking())
        yield GaugeMetricFamily("kvframe_requests_running", "Requests in the batch.", value=stats.num_running)
        yield GaugeMetricFamily("kvframe_requests_waiting", "Requests that wait for a place.", value=stats.num_waiting)
        yield GaugeMetricFamily("kvframe_prefix_hit_rate", "Share of prompt tokens found.", value=stats.prefix_hit_rate)
        yield GaugeMetricFamily("kvframe_cache_bytes", "Bytes of the KV cache.", value=stats.cache_bytes)
        yield from self._steps.collect()
        yield from self._of_groups(stats)

    def _of_groups(self, stats: Any) -> Iterator[Metric]:
        """Yield what is counted for each cache group."""
        labels = ["group", "kind"]
        blocks = GaugeMetricFamily("kvframe_blocks_held", "Blocks of requests and pins.", labels=labels)
        pool = GaugeMetricFamily("kvframe_pool_bytes_held", "Bytes of the pool in these blocks.", labels=labels)
        evicted = CounterMetricFamily("kvframe_blocks_evicted", "Cached blocks that were evicted.", labels=labels)
        counted = {
            name: CounterMetricFamily(f"kvframe_lookup_{name}", text, labels=labels) for name, text in _LOOKUPS.items()
        }
        for index, group in enumerate(self._engine.plan.groups):
            values = [str(index), group.spec.kind]
            blocks.add_metric(values, stats.blocks_held[index])
            pool.add_metric(values, stats.blocks_held[index] * group.page_bytes)
            evicted.add_metric(values, stats.blocks_evicted[index])
            for name, family in counted.items():
                family.add_metric(values, getattr(stats.lookups[index], name))
        yield from (blocks, pool, evicted, *counted.values())
