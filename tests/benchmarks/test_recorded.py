"""The recorded figures keep what the project promises, and the README says them."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from benchmarks.cache import eviction
from benchmarks.engine import drafts
from benchmarks.memory import traces, traffic
from tests.benchmarks.calling import ROOT, record_of


def readme() -> str:
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


# --- generating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "sentence", "aim"),
    [
        (
            "transformers continuous batching",
            r"generates (\S+) to (\S+) times as many tokens per second as transformers' con",
            1.3,
        ),
        ("transformers generate()", r"and (\S+) to (\S+) times as many as its `generate\(\)`", 1.0),
    ],
)
def test_tokens_are_generated_faster_than_by_transformers(peer: str, sentence: str, aim: float) -> None:
    ratios = [workload["times_as_fast"][peer] for workload in record_of("generate")["workloads"].values()]
    assert [(f"{min(ratios):.1f}", f"{max(ratios):.1f}")] == re.findall(sentence, readme())
    assert 4 == len(ratios)
    assert min(ratios) >= aim


@pytest.mark.parametrize("batch", drafts.BATCHES)
@pytest.mark.parametrize(
    ("text", "peer", "aim"),
    [
        ("copy", drafts.PLAIN, 1.5),
        ("copy", drafts.WITH_LOOKUP, 1.0),
        ("edit", drafts.PLAIN, 1.0),
        ("sampled", drafts.PLAIN, 0.97),
        ("draft-model", drafts.PLAIN, 1.0),
        ("draft-model", drafts.WITH_ASSISTANT, 1.0),
    ],
)
def test_drafts_are_as_fast_as_the_aims(text: str, peer: str, aim: float, batch: int) -> None:
    recorded = record_of("drafts")["texts"][text][str(batch)]
    # With one request, both do the same: the medians of four recorded runs were 0.83 to 1.07.
    aim = 0.8 if (peer, batch) == (drafts.WITH_ASSISTANT, 1) else aim
    assert statistics.median(recorded["times_as_fast"][peer]) >= aim
    if text == "edit":
        assert 0.5 < recorded["accepted_draft_tokens"] / recorded["draft_tokens"] < 0.99


@pytest.mark.parametrize("clock", ["seconds", "cpu_seconds"])
@pytest.mark.parametrize(("name", "most"), [("gemma3n-8192", 0.65), ("yoco-8192", 0.35)])
def test_prefills_take_as_much_less_as_the_layers_that_skip(name: str, most: float, clock: str) -> None:
    workload = record_of("skipping")["workloads"][name]
    assert 8192 == workload["num_prompt_tokens"]
    off, on = (workload["systems"][way][clock] for way in ("off", "on"))
    assert len(on) >= 7
    assert statistics.median(after / before for after, before in zip(on, off, strict=True)) <= most


def test_an_hour_of_each_scenario_ended_without_a_difference_or_a_leak() -> None:
    record = record_of("soak")
    assert record["minutes"] >= 60
    assert {"windows", "states", "encoder", "three-blocks"} == record["scenarios"].keys()
    faults: set[str] = set()
    for scenario in record["scenarios"].values():
        assert ([], [], []) == tuple(scenario[name] for name in ("differences", "mirror_differences", "leaks"))
        assert scenario["requests"] > 300
        assert min(scenario[name] for name in ("preemptions", "mirrors", "resets", "resizes", "pins")) > 0
        faults |= {*scenario["faults"]}
    harmless = {"swap", "listener", "told", "resize"}
    assert {"backend", "memory", "shape", "logits", "state", "interrupt", "books"} | harmless <= faults


# --- attention --------------------------------------------------------------------------------------------------------

MISSED = {
    "ten groups, windows 16 to 4,096, 256 requests, decodes": "at least 1,146 µs in the recorded run, the aim is 1,000"
}


def test_metadata_is_built_within_its_limits() -> None:
    record = record_of("metadata")
    assert 7 <= record["repeats"]
    # Other work on the machine makes a part slower, never faster: the fastest repeat is nearest to what the part takes.
    over = {
        name
        for name, part in record["parts"].items()
        if part["limit"] is not None and min(part["microseconds"]) > part["limit"]
    }
    assert {*MISSED} == over
    limits = [part["limit"] for part in record["parts"].values()]
    assert [60.0, 60.0, 120.0, 120.0, None, 15.0, *[1000.0, 2500.0] * 2, *[500.0] * 4, *[50.0] * 2] == limits


def test_formats_take_what_they_say_and_cost_little() -> None:
    record = record_of("formats")
    # 32 layers, keys and values of 8 heads of 128.
    sizes = {"bfloat16": 256, "fp8_tensor": 128, "fp8_token_head": 132, "int8_token_head": 132, "int4_token_head": 68}
    taken = {name: record["memory"][name]["bytes_per_token"] / (32 * 2 * 8) for name in sizes}
    assert sizes == taken
    ways, losses = record["model"]["ways"], {"int8_token_head": 1.002, "fp8_tensor": 1.02, "fp8_token_head": 1.02}
    for name, most in {**losses, "int4_token_head": 1.1}.items():
        assert ways[name]["perplexity"] / ways["float32"]["perplexity"] < most


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_readme_says_the_ratios_of_the_cache_core() -> None:
    recorded = record_of("cache")["cases"]
    shown = ("decode-256x1", "decode-256x6", "decode-256-state", "pass-cached", "hit-1", "chain-4000")
    ratios = [statistics.median(recorded[name]["sides"]["kvframe"]["times_as_fast"]) for name in shown]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paragraph = text.split("The cache manager alone, in the", 1)[1].split("\n\n", 1)[0]
    assert [f"{ratio:#.3g}" for ratio in ratios] == re.findall(r"\d+\.\d+", paragraph)


def test_ten_million_operations_did_what_the_definition_says() -> None:
    record = record_of("cache_model")
    assert {} == record["failures"]
    assert 10_000_000 <= record["operations"] == sum(record["verbs"].values())


def test_scans_do_not_flush_shared_prompts_and_conversations_lose_little() -> None:
    all_traces = record_of("eviction")["traces"]
    gains: dict[str, list[float]] = {}
    for name, trace in all_traces.items():
        for pool, policies in trace["pools"].items():
            lru, scan_resistant = policies["lru"], policies["scan_resistant"]
            assert max(lru["found"], scan_resistant["found"]) <= policies["at best"]["found"]
            gains.setdefault(name, []).append(
                eviction.share(trace, pool, "scan_resistant") - eviction.share(trace, pool, "lru")
            )
            if name.startswith("shared prompts"):
                assert scan_resistant["shared_found"] >= lru["shared_found"]
    between, bursts = (f"shared prompts, one-off documents {when}" for when in ("between", "in bursts"))
    assert (min(gains[between]) > 1, max(gains[between]) > 5, max(gains[bursts]) > 3) == (True, True, True)
    # Percentage points of prompt tokens.
    assert min(*gains["conversations"], *gains["conversations on shared prompts"]) > -1


# --- memory -----------------------------------------------------------------------------------------------------------


def test_planned_models_waste_next_to_nothing_and_fit_at_least_as_many_requests() -> None:
    rows = {row["title"]: row for row in record_of("memory")["models"]}
    assert 15 == len(rows)
    for row in rows.values():
        assert 0 <= row["wasted"] <= 0.01
        counts = zip(*(row["requests"][name] for name in ("hybrid", "full", "padded")), strict=True)
        assert all(hybrid >= max(full, padded) for hybrid, full, padded in counts)
    # Bytes are those of the published sizes.
    assert 32 * 2 * 8 * 128 * 2 == rows["Llama 3.1 8B"]["bytes_per_token"]
    assert 61 * (512 + 64) * 2 == rows["DeepSeek-V3"]["bytes_per_token"]
    state = 32 * 128 * 128 * 4 + 8192 * 4 * 2
    assert 36 * state == rows["Qwen3-Next 80B, one state a request"]["bytes_per_request"]
    # 589,824 bytes of state by 4,096 of a token are 144 tokens; 2,162,688 by 2,048 are 1,056.
    assert ([144], [1056]) == tuple(rows[name]["padded"]["block_sizes"] for name in ("Jamba Mini", "Qwen3-Next 80B"))
    ratios = [row["request_bytes"]["padded"][0] / row["request_bytes"]["hybrid"][0] for row in rows.values()]
    assert (1.0, 1.1) == (min(ratios), round(max(ratios), 1))
    assert "up to a tenth more](benchmarks/results/memory.md) for requests of 8,192 tokens" in readme()


def test_simulated_traffic_wastes_little_and_runs_at_least_as_many_requests() -> None:
    layouts: dict[tuple[str, str], dict[str, Any]] = {}
    for row in record_of("memory_traffic")["layouts"]:
        layouts.setdefault((row["title"], row["trace"]), {})[row["layout"]] = row
    assert [(title, trace) for title in traffic.MODELS.values() for trace in traces.TRACES] == [*layouts]
    for title in traffic.MODELS.values():
        for layout in ("kvframe", "kvframe, few states"):
            rows = [found[layout] for (name, _), found in layouts.items() if name == title and layout in found]
            assert (traffic.shape_waste(rows) or 0.0) <= 0.01, (title, layout)
    for rows in layouts.values():
        assert traffic.best_ratio(rows, "equal padded groups") >= 1
        # Which request meets which differs from layout to layout: what follows from that is no difference.
        assert traffic.best_ratio(rows, "equal padded groups", "ended_in_1000_steps") >= 0.97
    for figure in ("peak", "concurrency"):
        ratios = [traffic.best_ratio(rows, "equal padded groups", figure) for rows in layouts.values()]
        assert 3 <= sum(ratio >= 1.3 for ratio in ratios)
