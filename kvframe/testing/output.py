"""Checks a backend's output before its values are compared: type, shape, dtype and device."""

from __future__ import annotations

import torch

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
    # A subclass is refused, because it could misreport its own values and comparisons.
    if type(values) is not torch.Tensor:
        raise ConformanceError(f"forward returns {type(values).__name__}, not torch.Tensor")
    shape = len(query), case.query.num_heads, case.form.head_size_v(case.spec)
    expected = _say(shape, query.dtype, query.device, torch.strided)
    found = _say(tuple(values.shape), values.dtype, values.device, values.layout)
    if found != expected:
        raise ConformanceError(f"the output is {found}, not {expected}")
    return values


def _say(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.layout) -> str:
    where = "" if layout is torch.strided else f", {layout}"
    return f"{shape}, {dtype}, {device}{where}"
