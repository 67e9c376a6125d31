"""The most blocks that a request holds: derived at few positions, and equal to the peak over all steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.laws import ConformanceError, check_spec

from kvframe.contract.specs import AttentionSpec, KVCacheSpec, LayerSpec, TokenRange
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from tests.covering import keep

ASKED: Counter[str] = Counter()


@attrs.frozen(kw_only=True)
class Lives(AttentionSpec):
    """Any type that keeps the law of forgetting: each token is live for as many positions as its ``life`` says."""

    kind = "lives"
    life: tuple[int, ...]

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        live = [token for token in range(n) if n <= token + self.life[token % len(self.life)]]
        return tuple((token, token + 1) for token in live)


def spec_of(kind: type[AttentionSpec], block_size: int, **options: Any) -> AttentionSpec:
    return kind(block_size=block_size, num_kv_heads=1, head_size=4, **options)


def by_definition(spec: KVCacheSpec, num_tokens: int, max_new: int) -> int:
    steps = ((n, min(max_new, num_tokens - n)) for n in range(num_tokens))
    num_held = []
    for n, size in steps:
        new = set(range(n // spec.block_size, -(-(n + size) // spec.block_size)))
        num_held.append(
            len(new | {token // spec.block_size for start, stop in spec.live_ranges(n) for token in range(start, stop)})
        )
    return max(num_held, default=0)


@given(
    life=st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), min_size=1, max_size=90).map(tuple),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(0, 90),
    max_new=st.integers(1, 40),
)
def test_the_peak_is_that_of_all_steps(life: tuple[int, ...], block_size: int, num_tokens: int, max_new: int) -> None:
    spec = spec_of(Lives, block_size, life=life)
    assert by_definition(spec, num_tokens, max_new) == spec.peak_blocks(num_tokens, max_new)


@attrs.frozen(kw_only=True)
class Summaries(AttentionSpec):
    """The last token of every stretch stays, and the own stretch."""

    kind = "summaries"
    stride: int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        own = n - n % self.stride
        ranges = tuple((end - 1, end) for end in range(self.stride, own + 1, self.stride))
        ranges = (*ranges, (own, n)) if own < n else ranges
        ASKED[self.kind] += 1 + len(ranges)
        return ranges


@attrs.frozen(kw_only=True)
class Window(AttentionSpec):
    """A window of ``size`` tokens."""

    kind = "window"
    size: int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        ASKED[self.kind] += 1
        return ((max(0, n - self.size), n),) if n else ()


def work(kind: type[AttentionSpec], length: int, **options: int) -> int:
    """Return how many live ranges a type is asked for while a plan is made."""
    ASKED.clear()
    layer = LayerSpec(name="layer", spec=spec_of(kind, 16, **options))
    plan_cache(group_layers([layer]), memory_bytes=2**34, max_model_len=length, max_num_batched_tokens=2048)
    return ASKED[str(kind.kind)]


@pytest.mark.parametrize(
    ("kind", "options"),
    keep([(Summaries, {"stride": 16}), (Summaries, {"stride": 100}), (Window, {"size": 500})], {"stride": 16}, Window),
)
def test_planning_asks_for_a_number_of_ranges_in_proportion_to_the_length(
    kind: type[AttentionSpec], options: dict[str, int]
) -> None:
    short, long = (work(kind, length, **options) for length in (4_096, 65_536))
    assert long < 20 * short
    assert long < 16 * 65_536


@attrs.frozen(kw_only=True)
class Sparse(AttentionSpec):
    """Every second token of the last ``size``: many ranges at every position."""

    kind = "sparse"
    size: int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        first = max(0, n - self.size)
        return tuple((token, token + 1) for token in range(first + first % 2, n, 2))


@pytest.mark.parametrize(("size", "warned"), [(2_000, 1), (20, 0)])
def test_a_type_that_would_take_long_is_warned_about_once(
    size: int, warned: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframe.planning.spec_check._MANY_RANGES", 50_000)
    work(Sparse, 4_096, size=size)
    assert warned == len(caplog.messages)
    if warned:
        assert "override peak_blocks in tests.contract.test_peaks.Sparse" in caplog.messages[0]


class LowPeak(Window):
    """Answers with a peak that is one too low."""

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return super().peak_blocks(num_tokens, max_new_tokens) - (num_tokens > 40)


def test_the_kit_compares_a_peak_with_that_of_all_steps() -> None:
    with pytest.raises(ConformanceError, match=r"peak_blocks\(41, 1\) is"):
        check_spec(spec_of(LowPeak, 4, size=5))


def test_a_type_whose_ranges_grow_with_the_length_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    work(Summaries, 65_536, stride=16)
    assert [] == caplog.messages
