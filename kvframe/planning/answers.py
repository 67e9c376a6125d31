"""Checks every answer of a cache spec: a wrong one raises an error before a live page is freed.

A cache spec is plugin code, and the cache frees pages by its answers. So the cache uses no answer that breaks the laws
of ``KVCacheSpec``. ``spec_check`` asks at many positions during set-up; ``Answers`` checks the positions that requests
reach. This module imports neither NumPy nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from kvframe.contract.errors import PluginError, SpecError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.specs import TOKENS, AttentionMask, KVCacheSpec, StateTensor, TokenRange, blocks_of

_MOST_KNOWN = 1 << 14
"""The number of positions whose answers are kept."""

Ranges = tuple[TokenRange, ...]
T = TypeVar("T")


def ask(spec: KVCacheSpec, question: str, answer: Callable[[], T]) -> T:
    """Return a spec's answer to a question in Python code (``live_ranges(37)``); raise ``SpecError`` if it fails."""
    try:
        return call(f"{_subject(type(spec))}: {question}", answer)
    except PluginError as error:
        raise SpecError(f"{error}; correct {_where(spec)}") from error.__cause__


def wrong_answer(spec: KVCacheSpec, question: str, answer: object, right_answer: str) -> SpecError:
    """Return the error for a spec whose answer breaks a law."""
    return SpecError(
        f"{_subject(type(spec))}: {question} is {safe_repr(answer)}; expected {right_answer}: correct {_where(spec)}"
    )


@cache
def _subject(kind: type[KVCacheSpec]) -> str:
    return f"the cache spec {safe_repr(kind.kind)}"


def _where(spec: KVCacheSpec) -> str:
    return f"{type(spec).__module__}.{type(spec).__qualname__}, and run kvframe_testing.laws.check_spec on it"


def ask_live_ranges(spec: KVCacheSpec, n: int) -> Ranges:
    """Return ``spec.live_ranges(n)``; raise ``SpecError`` if it raises or names tokens that are not before ``n``."""
    ranges = ask(spec, f"live_ranges({n})", partial(spec.live_ranges, n))
    if not are_ranges(ranges, 0, n):
        raise wrong_answer(
            spec, f"live_ranges({n})", ranges, f"a tuple of pairs of int, sorted, disjoint, not empty, within [0, {n})"
        )
    return ranges


def ask_mask(spec: KVCacheSpec) -> AttentionMask | None:
    """Return ``spec.mask``; raise ``SpecError`` if it raises, or is neither None nor a possible mask."""
    mask = ask(spec, "mask", lambda: spec.mask)
    if mask is None:
        return None
    if not isinstance(mask, AttentionMask):
        raise wrong_answer(spec, "mask", mask, "None or an AttentionMask")
    if mask.lookahead is not None and spec.sequence != TOKENS:
        right_answer = f"no lookahead, because a query has no place among the tokens of the {spec.sequence} sequence"
        raise wrong_answer(spec, "mask", mask, right_answer)
    return mask


def ask_state_tensors(spec: KVCacheSpec) -> Mapping[str, StateTensor]:
    """Return ``spec.state_tensors()``; raise ``SpecError`` if it raises, is wrong, or is another one the next time."""
    tensors = ask(spec, "state_tensors()", spec.state_tensors)
    if not are_state_tensors(tensors):
        raise wrong_answer(spec, "state_tensors()", tensors, STATE_TENSORS)
    second_tensors = ask(spec, "state_tensors()", spec.state_tensors)
    if second_tensors != tensors:
        raise wrong_answer(
            spec, "state_tensors()", second_tensors, f"{safe_repr(tensors)}, as when it was asked before"
        )
    return tensors


STATE_TENSORS = "a mapping of names to StateTensors whose shapes are tuples of int of at least 1"


