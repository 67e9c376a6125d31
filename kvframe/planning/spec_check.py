"""Checks the laws of a cache spec at sampled positions, before anything is allocated by its answers.

``kvframe_testing.laws`` checks every position of a short request and reports more. These checks take a few milliseconds
for each distinct spec, up to the longest request. This module imports neither NumPy nor torch.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from functools import partial
from operator import itemgetter

import attrs

from kvframe.contract.errors import SpecError
from kvframe.contract.formats import PLAIN
from kvframe.contract.masks import AttentionMask, MaskFunction
from kvframe.contract.specs import KVCacheSpec, LayerSpec, TokenRange, num_covered, union
from kvframe.planning.answers import (
    Answers,
    ask,
    ask_count,
    ask_live_ranges,
    ask_mask,
    ask_state_tensors,
    lacks,
    wrong_answer,
)

_log = logging.getLogger("kvframe")

_MANY_RANGES = 1 << 20
"""The most live ranges that a spec is asked for without a warning, to derive a peak."""
_GROWTH = 1.5
"""With this many times as many live ranges at the end as at half the length, a peak is found at the end, at once."""
_DENSE, _NUM_RANDOM, _NUM_BOUNDARIES = 64, 48, 6
_NUM_KEYS = 8
"""A mask function is asked about this many live tokens, and this many of all tokens, for each later query."""
_NUM_PARTS = 8
"""Of many live ranges, a mask function is asked about the ends of the first ones, the last ones and random ones: this
many of each."""
_SEED = 37

QUERY = "query"
"""The entry of a type with a prompt budget in which the host stores queries, and the name of its tensor."""

_MOST_REMEMBERED = 4096
_right: dict[tuple[KVCacheSpec, int, int], None] = {}
"""What was checked in this process and found right. A spec is a value: equal ones give equal answers."""


def check_spec_at_set_up(spec: KVCacheSpec, max_tokens: int, max_new_tokens: int) -> None:
    """Check a spec's answers at the first positions, around its own sizes and block ends, and at random positions.

    A spec that was found right is not checked again for the same lengths: of the longest sequence, and of the most
    tokens that one step computes. Raises ``SpecError`` with the kind, the position, the answer and the right one.
    """
    check_key = spec, max_tokens, max_new_tokens
    try:
        if check_key in _right:
            return
    except TypeError:  # a field of it cannot be hashed, so it is checked each time
        _check(spec, max_tokens, max_new_tokens)
        return
    _check(spec, max_tokens, max_new_tokens)
    if len(_right) >= _MOST_REMEMBERED:
        _right.clear()
    _right[check_key] = None


def _check(spec: KVCacheSpec, max_tokens: int, max_new_tokens: int) -> None:
    _check_state_tensors(spec)
    mask = ask_mask(spec)
    function = ask(spec, "mask_function", lambda: spec.mask_function)
    is_sparse = ask(spec, "is_sparse", lambda: spec.is_sparse)
    if is_sparse and (mask is not None or function is None):
        raise wrong_answer(spec, "is_sparse", is_sparse, "False, because only a mask_function can be sparse")
    if mask is not None and (not mask.causal or function == mask.sees):
        function = None  # ``Answers`` compares the mask itself
    derives = type(spec).live_blocks is not KVCacheSpec.live_blocks
    answers, position_before = Answers(spec), 0
    largest_need, largest_step = 0, ""
    ranges_before: tuple[TokenRange, ...] = ()
    for n in sampled_positions(spec, max_tokens):
        ranges = answers.live_ranges(n)
        revived_tokens = lacks(ranges, ranges_before, ((position_before, n),))
        if revived_tokens is not None:
            raise wrong_answer(
                spec,
                f"live_ranges({n})",
                ranges,
                f"none of the tokens from {revived_tokens[0]} to {revived_tokens[1] - 1}, which were not live at "
                f"{position_before}",
            )
        live_blocks = answers.live_blocks(n)
        if derives:
            _check_derived(spec, n, live_blocks)
        if function is not None:
            _check_mask_function(spec, function, n, ranges)
        if n < max_tokens:
            need, step = _check_blocks(spec, answers, n, min(max_new_tokens, max_tokens - n))
            if need > largest_need:
                largest_need, largest_step = need, step
        ranges_before, position_before = ranges, n
    _warn_of_many_ranges(spec, max_tokens)
    peak = peak_of(spec, max_tokens, max_new_tokens)
    if peak < largest_need:
        raise wrong_answer(
            spec,
            f"peak_blocks({max_tokens}, {max_new_tokens})",
            peak,
            f"{largest_need} at least, which {largest_step} needs",
        )


def sampled_positions(spec: KVCacheSpec, max_tokens: int) -> list[int]:
    """Return the positions at which a spec is checked, in order."""
    sizes = {size for size in attrs.astuple(spec, recurse=False) if type(size) is int}
    last_block = max_tokens // spec.block_size
    boundaries = {*range(1, _NUM_BOUNDARIES + 1), *range(last_block - 1, last_block + 2)}
    corners = {
        *sizes,
        *(size + other_size for size in sizes for other_size in sizes),
        *(block * spec.block_size for block in boundaries),
        *(1 << power for power in range(max_tokens.bit_length())),
        max_tokens,
    }
    source = random.Random(_SEED)
    positions = {
        *range(_DENSE),
        *(corner + offset for corner in corners for offset in (-1, 0, 1)),
        *(source.randint(0, max_tokens) for _ in range(_NUM_RANDOM)),
    }
    return sorted(position for position in positions if 0 <= position <= max_tokens)


def peak_of(spec: KVCacheSpec, num_tokens: int, max_new_tokens: int) -> int:
    """Return ``KVCacheSpec.peak_blocks``; raise ``SpecError`` if the answer is not a possible number of blocks."""
    question = f"peak_blocks({num_tokens}, {max_new_tokens})"
    num_blocks = -(-num_tokens // spec.block_size)
    return ask_count(spec, question, lambda: spec.peak_blocks(num_tokens, max_new_tokens), least=0, most=num_blocks)


def _warn_of_many_ranges(spec: KVCacheSpec, num_tokens: int) -> None:
    """Log a warning if a derived peak takes long, because a type has many live ranges whose number no longer grows."""
    if type(spec).peak_blocks is not KVCacheSpec.peak_blocks:
        return
    at_half, at_end = (len(ask_live_ranges(spec, n)) for n in (num_tokens // 2, num_tokens))
    num_asked = at_end * -(-num_tokens // spec.block_size)
    if num_asked > _MANY_RANGES and at_end < _GROWTH * at_half:
        _log.warning(
            "planning asks the cache spec %r for up to %s live ranges, to derive the most blocks of a request of %s "
            "tokens; to make it faster, override peak_blocks in %s.%s",
            spec.kind,
            f"{num_asked:,}",
            f"{num_tokens:,}",
            type(spec).__module__,
            type(spec).__qualname__,
        )


def _check_state_tensors(spec: KVCacheSpec) -> None:
    ask_state_tensors(spec)
    size = spec.block_size
    count = ask_count(spec, "tokens_per_entry", lambda: spec.tokens_per_entry, least=1, most=size)
    if size % count:
        raise wrong_answer(
            spec, "tokens_per_entry", count, f"a divisor of its block_size, {size}, so that a block has whole entries"
        )
    ask_count(spec, "block_bytes", lambda: spec.block_bytes, least=0, most=1 << 62)


def _check_derived(spec: KVCacheSpec, n: int, live_blocks: tuple[TokenRange, ...]) -> None:
    question = f"live_blocks({n})"
    blocks = ask(spec, question, lambda: spec.live_blocks(n))
    if blocks != live_blocks:
        raise wrong_answer(spec, question, blocks, f"{live_blocks} by its live ranges")


def _check_mask_function(spec: KVCacheSpec, function: MaskFunction, n: int, ranges: tuple[TokenRange, ...]) -> None:
    """Check that a mask function shows what is live, the query itself and nothing else. A sparse type may show less."""
    for key in (n, n + 1, n + 2, *(range(n) if n < _DENSE else _sampled_keys(n, ranges))):
        index = bisect_right(ranges, key, key=itemgetter(0)) - 1
        is_live, question = index >= 0 and key < ranges[index][1], f"mask_function({n}, {key})"
        sees = ask(spec, question, partial(_sees, function, n, key))
        if key == n:
            if not sees:
                raise wrong_answer(spec, question, False, "True, because a query sees itself")
            continue
        if is_live and not sees and not spec.is_sparse:
            right_answer = f"True, because {ranges} are live at {n}; a type that sees fewer tokens declares is_sparse"
            raise wrong_answer(spec, question, False, right_answer)
        if sees and not is_live:
            raise wrong_answer(spec, question, True, f"False, because the live ranges at {n} are {ranges}")


def _sampled_keys(n: int, ranges: tuple[TokenRange, ...]) -> list[int]:
    source = random.Random(n)
    sampled_ranges = ranges
    if len(ranges) > 3 * _NUM_PARTS:
        sampled_ranges = (*ranges[:_NUM_PARTS], *source.sample(ranges, _NUM_PARTS), *ranges[-_NUM_PARTS:])
    keys = {end + offset for part in sampled_ranges for end in part for offset in (-1, 0)} | {0, n - 1}
    keys.update(source.randrange(n) for _ in range(_NUM_KEYS))
    if ranges:
        keys.update(source.randrange(*source.choice(ranges)) for _ in range(_NUM_KEYS))
    return sorted(key for key in keys if 0 <= key < n)


def _sees(function: MaskFunction, query: int, key: int) -> bool:
    return bool(function(query, key))


def _check_blocks(spec: KVCacheSpec, answers: Answers, n: int, num_new_tokens: int) -> tuple[int, str]:
    """Check that no step needs more blocks than the spec says; return the largest need, and the step that has it."""
    size, largest_need = spec.block_size, (0, "")
    for count, branch in ((1, 0), (num_new_tokens, 0), (num_new_tokens, (n + num_new_tokens) // size * size)):
        stored_blocks = answers.stored_blocks(n, count, branch)
        need, step = num_covered(union(answers.live_blocks(n), stored_blocks)), f"a step of {count} tokens at {n}"
        num_resident_blocks = answers.num_resident_blocks(n, count)
        if need > num_resident_blocks:
            question = f"num_resident_blocks({n}, {count})"
            raise wrong_answer(spec, question, num_resident_blocks, f"{need} at least, which {step} needs")
        largest_need = max(largest_need, (need, step))
    return largest_need


def check_prompt_budget(layer: LayerSpec) -> None:
    """Raise ``SpecError`` unless tokens of a layer can be given up after the prompt.

    Args:
        layer: A layer whose type has a prompt budget.
    """
    spec, query = layer.spec, layer.query
    assert spec is not None
    budget = ask(spec, "prompt_budget", lambda: spec.prompt_budget)
    label = f"layer {layer.name!r}: its type {spec.kind!r} keeps {budget!r} tokens of a prompt"
    if type(budget) is not int or budget < 1:
        raise SpecError(f"{label}; prompt_budget must be a whole number of at least 1, or None")
    if spec.kv_format != PLAIN:
        raise SpecError(f"{label}, and is stored as {spec.kv_format.name}; its tokens are moved in the plain format")
    if spec.defines_attention or spec.mask != AttentionMask() or spec.state_tensors().keys() != {"k", "v"}:
        raise SpecError(
            f"{label}, which only a type of keys and values can whose queries see all earlier tokens: with the mask "
            "AttentionMask(), and without dense_attention"
        )
    if query is not None and (query.choice or query.relative_bias or query.alibi_slopes or query.first_token):
        raise SpecError(
            f"{label}, which get other positions, and its queries read keys by position: it has a choice, a bias by "
            "distance, or a first token"
        )
    entries = ask(spec, "entries", lambda: {name: dict(entry.state_tensors()) for name, entry in spec.entries.items()})
    shape = None if query is None else (query.num_heads, query.head_size)
    for name, tensors in entries.items():
        if name != QUERY or [*tensors] != [QUERY] or tensors[QUERY].shape[1:] != shape:
            raise SpecError(
                f"{label}, and has the entry {name!r} of {[*tensors]}; the host stores only one named {QUERY!r}, of "
                f"one tensor {QUERY!r} [block_size, *{shape}]"
            )


def num_moved_blocks(spec: KVCacheSpec, num_tokens: int) -> int:
    """Return the most blocks that the kept tokens of a prompt take.

    Args:
        spec: The type.
        num_tokens: Tokens of the prompt.

    Returns:
        The number; 0 if a request of so many tokens keeps all of them.
    """
    budget = spec.prompt_budget
    if budget is None or budget >= num_tokens:
        return 0
    # The first of them may begin within a block, and so may the last end.
    return min(-(-(budget - 1) // spec.block_size) + 1, -(-num_tokens // spec.block_size))
