"""The laws of cache specs, and the faster derivations against the default ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attrs
import numpy as np
import pytest
from kvframe_testing.laws import ConformanceError, check_spec
from kvframe_testing.state import GridSpec

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.contract.errors import SpecError, UnknownNameError
from kvframe.contract.specs import (
    ENCODER,
    AttentionMask,
    KVCacheSpec,
    LayerSpec,
    MaskFunction,
    QuerySpec,
    StateTensor,
    TokenRange,
)
from kvframe.planning.answers import ask_mask
from kvframe.planning.spec_check import check_spec_at_set_up
from tests.cache.plans import RangeSpec, StateSpec, ranged, state


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)


def test_full_attention_keeps_the_whole_past() -> None:
    assert () == full().live_ranges(0)
    assert ((0, 7),) == full().live_ranges(7)


def test_full_attention_holds_a_block_for_every_started_one() -> None:
    assert 3 == full(4).peak_blocks(9, 2)
    assert 0 == full(4).peak_blocks(0, 2)


def test_full_attention_is_plain_causal() -> None:
    assert AttentionMask() == full().mask
    assert full() == full().retain_all()


def test_a_block_is_one_key_and_one_value_per_token_and_head() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=4, dtype="bfloat16")
    assert {"k": StateTensor((16, 2, 8), "bfloat16"), "v": StateTensor((16, 2, 4), "bfloat16")} == spec.state_tensors()
    assert 16 * 2 * (8 + 4) * 2 == spec.block_bytes


def test_value_vectors_are_as_long_as_keys_unless_said() -> None:
    assert 8 == full().head_size_v


def test_each_tensor_of_a_block_is_aligned_to_16_bytes() -> None:
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=3)
    assert 16 + 16 == spec.block_bytes


def test_layers_that_differ_in_layout_only_share_a_group() -> None:
    wide = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float16")
    assert wide.group_key == full(4).group_key
    assert full(8).group_key != full(4).group_key


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_sizes_are_whole_numbers_of_at_least_one(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"FullAttentionSpec\.{field} must be a whole number"):
        attrs.evolve(full(), **{field: value})


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="floot16")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", 10**30 * 1.0])
def test_the_numbers_of_a_mask_are_whole_and_count_tokens(value: Any) -> None:
    for name, least in (("window", 1), ("chunk", 1), ("num_sink_tokens", 0)):
        if type(value) is int and value >= least:
            continue
        options = {"window": 4, name: value} if name == "num_sink_tokens" else {name: value}
        with pytest.raises(SpecError, match=f"^AttentionMask.{name} must be a whole number of at least {least}, not "):
            AttentionMask(**options)


@pytest.mark.parametrize("soft_cap", [0, 0.0, -2.0])
def test_a_soft_cap_is_more_than_zero(soft_cap: float) -> None:
    with pytest.raises(
        SpecError,
        match=f"^QuerySpec.soft_cap must be a finite number of more than 0, or None for no cap, not {soft_cap}",
    ):
        QuerySpec(num_heads=1, head_size=8, scale=1.0, soft_cap=soft_cap)


def test_mask_features_say_what_a_backend_needs() -> None:
    assert frozenset({"causal"}) == AttentionMask().features
    assert frozenset({"bidirectional"}) == AttentionMask(causal=False).features
    both_ways = AttentionMask(causal=False, window=3, lookahead=1)
    assert frozenset({"bidirectional_window"}) == both_ways.features
    assert [True, False, False] == [mask.sees_all for mask in (AttentionMask(causal=False), both_ways, AttentionMask())]
    assert frozenset({"causal", "window", "sink_tokens"}) == AttentionMask(window=3, num_sink_tokens=1).features


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False, "window": 3},
        {"causal": False, "lookahead": 3},
        {"window": 3, "lookahead": 3},
        {"causal": False, "window": 3, "lookahead": 3, "num_sink_tokens": 1},
        {"causal": False, "chunk": 3},
    ],
)
def test_a_mask_whose_terms_exclude_each_other_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        AttentionMask(**options)


class WindowOverAnEncoder(GridSpec):
    """A window in both directions over the tokens of another sequence."""

    kind = "window_over_an_encoder"
    sequence = ENCODER


def test_a_window_in_both_directions_is_over_the_tokens_of_the_request() -> None:
    spec = WindowOverAnEncoder(block_size=4, num_kv_heads=1, head_size=8, causal=False, window=3, lookahead=3)
    with pytest.raises(SpecError, match="no lookahead, because a query has no place among the tokens of the encoder"):
        ask_mask(spec)


@pytest.mark.parametrize(
    ("mask", "visible_keys"),
    [
        (AttentionMask(), [0, 1, 2, 3, 4, 5, 6]),
        (AttentionMask(window=3), [4, 5, 6]),
        (AttentionMask(window=2, num_sink_tokens=1), [0, 5, 6]),
        (AttentionMask(chunk=4), [4, 5, 6]),
        (AttentionMask(causal=False), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (AttentionMask(causal=False, window=3, lookahead=1), [4, 5, 6, 7]),
        (AttentionMask(causal=False, window=1, lookahead=9), [6, 7, 8]),
    ],
)
def test_a_mask_is_a_function_of_positions_too(mask: AttentionMask, visible_keys: list[int]) -> None:
    positions = np.arange(9)
    assert visible_keys == np.flatnonzero(mask.sees(positions[:, None], positions)[6]).tolist()
    assert visible_keys == [key for key in range(9) if mask.sees(6, key)]


def test_a_type_that_has_a_mask_has_its_function_and_others_may_give_one() -> None:
    function = full().mask_function
    assert function is not None
    assert [True, False] == [function(3, 3), function(3, 4)]
    assert None is ranged(block_size=4, window=5).mask_function


class Alternating(FullAttentionSpec):
    """Every second token stays live, which gives many separate ranges for the derivations of the base class."""

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i + 1) for i in range(0, n, 2))


def test_live_blocks_merge_ranges_that_touch_the_same_block() -> None:
    spec = Alternating(block_size=4, num_kv_heads=1, head_size=8)
    assert ((0, 3),) == spec.live_blocks(10)


def test_live_blocks_stay_apart_where_a_block_is_dead() -> None:
    spec = Alternating(block_size=1, num_kv_heads=1, head_size=8)
    assert ((0, 1), (2, 3), (4, 5)) == spec.live_blocks(5)


def test_residency_counts_live_blocks_and_new_ones_once() -> None:
    spec = Alternating(block_size=1, num_kv_heads=1, head_size=8)
    assert 3 + 2 == KVCacheSpec.num_resident_blocks(spec, 5, 2)


# --- the laws, and the kit that checks them ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_full_attention_keeps_the_laws(block_size: int) -> None:
    check_spec(full(block_size), max_tokens=40)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pattern_with_a_function_keeps_the_laws(block_size: int) -> None:
    check_spec(GridSpec(block_size=block_size, num_kv_heads=1, head_size=8, stride=6, has_function=True))


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 1}, {"window": 6, "num_sink_tokens": 3}, {"chunk": 7}])
def test_specs_that_are_nothing_but_live_ranges_keep_the_laws(options: dict[str, int]) -> None:
    check_spec(ranged(block_size=4, **options))


class SeesTheFuture(FullAttentionSpec):
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n + 1),)


class OutOfOrder(FullAttentionSpec):
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((3, n), (0, 3)) if n > 3 else ()


class EmptyRange(FullAttentionSpec):
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),)


class Remembers(FullAttentionSpec):
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),) if n % 5 else ()


class OtherMask(FullAttentionSpec):
    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=9)


class OtherFunction(FullAttentionSpec):
    @property
    def mask_function(self) -> MaskFunction:
        return lambda query, key: (key <= query) & (key > query - 4)


class Sparse(FullAttentionSpec):
    """A query sees every second token, and all are kept."""

    is_sparse = True
    mask = None

    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query) & ((query - key) % 2 == 0)


class SparseWithoutFunction(Sparse):
    mask_function = None


class SparseWithMask(Sparse):
    mask = AttentionMask()


class SparseUndeclared(Sparse):
    is_sparse = False


class SparseSeesTheDead(Sparse):
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((max(0, n - 5), n),) if n else ()


class SparseSeesTheNextToken(Sparse):
    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query + 2) & ((query - key) % 2 == 0)


class SparseWithoutItself(Sparse):
    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query) & ((query - key) % 2 == 1)


class SeesTheNextToken(FullAttentionSpec):
    @property
    def mask_function(self) -> MaskFunction:
        return lambda query, key: key <= query + 1


class AsksForAnElement(FullAttentionSpec):
    @property
    def mask_function(self) -> MaskFunction:
        return lambda query, key: key <= (query if query > 3 else 3)


class LosesAnAxis(FullAttentionSpec):
    @property
    def mask_function(self) -> MaskFunction:
        return lambda query, key: key >= 0


class SaysThatItKeepsNothing(FullAttentionSpec):
    keeps_past = False


class TooFewResident(FullAttentionSpec):
    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        return (n + num_new_tokens) // self.block_size


class TooLowPeak(FullAttentionSpec):
    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return num_tokens // self.block_size


class OtherLiveBlocks(FullAttentionSpec):
    def live_blocks(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, 1),)


class RetainsOtherState(FullAttentionSpec):
    def retain_all(self) -> KVCacheSpec:
        return full(self.block_size + 1)


class RetainsLess(FullAttentionSpec):
    def retain_all(self) -> KVCacheSpec:
        return RangeSpec(block_size=self.block_size, num_kv_heads=1, head_size=8, window=3)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            SeesTheFuture,
            r"law of the past: live_ranges\(0\) is \(\(0, 1\),\), not sorted, disjoint and within \[0, 0\)",
        ),
        (OutOfOrder, r"law of the past: live_ranges\(4\)"),
        (EmptyRange, r"law of the past: live_ranges\(0\) is \(\(0, 0\),\)"),
        (Remembers, r"law of forgetting: tokens \[0, 1, 2, 3, 4\] are live at 6 and were not at 5"),
        (OtherMask, r"at 9 the mask shows \[1, 2, 3, 4, 5, 6, 7, 8\], live are \[0, 1, 2, 3, 4, 5, 6, 7, 8\]"),
        (OtherFunction, r"at 4 mask_function shows \[1, 2, 3, 4\], live and its own are \[0, 1, 2, 3, 4\]"),
        (OtherFunction, r"at 4 .*; a type whose queries see fewer tokens than are live declares is_sparse"),
        (SparseUndeclared, r"at 1 mask_function shows \[1\], live and its own are \[0, 1\]; .* declares is_sparse"),
        (SparseWithoutFunction, r"is_sparse is True, and no mask_function says what a query sees"),
        (SparseWithMask, r"is_sparse is True, and a mask shows every live token"),
        (SparseSeesTheDead, r"at 6 mask_function shows \[0, 2, 4, 6\], live and its own are \[1, 2, 3, 4, 5, 6\]$"),
        (SparseSeesTheNextToken, r"at 0 mask_function shows \[0, 2\], live and its own are \[0\]$"),
        (SparseWithoutItself, r"at 0 mask_function does not show the query itself"),
        (SeesTheNextToken, r"at 0 mask_function shows \[0, 1\], live and its own are \[0\]"),
        (AsksForAnElement, r"mask_function does not take arrays of positions: The truth value of an array"),
        (LosesAnAxis, r"mask_function returns \(1, 65\), bool for all positions, not \(65, 65\), bool"),
        (SaysThatItKeepsNothing, r"keeps_past is False, and live_ranges gives \(\(0, 1\),\)"),
        (TooFewResident, r"num_resident_blocks\(0, 1\) is 0, and 1 by the live ranges"),
        (TooLowPeak, r"peak_blocks\(1, 1\) is 0, and 1 by the live ranges"),
        (OtherLiveBlocks, r"live_blocks\(0\) is \(\(0, 1\),\), and \(\) by the live ranges"),
        (RetainsOtherState, r"retain_all\(\) stores other state tensors"),
        (RetainsLess, r"retain_all\(\) loses tokens \[0\] at 3"),
    ],
)
def test_the_kit_says_which_law_a_spec_breaks(broken: type[FullAttentionSpec], message: str) -> None:
    with pytest.raises(ConformanceError, match=f"{broken.__name__}.*: {message}"):
        check_spec(broken(block_size=4, num_kv_heads=1, head_size=8))


class SparseInside(FullAttentionSpec):
    """Sees the first and the last tokens of its window, and hides one between."""

    mask = None
    at = 17

    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query) & ~((query > self.at + 8) & (key == self.at))


class SparseLater(SparseInside):
    """Hides half of its tokens, from a position on at which not all of them are compared."""

    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query) & ((query < 400) | (key < 3) | (key > query - 3) | (key % 2 == 0))


class SparseInAWindow(SparseInside):
    """Hides one token in the middle of a narrow window, from such a position on."""

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((max(0, n - 31), n),) if n else ()

    @property
    def mask_function(self) -> Any:
        return lambda query, key: (key <= query) & (key > query - 32) & ((query < 400) | (key != query - 16))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            SparseUndeclared,
            r"mask_function\(1, 0\) is False; expected True, because .* that sees fewer tokens declares is_sparse",
        ),
        (SparseInAWindow, r"mask_function\(\d{3,}, \d+\) is False; expected True, because .* declares is_sparse"),
        (SparseInside, r"mask_function\(26, 17\) is False; expected True, because .* declares is_sparse"),
        (SparseLater, r"mask_function\(\d{3,}, \d+\) is False; expected True, because .* declares is_sparse"),
        (SparseWithoutFunction, r"is_sparse is True; expected False, because only a mask_function can"),
        (SparseWithMask, r"is_sparse is True; expected False, because only a mask_function can"),
        (SparseSeesTheDead, r"mask_function\(6, 0\) is True; expected False, because the live ranges at 6 are"),
        (SparseSeesTheNextToken, r"mask_function\(\d+, \d+\) is True; expected False, because the live ranges"),
        (SparseWithoutItself, r"mask_function\(0, 0\) is False; expected True, because a query sees itself"),
        (SeesTheNextToken, r"mask_function\(0, 1\) is True; expected False, because the live ranges at 0 are \(\)"),
    ],
)
def test_set_up_refuses_a_mask_function_that_the_kit_refuses(broken: type[FullAttentionSpec], message: str) -> None:
    spec = broken(block_size=4, num_kv_heads=1, head_size=8)
    with pytest.raises(SpecError, match=f"the cache spec 'full_attention': {message}"):
        check_spec_at_set_up(spec, max_tokens=2048, max_new_tokens=64)
    with pytest.raises(ConformanceError):
        check_spec(spec, max_tokens=512 if broken in (SparseLater, SparseInAWindow) else 64)


class StoresOutside(StateSpec):
    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[TokenRange, ...]:
        return ((0, 40),)


class StoresNothing(StateSpec):
    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[TokenRange, ...]:
        return ()


class StoresMoreForLaterBranches(StateSpec):
    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[TokenRange, ...]:
        ranges = super().stored_blocks(n, num_new_tokens, branch)
        return ((0, 1), *ranges) if n == 0 and branch == 8 and ranges[0] != (0, 1) else ranges


class LosesTheStateAtItsBranch(StateSpec):
    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[TokenRange, ...]:
        return (
            ((branch // 4 - 1, branch // 4),)
            if n < branch <= n + num_new_tokens
            else super().stored_blocks(n, num_new_tokens)
        )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (StoresOutside, r"stored_blocks\(0, 1, 0\) is \(\(0, 40\),\), not sorted, disjoint and within \[0, 1\)"),
        (StoresNothing, r"stored_blocks\(0, 1, 0\) has no page for the blocks \[0\], live at 1"),
        (StoresMoreForLaterBranches, r"stored_blocks\(0, 9, 8\) .* are 3 blocks, more than num_resident_blocks: 2"),
        (LosesTheStateAtItsBranch, r"stored_blocks\(0, 9, 4\) has no page for the blocks \[2\], live at 9"),
    ],
)
def test_the_kit_says_what_is_stored_wrongly(broken: type[StateSpec], message: str) -> None:
    with pytest.raises(ConformanceError, match=f"{broken.__name__}.*: {message}"):
        check_spec(broken(block_size=4))


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_a_state_keeps_what_refused_tokens_leave_if_it_says_so(every: int, num_drafts: int) -> None:
    check_spec(state(every=every, num_drafts=num_drafts), num_refused=num_drafts)


def test_the_kit_says_that_refused_tokens_leave_no_state() -> None:
    with pytest.raises(ConformanceError, match=r"stored_blocks\(2, 9, 0\) has no page for the blocks \[1\], live at 8"):
        check_spec(state(num_drafts=2), num_refused=3)


def test_checking_specs_policies_and_page_stores_needs_no_torch_and_the_kit_no_test_framework() -> None:
    code = (
        "import sys, kvframe_testing.laws, kvframe_testing.eviction, kvframe_engine.testing.scheduling;"
        "import kvframe_testing.page_stores; print('torch' in sys.modules);"
        "import kvframe_testing.conformance; print('pytest' in sys.modules or 'hypothesis' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ["False", "False"] == process.stdout.split()


# --- types whose queries see fewer tokens than are live ---------------------------------------------------------------


def test_a_sparse_type_may_see_fewer_tokens_than_are_live() -> None:
    check_spec(Sparse(block_size=4, num_kv_heads=1, head_size=8))
    check_spec(GridSpec(block_size=4, num_kv_heads=1, head_size=8, window=3, dilation=5))


def test_it_keeps_and_frees_by_its_live_ranges_alone() -> None:
    dilated = GridSpec(block_size=4, num_kv_heads=1, head_size=8, window=3, dilation=5)
    window = GridSpec(block_size=4, num_kv_heads=1, head_size=8, window=11)
    assert [window.live_ranges(n) for n in range(40)] == [dilated.live_ranges(n) for n in range(40)]
    assert window.peak_blocks(40, 3) == dilated.peak_blocks(40, 3)


@pytest.mark.parametrize("broken", [SparseWithoutFunction, SparseWithMask])
def test_a_sparse_type_that_contradicts_itself_is_refused_at_set_up(broken: type[Sparse]) -> None:
    with pytest.raises(SpecError, match="is_sparse is True; expected False, because only a mask_function"):
        check_spec_at_set_up(broken(block_size=4, num_kv_heads=1, head_size=8), 64, 8)


def test_a_live_token_that_no_query_sees_is_refused_at_set_up_unless_it_is_declared() -> None:
    check_spec_at_set_up(Sparse(block_size=4, num_kv_heads=1, head_size=8), 64, 8)
    with pytest.raises(SpecError, match=r"expected True, .* a type that sees fewer tokens declares is_sparse"):
        check_spec_at_set_up(SparseUndeclared(block_size=4, num_kv_heads=1, head_size=8), 64, 8)


def test_a_dead_token_that_a_sparse_type_shows_is_refused_at_set_up() -> None:
    with pytest.raises(SpecError, match=r"mask_function\(\d+, \d+\)"):
        check_spec_at_set_up(SparseSeesTheDead(block_size=4, num_kv_heads=1, head_size=8), 64, 8)


def attending(num_heads: int, head_size: int, num_kv_heads: int) -> LayerSpec:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=num_kv_heads, head_size=8)
    return LayerSpec(name="m.0", spec=spec, query=QuerySpec(num_heads=num_heads, head_size=head_size, scale=1.0))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (6, 3), (6, 6)])
def test_query_heads_share_kv_heads_evenly(num_heads: int, num_kv_heads: int) -> None:
    assert attending(num_heads, 8, num_kv_heads).query is not None


@pytest.mark.parametrize(
    ("num_heads", "head_size", "num_kv_heads", "says"),
    [
        (3, 8, 2, "layer 'm.0': 3 query heads do not share 2 KV heads evenly"),
        (2, 8, 4, "layer 'm.0': 2 query heads do not share 4 KV heads evenly"),
        (4, 16, 2, "layer 'm.0': a query has 16 elements, and a key 8"),
    ],
)
def test_queries_that_cannot_attend_are_refused(num_heads: int, head_size: int, num_kv_heads: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        attending(num_heads, head_size, num_kv_heads)
