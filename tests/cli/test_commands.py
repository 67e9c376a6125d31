"""The commands that load no weights: plan, explain and plugins, in text and in JSON."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import attrs
import pytest
from kvframe_engine.commands import generate as generating
from kvframe_engine.commands.options import log_lines
from kvframe_engine.engine import Engine
from kvframe_transformers.testing import save_tiny, tiny_config

from kvframe.cache.stats import GroupLookups
from kvframe.cli import render
from kvframe.cli.live_range import describe_live_range
from kvframe.config.stack import Stack
from kvframe.contract.specs import AttentionSpec, TokenRange
from tests.loading.fake_distributions import FakeSite, registers
from tests.programs import run_program
from tests.support.commands import run, run_json, without_start
from tests.support.engines import host_tier_of

FULL = {"kind": "full_attention", "num_kv_heads": 2, "head_size": 64}
WINDOW = {"kind": "sliding_window", "num_kv_heads": 2, "head_size": 64, "window": 128}
LAYERS = {
    "name": "paper",
    "max_model_len": 4096,
    "layers": [{"name": "l.{}", "count": 3, **WINDOW}, {"name": "l.{}", **FULL}],
}


def error_of(*arguments: object) -> str:
    """Return the one line on stderr after a user's mistake."""
    result = run(*arguments)
    told = without_start(result.stderr)
    assert (2, "", 1) == (result.exit_code, result.stdout, len(told.splitlines())), result.output
    assert told.startswith("kvframe: error: ")
    return told.removeprefix("kvframe: error: ").rstrip()


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(LAYERS))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid model on disk, without a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny-gemma-3"
    save_tiny(path, "gemma3_text")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text("[[1, 2, 3], [7, 8]]")
    return path


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_the_plan_as_json(layers: Path) -> None:
    plan = run_json("plan", layers, "--cache-memory", "16MiB", "--dtype", "bfloat16")
    assert [3 * 8192, 8192] == [group["page_bytes"] for group in plan["groups"]]
    assert [["l.0", "l.1", "l.2"], ["l.3"]] == [group["layers"] for group in plan["groups"]]
    assert [16, 16] == [group["block_size"] for group in plan["groups"]]
    assert ["sliding_window", "full_attention"] == [group["spec"]["kind"] for group in plan["groups"]]
    assert plan["total_bytes"] == plan["null_bytes"] + plan["num_slabs"] * plan["slab_bytes"] <= 16 * 2**20
    assert 4 * 512 == plan["bytes_per_token"]
    assert 0 <= plan["waste_fraction"] < 1
    assert plan["concurrency"][-1] == {
        "num_tokens": 4096,
        "max_requests": plan["max_concurrency"],
        "max_generating": plan["max_generating"],
    }
    assert (16, True) == (plan["shortest_prefix"], plan["max_generating"] > plan["max_concurrency"])


def test_plan_says_live_ranges_in_words_and_examples(layers: Path) -> None:
    window, full = (group["live_range"] for group in run_json("plan", layers)["groups"])
    assert ("the last 127", "every past token") == (window["words"], full["words"])
    assert {"n": 2048, "ranges": [[1921, 2048]]} in window["examples"]


def test_plan_without_hybrid_keeps_every_token_of_every_layer(layers: Path) -> None:
    (group,) = run_json("plan", layers, "--no-hybrid")["groups"]
    assert (4, "every past token") == (len(group["layers"]), group["live_range"]["words"])


def test_plan_takes_block_size_length_and_the_lengths_to_list(layers: Path) -> None:
    plan = run_json("plan", layers, "--block-size", 32, "--max-model-len", 512, "--num-tokens", 100)
    assert (32, 512) == (plan["groups"][0]["block_size"], plan["max_model_len"])
    assert [100] == [each["num_tokens"] for each in plan["concurrency"]]


