"""A mixer over pages: the states that it reads and writes, padding, and its continuation from a state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.mixers import MixerDriver
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.routing import RunningStep, running
from kvframe_transformers.scans import ContinuedScan
from kvframe_transformers.self_check import relative_difference
from kvframe_transformers.states import MixerCall, StateView, is_mixer
from kvframe_transformers.testing import save_tiny, tiny_model

from kvframe.contract import ModelError, StateRound, StateRun, StateStep


def attached(path: Path, family: str, dense_layers: Any) -> tuple[TransformersModel, Any]:
    save_tiny(path, family)
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    assert isinstance(model, TransformersModel)
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    return model, layers


def mixer_of(family: str) -> torch.nn.Module:
    return next(module for module in tiny_model(family).modules() if is_mixer(module))


def test_padded_rows_are_zero_and_write_nothing(tmp_path: Path, dense_layers: Any) -> None:
    model, layers = attached(tmp_path, "mamba2", dense_layers)
    name, state = next(iter(layers.states.items()))
    first = StateRun(0, 3, None, (2, 0))
    index = torch.tensor([3])
    last = StateRound(index, index, index * 0, index, index * 0)
    for tensor in state.pages.values():
        tensor[3] = 0
    state.step = StateStep((last,), (first,))
    tokens = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    assert model._mode is not None
    with torch.inference_mode(), model._mode.on(), running(RunningStep({}, torch.arange(6))):
        output = model.model.get_submodule(name)(tokens)
    assert (1, 6, 64) == output.shape
    assert bool((output[0, :4] != 0).any(-1).all())
    assert bool((output[0, 4:] == 0).all())
    written_pages = [{page for page in range(9) if not tensor[page].isnan().any()} for tensor in state.pages.values()]
    assert [{2, 3}, {2, 3}] == written_pages


def test_a_page_that_nobody_wrote_is_not_read_by_a_first_token(tmp_path: Path, dense_layers: Any) -> None:
    model, layers = attached(tmp_path, "jamba", dense_layers)
    assert all(tensor.isnan().all() for state in layers.states.values() for tensor in state.pages.values())
    logits = layers.step(model, {0: [5], 1: [7, 8, 9]})
    assert logits[0].isfinite().all()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize(("family", "way"), [("mamba2", "_run"), ("qwen3_next", "_run"), ("lfm2", "_run")])
def test_a_mixer_that_reads_its_states_runs_pieces_at_once(
    family: str, way: str, tmp_path: Path, dense_layers: Any
) -> None:
    model, _ = attached(tmp_path, family, dense_layers)
    assert {way} == {driver._continue.__name__ for driver in model._drivers.values()}


@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_mamba"])
def test_a_scan_that_starts_from_nothing_is_given_one_that_does_not(
    family: str, tmp_path: Path, dense_layers: Any
) -> None:
    model, _ = attached(tmp_path, family, dense_layers)
    assert all(driver._continue.__name__ == "<lambda>" for driver in model._drivers.values())


@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_mamba"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (5, 600)])
def test_a_continued_scan_gives_what_token_after_token_gives(family: str, before: int, after: int) -> None:
    mixer = mixer_of(family)
    scan, call = ContinuedScan.of(mixer), MixerCall.of(mixer)
    assert scan is not None
    assert call is not None
    tokens = torch.randn(1, before + after, 64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        view, other = StateView(), StateView()
        for state_view in (view, other):
            mixer(tokens[:, :before], **{call.cache: state_view})
        rest = tokens[:, before:]
        expected = torch.cat([mixer(token, **{call.cache: view}) for token in rest.split(1, dim=1)], dim=1)
        output = scan(other, hidden_states=rest, **{call.cache: other})
        assert isinstance(output, torch.Tensor)
        assert relative_difference(output, expected) < 1e-5
        for name, state in view.named().items():
            assert relative_difference(other.named()[name], state) < 1e-5
        # The module itself still starts without a state.
        assert relative_difference(mixer(rest, **{call.cache: StateView()}), expected) > 1e-4


def test_a_scan_that_cannot_be_continued_goes_on_token_by_token(
    tmp_path: Path, dense_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContinuedScan, "of", lambda module: None)
    model, layers = attached(tmp_path, "jamba", dense_layers)
    assert {"_token_by_token"} == {driver._continue.__name__ for driver in model._drivers.values()}
    tokens = list(range(20, 40))
    outputs = [layers.step(model, {0: piece})[0] for piece in (tokens[:7], tokens[7:19], tokens[19:])]
    model.detach()
    with torch.inference_mode():
        expected = model.model(torch.tensor([tokens])).logits[0]
    # Ten times the largest difference that was measured.
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=0, atol=4e-4)


def test_states_of_another_shape_than_planned_are_refused(tmp_path: Path, dense_layers: Any) -> None:
    save_tiny(tmp_path, "mamba2")
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    for state in layers.states.values():
        state.pages["conv_0"] = state.pages["conv_0"][..., :3]
    with pytest.raises(ModelError, match=r"keeps conv_0 \(160, 4\) of float32.* planned with conv_0 \(160, 3\)"):
        model.attach(layers)


def test_a_mixer_with_a_state_that_its_cache_does_not_show_is_refused() -> None:
    class Counting(torch.nn.Module):
        """Adds the number of its calls."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.num_calls = 0

        def forward(self, tokens: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
            self.num_calls += 1
            if cache_params is not None:
                cache_params.update_conv_state(tokens.transpose(1, 2), 0, conv_kernel_size=2)
            return tokens * self.weight + self.num_calls

    class State:
        def __init__(self) -> None:
            self.pages = {"conv_0": torch.zeros(3, 1, 8, 2)}
            self.step = StateStep((), ())

    module = Counting()
    driver = MixerDriver("layer", module, module.forward, State())
    driver.note({}, torch.zeros(1, 2, 8))
    with pytest.raises(ModelError, match="keeps a state that is not in transformers' cache"):
        driver.check()


def test_models_on_a_cpu_give_no_advice_to_install_kernels_of_gpus(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, dense_layers: Any
) -> None:
    attached(tmp_path, "bamba", dense_layers)
    log = logging.getLogger("transformers.integrations.hub_kernels")
    with caplog.at_level(logging.WARNING, log.name):
        log.warning("`update` is falling back to its reference PyTorch implementation because `x` is not installed.")
        log.warning("another one")
    assert ["another one"] == [record.message for record in caplog.records]


def test_a_mixer_that_asks_its_cache_for_more_is_refused() -> None:
    class Asking(torch.nn.Module):
        """Asks for what transformers' cache does not have yet."""

        def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
            if cache is not None:
                cache.get_later_state(0)
            return tokens

    class State:
        pages: ClassVar[dict[str, torch.Tensor]] = {}

    module = Asking()
    driver = MixerDriver("layer", module, module.forward, State())
    with pytest.raises(ModelError, match=r"asks its cache for what kvframe's does not have .*'get_later_state'"):
        driver.note({}, torch.zeros(1, 2, 8))


def test_a_mixer_reads_its_states_as_transformers_5_20_does() -> None:
    conv, recurrent = torch.ones(1, 2, 3), torch.ones(1, 2)
    layer = StateView({1: conv}, {0: recurrent}).layers[7]
    assert layer.conv_states[1] is conv
    assert layer.recurrent_states[0] is recurrent
    assert not layer.record_past


def test_a_mixer_sees_its_convolution_as_transformers_cache_shows_it() -> None:
    view, inputs = StateView(), torch.arange(1.0, 6.0).reshape(1, 1, 5)
    assert [[[0.0, 0.0, 1.0, 2.0]]] == view.update_conv_state(inputs[..., :2], 0, conv_kernel_size=4).tolist()
    assert [[[0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]] == view.update_conv_state(inputs[..., 2:], 0).tolist()
    assert {"conv_0": [[[2.0, 3.0, 4.0, 5.0]]]} == {name: state.tolist() for name, state in view.named().items()}
    assert view.has_previous_state()
    assert view.get_recurrent_state(0) is None
    numbered = StateView.of({"conv_0": inputs, "recurrent_0": inputs}, ((2,), (0,)))
    assert numbered.get_conv_state(7, state_idx=2) is inputs
    assert np.array_equal([2], numbered.numbers[0])
