"""Masks that modules make themselves are read from what their numbers are without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.known_values import Change, KnownValues, visible_keys
from transformers import AutoConfig

CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
LOWEST = float(torch.finfo(torch.float32).min)


def test_values_follow_views_and_changes_in_place() -> None:
    values = KnownValues()
    with values, torch.device("meta"):
        tensor = torch.arange(6).view(2, 3)
        tensor[0] += 10
        column = tensor[:, 1:].t().contiguous()
    value = values.value_of(column)
    assert value is not None
    assert [[11, 4], [12, 5]] == value.tolist()


def test_what_depends_on_a_weight_or_on_chance_is_not_known() -> None:
    values = KnownValues()
    with values, torch.device("meta"):
        changed = torch.zeros(3)
        changed += torch.empty(3)
        tensors = [torch.empty(3), torch.rand(3), torch.zeros(3) + torch.empty(3), changed, changed[1:]]
    assert [None] * len(tensors) == [values.value_of(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (CAUSAL, [("masked_fill", (None, ~CAUSAL, LOWEST))]),
        (CAUSAL, [("where", (CAUSAL, None, torch.tensor(LOWEST)))]),
        (CAUSAL, [("mul", (None, CAUSAL.float())), ("add", (None, -1e4 * (1 - CAUSAL.float())))]),
        (CAUSAL, [("add", (None, torch.zeros(1, 1, 4, 4).masked_fill(~CAUSAL, LOWEST)))]),
        (CAUSAL.tril(-1) | torch.eye(4).bool(), [("masked_fill", (None, ~CAUSAL, LOWEST))]),
        (None, [("add", (None, torch.arange(16.0).view(1, 1, 4, 4)))]),  # a bias
        (None, [("mul", (None, CAUSAL.float()))]),  # zero is a score
        (None, [("masked_fill", (None, torch.stack([~CAUSAL[0, 0], CAUSAL[0, 0]])[None], LOWEST))]),  # heads differ
        (None, [("add", (None, torch.empty(1, 1, 4, 4, device="meta")))]),
    ],
)
def test_keys_are_visible_if_their_scores_stay(expected: torch.Tensor | None, changes: list[Change]) -> None:
    for query in (1, 2):
        visible = visible_keys(changes, KnownValues(), 4, query)
        row = None if expected is None else expected[0, 0, query].tolist()
        assert row == (None if visible is None else visible.tolist())


def described(folder: Path, family: str, **overrides: Any) -> set[tuple[str, int | None]]:
    AutoConfig.for_model(family, **overrides).save_pretrained(folder)
    return {(layer.kind, layer.options.get("window")) for layer in TransformersAdapter().describe(folder).layers}


def test_the_local_layers_of_gpt_neo_see_windows(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 300}
    assert {("full_attention", None), ("sliding_window", 256)} == described(tmp_path, "gpt_neo", **sizes)


def test_gpt_multiplies_by_its_mask(tmp_path: Path) -> None:
    assert {("full_attention", None)} == described(tmp_path, "openai-gpt", n_layer=1)
