"""The kit finds every bug of a list in specs, formats and eviction policies, and none in those without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from kvframe.contract.eviction import EvictionPolicy, ReleasedPages
from kvframe.contract.formats import PLAIN, KVFormat, PlainFormat, StateTensor
from kvframe.contract.specs import AttentionMask, AttentionSpec
from kvframe.testing.eviction import check_policy
from kvframe.testing.formats import check_format
from kvframe.testing.laws import ConformanceError, check_spec

# --- specs ------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Right(AttentionSpec):
    """Sinks and a window."""

    kind: ClassVar[str] = "right"
    window: int = 6
    num_sink_tokens: int = 2

    def live_ranges(self, n: int) -> Any:
        start = max(0, n - self.window + 1)
        parts = ((0, min(self.num_sink_tokens, start)), (start, n))
        return tuple(part for part in parts if part[0] < part[1])

    @property
    def mask(self) -> AttentionMask | None:
        return AttentionMask(window=self.window, num_sink_tokens=self.num_sink_tokens)


@attrs.frozen(kw_only=True)
class RightWithoutAMask(Right):
    """The same, by live ranges only."""

    @property
    def mask(self) -> AttentionMask | None:
        return None


def ranges(change: Callable[[int, Any], Any], base: type[Right] = Right, **others: Any) -> type[Right]:
    """Return a spec with other live ranges: a function of the position and the right ranges."""
    return spec(base, live_ranges=lambda self, n: change(n, base.live_ranges(self, n)), **others)


def spec(base: type[Right] = Right, **methods: Any) -> type[Right]:
    made: type[Right] = attrs.frozen(kw_only=True)(type("Wrong", (base,), methods))
    return made


ASKED = iter(range(10**9))


def without_the_last_block(self: Right, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
    first, stop = n // 4, -(-(n + num_new_tokens) // 4)
    return ((first, stop - (stop - first > 1)),)


SPECS: dict[str, tuple[type[Right], str]] = {
    "a token is forgotten": (
        ranges(lambda n, live: tuple((start + (start > 0), stop) for start, stop in live if stop - start > 1)),
        "the mask shows|law of forgetting",
    ),
    "a dead token is live again": (
        ranges(lambda n, live: ((0, n),) if n == 20 else live, RightWithoutAMask),
        "law of forgetting",
    ),
    "a dead token is live again, and the mask says so": (
        spec(live_ranges=lambda self, n: ((n % 7, n),) if n % 7 < n else (), mask=property(lambda self: None)),
        "law of forgetting",
    ),
    "ranges overlap": (ranges(lambda n, live: (*live, (n - 1, n)) if n else ()), "law of the past"),
    "ranges are in no order": (ranges(lambda n, live: live[::-1]), "law of the past"),
    "a range is empty": (ranges(lambda n, live: ((0, 0), *live)), "law of the past"),
    "the token itself is in the past": (ranges(lambda n, live: ((0, n + 1),)), "law of the past"),
    "a range begins before the first token": (ranges(lambda n, live: ((-1, n),)), "law of the past"),
    "ends are no whole numbers": (
        ranges(lambda n, live: ((0, n / 1),) if n else ()),
        "law of the past: .* pairs of int",
    ),
    "ends are numbers of numpy": (
        ranges(lambda n, live: tuple((np.int64(start), np.int64(stop)) for start, stop in live)),
        "law of the past: .* pairs of int",
    ),
    "there is no answer": (ranges(lambda n, live: None), "law of the past: .* is None"),
    "ranges are no pairs": (ranges(lambda n, live: (0, n)), "law of the past"),
    "every answer is another": (
        ranges(lambda n, live: live if next(ASKED) % 2 else ((0, n),) if n else ()),
        "the first time|the mask shows|law of forgetting",
    ),
    "the mask has another window": (
        spec(mask=property(lambda self: AttentionMask(window=5, num_sink_tokens=2))),
        "the mask shows",
    ),
    "the mask has no sinks": (spec(mask=property(lambda self: AttentionMask(window=6))), "the mask shows"),
    "the function sees one token more": (
        spec(mask_function=property(lambda self: lambda query, key: (key <= query) & (query - key < 7) | (key < 2))),
        "mask_function shows",
    ),
    "blocks end early": (
        spec(live_blocks=lambda self, n: tuple((start // 4, stop // 4) for start, stop in self.live_ranges(n))),
        "live_blocks",
    ),
    "the last block gets no page": (spec(stored_blocks=without_the_last_block), "has no page for"),
    "a block of the past gets a page": (
        spec(stored_blocks=lambda self, n, size, branch=0: ((max(0, n // 4 - 1), -(-(n + size) // 4)),)),
        "not sorted, disjoint and within",
    ),
    "fewer blocks are counted than are held": (
        spec(num_resident_blocks=lambda self, n, size: -(-size // 4)),
        "num_resident_blocks",
    ),
    "the peak is that of the end": (spec(peak_blocks=lambda self, num_tokens, size: 3), "peak_blocks"),
    "a block takes fewer bytes than its tensors": (
        spec(block_bytes=property(lambda self: 64)),
        "block_bytes is 64",
    ),
    "layers of other windows share a table": (
        spec(group_key=property(lambda self: ("any window",))),
        "group_key",
    ),
    "all that is retained is less": (spec(retain_all=lambda self: attrs.evolve(self, window=3)), "loses tokens"),
    "a format changes the window": (
        spec(in_format=lambda self, kv_format: attrs.evolve(self, format=kv_format, window=7)),
        "changes more than the format",
    ),
    "the past is kept and it says not": (spec(keeps_past=False), "keeps_past is False"),
}


@pytest.mark.parametrize("right", [Right, RightWithoutAMask])
def test_a_spec_without_a_mistake_passes(right: type[Right]) -> None:
    check_spec(right(block_size=4, num_kv_heads=1, head_size=8))


@pytest.mark.parametrize("mistake", SPECS)
def test_the_kit_finds_a_mistake_in_a_spec(mistake: str) -> None:
    wrong, message = SPECS[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_spec(wrong(block_size=4, num_kv_heads=1, head_size=8))


# --- formats ----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Signs(PlainFormat):
    """Stores magnitudes, and signs beside them."""

    name: ClassVar[str] = "signs"

    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        plain = super().state_tensors(*sizes)
        signs = {f"{name}_sign": StateTensor(tensor.shape, "int8") for name, tensor in plain.items()}
        return {**plain, **signs}

    def magnitudes(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs()

    def signs(self, values: torch.Tensor) -> torch.Tensor:
        return values.signbit().to(torch.int8)

    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        for name, values in (("k", key), ("v", value)):
            kv_cache[name][slots.places] = self.magnitudes(values).to(kv_cache[name].dtype)
            kv_cache[f"{name}_sign"][slots.places] = self.signs(values)

    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        for name, tensor in out.items():
            magnitudes = kv_cache[name].index_select(0, block_ids)
            negative = kv_cache[f"{name}_sign"].index_select(0, block_ids) > 0
            tensor.copy_(torch.where(negative, -magnitudes, magnitudes))


class LosesTheSign(Signs):
    def signs(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values, dtype=torch.int8)


class SignOfTheFirstHead(Signs):
    def signs(self, values: torch.Tensor) -> torch.Tensor:
        return super().signs(values)[:, :1].expand(values.shape)


class SignOfTheLastToken(Signs):
    def signs(self, values: torch.Tensor) -> torch.Tensor:
        return super().signs(values)[-1:].expand(values.shape)


class HalvesLargeElements(Signs):
    def magnitudes(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().clamp(max=1.5)


class WritesTheNeighbour(Signs):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        if len(key):
            size = kv_cache["k"].shape[1]
            kv_cache["k_sign"][slots.blocks[-1:], (slots.offsets[-1:] + 1) % size] = 1


class ReadsTheFirstPage(Signs):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids[:1].expand(len(block_ids)) if len(block_ids) else block_ids, out)


class ReadsIntoTheCache(Signs):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        kv_cache["k_sign"].zero_()


class KeysForValues(Signs):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        out["v"].copy_(out["k"][..., : out["v"].shape[-1]])


class HidesNaN(Signs):
    def magnitudes(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().nan_to_num(0.0)


FORMATS: dict[str, tuple[type[KVFormat], str]] = {
    "the sign is lost": (LosesTheSign, "read back with an error"),
    "the sign is that of the first head": (SignOfTheFirstHead, "read back with an error"),
    "the sign is that of the last token": (SignOfTheLastToken, "read back with an error"),
    "large elements are cut": (HalvesLargeElements, "read back with an error"),
    "the neighbour's slot is written": (WritesTheNeighbour, "read back with an error|changes other slots"),
    "every page is the first": (ReadsTheFirstPage, "read back with an error|pages depend"),
    "reading writes": (ReadsIntoTheCache, "writes to a tensor"),
    "values are keys": (KeysForValues, "v of torch.float32 is read back with an error"),
    "NaN becomes a number": (HidesNaN, "NaN in k is read back"),
}


@pytest.mark.parametrize("right", [PLAIN, Signs()], ids=lambda each: each.name)
def test_a_format_without_a_mistake_passes(right: KVFormat) -> None:
    check_format(right)


@pytest.mark.parametrize("mistake", FORMATS)
def test_the_kit_finds_a_mistake_in_a_format(mistake: str) -> None:
    wrong, message = FORMATS[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_format(wrong())


# --- policies ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Says(EvictionPolicy):
    """Answers with the result of a given function."""

    name = "says"
    function: Callable[[ReleasedPages], Any]

    def priorities(self, pages: ReleasedPages) -> Any:
        return self.function(pages)


def right(pages: ReleasedPages) -> Any:
    """Delay each page by one filling of the pool for each use, nine at most."""
    return pages.clock + np.minimum(pages.uses, 9) * pages.capacity


def write_uses(pages: ReleasedPages) -> Any:
    found = right(pages)
    pages.uses[:] = 0
    return found


POLICIES: dict[str, tuple[Callable[[ReleasedPages], Any], str]] = {
    "some pages have no priority": (lambda pages: right(pages)[pages.uses > 0], "form"),
    "priorities are floats": (lambda pages: right(pages).astype(float), "form"),
    "priorities are a list": (lambda pages: right(pages).tolist(), "form"),
    "there is one priority for all": (lambda pages: np.int64(pages.clock), "form"),
    "it raises for no page": (
        lambda pages: right(pages) + 0 * pages.uses.max(),
        "form: priorities\\(\\) failed: ValueError",
    ),
    "it changes with time": (lambda pages: right(pages) + next(ASKED), "alone"),
    "it depends on the other pages": (lambda pages: right(pages) - pages.uses.min(initial=9), "alone"),
    "it depends on the order of pages": (lambda pages: right(pages) + np.arange(len(pages.uses)), "alone"),
    "it depends on the number of pages": (lambda pages: right(pages) + len(pages.uses), "alone"),
    "what was used more is given up earlier": (lambda pages: pages.clock - np.minimum(pages.uses, 9), "uses"),
    "what was let go of later is given up earlier": (lambda pages: pages.uses - pages.clock, "age"),
    "what was used often is kept for ever": (lambda pages: pages.clock + pages.uses * pages.capacity, "forgetting"),
    "priorities overflow": (lambda pages: pages.clock + pages.uses * 2**62, "uses"),
    "it writes to what it is told": (write_uses, "form: priorities\\(\\) writes"),
}


def test_a_policy_without_a_mistake_passes() -> None:
    check_policy(Says(right))


@pytest.mark.parametrize("mistake", POLICIES)
def test_the_kit_finds_a_mistake_in_a_policy(mistake: str) -> None:
    wrong, message = POLICIES[mistake]
    with pytest.raises(ConformanceError, match=f": {message}"):
        check_policy(Says(wrong))
