"""Models with recurrent and convolution state: whatever schedule and cache do, the tokens are those of generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvframe_transformers.testing import STATE_FAMILIES

from kvframe.attention.state import StateRound, StateRun
from kvframe.errors import ModelError
from tests.serving import PROMPTS, served

ALL = pytest.mark.parametrize("family", STATE_FAMILIES)
HYBRIDS = pytest.mark.parametrize("family", [family for family in STATE_FAMILIES if family not in ("mamba", "mamba2")])


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "block_size", "checkpoints"),
    [
        (1, 3, "aligned"),
        (7, 4, "all"),
        (7, 5, "aligned"),
        (16, 5, "none"),
        (64, 4, "aligned"),
        (64, 16, "all"),
        (512, 1, "all"),
    ],
)
@ALL
def test_any_chunk_and_block_size_gives_the_tokens_of_generate(
    models: Any, references: Any, family: str, max_num_batched_tokens: int, block_size: int, checkpoints: str
) -> None:
    expected = references(family)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "block_size": block_size}
    with models(family).engine(states={"checkpoints": checkpoints}, **options) as engine:
        assert expected == served(engine)
        assert expected == served(engine)  # what the first round left behind is used, and is right


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("checkpoints", "prefix_caching"), [("none", False), ("aligned", True), ("all", True)])
@HYBRIDS
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, family: str, checkpoints: str, prefix_caching: bool, preemption: str
) -> None:
    expected = references(family)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 4}
    options["states"] = {"checkpoints": checkpoints}
    memory = models(family).tight_memory(75, **options)
    options |= {"preemption": preemption, "prefix_caching": prefix_caching, "max_num_seqs": 8, "memory": memory}
    if preemption == "swap":
        options["swap_memory"] = "4MiB"
    with models(family).engine(**options) as engine:
        assert expected == served(engine)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.preemptions if preemption == "swap" else 0) == stats.swaps


@ALL
def test_the_self_check_accepts_it_and_the_model_comes_back_as_it_was(
    models: Any, references: Any, family: str
) -> None:
    model = models(family)
    expected = references(family)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model.loaded.model(torch.tensor([PROMPTS[3]])).logits

    before, forwards = logits(), {each: each.__dict__.get("forward") for each in model.loaded.model.modules()}
    with model.engine(self_check=True) as engine:
        assert expected == served(engine)
    assert torch.equal(before, logits())
    assert forwards == {each: each.__dict__.get("forward") for each in model.loaded.model.modules()}


@ALL
def test_a_state_that_is_not_read_would_show(
    models: Any, references: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references(family)
    monkeypatch.setattr(StateRun, "read", lambda self, pages: None)
    with models(family).engine(max_num_batched_tokens=16) as engine:
        assert expected != served(engine)
    monkeypatch.undo()
    read = StateRound.read
    monkeypatch.setattr(
        StateRound, "read", lambda self, pages: {name: state * 0 for name, state in read(self, pages).items()}
    )
    with models(family).engine() as engine:
        assert expected != served(engine)


def test_a_mixer_that_is_called_outside_of_its_engine_says_so(models: Any) -> None:
    model = models("mamba2")
    with model.engine(), pytest.raises(ModelError, match="Mamba2Mixer ran outside of the engine"):
        model.loaded.model(torch.tensor([[1, 2]]))
