"""``kvframe top``: show live what an engine's cache does, of prompts that are run here or of a running server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe import find_model
from kvframe.cli.options import (
    block_size_option,
    dtype_option,
    max_model_len_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.render import format_bytes, is_drawn_on, line_width, make_console
from kvframe_engine.commands.options import REFUSED_EXIT_CODE, device_option, drafts_option, log_lines
from kvframe_engine.commands.prompts import PromptCommand, prompt_options, read_given_prompts
from kvframe_engine.commands.snapshot import (
    OF_TIERS,
    Snapshot,
    UnreachableError,
    fetch,
    metrics_url,
    read_metrics,
    snapshot_of,
)

if TYPE_CHECKING:
    from kvframe import Use
    from kvframe_engine.engine import Engine
    from kvframe_engine.requests.params import SamplingParams

_BAR_WIDTH = 20
_GONE_EXIT_CODE = 1
"""Exit code if a server that was watched is gone."""


Show = Callable[[Snapshot], None]


@click.command(cls=PromptCommand, short_help="Show live what the cache does.")
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
@max_model_len_option
@device_option
@dtype_option
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
    max_model_len: int | None,
    device: str | None,
    dtype: str | None,
) -> None:
    """Run prompts through MODEL and show live what its cache does; or watch a running server with --url.

    Requests, blocks held per cache group, hits and the group that limits them, evictions, preemptions, drafts, what
    host memory and page stores found and kept, and step times. In a pipe, each snapshot is printed as plain lines.
    Ctrl-C ends it.
    """
    if (model is None) == (url is None):
        raise click.UsageError("give a MODEL with prompts, or the --url of a server")
    if url is not None:
        if texts or prompts_file or token_ids_file:
            raise click.UsageError("a server gets its prompts from its clients: --url takes none")
        with _screen() as show:
            gone = _watch(metrics_url(url), show, interval, count)
        if gone is not None:
            click.echo(f"kvframe: {gone}", err=True)
            click.get_current_context().exit(_GONE_EXIT_CODE)
        return
    assert model is not None
    if count is not None:
        raise click.UsageError("--count is for --url: prompts end by themselves")
    prompts = read_given_prompts(texts, prompts_file, token_ids_file)
    model = find_model(model, weights=True)
    stack = read_stack(
        stack_file,
        cache={"memory": memory, "block_size": block_size},
        model={"drafts": drafts, "device": device, "dtype": dtype},
        limits={"max_model_len": max_model_len},
    )

    from kvframe_engine.engine import Engine
    from kvframe_engine.requests.request import SamplingParams

    with log_lines():
        new_engine = Engine.from_pretrained(model, stack=stack)
    with new_engine as engine, _screen() as show:
        errors = _run(engine, prompts, SamplingParams(max_new_tokens=max_new_tokens), show, interval)
    if errors:
        click.echo(f"kvframe: {len(errors)} of {len(prompts)} prompts were refused or failed: {errors[0]}", err=True)
        click.get_current_context().exit(REFUSED_EXIT_CODE)


# --- where snapshots come from ----------------------------------------------------------------------------------------


def _run(engine: Engine, prompts: Any, params: SamplingParams, show: Show, interval: float) -> list[str]:
    """Run prompts, and show a snapshot after each interval and at the end; return the errors of prompts."""
    recorded = engine.start_trace()
    last, step_seconds, total = time.monotonic(), 0.0, len(prompts)

    def take(num_done: int) -> Snapshot:
        nonlocal step_seconds
        step_seconds += sum(step.stop - step.start for step in recorded.steps)
        # The trace would grow with each step.
        recorded.steps.clear()
        recorded.events.clear()
        return snapshot_of(engine, time.monotonic(), step_seconds, (num_done, total))

    def after_step(num_done: int) -> None:
        nonlocal last
        if num_done < total and time.monotonic() - last >= interval:
            show(take(num_done))
            last = time.monotonic()

    show(take(0))
    outputs = engine.generate(prompts, params, on_progress=after_step)
    show(take(total))
    return [output.error for output in outputs if output.error is not None]


def _watch(url: str, show: Show, interval: float, count: int | None) -> str | None:
    """Show a server's snapshots, until ``count`` are shown; return why it ended if the server is gone."""
    number = 0
    while True:
        try:
            snapshot = read_metrics(fetch(url), time.monotonic())
        except UnreachableError as error:
            if number == 0:
                raise
            return f"the server is gone: {error.message}"
        show(snapshot)
        number += 1
        if number == count:
            return None
        time.sleep(interval)


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
    ended_line = [] if now.ended is None else [f"ended {now.ended[0]:,} of {now.ended[1]:,}"]
    parts = (
        [f"requests: {now.num_running:,} run", f"{now.num_waiting:,} wait", *ended_line],
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
        [f"tiers: {now.restored_tokens:,} tokens brought back", f"{now.waits_in_vain:,} waits in vain"]
        if now.tiers
        else [],
    )
    lines = (*_joined(filter(None, parts), width), *_group_lines(now, width, bars=bars), *_tier_lines(now))
    return [line[:width] for line in lines]


def _joined(parts: Iterable[list[str]], width: int) -> Iterator[str]:
    """Yield a line for each list of parts, or several if it is too long."""
    for part in parts:
        line = part[0]
        for item in part[1:]:
            if len(line) + len(item) + 2 > width:
                yield f"{line},"
                line = f"  {item}"
            else:
                line += f", {item}"
        yield line


def _tier_lines(now: Snapshot) -> Iterator[str]:
    if now.tiers:
        titles = ("tier", "found", "written", "dropped", "refused", "failures")
        rows = [titles, *((tier.name, *(f"{getattr(tier, name):,}" for name in OF_TIERS)) for tier in now.tiers)]
        yield from map("  ".join, _aligned(rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Return cells of equal widths: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [row[0].ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]


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
    cells = _aligned(rows)
    free = width - sum(len(cell) + 2 for cell in cells[0])
    for number, row in enumerate(cells):
        line = "  ".join(row)
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
    from rich.live import Live
    from rich.text import Text

    with Live(console=make_console(sys.stdout), auto_refresh=False) as live:
        yield lambda now: live.update(Text(lines(now)), refresh=True)
