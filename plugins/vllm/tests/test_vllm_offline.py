"""Small random models in vLLM, offline and in one process: on kvframe's layers, and on vLLM's own.

``make vllm`` runs these in an environment that has vLLM. Others skip them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_tokens_equal_those_of_vllms_own_backend(family: str, vllm_runs: Any) -> None:
    model = vllm_runs.make_model(family)
    settings = {"engine": vllm_runs.engine, "prompts": vllm_runs.make_prompts(64), "max_tokens": 12}
    own, hosted = vllm_runs.serve(model, settings, None), vllm_runs.serve(model, settings, vllm_runs.stack)

    assert own["tokens"] == hosted["tokens"]
    # Prefixes were found. Of windows, vLLM caches only those at the end of a prompt.
    assert max(sum(own["cached"]), 1000) <= sum(hosted["cached"])
    # Every layer ran here in every step, and nothing was copied on the way.
    assert ["HostedImpl"] == hosted["impls"]
    assert {"LiveBlockManager"} == set(hosted["managers"])
    num_steps = set(hosted["calls"]["attend"].values())
    assert len(num_steps) == 1
    num_computed = sum(map(len, settings["prompts"])) - sum(hosted["cached"])
    assert min(num_steps) >= num_computed // vllm_runs.engine["max_num_batched_tokens"] > 30
    assert hosted["layers"] == sorted(hosted["calls"]["attend"]) == sorted(hosted["calls"]["write"])
    assert {"pages": 0, "output": 0} == hosted["copies"]
    assert 0 == hosted["held_blocks"]
    # The control: without a stack kvframe computes nothing.
    assert {"write": {}, "attend": {}} == own["calls"]
    assert "HostedImpl" not in own["impls"]


def test_a_layer_that_stayed_on_vllms_own_backend_ends_the_start(vllm_runs: Any) -> None:
    model = vllm_runs.make_model("Llama")
    settings = {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1, "foreign": "model.layers.1."}
    done = vllm_runs.start(model, settings, vllm_runs.stack)
    assert done.returncode != 0
    assert "layer 'model.layers.1.self_attn.attn' would run on vLLM's own CPUAttentionBackend" in done.stderr


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
    done = vllm_runs.start(model, {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1}, stack)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_setting_that_divides_what_a_layer_computes_is_refused(vllm_runs: Any) -> None:
    engine = {**vllm_runs.engine, "kv_sharing_fast_prefill": True}
    settings = {"engine": engine, "prompts": [[1, 2, 3]], "max_tokens": 1}
    done = vllm_runs.start(vllm_runs.make_model("Llama"), settings, vllm_runs.stack)
    assert done.returncode != 0
    assert "kvframe-vllm does not serve kv_sharing_fast_prefill" in done.stderr


def test_the_installed_vllm_has_every_name() -> None:
    from kvframe_vllm.names import missing_names

    assert [] == missing_names()


def test_another_version_of_vllm_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvframe_vllm
    import vllm

    from kvframe import KVFrameError

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setenv("KVFRAME_STACK", "stack.toml")
    with pytest.raises(KVFrameError, match=r"no adapter for vLLM 0\.99\.1; it has one for 0\.32"):
        kvframe_vllm.register()
