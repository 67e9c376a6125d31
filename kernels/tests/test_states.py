"""The steps of state layers: each kernel agrees with its reference, and writes only the target pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvframe_kernels.testing import paged, scattered
from kvframe_kernels.triton.conv import conv_update, conv_update_reference
from kvframe_kernels.triton.delta import gated_delta_update, gated_delta_update_reference
from kvframe_kernels.triton.states import selective_state_update, selective_state_update_reference
from triton import knobs

from tests.covering import cover_pairs, cover_values

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]

NUM_IDS, NUM_PLACES = 9, 2
PLACES = {
    "in place": (([3, 5, 8], [0, 1, 1]), ([3, 5, 8], [0, 1, 1])),
    "to other pages": (([3, 5, 8], [0, 1, 1]), ([4, 2, 7], [1, 0, 0])),
    "from one page": (([3, 3, 3], [1, 1, 1]), ([4, 2, 7], [0, 1, 0])),
}


def run(
    kernel: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    places: str,
    *arguments: Any,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Check outputs and states, and that nothing else was written."""
    generator = torch.Generator().manual_seed(len(places))
    (sources, source_places), (targets, target_places) = PLACES[places]
    source = torch.tensor(sources, device=DEVICE), torch.tensor(source_places, device=DEVICE)
    target = torch.tensor(targets, device=DEVICE), torch.tensor(target_places, device=DEVICE)
    size = torch.Size(shape).numel()
    pool, pages = paged(NUM_IDS, NUM_PLACES * size + 5, (NUM_PLACES, *shape), dtype, DEVICE)
    states = torch.randn(len(sources), *shape, generator=generator).to(DEVICE, dtype)
    pages[source] = states[:1].expand_as(states) if places == "from one page" else states
    expected_pool = pool.clone()
    expected_pages = expected_pool.as_strided(pages.shape, pages.stride(), pages.storage_offset())
    expected = reference(expected_pages, source, target, *arguments, **options)

    inputs = [scattered(value, generator) if isinstance(value, torch.Tensor) else value for value in arguments]
    inputs = [new if old is None or not _is_expanded(old) else old for new, old in zip(inputs, arguments, strict=True)]
    output = kernel(pages, source, target, *inputs, **options)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, expected_pool, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert expected_pages[target].isfinite().all()


def _is_expanded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and 0 in value.stride()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def mamba_inputs(width: int, state_size: int, rows: int = 3) -> list[torch.Tensor | None]:
    return [
        noise(rows, 1, width),
        2 * noise(rows, 1, width) - 1,
        -noise(1, width, state_size).exp(),
        noise(rows, 1, state_size),
        noise(rows, 1, state_size),
    ]


@pytest.mark.parametrize(("places", "width", "state_size"), cover_values(PLACES, [(8, 4), (37, 5), (300, 16)]))
def test_a_step_of_mamba(places: str, width: int, state_size: int) -> None:
    inputs = [*mamba_inputs(width, state_size), noise(1, width), noise(3, 1, width), noise(1, width)]
    shape = 1, width, state_size
    run(selective_state_update, selective_state_update_reference, shape, places, *inputs, softplus=True)


@pytest.mark.parametrize(
    ("places", "heads", "groups", "head_size", "state_size"),
    cover_values(PLACES, [(4, 1, 8, 16), (6, 2, 5, 7), (2, 2, 64, 128)]),
)
def test_a_step_of_mamba_2(places: str, heads: int, groups: int, head_size: int, state_size: int) -> None:
    inputs = [
        noise(3, heads, head_size),
        (2 * noise(3, heads, 1)).expand(-1, -1, head_size),
        -noise(heads, 1, 1).exp().expand(-1, head_size, state_size),
        noise(3, groups, state_size),
        noise(3, groups, state_size),
        noise(heads, 1).expand(-1, head_size),
        None,
        noise(heads, 1).expand(-1, head_size),
    ]
    shape = heads, head_size, state_size
    run(selective_state_update, selective_state_update_reference, shape, places, *inputs, softplus=True)


