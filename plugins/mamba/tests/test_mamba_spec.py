"""The state's live range in plain numbers, the blocks with a page, and fast derivations against the default ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_mamba import MambaSpec
from kvframe_mamba.spec import WHOLE_REQUEST
from kvframe_testing.suites import SpecTests

from kvframe import group_layers
from kvframe.contract import KVFrameError, LayerSpec, StateTensor

Blocks = tuple[tuple[int, int], ...]


def mamba(block_size: int = 4, checkpoints: str = "aligned", num_draft_tokens: int = 0, **options: Any) -> MambaSpec:
    options = {"conv_shapes": ((6, 4),), "recurrent_shapes": ((2, 3, 5),), **options}
    return MambaSpec(block_size=block_size, checkpoints=checkpoints, num_draft_tokens=num_draft_tokens, **options)


def blocks(ranges: Blocks) -> set[int]:
    return {block for start, stop in ranges for block in range(start, stop)}


@pytest.mark.parametrize(("n", "expected"), [(0, ()), (1, ((0, 1),)), (100, ((99, 100),))])
def test_the_state_after_the_last_token_is_live(n: int, expected: Blocks) -> None:
    assert expected == mamba().live_ranges(n)


def test_a_page_holds_every_state_once() -> None:
    spec = mamba(recurrent_dtypes=["float32"], model_dtype="bfloat16")
    expected = {"conv_0": StateTensor((1, 6, 4), "bfloat16"), "recurrent_0": StateTensor((1, 2, 3, 5), "float32")}
    assert expected == spec.state_tensors()


@pytest.mark.parametrize("checkpoints", ["aligned", "all"])
def test_a_checkpoint_holds_one_state_however_many_tokens_are_drafted(checkpoints: str) -> None:
    spec = mamba(num_draft_tokens=2, checkpoints=checkpoints)
    assert mamba(checkpoints=checkpoints).state_tensors() == spec.state_tensors()
    assert (1, 2) == (spec.states_per_block, spec.num_rollback_states)


def test_without_checkpoints_the_only_page_holds_one_more_state_for_each_draft_token() -> None:
    spec = mamba(num_draft_tokens=2, checkpoints="none", conv_shapes=[[6, 4], [8, 2]], recurrent_shapes=[])
    expected = {"conv_0": StateTensor((3, 6, 4), "float32"), "conv_1": StateTensor((3, 8, 2), "float32")}
    assert expected == spec.state_tensors()
    assert (3, 0) == (spec.states_per_block, spec.num_rollback_states)


@pytest.mark.parametrize("checkpoints", ["aligned", "all"])
def test_wherever_a_running_request_keeps_rollback_states_it_has_a_page_of_its_own(checkpoints: str) -> None:
    for block_size, num_draft_tokens, n, count in itertools.product((1, 2, 4, 7), (1, 3, 9), range(16), range(1, 20)):
        spec = mamba(block_size, checkpoints, num_draft_tokens)
        *_, group = group_layers([LayerSpec(name="layer", spec=spec)]).groups
        required_blocks = blocks(spec.live_blocks(n)) | blocks(spec.stored_blocks(n, count))
        assert blocks(group.spec.live_blocks(n)) | blocks(group.spec.stored_blocks(n, count)) <= required_blocks


def test_layers_of_other_shapes_share_a_group_and_other_checkpoints_do_not() -> None:
    assert mamba().group_key == mamba(conv_shapes=((9, 3),), recurrent_shapes=(), model_dtype="float16").group_key
    assert mamba().group_key != mamba(checkpoints="all").group_key
    assert mamba().group_key != mamba(num_draft_tokens=1).group_key


@pytest.mark.parametrize(
    ("n", "num_new_tokens", "branch", "expected"),
    [
        (0, 3, 0, ((0, 1),)),
        (0, 4, 0, ((0, 1),)),
        (0, 5, 0, ((0, 2),)),  # the boundary before the last token is at 4
        (0, 40, 0, ((8, 10),)),
        (0, 41, 0, ((9, 11),)),
        (0, 41, 16, ((3, 4), (9, 11))),
        (0, 41, 40, ((9, 11),)),
        (0, 41, 44, ((9, 11),)),
        (8, 33, 8, ((9, 11),)),  # it branches where the step begins: that state exists
        (9, 32, 0, ((2, 3), (9, 11))),  # and continues in its current block
        (9, 1, 0, ((2, 3),)),
        (12, 1, 0, ((3, 4),)),
    ],
)
def test_aligned_keeps_the_last_states_and_the_one_where_it_parts(
    n: int, num_new_tokens: int, branch: int, expected: Blocks
) -> None:
    assert expected == mamba().stored_blocks(n, num_new_tokens, branch)


def test_all_keeps_a_state_for_every_block() -> None:
    assert ((2, 11),) == mamba(checkpoints="all").stored_blocks(9, 32)


def test_none_has_one_block_whatever_the_block_size() -> None:
    spec = mamba(checkpoints="none")
    assert WHOLE_REQUEST == spec.block_size
    assert ((0, 1),) == spec.stored_blocks(1000, 500, 16)
    assert 1 == spec.peak_blocks(100_000, 2048)


@pytest.mark.parametrize(("num_draft_tokens", "expected"), [(1, ((8, 10),)), (4, ((8, 10),)), (5, ((7, 10),))])
def test_a_rollback_finds_the_state_of_every_token_it_may_lead_to(num_draft_tokens: int, expected: Blocks) -> None:
    assert expected == mamba(num_draft_tokens=num_draft_tokens).stored_blocks(0, 40)


def test_a_long_request_holds_a_handful_of_states() -> None:
    # The one it continues from, two at the end, one at its branch.
    assert 4 == mamba(16).peak_blocks(1_000_000, 2048)
    assert 129 == mamba(16, "all").peak_blocks(1_000_000, 2048)


class MambaTests(SpecTests):
    spec = "mamba"
    block_sizes = (1, 2, 4, 7)

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        shapes = {"conv_shapes": ((6, 4),), "recurrent_shapes": ((2, 3, 5),), "num_draft_tokens": self.num_refused}
        return [{**shapes, "checkpoints": checkpoints} for checkpoints in ("none", "aligned", "all")]


class TestMamba(MambaTests):
    pass


@pytest.mark.whole
class TestMambaWithOneDraft(MambaTests):
    num_refused = 1


class TestMambaWithThreeDrafts(MambaTests):
    num_refused = 3


@pytest.mark.whole
class TestMambaWithNineDrafts(MambaTests):
    num_refused = 9


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 60), st.integers(1, 40), st.integers(0, 12))
def test_what_is_stored_lies_in_the_step_and_holds_what_is_needed_next(
    block_size: int, num_draft_tokens: int, n: int, num_new_tokens: int, branch: int
) -> None:
    spec = mamba(block_size, "aligned", num_draft_tokens)
    stored_blocks = {
        b for start, stop in spec.stored_blocks(n, num_new_tokens, branch * block_size) for b in range(start, stop)
    }
    end = n + num_new_tokens
    assert stored_blocks <= set(range(n // block_size, -(-end // block_size)))
    # For each of the last tokens from which the request may continue, the state has a page.
    for token in range(max(n, end - 1 - num_draft_tokens), end):
        assert token // block_size in stored_blocks
    last_boundary = (end - 1) // block_size * block_size
    if last_boundary > n:
        assert last_boundary // block_size - 1 in stored_blocks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conv_shapes": (), "recurrent_shapes": ()}, "needs conv_shapes or recurrent_shapes"),
        ({"conv_shapes": [4, 6]}, "must be a list of shapes"),
        ({"conv_shapes": [[4, 0]]}, "must be a list of shapes"),
        ({"conv_dtypes": ["float32", "float32"]}, "1 conv_shapes and 2 conv_dtypes"),
        ({"conv_dtypes": "float32"}, "MambaSpec.conv_dtypes must be a list of dtypes"),
        ({"recurrent_dtypes": [["float32"]]}, "MambaSpec.recurrent_dtypes must be a list of dtypes"),
        ({"recurrent_dtypes": ["float31"]}, "float31"),
        ({"checkpoints": "dense"}, "must be one of 'none', 'aligned', 'all', not 'dense'"),
        ({"num_draft_tokens": -1}, "at least 0"),
    ],
)
def test_what_is_no_state_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(KVFrameError, match=words):
        mamba(**options)
