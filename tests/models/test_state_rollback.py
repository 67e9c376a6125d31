"""Rejected draft tokens leave no trace in a state: the next tokens are computed as if there had been no drafts."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_transformers.testing import STATE_FAMILIES, rounding_of

from kvframe import Engine
from kvframe.attention.batch_metadata import StepBatch
from tests.covering import cover_values, few
from tests.models.serving import ids
from tests.support.engines import manager_of, runner_of

NUM_DRAFTS = 3


def compute(engine: Engine, fed: dict[str, tuple[int, list[int]]]) -> dict[str, torch.Tensor]:
    """Compute tokens of several requests, each from its own position on; return the logits of all of them."""
    manager, runner = manager_of(engine), runner_of(engine)
    for request_id, (start, tokens) in fed.items():
        assert manager.extend(request_id, start + len(tokens))
        runner.tokens[manager.row(request_id), start : start + len(tokens)] = tokens
    rows = np.array([manager.row(request_id) for request_id in fed])
    starts = np.array([start for start, _ in fed.values()])
    lens = np.array([len(tokens) for _, tokens in fed.values()])
    logits = runner.forward(
        StepBatch(rows=rows, num_computed=starts, query_lens=lens, generating_indices=np.arange(lens.sum()))
    )
    return dict(zip(fed, logits.split(lens.tolist()), strict=True))


@pytest.mark.parametrize(
    ("family", "checkpoints", "block_size"),
    few(4, cover_values(STATE_FAMILIES, [("aligned", 4), ("all", 2), ("aligned", 16), ("none", 4)])),
)
def test_refused_drafts_leave_no_trace(models: Any, family: str, checkpoints: str, block_size: int) -> None:
    model, choose = models(family), random.Random(block_size)
    truth = {name: ids(start, 60) for name, start in (("a", 3), ("b", 8), ("c", 12))}
    with torch.inference_mode():
        plain = {name: model.loaded.model(torch.tensor([tokens])).logits[0] for name, tokens in truth.items()}
    rounding = rounding_of(model.loaded.model, [*truth.values()])
    states = {"checkpoints": checkpoints, "num_draft_tokens": NUM_DRAFTS}
    num_refused = 0
    with model.engine(states=states, block_size=block_size) as engine:
        num_computed = dict.fromkeys(truth, 0)
        for name, tokens in truth.items():
            manager_of(engine).start(name, tokens[:9])
        while True:
            fed, accepted = {}, {}
            for name, tokens in truth.items():
                start = num_computed[name]
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
                start = num_computed[name]
                torch.testing.assert_close(
                    logits[name][:count], plain[name][start : start + count], rtol=0, atol=rounding
                )
                num_computed[name] = start + count
                manager_of(engine).commit(name, truth[name], num_computed[name])
        for name in truth:
            manager_of(engine).free(name)
    assert num_refused > 10


Plain = tuple[list[torch.Tensor], float]
"""The plain model's logits of token lists, and the difference that rounding may cause."""


def plain_logits(model: Any, truth: list[list[int]]) -> Plain:
    with torch.inference_mode():
        logits = [model.loaded.model(torch.tensor([tokens])).logits[0] for tokens in truth]
    return logits, rounding_of(model.loaded.model, truth)