def are_state_tensors(value: object) -> bool:
    """Return whether a value is as ``STATE_TENSORS`` says."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, StateTensor) and _is_shape(tensor.shape)
        for name, tensor in value.items()
    )


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)


def are_ranges(value: Any, first: int, last: int) -> bool:
    """Return whether a value is a tuple of sorted, disjoint, non-empty pairs of ``int`` within ``[first, last)``."""
    if not isinstance(value, tuple):
        return False
    for part in value:
        if not isinstance(part, tuple) or len(part) != 2:
            return False
        start, stop = part
        if type(start) is not int or type(stop) is not int or not first <= start < stop:
            return False
        first = stop
    return first <= last or not value


def lacks(needed_ranges: Iterable[TokenRange], *kept_ranges: Iterable[TokenRange]) -> TokenRange | None:
    """Return the first part of needed ranges that kept ranges do not cover; None if they cover all.

    Each argument is sorted.
    """
    kept_parts = sorted(part for ranges in kept_ranges for part in ranges)
    index = 0
    for start, stop in needed_ranges:
        while index < len(kept_parts) and kept_parts[index][0] <= start:
            start = max(start, min(kept_parts[index][1], stop))
            if start == stop:
                break  # the part may cover some of the next range too
            index += 1
        if start < stop:
            return start, stop
    return None


def seen_by(mask: AttentionMask, n: int) -> Ranges:
    """Return the tokens before position ``n`` that a causal mask shows to a query at ``n``."""
    ranges: Ranges
    if mask.chunk is not None:
        ranges = ((n - n % mask.chunk, n),)
    elif mask.window is None:
        ranges = ((0, n),)
    else:
        start = max(0, n - mask.window + 1)
        ranges = ((0, min(mask.num_sink_tokens, start)), (start, n))
    return tuple((start, stop) for start, stop in ranges if start < stop)


class Answers:
    """A spec's checked answers about the positions that requests reach.

    Invariant: a returned answer keeps the laws: it names past tokens only, it names no token at the next position that
    it does not name at this one, and the mask shows only live tokens.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        self._ranges: dict[int, Ranges] = {}
        self._blocks: dict[int, Ranges] = {}
        self._mask: AttentionMask | None = None
        self._has_mask = False
        self._num_checked = 0
        self._fault: SpecError | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._spec.block_size

    def mask(self) -> AttentionMask | None:
        """Return the spec's mask if it is causal, otherwise None; raise ``SpecError`` as ``ask_mask`` does."""
        if not self._has_mask:
            mask = ask_mask(self._spec)
            self._mask, self._has_mask = (mask if mask is not None and mask.causal else None), True
        return self._mask

    def num_right(self, num_tokens: int) -> int:
        """Return how many of the positions ``[0, num_tokens)`` come before the first one with a wrong answer.

        Each position is checked once for all requests.
        """
        while self._num_checked < num_tokens and self._fault is None:
            try:
                self.live_blocks(self._num_checked)
                self._num_checked += 1
            except SpecError as error:
                self._fault = error
        return min(self._num_checked, num_tokens)

    def check(self, num_tokens: int) -> None:
        """Check the live ranges at positions ``[0, num_tokens)``."""
        if self.num_right(num_tokens) < num_tokens and self._fault is not None:
            raise self._fault

    def live_blocks(self, n: int) -> Ranges:
        """Return the block index ranges ``[start, stop)`` that the live ranges at ``n`` touch, sorted and disjoint."""
        blocks = self._blocks.get(n)
        return self._ask(n) if blocks is None else blocks

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> Ranges:
        """Return ``KVCacheSpec.stored_blocks``; raise ``SpecError`` if a block that is live afterwards is missing."""
        spec, size, end = self._spec, self._spec.block_size, n + num_new_tokens
        question = f"stored_blocks({n}, {num_new_tokens}, {branch})"
        blocks = ask(spec, question, partial(spec.stored_blocks, n, num_new_tokens, branch))
        first, stop = n // size, -(-end // size)
        if not are_ranges(blocks, first, stop):
            right_answer = f"a tuple of pairs of int, sorted, disjoint, not empty, within [{first}, {stop})"
            raise wrong_answer(spec, question, blocks, right_answer)
        missing_blocks = lacks(self.live_blocks(end), blocks, self.live_blocks(n))
        if missing_blocks is not None:
            right_answer = f"block {missing_blocks[0]} among them, which is live at {end} and not at {n}"
            raise wrong_answer(spec, question, blocks, right_answer)
        return blocks

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return ``KVCacheSpec.num_resident_blocks``; raise ``SpecError`` if the answer is not a possible number."""
        question = f"num_resident_blocks({n}, {num_new_tokens})"
        num_blocks = -(-(n + num_new_tokens) // self._spec.block_size)
        return ask_count(
            self._spec, question, lambda: self._spec.num_resident_blocks(n, num_new_tokens), least=0, most=num_blocks
        )

    def _ask(self, n: int) -> Ranges:
        spec, ranges = self._spec, self.live_ranges(n)
        try:
            next_ranges = self.live_ranges(n + 1)
        except SpecError:
            next_ranges = ()  # the request that reaches the next position gets the error
        returned_tokens = lacks(next_ranges, ranges, ((n, n + 1),))
        if returned_tokens is not None:
            raise wrong_answer(
                spec,
                f"live_ranges({n})",
                ranges,
                f"token {returned_tokens[0]} among them: it is live at {n + 1}, and a token that stops being live "
                "stays so",
            )
        mask = self.mask()
        hidden_tokens = None if mask is None else lacks(seen_by(mask, n), ranges)
        if hidden_tokens is not None:
            raise wrong_answer(
                spec,
                f"live_ranges({n})",
                ranges,
                f"token {hidden_tokens[0]} among them, which its mask shows to token {n}",
            )
        blocks = blocks_of(ranges, spec.block_size)
        if len(self._blocks) >= _MOST_KNOWN:
            self._blocks.clear()
        self._blocks[n] = blocks
        return blocks

    def live_ranges(self, n: int) -> Ranges:
        """Return ``spec.live_ranges(n)``; raise ``SpecError`` if it raises or names tokens from ``n`` on."""
        ranges = self._ranges.get(n)
        if ranges is None:
            if len(self._ranges) >= _MOST_KNOWN:
                self._ranges.clear()
            ranges = ask_live_ranges(self._spec, n)
            self._ranges[n] = ranges
        return ranges


def ask_count(spec: KVCacheSpec, question: str, answer: Callable[[], int], *, least: int, most: int) -> int:
    """Return a spec's answer that is a number; raise ``SpecError`` if it fails, or is not within the limits."""
    count = ask(spec, question, answer)
    if type(count) is not int or not least <= count <= most:
        raise wrong_answer(spec, question, count, f"an int of at least {least} and at most {most}")
    return count
