"""The benchmark script runs, checks what it compares, and says how it measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.engine import generate
from tests.benchmarks.calling import ROOT, measured, page_of, record_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    return measured(folder, "engine.generate", "--workload", "tiny", "--repeats", "1")


def test_all_systems_are_measured_on_one_batch(results: Path) -> None:
    record = record_of("generate", results)
    speeds = record["workloads"]["tiny"]["tokens_per_second"]
    assert ["kvframe", "transformers generate()", "transformers continuous batching"] == list(speeds)
    assert [1, 1, 1] == [len(times) for times in speeds.values()]


def test_the_record_says_where_and_how(results: Path) -> None:
    machine = record_of("generate", results)["machine"]
    assert {"processor", "cores", "threads", "python", "torch", "transformers", "kvframe", "command"} <= set(machine)


def test_the_page_shows_every_figure(results: Path) -> None:
    page = page_of("generate", results)
    assert 3 == len(re.findall(r"^\| (kvframe|transformers)[^|]*\|[^|]*\|[^|]*\|[^|]*\|$", page, re.M))


def test_the_method_lists_every_batch() -> None:
    method = page_of("README", ROOT / "benchmarks").split("## The batches")[1]
    method = method.split("\n## ")[0]
    assert [each.name for each in generate.WORKLOADS] == re.findall(r"^\| `([a-z-]+)`", method, re.M)


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [
        (
            "transformers continuous batching",
            r"generates (\S+) to (\S+) times as many tokens per second as transformers' con",
        ),
        ("transformers generate()", r"and (\S+) to (\S+) times as many as its `generate\(\)`"),
    ],
)
def test_the_figures_in_the_readme_are_the_recorded_ones(peer: str, sentence: str) -> None:
    record = record_of("generate")
    ratios = [workload["times_as_fast"][peer] for workload in record["workloads"].values()]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.findall(sentence, readme)
    assert [(f"{min(ratios):.1f}", f"{max(ratios):.1f}")] == said


def test_every_recorded_batch_ran_at_least_1_3_times_as_fast_as_continuous_batching() -> None:
    record = record_of("generate")
    assert len(record["workloads"]) == 4
    assert (
        min(each["times_as_fast"]["transformers continuous batching"] for each in record["workloads"].values()) >= 1.3
    )
