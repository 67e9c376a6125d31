"""What no hit can use any more is given up first, wherever it lies; what some hit needs stays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.cache.forgetting import NEVER
from kvframe.cache.inputs import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.pruning import MOST_AT_ONCE
from kvframe.cache.usefulness import Usefulness
from kvframe.specs import ENCODER
from tests.cache_lives import KINDS
from tests.cache_model import HostCopies, live_blocks
from tests.plans import encoder, evict, evict_all, full, make_plan, masked, ranged, state

BLOCKS = 12


def make_manager(*specs: object, num_slabs: int = 600) -> KVCacheManager:
    return KVCacheManager(make_plan(*specs, num_slabs=num_slabs, max_model_len=256), max_num_seqs=4)  # type: ignore[arg-type]


def compute(manager: KVCacheManager, name: str, tokens: list[int], at_once: int = 256) -> int:
    hit = computed = manager.start(name, tokens)
    while computed < len(tokens):
        computed = min(len(tokens), computed + at_once)
        assert manager.extend(name, computed)
        manager.commit(name, tokens, computed)
    return hit


def serve(manager: KVCacheManager, tokens: list[int], at_once: int = 256) -> int:
    hit = compute(manager, "served", tokens, at_once)
    manager.free("served")
    return hit


def pages_of(manager: KVCacheManager, tokens: list[int]) -> list[list[int]]:
    """Return per group the pages by block that a request of these tokens would find."""
    manager.start("looks", [*tokens, 1])
    pages = manager.block_ids("looks")
    manager.free("looks")
    return pages


@given(data=st.data())
def test_which_pages_are_of_use_is_what_the_definition_says(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    draw = data.draw(st.randoms(use_true_random=False))
    specs = [make(**{name: draw.choice(values) for name, values in options.items()}) for make, options in kinds]
    plan = make_plan(*specs, max_model_len=64)
    groups = [group for group in plan.groups if not group.is_of_input]
    if not groups:
        return
    usefulness = Usefulness(groups, 64)
    step = plan.alignment
    stop = draw.randint(0, 24 // step) * step
    start = draw.randint(0, stop // step) * step
    pages = {
        g.index: np.array([draw.random() < 0.85 for _ in range(stop // g.block_size)], dtype=np.int32) for g in groups
    }
    next_hit = draw.choice([NEVER, stop + step, stop + 3 * step])
    uses = usefulness.uses(pages, start, stop, next_hit)

    def is_hit(n: int) -> bool:
        return all(b < len(pages[g.index]) and pages[g.index][b] for g in groups for b in live_blocks(g, n))

    hits = [n for n in range(start + step, stop + usefulness._beyond + 1, step) if is_hit(n)]
    assert uses.first_hit == min(hits, default=next_hit)
    hits += [next_hit] if next_hit != NEVER else []
    for group in groups:
        needed = {block for n in hits for block in live_blocks(group, n)}
        of_run = range(start // group.block_size, stop // group.block_size)
        expected = [bool(pages[group.index][block]) and block not in needed for block in of_run]
        assert expected == uses.useless.get(group.index, np.zeros(len(of_run), dtype=bool)).tolist()


def test_the_middle_of_a_prefix_is_given_up_with_what_only_it_was_for() -> None:
    manager = make_manager(full(), masked(window=9))
    tokens = list(range(40))
    serve(manager, tokens, at_once=4)
    windows = [pages_of(manager, tokens[:n])[1][-1] for n in (16, 24)]
    before = manager._pool.counts.cached
    evict(manager, 1, windows[0])
    assert [before[0], before[1] - 1] == manager._pool.counts.cached
    # Between two lost blocks the window is never whole any more: the one between them has no use.
    evict(manager, 1, windows[1])
    assert [before[0], before[1] - 3] == manager._pool.counts.cached
    assert 36 == manager.find(tokens)
    manager.audit()


def test_every_continuation_that_only_had_hits_with_a_lost_block_is_given_up() -> None:
    manager = make_manager(full(), masked(window=17))
    shared = list(range(40))
    long, *short = ([*shared, *range(base, base + length)] for base, length in ((1000, 60), (2000, 4), (3000, 8)))
    for tokens in (long, *short):
        serve(manager, tokens)
    lost = pages_of(manager, shared)[1][-1]
    evict(manager, 1, lost)
    assert [100, 36, 36] == [manager.find([*tokens, 1]) for tokens in (long, *short)]
    assert manager._pool.counts.cached[0] == 100 // 4
    manager.audit()


def test_what_is_held_is_given_up_when_it_is_let_go_of() -> None:
    manager = make_manager(full(), num_slabs=30)
    tokens = list(range(32))
    compute(manager, "a", tokens)
    manager.start("b", tokens, use_prefix=False)
    assert manager.extend("b", 32)
    manager.commit("b", tokens, 16)
    tokens += range(100, 116)
    assert manager.extend("b", 48)
    manager.commit("b", tokens, 48)
    first = manager.block_ids("a")[0][0]
    manager.free("a")
    evict(manager, 0, first)
    # "b" has computed the same for itself, and goes on behind what is lost.
    assert 0 == manager.find([*tokens, 1])
    manager.free("b")
    assert manager._pool.counts.cached[0]
    serve(manager, list(range(1000, 1104)))
    assert 104 == manager.find([*range(1000, 1104), 1])
    manager.audit()


def test_what_is_of_no_use_is_given_up_before_what_is() -> None:
    manager = make_manager(full(4), full(2, 2))
    first, second = list(range(16)), list(range(100, 118))
    serve(manager, first)
    serve(manager, second)
    cached = manager._pool.counts.cached
    # The second one's end, in blocks of 2 tokens, is let go of last, and no hit ends there.
    assert manager._pool.give_up_useless()
    assert [cached[0], cached[1] - 1] == manager._pool.counts.cached
    assert [16, 16] == [manager.find([*tokens[:16], 1]) for tokens in (first, second)]
    assert not manager._pool.give_up_useless()


def test_what_no_hit_can_ever_need_is_not_kept() -> None:
    manager = make_manager(full(), masked(chunk=8), masked(window=1))
    tokens = list(range(32))
    serve(manager, tokens, at_once=4)
    # A chunk's last block is needed by nobody who begins behind it; of a window of one token nothing ever is.
    assert [8, 4, 0] == manager._pool.counts.cached
    assert 32 == manager.find([*tokens, 1])


def test_states_that_no_hit_is_left_for_are_given_up() -> None:
    manager = make_manager(full(), state(every=2))
    tokens = list(range(32))
    serve(manager, tokens, at_once=8)
    assert 32 == manager.find([*tokens, 1])
    lost = pages_of(manager, tokens)[0][4]
    evict(manager, 0, lost)
    assert 16 == manager.find([*tokens, 1])
    assert [4, 4] == manager._pool.counts.cached
    manager.audit()


def test_an_input_of_which_a_part_is_lost_is_given_up_in_all_groups() -> None:
    manager = make_manager(full(), encoder(4), encoder(2))
    manager.start("a", [1, 2], inputs={ENCODER: InputSequence(10, b"x")})
    assert manager.extend("a", 2)
    manager.commit("a", [1, 2], 2)
    page = manager.block_ids("a")[2][3]
    manager.free("a")
    assert [0, 3, 5] == manager._pool.counts.cached
    evict(manager, 2, page)
    assert [0, 0, 0] == manager._pool.counts.cached
    manager.audit()


@pytest.mark.parametrize("num_continuations", [3, 3 * MOST_AT_ONCE])
def test_where_very_many_prefixes_go_on_the_next_evictions_look_at_the_others(num_continuations: int) -> None:
    manager = make_manager(full(), masked(window=17), masked(window=5), num_slabs=8000)
    shared = list(range(40))
    for each in range(num_continuations):
        serve(manager, [*shared, *range(100 + 20 * each, 120 + 20 * each)])
    before = manager._pool.counts.cached
    evict(manager, 1, pages_of(manager, shared)[1][-1])
    num_calls = 0
    while manager._pool.give_up_useless():
        num_calls += 1
    # The small window's first four blocks were for hits that the large one is lost for.
    assert before[2] - 3 * num_continuations >= manager._pool.counts.cached[2] >= before[2] - 5 * num_continuations
    assert (num_calls > 1) == (num_continuations > 2 * MOST_AT_ONCE)
    manager.audit()


def test_blocks_that_end_together_nowhere_take_no_memory_for_what_no_hit_needs() -> None:
    # Without a prefix cache, a state's block may be as long as any request, and blocks of others of any size.
    manager = make_manager(masked(5, window=8), state(2**30), masked(3, window=8))
    serve(manager, list(range(40)))
    assert 0 == manager.find([*range(40), 1])
    assert [0, 0, 0] == manager._pool.counts.cached
    manager.audit()


def test_what_is_computed_again_before_somebody_looked_at_all_prefixes_ends_the_search() -> None:
    manager = make_manager(full(), masked(window=17), masked(window=5), num_slabs=8000)
    shared = list(range(40))
    for each in range(4 * MOST_AT_ONCE):
        serve(manager, [*shared, *range(100 + 20 * each, 120 + 20 * each)])
    lost = pages_of(manager, shared)[1][-1]
    evict(manager, 1, lost)
    assert manager._tree.doubtful
    # Somebody brings back what was lost: the prefixes that are left to be looked at have everything again.
    compute(manager, "a", [*shared, 1])
    manager.free("a")
    assert 40 == manager.find([*shared, 2])
    while manager._tree.doubtful:
        manager._pool.give_up_useless()
    last = 100 + 20 * (4 * MOST_AT_ONCE - 1)
    assert 60 == manager.find([*shared, *range(last, last + 20), 1])
    manager.audit()


def test_what_a_request_puts_back_in_several_places_is_doubted_when_it_ends() -> None:
    plan = make_plan(state(2, every=1), ranged(4, window=8), num_slabs=100)
    manager = KVCacheManager(plan, max_num_seqs=4, host_pages=HostCopies(20, {}))
    stem = [7] * 24
    long = [*stem, 1, 2, 3, 4, 5, 6]
    for known in (long, [*long[:28], 8, 9], [*stem, 8, 9]):
        serve(manager, known)
    evict_all(manager)
    manager._pool.give_up_useless()
    compute(manager, "a", long[:29])
    assert manager.swap_out("a")
    evict_all(manager)
    manager._pool.give_up_useless()
    assert [] == list(manager.published())
    # It brings back what its window reaches, and no state that a hit could begin with.
    assert manager.swap_in("a", 29)
    assert manager.extend("a", 30)
    manager.commit("a", long, 30)
    manager.free("a")
    manager._pool.give_up_useless()
    assert [] == list(manager.published())


def test_a_block_that_ends_in_what_only_this_request_has_is_kept_though_it_begins_before() -> None:
    # Blocks of four tokens and of three: after five common tokens, the second block of three ends in each one's own.
    manager = make_manager(full(), masked(3, window=9))
    shared = list(range(5))
    prompts = {name: [*shared, *range(start, start + 20)] for name, start in (("first", 100), ("second", 200))}
    for name, tokens in prompts.items():
        assert 0 == manager.start(name, tokens)
        assert manager.extend(name, 7)
        manager.commit(name, tokens, 7)
    rows = np.array([manager.row(name) for name in prompts])
    for num_computed in range(8, 21):
        assert manager.extend_rows(rows, np.full(2, num_computed))
        manager.commit_rows(rows, np.full(2, num_computed))
    manager.audit()
    for name, tokens in prompts.items():
        assert 0 == manager.block_ids(name)[1][1]
        # Nine tokens from the fifth on are needed for the next one: its block is found, or nothing is.
        assert 12 == manager.find([*tokens[:12], 1])
