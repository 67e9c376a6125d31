"""Mixers with states outside of transformers' cache: they are found, take a view, and stay as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvframe_transformers.own_states import forward_with_states, keeping_own_states
from kvframe_transformers.states import HELD, PASSED, StateView
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "recurrent_gemma": {"hidden_size": 64, "lru_width": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "rwkv": {"hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2},
    "xlstm": {"embedding_dim": 64, "hidden_size": 64, "num_blocks": 2, "num_heads": 4, "qk_dim_factor": 1.0},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=128, intermediate_size=96, pad_token_id=0, **SIZES[family])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("family", "names"),
    [("recurrent_gemma", ["temporal_block"]), ("rwkv", ["blocks"]), ("xlstm", ["blocks"]), ("gemma2", [])],
)
def test_the_outermost_modules_with_states_are_found(family: str, names: list[str]) -> None:
    model = model_of(family)
    paths = {module: path for path, module in model.named_modules()}
    module_names = [paths[module].rstrip("0123456789.").rpartition(".")[2] for module in keeping_own_states(model)]
    assert names == sorted(set(module_names))


def test_states_in_attributes_continue_a_sequence_and_leave_the_module_as_it_was() -> None:
    model = model_of("recurrent_gemma")
    module: Any = next(iter(keeping_own_states(model)))
    forward = forward_with_states(module)
    assert forward is not None
    tokens, positions = torch.randn(1, 6, model.config.hidden_size), torch.arange(6).unsqueeze(0)
    module.conv1d_state = "the user's"
    with torch.inference_mode():
        full_output = forward(input_states=tokens, position_ids=positions, attention_mask=None, **{HELD: StateView()})[
            0
        ]
        view, outputs = StateView(), []
        for at in range(6):
            part = {"input_states": tokens[:, at : at + 1], "position_ids": positions[:, at : at + 1]}
            outputs.append(forward(**part, attention_mask=None, **{HELD: view})[0])
    torch.testing.assert_close(torch.cat(outputs, 1), full_output)
    assert {"conv_0", "recurrent_0"} == set(view.named())
    assert "the user's" == module.conv1d_state
    assert module.rg_lru.recurrent_states is None


def test_states_in_an_argument_continue_a_sequence() -> None:
    model = model_of("xlstm")
    forward = forward_with_states(next(iter(keeping_own_states(model))))
    assert forward is not None
    tokens, view = torch.randn(1, 6, model.config.hidden_size), StateView()
    with torch.inference_mode():
        full_output = forward(x=tokens, **{PASSED: StateView()})[0]
        parts = [forward(x=tokens[:, at : at + 1], **{PASSED: view})[0] for at in range(6)]
    torch.testing.assert_close(torch.cat(parts, 1), full_output, rtol=1e-4, atol=1e-4)
    assert ["recurrent_0", "recurrent_1", "recurrent_2"] == sorted(view.named())


def test_a_block_of_rwkv_continues_each_sequence_of_a_batch() -> None:
    """Its own code computes single tokens of one sequence only, on a tensor with the states of all layers."""
    model = model_of("rwkv")
    forward = forward_with_states(list(keeping_own_states(model))[1])
    assert forward is not None
    tokens, view = torch.randn(3, 6, model.config.hidden_size), StateView()
    with torch.inference_mode():
        full_output = forward(hidden=tokens, **{PASSED: StateView()})[0]
        parts = [forward(hidden=tokens[:, at : at + 1], **{PASSED: view})[0] for at in range(6)]
    torch.testing.assert_close(torch.cat(parts, 1), full_output, rtol=1e-4, atol=1e-4)
    assert [(3, 64)] * 5 == [tuple(state.shape) for state in view.named().values()]


def test_other_modules_keep_no_states() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
            self.last_state = state
            return x

    assert forward_with_states(Other()) is None
