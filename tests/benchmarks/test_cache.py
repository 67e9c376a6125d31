"""The benchmark of the cache core checks what a core holds and finds, runs, and its page shows every figure."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache import cases, core, kvframe_core, setting, work, worker
from tests.benchmarks.calling import ROOT, call, record_of


@pytest.fixture(scope="module")
def answers() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is timed here, and there is much to go through where torch is loaded.
        patch.setattr("gc.collect", lambda: 0)
        yield worker.Answers(lambda: worker.make_core("kvframe"))


TINY = {case.name: case for case in cases.tiny_cases()}


def do(answers: Any, case: Any, side: Any) -> tuple[list[float], Any]:
    """Set up, do one turn and check, with every question as it is after its way through JSON."""
    asked = [json.loads(json.dumps(core.question(case, side, what))) for what in ("set up", "turn", "check")]
    answers(asked[0])
    return answers(asked[1]), answers(asked[2])


def described(case: Any) -> dict[str, Any]:
    return {"title": case.title, "words": case.words, "aim": case.aim, "sizes": dict(case.sizes)}


def own(case: Any) -> list[Any]:
    return [side for side in case.sides if side.engine == "kvframe"]


MEMORY = """
from pathlib import Path
from benchmarks.cache.worker import touch_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident()
kept = touch_memory(64 << 20)
print((resident() - before) * 4096 >> 20, sum(map(len, kept)) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="whether memory is given back is the C library's choice")
def test_a_worker_keeps_the_memory_that_it_has_touched_and_uses_next_to_nothing_of_it() -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, check=True)
    resident, used = map(int, run.stdout.split())
    assert resident > 100
    assert 0 == used


def test_every_piece_of_work_is_done_and_checked(answers: Any) -> None:
    assert set(cases.WORKS) == {case.work.name for case in TINY.values()}
    for case in TINY.values():
        seconds, _ = do(answers, case, own(case)[0])
        assert seconds
        assert all(each > 0 for each in seconds), case.name


def test_as_many_groups_as_layers_can_be_forced(answers: Any) -> None:
    case = TINY["tiny-decode"]
    found = {side.name: do(answers, case, side)[1]["num_groups"] for side in own(case)}
    few, many = "kvframe", "kvframe, as many groups"
    assert {few: 2, many: 3, f"{few}, one by one": 2, f"{many}, one by one": 3} == found
    assert (None, 1024, 1040, 1056) == setting.apart(setting.Setting(windows=(None, 1024, 1024, 1024))).windows


def test_a_window_without_a_mask_and_a_state_are_in_the_plan_of_a_case() -> None:
    kinds = {
        name: [group.spec.kind for group in kvframe_core.plan_of(TINY[name].sides[0].setting).groups]
        for name in ("tiny-state", "tiny-no-mask")
    }
    assert {"tiny-state": ["full_attention", "mamba"], "tiny-no-mask": ["live_range"]} == kinds


def test_every_side_of_a_case_has_the_same_memory_and_requests() -> None:
    for case in cases.standard_cases():
        assert ["vllm", *["kvframe"] * (len(case.sides) - 1)] == [side.engine for side in case.sides]
        assert 1 == len({(each.setting.num_blocks, each.setting.max_num_seqs) for each in case.sides}), case.name


def _computed(self: Any, prompt: Any, chunk: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("case", "mistake", "broken"),
    [
        ("tiny-decode", "blocks held", {"held": lambda self, prompt: [(None, [1])]}),
        ("tiny-decode", "tokens found", {"look_up": lambda self, prompt: 0}),
        ("tiny-pass", "prompts found", {"look_up": lambda self, prompt: 0}),
        ("tiny-hit", "tokens found", {"look_up": lambda self, prompt: 16}),
        (
            "tiny-turns",
            "tokens found of a request that begins",
            {"begin": lambda self, prompt: 0, "compute": _computed},
        ),
        ("tiny-chain", "tokens found of the chain", {"compute": lambda self, prompt, chunk: 0}),
        ("tiny-lockstep", "tokens found of a prompt that is new", {"begin": lambda self, prompt: 16}),
        ("tiny-far-state", "early and late states", {"cached_states": lambda self: []}),
        ("tiny-far-state", "nearest state", {"lose": lambda self, blocks: None}),
    ],
)
def test_a_core_that_does_not_do_the_work_is_noticed(case: str, mistake: str, broken: Mapping[str, Any]) -> None:
    kind = type(worker.make_core("kvframe"))
    broken = {"let_go": lambda self, prompt: None, **broken} if "look_up" in broken else broken
    answers = worker.Answers(type("Broken", (kind,), broken))
    with pytest.raises(work.Mistake, match=mistake):
        do(answers, TINY[case], own(TINY[case])[0])


def test_the_page_says_the_work_in_words_and_compares_what_was_done_in_one_round() -> None:
    case = TINY["tiny-pass"]
    found = {
        "vLLM": {"seconds": [3e-6, 2e-6, 1e-6], "times_as_fast": []},
        "kvframe": {"seconds": [1e-6, 1e-6, 1e-6], "times_as_fast": [3.0, 2.0, 1.0]},
    }
    places = ("date", "command", "processor", "cores", "threads", "system", "commit")
    machine = dict.fromkeys((*places, "python", "torch", "transformers", "kvframe"), "?")
    record = {
        "machine": machine,
        "repeats": 3,
        "versions": {},
        "cases": {case.name: {**described(case), "sides": found}},
    }
    page = core.write_report(record)
    assert "| Pass | kvframe | 2 (1 to 3) | 1 |" in page
    assert f"Pass. {case.words}" in page
    assert "for each request" not in page
    assert "| vLLM | 2.0 (1.0 to 3.0) |  |" in page


def test_the_page_says_what_a_step_costs_for_each_request() -> None:
    case = TINY["tiny-decode"]
    values = {
        "seconds": [9e-6, 8e-6, 7e-6],
        "times_as_fast": [],
        "num_groups": 3,
        "num_held": 5,
    }
    lines = core._sides({**described(case), "sides": {"vLLM": values}}).splitlines()
    assert "|  | µs | times as fast | µs for each request | groups |" in lines[0]
    assert "| vLLM | 8.0 (7.0 to 9.0) |  | 2.00 | 3 | 5 |" == lines[2]


def test_the_readme_says_the_recorded_ratios() -> None:
    recorded = record_of("cache")["cases"]
    shown = ("decode-256x1", "decode-256x6", "decode-256-state", "pass-cached", "hit-1", "chain-4000")
    ratios = [statistics.median(recorded[name]["sides"]["kvframe"]["times_as_fast"]) for name in shown]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paragraph = readme.split("The cache manager alone, in the", 1)[1].split("\n\n", 1)[0]
    assert [f"{ratio:#.3g}" for ratio in ratios] == re.findall(r"\d+\.\d+", paragraph)


def test_without_the_peer_it_says_so_and_measures_the_rest(tmp_path: Path) -> None:
    options = ["--rounds", "2", "--case", "tiny-decode", "--peer", str(tmp_path), "--results", str(tmp_path)]
    done = call("cache.core", *options)
    assert 0 == done.returncode, done.stderr
    assert f"vLLM is not in {tmp_path}: measured without it" in done.stderr
    sides = record_of("cache", tmp_path)["cases"]["tiny-decode"]["sides"]
    assert "vLLM" not in sides
    assert 2 == len(sides["kvframe"]["seconds"])
