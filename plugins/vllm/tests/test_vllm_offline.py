"""Small random models in vLLM, offline and in one process: on kvframe's layers, and on vLLM's own.

``make vllm`` runs these in an environment that has vLLM. Others skip them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]


OWN = {"DeepseekV2": {"attention_backend": "CPU_MLA"}}
"""What vLLM's own run needs: its other backend for latents is for bfloat16 only."""


def serve_both(
    family: str, num: int, vllm_runs: Any, stack: str, **engine: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what vLLM reports on its own backend, and on kvframe's layers."""
    model, prompts = vllm_runs.make_model(family), vllm_runs.make_prompts(num)
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 12}
    own = vllm_runs.serve(model, {**settings, "engine": {**vllm_runs.engine, **OWN.get(family, {})}}, None)
    # The control: without a stack kvframe computes nothing.
    assert {"write": {}, "attend": {}} == own["calls"]
    assert not any("Hosted" in impl for impl in own["impls"])
    return own, vllm_runs.serve(model, {**settings, "engine": {**vllm_runs.engine, **engine}}, stack)


@pytest.mark.parametrize(
    ("family", "impl"),
    [
        ("Llama", "HostedImpl"),
        ("Mistral", "HostedImpl"),
        ("Gemma3Text", "HostedImpl"),
        ("Gemma3nText", "HostedImpl"),
        ("Bloom", "HostedImpl"),
        ("Llama4Text", "HostedImpl"),
        ("DeepseekV2", "HostedLatentImpl"),
    ],
)
def test_tokens_equal_those_of_vllms_own_backend(family: str, impl: str, vllm_runs: Any) -> None:
    own, hosted = serve_both(family, 64, vllm_runs, vllm_runs.stack)

    assert own["tokens"] == hosted["tokens"]
    # vLLM computes latents in whole prompts, without a prefix cache, on a processor without AMX.
    assert hosted["caches_prefixes"] or family == "DeepseekV2"
    if hosted["caches_prefixes"]:
        # Prefixes were found. Of windows, vLLM caches only those at the end of a prompt.
        assert max(sum(own["cached"]), 1000) <= sum(hosted["cached"])
    # Every layer ran here in every step, and nothing was copied on the way.
    assert [impl] == hosted["impls"]
    assert {"LiveBlockManager"} == set(hosted["managers"])
    num_steps = set(hosted["calls"]["attend"].values())
    assert len(num_steps) == 1
    if hosted["caches_prefixes"]:
        num_computed = sum(map(len, vllm_runs.make_prompts(64))) - sum(hosted["cached"])
        assert min(num_steps) >= num_computed // vllm_runs.engine["max_num_batched_tokens"] > 30
    assert hosted["layers"] == sorted(hosted["calls"]["attend"])
    # The last layers keep nothing; vLLM before 0.31 passes keys that they do not need.
    sharing = hosted["layers"][-2:] if family == "Gemma3nText" else []
    assert {*hosted["layers"]} - {*sharing} == {*hosted["calls"]["write"]} - {*sharing}
    assert {"pages": 0, "output": 0} == hosted["copies"]
    assert 0 == hosted["held_blocks"]


def test_layers_that_share_caches_leave_out_the_tokens_that_do_not_generate(vllm_runs: Any) -> None:
    own, hosted = serve_both(
        "Gemma3nText", 32, vllm_runs, vllm_runs.skip + vllm_runs.stack, kv_sharing_fast_prefill=True
    )
    assert own["tokens"] == hosted["tokens"]
    *keeping, first, second = hosted["layers"]
    num_computed = sum(map(len, vllm_runs.make_prompts(32))) - sum(hosted["cached"]) + 32 * 11
    assert {num_computed} == {hosted["rows"][layer] for layer in keeping}
    # One token of each request in each step: those that generate, and the last of a part of a prompt.
    num_steps = hosted["calls"]["attend"][first]
    assert hosted["rows"][first] == hosted["rows"][second]
    assert 32 * 12 <= hosted["rows"][first] <= 32 * 12 + num_steps < num_computed // 3
    assert {*keeping} == {*hosted["calls"]["write"]} - {first, second}
    assert {"pages": 0, "output": 0} == hosted["copies"]


@pytest.mark.parametrize("is_set", [True, False])
def test_vllm_and_the_stack_have_to_agree_on_skipping(is_set: bool, vllm_runs: Any) -> None:
    stack = vllm_runs.stack if is_set else vllm_runs.skip + vllm_runs.stack
    engine = {**vllm_runs.engine, "kv_sharing_fast_prefill": is_set}
    settings = {"engine": engine, "prompts": [[1, 2, 3]], "max_tokens": 1}
    process = vllm_runs.start(vllm_runs.make_model("Gemma3nText"), settings, stack)
    assert process.returncode != 0
    difference = "does, and no wrapper is named" if is_set else "does not, and a wrapper is named"
    assert f"the host {difference} in model.prefill_skipping of the stack" in process.stderr


def test_a_backend_that_cannot_write_to_vllms_output_is_copied_once_a_layer_and_step(vllm_runs: Any) -> None:
    settings = {"engine": vllm_runs.engine, "prompts": vllm_runs.make_prompts(4), "max_tokens": 4}
    stack = vllm_runs.torch.replace('"torch"', '"torch_reference"')
    report = vllm_runs.serve(vllm_runs.make_model("Llama"), settings, stack)
    assert {"pages": 0, "output": sum(report["calls"]["attend"].values())} == report["copies"]


