"""The kit finds every bug of a list in specs and eviction policies, and none in those without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from kvframe_testing.eviction import check_policy
from kvframe_testing.laws import ConformanceError, check_spec

from kvframe.contract.eviction import LRU, EvictionPolicy, ReleasedPages
from kvframe.contract.specs import AttentionMask, AttentionSpec

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
    spec_class: type[Right] = attrs.frozen(kw_only=True)(type("Wrong", (base,), methods))
    return spec_class


ASKED = iter(range(10**9))


SPECS: dict[str, tuple[type[Right], str]] = {
    "a token is forgotten": (
        ranges(lambda n, live: tuple((start + (start > 0), stop) for start, stop in live if stop - start > 1)),
        "the mask shows|law of forgetting",
    ),
    "a dead token is live again, and the mask says so": (
        spec(live_ranges=lambda self, n: ((n % 7, n),) if n % 7 < n else (), mask=property(lambda self: None)),
        "law of forgetting",
    ),
    "ranges overlap": (ranges(lambda n, live: (*live, (n - 1, n)) if n else ()), "law of the past"),
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
    "the mask has no sinks": (spec(mask=property(lambda self: AttentionMask(window=6))), "the mask shows"),
    "a block takes fewer bytes than its tensors": (
        spec(block_bytes=property(lambda self: 64)),
        "block_bytes is 64",
    ),
    "layers of other windows share a table": (
        spec(group_key=property(lambda self: ("any window",))),
        "group_key",
    ),
    "a format changes the window": (
        spec(in_format=lambda self, kv_format: attrs.evolve(self, format=kv_format, window=7)),
        "changes more than the format",
    ),
}


@pytest.mark.parametrize("right", [Right, RightWithoutAMask])
def test_a_spec_without_a_mistake_passes(right: type[Right]) -> None:
    check_spec(right(block_size=4, num_kv_heads=1, head_size=8))


@pytest.mark.parametrize("mistake", SPECS)
def test_the_kit_finds_a_mistake_in_a_spec(mistake: str) -> None:
    wrong, message = SPECS[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_spec(wrong(block_size=4, num_kv_heads=1, head_size=8))


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
    result = right(pages)
    pages.uses[:] = 0
    return result


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
    "what was used is kept for ever": (lambda pages: pages.uses * 1, "forgetting"),
    "priorities overflow": (lambda pages: pages.clock + pages.uses * 2**62, "uses"),
    "it writes to what it is told": (write_uses, "form: priorities\\(\\) writes"),
}


def test_a_policy_without_a_mistake_passes() -> None:
    check_policy(Says(right))
    check_policy(LRU)


@pytest.mark.parametrize("mistake", POLICIES)
def test_the_kit_finds_a_mistake_in_a_policy(mistake: str) -> None:
    wrong, message = POLICIES[mistake]
    with pytest.raises(ConformanceError, match=f": {message}"):
        check_policy(Says(wrong))
