"""How many bytes a checkpoint's weights take in memory, counted from its config: by dtype, quantization and rank."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from kvframe_transformers.checkpoint import one_sentence, quiet

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_DIVIDING = re.compile(r"(packed_)?(col|row)wise\w*|embedding_\w+|grouped_gemm")
"""The styles of a plan (``tp_plan``) that give each rank a part of a weight."""

_BITS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits")
"""How configs of quantization name the bits of a weight."""

_MXFP4_BITS = 4 + 8 / 32
"""A number of 4 bits, and 8 bits of a scale for each 32 (Open Compute Project, Microscaling Formats 1.0)."""

_SCALE_BITS = {"fp8": 32}
"""The bits of a scale, one for each block or group of weights; 16 for others."""


@attrs.frozen
class Weights:
    """The weights of one rank.

    Attributes:
        num_bytes: Their bytes.
        num_parameters: Their number.
        words: What was counted.
    """

    num_bytes: int
    num_parameters: int
    words: str


def count_weights(model: Any, folder: Path | None, dtype: str, num_ranks: int) -> Weights:
    """Count the weights of one of equal ranks, as transformers' plan divides them.

    If a quantized checkpoint's folder says how many bytes it stores, these are counted. Otherwise its config says it.

    Args:
        model: The model on the meta device, without parts that are not loaded.
        folder: The checkpoint's folder; None for a config alone.
        dtype: The dtype of weights that are not quantized.
        num_ranks: The number of ranks.
    """
    quantization = _quantization_of(model.config)
    whole_bytes = num_bytes = whole_parameters = num_parameters = 0
    for name, parameter, is_divided in _parameters(model):
        stored_bytes = _bytes_of(model, name, parameter, quantization, _ITEM_BYTES[dtype])
        parts = num_ranks if is_divided else 1
        whole_bytes += stored_bytes
        num_bytes += -(-stored_bytes // parts)
        whole_parameters += parameter.numel()
        num_parameters += -(-parameter.numel() // parts)
    share = f"{num_parameters:,} of {whole_parameters:,}" if num_ranks > 1 else f"{num_parameters:,}"
    words = f"{share} parameters in {quantization['quant_method'] if quantization else dtype}"
    in_files = None if folder is None or not quantization else _bytes_in_files(folder)
    if in_files is not None:
        num_bytes = -(-num_bytes * in_files // whole_bytes)
        words += ", as stored"
    return Weights(num_bytes, num_parameters, words)


def what_lacks(config: Any) -> tuple[str, ...]:
    """Return what loading a quantized checkpoint would lack on this machine, by transformers' own check.

    Args:
        config: The checkpoint's config.
    """
    quantization = _quantization_of(config)
    if not quantization:
        return ()
    method = quantization["quant_method"]
    try:
        with quiet():
            quantizer: Any = AutoHfQuantizer.from_config(dict(quantization), pre_quantized=True)
            quantizer.validate_environment(device_map=None)
    except Exception as error:  # an ImportError, or what else a quantizer raises
        return (f"loading its {method} weights fails on this machine: {one_sentence(error)}",)
    if getattr(quantizer.quantization_config, "dequantize", False):
        return (f"on this machine transformers turns its {method} weights into 16 bits when it loads them",)
    return ()


def _quantization_of(config: Any) -> Mapping[str, Any]:
    """Return the quantization config of a checkpoint as plain values; empty if it is not quantized."""
    quantization: Any = getattr(config, "quantization_config", None) or {}
    plain: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    return plain if plain.get("quant_method") else {}


def _parameters(model: Any) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield each parameter with its name, and whether a rank has a part of it."""
    plan: Mapping[str, str] = model.tp_plan or {}
    for name, parameter in model.named_parameters():
        path = re.sub(r"\d+", "*", name)
        module, _, attribute = path.rpartition(".")
        style = plan.get(path) or plan.get(module) or ""
        # The bias of a projection that is divided by its input is added after the sum over ranks.
        is_divided = bool(_DIVIDING.fullmatch(style)) and not (attribute == "bias" and "rowwise" in style)
        yield name, parameter, is_divided


def _bytes_of(model: Any, name: str, parameter: nn.Parameter, quantization: Mapping[str, Any], item_bytes: int) -> int:
    number = parameter.numel()
    if not quantization or not _is_quantized(model, name, parameter, quantization):
        return number * item_bytes
    method = quantization["quant_method"]
    if method == "mxfp4":
        return int(number * _MXFP4_BITS / 8)
    bits = _bits(quantization) or (8 if "fp8" in method else None)
    if bits is None:
        return number * item_bytes
    *rest, rows, columns = parameter.shape
    block, group = quantization.get("weight_block_size"), _find(quantization, ("group_size",))
    num_scales: int = prod(rest) * rows * (-(-columns // group) if group and group > 0 else 1)
    if block:
        num_scales = prod(rest) * -(-rows // block[0]) * -(-columns // block[1])
    return int(-(-number * bits // 8) + num_scales * _SCALE_BITS.get(method, 16) // 8)


def _bits(quantization: Mapping[str, Any]) -> int | None:
    for bits in (8, 4):
        if quantization.get(f"load_in_{bits}bit"):
            return bits
    return _find(quantization, _BITS)


def _find(value: Any, names: Collection[str]) -> int | None:
    """Return the first number of one of these names, at any depth but not for activations."""
    if not isinstance(value, Mapping):
        return None
    for name in names:
        if isinstance(value.get(name), int):
            return int(value[name])
    inner = (_find(each, names) for key, each in value.items() if "activations" not in key)
    return next((number for number in inner if number is not None), None)


def _is_quantized(model: Any, name: str, parameter: nn.Parameter, quantization: Mapping[str, Any]) -> bool:
    """Return whether a weight is quantized: of a linear layer or of experts, unless the config leaves it out."""
    module = model.get_submodule(name.rpartition(".")[0])
    is_of_experts = parameter.ndim == 3 and not isinstance(module, nn.Conv1d)
    if quantization["quant_method"] == "mxfp4":
        return is_of_experts
    is_linear = isinstance(module, nn.Linear) and parameter.ndim == 2 and module is not model.get_output_embeddings()
    names = ("modules_to_not_convert", "ignored_layers", "ignore")
    left_out = next((quantization[key] for key in names if quantization.get(key)), ())
    return (is_of_experts or is_linear) and not any(
        each in name or re.match(each.removeprefix("re:"), name) is not None for each in left_out
    )


def _bytes_in_files(folder: Path) -> int | None:
    """Return the bytes of weights in a folder by their index, or by the sizes of their files; None without files."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
