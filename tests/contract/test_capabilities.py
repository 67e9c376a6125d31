"""A backend's capabilities: every name is checked when they are made, and the error names the nearest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from kvframe.contract.capabilities import MASK_FEATURES, USUAL_DEVICES, Capabilities
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import StateTensor
from kvframe.contract.masks import AttentionMask
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.selection.refusals import find_refusals

RIGHT: Mapping[str, Any] = {"devices": {"cpu"}, "dtypes": {"float32"}, "masks": {"causal"}}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("devices", "cpu", "a set is needed, and 'cpu' is given"),
        ("devices", {"cdua"}, "there is no device type named 'cdua'; .*did you mean 'cuda'?"),
        ("devices", {"cuda:0"}, "there is no device type named 'cuda:0'; .*did you mean 'cuda'?"),
        ("devices", {"npu"}, "a device type of another package is known once that package is imported"),
        ("devices", set(), "the set is empty, so that no layer could be served"),
        ("devices", {0}, "0 is not a string"),
        ("masks", {"casual"}, "there is no mask feature named 'casual'; .*did you mean 'causal'?"),
        ("masks", [], "the set is empty"),
        ("masks", None, "a set is needed, and None is given"),
        ("masks", [{"causal"}, []], "a set is needed"),
        ("dtypes", {"bfloat_16"}, "there is no dtype named 'bfloat_16'; .*did you mean 'bfloat16'?"),
        ("dtypes", {torch.float32}, "torch.float32 is not a string"),
        ("extensions", {"seq_start"}, "there is no extension named 'seq_start'; .*did you mean 'seq_starts'?"),
        ("extensions", {"Own-Name"}, "'Own-Name' must be snake_case"),
        ("state", {"K"}, "'K' must be snake_case"),
        ("state", set(), "the set is empty"),
        ("formats", "plain", "a set is needed, and 'plain' is given"),
        ("formats", {"FP8"}, "'FP8' must be snake_case"),
        ("takes_copies", "no", "'no' is neither True nor False"),
        ("reads_dead_tokens", 1, "1 is neither True nor False"),
        ("soft_cap", None, "None is neither True nor False"),
        ("sinks", "yes", "'yes' is neither"),
        ("relative_bias", 0, "0 is neither"),
        ("alibi", 1, "1 is neither"),
        ("separate_value_size", [], r"\[\] is neither"),
        ("returns_lse", "log", "'log' is neither"),
        ("head_sizes", 64, "a set is needed, and 64 is given"),
        ("head_sizes", (), "None stands for any size"),
        ("head_sizes", {64.0}, "64.0 is not a whole number"),
        ("head_sizes", {-8}, "-8 is not at least 1"),
        ("block_size_multiple", 0, "0 is not at least 1"),
        ("block_size_multiple", True, "True is not a whole number"),
        ("spec_sizes", [64], "sets of sizes by field name are needed"),
        ("spec_sizes", {"latent_size": 512}, "a set is needed, and 512 is given"),
        ("spec_sizes", {"latent-size": {512}}, "'latent-size' must be snake_case"),
        ("capture", 3, "3 is no GraphCapture"),
        ("preference", "high", "'high' is not a whole number"),
        ("masks", {"x" * 100_000}, "there is no mask feature named"),
    ],
)
def test_a_wrong_word_is_refused_when_the_capabilities_are_made(field: str, value: object, message: str) -> None:
    with pytest.raises(BackendError, match=f"^capabilities: {field}: .*{message}") as raised:
        Capabilities(**{**RIGHT, field: value})
    assert "capabilities" == raised.value.code


def test_every_field_is_checked() -> None:
    checked = {field.name for field in attrs.fields(Capabilities) if field.validator is not None}
    assert {field.name for field in attrs.fields(Capabilities)} == checked


def test_any_collection_of_words_becomes_a_set_that_cannot_change() -> None:
    sizes = {"latent_size": [512]}
    capabilities = Capabilities(
        devices=["cpu"], dtypes=("float32",), masks={"causal": 1}, head_sizes=[8], spec_sizes=sizes
    )
    sizes["latent_size"].append(64)
    expected = Capabilities(**RIGHT, head_sizes=frozenset({8}), spec_sizes={"latent_size": frozenset({512})})
    assert expected == capabilities
    assert hash(expected) == hash(capabilities)


def test_names_of_a_plugins_own_are_taken() -> None:
    own = Capabilities(**RIGHT, extensions={"tree_parents"}, state={"latent"}, formats={"own_format"})
    assert {"tree_parents"} == own.extensions


def test_every_feature_of_a_mask_and_every_usual_device_is_known() -> None:
    masks = [
        AttentionMask(window=2, num_sink_tokens=1),
        AttentionMask(chunk=2),
        AttentionMask(causal=False),
        AttentionMask(causal=False, window=2, lookahead=1),
    ]
    assert {*MASK_FEATURES} - {"ranges", "mask_function", "live_range", "sparse"} == set().union(
        *(mask.features for mask in masks)
    )
    assert {*USUAL_DEVICES} == Capabilities(**{**RIGHT, "devices": USUAL_DEVICES}).devices


@attrs.frozen(kw_only=True)
class Stored(KVCacheSpec):
    """A type that does not check queries, with any state."""

    kind = "stored"
    key: tuple[int, ...] = (16, 2, 8)
    value: tuple[int, ...] = (16, 2, 8)
    value_dtype: str = "float32"

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, n),) if n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        return {"k": StateTensor(self.key, "float32"), "v": StateTensor(self.value, self.value_dtype)}

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, None),
        ({"value": (16, 2, 5)}, None),
        ({"key": (16, 3, 8), "value": (16, 3, 8)}, "not 4 of 8 for 3 of 8"),
        ({"key": (16, 8, 8), "value": (16, 8, 8)}, "not 4 of 8 for 8 of 8"),
        ({"key": (16, 2, 4)}, "not 4 of 8 for 2 of 4"),
        ({"value": (16, 1, 8)}, r"not [16, 2, 8] and [16, 1, 8]"),
        ({"key": (4, 2, 8), "value": (4, 2, 8)}, r"not [4, 2, 8] and [4, 2, 8]"),
        ({"key": (16, 8), "value": (16, 8)}, r"the shapes [16, num_kv_heads, head_size] and [16, num_kv_heads"),
        ({"value_dtype": "float16"}, "reads keys and values of one dtype, not float32 and float16"),
    ],
)
def test_state_that_is_called_keys_and_values_has_their_shapes(spec: dict[str, Any], reason: str | None) -> None:
    able = Capabilities(devices={"cpu"}, dtypes={"float32", "float16"}, masks={"causal"}, separate_value_size=True)
    query = QuerySpec(num_heads=4, head_size=8, scale=1.0)
    refusals = find_refusals(able, LayerSpec(name="layer", spec=Stored(block_size=16, **spec), query=query), "cpu")
    assert ([] if reason is None else ["state_shape"]) == [refusal.code for refusal in refusals]
    assert all(reason in refusal.reason for refusal in refusals if reason is not None)
