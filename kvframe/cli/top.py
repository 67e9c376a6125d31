"""``kvframe top``: show live what an engine's cache does, of prompts that are run here or of a running server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.options import (
    REFUSED_EXIT_CODE,
    block_size_option,
    drafts_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.prompts import prompt_options, read_given_prompts
from kvframe.cli.render import format_bytes, is_drawn_on, line_width, log_lines
from kvframe.config.hub import find_model
from kvframe.contract.errors import shown
from kvframe.contract.foreign import safe_text

if TYPE_CHECKING:
    from kvframe.config.options import Use
    from kvframe.engine.engine import Engine
    from kvframe.engine.requests.params import SamplingParams

_BAR_WIDTH = 20
_GONE_EXIT_CODE = 1
"""Exit code if a server that was watched is gone."""


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


_COUNTERS = (
    "generated_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "evictions",
    "preemptions",
    "draft_tokens",
    "accepted_draft_tokens",
)
"""What an engine's statistics, a server's metrics and a snapshot call by one name."""

Show = Callable[[Snapshot], None]


class UnreachableError(click.ClickException):
    """A server's metrics cannot be read."""


@click.command(short_help="Show live what the cache does.")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--url", metavar="URL", help="Watch the server of `kvframe serve` at this address, instead of a MODEL.")
@prompt_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N")
@drafts_option
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between two snapshots.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --url: end after N snapshots.")
@stack_option
@memory_option
@block_size_option
def top(
    model: Path | None,
    url: str | None,
    texts: tuple[str, ...],
    prompts_file: Path | None,
    token_ids_file: Path | None,
    max_new_tokens: int,
    drafts: Use | str | None,
    interval: float,
    count: int | None,
    stack_file: Path | None,
    memory: str | None,
    block_size: int | None,
) -> None:
    """Run prompts through MODEL and show live what its cache does; or watch a running server with --url.

    Requests, blocks held per cache group, hits and the group that limits them, evictions, preemptions, drafts and step
    times. In a pipe, each snapshot is printed as plain lines. Ctrl-C ends it.
    """
    if (model is None) == (url is None):
        raise click.UsageError("give a MODEL with prompts, or the --url of a server")
    if url is not None:
        if texts or prompts_file or token_ids_file:
            raise click.UsageError("a server gets its prompts from its clients: --url takes none")
        with _screen() as show:
            gone = _watch(_metrics_url(url), show, interval, count)
        if gone is not None:
            click.echo(f"kvframe: {gone}", err=True)
            click.get_current_context().exit(_GONE_EXIT_CODE)
        return
    assert model is not None
    if count is not None:
        raise click.UsageError("--count is for --url: prompts end by themselves")
    given = read_given_prompts(texts, prompts_file, token_ids_file)
    model = find_model(model, weights=True)
    stack = read_stack(stack_file, cache={"memory": memory, "block_size": block_size}, engine={"drafts": drafts})

    from kvframe.engine.engine import Engine
    from kvframe.engine.requests.request import SamplingParams

    with log_lines():
        made = Engine.from_pretrained(model, stack=stack)
    with made as engine, _screen() as show:
        errors = _run(engine, given, SamplingParams(max_new_tokens=max_new_tokens), show, interval)
    if errors:
        click.echo(f"kvframe: {len(errors)} of {len(given)} prompts were refused or failed: {errors[0]}", err=True)
        click.get_current_context().exit(REFUSED_EXIT_CODE)


# --- where snapshots come from ----------------------------------------------------------------------------------------


