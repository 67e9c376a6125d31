"""Reads the config, device, dtype and end tokens of a transformers model that the user loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from kvframe.contract import ModelError
from kvframe_transformers.checkpoint import checked_eos_token_ids, one_sentence, quiet
from kvframe_transformers.encoders import is_text_encoder, text_attribute


def config_of(model: PreTrainedModel) -> Any:
    """Return a copy of a model's config, with the model's own class, and no implementation of attention or experts."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    # These are properties whose setters also change nested configs.
    config._attn_implementation = None
    config._experts_implementation = None
    if is_text_encoder(config):
        config.is_encoder_decoder = False
    return config


def place_of(model: PreTrainedModel) -> tuple[str, str]:
    """Return the device and the dtype of a model's weights by name.

    Raises:
        ModelError: The weights are on several devices, divided over processes, or not there.
    """
    name, weights = type(model).__name__, list(model.parameters())
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) != 1:
        raise ModelError(f"the weights of {name} are on {' and '.join(devices) or 'no device'}; put them on one device")
    if devices == ["meta"]:
        raise ModelError(f"{name} has no weights: it is on the device 'meta'; load them before an engine is made")
    if any(hasattr(weight, "device_mesh") for weight in weights):
        raise ModelError(
            f"the weights of {name} are divided over several processes; give a model that is whole in this process"
        )
    return devices[0], str(model.dtype).removeprefix("torch.")


def build_like(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Return a model of the class of ``model`` on the meta device; raise ``ModelError`` if it cannot be built.

    Args:
        model: The model.
        config: Its config.
    """
    make: Any = type(model)
    try:
        with quiet(), torch.device("meta"):
            model_copy: PreTrainedModel = make._from_config(copy.deepcopy(config)).eval()
    except Exception as error:  # a class of the user may raise anything
        raise ModelError(f"no {make.__name__} can be built from its own config: {one_sentence(error)}") from error
    return model_copy


def generation_eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a request: those of the generation config, or those of the config if it has none."""
    config: Any = model.config
    generation = getattr(model, "generation_config", None)
    ids = text_attribute(config, "eos_token_id") if generation is None else generation.eos_token_id
    return checked_eos_token_ids(ids, type(model).__name__)
