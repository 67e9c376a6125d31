"""Page stores under vLLM: one engine computes, another finds, and the tokens are those of an engine without stores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

CONNECTOR = {
    "kv_transfer_config": {
        "kv_connector": "KVFrameConnector",
        "kv_connector_module_path": "kvframe_vllm.connector",
        "kv_role": "kv_both",
    }
}
# On a busy machine a store answers late.
PATIENT = """
def register():
    from kvframe_vllm.transfer import scheduling

    scheduling.LEAST_WAIT = float(SECONDS)
"""
BAD = """
import time
from typing import ClassVar

import attrs
from kvframe_disk.store import DiskStore

from kvframe.contract import hookimpl


@attrs.frozen(kw_only=True)
class BadStore(DiskStore):
    name: ClassVar[str] = "bad"
    how: str = "lies"

    def open(self, origin):
        opened = super().open(origin)
        read = opened.read

        def read_badly(keys, buffers):
            if self.how == "fails":
                raise OSError("the folder burns")
            if self.how == "hangs":
                time.sleep(600)
            if self.how == "forgets":
                return [False] * len(keys)
            answers = read(keys, buffers)
            for buffer in buffers:
                buffer[100] ^= 1
            return answers

        opened.read = read_badly
        return opened


@hookimpl
def kvframe_register_page_stores(register):
    register("bad", BadStore)
