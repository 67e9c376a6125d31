"""The checks of a model adapter, which the engine brings: each serves the model in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_engine.testing import adapter_checks as checked
from kvframe_testing.checks import run_checks
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.testing import save_tiny

from kvframe import Stack


def test_each_way_of_serving_is_another_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    save_tiny(tmp_path, "llama")
    stacks: list[Stack] = []
    make_engine = checked.Engine.from_pretrained

    def from_pretrained(path: Path, *, stack: Stack, **options: Any) -> Any:
        stacks.append(stack)
        return make_engine(path, stack=stack, **options)

    monkeypatch.setattr(checked.Engine, "from_pretrained", from_pretrained)
    checks = checked.adapter_checks(TransformersAdapter, tmp_path)
    report = run_checks(checks)
    assert {} == dict(report.failures)
    # The model's own forward, then for each way the usual stack and another one.
    one_by_one, in_parts, small_blocks, all_kept = stacks[2::2]
    assert [stacks[1]] * 4 == stacks[1::2]
    assert (1, 5) == (one_by_one.limits.max_num_seqs, in_parts.limits.max_num_batched_tokens)
    assert (1, False) == (small_blocks.cache.block_size, all_kept.cache.hybrid)
