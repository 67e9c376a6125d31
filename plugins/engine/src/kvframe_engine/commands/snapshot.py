"""An engine's counters at a moment, as ``kvframe top`` shows them: read from the engine or from a server's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.contract.errors import shown
from kvframe.contract.foreign import safe_text

if TYPE_CHECKING:
    from kvframe_engine.engine import Engine
    from kvframe_engine.scheduling.stats import EngineStats


@attrs.frozen(kw_only=True)
class GroupUse:
    """What a cache group holds, and what was found in it.

    Attributes:
        kind: The registered name of its cache spec.
        blocks_held: Blocks that requests and pins hold.
        bytes_held: Bytes of them.
        asked_tokens: Tokens that were looked up.
        found_tokens: Of these, the tokens that this group alone could have continued from.
        times_limiting: Lookups in which this group made the cached prefix shorter.
    """

    kind: str
    blocks_held: int
    bytes_held: int
    asked_tokens: int
    found_tokens: int
    times_limiting: int


@attrs.frozen(kw_only=True)
class TierUse:
    """What host memory or a page store did.

    Attributes:
        name: ``"host_memory"``, or the name of the page store.
        blocks_restored: Blocks that were brought back to the device.
        blocks_stored: Blocks that were written to it.
        blocks_dropped: Blocks that were not written, because it was full, slow or failed.
        blocks_refused: Blocks that it returned with a wrong seal.
        failures: Calls that failed.
    """

    name: str
    blocks_restored: int = 0
    blocks_stored: int = 0
    blocks_dropped: int = 0
    blocks_refused: int = 0
    failures: int = 0


OF_TIERS = ("blocks_restored", "blocks_stored", "blocks_dropped", "blocks_refused", "failures")
"""What a server's metrics and a ``TierUse`` call by one name."""


@attrs.frozen(kw_only=True)
class Snapshot:
    """An engine's counters at a moment.

    Attributes:
        seconds: When, on any clock.
        num_running: Requests in the batch.
        num_waiting: Requests that wait for a place in it.
        ended: How many of how many prompts are done; None for a server.
        steps: Steps so far.
        step_seconds: What they took together.
        generated_tokens: Tokens generated.
        prompt_tokens: Prompt tokens of admitted requests.
        cached_prompt_tokens: Those of them that were found in the cache.
        evictions: Cached blocks that were evicted.
        preemptions: Times that a request was preempted.
        draft_tokens: Draft tokens computed.
        accepted_draft_tokens: Those of them that requests took.
        cache_bytes: Bytes of the cache.
        groups: The cache groups.
        restored_tokens: Tokens that were brought back to the device.
        waits_in_vain: Requests that waited for a page store in vain.
        tiers: Host memory and the page stores; none if the stack has none.
    """

    seconds: float
    num_running: int
    num_waiting: int
    ended: tuple[int, int] | None = None
    steps: int
    step_seconds: float
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    evictions: int
    preemptions: int
    draft_tokens: int
    accepted_draft_tokens: int
    cache_bytes: int
    groups: tuple[GroupUse, ...]
    restored_tokens: int
    waits_in_vain: int
    tiers: tuple[TierUse, ...]


COUNTERS = (
    "generated_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "evictions",
    "preemptions",
    "draft_tokens",
    "accepted_draft_tokens",
    "restored_tokens",
    "waits_in_vain",
)
"""What an engine's statistics, a server's metrics and a snapshot call by one name."""


class UnreachableError(click.ClickException):
    """A server's metrics cannot be read."""


def snapshot_of(engine: Engine, seconds: float, step_seconds: float, num_ended: tuple[int, int]) -> Snapshot:
    """Return an engine's snapshot.

    Args:
        engine: The engine.
        seconds: When it is taken.
        step_seconds: What its steps took together.
        num_ended: How many of how many prompts are done.
    """
    stats = engine.stats()
    return Snapshot(
        seconds=seconds,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        ended=num_ended,
        steps=stats.steps,
        step_seconds=step_seconds,
        cache_bytes=stats.cache_bytes,
        groups=tuple(
            GroupUse(
                kind=group.spec.kind,
                blocks_held=held,
                bytes_held=held * group.page_bytes,
                asked_tokens=lookups.asked_tokens,
                found_tokens=lookups.found_tokens,
                times_limiting=lookups.times_limiting,
            )
            for group, held, lookups in zip(engine.plan.groups, stats.blocks_held, stats.lookups, strict=True)
        ),
        tiers=tuple(_tiers(stats)),
        **{name: getattr(stats, name) for name in COUNTERS},
    )


