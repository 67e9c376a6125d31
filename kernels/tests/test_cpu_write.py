"""Keys and values are written bit for bit as by the formats' torch code, in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch
from kvframe_kernels.cpu.write import FORMATS, write_kv
from kvframe_kernels.testing import paged, same_bits, scattered
from kvframe_kernels.triton.write import write_kv_reference

BLOCK_SIZE, NUM_IDS = 4, 30
CODES = {"fp8_tensor": torch.float8_e4m3fn, "fp8_token_head": torch.float8_e4m3fn, "int8_token_head": torch.int8}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def pools(
    name: str, heads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return pools of poison, and a layer's state tensors over them."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for side, size in zip("kv", sizes, strict=True):
        if name == "int4_token_head":
            shapes[side] = (BLOCK_SIZE, heads, size // 2), torch.uint8
            shapes[f"{side}_scale"] = shapes[f"{side}_min"] = (BLOCK_SIZE, heads), torch.float16
        else:
            shapes[side] = (BLOCK_SIZE, heads, size), CODES.get(name, dtype)
            if name.endswith("token_head"):
                shapes[f"{side}_scale"] = (BLOCK_SIZE, heads), torch.float32
    pages = {part: paged(NUM_IDS, torch.Size(shape).numel() + 5, shape, kind) for part, (shape, kind) in shapes.items()}
    return [pool for pool, _ in pages.values()], {part: view for part, (_, view) in pages.items()}


def check(
    name: str, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype = torch.float32, **scales: float
) -> None:
    generator = torch.Generator().manual_seed(len(key))
    sizes = key.shape[-1], value.shape[-1]
    expected_pools, expected = pools(name, key.shape[1], sizes, dtype)
    actual_pools, kv_cache = pools(name, key.shape[1], sizes, dtype)
    places = torch.randperm(NUM_IDS * BLOCK_SIZE, generator=generator)[: len(key)]
    slots = places // BLOCK_SIZE, places % BLOCK_SIZE
    write_kv_reference(key, value, expected, slots, name, **scales)
    write_kv(scattered(key, generator), scattered(value, generator), kv_cache, slots, name, **scales)
    for part, expected_pool, pool in zip(kv_cache, expected_pools, actual_pools, strict=True):
        assert same_bits(expected_pool, pool), part


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    for tokens, heads, size_k, size_v in ((1, 1, 8, 8), (7, 2, 40, 20), (17, 3, 128, 128), (5, 1, 6, 10)):
        key, value = 3 * noise(tokens, heads, size_k), 5 * noise(tokens, heads, size_v, seed=1)
        check(name, key.to(dtype), value.to(dtype), torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_threads_change_nothing(name: str) -> None:
    torch.set_num_threads(3)
    check(name, noise(100, 2, 16), noise(100, 2, 16, seed=1))
    torch.set_num_threads(1)


def test_a_cache_of_fewer_bits_rounds() -> None:
    check("plain", noise(9, 2, 16), noise(9, 2, 16, seed=1), torch.bfloat16)


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
    check("fp8_tensor", values, values.flip(-1))


def test_one_scale_for_all_divides_before_it_rounds() -> None:
    check("fp8_tensor", 30 * noise(9, 2, 16), 30 * noise(9, 2, 16, seed=1), k_scale=0.3, v_scale=7.0)


def test_ties_go_to_the_even_code() -> None:
    key = torch.tensor([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]])
    check("int8_token_head", key, key)
    key = torch.tensor([[[0.0, 15.0, 0.5, 1.5, 2.5, 13.5, 14.5, 7.5]]])
    check("int4_token_head", key, key)


@pytest.mark.parametrize("name", FORMATS)
def test_no_tokens_are_no_work(name: str) -> None:
    check(name, noise(0, 2, 8), noise(0, 2, 8))


def test_what_cannot_be_written_is_refused() -> None:
    _, kv_cache = pools("plain", 2, (8, 8), torch.float32)
    none = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"pages are torch\.float64; in the plain format the kernels write torch\.float32"
    ):
        write_kv(noise(1, 2, 8), noise(1, 2, 8), pools("plain", 2, (8, 8), torch.float64)[1], (none, none))
    with pytest.raises(ValueError, match="elements of k must be adjacent in its pages, not 2 apart"):
        write_kv(noise(1, 2, 4), noise(1, 2, 8), {**kv_cache, "k": kv_cache["k"][..., ::2]}, (none, none))
