"""The recorded figures keep what the project promises, and the README says them."""

from __future__ import annotations

import re
import statistics

import pytest

from benchmarks.memory import tier_hits
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


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_readme_says_the_ratios_of_the_cache_core() -> None:
    recorded = record_of("cache")["cases"]
    shown = ("decode-256x1", "decode-256x6", "decode-256-state", "pass-cached", "hit-1", "chain-4000")
    ratios = [statistics.median(recorded[name]["sides"]["kvframe"]["times_as_fast"]) for name in shown]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paragraph = text.split("The cache manager alone, in the", 1)[1].split("\n\n", 1)[0]
    assert [f"{ratio:#.3g}" for ratio in ratios] == re.findall(r"\d+\.\d+", paragraph)


def test_each_hint_buys_what_it_is_for() -> None:
    record = record_of("hints")

    def gains(trace: str, hinted: str, kind: str) -> list[float]:
        """Return by how much the tokens found grow by a hint, for each pool, as a share of what is asked for."""
        pools, asked = record["traces"][trace]["pools"].values(), record["traces"][trace]["counted"][kind]
        return [(each[hinted]["found"][kind] - each["no hints"]["found"][kind]) / asked for each in pools]

    for trace in ("chats", "agents", "rewriting agents"):
        for hinted in ("one-off", "turns", "all"):
            assert min(gains(trace, hinted, "turn")) > 0.02
        assert max(gains(trace, "all", "turn")) > 0.15
        sessions, everything = gains(trace, "sessions", "turn"), gains(trace, "all", "turn")
        assert max(more - less for more, less in zip(sessions, everything, strict=True)) > 0.1
    assert min(gains("batch", "batch", "turn")) > 0.01
    for trace in record["tiers"].values():
        for tier in ("host_memory", "shelf"):
            without, one_off = (trace["sides"][hinted][tier] for hinted in ("no hints", "one-off"))
            assert one_off["found"] >= without["found"]
            assert one_off["blocks_written"] <= without["blocks_written"]
    for trace in ("chats", "agents", "rewriting agents"):
        for tier in ("host_memory", "shelf"):
            without, one_off = (record["tiers"][trace]["sides"][hinted][tier] for hinted in ("no hints", "one-off"))
            assert one_off["blocks_written"] < without["blocks_written"] / 2
    urgent = [record["waiting"][policy]["median"]["urgent"] for policy in ("fcfs", "priority")]
    assert urgent[1] <= 2 < urgent[0]
    assert record["waiting"]["fcfs"]["steps"] == record["waiting"]["priority"]["steps"]


# --- tiers ------------------------------------------------------------------------------------------------------------


def test_traffic_with_faulty_stores_ended_without_a_difference_or_a_leak() -> None:
    record = record_of("soak_stores")
    assert record["minutes"] >= 30
    assert {"full", "windows", "states", "latents", "encoder"} == record["scenarios"].keys()
    for scenario in record["scenarios"].values():
        assert ([], [], []) == tuple(scenario[name] for name in ("differences", "mirror_differences", "leaks"))
        assert min(scenario[name] for name in ("preemptions", "restored_from_store", "store_failures")) > 0


def test_a_prefix_that_is_found_elsewhere_costs_less_than_computing_it() -> None:
    record = record_of("tiers")
    assert record["repeats"] >= 7
    for model in record["models"].values():
        computed = min(model["places"]["computed again"]["cpu_seconds"])
        assert {"device", "host memory", "disk", "server"} <= model["places"].keys()
        for name, place in model["places"].items():
            if name != "computed again":
                assert {model["num_prompt_tokens"]} == {*place["found_tokens"]}
                assert max(place["cpu_seconds"]) < computed / 4


def test_tiers_never_find_fewer_tokens_than_none() -> None:
    record = record_of("tier_hits")
    assert {"multi-turn", "mooncake"} == {row["trace"] for row in record["rows"]}
    assert not tier_hits.finds_fewer(record)


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
