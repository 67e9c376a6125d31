"""Greedy tokens can be compared exactly, because no token of the tests is near a tie, on any machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvframe_transformers.testing import FAMILIES, ROUNDINGS, STATE_FAMILIES, exact_copy

from tests.covering import few
from tests.models.serving import PROMPTS


@pytest.mark.parametrize("family", few(4, [*FAMILIES, *STATE_FAMILIES, "mixtral"]))
def test_the_two_largest_logits_are_further_apart_than_rounding_explains(
    models: Any, references: Any, family: str
) -> None:
    expected = references(family)
    model = models(family).loaded.model
    exact = exact_copy(model)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        input_ids = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.inference_mode():
            logits, right = (run(input_ids, use_cache=False).logits[0, len(prompt) - 1 :] for run in (model, exact))
        assert [*tokens] == right.argmax(-1).tolist()
        largest, second = right.topk(2).values.unbind(-1)
        rounding = (logits.double() - right).abs().amax(-1)
        assert (largest - second > ROUNDINGS * rounding).all()