"""
WORDS = {
    "lies": "pages with a wrong seal; they are not used",
    "fails": "page store 'bad' failed: OSError: the folder burns",
    "hangs": None,
    "forgets": None,
}
SINKS = '[[rules]]\nkind = "sliding_window"\nspec = { num_sink_tokens = 4 }\n'


@attrs.frozen
class Stored:
    """A model, the tokens that it gives without stores, and a stack with a folder in which an engine kept its pages."""

    model: Path
    settings: dict[str, Any]
    plain: dict[str, Any]
    folder: Path


def disk(folder: Path) -> str:
    return f'[cache]\ndisk = {{ path = "{folder}", size = "64MiB" }}\n'


def with_stores(vllm_runs: Any, settings: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return {**settings, "engine": {**vllm_runs.engine, **settings["engine"], **CONNECTOR, **engine}}


def patient(vllm_runs: Any, folder: Path, seconds: float = 60) -> Path:
    code = PATIENT.replace("SECONDS", str(seconds))
    plugin: Path = vllm_runs.make_plugin(folder, "patient", code, "vllm.general_plugins", "patient:register")
    return plugin


@pytest.fixture(scope="module")
def llama(vllm_runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("llama")
    model = vllm_runs.make_model("Llama")
    settings = {"engine": vllm_runs.engine, "prompts": vllm_runs.make_prompts(12), "max_tokens": 12}
    plain = vllm_runs.serve(model, settings, vllm_runs.stack)
    stack, plugins = disk(folder / "pages") + vllm_runs.stack, [patient(vllm_runs, folder)]
    first = vllm_runs.serve(model, with_stores(vllm_runs, settings), stack, plugins)
    # Nothing was there; what vLLM finds by itself is what it found without stores.
    assert (plain["tokens"], sum(plain["cached"])) == (first["tokens"], sum(first["cached"]))
    return Stored(model, settings, plain, folder / "pages")


def test_another_engine_finds_every_full_block_of_a_prompt(llama: Stored, vllm_runs: Any, tmp_path: Path) -> None:
    stack = disk(llama.folder) + vllm_runs.stack
    second = vllm_runs.serve(llama.model, with_stores(vllm_runs, llama.settings), stack, [patient(vllm_runs, tmp_path)])
    assert llama.plain["tokens"] == second["tokens"]
    # All whole blocks before the last token.
    assert [(len(prompt) - 1) // 32 * 32 for prompt in llama.settings["prompts"]] == second["cached"]
    assert 0 == second["held_blocks"]
    assert {"pages": 0, "output": 0} == second["copies"]


@pytest.mark.parametrize("how", WORDS)
def test_a_bad_store_costs_hits_only(how: str, llama: Stored, vllm_runs: Any, tmp_path: Path) -> None:
    plugins = [
        vllm_runs.make_plugin(tmp_path, "bad", BAD, "kvframe.v1", "bad"),
        patient(vllm_runs, tmp_path, 1.0 if how == "hangs" else 60.0),
    ]
    store = f'stores = [{{ name = "bad", path = "{llama.folder}", size = "64MiB", how = "{how}" }}]\n'
    settings = with_stores(vllm_runs, {**llama.settings, "prompts": llama.settings["prompts"][:6]})
    process = vllm_runs.start(llama.model, settings, f"[cache]\n{store}" + vllm_runs.stack, plugins)
    assert process.returncode == 0, process.stderr[-3000:]
    report = vllm_runs.result_of(process)
    assert llama.plain["tokens"][:6] == report["tokens"]
    assert 0 == report["held_blocks"]
    words = WORDS[how]
    assert words is None or words in process.stdout + process.stderr


def test_other_weights_of_the_same_config_find_nothing(llama: Stored, vllm_runs: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for path in llama.model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    stack = disk(llama.folder) + vllm_runs.stack
    report = vllm_runs.serve(
        other, with_stores(vllm_runs, llama.settings), stack, [patient(vllm_runs, tmp_path / "plugins")]
    )
    # What vLLM finds by itself.
    assert llama.plain["cached"] == report["cached"]


@pytest.mark.parametrize(("family", "rules"), [("Gemma3Text", ""), ("Mistral", SINKS)])
def test_windows_beside_full_attention_and_a_type_that_vllm_does_not_have(
    family: str, rules: str, vllm_runs: Any, tmp_path: Path
) -> None:
    """Of the window with sinks, blocks in the middle are dead at the hit: they are neither loaded nor found later."""
    model, rules = vllm_runs.make_model(family), (vllm_runs.torch if rules else vllm_runs.stack) + rules
    prompts = vllm_runs.make_prompts(12)
    # The later prompts end within the earlier ones, where blocks are live that were dead at the earlier hits.
    prompts += [prompt[: len(prompt) - 40] for prompt in prompts if len(prompt) > 120]
    settings = {"engine": {**vllm_runs.engine, "max_num_seqs": 4}, "prompts": prompts, "max_tokens": 12}
    plain = vllm_runs.serve(model, settings, rules)
    stack, plugins = disk(tmp_path / "pages") + rules, [patient(vllm_runs, tmp_path)]
    first, second = (vllm_runs.serve(model, with_stores(vllm_runs, settings), stack, plugins) for _ in range(2))
    assert plain["tokens"] == first["tokens"]
    assert plain["tokens"] == second["tokens"]
    assert [(len(prompt) - 1) // 32 * 32 for prompt in prompts] == second["cached"]
    assert sum(first["cached"]) < sum(second["cached"])
    assert (0, 0) == (first["held_blocks"], second["held_blocks"])


def test_each_rank_keeps_its_own_pages(vllm_runs: Any, tmp_path: Path) -> None:
    model, prompts = vllm_runs.make_model("Gemma3Text"), vllm_runs.make_prompts(8)
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 8}
    plain = vllm_runs.serve(model, settings, vllm_runs.stack)
    stack, plugins = disk(tmp_path / "pages") + vllm_runs.stack, [patient(vllm_runs, tmp_path)]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    first, second = (
        vllm_runs.serve(model, with_stores(vllm_runs, settings, tensor_parallel_size=2), stack, plugins, **variables)
        for _ in range(2)
    )
    assert plain["tokens"] == first["tokens"]
    assert plain["tokens"] == second["tokens"]
    assert [(len(prompt) - 1) // 32 * 32 for prompt in prompts] == second["cached"]


@pytest.mark.parametrize("has_stores", [True, False])
def test_stores_without_the_connector_and_the_connector_without_stores_end_the_start(
    has_stores: bool, vllm_runs: Any, tmp_path: Path
) -> None:
    settings = {"engine": vllm_runs.engine, "prompts": [[1, 2, 3]], "max_tokens": 1}
    stack = disk(tmp_path / "pages") + vllm_runs.stack if has_stores else vllm_runs.stack
    settings = settings if has_stores else with_stores(vllm_runs, settings)
    process = vllm_runs.start(vllm_runs.make_model("Llama"), settings, stack)
    assert process.returncode != 0
    words = "start it with --kv-transfer-config '{" if has_stores else "KVFrameConnector needs a page store"
    assert words in process.stderr
