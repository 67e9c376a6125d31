"""Checks what a backend returns before its values are compared: type, shape, dtype and device."""

from __future__ import annotations

import torch

from kvframe.attention.layer import AttentionLayer
from kvframe.contract.backend import KVCache
from kvframe.contract.merging import lse_dtype
from kvframe.testing.case import Case
from kvframe.testing.laws import ConformanceError


def check_output(values: object, case: Case, query: torch.Tensor) -> torch.Tensor:
    """Return the result of ``forward`` if it is a tensor as the contract requires.

    Args:
        values: The result of ``forward``.
        case: The case.
        query: ``[num_tokens, num_heads, head_size], device``: the queries that ``forward`` got.

    Raises:
        ConformanceError: It is not a dense ``torch.Tensor``, or has another shape, dtype or device.
    """
    shape = len(query), case.query.num_heads, case.form.head_size_v(case.spec)
    return _checked("the output", "forward", values, shape, query.dtype, query.device)


def check_outputs(values: object, case: Case, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp if ``forward_with_lse`` returned both as the contract requires.

    Args:
        values: The result of ``forward_with_lse``.
        case: The case.
        query: ``[num_tokens, num_heads, head_size], device``: the queries that it got.

    Raises:
        ConformanceError: It is not a pair of dense ``torch.Tensor``, or one has another shape, dtype or device.
    """
    if type(values) is not tuple or len(values) != 2:
        raise ConformanceError(f"forward_with_lse returns {type(values).__name__}, not a pair of tensors")
    output, lse = values
    name, dtype = "forward_with_lse", lse_dtype(query.dtype)
    shape = len(query), case.query.num_heads
    of_output = *shape, case.form.head_size_v(case.spec)
    return (
        _checked("the output", name, output, of_output, query.dtype, query.device),
        _checked("the log-sum-exp", name, lse, shape, dtype, query.device),
    )


def attend_with_lse(
    layer: AttentionLayer, kv_cache: KVCache, query: torch.Tensor, sinks: torch.Tensor | None, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of a layer without wrappers, in the step that its group has begun.

    Args:
        layer: The layer; its keys and values of the step are written.
        kv_cache: The state tensors that it reads.
        query: ``[num_tokens, num_heads, head_size], device``.
        sinks: ``[num_heads], device``, or None.
        case: The case.

    Raises:
        ConformanceError: As ``check_outputs`` raises it.
        KVFrameError: What the backend raises.
    """
    backend, read = layer.step.group.backend, layer.step.read
    order = read.permutation
    rows = query if order is None else query.index_select(0, order.tokens)
    output, lse = check_outputs(backend.forward_with_lse(layer.spec, rows, kv_cache, read.metadata, sinks), case, rows)
    return (output, lse) if order is None else (output[order.inverse], lse[order.inverse])


def _checked(
    what: str, method: str, values: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # A subclass is refused, because it could misreport its own values and comparisons.
    if type(values) is not torch.Tensor:
        raise ConformanceError(f"{method} returns {type(values).__name__}, not torch.Tensor")
    expected = _say(shape, dtype, device, torch.strided)
    found = _say(tuple(values.shape), values.dtype, values.device, values.layout)
    if found != expected:
        raise ConformanceError(f"{what} is {found}, not {expected}")
    return values


def _say(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.layout) -> str:
    where = "" if layout is torch.strided else f", {layout}"
    return f"{shape}, {dtype}, {device}{where}"