def _tiers(stats: EngineStats) -> Iterator[TierUse]:
    for name, restored in stats.restored_blocks.items():
        counts = stats.stores.get(name)
        if counts is None:
            yield TierUse(
                name=name,
                blocks_restored=restored,
                blocks_stored=stats.host_blocks_stored,
                blocks_dropped=stats.host_blocks_dropped,
            )
        else:
            yield TierUse(
                name=name,
                blocks_restored=restored,
                blocks_stored=counts.pages_stored,
                blocks_dropped=counts.pages_dropped,
                blocks_refused=counts.pages_refused,
                failures=counts.failures,
            )


def metrics_url(url: str) -> str:
    """Return the address of a server's metrics, from its own address or that of its interface."""
    address = url if "://" in url else f"http://{url}"
    return f"{address.rstrip('/').removesuffix('/v1').removesuffix('/metrics')}/metrics"


def fetch(url: str) -> str:
    """Return the text that a server answers; raise ``UnreachableError`` if there is none."""
    import http.client
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise UnreachableError(f"{url} is not the address of a server, such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            metrics: bytes = answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = safe_text(getattr(error, "reason", error))
        raise UnreachableError(f"{url} cannot be read: {reason}") from error
    return metrics.decode("utf-8", errors="replace")


def read_metrics(text: str, seconds: float) -> Snapshot:
    """Return the snapshot that a server's metrics hold.

    Args:
        text: The metrics, in Prometheus' text format.
        seconds: When they were read.

    Raises:
        UnreachableError: They are not those of ``kvframe serve``.
    """
    values: dict[str, float] = {}
    values_of_groups: dict[str, dict[tuple[str, str], float]] = {}
    values_of_tiers: dict[str, dict[str, int]] = {}
    for name, labels, value in _samples(text):
        if "group" in labels:
            values_of_groups.setdefault(name, {})[labels["group"], labels.get("kind", "")] = value
        elif "tier" in labels:
            attribute = name.removeprefix("kvframe_tier_").removesuffix("_total")
            if attribute in OF_TIERS:
                values_of_tiers.setdefault(labels["tier"], {})[attribute] = int(value)
        elif not labels:
            values[name] = value
    counted: dict[str, Any]
    try:
        counted = {name: int(values[f"kvframe_{name}_total"]) for name in COUNTERS}
        blocks_held = values_of_groups["kvframe_blocks_held"]
        return Snapshot(
            seconds=seconds,
            num_running=int(values["kvframe_requests_running"]),
            num_waiting=int(values["kvframe_requests_waiting"]),
            steps=int(values["kvframe_step_seconds_count"]),
            step_seconds=values["kvframe_step_seconds_sum"],
            cache_bytes=int(values["kvframe_cache_bytes"]),
            groups=tuple(
                GroupUse(
                    kind=key[1],
                    blocks_held=int(blocks_held[key]),
                    bytes_held=int(values_of_groups["kvframe_pool_bytes_held"][key]),
                    **{
                        name: int(values_of_groups[f"kvframe_lookup_{name}_total"][key])
                        for name in ("asked_tokens", "found_tokens", "times_limiting")
                    },
                )
                for key in sorted(blocks_held, key=lambda key: int(key[0]))
            ),
            tiers=tuple(TierUse(name=name, **numbers) for name, numbers in values_of_tiers.items()),
            **counted,
        )
    except (LookupError, ValueError) as error:
        raise UnreachableError(
            f"the metrics there are not those of `kvframe serve` of this version: {shown(error.args[0])} is missing"
        ) from error


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield the names, labels and values of metrics."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise click.ClickException("--url needs prometheus-client: pip install kvframe[serve]") from error

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError:
        return  # something else than metrics; what is missing is an error of the caller
