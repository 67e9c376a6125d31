"""Each benchmark runs at its smallest size: it checks its outputs, and writes a record and the page of the record.

Usual runs have half of the benchmarks. Their pages are all checked, by ``test_pages``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.cache.event_costs import ALL, BETWEEN, FULL
from benchmarks.engine import beside_vllm, generate, skipping, soak
from tests.benchmarks.calling import RESULTS, ROOT, call, page_of, record_of
from tests.benchmarks.test_pages import PAGES
from tests.covering import few
from tests.support.models import save_byte_model


@attrs.frozen(kw_only=True)
class Smallest:
    """The smallest run of a benchmark.

    Attributes:
        options: The command's options; ``{folder}`` stands for an empty folder, and ``{model}`` for that of a model.
        measured: Where in its record to find what was measured, and the names there.
        forks: Whether its processes are forks; not if they get open files from it.
    """

    options: str
    measured: Mapping[str, Sequence[str]]
    forks: bool = True


RUNS: Mapping[tuple[str, str], Smallest] = {
    ("engine.beside_vllm", "beside_vllm"): Smallest(
        options="--workload tiny --repeats 1 --threads 1 --peer {folder}",
        measured={"workloads/tiny/systems": ("kvframe", "kvframe, packed", "transformers")},
    ),
    ("engine.generate", "generate"): Smallest(
        options="--workload tiny --repeats 1",
        measured={
            "workloads/tiny/tokens_per_second": (
                "kvframe",
                "transformers generate()",
                "transformers continuous batching",
            )
        },
    ),
    ("engine.skipping", "skipping"): Smallest(
        options="--workload tiny-gemma3n --workload tiny-yoco --repeats 1",
        measured={"workloads/tiny-gemma3n/systems": ("off", "on"), "workloads/tiny-yoco/systems": ("off", "on")},
    ),
    ("engine.tiers", "tiers"): Smallest(
        options="--model tiny-full --num-tokens 128 --repeats 1 --slow 1",
        measured={"models": ("tiny-full",)},
        forks=False,
    ),
    ("engine.tier_steps", "tier_steps"): Smallest(
        options="--model tiny-full --num-tokens 32 --num-new 4 --repeats 1",
        measured={"models/tiny-full/tiers": ("none", "host memory", "disk")},
        forks=False,
    ),
    ("memory.tier_hits", "tier_hits"): Smallest(
        options="--trace multi-turn --layers states --size 1 --workers 1", measured={}, forks=False
    ),
    ("engine.profile_step", "step_profile"): Smallest(
        options="--workload tiny --steps 3", measured={"workloads/tiny/steps": ("prefill", "decode")}
    ),
    ("attention.cpu", "cpu_attention"): Smallest(
        options="--rounds 1 --threads 1 --system torch --system mla --shape tiny-window --shape tiny-mixed",
        measured={"shapes": ("tiny-window", "tiny-mixed"), "shapes/tiny-window/systems": ("torch",)},
        forks=False,
    ),
    ("attention.formats", "formats"): Smallest(
        options="--texts 2 --context 32 --repeats 1 --threads 1 --backend cpu --model {model}",
        measured={
            "memory": (
                "float32",
                "float16",
                "bfloat16",
                "fp8_tensor",
                "fp8_token_head",
                "int4_token_head",
                "int8_token_head",
            )
        },
    ),
    ("attention.chosen", "chosen_tokens"): Smallest(options="--num-tokens 64 --num-chosen 8 --repeats 1", measured={}),
    ("engine.kept_tokens", "kept_tokens"): Smallest(
        options="--num-tokens 64 --budget 16 --num-new 4 --repeats 1", measured={}
    ),
    ("attention.metadata", "metadata"): Smallest(options="--repeats 1", measured={}),
    ("cache.core", "cache"): Smallest(
        options="--rounds 1 --case tiny-decode --peer {folder}", measured={"cases": ("tiny-decode",)}
    ),
    ("cache.growth", "cache_growth"): Smallest(
        options="--rounds 1 --axis tiny --peer {folder}", measured={"axes/tiny/points": ("1", "2")}
    ),
    ("cache.event_costs", "event_costs"): Smallest(
        options="--rounds 1 --case tiny", measured={"cases/tiny/steps": (BETWEEN, FULL, ALL)}
    ),
    ("cache.definition", "cache_model"): Smallest(
        options="--operations 500 --seed 4 --processes 2", measured={"failures": ()}
    ),
    ("cache.eviction", "eviction"): Smallest(
        options="--size 20 --trace conversations", measured={"traces": ("conversations",)}
    ),
    ("cache.hints", "hints"): Smallest(options="--size 50 --trace agents", measured={"traces": ("agents",)}),
    ("memory.traffic", "memory_traffic"): Smallest(
        options="--size 1 --workers 1 --model jamba_mini.toml --trace constant", measured={}
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_byte_model(folder)
    return folder


def part_of(record: Any, path: str) -> Any:
    for key in path.split("/"):
        record = record[key]
    return record


@pytest.mark.parametrize(("module", "name"), few(9, RUNS))
def test_the_smallest_run_is_recorded(module: str, name: str, tmp_path: Path, model: Path) -> None:
    run = RUNS[module, name]
    options = run.options.format(folder=tmp_path, model=model).split()
    done = call(module, *options, "--results", str(tmp_path), forks=run.forks)
    assert 0 == done.returncode, done.stdout + done.stderr
    record = record_of(name, tmp_path)
    assert {path: [*names] for path, names in run.measured.items()} == {
        path: [*part_of(record, path)] for path in run.measured
    }
    assert page_of(name, tmp_path) == PAGES[name](record)
    assert f"python -m benchmarks.{module} " in record["machine"]["command"]
    if "--peer" in run.options:
        assert f"vLLM is not in {tmp_path}: measured without it" in done.stderr


@pytest.mark.whole  # five systems, each in a process that loads the model for each number of requests
def test_drafts_of_the_served_model_are_right(tmp_path: Path) -> None:
    done = call("engine.drafts", "--text", "tiny", "--repeats", "1", "--results", str(tmp_path))
    assert 0 == done.returncode, done.stdout + done.stderr
    for batch in record_of("drafts", tmp_path)["texts"]["tiny"].values():
        assert batch["draft_tokens"] == batch["accepted_draft_tokens"] > 0


@pytest.mark.whole
def test_a_minute_of_traffic_ends_without_a_difference_or_a_leak(tmp_path: Path) -> None:
    chosen = ["--minutes", "1", "--scenario", "windows", "--scenario", "three-blocks"]
    done = call("engine.soak", *chosen, "--results", str(tmp_path))
    assert 0 == done.returncode, done.stdout + done.stderr
    record = record_of("soak", tmp_path)
    assert page_of("soak", tmp_path) == soak.write_report(record)
    for scenario in record["scenarios"].values():
        assert ([], [], []) == tuple(scenario[name] for name in ("differences", "mirror_differences", "leaks"))
        assert scenario["compared_tokens"] > 50


def test_the_recorded_plans_are_those_of_this_code(tmp_path: Path) -> None:
    done = call("memory.plans", "--results", str(tmp_path))
    assert 0 == done.returncode, done.stdout + done.stderr
    assert record_of("memory", RESULTS)["models"] == record_of("memory", tmp_path)["models"]


def test_a_system_that_is_not_installed_is_asked_for_by_one_line(tmp_path: Path) -> None:
    options = ["--system", "vllm", "--peer", str(tmp_path), "--shape", "tiny-decode", "--results", str(tmp_path)]
    done = call("attention.cpu", "--rounds", "1", "--threads", "1", *options, forks=False)
    assert 2 == done.returncode
    assert f"vLLM is not in {tmp_path}; run make peer" in done.stderr


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("The batches", [each.name for each in generate.WORKLOADS]),
        ("Beside vLLM", [each.name for each in beside_vllm.WORKLOADS]),
    ],
)
def test_the_method_lists_every_batch(heading: str, names: list[str]) -> None:
    section = page_of("README", ROOT / "benchmarks").split(f"## {heading}\n")[1].split("\n## ")[0]
    assert names == re.findall(r"^\| `([a-z0-9-]+)`", section, re.M)


def test_the_method_lists_every_workload_of_skipping() -> None:
    section = page_of("README", ROOT / "benchmarks").split("\n## Prefill skipping\n")[1]
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", section.split("\n## ")[0], re.M))
    assert [each.name for each in skipping.WORKLOADS] == re.findall(r"`([a-z0-9-]+)`", rows)
