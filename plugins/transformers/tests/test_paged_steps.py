"""Single tokens of state mixers in their pages; Triton's interpreter replaces the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers import mixers
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.testing import save_tiny

knobs = pytest.importorskip("triton").knobs

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="a CUDA device is there, on which models run")

FAMILIES = (
    *("mamba", "mamba2", "falcon_h1", "qwen3_next", "kimi_linear", "lfm2"),
    # Their states are those of Mamba, Mamba-2 and the gated delta rule.
    *(pytest.param(family, marks=pytest.mark.whole) for family in ("jamba", "zamba2", "olmo_hybrid")),
)


def logits_of(path: Path, dense_layers: Any) -> tuple[TransformersModel, list[torch.Tensor]]:
    """Return a model, and its logits for two requests that are continued by one token, three times."""
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    assert isinstance(model, TransformersModel)
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    outputs = [*layers.step(model, {0: [5, 6, 7, 8], 1: [9, 3]}).values()]
    for token in (11, 12, 13):
        outputs += layers.step(model, {0: [token], 1: [token + 7]}).values()
    return model, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_gives_what_it_gives_without_kernels(
    family: str, tmp_path: Path, dense_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, family)
    plain, expected = logits_of(tmp_path, dense_layers)
    assert all(driver._paged_step is None for driver in plain._drivers.values())
    monkeypatch.setattr(mixers, "kernels_run_on", lambda device: True)
    model, outputs = logits_of(tmp_path, dense_layers)
    assert all(driver._paged_step is not None for driver in model._drivers.values())
    for logits, reference in zip(outputs, expected, strict=True):
        # Ten times the largest difference that was measured.
        torch.testing.assert_close(logits, reference, rtol=2e-4, atol=2e-4)


def test_kernels_that_differ_are_not_used(
    tmp_path: Path, dense_layers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvframe_kernels.triton import states

    save_tiny(tmp_path, "mamba2")
    right = states.selective_state_update
    monkeypatch.setattr(mixers, "kernels_run_on", lambda device: True)
    monkeypatch.setattr(states, "selective_state_update", lambda *args, **options: -right(*args, **options))
    model, _ = logits_of(tmp_path, dense_layers)
    assert all(driver._paged_step is None for driver in model._drivers.values())
    assert "is computed without kernels for its states: they differ by" in caplog.text


def test_there_are_no_kernels_for_a_cpu() -> None:
    assert not mixers.kernels_run_on(torch.device("cpu"))
