"""Simulated traffic: layouts that are alike run alike, every byte is somewhere, and the record holds what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.memory import traces, traffic
from tests.benchmarks.calling import page_of, record_of

LLAMA, GEMMA, FALCON = "llama_3_1_8b.toml", "gemma_3_27b.json", "falcon_h1_7b.toml"
SAME = ("requests", "steps", "peak", "concurrency", "preemptions", "hit_rate")


def figures(file: str, trace: str, *, size: int = 1, **options: Any) -> dict[str, Any]:
    row: dict[str, Any] = traffic.run(file, trace, size, **options)
    return row


# --- the simulation ---------------------------------------------------------------------------------------------------


def test_a_model_with_one_kind_of_layer_runs_alike_in_every_layout() -> None:
    ours, padded = (
        figures(LLAMA, "multi-turn", size=3, layout=layout) for layout in ("kvframe", "equal padded groups")
    )
    assert ours["was_full"]
    assert ours["hit_rate"] > 0.2
    # The pool evicts short runs of pages as a whole, and of equal blocks page by page.
    assert [ours[name] for name in SAME] == pytest.approx([padded[name] for name in SAME], rel=0.05)


@pytest.mark.parametrize("layout", ["kvframe", "kvframe, few states", "equal padded groups"])
def test_every_byte_is_somewhere(layout: str) -> None:
    row = figures(FALCON, "constant", size=6, layout=layout)
    assert row["looks"]
    assert min(row["use"].values()) >= 0
    assert 1.0 == pytest.approx(sum(row["use"].values()))


def test_groups_of_ten_hold_eight_windows_that_are_not_there() -> None:
    use = figures(GEMMA, "constant", layout="equal padded groups")["use"]
    # Of 60 layers' blocks of windows 52 are used; full attention's ten are whole.
    assert 0.08 < use["padding"] < 8 / 60


def test_long_blocks_beside_states_are_half_empty_in_short_requests() -> None:
    ours = figures(FALCON, "constant", size=6, layout="kvframe, few states")
    padded = figures(FALCON, "constant", size=6, layout="equal padded groups")
    assert padded["use"]["unfinished"] > 0.25 > 0.01 > ours["use"]["unfinished"]
    assert ours["concurrency"] > 1.3 * padded["concurrency"]


# --- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_drawn_again_from_its_seed() -> None:
    lengths = traces.TRACES["log-normal"]
    assert traces.draw(lengths, 5, 4096) == traces.draw(lengths, 5, 4096)
    assert traces.draw(lengths, 5, 4096) != traces.draw(lengths, 5, 4096, seed=1)


def test_each_turn_goes_on_from_the_one_before_and_none_is_too_long() -> None:
    for name, lengths in traces.TRACES.items():
        for each in traces.draw(lengths, 20, 448):
            ends = [0, *(end for turn in each.turns for end in (turn.prompt_end, turn.end))]
            assert ends == sorted(set(ends)), name
            assert 448 >= ends[-1] == len(each.token_ids), name


def test_conversations_begin_with_one_of_the_shared_prompts() -> None:
    lengths = traces.TRACES["multi-turn"]
    begins = {tuple(each.token_ids[: lengths.shared]) for each in traces.draw(lengths, 60, 8192)}
    assert lengths.num_shared == len(begins)


# --- the script and its record ----------------------------------------------------------------------------------------


def test_the_script_writes_a_record_a_page_and_a_plot(tmp_path: Path) -> None:
    chosen = ["--size", "1", "--workers", "1", "--model", "jamba_mini.toml", "--trace", "constant"]
    result = CliRunner().invoke(traffic.main, [*chosen, "--results", str(tmp_path)])
    assert 0 == result.exit_code, result.output
    record = record_of("memory_traffic", tmp_path)
    layouts = ["kvframe", "kvframe, few states", "equal padded groups"]
    assert layouts == [row["layout"] for row in record["layouts"]]
    page = page_of("memory_traffic", tmp_path)
    assert "\n| Jamba Mini | constant |" in page
    assert (tmp_path / "memory_traffic.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[str, str], dict[str, Any]]:
    rows = record_of("memory_traffic")["layouts"]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["title"], row["trace"]), {})[row["layout"]] = row
    return found


def test_every_published_shape_and_trace_is_recorded(recorded: dict[tuple[str, str], Any]) -> None:
    assert [(title, trace) for title in traffic.MODELS.values() for trace in traces.TRACES] == list(recorded)


def test_kvframe_wastes_at_most_one_percent_of_any_shape_beyond_unfinished_blocks(
    recorded: dict[tuple[str, str], Any],
) -> None:
    wasted = {}
    for title in dict.fromkeys(title for title, _ in recorded):
        of_shape = [rows for (name, _), rows in recorded.items() if name == title]
        for layout in ("kvframe", "kvframe, few states"):
            rows = [row[layout] for row in of_shape if layout in row]
            wasted[title, layout] = traffic.shape_waste(rows) or 0.0
    assert {} == {name: share for name, share in wasted.items() if share > 0.01}


def test_kvframe_never_runs_fewer_requests_at_once(recorded: dict[tuple[str, str], Any]) -> None:
    best_ratio = traffic.best_ratio
    most = {name: best_ratio(rows, "equal padded groups") for name, rows in recorded.items()}
    assert {} == {name: ratio for name, ratio in most.items() if ratio < 1}
    # Which request meets which differs from layout to layout: what follows from that is no difference.
    ended = {name: best_ratio(rows, "equal padded groups", "ended_in_1000_steps") for name, rows in recorded.items()}
    assert {} == {name: ratio for name, ratio in ended.items() if ratio < 0.97}


def test_three_traces_run_at_least_thirty_percent_more_requests_at_once(recorded: dict[tuple[str, str], Any]) -> None:
    best_ratio = traffic.best_ratio
    for figure in ("peak", "concurrency"):
        ratios = [best_ratio(rows, "equal padded groups", figure) for rows in recorded.values()]
        assert 3 <= sum(ratio >= 1.3 for ratio in ratios)
