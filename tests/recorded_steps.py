"""Records the steps that engines make: how many requests and tokens each has.

    pytest -p tests.recorded_steps tests/models/test_generate.py tests/engine/test_scheduler.py

prints the shares of kvframe's own engine in tests, and

    .cache/peers/kvframe-in-vllm/bin/python -m tests.recorded_steps

those of vLLM with requests of drawn lengths that come one after the other. ``kvframe_testing.batches`` has batches of
every class.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

STEPS: Counter[tuple[str, int, int, int]] = Counter()
"""How many steps had a kind, and a number of requests, of new tokens, and of tokens of the longest request. Each number
is rounded up to a power of two."""


def note(computed: Sequence[int], new: Sequence[int]) -> None:
    """Count a step, by the tokens of each request that were computed before, and its new ones."""
    before, lens = np.asarray(computed), np.asarray(new)
    decodes = (lens == 1) & (before > 0)
    kinds = {"decodes": bool(decodes.any()), "prompts": bool((before == 0).any())}
    kinds["extends"] = bool((~decodes & (before > 0)).any())
    name = " and ".join(kind for kind, occurs in kinds.items() if occurs)
    STEPS[name, _rounded(len(lens)), _rounded(int(lens.sum())), _rounded(int((before + lens).max()))] += 1


def _rounded(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the steps of kvframe's engine be counted."""
    from kvframe_engine.running.model_runner import ModelRunner

    forward = ModelRunner.forward

    def forwarded(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        note(batch.num_computed, batch.query_lens)
        return forward(self, batch, *arguments, **options)

    ModelRunner.forward = forwarded  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the shares at the end of the tests."""
    report(terminalreporter.write_line)


def report(write: Callable[[str], None]) -> None:
    """Write the share of each class of steps."""
    total = sum(STEPS.values())

    def line(what: str, counts: Iterable[int]) -> None:
        write(f"{sum(counts) / max(1, total):6.1%} {what}")

    write(f"{total} steps")
    for kind in sorted({kind for kind, *_ in STEPS}):
        line(kind, (count for (other, *_), count in STEPS.items() if other == kind))
    for index, name in enumerate(("requests", "tokens", "tokens of the longest request"), start=1):
        for most in sorted({key[index] for key in STEPS}):
            line(f"up to {most} {name}", (count for key, count in STEPS.items() if key[index] == most))


def run_vllm(folder: str, num_requests: int = 160, num_steps: int = 1440) -> None:
    """Let vLLM serve requests of drawn lengths, which come in the first steps, by a small random model."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def scheduled(self: Any, *arguments: Any, **options: Any) -> Any:
        made = schedule(self, *arguments, **options)
        if made.num_scheduled_tokens:
            cached = made.scheduled_cached_reqs
            before = {each.req_id: each.num_computed_tokens for each in made.scheduled_new_reqs}
            before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            note([before[name] for name in made.num_scheduled_tokens], [*made.num_scheduled_tokens.values()])
        return made

    Scheduler.schedule = scheduled
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, head_dim=32, vocab_size=256, num_hidden_layers=2)).save_pretrained(folder)
    limits = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    engine = LLM(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", **limits).llm_engine
    source = random.Random(1)
    arrivals = sorted(source.randrange(num_steps) for _ in range(num_requests))
    step = 0
    while arrivals or engine.has_unfinished_requests():
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            length = min(1500, max(4, int(source.lognormvariate(5.0, 1.0))))
            new = max(2, int(source.lognormvariate(4.0, 0.7)))
            params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": [source.randrange(3, 250) for _ in range(length)]}
            engine.add_request(str(len(arrivals)), prompt, params)
        if engine.has_unfinished_requests():
            engine.step()
        step += 1


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        run_vllm(folder)
    report(print)
