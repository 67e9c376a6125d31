"""The torch backend on all that it declares; its limits bound memory and change no result."""

from __future__ import annotations

from types import ModuleType

import pytest
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layers
from kvframe_testing.refusals import find_refusals
from kvframe_testing.suites import BackendTests
from kvframe_torch import backend as backend_module
from kvframe_torch import builder as builder_module
from kvframe_torch import tiles as tiles_module
from kvframe_torch.backend import TorchBackend

CASES = {case.name: case for case in make_cases(TorchBackend.capabilities)}


class TestTorch(BackendTests):
    backend = "torch"
    writes_out = True


@pytest.mark.parametrize(
    ("module", "limit"),
    [
        (tiles_module, "MAX_BATCH_BYTES"),
        (tiles_module, "FREE_PADDING_ELEMENTS"),
        (tiles_module, "MAX_BATCH_PAIRS"),
        (builder_module, "MAX_KEPT_PAIRS"),
        (tiles_module, "MAX_ROWS"),
        (tiles_module, "MAX_BIAS_ROWS"),
        (backend_module, "MAX_SCRATCH_ELEMENTS"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "full-block=16-uneven",
        "full-everything-extend",
        "full-block=17-decode",
        "window=5-block=1-mixed",
        "full-relative_bias-soft_cap-learned_sinks-decode",
        "full-bfloat16-soft_cap-learned_sinks-decode",
        "full-short_values-decode",
        "bidirectional-block=17-cross_decode-padded",
    ],
)
def test_its_limits_bound_memory_and_change_no_result(
    module: ModuleType, limit: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 3)
    check_backend(TorchBackend, CASES[name])


def test_it_leaves_out_chunks_and_what_no_mask_says() -> None:
    layers = make_layers(TorchBackend.capabilities)
    refused = {name: find_refusals(TorchBackend.capabilities, layer, "cpu") for name, layer in layers}
    codes = {
        name.rpartition("-block")[0].rpartition("=")[0]: {refusal.code for refusal in layer_refusals}
        for name, layer_refusals in refused.items()
        if layer_refusals
    }
    assert {
        "chunk": {"mask_chunk"},
        "stride": {"mask_live_range"},
        "function-stride": {"mask_function"},
        "window=4-dilation": {"mask_sparse"},
        "window=3-dilation": {"mask_sparse"},
    } == codes
