"""Tiny random models of many families for tests: they run in milliseconds, and an error shows in their logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe_transformers.checkpoint import auto_model, quiet
from kvframe_transformers.soft_caps import attention_options
from kvframe_transformers.tiny_configs import (
    ENCODER_DECODER_FAMILIES,
    ENCODER_FAMILIES,
    FAMILIES,
    MORE_ENCODER_DECODER_FAMILIES,
    MORE_FAMILIES,
    MORE_STATE_FAMILIES,
    STATE_FAMILIES,
    tiny_config,
)

__all__ = [
    "ENCODER_DECODER_FAMILIES",
    "ENCODER_FAMILIES",
    "FAMILIES",
    "MORE_ENCODER_DECODER_FAMILIES",
    "MORE_FAMILIES",
    "MORE_STATE_FAMILIES",
    "ROUNDINGS",
    "STATE_FAMILIES",
    "exact_copy",
    "quiet",
    "rounding_of",
    "save_tiny",
    "spread_weights",
    "tiny_config",
    "tiny_model",
]

ROUNDINGS = 8
"""The allowed difference of two float32 runs, as a multiple of the largest error of one.

Two runs differ by at most twice the largest error. The rest is for machines on which the error is larger.
"""


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random float32 model of ``family`` whose attention is far from uniform.

    Random weights of the usual size make all keys alike, so that a wrong mask hardly changes the logits. So matrices
    are scaled up, and vectors that start at a constant (biases, norms, sinks) are made random. Embeddings stay
    unchanged: if the output head is tied to them, large ones make each token predict itself. A decoder with an encoder
    has a separate head and larger embeddings, because the encoder's states would outweigh its own tokens.

    Args:
        family: One of the families in ``tiny_configs``.
        seed: Seed of the weights.
        overrides: Other values for fields of the config.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_model(config).from_config(
            config, dtype=torch.float32, **attention_options(config)
        )
        spread_weights(model.eval())
    return model


def spread_weights(model: PreTrainedModel, matrices: float = 8.0) -> None:
    """Change a model's random weights, as ``tiny_model`` does, with torch's random numbers.

    Args:
        model: The model.
        matrices: The factor for matrices of a model without an encoder.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    factors = (6.0, 0.1, 4.0) if model.config.is_encoder_decoder else (matrices, 0.3, 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in embeddings:
                parameter.mul_(factors[2])
            elif parameter.dim() >= 2:
                parameter.mul_(factors[0])
            else:
                parameter.add_(factors[1] * torch.randn_like(parameter))


def exact_copy(model: PreTrainedModel) -> Any:
    """Return a model with the same weights that computes in float64."""
    exact: Any = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # other implementations do not support float64
    return exact


def rounding_of(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> float:
    """Return how much a decoder's float32 logits may differ if sums are computed in another order.

    It is ``ROUNDINGS`` times the largest error of any logit, compared with the model in float64. It depends on the
    model, and hardly on the machine. Bugs change logits by a thousand times as much.

    Args:
        model: A float32 model that attends by itself.
        prompts: Token ids.
    """
    run: Any = model
    exact = exact_copy(model)
    with torch.inference_mode():
        errors = [
            (run(ids, use_cache=False).logits.double() - exact(ids, use_cache=False).logits).abs().max()
            for ids in (torch.tensor([prompt]) for prompt in prompts)
        ]
    return ROUNDINGS * float(max(errors))


def save_tiny(path: Path | str, family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Save ``tiny_model(family, seed, **overrides)`` as a checkpoint folder and return the model.

    Args:
        path: The folder; made if missing.
        family: One of the families in ``tiny_configs``.
        seed: Seed of the weights.
        overrides: Other values for fields of the config.
    """
    model = tiny_model(family, seed, **overrides)
    with quiet():
        model.save_pretrained(path)
    return model
