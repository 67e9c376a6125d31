"""A step is divided into work items for programs: completely, without overlap, in parts of about the same length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvframe_kernels.triton import attention_native
from kvframe_kernels.triton.attention_plan import ALL, Batch, Mask, Programs, Tiling, Work, planner_for

ROW, FIRST_QUERY, NUM_QUERIES, POSITION, STOP, START, PART, PART_BLOCKS = range(8)
HEADS, GROUP, CORES, ALIGNMENT = 2, 4, 24, 16


def shape(rows: int, tokens: int, **options: Any) -> Tiling:
    defaults = {"num_warps": 4, "num_stages": 3, "programs_per_core": 1, "min_split": 32, "mask_all": True}
    return Tiling(block_m=rows, block_n=tokens, **{**defaults, **options})


TILINGS = (shape(16, 16), shape(64, 16), shape(128, 16, min_split=64, mask_all=False))


def batch(query_lens: Sequence[int], seq_lens: Sequence[int], padding: int = 0, **options: Any) -> Batch:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return Batch(
        query_start_loc=starts,
        seq_lens=np.array(seq_lens, dtype=np.int32),
        seq_starts=None,
        num_tokens=int(starts[-1]) + padding,
        **{"causal": True, "max_query_len": max(query_lens), **options},
    )


def ends_of(step: Batch) -> Any:
    """Return range ends: the second half of each request's new tokens is one range."""
    ends = np.zeros(step.num_tokens, dtype=np.int32)
    for request, stop in enumerate(step.query_start_loc[1:].tolist()):
        ends[(step.query_start_loc[request] + stop) // 2 : stop] = step.seq_lens[request]
    return ends


def cut_for(step: Batch, masks: Sequence[Mask], num_cores: int = CORES) -> list[Work]:
    return planner_for(HEADS, GROUP, TILINGS, num_cores).plan(step, masks)


def cut_step(step: Batch, mask: Mask = ALL, num_cores: int = CORES) -> Work:
    (work,) = cut_for(step, [mask], num_cores)
    return work


def ranges(items: Any, programs: Programs, first: int = 0) -> tuple[Any, Any]:
    """Return the ranges that work items read, of tiles that see tokens from ``first`` on, computed as in kernels."""
    size = items[:, PART_BLOCKS] * programs.tiling.block_n
    lo = first // programs.tiling.block_n * programs.tiling.block_n + items[:, PART] * size
    return lo, np.where(size == 0, items[:, STOP], np.minimum(items[:, STOP], lo + size))


STEPS = {
    "decodes": batch([1] * 5, [3, 700, 16, 17, 90]),
    "drafts": batch([4, 3, 4], [40, 30, 900]),
    "prompts": batch([100, 37], [100, 37]),
    "mixed": batch([1, 200, 1, 9], [500, 300, 7, 2000]),
    "padded": batch([1, 20], [50, 60], padding=70),
    "without tokens": batch([1, 0, 3], [5, 9, 3]),
}


def random_step(seed: int) -> Batch:
    """Return a random step of decodes, prompts and requests without new tokens."""
    source = np.random.default_rng(seed)
    num_reqs = (1, 2, 7, 40)[seed % 4]
    query_lens = np.where(source.random(num_reqs) < 0.7, 1, source.integers(0, 300, num_reqs))
    query_lens[0] = max(query_lens[0], 1)
    seq_lens = query_lens + source.integers(0, 10 ** source.integers(1, 5), num_reqs)
    return batch(query_lens.tolist(), seq_lens.tolist(), padding=int(source.choice([0, 1, 70])))


ALL_STEPS = {**STEPS, **{f"drawn {seed}": random_step(seed) for seed in range(12)}}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ALL_STEPS)
def test_every_query_is_in_one_tile_and_sees_every_token_once(name: str, static: bool) -> None:
    step = replace(ALL_STEPS[name], static=static)
    hidden = np.minimum(step.seq_lens - np.diff(step.query_start_loc), 200).clip(0).astype(np.int32)
    for variant in (step, replace(step, seq_starts=hidden), replace(step, seq_starts=hidden, range_ends=ends_of(step))):
        check_coverage(variant)


