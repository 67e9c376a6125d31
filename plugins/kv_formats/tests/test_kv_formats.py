"""The stored parts of the four formats, and the values that are read back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from kvframe_kv_formats import Fp8Tensor, Fp8TokenHead, Int4TokenHead, Int8TokenHead
from kvframe_kv_formats.formats import MAX_SCALE, MIN_SCALE
from kvframe_testing.suites import FormatTests

from kvframe.contract import KVFormat, Slots, SpecError, StateTensor

FORMATS = (Fp8Tensor(), Fp8TokenHead(), Int8TokenHead(), Int4TokenHead())
ids = [kv_format.name for kv_format in FORMATS]


def pages(kv_format: KVFormat, head_size: int, num_pages: int = 3, num_heads: int = 2) -> dict[str, torch.Tensor]:
    """Return pages of two tokens with all bits set, so that floats are NaN."""
    state = kv_format.state_tensors(2, num_heads, head_size, head_size, "float32")

    def filled(tensor: StateTensor) -> torch.Tensor:
        bits = torch.full((num_pages * tensor.num_bytes,), 255, dtype=torch.uint8)
        return bits.view(getattr(torch, tensor.dtype)).view(num_pages, *tensor.shape)

    return {name: filled(tensor) for name, tensor in state.items()}


def stored(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return the pages with tokens in the slots of the pages 1 and 2."""
    cache = pages(kv_format, key.shape[-1], num_heads=key.shape[1])
    kv_format.write(key, key if value is None else value, cache, Slots(2 + torch.arange(len(key)), 2))
    return cache


def read_back(kv_format: KVFormat, cache: Mapping[str, torch.Tensor], *shape: int) -> dict[str, torch.Tensor]:
    """Return the tokens of the pages 1 and 2, ``[4, num_heads, head_size]`` each."""
    out = {name: torch.full((2, 2, *shape), 7.0) for name in ("k", "v")}
    kv_format.read(cache, torch.tensor([1, 2], dtype=torch.int32), out)
    return {name: tensor.flatten(0, 1) for name, tensor in out.items()}


def round_trip(kv_format: KVFormat, values: torch.Tensor) -> torch.Tensor:
    return read_back(kv_format, stored(kv_format, values), *values.shape[1:])["k"]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class TestFp8Tensor(FormatTests):
    format = "fp8_tensor"


class TestFp8TokenHead(FormatTests):
    format = "fp8_token_head"


class TestInt8TokenHead(FormatTests):
    format = "int8_token_head"


class TestInt4TokenHead(FormatTests):
    format = "int4_token_head"


# --- the content of a page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "bytes_per_token"),
    [*zip(FORMATS, (2 * 2 * 8, 2 * 2 * (8 + 4), 2 * 2 * (8 + 4), 2 * 2 * (4 + 4)), strict=True)],
    ids=ids,
)
def test_a_token_takes_its_codes_and_what_turns_them_back(kv_format: KVFormat, bytes_per_token: int) -> None:
    state = kv_format.state_tensors(16, 2, 8, 8, "bfloat16")
    assert 16 * bytes_per_token == sum(tensor.num_bytes for tensor in state.values())


def test_keys_and_values_may_differ_in_size() -> None:
    assert {
        "k": StateTensor((16, 2, 4), "uint8"),
        "k_scale": StateTensor((16, 2), "float16"),
        "k_min": StateTensor((16, 2), "float16"),
        "v": StateTensor((16, 2, 3), "uint8"),
        "v_scale": StateTensor((16, 2), "float16"),
        "v_min": StateTensor((16, 2), "float16"),
    } == Int4TokenHead().state_tensors(16, 2, 8, 6, "float32")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_odd_vector_has_no_two_elements_in_each_byte() -> None:
    with pytest.raises(SpecError, match="int4_token_head stores two elements in a byte, and v vectors have 7"):
        Int4TokenHead().state_tensors(16, 2, 8, 7, "float32")


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
def test_only_floats_that_attention_computes_in_are_stored(kv_format: KVFormat) -> None:
    with pytest.raises(SpecError, match=f"{kv_format.name} stores keys and values of the dtypes .*, not int8"):
        kv_format.state_tensors(16, 2, 8, 8, "int8")


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "1", True, None])
def test_a_scale_is_a_positive_number(scale: object) -> None:
    with pytest.raises(SpecError, match="v_scale must be a positive number, not"):
        Fp8Tensor(v_scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-60, 1e-40, 1e37, 10**400])
def test_a_scale_is_one_that_float32_computes_with(scale: float) -> None:
    with pytest.raises(SpecError, match=r"k_scale must be from 1\.18e-38 to 6\.65e\+35, as float32"):
        Fp8Tensor(k_scale=scale)


@pytest.mark.parametrize("scale", [MIN_SCALE, MAX_SCALE])
def test_the_outermost_scales_give_back_what_they_can_hold(scale: float) -> None:
    largest = torch.full((4, 1, 8), 448 * scale)
    assert torch.equal(largest, round_trip(Fp8Tensor(k_scale=scale), largest))


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_int8_scales_the_largest_element_to_127() -> None:
    key = torch.tensor([[[254.0, -2.0, 1.0, 3.0]]])
    cache = stored(Int8TokenHead(), key)
    assert cache["k_scale"][1, 0].tolist() == [2.0]
    # Ties go to the even code: 0.5 to 0, 1.5 to 2.
    assert cache["k"][1, 0].tolist() == [[127, -1, 0, 2]]


def test_fp8_scales_the_largest_element_to_448() -> None:
    cache = stored(Fp8TokenHead(), torch.tensor([[[896.0, -2.0, 1.0, 0.5]]]))
    assert cache["k_scale"][1, 0].tolist() == [2.0]
    assert cache["k"][1, 0].float().tolist() == [[448.0, -1.0, 0.5, 0.25]]


