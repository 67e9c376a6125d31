"""A model over several ranks, by its own transformers plan (``tp_plan``): each rank has some of the heads."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from math import gcd
from typing import Any

import attrs
import torch
from torch import nn

from kvframe.contract import LayerDescription, ModelDescription, ModelError
from kvframe_transformers.calls import path_of
from kvframe_transformers.latents import KIND as LATENT_KIND

_DIVIDES_OUTPUT = ("colwise", "packed_colwise")
"""The styles of a plan that leave each rank with a part of a projection's output. Others gather the output again."""

_LACKS_ACCELERATE = (
    "transformers needs the package accelerate to divide a model over several ranks; "
    "pip install kvframe-transformers[ranks]"
)


def num_ranks() -> int:
    """Return the number of processes that torchrun started; 1 if it started none."""
    try:
        return max(1, int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError):
        return 1


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or alone."""
    return num_ranks() == 1 or os.environ.get("RANK", "0") == "0"


def whole_module(module: nn.Module) -> nn.Module:
    """Return a module with whole weights that computes in this process alone; itself if its weights are whole.

    Every rank calls this, and gets the parts of the others.

    Args:
        module: A module without modules inside, such as a model's embedding, as transformers has divided it.
    """
    if not any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        return module
    whole = copy.copy(module)
    parameters = {
        name: None if parameter is None else _whole(parameter) for name, parameter in module._parameters.items()
    }
    # transformers has given the module a forward of its own that exchanges parts with other ranks.
    vars(whole).pop("forward", None)
    vars(whole)["_parameters"] = parameters
    return whole


def _whole(parameter: Any) -> nn.Parameter:
    """Return a whole parameter. Each rank has a part of it."""
    value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return nn.Parameter(value.detach(), requires_grad=False)


def options_of_ranks(model: Any, device: str) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` by which transformers divides a model over all ranks.

    Args:
        model: The model on the meta device.
        device: The device of the model, as the stack says it.

    Returns:
        No options for a model that transformers has no plan for: each rank has all of it.

    Raises:
        ModelError: transformers would put the model on another device, or needs a package that is not installed.
    """
    if not model.tp_plan:
        return {}
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if torch.device(device).type != kind:
        raise ModelError(
            f"transformers divides a model over this machine's devices of type {kind!r}, and the stack asks for "
            f"{device!r}; set [model] device to {kind!r}"
        )
    if find_spec("accelerate") is None:
        raise ModelError(_LACKS_ACCELERATE)
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def what_ranks_lack(model: Any, size: int) -> tuple[str, ...]:
    """Return what is not installed and would divide a model, given on the meta device, over a number of ranks."""
    return (_LACKS_ACCELERATE,) if size > 1 and model.tp_plan and find_spec("accelerate") is None else ()


def share_of_rank(description: ModelDescription, model: Any, size: int) -> ModelDescription:
    """Return a model's description with the heads of one rank.

    Args:
        description: The whole model.
        model: The model on the meta device.
        size: The number of ranks.

    Raises:
        ModelError: The ranks do not divide the number of heads of a layer, or a layer's state has no heads to divide.
    """
    divided_modules = _divided_modules(model)
    layers = tuple(
        _share_of(layer, description.name, size) if _is_divided(layer, divided_modules) else layer
        for layer in description.layers
    )
    return attrs.evolve(description, layers=layers)


def _divided_modules(model: Any) -> tuple[str, ...]:
    """Return the paths of the modules that leave each rank with a part of their output."""
    plan = model.tp_plan or {}
    return tuple(path for path, _ in model.named_modules() if plan.get(re.sub(r"\d+", "*", path)) in _DIVIDES_OUTPUT)


def _is_divided(layer: LayerDescription, divided_modules: Collection[str]) -> bool:
    return any(path.startswith(f"{path_of(layer.name)}.") for path in divided_modules)


def _share_of(layer: LayerDescription, name: str, size: int) -> LayerDescription:
    """Return a layer with the heads of one rank; transformers gives each rank equally many consecutive heads."""
    if layer.kind == LATENT_KIND and layer.query["num_heads"] % size == 0:
        # Each rank keeps the latents, which are those of all heads, and attends with its own heads.
        return attrs.evolve(layer, query={**layer.query, "num_heads": layer.query["num_heads"] // size})
    if not layer.query or layer.kind == LATENT_KIND or {"relative_bias", "alibi_slopes"} & layer.query.keys():
        raise ModelError(
            f"{name} cannot run over {size} ranks: its tp_plan divides the layer {layer.name!r}, and kvframe divides "
            f"keys and values by heads only, which {layer.kind} with this layer's options is not; run one process"
        )
    heads, kv_heads = layer.query["num_heads"], layer.options["num_kv_heads"]
    common = gcd(heads, kv_heads)
    if common % size:
        fitting = [str(number) for number in range(1, common + 1) if common % number == 0]
        raise ModelError(
            f"{name} cannot be divided over {size} ranks: its layer {layer.name!r} has {heads} heads and {kv_heads} "
            f"key-value heads; start as many processes as divide both: {' or '.join(fitting)}"
        )
    return attrs.evolve(
        layer,
        options={**layer.options, "num_kv_heads": kv_heads // size},
        query={**layer.query, "num_heads": heads // size},
    )