def test_a_backend_that_raises_in_a_step_is_named_with_its_layer(vllm_runs: Any, tmp_path: Path) -> None:
    plugins = [
        vllm_runs.make_plugin(tmp_path, "raising", vllm_runs.raising, "vllm.general_plugins", "raising:register")
    ]
    settings = {"engine": vllm_runs.engine, "prompts": vllm_runs.make_prompts(4), "max_tokens": 12}
    process = vllm_runs.start(vllm_runs.make_model("Llama"), settings, vllm_runs.stack, plugins)
    assert process.returncode != 0
    assert vllm_runs.failure in process.stderr
    assert "in line 10 of 'raising': ValueError: no such tile" in process.stderr


def test_a_layer_that_stayed_on_vllms_own_backend_ends_the_start(vllm_runs: Any) -> None:
    model = vllm_runs.make_model("Llama")
    settings = {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1, "foreign": "model.layers.1."}
    process = vllm_runs.start(model, settings, vllm_runs.stack)
    assert process.returncode != 0
    assert "layer 'model.layers.1.self_attn.attn' would run on vLLM's own CPUAttentionBackend" in process.stderr


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ('[[rules]]\nlayers = "*"\nbackend = "no_such"\n', "there is no backend named 'no_such'"),
        ('[[rules]]\nlayers = "*"\nbackend = { name = "torch", tile = 3 }\n', "tile"),
        ('[[rules]]\nlayers = "no_such.*"\nbackend = "torch"\n', "is for no layer of"),
        ('[cache]\nformat = "no_such"\n', "no_such"),
        ('[[rules]]\nlayers = "*"\nspec = { num_sink_tokens = 3 }\n', "num_sink_tokens"),
    ],
)
def test_what_kvframe_refuses_ends_the_start_in_its_words(stack: str, message: str, vllm_runs: Any) -> None:
    model = vllm_runs.make_model("Llama")
    process = vllm_runs.start(model, {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1}, stack)
    assert process.returncode != 0
    assert message in process.stderr


def test_the_installed_vllm_has_every_name_and_asks_for_nothing_more() -> None:
    from kvframe_vllm.names import CONNECTOR_CLASSES, CONNECTOR_NAMES, missing_names, unmet_demands

    assert [] == missing_names() + missing_names(CONNECTOR_NAMES)
    assert [] == unmet_demands() + unmet_demands(CONNECTOR_CLASSES)


def test_a_further_call_of_the_entry_point_changes_nothing_and_another_stack_is_refused(tmp_path: Path) -> None:
    """In a process of its own: vLLM stays changed."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.toml").write_text('[[rules]]\nlayers = "*"\nbackend = "cpu"\n', encoding="utf-8")
    code = """
import os, sys
from kvframe_vllm import register
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

def hooks():
    return Worker.get_kv_cache_spec, type(current_platform).get_attn_backend_cls.__func__

before = hooks()
os.environ["KVFRAME_STACK"] = sys.argv[1]
register()
first = hooks()
register()
print([a is b for a, b in zip(before, first)], [a is b for a, b in zip(first, hooks())])
os.environ["KVFRAME_STACK"] = sys.argv[2]
register()
"""
    paths = [str(tmp_path / f"{name}.toml") for name in ("one", "other")]
    process = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False)
    assert "[False, False] [True, True]" == process.stdout.strip().splitlines()[-1]
    assert f"the stack {paths[0]} is attached to this vLLM; start another process for {paths[1]}" in process.stderr


NEWER = """
import vllm

vllm.__version__ = "0.99.1"

def register():
    pass
"""


def test_a_newer_vllm_is_warned_of_once_and_served(vllm_runs: Any, tmp_path: Path) -> None:
    plugins = [vllm_runs.make_plugin(tmp_path, "a_newer", NEWER, "vllm.general_plugins", "a_newer:register")]
    settings = {"engine": vllm_runs.engine, "prompts": vllm_runs.make_prompts(6), "max_tokens": 6}
    model = vllm_runs.make_model("Gemma3Text")
    process = vllm_runs.start(model, settings, vllm_runs.stack, plugins)
    assert process.returncode == 0, process.stderr[-3000:]
    warning = "vLLM 0.99.1 is newer than the versions that kvframe-vllm is tested with (0.29 to 0.33)"
    assert 1 == (process.stdout + process.stderr).count(warning)
    assert vllm_runs.result_of(process)["tokens"] == vllm_runs.serve(model, settings, None)["tokens"]


def test_a_vllm_that_asks_for_another_method_is_refused_in_one_sentence(vllm_runs: Any, tmp_path: Path) -> None:
    """As vLLM before 0.32 asked for one that later versions do not."""
    code = """
from abc import abstractmethod

def register():
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as Manager

    def get_num_other_blocks(self):
        pass

    Manager.get_num_other_blocks = abstractmethod(get_num_other_blocks)
    Manager.__abstractmethods__ = Manager.__abstractmethods__ | {"get_num_other_blocks"}
"""
    plugins = [vllm_runs.make_plugin(tmp_path, "a_newer", code, "vllm.general_plugins", "a_newer:register")]
    settings = {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1}
    process = vllm_runs.start(vllm_runs.make_model("Llama"), settings, vllm_runs.stack, plugins)
    assert process.returncode != 0
    assert (
        "asks for SingleTypeKVCacheManager.get_num_other_blocks(), which kvframe-vllm does not have" in process.stderr
    )
    assert "install a tested version, 0.29 to 0.33, or unset KVFRAME_STACK" in process.stderr


def test_an_older_vllm_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvframe_vllm
    import vllm

    from kvframe import KVFrameError

    monkeypatch.setattr(vllm, "__version__", "0.28.0")
    monkeypatch.setenv("KVFRAME_STACK", "stack.toml")
    with pytest.raises(KVFrameError, match=r"vLLM 0\.28\.0 is older than .* install a tested version, 0\.29 to 0\.33"):
        kvframe_vllm.register()
