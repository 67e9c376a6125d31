"""Draft tokens that are refused leave no trace in a state: the next tokens are computed as if they had never been."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_transformers.testing import STATE_FAMILIES, rounding_of

from kvframe import Engine
from tests.serving import ids

NUM_DRAFTS = 3


def compute(engine: Engine, fed: dict[str, tuple[int, list[int]]]) -> dict[str, torch.Tensor]:
    """Compute tokens of several requests, each from a position on; return the logits of all of them."""
    manager, runner = engine._manager, engine._runner
    for request_id, (start, tokens) in fed.items():
        assert manager.extend(request_id, start + len(tokens))
        runner.tokens[manager.row(request_id), start : start + len(tokens)] = tokens
    rows = np.array([manager.row(request_id) for request_id in fed])
    starts = np.array([start for start, _ in fed.values()])
    lens = np.array([len(tokens) for _, tokens in fed.values()])
    logits = runner.forward(rows, starts, lens, np.arange(lens.sum()))
    return dict(zip(fed, logits.split(lens.tolist()), strict=True))


@pytest.mark.parametrize(("checkpoints", "block_size"), [("aligned", 4), ("all", 2), ("aligned", 16), ("none", 4)])
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_refused_drafts_leave_no_trace(models: Any, family: str, checkpoints: str, block_size: int) -> None:
    model, choose = models(family), random.Random(block_size)
    truth = {name: ids(start, 60) for name, start in (("a", 3), ("b", 8), ("c", 12))}
    with torch.inference_mode():
        plain = {name: model.loaded.model(torch.tensor([tokens])).logits[0] for name, tokens in truth.items()}
    rounding = rounding_of(model.loaded.model, [*truth.values()])
    states = {"checkpoints": checkpoints, "num_draft_tokens": NUM_DRAFTS}
    num_refused = 0
    with model.engine(states=states, block_size=block_size) as engine:
        done = dict.fromkeys(truth, 0)
        for name, tokens in truth.items():
            engine._manager.start(name, tokens[:9])
        while True:
            fed, accepted = {}, {}
            for name, tokens in truth.items():
                start = done[name]
                if start == 0:
                    # Prompts of 9, 17 and 4 tokens.
                    accepted[name] = {"a": 9, "b": 17, "c": 4}[name]
                    fed[name] = (0, tokens[: accepted[name]])
                elif start < len(tokens):
                    num_drafts = min(choose.randint(0, NUM_DRAFTS), len(tokens) - start - 1)
                    num_right = choose.randint(0, num_drafts)
                    wrong = [(token + 1) % 128 for token in tokens[start + 1 + num_right : start + 1 + num_drafts]]
                    fed[name] = (start, [*tokens[start : start + 1 + num_right], *wrong])
                    accepted[name] = 1 + num_right
                    num_refused += len(wrong)
            if not fed:
                break
            logits = compute(engine, fed)
            for name, count in accepted.items():
                start = done[name]
                torch.testing.assert_close(
                    logits[name][:count], plain[name][start : start + count], rtol=0, atol=rounding
                )
                done[name] = start + count
                engine._manager.commit(name, truth[name], done[name])
        for name in truth:
            engine._manager.free(name)
    assert num_refused > 10