def test_int4_puts_the_second_half_of_a_vector_in_the_high_nibbles() -> None:
    cache = stored(Int4TokenHead(), torch.tensor([[[-1.0, 14.0, 0.0, 6.0]]]))
    assert (cache["k_scale"][1, 0].item(), cache["k_min"][1, 0].item()) == (1.0, -1.0)
    assert cache["k"][1, 0].tolist() == [[0 | 1 << 4, 15 | 7 << 4]]


def test_fp8_of_a_tensor_divides_by_the_scale_and_saturates() -> None:
    key = torch.tensor([[[1.0, -448.0, 449.0, math.inf]]])
    kv_format = Fp8Tensor(k_scale=0.5, v_scale=2.0)
    cache = stored(kv_format, key)
    assert cache["k"][1, 0].float().tolist() == [[2.0, -448.0, 448.0, 448.0]]
    assert cache["v"][1, 0].float().tolist() == [[0.5, -224.0, 224.0, 448.0]]
    values = read_back(kv_format, cache, 1, 4)
    assert values["k"][0, 0].tolist() == [1.0, -224.0, 224.0, 224.0]
    assert values["v"][0, 0].tolist() == [1.0, -448.0, 448.0, 896.0]


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_is_read_back_errs_by_half_a_step(kv_format: KVFormat, scale: float) -> None:
    values = scale * draw(4, 2, 64) if kv_format.name != "fp8_tensor" else draw(4, 2, 64)
    error = (round_trip(kv_format, values) - values).abs()
    largest = values.abs().amax(-1, keepdim=True)
    if kv_format.name == "int8_token_head":
        allowed = largest / 127 / 2
    elif kv_format.name == "int4_token_head":
        # Half a step, and the float16 rounding of the smallest element and of fifteen scales.
        spread = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
        allowed = spread / 15 / 2 + (largest + spread) * 2**-11 + 15 * 2**-25
    else:
        # Half a unit of three bits after the point, or of the smallest number.
        unit = largest / 448 if kv_format.name == "fp8_token_head" else torch.ones(())
        allowed = torch.maximum(values.abs() * 2**-4, unit * 2**-10)
    assert (error <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
def test_what_was_read_back_is_stored_as_it_is(kv_format: KVFormat) -> None:
    once = round_trip(kv_format, draw(4, 2, 64))
    torch.testing.assert_close(round_trip(kv_format, once), once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
def test_zeros_stay_zeros(kv_format: KVFormat) -> None:
    assert not round_trip(kv_format, torch.zeros(4, 2, 8)).any()


@pytest.mark.parametrize("kv_format", FORMATS[1:], ids=ids[1:])
@pytest.mark.parametrize("value", [1e-44, 1e-38, 1e-7, 3.0e38])
def test_tiny_and_huge_vectors_stay_finite(kv_format: KVFormat, value: float) -> None:
    result = round_trip(kv_format, torch.full((4, 2, 8), value))
    if kv_format.name == "int4_token_head":
        assert math.isclose(result[0, 0, 0].item(), min(value, 65504.0), abs_tol=2**-24)
    else:
        assert math.isclose(result[0, 0, 0].item(), value, rel_tol=1e-2, abs_tol=1e-42)


@pytest.mark.parametrize("kv_format", FORMATS[1:], ids=ids[1:])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_vector_with_an_element_that_is_not_finite_reads_as_nan(kv_format: KVFormat, value: float) -> None:
    values = draw(4, 2, 8)
    values[2, 1, 3] = value
    result = round_trip(kv_format, values)
    assert result[2, 1].isnan().all()
    assert result[2, 0].isfinite().all()
    assert result[[0, 1, 3]].isfinite().all()


def test_fp8_of_a_tensor_keeps_each_nan() -> None:
    values = torch.tensor([[[1.0, math.nan, 2.0, 3.0]]])
    assert round_trip(Fp8Tensor(), values)[0, 0].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
def test_pages_where_nothing_was_written_read_as_nan(kv_format: KVFormat) -> None:
    cache = pages(kv_format, 8)
    values = read_back(kv_format, cache, 2, 8)
    assert values["k"].isnan().all()
    assert values["v"].isnan().all()


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
def test_only_slots_are_written(kv_format: KVFormat) -> None:
    before = pages(kv_format, 8)
    cache = stored(kv_format, draw(3, 2, 8))
    for name, state in cache.items():
        left = state.view(torch.uint8)[[0, 0, 2], [0, 1, 1]]
        assert torch.equal(left, before[name].view(torch.uint8)[[0, 0, 2], [0, 1, 1]])


@pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_that_attention_computes_in_is_stored_and_read(kv_format: KVFormat, dtype: torch.dtype) -> None:
    values = draw(4, 2, 8).to(dtype)
    out = {name: torch.empty(2, 2, 2, 8, dtype=dtype) for name in ("k", "v")}
    kv_format.read(stored(kv_format, values), torch.tensor([1, 2]), out)
    assert torch.equal(round_trip(kv_format, values.float()).to(dtype), out["k"].flatten(0, 1))


def test_many_pages_are_read_in_parts_as_one() -> None:
    values, kv_format = draw(4, 2, 4096), Int8TokenHead()
    cache = stored(kv_format, values)
    out = {name: torch.empty(600, 2, 2, 4096) for name in ("k", "v")}
    kv_format.read(cache, torch.tensor([1, 2]).repeat(300), out)
    assert torch.equal(round_trip(kv_format, values), out["v"][-2:].flatten(0, 1))
