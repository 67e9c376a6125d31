"""The stored tensors of the latents' spec, in plain numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvframe_mla import MLASpec
from kvframe_testing.framework import read_layer_file
from kvframe_testing.suites import SpecTests

from kvframe import FullAttentionSpec, Stack, group_layers, load_plugins, make_layer_specs
from kvframe.contract import AttentionMask, LayerSpec, QuerySpec, RelativeBias, SpecError, UnknownNameError

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def spec(**options: Any) -> MLASpec:
    return MLASpec(**{"block_size": 4, "latent_size": 6, "rope_size": 2, "head_size_v": 3, **options})


@pytest.mark.parametrize(("n", "expected"), [(0, ()), (1, ((0, 1),)), (100, ((0, 100),))])
def test_every_past_token_stays(n: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert expected == spec().live_ranges(n)


def test_a_token_is_one_latent_and_one_rotated_part() -> None:
    (name, tensor), *others = spec(dtype="bfloat16").state_tensors().items()
    assert ("latent", (4, 8), "bfloat16", []) == (name, tensor.shape, tensor.dtype, others)


def test_the_value_size_of_the_heads_is_not_stored() -> None:
    assert spec(head_size_v=3).block_bytes == spec(head_size_v=300).block_bytes == 4 * 8 * 4


def test_the_mask_is_causal() -> None:
    assert AttentionMask() == spec().mask


def test_a_layer_needs_an_up_projection_of_the_sizes_of_query_and_latent() -> None:
    query = QuerySpec(num_heads=5, head_size=9, scale=1.0)
    assert {"kv_up": (5, 9 - 2 + 3, 6)} == spec().parameters(query)
    biased = attrs.evolve(query, relative_bias=RelativeBias(num_buckets=4, max_distance=9))
    assert {"relative_bias": (4, 5), "kv_up": (5, 10, 6)} == spec().parameters(biased)


class TestMLASpec(SpecTests):
    spec = "mla"


def test_retaining_all_changes_nothing() -> None:
    assert spec() == spec().retain_all()


def test_layers_of_other_sizes_share_a_group_and_full_attention_has_its_own() -> None:
    full = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
    layers = [spec(), spec(latent_size=10, rope_size=4, head_size_v=9), full, spec(dtype="bfloat16")]
    grouping = group_layers([LayerSpec(name=str(index), spec=layer_spec) for index, layer_spec in enumerate(layers)])
    assert [("0", "1", "3"), ("2",)] == [group.layers for group in grouping.groups]


@pytest.mark.parametrize("option", ["latent_size", "head_size_v", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_sizes_are_whole_numbers_of_at_least_one(option: str, value: object) -> None:
    with pytest.raises(SpecError, match=rf"MLASpec\.{option} must be a whole number of at least 1"):
        spec(**{option: value})


@pytest.mark.parametrize("value", [-1, 2.0, True])
def test_the_size_of_the_rotated_part_is_a_whole_number(value: object) -> None:
    with pytest.raises(SpecError, match=r"MLASpec\.rope_size must be a whole number of at least 0"):
        spec(rope_size=value)


def test_keys_may_have_no_rotated_part() -> None:
    assert (4, 6) == spec(rope_size=0, latent_size=6).state_tensors()["latent"].shape


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UnknownNameError, match="float31"):
        spec(dtype="float31")


def test_the_layer_file_of_the_readme_takes_the_bytes_that_it_says(tmp_path: Path) -> None:
    block = re.search(r"^```toml\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert block
    file = tmp_path / "deepseek_v3.toml"
    file.write_text(block[1])
    description = read_layer_file(file)
    layers = make_layer_specs(description, load_plugins().registry, Stack(), "bfloat16")
    (group,) = group_layers(layers).groups
    assert 61 == len(group.layers)
    assert "A token of DeepSeek-V3 takes 70,272 bytes" in README
    assert 70_272 == group.page_bytes // group.spec.block_size
    keys_and_values = 61 * 128 * (192 + 128) * 2
    assert "would take 71 times as many" in README.replace("\n", " ")
    assert 71 == keys_and_values // 70_272


def test_the_code_of_the_readme_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


def test_queries_that_are_all_rotated_are_refused() -> None:
    spec = MLASpec(block_size=4, latent_size=16, rope_size=4, head_size_v=8)
    with pytest.raises(SpecError, match="layer 'm': a query has 4 elements, and must have more than the rotated part"):
        LayerSpec(name="m", spec=spec, query=QuerySpec(num_heads=4, head_size=4, scale=1.0))
