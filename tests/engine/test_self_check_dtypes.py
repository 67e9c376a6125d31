"""The self-check allows the rounding of the model's dtype and of the stored dtype, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from kvframe import Engine, SamplingParams, Stack
from kvframe.attention.layer import AttentionLayer
from kvframe.contract.errors import ModelError
from tests.covering import few
from tests.models.serving import PROMPTS


def engine_of(path: Any, **tables: Any) -> Engine:
    return Engine.from_pretrained(path, stack=Stack.from_mapping({"cache": {"memory": "4MiB"}, **tables}))


@pytest.mark.parametrize("family", ["llama", "bamba", "deepseek_v3", "t5"])
def test_a_cache_that_rounds_more_than_the_model_passes(models: Any, family: str) -> None:
    with engine_of(models(family).path, cache={"memory": "4MiB", "dtype": "bfloat16"}) as engine:
        stored = {each.dtype for group in engine.plan.groups for each in group.spec.state_tensors().values()}
        assert "bfloat16" in stored


def test_more_than_that_rounding_is_refused(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = AttentionLayer.__call__
    monkeypatch.setattr(AttentionLayer, "__call__", lambda self, query, *rest: attend(self, query * 1.5, *rest))
    with pytest.raises(ModelError, match=r"gives other logits .*, allowed 8\.8e-02"):
        engine_of(models("llama").path, cache={"memory": "4MiB", "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("family", "dtype"),
    # torch cannot multiply experts' matrices in float64.
    few(
        6,
        [
            *((family, "float64") for family in ("llama", "mamba", "mamba2", "bamba", "falcon_h1", "lfm2")),
            *((family, "bfloat16") for family in ("llama", "mamba2", "bamba", "jamba", "qwen3_next", "deepseek_v3")),
        ],
    ),
)
def test_a_model_of_any_dtype_passes(models: Any, family: str, dtype: str) -> None:
    with engine_of(models(family).path, model={"dtype": dtype}) as engine:
        (output,) = engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=2))
        assert 2 == len(output.token_ids)
