"""Checks that a KV format stores and reads keys and values as the contract requires, and that backends read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.formats import KVFormat, StateTensor
from kvframe.contract.slots import Slots
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.selection.refusals import find_refusals
from kvframe_testing.case import Case
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.conformance import attention_checks
from kvframe_testing.grid import in_format, make_cases, make_layer
from kvframe_testing.laws import ConformanceError, require
from kvframe_testing.metadata import META
from kvframe_testing.sample import sample
from kvframe_testing.state import KEYS_AND_VALUES, form_of
from kvframe_testing.writes import WriteGuard, same_bits

BLOCK_SIZE = 3
NUM_PAGES = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_SIZES = ((16, 8), (2, 2), (40, 128))
"""Elements of a key and of a value."""


def check_format(kv_format: KVFormat, *, head_size: int = 16, head_size_v: int = 8) -> None:
    """Check that a format stores and reads as the contract requires, in pages laid out as in a pool.

    * *rounding*: a read value differs from the stored one by at most ``rounding`` times the vector's largest element
      (beyond the rounding of the dtype), and zeros stay zeros;
    * *slots*: a write changes neither the values of other slots nor a byte of another page;
    * *reading*: a read changes nothing in the cache; pages may be read in any order, several times, or none at all;
    * *NaN*: an element that is NaN is read as NaN, and no other token or head is;
    * *arguments*: neither function writes to its arguments, except to the cache and the contents of ``out``;
    * *waiting*: neither function waits for a value of the device, and neither raises. This is checked on torch's
      device ``meta``, which has no values.

    Args:
        kv_format: The format; the numbers that are stored are of ordinary size.
        head_size: Elements of a key.
        head_size_v: Elements of a value.
    """
    for dtype in DTYPES:
        for law in LAWS:
            check_law(law, kv_format, dtype, head_size=head_size, head_size_v=head_size_v)


def check_law(
    law: str, kv_format: KVFormat, dtype: torch.dtype = torch.float32, *, head_size: int = 16, head_size_v: int = 8
) -> None:
    """Check one of the ``LAWS``, for one head and for two; ``dtype`` is one of ``DTYPES``."""
    generator = torch.Generator().manual_seed(DTYPES.index(dtype))
    for num_heads in (1, 2):
        key = torch.randn(2 * BLOCK_SIZE, num_heads, head_size, generator=generator).to(dtype)
        value = torch.randn(2 * BLOCK_SIZE, num_heads, head_size_v, generator=generator).to(dtype)
        LAWS[law](kv_format, key, value)


class _Pages:
    """A pool with the pages of two layers side by side, so that a block id's stride is not the size of a page."""

    def __init__(self, kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
        self.kv_format = kv_format
        self.shapes = {"k": key.shape[1:], "v": value.shape[1:]}
        self.dtype = key.dtype
        name = str(key.dtype).removeprefix("torch.")
        sizes = (BLOCK_SIZE, key.shape[1], key.shape[2], value.shape[2], name)
        with _naming(kv_format, "state_tensors() raises"):
            state, again = (kv_format.state_tensors(*sizes) for _ in range(2))
        require(
            isinstance(state, Mapping) and state and all(isinstance(part, StateTensor) for part in state.values()),
            kv_format,
            f"state_tensors() has to give StateTensors by name, at least one, not {state!r}",
        )
        require(state == again, kv_format, f"state_tensors() gives {state!r} the first time and {again!r} the second")
        for part, tensor in state.items():
            require(
                isinstance(tensor.shape, tuple) and all(type(size) is int and size > 0 for size in tensor.shape),
                kv_format,
                f"{part!r} has the shape {tensor.shape!r}; a shape is a tuple of whole numbers from 1 on",
            )
        offset, places = 16, {}
        for part, tensor in state.items():
            places[part] = offset
            offset += -(-tensor.num_bytes // 16) * 16
        self.page_bytes = offset + 16
        # Ids count units of 16 bytes, so that the views of neighbouring ids overlap.
        self.pool = torch.full(((NUM_PAGES + 1) * self.page_bytes,), 255, dtype=torch.uint8)
        self.cache = {}
        # The bytes of pages 1 and 2 that belong to the layer; the other bytes belong to another layer.
        self.is_own = torch.zeros(self.pool.shape, dtype=torch.bool)
        for part, tensor in state.items():
            for start in (page * self.page_bytes + places[part] for page in (1, 2)):
                self.is_own[start : start + tensor.num_bytes] = True
            item = getattr(torch, tensor.dtype)
            strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
            num_ids = NUM_PAGES * self.page_bytes // 16 + 1
            self.cache[part] = self.pool.view(item).as_strided(
                (num_ids, *tensor.shape), (16 // item.itemsize, *strides), places[part] // item.itemsize
            )

    def ids(self, *pages: int) -> torch.Tensor:
        """Return the block ids of pages."""
        return torch.tensor(pages, dtype=torch.int64) * (self.page_bytes // 16)

    def write(self, key: torch.Tensor, value: torch.Tensor, first_slot: int = BLOCK_SIZE) -> None:
        """Store tokens from a slot on."""
        tokens = torch.arange(first_slot, first_slot + len(key))
        slots = Slots.at((tokens // BLOCK_SIZE) * (self.page_bytes // 16), tokens % BLOCK_SIZE, BLOCK_SIZE)
        guard = WriteGuard([key, value, slots.flat, *slots.indices])
        with _naming(self.kv_format, "write() raises"), torch.inference_mode():
            self.kv_format.write(key, value, dict(self.cache), slots)
        guard.check(f"{self.kv_format}: write() writes to its arguments")

    def read(self, *pages: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the tokens of pages, ``[num_pages * block_size, num_kv_heads, size]``."""
        # The first and the last page are not part of ``out``, so they must stay as they are.
        padded_tensors = {
            name: torch.full((len(pages) + 2, BLOCK_SIZE, *shape), 7, dtype=dtype or self.dtype)
            for name, shape in self.shapes.items()
        }
        out = {name: tensor[1 : 1 + len(pages)] for name, tensor in padded_tensors.items()}
        shapes, block_ids = [tensor.shape for tensor in out.values()], self.ids(*pages).int()
        guard = WriteGuard([self.pool, block_ids])
        with _naming(self.kv_format, "read() raises"):
            self.kv_format.read(dict(self.cache), block_ids, out)
        guard.check(f"{self.kv_format}: read() writes to the cache or to the block ids")
        require(shapes == [tensor.shape for tensor in out.values()], self.kv_format, "read() changes the shape of out")
        for tensor in padded_tensors.values():
            require((tensor[[0, -1]] == 7).all(), self.kv_format, "read() writes beside the pages of out")
        return {name: tensor[1 : 1 + len(pages)].flatten(0, 1) for name, tensor in padded_tensors.items()}


def _check_rounding(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
    pages = _Pages(kv_format, key, value)
    pages.write(key, value)
    read_values = pages.read(1, 2)
    for name, stored_values in (("k", key), ("v", value)):
        largest = stored_values.abs().amax(-1, keepdim=True).double()
        allowed = (kv_format.rounding + torch.finfo(key.dtype).eps) * largest
        error = (read_values[name].double() - stored_values.double()).abs()
        worst = float((error / largest).amax())
        require(
            bool((error <= allowed).all()),
            kv_format,
            f"{name} of {key.dtype} is read back with an error of {worst:.3g} of the largest element, and rounding is "
            f"{kv_format.rounding:.3g}",
        )
    pages.write(torch.zeros_like(key), torch.zeros_like(value))
    zeros = pages.read(1, 2)
    require(not zeros["k"].any() and not zeros["v"].any(), kv_format, "zeros are read back as something else")


def _check_slots(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
    pages = _Pages(kv_format, key, value)
    pages.write(key, value)
    other_bytes = torch.cat([pages.pool[: pages.page_bytes], pages.pool[3 * pages.page_bytes :]])
    require((other_bytes == 255).all(), kv_format, "write() changes bytes of other pages")
    require((pages.pool[~pages.is_own] == 255).all(), kv_format, "write() changes bytes of other layers")
    old, content = pages.read(1, 2), pages.pool.clone()
    first_slot = BLOCK_SIZE + 1  # one token in the middle of page 1
    pages.write(2 * key[:1], 2 * value[:1], first_slot)
    new = pages.read(1, 2)
    rest = [0, *range(2, 2 * BLOCK_SIZE)]
    for name in ("k", "v"):
        require(same_bits(old[name][rest], new[name][rest]), kv_format, "write() changes other slots")
    offsets = (content != pages.pool).nonzero().flatten()
    start, stop = pages.page_bytes, 2 * pages.page_bytes
    require(bool(((offsets >= start) & (offsets < stop)).all()), kv_format, "write() changes bytes of other pages")
    content_before = pages.pool.clone()
    pages.write(key[:0], value[:0])
    require(same_bits(content_before, pages.pool), kv_format, "writing no token changes something")


def _check_reading(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
    pages = _Pages(kv_format, key, value)
    pages.write(key, value)
    in_order, repeated_pages = pages.read(1, 2), pages.read(2, 1, 2)
    for name in ("k", "v"):
        first_page, second_page = in_order[name].split(BLOCK_SIZE)
        repeated = torch.cat([second_page, first_page, second_page])
        require(same_bits(repeated_pages[name], repeated), kv_format, "a page is read differently beside other pages")
    pages.read()
    wide = pages.read(1, 2, dtype=torch.float64)
    for name in ("k", "v"):
        require(
            same_bits(wide[name].to(key.dtype), in_order[name]), kv_format, "read values depend on the dtype of out"
        )


def _check_nan(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
    key, value = key.clone(), value.clone()
    for tensor in (key, value):
        tensor[2, -1, 1] = math.nan
    pages = _Pages(kv_format, key, value)
    pages.write(key, value)
    for name, tensor in pages.read(1, 2).items():
        require(bool(tensor[2, -1, 1].isnan()), kv_format, f"NaN in {name} is read back as {float(tensor[2, -1, 1])}")
        tensor[2, -1] = 0
        require(not tensor.isnan().any(), kv_format, f"NaN in {name} spreads to other tokens or heads")


def _check_waiting(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write and read on a device without values, where torch raises an error if one is read."""
    pages = _Pages(kv_format, key, value)
    cache = {name: tensor.to(META) for name, tensor in pages.cache.items()}
    out = {name: torch.empty(2, BLOCK_SIZE, *shape, device=META) for name, shape in pages.shapes.items()}
    tokens = torch.arange(len(key), device=META)
    with _naming(kv_format, "write() waits for a value of the device:"):
        kv_format.write(key.to(META), value.to(META), cache, Slots(tokens, BLOCK_SIZE))
    with _naming(kv_format, "read() waits for a value of the device:"):
        kv_format.read(cache, torch.tensor([1, 2], dtype=torch.int32, device=META), out)


LAWS: Mapping[str, Callable[[KVFormat, torch.Tensor, torch.Tensor], None]] = {
    "rounding": _check_rounding,
    "slots": _check_slots,
    "reading": _check_reading,
    "NaN": _check_nan,
    "waiting": _check_waiting,
}
"""The laws by name, in the order in which ``check_format`` checks them."""


@contextmanager
def _naming(kv_format: KVFormat, failure: str) -> Iterator[None]:
    """Raise ``ConformanceError`` if a function of the format raises inside the block; ``failure`` says which one."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{kv_format}: {failure} {type(error).__name__}: {error}") from error


# --- the checks of a format -------------------------------------------------------------------------------------------


def format_checks(
    format_class: type[KVFormat],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    registry: Registry | None = None,
    whole: bool = False,
) -> Checks:
    """Return the checks of a format: its laws, and the attention of every installed backend on its pages.

    ``whole`` asks for all cases of backends in the format, instead of a sample.
    """
    part = f"format {name or format_class.name!r}"
    kv_format = make_part(part, format_class, options)
    checks = [
        Check(
            name=f"{law}-{str(dtype).removeprefix('torch.')}-sizes={size}_{size_v}",
            features=(f"law: {law}",),
            run=partial(check_law, law, kv_format, dtype, head_size=size, head_size_v=size_v),
        )
        for law in LAWS
        for dtype in DTYPES
        for size, size_v in HEAD_SIZES
    ]
    registry = load_plugins().registry if registry is None else registry
    attention, refused_codes = attention_checks(registry, partial(_cases_of, kv_format, registry, whole))
    return Checks(part=part, checks=(*checks, *attention), refused=refused_codes)


def _cases_of(
    kv_format: KVFormat, registry: Registry, whole: bool, backend: str, backend_class: type[AttentionBackend]
) -> tuple[dict[str, Case], tuple[str, ...]]:
    """Return cases of attention in a format by the names of their checks, or the codes of the refusals."""
    capabilities = backend_class.capabilities
    if form_of(backend_class) is not KEYS_AND_VALUES:
        return {}, ("state",)
    layer = in_format(make_layer(capabilities), kv_format)
    if layer is None:
        return {}, ("format",)
    if refusals := find_refusals(capabilities, layer, "cpu"):
        return {}, tuple(refusal.code for refusal in refusals)
    other_formats = sorted(capabilities.formats - {"plain", kv_format.name})
    formats = [kv_format, *(registry.formats.load(other)() for other in other_formats)]
    cases = make_cases(capabilities, formats=formats, only=f"{kv_format.name}-*")
    chosen_cases = cases if whole else sample([case for case in cases if "-full" in case.name], ())
    return {f"{backend}-{case.name}": case for case in chosen_cases}, ()