def test_a_bias_of_its_own_for_each_element_of_a_head() -> None:
    inputs = [
        noise(3, 4, 8),
        noise(3, 4, 1).expand(-1, -1, 8),
        -noise(4, 1, 1).exp().expand(-1, 8, 16),
        noise(3, 1, 16),
        noise(3, 1, 16),
        None,
        None,
        noise(4, 8),
    ]
    run(selective_state_update, selective_state_update_reference, (4, 8, 16), "in place", *inputs, softplus=True)


@pytest.mark.parametrize(
    ("left_out", "softplus"), cover_values([((),), ((5,),), ((6,),), ((7,),), ((5, 6, 7),)], [True, False])
)
def test_what_a_layer_has_not_is_left_out(left_out: tuple[int, ...], softplus: bool) -> None:
    inputs: list[Any] = [*mamba_inputs(12, 4), noise(1, 12), noise(3, 1, 12), noise(1, 12)]
    inputs[1] = inputs[1].abs()
    inputs = [None if index in left_out else value for index, value in enumerate(inputs)]
    shape = 1, 12, 4
    run(selective_state_update, selective_state_update_reference, shape, "in place", *inputs, softplus=softplus)


def test_a_small_step_is_not_lost() -> None:
    # softplus(-18) is 1.5e-8: 1 + 1.5e-8 is 1 in float32.
    pages = torch.zeros(2, 1, 1, 1, 1, device=DEVICE)
    ones = torch.ones(1, 1, 1, device=DEVICE)
    row = torch.tensor([1], device=DEVICE), torch.tensor([0], device=DEVICE)
    out = selective_state_update(pages, row, row, ones, -18 * ones, -ones, ones, ones, softplus=True)
    assert 1.52e-8 == pytest.approx(out.item(), rel=1e-2)


def test_states_of_fewer_bits_are_computed_in_float32() -> None:
    inputs = mamba_inputs(12, 4)
    inputs = [None if tensor is None else tensor.half() for tensor in inputs]
    shape = 1, 12, 4
    reference = selective_state_update_reference
    run(
        selective_state_update,
        reference,
        shape,
        "in place",
        *inputs,
        dtype=torch.float16,
        tolerance=2e-3,
        softplus=True,
    )


@pytest.mark.parametrize(
    ("places", "channels", "inputs", "width", "with_bias"),
    cover_values(PLACES, [(8, 4, 4), (37, 3, 4), (600, 4, 3), (5, 2, 2)], [True, False], times=2),
)
def test_a_step_of_a_convolution(places: str, channels: int, inputs: int, width: int, with_bias: bool) -> None:
    arguments = [noise(3, channels), noise(channels, width), noise(channels) if with_bias else None]
    run(conv_update, conv_update_reference, (channels, inputs), places, *arguments, silu=with_bias)


@pytest.mark.parametrize(
    ("places", "heads", "key_heads", "key_size", "value_size", "per_channel", "normalise"),
    cover_pairs(PLACES, [(4, 2, 8, 16), (3, 3, 5, 7), (2, 1, 128, 64)], [False, True], [False, True]),
)
def test_a_step_of_the_gated_delta_rule(
    places: str, heads: int, key_heads: int, key_size: int, value_size: int, per_channel: bool, normalise: bool
) -> None:
    inputs = [
        noise(3, key_heads, key_size),
        noise(3, key_heads, key_size) * key_size**-0.5,
        noise(3, heads, value_size),
        -noise(3, heads, key_size).abs() if per_channel else -noise(3, heads).abs(),
        noise(3, heads).sigmoid(),
        key_size**-0.5,
    ]
    shape = heads, key_size, value_size
    run(
        gated_delta_update,
        gated_delta_update_reference,
        shape,
        places,
        *inputs,
        normalise=normalise,
    )


def test_no_rows_are_no_work() -> None:
    pages, none = torch.zeros(2, 1, 1, 4, 4), (torch.zeros(0, dtype=torch.int64),) * 2
    empty = torch.zeros(0, 1, 4)
    assert (0, 1, 4) == selective_state_update(pages, none, none, empty, empty, -pages[0, 0], empty, empty).shape
    assert (0, 4) == conv_update(pages[:, :, 0], none, none, empty[:, 0], pages[0, 0, 0]).shape
    delta = gated_delta_update(pages, none, none, empty, empty, empty, empty[..., 0], empty[..., 0], 1.0)
    assert (0, 1, 4) == delta.shape