def check_coverage(step: Batch) -> None:
    num_real = int(step.query_start_loc[-1])
    longest = int(step.seq_lens.max())
    starts = np.zeros_like(step.seq_lens) if step.seq_starts is None else step.seq_starts
    # By query and token, how often it is read: each part adds one at its start and takes it away at its end.
    changes = np.zeros((step.num_tokens, longest + 1), dtype=np.int32)
    tiles = np.zeros(step.num_tokens, dtype=int)
    work = cut_step(step)
    for programs in work.programs:
        for item in work.items(programs):
            lo, hi = ranges(item[None], programs, int(item[START]))
            queries = slice(item[FIRST_QUERY], item[FIRST_QUERY] + item[NUM_QUERIES])
            changes[queries, lo] += 1
            changes[queries, np.maximum(lo, hi)] -= 1
            tiles[queries] += item[PART] == 0
            assert item[NUM_QUERIES] * programs.heads <= programs.tiling.block_m
            assert 0 <= item[ROW] < len(step.seq_lens)
    assert (tiles == 1).all()
    coverage = changes.cumsum(1)
    for row, seq_len in enumerate(step.seq_lens.tolist()):
        first, stop = step.query_start_loc[row : row + 2].tolist()
        for query in range(first, stop):
            end = seq_len - (stop - query) + 1
            if step.range_ends is not None:
                end = max(end, int(step.range_ends[query]))
            assert (coverage[query, starts[row] : end] == 1).all()
    assert (coverage[num_real:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "first"),
    [(Mask(window=100), 900), (Mask(chunk=300), 900)],
    ids=["window", "chunk"],
)
def test_what_no_query_sees_is_not_read(mask: Mask, first: int) -> None:
    work = cut_step(batch([1], [1000]), mask)
    (programs,) = work.programs
    lo, hi = ranges(work.items(programs), programs, first)
    # Whole blocks of 16 tokens, and no part of them is empty.
    assert (first // 16 * 16, 1000) == (lo.min(), hi.max())
    assert (lo < hi).all()


def test_a_tile_reads_to_the_end_of_the_range_of_its_last_query() -> None:
    step = batch([100], [100])
    ends = np.zeros(100, dtype=np.int32)
    ends[20:71] = 71
    (programs,) = cut_step(step, num_cores=1).programs
    assert [100, 96, 64, 32] == cut_step(step, num_cores=1).items(programs)[:, STOP].tolist()
    assert [100, 96, 71, 71] == cut_step(replace(step, range_ends=ends), num_cores=1).items(programs)[:, STOP].tolist()


def test_a_batch_that_is_not_causal_sees_all_from_its_start_on() -> None:
    step = replace(batch([1], [1000], causal=False), seq_starts=np.array([500], dtype=np.int32))
    work = cut_step(step, Mask(window=100))
    (programs,) = work.programs
    items = work.items(programs)
    lo, hi = ranges(items, programs, 500)
    assert (496, 1000, 500) == (lo.min(), hi.max(), items[0, START])
    assert (lo < hi).all()


MASKS = (ALL, Mask(window=50), Mask(chunk=64), Mask(window=600), Mask(window=5000))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_work_for_many_masks_is_that_for_each_of_them(name: str, static: bool) -> None:
    step = replace(STEPS[name], static=static)
    for hidden in (None, np.minimum(step.seq_lens // 2, 200)):
        step = replace(step, seq_starts=hidden)
        for mask, work in zip(MASKS, cut_for(step, MASKS), strict=True):
            alone = cut_step(step, mask)
            assert alone.programs == work.programs
            assert alone.numbers.tolist() == work.numbers.tolist()


def test_layers_of_other_masks_share_what_is_the_same_for_them() -> None:
    step = batch([100, 1], [100, 90])
    # If no tile is split, the work is one tensor.
    full, window = cut_for(step, [ALL, Mask(window=50)], num_cores=2)
    assert full.tensor is window.tensor
    full, window, long = cut_for(step, [ALL, Mask(window=50), Mask(window=100)])
    assert full.tensor is not window.tensor
    # No sequence is longer than that window.
    assert full.tensor is long.tensor


def test_which_tensors_there_are_at_a_graphs_sizes_does_not_depend_on_the_batch() -> None:
    for seq_len in (90, 5000):
        step = batch([1, 1], [90, seq_len], static=True)
        works = cut_for(step, [ALL, Mask(window=50), Mask(window=50), ALL])
        assert 4 == len({id(work.tensor) for work in works})


def test_few_long_requests_fill_one_wave_of_programs() -> None:
    work = cut_step(batch([1, 1], [4000, 1000]))
    (programs,) = work.programs
    # Of 24 cores two programs, one for each KV head, make a wave of 12 items; all parts are of similar length.
    assert 10 <= programs.num_items <= 12
    lo, hi = ranges(work.items(programs), programs)
    assert (hi - lo).max() <= 1.3 * 5000 / 12
    assert programs.num_slots == programs.num_items


def test_where_there_are_tiles_for_all_programs_only_long_ones_are_split() -> None:
    (even,) = cut_step(batch([1] * 40, [500] * 40)).programs
    assert (40, 0) == (even.num_items, even.num_slots)
    work = cut_step(batch([1] * 40, [500] * 39 + [50_000]))
    (uneven,) = work.programs
    assert 5 <= uneven.num_slots <= 12
    assert uneven.num_slots + 39 == uneven.num_items
    # Parts come first, because their index is the slot of their result.
    assert [*range(uneven.num_slots)] == work.items(uneven)[: uneven.num_slots, PART].tolist()
    assert not work.items(uneven)[uneven.num_slots :, PART_BLOCKS].any()


def test_short_requests_are_not_split() -> None:
    (programs,) = cut_step(batch([1], [32])).programs
    assert (1, 0, 0) == (programs.num_items, programs.num_slots, programs.num_splits)


def test_a_tile_in_parts_is_joined_for_all_of_its_queries() -> None:
    work = cut_step(batch([3], [800]))
    (programs,) = work.programs
    assert 1 < programs.num_items
    assert [[0, 3, 0, programs.num_items]] == work.splits(programs).tolist()
    assert 3 == programs.split_queries


def test_long_tiles_come_first() -> None:
    work = cut_step(batch([400], [400]), num_cores=2)
    assert [400, 384, 352] == work.items(work.programs[0])[:3, STOP].tolist()


def test_decodes_and_prompts_of_a_step_have_programs_of_their_own() -> None:
    assert [64, 128] == [programs.tiling.block_m for programs in cut_step(STEPS["mixed"]).programs]
    assert [16, 128] == [programs.tiling.block_m for programs in cut_step(batch([1, 200], [500, 300])).programs]


@pytest.mark.parametrize("static", [False, True])
def test_the_largest_shape_is_for_steps_that_fill_the_device_with_it(static: bool) -> None:
    tilings = (shape(16, 16), shape(64, 16, mask_all=False), shape(256, 16, mask_all=False))
    planner = planner_for(HEADS, GROUP, tilings, CORES)
    # Each of 24 multiprocessors gets four programs, two of them for each tile of 64 queries.
    for num_tokens, rows in ((3071, 64), (3072, 256)):
        step = batch([num_tokens], [num_tokens], static=static)
        (work,) = planner.plan(step, [ALL])
        assert rows == work.programs[-1].tiling.block_m
    alone = planner_for(HEADS, GROUP, TILINGS, CORES)
    assert 128 == alone.plan(batch([70], [70]), [ALL])[0].programs[-1].tiling.block_m


def test_one_kv_head_for_more_query_heads_than_a_program_has_rows() -> None:
    (work,) = planner_for(1, 128, TILINGS, CORES).plan(batch([1, 1], [5, 9]), [ALL])
    (programs,) = work.programs
    assert (64, 64) == (programs.heads, programs.tiling.block_m)


def test_kernels_begin_to_read_at_places_of_one_alignment() -> None:
    for step in STEPS.values():
        for programs in cut_step(step).programs:
            assert 0 == programs.first_item % ALIGNMENT == programs.first_split % ALIGNMENT


FAMILIES: dict[str, list[Batch]] = {
    "decodes": [batch([1] * 4, lens, static=True) for lens in ([5] * 4, [3000, 1, 1, 1], [70_000, 40_000, 9, 9])],
    "padded decodes": [
        batch([1, 1, 0, 0], [900, 3, 0, 0], padding=2, static=True),
        batch([1] * 4, [5] * 4, static=True),
    ],
    "drafts": [batch([4] * 3, lens, static=True) for lens in ([5] * 3, [3000, 9, 9])],
    "any": [
        batch([100, 1, 1], [100, 5, 5000], padding=18, static=True, max_query_len=120),
        batch([40, 40, 40], [40, 50_000, 60], static=True, max_query_len=120),
        batch([1, 1, 0], [4, 4, 0], padding=118, static=True, max_query_len=120),
    ],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_at_a_graphs_sizes_the_shapes_are_those_of_any_batch(name: str) -> None:
    works = [cut_step(step) for step in FAMILIES[name]]
    layouts = [(work.programs, work.numbers.shape) for work in works]
    assert layouts[1:] == layouts[:-1]
    for work in works:
        for programs in work.programs:
            assert np.count_nonzero(work.items(programs)[:, PART_BLOCKS]) <= programs.num_slots
            assert work.splits(programs)[:, 1].max() <= programs.split_queries


def test_vectors_of_another_dtype_are_refused() -> None:
    step = batch([1], [5])
    with pytest.raises(ValueError, match="int32 vectors"):
        cut_step(replace(step, seq_lens=step.seq_lens.astype(np.int64)))


def test_without_a_compiler_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, name: str) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", fail)
    attention_native.load.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"cannot be built: Failed to find C compiler\.; install a C compiler"):
            planner_for(HEADS, 1, TILINGS, 7)
    finally:
        attention_native.load.cache_clear()