def test_plan_takes_a_stack(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[cache]\nmemory = "8MiB"\n[[rules]]\nkind = "sliding_window"\nspec = {window = 64}\n')
    plan = run_json("plan", layers, "--stack", stack)
    assert (8 * 2**20, "the last 63") == (plan["memory_bytes"], plan["groups"][0]["live_range"]["words"])


def test_an_option_wins_over_the_stack(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[cache]\nmemory = "8MiB"\n')
    assert 2**24 == run_json("plan", layers, "--stack", stack, "--cache-memory", "16MiB")["memory_bytes"]


def test_plan_is_aligned_text_in_a_pipe(layers: Path) -> None:
    lines = run("plan", layers, "--cache-memory", "16MiB").stdout.splitlines()
    assert "paper: 4 layers" == lines[0]
    assert lines[1].index("kind") == lines[2].index("sliding_window") == lines[3].index("full_attention")
    assert "3: l.{0-2}" in lines[2]
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("memory", ["8MiB", "auto"])
def test_plan_states_the_allocation_of_a_run(model: Path, memory: str) -> None:
    arguments = () if memory == "auto" else ("--cache-memory", memory)
    planned = run_json("plan", model, *arguments)
    with Engine.from_pretrained(model, stack=Stack.from_mapping({"cache": {"memory": memory}})) as engine:
        assert planned["total_bytes"] == engine.stats().cache_bytes


def test_plan_states_the_host_memory_of_a_run(model: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[cache]\nmemory = "8MiB"\nhost_memory = "3MB"\n')
    planned = run_json("plan", model, "--stack", stack)
    assert 3_000_000 - planned["slab_bytes"] < planned["host_bytes"] <= 3_000_000
    with Engine.from_pretrained(model, stack=Stack.from_file(stack)) as engine:
        assert planned["host_bytes"] == host_tier_of(engine).storage.bytes.numel()
    assert "for evicted blocks" in run("plan", model, "--stack", stack).stdout
    assert 0 == run_json("plan", model, "--cache-memory", "8MiB")["host_bytes"]


def test_plan_says_what_tiers_hold(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text(
        f'[cache]\nmemory = "8MiB"\nhost_memory = "1GiB"\ndisk = {{ path = "{tmp_path / "pages"}", size = "64GiB" }}\n'
    )
    page = tmp_path / "page.html"
    planned = run_json("plan", layers, "--stack", stack, "--html", page)
    host, disk = planned["tiers"]
    assert ("host_memory", planned["host_bytes"], "disk", 2**36) == (
        host["name"],
        host["num_bytes"],
        disk["name"],
        disk["num_bytes"],
    )
    assert 0 < host["num_requests"] < disk["num_requests"]
    shown = run("plan", layers, "--stack", stack).stdout
    (line,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["disk"]]
    assert ["disk", "64.00", "GiB", f"{disk['num_tokens']:,}", f"{disk['num_requests']:,}"] == line
    assert f'"num_requests": {disk["num_requests"]}' in page.read_text()
    assert "for evicted blocks\n" in shown
    # Planning is for any machine: it makes no folder.
    assert not (tmp_path / "pages").exists()


def test_explain_says_where_prefixes_are_found(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    tables = f'[cache]\nhost_memory = "1GiB"\ndisk = {{ path = "{tmp_path / "pages"}", size = "64GiB" }}\n'
    stack.write_text(tables)
    assert ["host_memory", "disk"] == run_json("explain", layers, "--stack", stack)["tiers"]
    sentence = "prefixes that the device no longer has are found in host_memory, disk"
    page = tmp_path / "page.html"
    assert sentence in " ".join(run("explain", layers, "--stack", stack, "--html", page).stdout.split())
    assert sentence in page.read_text()
    stack.write_text(f"{tables}prefix_caching = false\n")
    assert [] == run_json("explain", layers, "--stack", stack)["tiers"]
    assert "are found in" not in run("explain", layers, "--stack", stack).stdout


def test_plan_reads_a_config_alone(tmp_path: Path) -> None:
    tiny_config("gemma3_text").save_pretrained(tmp_path)
    plan = run_json("plan", tmp_path / "config.json", "--cache-memory", "8MiB")
    assert [3, 1] == [len(group["layers"]) for group in plan["groups"]]


class Chunked(AttentionSpec):
    """Sees the tokens of its own chunk of 100."""

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((n - n % 100, n),) if n % 100 else ()


class Halves(AttentionSpec):
    """Sees only the later half of the past."""

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((n // 2, n),) if n else ()


@pytest.mark.parametrize("max_model_len", [102, 150, 201, 4096])
def test_a_chunk_is_said_in_words(max_model_len: int) -> None:
    spec = Chunked(block_size=16, num_kv_heads=1, head_size=8)
    assert "its own chunk of 100" == describe_live_range(spec, max_model_len)


def test_a_model_as_long_as_a_chunk_sees_every_token() -> None:
    spec = Chunked(block_size=16, num_kv_heads=1, head_size=8)
    assert "every past token" == describe_live_range(spec, 101) == describe_live_range(spec, 100)


def test_a_live_range_that_neither_stays_nor_slides_is_said_by_example() -> None:
    spec = Halves(block_size=16, num_kv_heads=1, head_size=8)
    assert "at token 149: 74 to 148" == describe_live_range(spec, 150)


def test_states_are_planned_by_request_and_keys_by_token(tmp_path: Path) -> None:
    path = tmp_path / "states.json"
    state = {"name": "s.{}", "count": 3, "kind": "mamba", "recurrent_shapes": [[32, 16]]}
    path.write_text(json.dumps({**LAYERS, "layers": [state, {"name": "l", **FULL}]}))
    stack = tmp_path / "stack.toml"
    stack.write_text('[[rules]]\nkind = "mamba"\nspec = { checkpoints = "none" }\n')
    plan = run_json("plan", path, "--cache-memory", "8MiB", "--stack", stack)
    assert (2 * 2 * 64 * 4, 3 * 32 * 16 * 4) == (plan["bytes_per_token"], plan["bytes_per_request"])
    assert "the state after the last token" == plan["groups"][0]["live_range"]["words"]
    shown = run("plan", path, "--cache-memory", "8MiB", "--stack", stack).stdout
    assert re.search(r"\n +0  mamba .*\n +1  full_attention .*\n\nPages\n.*\n +0  float32 +all  ", shown)
    assert "  each request    6.00 KiB at most, whatever its length\n" in shown
    assert "  one more token  1.00 KiB at any length\n" in shown


def test_rollback_states_are_a_group_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "states.json"
    state = {"name": "s.{}", "count": 3, "kind": "mamba", "recurrent_shapes": [[32, 16]]}
    path.write_text(json.dumps({**LAYERS, "layers": [state, {"name": "l", **FULL}]}))
    stack = tmp_path / "stack.toml"
    stack.write_text('[[rules]]\nkind = "mamba"\nspec = { num_draft_tokens = 3 }\n')
    plan = run_json("plan", path, "--cache-memory", "8MiB", "--stack", stack)
    states, rollback, _ = plan["groups"]
    assert (3 * 2048, 9 * 2048) == (states["page_bytes"], rollback["page_bytes"])
    assert {"kind": "rollback", "block_size": 16, "num_states": 3} == rollback["spec"]
    assert states["layers"] == rollback["layers"]
    assert (4 * 3 + 2 * 9) * 2048 == plan["bytes_per_request"]
    shown = run("plan", path, "--cache-memory", "8MiB", "--stack", stack).stdout
    assert re.search(r"\n +1  rollback .*  the state after the last token,\s+until its\s+block ends\n", shown)
    explained = run_json("explain", path, "--stack", stack)["layers"]
    assert [(0, 1)] * 3 + [(2, None)] == [(each["group"], each["rollback_group"]) for each in explained]
    assert re.search(r"3: s.* mamba +0 and 1 ", run("explain", path, "--stack", stack).stdout)


def test_inputs_are_planned_by_their_own_tokens(tmp_path: Path) -> None:
    path = tmp_path / "encoder.json"
    cross = {"name": "c.{}", "count": 2, "kind": "cross_attention", "num_kv_heads": 2, "head_size": 64}
    layers = [{"name": "l", **FULL}, cross]
    path.write_text(json.dumps({**LAYERS, "max_encoder_len": 100, "layers": layers}))
    plan = run_json("plan", path, "--cache-memory", "8MiB")
    assert (1024, 0, {"encoder": 2048}) == tuple(
        plan[name] for name in ("bytes_per_token", "bytes_per_request", "bytes_per_input_token")
    )
    assert "every encoder token" == plan["groups"][1]["live_range"]["words"]
    shown = run("plan", path, "--cache-memory", "8MiB").stdout
    assert "  one encoder token  2.00 KiB; 200.00 KiB for the longest input, 100\n" in shown


def test_layers_with_different_windows_in_one_group_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    wide = {"name": "wide", **WINDOW, "window": 512}
    path.write_text(json.dumps({**LAYERS, "layers": [*LAYERS["layers"], wide]}))  # type: ignore[misc]
    plan = run_json("plan", path, "--no-hybrid")
    assert [5] == [len(group["layers"]) for group in plan["groups"]]
    assert [
        {"group": 0, "kind": "sliding_window", "needs": "the last 127", "layers": ["l.0", "l.1", "l.2"]},
        {"group": 0, "kind": "sliding_window", "needs": "the last 511", "layers": ["wide"]},
    ] == plan["computed_otherwise"]
    assert "Layers that see less than their group stores" in run("plan", path, "--no-hybrid").stdout
    assert [] == run_json("plan", path)["computed_otherwise"]


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_prints_outputs_in_order_as_json(model: Path, prompts: Path) -> None:
    result = run_json("generate", model, "--prompt-token-ids", prompts, "--max-new-tokens", 4, "--memory", "8MiB")
    assert [[1, 2, 3], [7, 8]] == [output["prompt_token_ids"] for output in result["outputs"]]
    assert [4, 4] == [len(output["token_ids"]) for output in result["outputs"]]
    assert ["length", "length"] == [output["finish_reason"] for output in result["outputs"]]
    assert 8 == result["stats"]["generated_tokens"]


def test_generate_gives_the_tokens_of_the_engine(model: Path, prompts: Path) -> None:
    result = run_json("generate", model, "--prompt-token-ids", prompts, "--memory", "8MiB", "--block-size", 1)
    with Engine.from_pretrained(model, stack=Stack.from_mapping({"cache": {"memory": "8MiB"}})) as engine:
        expected = [list(output.token_ids) for output in engine.generate([[1, 2, 3], [7, 8]])]
    assert expected == [output["token_ids"] for output in result["outputs"]]


def test_prompts_share_a_prefix_within_one_cache_salt_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(str([[*range(1, 9)]] * 2))
    arguments = ("generate", model, "--prompt-token-ids", tmp_path / "prompts.json", "--memory", "8MiB")
    for salts, cached in [((), 7), (("a",), 7), (("a", "a"), 7), (("a", "b"), 0)]:
        options = [each for salt in salts for each in ("--cache-salt", salt)]
        stats = run_json(*arguments, "--block-size", 1, "--max-new-tokens", 1, *options)["stats"]
        assert cached == stats["cached_prompt_tokens"]


def test_a_refused_prompt_has_an_error_and_the_others_finish(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text("[[], [1, 2], [100000]]")
    result = run("generate", model, "--prompt-token-ids", path, "--max-new-tokens", 2, "--memory", "8MiB", "--json")
    empty, good, unknown = json.loads(result.stdout)["outputs"]
    assert 1 == result.exit_code
    assert ("refused", "length", "refused") == tuple(each["finish_reason"] for each in (empty, good, unknown))
    assert "the prompt is empty" in empty["error"]
    assert None is good["error"]
    assert "100000 is not a token id" in unknown["error"]


def test_a_seed_makes_sampling_repeatable(model: Path, prompts: Path) -> None:
    arguments = ("--prompt-token-ids", prompts, "--memory", "8MiB", "--temperature", 1, "--top-k", 20, "--top-p", 0.9)
    runs = [run_json("generate", model, *arguments, "--seed", seed)["outputs"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_samples_of_a_prompt_follow_each_other(model: Path, prompts: Path) -> None:
    arguments = ("--prompt-token-ids", prompts, "--memory", "8MiB", "--temperature", 1, "--seed", 1)
    outputs = run_json("generate", model, *arguments, "--n", 3)["outputs"]
    asked = [output["prompt_token_ids"] for output in outputs]
    assert [0, 1, 2] * (len(outputs) // 3) == [output["sample"] for output in outputs]
    assert asked[0] == asked[1] == asked[2] != asked[3]
    second = run_json("generate", model, *arguments[:-1], 2)["outputs"]
    assert [output["token_ids"] for output in second] == [output["token_ids"] for output in outputs[1::3]]


def test_generate_reads_standard_input(model: Path) -> None:
    result = run("generate", model, "--prompt-token-ids", "-", "--max-new-tokens", 2, "--json", input="[1]\n[2, 3]\n")
    assert [[1], [2, 3]] == [output["prompt_token_ids"] for output in json.loads(result.stdout)["outputs"]]


def test_a_text_prompt_needs_a_tokenizer(model: Path) -> None:
    assert "tiny-gemma-3 has no tokenizer" in error_of("generate", model, "--prompt", "hello", "--memory", "8MiB")


def test_a_stop_string_needs_a_tokenizer(model: Path, prompts: Path) -> None:
    result = run("generate", model, "--prompt-token-ids", prompts, "--stop", "x", "--memory", "8MiB")
    assert (2, 1) == (result.exit_code, result.stderr.count("has no tokenizer, so no stop string can be found"))


def test_generate_ends_at_an_end_token_unless_it_is_ignored(tmp_path: Path, prompts: Path) -> None:
    save_tiny(tmp_path / "tiny", "gemma3_text")
    generate = ("generate", tmp_path / "tiny", "--prompt-token-ids", prompts, "--max-new-tokens", 5, "--ignore-eos")
    whole = [output["token_ids"] for output in run_json(*generate)["outputs"]]
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[1] for ids in whole]}))
    ended = run_json(*generate[:-1])["outputs"]
    assert [ids[: 1 + (ids[0] not in {each[1] for each in whole})] for ids in whole] == [
        output["token_ids"] for output in ended
    ]
    assert ["stop"] * 2 == [output["finish_reason"] for output in ended]
    assert whole == [output["token_ids"] for output in run_json(*generate)["outputs"]]


def test_too_many_samples_are_refused_in_one_line(model: Path, prompts: Path) -> None:
    result = run("generate", model, "--prompt-token-ids", prompts, "--n", 10**9, "--memory", "8MiB", "--json")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "n must be at most 128, not 1000000000" in result.stderr


@pytest.mark.parametrize("given", [(), ("--prompt", "a", "--prompts", "file")])
def test_prompts_come_from_one_place(given: tuple[str, ...]) -> None:
    result = run("generate", "model", *given)
    assert 2 == result.exit_code
    assert "give prompts by one of --prompt, --prompts and --prompt-token-ids" in result.stderr


def test_a_prompt_without_its_option_is_shown_with_it() -> None:
    result = run("generate", "a-model", "Hello there")
    assert 2 == result.exit_code
    assert "a prompt needs an option: --prompt 'Hello there'" in result.stderr


def test_a_start_is_one_line_in_a_pipe_too(model: Path, prompts: Path) -> None:
    arguments = ["generate", str(model), "--prompt-token-ids", str(prompts), "--max-new-tokens", "2"]
    done = run_program("-m", "kvframe", *arguments, "--device", "cpu", "--memory", "64MiB")
    assert 0 == done.returncode, done.stderr
    start = rf"kvframe: {model.name} runs on cpu in float32; attention by kvframe-cpu:cpu; a cache of [0-9.]+ MiB\n"
    assert re.fullmatch(start, done.stderr), done.stderr
    assert ["[1, 2, 3]", "[7, 8]"] == done.stdout.splitlines()[::3]


# --- plugins and explain ----------------------------------------------------------------------------------------------


def test_plugins_lists_each_with_its_status() -> None:
    listed = run_json("plugins")
    status = {plugin["distribution"]: (plugin["status"], plugin["api"]) for plugin in listed["plugins"]}
    assert [("loaded", "1.0"), ("loaded", "1.0")] == [status["kvframe"], status["kvframe-sliding-window"]]
    owners = {(name["kind"], name["name"]): name["owner"] for name in listed["names"]}
    assert "kvframe" == owners["spec", "full_attention"]
    assert "kvframe-sliding-window" == owners["spec", "sliding_window"]


def test_a_disabled_plugin_is_listed_with_its_reason(tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[plugins]\ndisabled = ["sliding_window"]\n')
    (plugin,) = (each for each in run_json("plugins", "--stack", stack)["plugins"] if each["name"] == "sliding_window")
    assert ("disabled", f"{stack} disables it") == (plugin["status"], plugin["reason"])


def test_explain_gives_each_layers_backend_and_the_reasons_against_others(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[plugins]\ndisabled = ["cpu", "numba"]\n')
    explained = run_json("explain", layers, "--stack", stack)["layers"]
    best = "kvframe-torch:torch"
    assert ["l.0", "l.1", "l.2", "l.3"] == [layer["layer"] for layer in explained]
    assert [0, 0, 0, 1] == [layer["group"] for layer in explained]
    assert {best} == {layer["backend"] for layer in explained}
    (other,) = (each for each in explained[0]["others"] if each["backend"] == "kvframe:torch_reference")
    assert f"can serve this layer; {best} is preferred" == other["reason"]


def test_explain_gives_the_reason_and_code_of_a_refusal(site: FakeSite, tmp_path: Path) -> None:
    backend = """
        from kvframe.builtin.torch_reference import TorchReferenceBackend
        from kvframe.contract.capabilities import Capabilities

        class Fast(TorchReferenceBackend):
            capabilities = Capabilities(devices={"cuda"}, dtypes={"float32"}, masks={"causal"})
    """
    manifest = registers("backends", ("fast", "acme_fast.backend:Fast"))
    site.add("acme-fast", "fast", manifest, files={"backend": dedent(backend)})
    path = tmp_path / "full.json"
    path.write_text(json.dumps({"max_model_len": 64, "layers": [{"name": "a", **FULL}]}))
    (layer,) = run_json("explain", path)["layers"]
    (refused,) = (each for each in layer["others"] if each["backend"] == "acme-fast:fast")
    assert {"backend": "acme-fast:fast", "codes": ["device"], "reason": "runs on cuda, not on cpu"} == refused


def test_explain_says_that_a_named_backend_leaves_no_choice(layers: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[[rules]]\nlayers = "*"\nbackend = "torch_reference"\n')
    layer = run_json("explain", layers, "--stack", stack)["layers"][0]
    reason = "not asked: the stack names kvframe:torch_reference"
    assert "kvframe:torch_reference" == layer["backend"]
    assert {"kvframe-mla:mla", "kvframe-torch:torch"} <= {other["backend"] for other in layer["others"]}
    assert {reason} == {other["reason"] for other in layer["others"]}
    assert all([] == other["codes"] for other in layer["others"])


def test_a_device_that_no_backend_serves_is_one_line(layers: Path) -> None:
    assert "kvframe-torch:torch: runs on cpu, cuda, not on tpu" in error_of("explain", layers, "--device", "tpu")


def test_explain_needs_no_weights(tmp_path: Path) -> None:
    tiny_config("gemma3_text").save_pretrained(tmp_path)
    explained = run_json("explain", tmp_path)["layers"]
    assert [0, 0, 0, 1] == [layer["group"] for layer in explained]


def test_explain_shows_the_chain_that_a_spec_or_prefill_skipping_brings(tmp_path: Path) -> None:
    path, stack = tmp_path / "chunks.json", tmp_path / "stack.toml"
    chunk = {"name": "chunk", **FULL, "kind": "chunked_local", "chunk": 64}
    reader = {"name": "reader", **FULL, "shares_with": "full"}
    path.write_text(json.dumps({"max_model_len": 64, "layers": [chunk, {"name": "full", **FULL}, reader]}))
    stack.write_text('[model]\nprefill_skipping = "decode_only"\n')
    wrappers = [layer["wrappers"] for layer in run_json("explain", path, "--stack", stack)["layers"]]
    assert [["chunked_local (chunk = 64)"], [], ["decode_only"]] == wrappers
    assert [] == run_json("explain", path)["layers"][2]["wrappers"]


def test_explain_folds_layers_that_are_alike(layers: Path) -> None:
    lines = run("explain", layers).stdout.splitlines()
    assert "paper: 4 layers" == lines[0]
    assert ["1 3: l.{0-2}", "2 1: l.3"] == [" ".join(line.split()[:3]) for line in lines[2:4]]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "explain", "generate"])
def test_a_missing_model_is_one_line(command: str, tmp_path: Path) -> None:
    arguments = ["--prompt", "a"] if command == "generate" else []
    missing = tmp_path / "none"
    assert f"there is no file or folder {missing}" == error_of(command, missing, *arguments)


def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    assert "is no model that a plugin recognises (asked: transformers)" in error_of("plan", tmp_path)


def test_a_config_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hello": 1}')
    assert str(tmp_path) in error_of("plan", tmp_path)


@pytest.mark.parametrize("name", ["config.json", "layers.json"])
def test_corrupt_json_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"layers": [')
    assert f"{path} is not valid JSON" in error_of("plan", path)


def test_a_kind_that_no_plugin_provides_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"max_model_len": 8, "layers": [{"name": "a", "kind": "tree"}]}))
    assert "layer 'a' needs the cache spec 'tree', which no plugin provides" in error_of("plan", path)


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        ("[cache]\nmemry = 1\n", "there is no key named 'memry'"),
        ('[[rules]]\nlayers = "*"\nbackend = "torhc"\n', "there is no backend named 'torhc'"),
        ("[cache]\nmemory = -1\n[engine]\nspeed = 3\n", "2 problems; "),
        ("[cache", "the stack file is not valid TOML"),
        ('[[rules]]\nlayers = "*"\nspec = {dtype = "floot16"}\n', "layer 'l.0' (sliding_window): there is no dtype"),
    ],
)
def test_a_wrong_stack_is_one_line(stack: str, says: str, layers: Path, tmp_path: Path) -> None:
    path = tmp_path / "stack.toml"
    path.write_text(stack)
    assert says in error_of("plan", layers, "--stack", path)


def test_a_missing_stack_is_one_line(layers: Path, tmp_path: Path) -> None:
    assert "the stack file cannot be read" in error_of("explain", layers, "--stack", tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        (
            "--cache-memory",
            "2 potatoes",
            "Invalid value for '--cache-memory': '2 potatoes' is not a size",
        ),
        ("--cache-memory", "1KiB", "give at least"),
        ("--max-model-len", 5000, "is more than the 4096 tokens that paper takes"),
    ],
)
def test_a_wrong_option_is_one_line(option: str, value: object, says: str, layers: Path) -> None:
    assert says in error_of("plan", layers, option, value)


def test_a_device_that_is_not_there_is_one_line(model: Path, prompts: Path) -> None:
    arguments = ("--prompt-token-ids", prompts, "--device", "cuda:99")
    assert "model.device 'cuda:99' cannot be used" in error_of("generate", model, *arguments)


def test_a_length_beyond_the_longest_request_is_refused(layers: Path) -> None:
    result = run("plan", layers, "--num-tokens", 5000)
    assert 2 == result.exit_code
    assert "a request has at most 4096 tokens" in result.stderr


def test_an_unknown_command_names_the_nearest() -> None:
    assert "did you mean 'plan'?" in error_of("plam")


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvframe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvframe ")


# --- output for people ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "compact"),
    [
        (["m.0.attn", "m.1.attn", "m.2.attn", "m.5.attn"], "m.{0-2,5}.attn"),
        (["m.3.attn"], "m.3.attn"),
        (["b.0.l.0.attn", "b.1.l.0.attn"], "b.{0-1}.l.0.attn"),
        (["enc.0", "enc.1", "dec.0"], "enc.{0-1}, dec.0"),
        (["attn"], "attn"),
        ([], ""),
    ],
)
def test_names_fold_the_number_that_counts(names: list[str], compact: str) -> None:
    assert compact == render.compact_names(names)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**31, "2.00 GiB"), (3 * 2**40, "3.00 TiB")],
)
def test_bytes_are_said_in_binary_units(num_bytes: int, text: str) -> None:
    assert text == render.format_bytes(num_bytes)


