"""Report an engine's counters and the times of requests as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvframe import Embedder, Engine

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_prompt_tokens": "Prompt tokens that a cached prefix covered.",
    "computed_tokens": "Tokens computed, again after a preemption.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Times that a running request was preempted.",
    "evictions": "Cached blocks that were evicted.",
    "steps": "Steps completed.",
    "draft_tokens": "Draft tokens computed.",
    "accepted_draft_tokens": "Draft tokens that requests took.",
    "graph_replays": "Steps of the model that were replayed from a captured graph.",
    "restored_tokens": "Tokens that were brought back to the device from host memory and page stores.",
    "waits_in_vain": "Requests that waited for a page store and were computed without it.",
}


_LOOKUPS = {
    "asked_tokens": "Tokens that were looked up in a group.",
    "found_tokens": "Tokens that a group alone could have continued from.",
    "hit_tokens": "Tokens that every group could continue from.",
    "times_limiting": "Lookups in which another group could have continued after more tokens.",
}


HOST_MEMORY = "host_memory"
"""What an engine's numbers call the tier in host memory."""

_OF_STORES = {
    "blocks_stored": ("pages_stored", "Blocks that were written to a tier."),
    "blocks_dropped": ("pages_dropped", "Blocks that were not written, because the tier was full, slow or failed."),
    "blocks_refused": ("pages_refused", "Blocks of a page store that were not used, because their seal was wrong."),
    "failures": ("failures", "Calls to a page store that failed."),
    "bytes_read": ("bytes_read", "Bytes that were read from a page store."),
    "bytes_written": ("bytes_written", "Bytes that were written to a page store."),
}
"""Metrics of tiers, with the names of what is counted of page stores."""


_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RequestTimes:
    """The times of requests, as histograms, and how requests ended.

    Attributes:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start with no request."""
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvframe_{name}_seconds", text, registry=registry, buckets=buckets)

        self._steps = histogram("step", "Seconds of each step of the engine.", _STEP_BUCKETS)
        self._first = histogram(
            "time_to_first_token", "Seconds from a question to its first token, by prompt.", _REQUEST_BUCKETS
        )
        self._next = histogram(
            "time_per_output_token", "Mean seconds of a sample's tokens after the first, by sample.", _STEP_BUCKETS
        )
        self._whole = histogram("request", "Seconds from a question to its last token.", _REQUEST_BUCKETS)
        self._failed_steps = Counter("kvframe_failed_steps", "Steps that failed.", registry=registry)
        self._failed = Counter("kvframe_failed_requests", "Requests that ended with an error.", registry=registry)
        self._refused = Counter(
            "kvframe_refused_requests",
            "Requests that were refused, by code.",
            ["code"],
            registry=registry,
        )
        # Calls are found once; a step adds its own time only.
        self.step = self._steps.observe
        self.first_token = self._first.observe
        self.output_token = self._next.observe
        self.whole = self._whole.observe
        self.failed_step = self._failed_steps.inc
        self.failed = self._failed.inc

    def refused(self, code: str) -> None:
        """Record a refusal. The codes are the server's own, so there are few."""
        self._refused.labels(code).inc()


class EngineMetrics(Collector):
    """Reads an engine's counters whenever they are asked for."""

    def __init__(self, engine: Engine | Embedder, num_used: Callable[[], int]) -> None:
        """Take the engine.

        Args:
            engine: The engine.
            num_used: Returns the number of samples that clients wait for.
        """
        self._engine = engine
        self._num_used = num_used

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        stats = self._engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvframe_{name}", text, value=getattr(stats, name))
        yield GaugeMetricFamily("kvframe_requests", "Samples that clients wait for.", value=self._num_used())
        yield GaugeMetricFamily("kvframe_requests_running", "Requests in the batch.", value=stats.num_running)
        yield GaugeMetricFamily(
            "kvframe_requests_waiting", "Requests that wait to be admitted.", value=stats.num_waiting
        )
        yield GaugeMetricFamily("kvframe_prefix_hit_rate", "Share of prompt tokens found.", value=stats.prefix_hit_rate)
        yield GaugeMetricFamily("kvframe_cache_bytes", "Bytes of the KV cache.", value=stats.cache_bytes)
        yield from self._of_groups(stats)
        yield from self._of_tiers(stats)

    def _of_groups(self, stats: Any) -> Iterator[Metric]:
        """Yield what is counted for each cache group."""
        labels = ["group", "kind"]
        blocks = GaugeMetricFamily("kvframe_blocks_held", "Blocks of requests and pins.", labels=labels)
        pool = GaugeMetricFamily("kvframe_pool_bytes_held", "Bytes of the pool in these blocks.", labels=labels)
        evicted_counter = CounterMetricFamily(
            "kvframe_blocks_evicted", "Cached blocks that were evicted.", labels=labels
        )
        moved_counter = CounterMetricFamily("kvframe_blocks_moved", "Blocks that were kept of prompts.", labels=labels)
        counters = {
            name: CounterMetricFamily(f"kvframe_lookup_{name}", text, labels=labels) for name, text in _LOOKUPS.items()
        }
        for index, group in enumerate(self._engine.plan.groups):
            values = [str(index), group.spec.kind]
            blocks.add_metric(values, stats.blocks_held[index])
            pool.add_metric(values, stats.blocks_held[index] * group.page_bytes)
            evicted_counter.add_metric(values, stats.blocks_evicted[index])
            moved_counter.add_metric(values, stats.blocks_moved[index])
            for name, family in counters.items():
                family.add_metric(values, getattr(stats.lookups[index], name))
        yield from (blocks, pool, evicted_counter, moved_counter, *counters.values())

    @staticmethod
    def _of_tiers(stats: Any) -> Iterator[Metric]:
        """Yield what is counted for host memory and for each page store."""

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"kvframe_tier_{name}", text, labels=["tier"])

        restored = counter("blocks_restored", "Blocks that were brought back to the device.")
        for name, count in stats.restored_blocks.items():
            restored.add_metric([name], count)
        yield restored
        has_host = stats.restored_blocks.keys() > stats.stores.keys()
        of_host = {"blocks_stored": stats.host_blocks_stored, "blocks_dropped": stats.host_blocks_dropped}
        for name, (attribute, text) in _OF_STORES.items():
            family = counter(name, text)
            if has_host and name in of_host:
                family.add_metric([HOST_MEMORY], of_host[name])
            for store, counts in stats.stores.items():
                family.add_metric([store], getattr(counts, attribute))
            yield family
        if has_host:
            yield GaugeMetricFamily("kvframe_host_blocks", "Blocks that host memory has.", value=stats.host_blocks)
