"""Chooses the dtype of a model if the stack leaves it to the machine and to the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.planning.layer_file import is_layer_file, layer_file_dtype
from kvframe.planning.recognise import find_adapter

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry

_log = logging.getLogger("kvframe")

AUTO = "auto"
"""The dtype of a stack that names none."""

DEFAULT_DTYPE = "float32"
"""The dtype of a model whose checkpoint names none."""

_CPU_FEATURES = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "arm_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16", "arm_fp16_arith", "fp16_arith"),
}
"""For each dtype of 16 bits, the features with which a CPU multiplies it; without one, it converts to float32."""


def with_dtype(stack: Stack, path: Path, registry: Registry, *, runs_here: bool = True) -> Stack:
    """Return a stack that names a dtype: its own, otherwise that of the checkpoint or layer file.

    A CPU that cannot multiply a dtype of 16 bits computes it more slowly than float32, so that float32 is chosen there,
    if the model ``runs_here`` and is not planned for another machine.
    """
    if stack.model.dtype != AUTO:
        return stack
    named = layer_file_dtype(path) if is_layer_file(path) else find_adapter(path, registry).dtype_of(path)
    dtype = DEFAULT_DTYPE if named is None else named
    if runs_here and stack.model.device.partition(":")[0] == "cpu" and not cpu_multiplies(dtype):
        _log.info(
            '%s is in %s, which this CPU computes more slowly than float32: it runs in float32; dtype = "%s" in the '
            "stack's [model] keeps its dtype",
            path.name,
            dtype,
            dtype,
        )
        dtype = "float32"
    return attrs.evolve(stack, model=attrs.evolve(stack.model, dtype=dtype))


def cpu_multiplies(dtype: str) -> bool:
    """Return whether this machine's CPU computes a dtype without converting it to a longer one."""
    if dtype not in _CPU_FEATURES:
        return True
    import torch

    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(features.get(name) for name in _CPU_FEATURES[dtype])
