"""What the comparison of a model with itself allows."""

from __future__ import annotations

import pytest
import torch
from kvframe_transformers.self_check import tolerance_of


def test_a_model_in_float64_may_compute_parts_in_float32() -> None:
    assert tolerance_of(torch.float64) == 8 * 2.0**-23
    assert tolerance_of(torch.float32, torch.float64, torch.int64) == pytest.approx(2.0**-11.5)
    assert tolerance_of(torch.bfloat16, torch.float32) == pytest.approx(2.0**-3.5)
