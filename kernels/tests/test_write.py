"""Writes of keys and values: every format's bits, in the given slots and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from kvframe_kernels.testing import paged, same_bits, scattered
from kvframe_kernels.triton.write import FORMATS, write_kv, write_kv_reference
from triton import knobs

from tests.covering import cover_values

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]

BLOCK_SIZE, NUM_IDS = 4, 11
CODES = {"fp8_tensor": torch.float8_e4m3fn, "fp8_token_head": torch.float8_e4m3fn, "int8_token_head": torch.int8}


def pages(name: str, heads: int, size_k: int, size_v: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's state tensors, each strided over a pool of its own."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for side, size in (("k", size_k), ("v", size_v)):
        if name == "int4_token_head":
            shapes[side] = (BLOCK_SIZE, heads, size // 2), torch.uint8
            shapes[f"{side}_scale"] = shapes[f"{side}_min"] = (BLOCK_SIZE, heads), torch.float16
        else:
            shapes[side] = (BLOCK_SIZE, heads, size), CODES.get(name, dtype)
            if name.endswith("token_head"):
                shapes[f"{side}_scale"] = (BLOCK_SIZE, heads), torch.float32
    return {
        part: paged(NUM_IDS, torch.Size(shape).numel() // 2, shape, kind, DEVICE)[1]
        for part, (shape, kind) in shapes.items()
    }


def copies(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same views of copies of their pools, on the host."""
    copied_state = {}
    for name, tensor in state.items():
        pool = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).cpu().clone()
        copied_state[name] = pool.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copied_state


def check(
    name: str, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype = torch.float32, **scales: float
) -> None:
    """Write to pages of poison, and compare all bytes of the pools."""
    num_tokens, heads, _ = key.shape
    generator = torch.Generator().manual_seed(num_tokens)
    state = pages(name, heads, key.shape[-1], value.shape[-1], dtype)
    expected = copies(state)
    # A page takes two block ids, so views of neighbouring ids overlap.
    places = torch.randperm(NUM_IDS // 2 * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots = 1 + 2 * (places // BLOCK_SIZE), places % BLOCK_SIZE
    write_kv_reference(key, value, expected, slots, name, **scales)
    inputs = (scattered(tensor.to(DEVICE), generator) for tensor in (key, value))
    write_kv(*inputs, state, (slots[0].to(DEVICE), slots[1].to(DEVICE)), name, **scales)
    for part, tensor in state.items():
        pool, expected_pool = (
            view.as_strided((view.untyped_storage().nbytes() // view.itemsize,), (1,), 0)
            for view in (tensor, expected[part])
        )
        assert same_bits(expected_pool, pool.cpu()), part


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "tokens", "heads", "size_k", "size_v"),
    cover_values(FORMATS, [(1, 1, 8, 8), (7, 2, 40, 20), (17, 3, 128, 128), (5, 1, 6, 10)], times=2),
)
def test_the_bits_are_those_of_the_reference(name: str, tokens: int, heads: int, size_k: int, size_v: int) -> None:
    check(name, 3 * noise(tokens, heads, size_k), 5 * noise(tokens, heads, size_v, seed=1))


@pytest.mark.parametrize(("name", "dtype"), cover_values(FORMATS, [torch.float16, torch.bfloat16]))
def test_keys_and_values_of_any_dtype_are_stored(name: str, dtype: torch.dtype) -> None:
    check(name, noise(9, 2, 16).to(dtype), noise(9, 2, 16, seed=1).to(dtype), dtype)


def test_a_cache_of_fewer_bits_rounds() -> None:
    check("plain", noise(9, 2, 16), noise(9, 2, 16, seed=1), torch.float16)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_extremes_and_what_is_no_number(name: str) -> None:
    key = noise(8, 2, 8)
    key[0], key[1, 0], key[2, 1] = 0, 1e-44, 3e38
    key[3, 0, 3], key[4, 1, 0], key[5, 0, 7] = float("nan"), float("inf"), -float("inf")
    key[6], key[7] = 7.25, -key[7].abs()
    check(name, key, key.flip(0))


def test_every_boundary_of_eight_bit_floats() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, between, between.nextafter(between + 1), between.nextafter(between - 1)])
    values = torch.cat([values, torch.tensor([449.0, -500.0, 1e30])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 1, 32)
    for rows in values.split(20):
        check("fp8_tensor", rows, rows.flip(-1))


def test_one_scale_for_all_divides_before_it_rounds() -> None:
    check("fp8_tensor", 30 * noise(9, 2, 16), 30 * noise(9, 2, 16, seed=1), k_scale=0.3, v_scale=7.0)


def test_ties_go_to_the_even_code() -> None:
    key = torch.tensor([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]])
    check("int8_token_head", key, key)
    key = torch.tensor([[[0.0, 15.0, 0.5, 1.5, 2.5, 13.5, 14.5, 7.5]]])
    check("int4_token_head", key, key)


def test_no_tokens_are_no_work() -> None:
    state = pages("plain", 2, 8, 8, torch.float32)
    none, nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, 8, device=DEVICE)
    write_kv(nothing, nothing, state, (none, none))
    assert state["k"].isnan().all()
