"""The Triton kernel writes the same bits as the formats, so each can read what the other wrote."""

from __future__ import annotations

import pytest
import torch
from kvframe_kernels.triton.write import write_kv
from kvframe_kv_formats import Fp8Tensor, Fp8TokenHead, Int4TokenHead, Int8TokenHead
from triton import knobs

from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.slots import Slots
from tests.covering import cover_values

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]

FORMATS = (PLAIN, Fp8Tensor(), Fp8Tensor(k_scale=0.3, v_scale=5.0), Fp8TokenHead(), Int8TokenHead(), Int4TokenHead())
NUM_TOKENS, BLOCK_SIZE, NUM_HEADS, SIZES = 13, 4, 3, (24, 16)


def pages(kv_format: KVFormat, dtype: str) -> dict[str, torch.Tensor]:
    """Return eight pages with all bits set."""
    state = kv_format.state_tensors(BLOCK_SIZE, NUM_HEADS, *SIZES, dtype)
    return {
        name: torch.full((8 * tensor.num_bytes,), 255, dtype=torch.uint8)
        .view(getattr(torch, tensor.dtype))
        .view(8, *tensor.shape)
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(("kv_format", "dtype"), cover_values(FORMATS, ["float32", "float16", "bfloat16"]))
def test_the_bits_are_those_of_the_format(kv_format: KVFormat, dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    key, value = (
        (4 * torch.randn(NUM_TOKENS, NUM_HEADS, size, generator=generator)).to(getattr(torch, dtype)) for size in SIZES
    )
    key[0], key[1, 0], value[2, 1, 3], value[3, 0, 1] = 0, 7.25, float("inf"), float("nan")
    places = torch.randperm(7 * BLOCK_SIZE, generator=generator)[:NUM_TOKENS] + BLOCK_SIZE
    slots = places // BLOCK_SIZE, places % BLOCK_SIZE
    expected = pages(kv_format, dtype)
    kv_format.write(key, value, expected, Slots(places, BLOCK_SIZE))
    found = {name: tensor.to(DEVICE) for name, tensor in pages(kv_format, dtype).items()}
    scales = getattr(kv_format, "k_scale", 1.0), getattr(kv_format, "v_scale", 1.0)
    there = [tensor.to(DEVICE) for tensor in (key, value, *slots)]
    write_kv(there[0], there[1], found, (there[2], there[3]), kv_format.name, *scales)
    for name, tensor in expected.items():
        assert torch.equal(tensor.view(torch.uint8), found[name].cpu().view(torch.uint8)), name
