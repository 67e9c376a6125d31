"""``KVCachePlan.fits``: what it promises is served with any division into steps; one token more is not, with some.

A plan counts the most blocks that each group ever holds. If groups hold most at different tokens, a little more may be
served: one block of each window and each state, and the rest of a chunk. For types that store few blocks, such as
states, it counts the blocks that a later request may continue from, for any branch of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st
from kvframe_testing.audit import audit

from kvframe import Setup, Stack, load_plugins, plan_cache
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import RequestError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.plan import KVCachePlan
from tests.cache.plans import encoder, full, make_plan, masked, ranged, rollback, state

MAX_LEN = 40
SCOUT = Path(__file__).parents[2] / "examples" / "layers" / "llama_4_scout.toml"


sizes, heads = st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 5])
spans = st.integers(1, 20)
dense: st.SearchStrategy[KVCacheSpec] = st.one_of(
    st.builds(full, sizes, heads),
    st.builds(masked, sizes, heads, window=spans),
    st.builds(masked, sizes, heads, window=spans, num_sink_tokens=st.integers(1, 6)),
    st.builds(masked, sizes, heads, chunk=spans),
    st.builds(ranged, sizes, heads, window=spans),
)
windows = st.one_of(st.builds(full, sizes, heads), st.builds(masked, sizes, heads, window=spans))
specs = st.one_of(
    dense,
    st.builds(state, sizes),
    st.builds(state, sizes, every=st.integers(1, 3)),
    st.builds(state, sizes, num_drafts=st.integers(1, 3)),
    st.builds(rollback, sizes, num_states=st.integers(1, 3)),
)


@st.composite
def plans(
    draw: st.DrawFn,
    of: st.SearchStrategy[KVCacheSpec] = specs,
    most_groups: int = 3,
    groups: Sequence[KVCacheSpec] = (),
) -> KVCachePlan:
    of_groups = groups or draw(st.lists(of, min_size=1, max_size=most_groups))
    plan = make_plan(
        *of_groups,
        num_slabs=draw(st.integers(1, 8)),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 16])),
    )
    assume(plan.num_slabs >= len(plan.groups))
    return plan


def longest(plan: KVCachePlan) -> int:
    """Return the most tokens that the plan promises; no longer request fits."""
    fitting = [n for n in range(1, MAX_LEN + 1) if plan.fits(n)]
    assert [*range(1, len(fitting) + 1)] == fitting
    return len(fitting)


def chunks(num_tokens: int, size: int) -> list[int]:
    return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]


def divisions(num_tokens: int, most: int) -> Iterator[list[int]]:
    """Yield divisions: a prompt of each length in the largest chunks, then decodes; and a first chunk of each size."""
    for prompt in range(num_tokens + 1):
        yield [*chunks(prompt, most), *[1] * (num_tokens - prompt)]
    for first in range(1, min(most, num_tokens) + 1):
        yield [first, *chunks(num_tokens - first, most)]


def is_served(
    plan: KVCachePlan, division: Sequence[int], *, prefix_caching: bool = False, encoder_len: int = 0
) -> bool:
    """Return whether a lone request gets the blocks for each of its steps."""
    manager = KVCacheManager(plan, max_num_seqs=1, prefix_caching=prefix_caching)
    tokens = [7] * sum(division)
    inputs = {ENCODER: InputSequence(encoder_len, b"audio")} if encoder_len else {}
    computed = manager.start("one", tokens, inputs=inputs)
    for size in division:
        stop = max(computed, min(computed + size, len(tokens)))
        if not manager.extend("one", stop):
            return False
        manager.commit("one", tokens, stop)
        computed = stop
    audit(manager)
    return True


@given(plan=plans(), data=st.data())
def test_all_requests_but_one_may_hold_what_they_need_to_generate(plan: KVCachePlan, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, max(1, longest(plan))))
    assume(plan.fits(num_tokens))
    count = plan.max_generating(num_tokens) or 0
    assert count >= (plan.max_concurrency(num_tokens) or 0)
    manager = KVCacheManager(plan, max_num_seqs=max(1, min(count, 8)), prefix_caching=False)
    lens: dict[str, int] = {}

    def grow(name: str, stop: int) -> None:
        assert manager.extend(name, stop)
        manager.commit(name, [7] * num_tokens, stop)
        lens[name] = stop

    for index in range(min(count, 8)):
        prompt = data.draw(st.integers(1, num_tokens))
        manager.start(str(index), [7] * num_tokens)
        for start in range(0, prompt, plan.max_num_batched_tokens):
            # The others generate beside each chunk.
            for name, known in lens.items():
                grow(name, min(known + 1, num_tokens))
            grow(str(index), min(start + plan.max_num_batched_tokens, prompt))


@given(plan=plans(), data=st.data())
def test_what_fits_is_served_in_any_division_into_steps(plan: KVCachePlan, data: st.DataObject) -> None:
    num_tokens = longest(plan)
    assume(num_tokens)
    for _ in range(4):
        division: list[int] = []
        while sum(division) < num_tokens:
            division.append(data.draw(st.integers(1, min(plan.max_num_batched_tokens, num_tokens - sum(division)))))
        assert is_served(plan, division, prefix_caching=data.draw(st.booleans()))
    for division in divisions(num_tokens, plan.max_num_batched_tokens):
        assert is_served(plan, division)


def is_refused(plan: KVCachePlan, num_tokens: int, encoder_len: int = 0) -> bool:
    return any(
        not is_served(plan, division, encoder_len=encoder_len)
        for division in divisions(num_tokens, plan.max_num_batched_tokens)
    )


@given(plan=st.one_of(plans(dense, most_groups=1), plans(st.builds(full, sizes, heads))))
def test_one_token_more_than_fits_is_not_served_in_some_division(plan: KVCachePlan) -> None:
    num_tokens = longest(plan) + 1
    assume(num_tokens <= MAX_LEN)
    assert is_refused(plan, num_tokens)


@given(plan=plans(windows))
def test_of_groups_that_hold_most_at_different_tokens_one_block_more_is_not_served(plan: KVCachePlan) -> None:
    num_tokens = longest(plan) + plan.alignment
    assume(num_tokens <= MAX_LEN)
    assert is_refused(plan, num_tokens)


@given(first=st.builds(full, sizes, heads), of_input=st.builds(encoder, sizes, heads), data=st.data())
def test_beside_an_input_one_token_more_than_fits_is_not_served(
    first: KVCacheSpec, of_input: KVCacheSpec, data: st.DataObject
) -> None:
    plan, encoder_len = data.draw(plans(groups=(first, of_input))), data.draw(st.integers(1, 24))
    lens = {ENCODER: encoder_len}
    num_tokens = sum(plan.fits(n, lens) for n in range(1, MAX_LEN + 1)) + 1
    assume(num_tokens <= MAX_LEN)
    assert is_refused(plan, num_tokens, encoder_len)
    assert num_tokens == 1 or not is_refused(plan, num_tokens - 1, encoder_len)


def least_held(plan: KVCachePlan, num_tokens: int) -> list[int]:
    """Return the blocks of each group that some division needs at once: all of full attention, and for the other groups
    one block less than they ever hold."""
    peaks = zip(plan.groups, plan.peak_blocks(num_tokens), strict=True)
    return [blocks - (group.spec.kind != "full_attention") for group, blocks in peaks]


@given(first=st.builds(full, sizes, heads), others=st.lists(specs, min_size=1, max_size=2), data=st.data())
def test_with_one_block_less_of_each_further_group_more_than_fits_is_not_served_at_the_end_of_a_chunk(
    first: KVCacheSpec, others: list[KVCacheSpec], data: st.DataObject
) -> None:
    plan = data.draw(plans(groups=(first, *others)))
    chunks = [group.spec.mask.chunk for group in plan.groups if group.spec.mask is not None and group.spec.mask.chunk]
    beyond = (n for n in range(1, MAX_LEN + 1) if plan.num_slabs_for(least_held(plan, n)) > plan.num_slabs)
    num_tokens = next(beyond, MAX_LEN) + math.lcm(*chunks) if chunks else next(beyond, MAX_LEN + 1)
    assume(num_tokens <= MAX_LEN)
    assert is_refused(plan, num_tokens)


def test_a_chunk_that_ends_later_leaves_room_for_a_few_tokens_more() -> None:
    plan = make_plan(full(1, 3), masked(4, chunk=16), num_slabs=6, max_model_len=40, max_num_batched_tokens=1)
    assert [16, 17, 18, 19, 20] == [n for n in range(longest(plan), 30) if not is_refused(plan, n)]


def test_of_llama_4_scout_less_than_a_chunk_more_is_served_than_fits() -> None:
    stack = Stack.from_mapping({"model": {"device": "cpu", "dtype": "bfloat16"}})
    grouping = Setup.of(read_layer_file(SCOUT), stack, load_plugins().registry).grouping
    plan = plan_cache(grouping, memory_bytes=2 << 30, max_model_len=32_768, max_num_batched_tokens=2_048)
    assert (True, False) == (plan.fits(12_912), plan.fits(12_913))

    def needs(start: int, stop: int) -> int:
        return plan.num_slabs_for(group.spec.num_resident_blocks(start, stop - start) for group in plan.groups)

    # The first step that gets no pages ends later than 17,040 tokens.
    assert plan.num_slabs >= max(needs(start, min(start + 2_048, 17_040)) for start in range(17_040))
    assert plan.num_slabs < needs(17_041 - 2_048, 17_041)


@given(plan=plans(), others=st.integers(1, 6), data=st.data())
def test_what_fits_is_served_after_others_filled_the_pool(plan: KVCachePlan, others: int, data: st.DataObject) -> None:
    # Freed requests left cached blocks all over the pool.
    num_tokens = longest(plan)
    assume(num_tokens)
    manager = KVCacheManager(plan, max_num_seqs=2)
    for index in range(others):
        tokens = [index] * data.draw(st.integers(1, num_tokens))
        name = f"other{index}"
        computed = manager.start(name, tokens)
        for stop in range(computed + 1, len(tokens) + 1):
            assert manager.extend(name, stop)
            manager.commit(name, tokens, stop)
        manager.free(name)
    tokens = [99] * num_tokens
    computed = manager.start("one", tokens)
    while computed < num_tokens:
        stop = computed + data.draw(st.integers(1, min(plan.max_num_batched_tokens, num_tokens - computed)))
        assert manager.extend("one", stop)
        manager.commit("one", tokens, computed := stop)
    audit(manager)


@given(plan=plans(), pinned=st.lists(st.integers(1, 12), max_size=3), data=st.data())
def test_the_longest_request_is_served_beside_whatever_pins_are_let_in(
    plan: KVCachePlan, pinned: list[int], data: st.DataObject
) -> None:
    assume(plan.fits(MAX_LEN))
    manager = KVCacheManager(plan, max_num_seqs=2)
    for index, count in enumerate(pinned):
        tokens = [index] * (count + 1)
        name = f"pinned{index}"
        computed = manager.start(name, tokens)
        for stop in range(computed + 1, len(tokens) + 1):
            if not manager.extend(name, stop):
                break
            manager.commit(name, tokens, stop)
        manager.free(name)
        try:
            manager.pin(tokens)
        except RequestError:
            continue
    tokens = [99] * MAX_LEN
    computed = manager.start("one", tokens, use_prefix=False)
    while computed < MAX_LEN:
        stop = computed + data.draw(st.integers(1, min(plan.max_num_batched_tokens, MAX_LEN - computed)))
        assert manager.extend("one", stop)
        manager.commit("one", tokens, computed := stop)
    audit(manager)