def test_a_table_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    render.print_table("Title", ("name", "count"), [("a[b]", "12")])
    out = capsys.readouterr().out
    assert "a[b]" in out
    assert "─" in out


def test_a_terminal_shows_which_group_limits_prefix_hits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lookups = [
        GroupLookups("full_attention", 4000, 3000, 0, 0),
        GroupLookups("state", 4000, 0, 0, times_limiting=3),
    ]
    stats = {
        "generated_tokens": 4,
        "seconds": 2,
        "prefix_hit_rate": 0,
        "lookups": list(map(attrs.asdict, lookups)),
        "restored_tokens": 1600,
        "restored_blocks": {"host_memory": 0, "disk": 100},
    }
    generating._print([], [], stats)
    told = capsys.readouterr().err
    assert "1,600 tokens were brought back: 100 blocks of disk\n" in told
    assert "group 1 (state) made the cached prefix shorter 3 times: alone it had 0 of 4,000 tokens\n" in told
    assert "full_attention" not in told


def test_a_start_shows_its_slow_parts_and_nothing_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("kvframe")
    with log_lines():
        log.info("capturing %d graphs", 4)
    log.info("no command asked")
    assert ("", "kvframe: capturing 4 graphs\n") == capsys.readouterr()


def test_a_progress_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with render.progress("generating", 3) as show:
        show(3)
    captured = capsys.readouterr()
    assert "generating" in captured.err
    assert "" == captured.out


def test_a_progress_bar_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with render.progress("generating", 3) as show:
        show(3)
    assert ("", "") == capsys.readouterr()
