"""Models over two ranks give what one process gives, and a rank that fails ends both."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from kvframe_engine.core import STEP_FAILED
from kvframe_transformers.testing import save_tiny

from tests.covering import keep
from tests.models import on_ranks
from tests.models.by_content import save as save_by_content
from tests.models.headed import save_headed
from tests.models.serving import PROMPTS, TinyModel
from tests.programs import python_in_forks, run_program
from tests.support.engines import runner_of, storage_of

FAMILIES = ("llama", "gemma3_text", "mixtral", "bert", "eurobert", "deepseek_v2", "mamba2")

USUAL = [
    name for name in on_ranks.CASES if name not in ("draft_states", "serve_latents", "serve_mixtral", "embed_eurobert")
]
"""The cases of usual runs; the layers of the others are also those of a case here, or not divided."""
CASES = keep(on_ranks.CASES, *USUAL)
STORED = keep(on_ranks.STORED, "gemma3_text", "mamba2")

KILLED = "its process was killed or its machine was lost"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        save_tiny(root / family, family)
    save_by_content(root / "deepseek_v32", "deepseek_v32")
    save_headed(root / "headed", "glm4_moe", 2, agrees=True)
    save_headed(root / "guessing", "mellum")
    save_tiny(root / "one_kv_head", "llama", num_key_value_heads=1)
    save_tiny(root / "turned_llama", "llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    other = save_tiny(root / "other_llama", "llama")
    with torch.no_grad():
        other.get_parameter("model.layers.1.self_attn.q_proj.weight").mul_(1.01)
    other.save_pretrained(root / "other_llama")
    save_tiny(root / "other_bert", "bert", seed=1)
    almost = save_tiny(root / "almost_llama", "llama")
    with torch.no_grad():
        for parameter in almost.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    almost.save_pretrained(root / "almost_llama")
    return root


@pytest.fixture(scope="module")
def pairs(folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """What pairs of processes did, by name; computed once, whichever test process asks first."""
    is_usual = "not whole" in request.config.option.markexpr
    names = [param.values[0] for param in (*CASES, *STORED) if not (is_usual and param.marks)]
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pairs.json"
    with FileLock(out.with_suffix(".lock")):
        if not out.exists():
            environment = {**os.environ, on_ranks.ASKED: " ".join(names)}
            process = run_program("-m", "tests.models.on_ranks", str(folder), environment=environment)
            assert 0 == process.returncode, process.stderr
            out.write_text(process.stdout)
    runs: Mapping[str, Any] = json.loads(out.read_text())
    return runs


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_results_of_one_process(pairs: Mapping[str, Any], folder: Path, case: str) -> None:
    assert [0, 0] == pairs["run_cases"]["codes"], pairs["run_cases"]["said"]
    expected = json.loads(json.dumps(on_ranks.CASES[case](folder)))
    assert expected == pairs["run_cases"]["result"][case]


def test_the_cases_reach_hits_preemption_and_host_memory(pairs: Mapping[str, Any], folder: Path) -> None:
    results = pairs["run_cases"]["result"]
    assert results["serve_llama"]["cached"] > sum(map(len, PROMPTS))
    assert results["host_gemma"]["counts"]["host_blocks_stored"] > 0
    for case in ("serve_gemma", "host_gemma", "draft_gemma"):
        assert results[case]["counts"]["preemptions"] > 0
        assert sum(map(len, PROMPTS)) == results[case]["counts"]["prompt_tokens"]
    assert 0 == results["embed_bert"]["groups"]
    assert 7 == len(results["use_verbs"]["ended"])
    assert 0 == results["use_verbs"]["graphs after a resize"] < results["use_verbs"]["replays"]


def test_steps_that_overlap_give_the_tokens_of_steps_that_do_not(pairs: Mapping[str, Any], folder: Path) -> None:
    results = pairs["run_cases"]["result"]
    assert results["overlap_llama"]["waits are steps"]
    assert on_ranks.overlap_llama(folder, "off")["tokens"] * 2 == results["overlap_llama"]["tokens"]
    expected = on_ranks.overlap_gemma(folder, overlap="off", memory="1MiB")["tokens"]
    assert [expected] * 2 == [results[case]["tokens"] for case in ("overlap_gemma", "overlap_host_gemma")]
    assert 0 < results["overlap_gemma"]["counts"]["preemptions"]
    assert 0 < results["overlap_host_gemma"]["counts"]["host_blocks_stored"]
    assert 1 == results["overlap_interrupt"]["interrupts"]
    calls = results["overlap_any_calls"]
    for name, end in on_ranks.overlap_any_calls(folder, "off").items():
        if "aborted" not in (end[0], calls[name][0]):
            assert end == calls[name]


@pytest.mark.parametrize("case", keep(["draft_llama", "draft_states"], "draft_llama"))
def test_drafts_of_another_model_change_no_token(pairs: Mapping[str, Any], case: str) -> None:
    plain, drafted = pairs["run_cases"]["result"]["serve_llama"], pairs["run_cases"]["result"][case]
    for what in ("first", "again", "samples", "likely", "most likely"):
        assert plain[what] == drafted[what]
    assert drafted["counts"]["draft_tokens"] > 0 == plain["counts"]["draft_tokens"]


def test_rank_0_runs_prediction_heads_for_all(pairs: Mapping[str, Any], folder: Path) -> None:
    results = pairs["run_cases"]["result"]
    plain, drafted = results["serve_headed"], results["draft_headed"]
    for what in ("first", "again", "samples", "likely", "most likely"):
        assert plain[what] == drafted[what]
    counts = drafted["counts"]
    assert counts["accepted_draft_tokens"] > 0.8 * counts["draft_tokens"] > 0 == plain["counts"]["draft_tokens"]
    assert counts["steps"] < 0.8 * plain["counts"]["steps"]
    guessing = results["draft_guessing"]
    assert guessing["plain"] == guessing["drafted"]
    assert {1} == {len(tokens) for _, tokens in guessing["records"]}
    assert 0 < guessing["counts"]["accepted_draft_tokens"] < guessing["counts"]["draft_tokens"]


def test_drafts_are_accepted_rejected_and_survive_preemption(pairs: Mapping[str, Any], references: Any) -> None:
    results = pairs["run_cases"]["result"]
    counts = results["draft_llama"]["counts"]
    assert 0 < counts["accepted_draft_tokens"] < counts["draft_tokens"]
    expected = [list(tokens) for tokens in references("gemma3_text")]
    counts = results["draft_gemma"]["counts"]
    assert expected == results["draft_gemma"]["tokens"]
    assert counts["accepted_draft_tokens"] == counts["draft_tokens"] > 0
    assert counts["preemptions"] > 0


def test_rank_0_has_the_hidden_states_of_the_last_tokens(pairs: Mapping[str, Any]) -> None:
    result = pairs["run_cases"]["result"]["draft_from_hidden_states"]
    assert result["missing"] < len(result["records"])
    assert [tokens for _, tokens in result["records"]] == [read for read, _ in result["records"]]
    assert {1, 2} <= {len(read) for read, _ in result["records"]}
    assert result["plain"] == result["drafted"]
    assert 0 < result["counts"]["accepted_draft_tokens"] < result["counts"]["draft_tokens"]


def test_tokens_are_those_of_transformers(pairs: Mapping[str, Any], folder: Path, references: Any) -> None:
    results = pairs["run_cases"]["result"]
    assert [list(tokens) for tokens in references("llama")] == results["serve_llama"]["first"]
    expected = [list(tokens) for tokens in references("gemma3_text")]
    assert [expected] * 2 == [results[case]["tokens"] for case in ("serve_gemma", "host_gemma")]


@pytest.mark.parametrize("family", STORED)
def test_ranks_find_in_a_store_what_ranks_before_them_gave(
    pairs: Mapping[str, Any], references: Any, family: str
) -> None:
    assert [0, 0] == pairs["run_stores"]["codes"], pairs["run_stores"]["said"]
    expected = [list(tokens) for tokens in references(family)]
    first_run, second_run = (pairs["run_stores"]["result"][f"{family} {turn}"] for turn in ("stored", "found"))
    assert [expected] * 2 == [first_run["tokens"], second_run["tokens"]]
    assert [0] * len(PROMPTS) == first_run["restored"]
    # The last token's block is always computed, and a prompt that begins like another one finds its blocks here.
    assert [0, 8, 16, 60] == second_run["restored"][:4]
    assert max(map(len, PROMPTS[4:])) - 4 <= sum(second_run["restored"][4:])


def test_a_bad_store_of_one_rank_costs_hits_only(pairs: Mapping[str, Any], references: Any) -> None:
    assert [0, 0] == pairs["run_bad_stores"]["codes"], pairs["run_bad_stores"]["said"]
    results = pairs["run_bad_stores"]["result"]
    expected = [list(references("llama")[3])]
    assert [expected] * 5 == [served["tokens"] for served in results.values()]
    restored = {name: (*served["restored"], served["waits"]) for name, served in results.items()}
    assert {"stored": (0, 0), "half": (32, 0), "failing": (0, 0), "late": (0, 1), "again": (60, 0)} == restored
    first, second = pairs["run_bad_stores"]["said"]
    assert "" == first
    assert "page store 'shelf' failed: OSError: the shelf broke; what it has is computed" in second


def test_a_model_that_cannot_be_divided_is_refused_in_one_sentence(pairs: Mapping[str, Any]) -> None:
    messages = pairs["run_refused"]["result"]
    assert [0, 0] == pairs["run_refused"]["codes"], pairs["run_refused"]["said"]
    expected = "'model.layers.0.self_attn' has 4 heads and 1 key-value heads; start as many processes as divide both: 1"
    assert expected in messages["one_kv_head"]
    assert "model.device 'cpu:0' is one device, and there are 2 ranks" in messages["device"]
    assert "a file of saved prefixes holds all of them" in messages["prefixes"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "weights",
            "ModelError: rank 1 has other weights of other_llama than rank 0: model.layers.1.self_attn.q_proj.weight;",
        ),
        ("whole weights", "ModelError: rank 1 has other weights of other_bert than rank 0: "),
        ("config", "ModelError: rank 1 has another config of turned_llama than rank 0: "),
        (
            "packages",
            "EngineError: rank 1 has other packages than rank 0: kvframe-fake 2.0 instead of 1.0; install the ",
        ),
    ],
)
def test_ranks_that_would_compute_parts_of_different_models_are_refused(
    pairs: Mapping[str, Any], what: str, sentence: str
) -> None:
    assert pairs["run_different"]["result"][what].startswith(sentence)


def test_ranks_that_were_refused_can_start_with_equal_models(pairs: Mapping[str, Any]) -> None:
    assert ([0, 0], "length") == (pairs["run_different"]["codes"], pairs["run_different"]["result"]["nothing"])


def test_three_ranks_for_four_heads_are_refused_in_one_sentence(pairs: Mapping[str, Any]) -> None:
    outcome = pairs["run_three"]
    assert [0, 0, 0] == outcome["codes"], outcome["said"]
    expected = "4 heads and 2 key-value heads; start as many processes as divide both: 1 or 2"
    assert f"over 3 ranks: its layer 'model.layers.0.self_attn' has {expected}" in outcome["result"]["said"]


@pytest.mark.parametrize(
    "run", ["kill_1", "kill_1_drafting", "kill_1_overlapping", "kill_1_idle", "kill_1_beside_a_thread"]
)
def test_a_rank_that_is_killed_ends_all_with_one_sentence(pairs: Mapping[str, Any], run: str) -> None:
    outcome = pairs[run]
    assert [71, -9] == outcome["codes"]
    assert [f"kvframe: error: rank 1 is lost: {KILLED}; all ranks end\n", ""] == outcome["said"]


def test_no_rank_stays_when_rank_0_is_killed(pairs: Mapping[str, Any]) -> None:
    assert [-9, 71] == pairs["kill_0"]["codes"]
    assert ["", f"kvframe: error: rank 0 is lost: {KILLED}; all ranks end\n"] == pairs["kill_0"]["said"]


def test_a_rank_that_is_stopped_ends_all(pairs: Mapping[str, Any]) -> None:
    outcome = pairs["stop_1"]
    assert [71, 71] == outcome["codes"]
    assert "rank 1 is lost: nothing was heard from it for 2 seconds, so its process is stopped" in outcome["said"][0]
    assert "" == outcome["said"][1]


def test_a_rank_that_answers_and_never_ends_a_step_ends_all_within_the_limit(pairs: Mapping[str, Any]) -> None:
    outcome = pairs["hang_on_1"]
    assert [71, 71] == outcome["codes"]
    sentence = (
        r"rank 1: a step has not ended within 2 seconds: it is in line \d+ of '(__main__|tests.models.on_ranks)'; "
    )
    advice = "if steps may take as long as that, raise engine.max_step_seconds in the stack\n"
    assert re.fullmatch(f"kvframe: error: {sentence}{advice}", outcome["said"][0])
    assert "" == outcome["said"][1]


@pytest.mark.parametrize(
    "run", ["raise_on_1", "raise_on_1_overlapping", "raise_on_1_beside_a_thread", "raise_in_set_up"]
)
def test_a_rank_that_raises_ends_all_with_its_sentence(pairs: Mapping[str, Any], run: str) -> None:
    outcome = pairs[run]
    assert [71, 71] == outcome["codes"]
    assert ["kvframe: error: rank 1: RuntimeError: attention is broken\n", ""] == outcome["said"]


@pytest.mark.parametrize("run", ["fail_on_rank_0", "fail_on_rank_0_overlapping"])
def test_an_error_of_rank_0_is_raised_there_and_ends_all_requests(pairs: Mapping[str, Any], run: str) -> None:
    assert [0, 71] == pairs[run]["codes"]
    result = pairs[run]["result"]
    assert "attention is broken" == result["raised"]
    assert [STEP_FAILED] * 2 + ["a step failed on rank 0, so its ranks have ended"] * 6 == result["errors"]
    assert (["error"], 0) == (result["reasons"], result["held"])


@pytest.mark.parametrize(("call", "verb"), [("step", "step"), ("stream", "next"), ("generate", "generate")])
def test_an_engine_whose_ranks_have_ended_is_closed_and_says_why(
    pairs: Mapping[str, Any], call: str, verb: str
) -> None:
    result = pairs["fail_on_rank_0"]["result"]
    why = "a step failed on rank 0, so its ranks have ended: RuntimeError: attention is broken"
    assert ["closed", f"the engine is closed, so '{verb}' cannot be called: {why}"] == result[call]
    assert {"closed": True, "unfinished": False, "running": 0, "waiting": 0} == result["state"]


def test_leaving_the_engine_on_rank_0_lets_the_others_end(pairs: Mapping[str, Any]) -> None:
    assert ({"left": True}, [0, 0]) == (pairs["interrupt"]["result"], pairs["interrupt"]["codes"])


def test_the_command_line_runs_under_torchrun(folder: Path, tmp_path: Path, references: Any) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kvframe", "generate"]
    options = [str(folder / "llama"), "--prompt-token-ids", str(prompts), "--max-new-tokens", "10", "--json"]
    process = run_program(*command, *options, "--memory", "2MiB", executable=python_in_forks())
    assert 0 == process.returncode, process.stderr
    outputs = json.loads(process.stdout)["outputs"]
    assert [list(tokens) for tokens in references("llama")] == [output["token_ids"] for output in outputs]


def test_torchrun_ends_with_the_sentence_of_the_rank_that_failed_beside_a_serving_thread(folder: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.models.on_ranks"]
    process = run_program(*command, str(folder), "raise_on_1_beside_a_thread", executable=python_in_forks())
    assert 1 == process.returncode, process.stderr
    assert "kvframe: error: rank 1: RuntimeError: attention is broken\n" in process.stderr
    assert re.search(r"rank +: 0 .*\n +exitcode +: 71 ", process.stderr), process.stderr


def test_a_process_that_is_alone_has_no_ranks(folder: Path) -> None:
    model = TinyModel.save(folder / "alone", "llama")
    with model.engine() as engine:
        assert engine._ranks is None
        assert type(storage_of(engine)).__name__ == "KVCacheStorage"
        assert runner_of(engine).compute == runner_of(engine)._compute
