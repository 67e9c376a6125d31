"""``kvframe top``: what a snapshot shows, of prompts that are run and of a server's metrics, and how it ends."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import attrs
import pytest
from click.testing import Result
from kvframe_engine.commands import top as module
from kvframe_engine.commands.snapshot import (
    COUNTERS,
    OF_TIERS,
    GroupUse,
    Snapshot,
    TierUse,
    UnreachableError,
    read_metrics,
)
from kvframe_engine.commands.top import lines_of
from kvframe_engine.engine import Engine
from kvframe_transformers.testing import save_tiny

from tests.cli.test_width import run_on_terminal
from tests.support.commands import run, without_start

WINDOW = GroupUse(
    kind="sliding_window", blocks_held=12, bytes_held=3 << 20, asked_tokens=200, found_tokens=50, times_limiting=3
)
FULL = GroupUse(
    kind="full_attention", blocks_held=1024, bytes_held=4 << 20, asked_tokens=200, found_tokens=150, times_limiting=0
)
NOW = Snapshot(
    seconds=12.0,
    num_running=8,
    num_waiting=3,
    ended=(5, 16),
    steps=1120,
    step_seconds=30.0,
    generated_tokens=900,
    prompt_tokens=400,
    cached_prompt_tokens=100,
    evictions=7,
    preemptions=2,
    draft_tokens=50,
    accepted_draft_tokens=40,
    cache_bytes=8 << 20,
    groups=(WINDOW, FULL),
    restored_tokens=0,
    waits_in_vain=0,
    tiers=(),
)
WITH_TIERS = attrs.evolve(
    NOW,
    restored_tokens=1200,
    waits_in_vain=1,
    tiers=(
        TierUse(name="host_memory", blocks_restored=75, blocks_stored=3000),
        TierUse(name="disk", blocks_restored=5, blocks_stored=40, blocks_dropped=2, blocks_refused=1, failures=3),
    ),
)
BEFORE = attrs.evolve(NOW, seconds=10.0, steps=1100, step_seconds=29.0, generated_tokens=700)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top")
    save_tiny(folder / "model", "gemma3_text")
    prompts = [[(seed * index) % 90 + 3 for index in range(40)] for seed in range(1, 9)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return folder


def top(*arguments: object) -> Result:
    return run("top", *map(str, arguments))


def test_a_snapshot_says_what_the_cache_does_and_what_changed_since_the_one_before() -> None:
    assert lines_of(NOW, BEFORE, width=80, bars=False) == [
        "requests: 8 run, 3 wait, ended 5 of 16",
        "steps: 1,120, 50.0 ms each, 100 tokens/s",
        "cache: 25% of prompt tokens found, 7 evictions, 2 preemptions",
        "drafts: 40 of 50 accepted",
        "group             blocks     bytes  pool  found  limits",
        "0 sliding_window      12  3.00 MiB   38%    25%       3",
        "1 full_attention   1,024  4.00 MiB   50%    75%       0",
    ]


def test_tiers_say_what_they_found_and_kept() -> None:
    lines = lines_of(WITH_TIERS, BEFORE, width=80, bars=False)
    assert "tiers: 1,200 tokens brought back, 1 waits in vain" == lines[4]
    assert [
        "tier         found  written  dropped  refused  failures",
        "host_memory     75    3,000        0        0         0",
        "disk             5       40        2        1         3",
    ] == lines[-3:]


def test_prompts_are_run_with_a_disk(model: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    pages = tmp_path / "pages"
    stack.write_text(f'[cache]\nmemory = "1MiB"\ndisk = {{ path = "{pages}", size = "16MiB" }}\n', encoding="utf-8")
    asked = (model / "model", "--prompt-token-ids", model / "prompts.json", "--stack", stack, "--max-new-tokens", 2)
    first, second = top(*asked), top(*asked)
    assert "tiers: 0 tokens brought back" in first.stdout
    assert re.search(r"tiers: [1-9]\d* tokens brought back, 0 waits in vain\n", second.stdout), second.output
    assert re.search(r"disk +[1-9]\d* +\d+ +0 +0 +0\n", second.stdout)


def test_without_a_snapshot_before_and_without_steps_there_is_no_rate() -> None:
    first = attrs.evolve(NOW, ended=None, draft_tokens=0, prompt_tokens=0, cached_prompt_tokens=0)
    assert ["requests: 8 run, 3 wait", "steps: 1,120, 26.8 ms each", "cache: - of prompt tokens found"] == [
        line.split(", 7 ev")[0] for line in lines_of(first, None, width=80, bars=False)[:3]
    ]
    assert "steps: 1,120, none since the last snapshot" == lines_of(NOW, NOW, width=80, bars=False)[1]


@pytest.mark.parametrize("width", [30, 50, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = lines_of(NOW, BEFORE, width=width, bars=True)
    assert max(map(len, lines)) <= width
    assert (width >= 80) == any("█" in line for line in lines)


def test_a_bar_shows_the_share_of_the_pool() -> None:
    window, full = lines_of(NOW, BEFORE, width=100, bars=True)[-2:]
    assert ((15, 25), (20, 20)) == tuple((line.count("█"), line.count("░")) for line in (window, full))


def test_prompts_are_run_and_shown_after_each_interval(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))
    result = top(
        model / "model", "--prompt-token-ids", model / "prompts.json", "--memory", "150KiB", "--max-new-tokens", 20
    )
    assert result.exit_code == 0, result.output
    snapshots = result.stdout.strip().split("\n\n")
    assert "requests: 0 run, 0 wait, ended 0 of 8" == snapshots[0].splitlines()[0]
    assert "requests: 0 run, 0 wait, ended 8 of 8" == snapshots[-1].splitlines()[0]
    steps = [int(re.findall(r"steps: ([\d,]+)", each)[0].replace(",", "")) for each in snapshots]
    assert sorted(set(steps)) == steps
    assert len(steps) > 20
    assert any(re.search(r"requests: [1-9]\d* run, [1-9]", each) for each in snapshots)
    assert re.search(r"[1-9]\d* preemptions", snapshots[-1])
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_last_snapshot_holds_the_engines_numbers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Snapshot] = []
    monkeypatch.setattr(module, "lines_of", lambda now, *args, **named: taken.append(now) or [""])
    assert 0 == top(model / "model", "--prompt-token-ids", model / "prompts.json", "--max-new-tokens", 5).exit_code
    last = taken[-1]
    assert (8 * 40, 8 * 5, (8, 8), 0) == (last.prompt_tokens, last.generated_tokens, last.ended, last.num_running)
    assert [0, 0] == [group.blocks_held for group in last.groups]
    assert ["sliding_window", "full_attention"] == [group.kind for group in last.groups]
    assert last.step_seconds > 0


def test_ctrl_c_ends_it_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_advance", interrupted)
    result = top(model / "model", "--prompt-token-ids", model / "prompts.json")
    assert (130, "\nkvframe: interrupted\n") == (result.exit_code, without_start(result.stderr))
    assert result.stdout.startswith("requests: 0 run, 0 wait, ended 0 of 8\n")


def test_a_refused_prompt_is_said_and_the_others_are_run(model: Path) -> None:
    result = top(model / "model", "--prompt-token-ids", model / "prompts.json", "--prompt", "x")
    assert (2, True) == (result.exit_code, "by one of --prompt" in result.stderr)
    (model / "mixed.json").write_text("[[1, 2], [100000]]")
    result = top(model / "model", "--prompt-token-ids", model / "mixed.json", "--max-new-tokens", 2)
    assert (1, True) == (result.exit_code, "ended 2 of 2" in result.stdout)
    assert "kvframe: 1 of 2 prompts were refused or failed: " in result.stderr


def test_a_terminal_is_drawn_in_place(model: Path) -> None:
    shown = run_on_terminal(
        80, "top", model / "model", "--prompt-token-ids", model / "prompts.json", "--max-new-tokens", 3
    )
    # The second snapshot is drawn over the first: each line is erased, and the cursor goes up.
    assert "\x1b[2K\x1b[1A" in shown
    assert "ended 8 of 8" in shown
    assert "░" * 20 in shown
    assert shown.rstrip().endswith("\x1b[?25h")


# --- a server ---------------------------------------------------------------------------------------------------------


METRICS = "\n".join(
    [
        'kvframe_blocks_held{group="0",kind="sliding_window"} 12',
        'kvframe_blocks_held{group="1",kind="full_attention"} 1024',
        f'kvframe_pool_bytes_held{{group="0",kind="sliding_window"}} {3 << 20}',
        f'kvframe_pool_bytes_held{{group="1",kind="full_attention"}} {4 << 20}',
        'kvframe_lookup_asked_tokens_total{group="0",kind="sliding_window"} 200',
        'kvframe_lookup_asked_tokens_total{group="1",kind="full_attention"} 200',
        'kvframe_lookup_found_tokens_total{group="0",kind="sliding_window"} 50',
        'kvframe_lookup_found_tokens_total{group="1",kind="full_attention"} 150',
        'kvframe_lookup_times_limiting_total{group="0",kind="sliding_window"} 3',
        'kvframe_lookup_times_limiting_total{group="1",kind="full_attention"} 0',
        "kvframe_requests_running 8",
        "kvframe_requests_waiting 3",
        'kvframe_step_seconds_bucket{le="0.1"} 1120',
        "kvframe_step_seconds_count 1120",
        "kvframe_step_seconds_sum 30.0",
        f"kvframe_cache_bytes {8 << 20}",
        *(f"kvframe_{name}_total {getattr(NOW, name)}" for name in COUNTERS),
        "",
    ]
)


def test_metrics_hold_a_snapshot() -> None:
    assert attrs.evolve(NOW, ended=None) == read_metrics(METRICS, 12.0)


def test_metrics_hold_tiers() -> None:
    text = METRICS + "\n".join(
        f'kvframe_tier_{name}_total{{tier="{tier.name}"}} {getattr(tier, name)}'
        for tier in WITH_TIERS.tiers
        for name in OF_TIERS
    )
    text += '\nkvframe_tier_bytes_read_total{tier="disk"} 7\n'
    assert WITH_TIERS.tiers == read_metrics(text, 12.0).tiers


def test_a_server_is_watched_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [METRICS, METRICS.replace("total 900", "total 950")]

    def fetch(url: str) -> str:
        assert "http://there:8000/metrics" == url
        if not answers:
            raise UnreachableError(f"{url} cannot be read: Connection refused")
        return answers.pop(0)

    monkeypatch.setattr(module, "fetch", fetch)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    result = top("--url", "there:8000/v1/")
    assert (1, 2) == (result.exit_code, result.stdout.count("requests: 8 run, 3 wait\n"))
    assert (
        "kvframe: the server is gone: http://there:8000/metrics cannot be read: Connection refused\n" == result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give a MODEL with prompts, or the --url of a server"),
        (("model", "--url", "there"), "give a MODEL with prompts, or the --url of a server"),
        (("--url", "there", "--prompt", "x"), "--url takes none"),
        (("model", "--prompt", "x", "--count", 3), "--count is for --url"),
        (("--url", "ftp://there"), "ftp://there/metrics is not the address of a server"),
        (("--url", "127.0.0.1:1"), "http://127.0.0.1:1/metrics cannot be read: "),
        (("--url", "http://["), "cannot be read: "),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    result = top(*arguments)
    assert (2, True, 1) == (result.exit_code, sentence in result.stderr, result.stderr.count("\n")), result.stderr


@pytest.mark.parametrize("text", ["", "<html>", "some_other_total 3\n", METRICS.replace("step_seconds", "x")])
def test_other_metrics_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda url: text)
    result = top("--url", "there")
    assert (2, True) == (result.exit_code, "are not those of `kvframe serve` of this version: 'kvf" in result.stderr)
