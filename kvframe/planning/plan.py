"""The cache plan: how many bytes go where, as a value that can be printed, saved and compared.

A *page* holds all of a group's layers for one block of tokens. Pages of different groups share one pool of equal
*slabs*: a slab is divided into pages of one group at a time and returns whole, so no layer is padded to another's size
(the idea of two-level paging is Jenga's, arXiv 2503.18292).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from kvframe.contract.errors import PlanError
from kvframe.contract.sizes import parse_bytes
from kvframe.contract.specs import STATE_ALIGNMENT_BYTES, TOKENS, KVCacheSpec, align_up, num_covered
from kvframe.planning.answers import Answers
from kvframe.planning.groups import Grouping, KVCacheGroup
from kvframe.planning.spec_check import check_spec_at_set_up, num_moved_blocks, peak_of

_MAX_PAGES_PER_SLAB = 64
_MAX_BLOCK_ID = 2**31 - 1


class TooLittleMemoryError(PlanError):
    """The memory does not hold one slab for each group."""


@attrs.frozen(kw_only=True)
class PlannedGroup:
    """One group's part of the plan.

    Attributes:
        index: The group's number.
        spec: The state that its layers store, and the past tokens for which they keep it.
        layers: The layers that keep state in it.
        page_bytes: Bytes of a page: one block of tokens for all these layers.
        layer_offsets: Where each layer's part of a page starts, in bytes.
        pages_per_slab: The number of pages in a slab.
        peak_blocks: The most blocks that one request of the plan's ``max_model_len`` tokens, with the longest inputs,
            ever holds.
        num_parts: How many times a page holds the layers' state, one part after the other.
        answers: The spec's checked answers about positions.
    """

    index: int
    spec: KVCacheSpec
    layers: tuple[str, ...]
    page_bytes: int
    layer_offsets: tuple[int, ...]
    pages_per_slab: int
    peak_blocks: int
    num_parts: int = 1
    answers: Answers = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(lambda self: Answers(self.spec), takes_self=True)
    )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.spec.block_size

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a page. ``layer_offsets`` count within it. A page with one part is the part itself."""
        return self.page_bytes // self.num_parts

    def keeps_all(self, num_tokens: int) -> bool:
        """Return whether it keeps all of so many tokens for the next one."""
        return num_covered(self.answers.live_ranges(num_tokens)) >= num_tokens

    @property
    def is_of_input(self) -> bool:
        """Whether it keeps state of an input, and not of the request's own tokens."""
        return self.spec.sequence != TOKENS