def _run(engine: Engine, prompts: Any, params: SamplingParams, show: Show, interval: float) -> list[str]:
    """Run prompts, and show a snapshot after each interval and at the end; return the errors of prompts."""
    recorded = engine.start_trace()
    last, step_seconds, total = time.monotonic(), 0.0, len(prompts)

    def take(done: int) -> Snapshot:
        nonlocal step_seconds
        step_seconds += sum(step.stop - step.start for step in recorded.steps)
        # The trace would grow with each step.
        recorded.steps.clear()
        recorded.events.clear()
        return snapshot_of(engine, time.monotonic(), step_seconds, (done, total))

    def after_step(done: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= interval:
            show(take(done))
            last = time.monotonic()

    show(take(0))
    outputs = engine.generate(prompts, params, on_progress=after_step)
    show(take(total))
    return [output.error for output in outputs if output.error is not None]


def snapshot_of(engine: Engine, seconds: float, step_seconds: float, ended: tuple[int, int]) -> Snapshot:
    """Return an engine's snapshot.

    Args:
        engine: The engine.
        seconds: When it is taken.
        step_seconds: What its steps took together.
        ended: How many of how many prompts are done.
    """
    stats = engine.stats()
    return Snapshot(
        seconds=seconds,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        ended=ended,
        steps=stats.steps,
        step_seconds=step_seconds,
        cache_bytes=stats.cache_bytes,
        groups=tuple(
            GroupUse(
                kind=group.spec.kind,
                blocks_held=held,
                bytes_held=held * group.page_bytes,
                asked_tokens=found.asked_tokens,
                found_tokens=found.found_tokens,
                times_limiting=found.times_limiting,
            )
            for group, held, found in zip(engine.plan.groups, stats.blocks_held, stats.lookups, strict=True)
        ),
        **{name: getattr(stats, name) for name in _COUNTERS},
    )


def _watch(url: str, show: Show, interval: float, count: int | None) -> str | None:
    """Show a server's snapshots, until ``count`` are shown; return why it ended if the server is gone."""
    number = 0
    while True:
        try:
            snapshot = read_metrics(_fetch(url), time.monotonic())
        except UnreachableError as error:
            if number == 0:
                raise
            return f"the server is gone: {error.message}"
        show(snapshot)
        number += 1
        if number == count:
            return None
        time.sleep(interval)


def _metrics_url(url: str) -> str:
    address = url if "://" in url else f"http://{url}"
    return f"{address.rstrip('/').removesuffix('/v1').removesuffix('/metrics')}/metrics"


def _fetch(url: str) -> str:
    """Return the text of a server's metrics; raise ``UnreachableError`` if there is none."""
    import http.client
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise UnreachableError(f"{url} is not the address of a server, such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: bytes = answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = safe_text(getattr(error, "reason", error))
        raise UnreachableError(f"{url} cannot be read: {reason}") from error
    return found.decode("utf-8", errors="replace")


def read_metrics(text: str, seconds: float) -> Snapshot:
    """Return the snapshot that a server's metrics hold.

    Args:
        text: The metrics, in Prometheus' text format.
        seconds: When they were read.

    Raises:
        UnreachableError: They are not those of ``kvframe serve``.
    """
    found: dict[str, float] = {}
    of_groups: dict[str, dict[tuple[str, str], float]] = {}
    for name, labels, value in _samples(text):
        if "group" in labels:
            of_groups.setdefault(name, {})[labels["group"], labels.get("kind", "")] = value
        elif not labels:
            found[name] = value
    counted: dict[str, Any]
    try:
        counted = {name: int(found[f"kvframe_{name}_total"]) for name in _COUNTERS}
        held = of_groups["kvframe_blocks_held"]
        return Snapshot(
            seconds=seconds,
            num_running=int(found["kvframe_requests_running"]),
            num_waiting=int(found["kvframe_requests_waiting"]),
            steps=int(found["kvframe_step_seconds_count"]),
            step_seconds=found["kvframe_step_seconds_sum"],
            cache_bytes=int(found["kvframe_cache_bytes"]),
            groups=tuple(
                GroupUse(
                    kind=key[1],
                    blocks_held=int(held[key]),
                    bytes_held=int(of_groups["kvframe_pool_bytes_held"][key]),
                    **{
                        name: int(of_groups[f"kvframe_lookup_{name}_total"][key])
                        for name in ("asked_tokens", "found_tokens", "times_limiting")
                    },
                )
                for key in sorted(held, key=lambda key: int(key[0]))
            ),
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


# --- how they are shown -----------------------------------------------------------------------------------------------


def lines_of(now: Snapshot, before: Snapshot | None, *, width: int, bars: bool) -> list[str]:
    """Return the lines that show a snapshot.

    Args:
        now: The snapshot.
        before: The one before it, from which rates follow; None for the first.
        width: The most columns of a line.
        bars: Whether to draw what a group holds as a bar, too.
    """
    steps = now.steps - (0 if before is None else before.steps)
    step_seconds = now.step_seconds - (0.0 if before is None else before.step_seconds)
    tokens = None if before is None else now.generated_tokens - before.generated_tokens
    elapsed = 0.0 if before is None else now.seconds - before.seconds
    ended = [] if now.ended is None else [f"ended {now.ended[0]:,} of {now.ended[1]:,}"]
    parts = (
        [f"requests: {now.num_running:,} run", f"{now.num_waiting:,} wait", *ended],
        [
            f"steps: {now.steps:,}",
            f"{1000 * step_seconds / steps:,.1f} ms each" if steps > 0 else "none since the last snapshot",
            *([] if not tokens or elapsed <= 0 else [f"{tokens / elapsed:,.0f} tokens/s"]),
        ],
        [
            f"cache: {_share(now.cached_prompt_tokens, now.prompt_tokens)} of prompt tokens found",
            f"{now.evictions:,} evictions",
            f"{now.preemptions:,} preemptions",
        ],
        [f"drafts: {now.accepted_draft_tokens:,} of {now.draft_tokens:,} accepted"] if now.draft_tokens else [],
    )
    lines = (*_joined(filter(None, parts), width), *_group_lines(now, width, bars=bars))
    return [line[:width] for line in lines]


def _joined(parts: Iterable[list[str]], width: int) -> Iterator[str]:
    """Yield a line for each list of parts, or several if it is too long."""
    for part in parts:
        line = part[0]
        for each in part[1:]:
            if len(line) + len(each) + 2 > width:
                yield f"{line},"
                line = f"  {each}"
            else:
                line += f", {each}"
        yield line


def _group_lines(now: Snapshot, width: int, *, bars: bool) -> Iterator[str]:
    rows = [("group", "blocks", "bytes", "pool", "found", "limits")]
    for index, group in enumerate(now.groups):
        rows.append(
            (
                f"{index} {group.kind}",
                f"{group.blocks_held:,}",
                format_bytes(group.bytes_held),
                _share(group.bytes_held, now.cache_bytes),
                _share(group.found_tokens, group.asked_tokens),
                f"{group.times_limiting:,}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    free = width - sum(widths) - 2 * len(widths)
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True))]
        line = "  ".join(cells)
        if bars and number and free >= _BAR_WIDTH:
            line += f"  {_bar(now.groups[number - 1].bytes_held, now.cache_bytes, min(free, 2 * _BAR_WIDTH))}"
        yield line


def _bar(part: int, whole: int, width: int) -> str:
    filled = min(width, round(width * part / max(1, whole)))
    return "█" * filled + "░" * (width - filled)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


@contextlib.contextmanager
def _screen() -> Iterator[Show]:
    """Yield a function that shows a snapshot: in place on a terminal, and as lines below each other in a pipe."""
    before: Snapshot | None = None
    drawn = is_drawn_on(sys.stdout)

    def lines(now: Snapshot) -> str:
        nonlocal before
        text = "\n".join(lines_of(now, before, width=line_width(), bars=drawn))
        before = now
        return text

    if not drawn:
        yield lambda now: click.echo(f"{lines(now)}\n")
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=sys.stdout), auto_refresh=False) as live:
        yield lambda now: live.update(Text(lines(now)), refresh=True)
