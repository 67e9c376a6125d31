"""A model whose layers attend to their keys in two halves generates the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kvframe import Engine, Stack
from tests.attention.key_halves import KeyHalves
from tests.covering import keep
from tests.models.serving import served
from tests.support.plugins import plugin

HALVES = plugin("halves", wrappers={"key_halves": KeyHalves})


@pytest.mark.parametrize(
    ("family", "layers"), keep([("llama", "*.0.*"), ("gemma3_text", "*"), ("gpt_oss", "*")], "gpt_oss")
)
def test_tokens_equal_those_of_generate(models: Any, references: Any, family: str, layers: str) -> None:
    rules = [{"layers": layers, "backend": "torch", "wrappers": ["key_halves"]}, {"layers": "*", "backend": "torch"}]
    options = {"cache": {"memory": "1MiB", "block_size": 4}, "limits": {"max_num_batched_tokens": 24}}
    stack = Stack.from_mapping({**options, "rules": rules})
    with Engine.from_pretrained(models(family).path, stack=stack, plugins=[HALVES]) as engine:
        assert references(family) == served(engine)
        assert engine.stats().cached_prompt_tokens > 0