@attrs.frozen(kw_only=True)
class KVCachePlan:
    """The layout of the cache's memory, to the byte.

    The pool is ``total_bytes`` long. It begins with the null page (``null_bytes``), which no request owns and padding
    points to. ``num_slabs`` slabs follow. Memory that is too short for another slab is not allocated. A *block id* is a
    page's byte offset divided by ``block_id_bytes``, so block ids of every group address one pool with one stride, and
    0 is the null page.

    Attributes:
        groups: The groups; empty for a model that keeps no state.
        slab_bytes: Bytes of a slab.
        num_slabs: Slabs in the pool.
        null_bytes: Bytes before the first slab.
        block_id_bytes: Bytes per unit of a block id.
        memory_bytes: The memory that the plan was made for.
        max_model_len: The longest request, in tokens, that the plan is for.
        max_num_batched_tokens: The most tokens that one step computes.
        max_input_lens: The most tokens of each input sequence, such as an encoder's, by name.
    """

    groups: tuple[PlannedGroup, ...]
    slab_bytes: int
    num_slabs: int
    null_bytes: int
    block_id_bytes: int
    memory_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    max_input_lens: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes that a run allocates for the pool."""
        return self.null_bytes + self.num_slabs * self.slab_bytes

    @cached_property
    def alignment(self) -> int:
        """Tokens of a cached prefix are a multiple of this: whole blocks in every group of the requests' own tokens."""
        return math.lcm(*(group.block_size for group in self.groups if not group.is_of_input))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes as long as every group keeps all tokens, counted in whole layers.

        Groups of states are left out, because their bytes do not depend on the number of tokens.
        """
        return sum(-(-group.page_bytes // group.block_size) for group in self._groups_of_tokens)

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes that one more token takes at the greatest length: those of groups that keep every token for good."""
        groups = (group for group in self._groups_of_tokens if group.keeps_all(max(1, self.max_model_len - 1)))
        return sum(-(-group.page_bytes // group.block_size) for group in groups)

    @property
    def _groups_of_tokens(self) -> list[PlannedGroup]:
        return [group for group in self.groups if not group.is_of_input and not group.spec.is_per_block]

    @property
    def bytes_per_request(self) -> int:
        """The most bytes of states that a request holds, at any length."""
        state_groups = (group for group in self.groups if not group.is_of_input and group.spec.is_per_block)
        return sum(group.peak_blocks * group.page_bytes for group in state_groups)

    @property
    def bytes_per_input_token(self) -> Mapping[str, int]:
        """The bytes of one token of each input sequence, by name."""
        num_bytes: dict[str, int] = {}
        for group in self.groups:
            if group.is_of_input:
                sequence = group.spec.sequence
                num_bytes[sequence] = num_bytes.get(sequence, 0) + -(-group.page_bytes // group.block_size)
        return num_bytes

    @property
    def waste_fraction(self) -> float:
        """Share of the pool that no page can use when requests of ``max_model_len`` fill it.

        It counts the ends of slabs that are too short for a page, weighted by each group's number of slabs.
        """
        shares = [(group.peak_blocks / group.pages_per_slab, group) for group in self.groups]
        slabs = sum(share for share, _ in shares)
        if not slabs:
            return 0.0
        wasted_bytes = sum(
            share * (self.slab_bytes - group.pages_per_slab * group.page_bytes) for share, group in shares
        )
        return wasted_bytes / (slabs * self.slab_bytes)

    def peak_blocks(self, num_tokens: int, input_lens: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the most blocks per group that a request of a final length ever holds.

        ``input_lens`` are the lengths of its inputs, by sequence; None for the longest ones.
        """
        return self._most_blocks(num_tokens, self.max_num_batched_tokens, input_lens)

    def generating_blocks(
        self, num_tokens: int, input_lens: Mapping[str, int] | None = None, num_prompt_tokens: int = 0
    ) -> tuple[int, ...]:
        """Return the most blocks per group that a request holds while it generates, likewise.

        A step then computes one token, and the draft tokens for which states are planned. The blocks are fewer than
        ``peak_blocks`` if a type needs more of them while a prompt is computed, or keeps a part of the prompt, which is
        the first ``num_prompt_tokens`` tokens.
        """
        specs = [group.spec for group in self.groups]
        num_drafts = max((max(spec.num_rollback_states, spec.states_per_block - 1) for spec in specs), default=0)
        blocks = self._most_blocks(num_tokens, 1 + num_drafts, input_lens)
        return tuple(
            min(count, -(-num_tokens // group.block_size) - (num_prompt_tokens - budget) // group.block_size)
            if (budget := group.spec.prompt_budget) is not None and budget < num_prompt_tokens
            else count - num_moved_blocks(group.spec, num_tokens)
            for count, group in zip(blocks, self.groups, strict=True)
        )

    def _most_blocks(
        self, num_tokens: int, max_new_tokens: int, input_lens: Mapping[str, int] | None
    ) -> tuple[int, ...]:
        lens = self.max_input_lens if input_lens is None else input_lens
        is_planned = (num_tokens, max_new_tokens) == (self.max_model_len, self.max_num_batched_tokens)
        return tuple(
            -(-lens.get(group.spec.sequence, 0) // group.block_size)
            if group.is_of_input
            else group.peak_blocks
            if is_planned
            else peak_of(group.spec, num_tokens, max_new_tokens) + num_moved_blocks(group.spec, num_tokens)
            for group in self.groups
        )

    def num_slabs_for(self, num_blocks: Iterable[int]) -> int:
        """Return the number of slabs for ``num_blocks`` blocks (one count per group), from an empty pool."""
        return sum(-(-count // group.pages_per_slab) for count, group in zip(num_blocks, self.groups, strict=True))

    @property
    def most_slabs(self) -> int:
        """The most slabs that a pool of this layout can have, so that every page has a block id."""
        if not self.groups:
            return 0
        return (_MAX_BLOCK_ID * self.block_id_bytes - self.null_bytes) // self.slab_bytes

    def resized(self, memory: str | int) -> KVCachePlan:
        """Return a plan of the same layout for another amount of memory: with more slabs of this size, or fewer.

        Raises:
            StackError: ``memory`` is neither a number of bytes nor a size such as ``"2GiB"``.
            PlanError: The memory does not hold one slab for each group, or there are too many slabs for a block id.
        """
        memory_bytes = parse_bytes(memory)
        num_slabs = _num_slabs(memory_bytes, self.null_bytes, self.slab_bytes, self.block_id_bytes, len(self.groups))
        return attrs.evolve(self, num_slabs=num_slabs, memory_bytes=memory_bytes)

    def fits(self, num_tokens: int, input_lens: Mapping[str, int] | None = None) -> bool:
        """Return whether one request that grows to ``num_tokens`` tokens fits the pool.

        If it fits, a request that runs alone gets the pages for every step, for any division of its tokens into steps
        of at most ``max_num_batched_tokens``, and with any cached prefixes. ``input_lens`` are as for ``peak_blocks``.

        If it does not fit, then for some division a step gets no pages. This holds if the plan has one group that
        attends, or only groups of full attention and of inputs. In other plans, the groups may hold their most blocks
        at different tokens, so the check is conservative. Beside full attention, each group always holds one block less
        than is counted, so a request may be served for as many more tokens as fit into these blocks, and beside a
        chunked group for up to one chunk more: of Llama 4 Scout, 2 GiB promise 12,912 tokens in steps of 2,048, and
        serve any division of 17,040 (``tests/cache/test_fits.py``). A type that stores few blocks, such as a state,
        counts each block that a later request may continue from, and a lone request need not hold these.
        """
        if num_tokens <= self.max_model_len and self.longest_fits:
            return True
        return self.num_slabs_for(self.peak_blocks(num_tokens, input_lens)) <= self.num_slabs

    @cached_property
    def keeps_part(self) -> bool:
        """Whether a group keeps a part of each prompt (``KVCacheSpec.prompt_budget``)."""
        return any(group.spec.prompt_budget is not None for group in self.groups)

    @cached_property
    def longest_fits(self) -> bool:
        """Whether a request of ``max_model_len`` tokens with the longest inputs fits the pool; then all do."""
        return self.num_slabs_for(group.peak_blocks for group in self.groups) <= self.num_slabs

    @property
    def longest_request(self) -> int:
        """The most tokens of a request that fits alone, with the longest inputs; 0 if none fits."""
        low, high = 0, self.max_model_len + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def max_concurrency(self, num_tokens: int | None = None) -> int | None:
        """Return how many requests of ``num_tokens`` tokens, ``max_model_len`` unless given, fit at once.

        It is the number of requests that the slabs hold if each one holds the most blocks that it ever does; None if no
        state is kept (no limit).
        """
        if not self.groups:
            return None
        blocks = self.peak_blocks(self.max_model_len if num_tokens is None else num_tokens)
        return self._most_requests(blocks, blocks)

    def max_generating(self, num_tokens: int | None = None, num_prompt_tokens: int = 0) -> int | None:
        """Return how many such requests fit at once if one of them computes its prompt and the others generate.

        Some types keep a part of the prompt, which is the first ``num_prompt_tokens`` tokens.
        """
        if not self.groups:
            return None
        num_tokens = self.max_model_len if num_tokens is None else num_tokens
        generating = self.generating_blocks(num_tokens, num_prompt_tokens=num_prompt_tokens)
        return self._most_requests(generating, self.peak_blocks(num_tokens))

    def _most_requests(self, blocks: Sequence[int], last: Sequence[int]) -> int:
        """Return how many requests fit at once if one of them holds ``last`` blocks and each other one ``blocks``."""
        low, high = 0, self.num_slabs * max(group.pages_per_slab for group in self.groups) + 1
        while high - low > 1:
            middle = (low + high) // 2
            num_blocks = (count * (middle - 1) + last_count for count, last_count in zip(blocks, last, strict=True))
            if self.num_slabs_for(num_blocks) <= self.num_slabs:
                low = middle
            else:
                high = middle
        return low

    @property
    def shortest_prefix(self) -> int | None:
        """The tokens of the shortest prefix that a later request can find; None if it finds none.

        It can find multiples of it too.
        """
        is_kept = any(not group.is_of_input for group in self.groups) and self.alignment < self.max_model_len
        return self.alignment if is_kept else None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        return {
            "groups": [
                {
                    "index": group.index,
                    "spec": spec_to_dict(group.spec),
                    "layers": list(group.layers),
                    "block_size": group.block_size,
                    "page_bytes": group.page_bytes,
                    "pages_per_slab": group.pages_per_slab,
                    "peak_blocks": group.peak_blocks,
                    "generating_blocks": generating,
                }
                for group, generating in zip(self.groups, self.generating_blocks(self.max_model_len), strict=True)
            ],
            "slab_bytes": self.slab_bytes,
            "num_slabs": self.num_slabs,
            "null_bytes": self.null_bytes,
            "block_id_bytes": self.block_id_bytes,
            "memory_bytes": self.memory_bytes,
            "total_bytes": self.total_bytes,
            "bytes_per_token": self.bytes_per_token,
            "growing_bytes_per_token": self.growing_bytes_per_token,
            "bytes_per_request": self.bytes_per_request,
            "bytes_per_input_token": dict(self.bytes_per_input_token),
            "waste_fraction": self.waste_fraction,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_input_lens": dict(self.max_input_lens),
            "max_concurrency": self.max_concurrency(),
            "max_generating": self.max_generating(),
            "shortest_prefix": self.shortest_prefix,
        }


def spec_to_dict(spec: KVCacheSpec) -> dict[str, Any]:
    """Return a spec's kind and fields as plain values."""
    fields = attrs.asdict(spec)
    if getattr(spec, "format", None) is spec.kv_format:
        fields["format"] = {"name": spec.kv_format.name, **fields["format"]}
    return {"kind": spec.kind, **fields}


def plan_cache(
    grouping: Grouping,
    *,
    memory_bytes: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_input_lens: Mapping[str, int] | None = None,
    pages_per_slab: Sequence[int] | None = None,
    are_checked: bool = False,
) -> KVCachePlan:
    """Plan the pool: page and slab sizes, and how many slabs fit the memory.

    Args:
        grouping: The model's groups.
        memory_bytes: The most bytes to allocate.
        max_model_len: The longest request, in tokens.
        max_num_batched_tokens: The most tokens that one step computes.
        max_input_lens: The most tokens of each input sequence, such as an encoder's, by name.
        pages_per_slab: The number of pages of each group in a slab. Unless given, the choice that wastes least memory.
        are_checked: Whether the answers of the groups' specs were checked before, so that they are not checked again.

    Raises:
        PlanError: The memory does not hold one slab for each group, or a group keeps state of a sequence whose length
            is not given.
        SpecError: A spec's answers break the laws of cache specs.
    """
    if not are_checked:
        _check_specs(grouping.groups, max_model_len, max_num_batched_tokens, max_input_lens or {})
    input_lens = {} if max_input_lens is None else dict(max_input_lens)
    page_bytes = [group.page_bytes for group in grouping.groups]
    peaks = [_peak_blocks(group, max_model_len, max_num_batched_tokens, input_lens) for group in grouping.groups]
    if pages_per_slab is None:
        slab_bytes = _choose_slab_bytes(page_bytes, peaks, memory_bytes)
        pages_per_slab = [slab_bytes // size for size in page_bytes]
    else:
        slab_bytes = max((count * size for count, size in zip(pages_per_slab, page_bytes, strict=True)), default=0)
    block_id_bytes = math.gcd(slab_bytes, *page_bytes) if page_bytes else 1
    null_bytes = align_up(max(page_bytes, default=0), block_id_bytes)
    num_slabs = _num_slabs(memory_bytes, null_bytes, slab_bytes, block_id_bytes, len(page_bytes))
    return KVCachePlan(
        groups=tuple(
            PlannedGroup(
                index=group.index,
                spec=group.spec,
                layers=group.layers,
                page_bytes=group.page_bytes,
                layer_offsets=_offsets(group),
                pages_per_slab=count,
                peak_blocks=peak,
                num_parts=group.num_parts,
            )
            for group, count, peak in zip(grouping.groups, pages_per_slab, peaks, strict=True)
        ),
        slab_bytes=slab_bytes,
        num_slabs=num_slabs,
        null_bytes=null_bytes,
        block_id_bytes=block_id_bytes,
        memory_bytes=memory_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_input_lens=input_lens,
    )


def _num_slabs(memory_bytes: int, null_bytes: int, slab_bytes: int, block_id_bytes: int, num_groups: int) -> int:
    """Return how many slabs fit the memory; raise ``PlanError`` if they are too few, or too many."""
    num_slabs = max(0, (memory_bytes - null_bytes) // slab_bytes) if num_groups else 0
    if num_slabs < num_groups:
        raise TooLittleMemoryError(
            f"{memory_bytes} bytes hold {num_slabs} slabs of {slab_bytes} bytes, but each of the {num_groups} "
            f"groups needs one; give at least {null_bytes + num_groups * slab_bytes} bytes"
        )
    if (null_bytes + num_slabs * slab_bytes) // block_id_bytes > _MAX_BLOCK_ID:
        raise PlanError(
            f"{memory_bytes} bytes in units of {block_id_bytes} do not fit a 32-bit block id; "
            "choose a block size that is a multiple of a larger power of two"
        )
    return num_slabs


def _check_specs(
    groups: Sequence[KVCacheGroup], max_model_len: int, max_num_batched_tokens: int, input_lens: Mapping[str, int]
) -> None:
    """Check each distinct spec once; raises ``SpecError``."""
    checked_specs: list[KVCacheSpec] = []
    for spec in (spec for group in groups for spec in group.stored):
        if spec not in checked_specs:
            checked_specs.append(spec)
            if spec.sequence == TOKENS:
                check_spec_at_set_up(spec, max_model_len, max_num_batched_tokens)
            else:
                longest = input_lens.get(spec.sequence, 0)
                check_spec_at_set_up(spec, longest, longest)


def _peak_blocks(
    group: KVCacheGroup, max_model_len: int, max_num_batched_tokens: int, input_lens: Mapping[str, int]
) -> int:
    sequence = group.spec.sequence
    if sequence == TOKENS:
        moved_blocks = num_moved_blocks(group.spec, max_model_len)
        return peak_of(group.spec, max_model_len, max_num_batched_tokens) + moved_blocks
    if sequence not in input_lens:
        raise PlanError(
            f"layer {group.layers[0]!r} ({group.spec.kind}) keeps state of the sequence {sequence!r}, and the model "
            f"does not say how long that gets; give max_input_lens[{sequence!r}] (in a layer file max_{sequence}_len)"
        )
    return -(-input_lens[sequence] // group.spec.block_size)


def _offsets(group: KVCacheGroup) -> tuple[int, ...]:
    offsets = [0]
    for spec in group.stored:
        offsets.append(offsets[-1] + spec.block_bytes)
    return tuple(offsets[:-1])


def _choose_slab_bytes(page_bytes: Sequence[int], peaks: Sequence[int], memory_bytes: int) -> int:
    """Choose the slab size that wastes the least memory.

    Two kinds of waste pull in opposite directions. The end of a slab that is too short for a page is wasted; this is
    small for large slabs. Each group leaves half a slab unfilled on average; this is small for small slabs.
    """
    if not page_bytes:
        return 0
    largest = max(page_bytes)
    affordable = max(largest, memory_bytes // (2 * len(page_bytes)))
    candidates = {
        align_up(count * size, STATE_ALIGNMENT_BYTES)
        for size in set(page_bytes)
        # Also the slab size just large enough for the largest page: then only the largest page leaves an end.
        for count in (*range(1, _MAX_PAGES_PER_SLAB + 1), -(-largest // size))
        if largest <= count * size <= affordable
    } or {largest}

    def waste(slab: int) -> tuple[float, int]:
        slabs = [peak / (slab // size) for size, peak in zip(page_bytes, peaks, strict=True)]
        tail_bytes = sum(count * (slab % size) for count, size in zip(slabs, page_bytes, strict=True))
        unfilled_bytes = len(page_bytes) * slab / 2 if len(page_bytes) > 1 else 0
        return tail_bytes / (sum(slabs) * slab or 1) + unfilled_bytes / memory_bytes, slab

    return min(candidates, key=waste)
