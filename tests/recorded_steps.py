"""A plugin of pytest that records the steps that engines make in tests: how many requests and tokens each has.

    pytest -p tests.recorded_steps plugins/engine tests/models/test_generate.py
    .cache/peers/kvframe-in-vllm/bin/python -m pytest -p tests.recorded_steps plugins/vllm/tests/test_vllm_offline.py

prints the share of each class of steps at the end, in kvframe's own engine and in vLLM. ``kvframe.testing.served`` has
batches of every class.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
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
    """Let steps be counted, when the tests have set what engines read from the environment."""
    with suppress(ImportError):
        from kvframe_engine.running.model_runner import ModelRunner

        forward = ModelRunner.forward

        def forwarded(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
            note(batch.num_computed, batch.query_lens)
            return forward(self, batch, *arguments, **options)

        ModelRunner.forward = forwarded  # type: ignore[method-assign]
    with suppress(ImportError), warnings.catch_warnings(action="ignore"):
        from vllm.v1.core.sched.scheduler import Scheduler

        schedule = Scheduler.schedule

        def scheduled(self: Any, *arguments: Any, **options: Any) -> Any:
            made = schedule(self, *arguments, **options)
            if made.num_scheduled_tokens:
                before = {each.req_id: each.num_computed_tokens for each in made.scheduled_new_reqs}
                cached = made.scheduled_cached_reqs
                before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
                names = [*made.num_scheduled_tokens]
                note([before[name] for name in names], [made.num_scheduled_tokens[name] for name in names])
            return made

        Scheduler.schedule = scheduled


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the share of each class of steps."""
    total = sum(STEPS.values())

    def line(what: str, counts: Iterable[int]) -> None:
        terminalreporter.write_line(f"{sum(counts) / max(1, total):6.1%} {what}")

    terminalreporter.write_line(f"{total} steps")
    for kind in sorted({kind for kind, *_ in STEPS}):
        line(kind, (count for (other, *_), count in STEPS.items() if other == kind))
    for least, name in enumerate(("requests", "tokens", "tokens of the longest request"), start=1):
        for most in sorted({key[least] for key in STEPS}):
            line(f"up to {most} {name}", (count for key, count in STEPS.items() if key[least] == most))