class Drafting:
    """Requests that compute tokens with drafts, some of them wrong; every logit is compared with the plain model's."""

    def __init__(self, engine: Engine, truth: dict[str, list[int]], plain: Plain, seed: int) -> None:
        self.engine, self.manager, self.choose = engine, manager_of(engine), random.Random(seed)
        self.truth, (self.logits, self.rounding) = dict(truth), plain
        self.plain = dict(zip(truth, self.logits, strict=True))
        self.done: dict[str, int] = {}
        self.num_refused = self.num_hit = 0

    def start(self, name: str) -> None:
        self.done[name] = self.manager.start(name, self.truth[name])
        self.num_hit += self.done[name]

    def fork(self, name: str, new_name: str) -> None:
        """Fork a request, which continues with the same tokens and other drafts."""
        assert self.manager.fork(name, new_name, self.truth[name])
        for record in (self.truth, self.done, self.plain):
            record[new_name] = record[name]  # type: ignore[assignment]

    def begin_again(self, name: str) -> None:
        """Preempt a request by recomputation; its cached blocks are hit."""
        self.manager.free(name)
        self.start(name)

    def step(self) -> None:
        fed, accepted = {}, {}
        for name, start in self.done.items():
            tokens = self.truth[name]
            if start == len(tokens):
                continue
            if self.choose.random() < 0.2 or not start:
                accepted[name] = min(len(tokens) - start, self.choose.randint(5, 11))
                fed[name] = (start, tokens[start : start + accepted[name]])
                continue
            num_drafts = min(self.choose.randint(0, NUM_DRAFTS), len(tokens) - start - 1)
            num_right = self.choose.randint(0, num_drafts)
            wrong = [(token + 1) % 128 for token in tokens[start + 1 + num_right : start + 1 + num_drafts]]
            fed[name] = (start, [*tokens[start : start + 1 + num_right], *wrong])
            accepted[name] = 1 + num_right
            self.num_refused += len(wrong)
        logits = compute(self.engine, fed) if fed else {}
        for name, num_accepted in accepted.items():
            start = self.done[name]
            expected = self.plain[name][start : start + num_accepted]
            torch.testing.assert_close(logits[name][:num_accepted], expected, rtol=0, atol=self.rounding)
            self.done[name] = start + num_accepted
            self.manager.commit(name, self.truth[name], self.done[name])

    def end(self) -> None:
        for name in self.done:
            self.manager.free(name)
        assert 0 == self.manager.num_held_pages


@pytest.mark.parametrize(
    ("family", "checkpoints", "block_size"),
    few(2, cover_values(["falcon_h1", "mamba2", "qwen3_next"], [("aligned", 4), ("all", 4), ("all", 7), ("none", 4)])),
)
def test_requests_with_drafts_are_forked_preempted_and_found_again(
    models: Any, family: str, checkpoints: str, block_size: int
) -> None:
    states = {"checkpoints": checkpoints, "num_draft_tokens": NUM_DRAFTS}
    options = {"audit": True, "max_num_seqs": 8}
    truth = {f"r{index}": [*ids(3, 23), *ids(index, 37)] for index in range(3)}
    plain = plain_logits(models(family), [*truth.values()])
    with models(family).engine(states=states, block_size=block_size, **options) as engine:
        drafting = Drafting(engine, truth, plain, block_size)
        for name in truth:
            drafting.start(name)
            drafting.step()
        for index in count():
            drafting.step()
            names = sorted(
                name for name, num_computed in drafting.done.items() if 0 < num_computed < len(drafting.truth[name])
            )
            if not names:
                break
            if index >= 24:
                continue
            name = drafting.choose.choice(names)
            if index % 3 == 0 and len(drafting.truth) < 8:
                drafting.fork(name, f"f{index}")
            elif index % 3 == 1:
                drafting.begin_again(name)
        assert all(num_computed == len(drafting.truth[name]) for name, num_computed in drafting.done.items())
        assert drafting.num_refused > 10
        assert (drafting.num_hit > 0) == (checkpoints != "none")
        drafting.end()


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_prefixes_that_requests_with_drafts_computed_are_saved_and_loaded(
    models: Any, family: str, tmp_path: Path
) -> None:
    states = {"checkpoints": "all", "num_draft_tokens": NUM_DRAFTS}
    tokens, path = ids(3, 60), tmp_path / "prefixes"
    plain = plain_logits(models(family), [tokens])
    for is_first in (True, False):
        with models(family).engine(states=states, block_size=4) as engine:
            if not is_first:
                engine.load_prefixes(path)
            drafting = Drafting(engine, {"r": tokens}, plain, 1)
            drafting.start("r")
            assert (0 if is_first else 40) == drafting.num_hit
            while drafting.done["r"] < 60:
                drafting.step()
            drafting.end()
            if is_first:
                engine.save_prefixes(path, [tokens[:40]])
