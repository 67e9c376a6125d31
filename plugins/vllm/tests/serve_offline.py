"""Runs prompts through vLLM in this process, and prints what came out and who computed it; called by tests.

    python serve_offline.py MODEL SETTINGS

MODEL is a folder; SETTINGS is JSON: ``engine`` for vLLM, ``prompts`` as token ids, ``max_tokens``, ``foreign`` for
layers that are not to be kvframe's. It prints one line of
JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch
from vllm import LLM, SamplingParams

import kvframe


def count_calls(owner: type, method: str, note: Any) -> None:
    """Call ``note`` with the arguments of every call of a method."""
    original = getattr(owner, method)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        note(result, *args, **options)
        return result

    setattr(owner, method, counted)


def generate(llm: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of all prompts, and how many of each prompt were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=settings["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in settings["prompts"]]
    rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(settings.get("rounds", 1))]
    outputs = [output for round_outputs in rounds for output in round_outputs]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def keep_foreign(prefix: str) -> None:
    """Make the layers whose names begin so with vLLM's own backend, as a model that names its backend does."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    original = Attention.__init__

    def make(self: Any, *args: Any, **options: Any) -> None:
        if options["prefix"].startswith(prefix):
            options["attn_backend"] = CPUAttentionBackend
        original(self, *args, **options)

    Attention.__init__ = make


def admitted_blocks(manager: Any) -> Any:
    """Return the most blocks of a request by which vLLM admits it; before vLLM 0.31 the name is a private one."""
    name = "max_admission_blocks_per_request"
    return getattr(manager, name, None) or getattr(manager, f"_{name}", None)


def main() -> None:
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    calls: dict[str, Counter[str]] = {"write": Counter(), "attend": Counter()}
    copies: Counter[str] = Counter()
    copied: Counter[int] = Counter()
    rows: Counter[str] = Counter()
    caches: dict[str, Any] = {}

    def note_write(_: Any, step: Any, name: str, key: Any, value: Any, pages: Any) -> None:
        calls["write"][name] += 1
        note_pages(name, pages)

    def attend(
        self: Any, step: Any, name: str, query: Any, pages: Any, sinks: Any = None, out: Any = None
    ) -> torch.Tensor:
        copied.clear()
        result: torch.Tensor = original_attend(self, step, name, query, pages, sinks, out)
        calls["attend"][name] += 1
        rows[name] += len(query)
        note_pages(name, pages)
        # A backend that cannot write to the memory that it is given is copied by Layers.
        copies["output"] += copied[out.data_ptr()] + (result is not out)
        return result

    def note_pages(name: str, pages: Any) -> None:
        memory = caches[name].untyped_storage().data_ptr()
        copies["pages"] += any(part.untyped_storage().data_ptr() != memory for part in pages.values())

    copy = torch.Tensor.copy_

    def note_copy(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied[self.data_ptr()] += 1
        result: torch.Tensor = copy(self, *args, **options)
        return result

    torch.Tensor.copy_ = note_copy
    count_calls(kvframe.Layers, "write", note_write)
    original_attend = kvframe.Layers.attend
    kvframe.Layers.attend = attend
    if "foreign" in settings:
        keep_foreign(settings["foreign"])
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        disable_log_stats=False,
        **{"enforce_eager": True, **settings["engine"]},
    )
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":  # what it runs on is in other processes
        print("RESULT " + json.dumps(generate(llm, settings)))
        return
    core = llm.llm_engine.engine_core.engine_core
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    most_blocks = [0]

    def note_blocks(_: Any, request: str, *counts: int) -> None:
        num_held = sum(not block.is_null for block in managers[0].req_to_blocks[request])
        most_blocks[0] = max(most_blocks[0], num_held)

    count_calls(type(managers[0]), "allocate_new_blocks", note_blocks)
    modules = core.model_executor.driver_worker.worker.vllm_config.compilation_config.static_forward_context
    context = {name: module for name, module in modules.items() if hasattr(module, "kv_cache")}
    caches.update({name: layer.kv_cache for name, layer in context.items()})
    calls["write"].clear(), calls["attend"].clear(), rows.clear(), copies.clear()
    report = generate(llm, settings)
    pool = core.scheduler.kv_cache_manager.block_pool
    report |= {
        "layers": sorted(context),
        "impls": sorted({type(layer.impl).__name__ for layer in context.values()}),
        "caches_prefixes": core.scheduler.kv_cache_manager.enable_caching,
        "managers": [type(manager).__name__ for manager in managers],
        "most_blocks": most_blocks[0],
        "peak_blocks": admitted_blocks(managers[0]),
        "calls": {kind: dict(count) for kind, count in calls.items()},
        "copies": dict(copies),
        "rows": dict(rows),
        "held_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "preemptions": sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"),
    }
    print("RESULT " + json.dumps(report))


if __name__ == "__main__":
    main()
