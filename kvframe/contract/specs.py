"""Cache specs and layer specs: what a layer keeps, and for which past tokens.

A cache spec answers one question, the *live range*: which past tokens' state must be resident to compute token
``n``. Everything else the core does is derived from that answer by code that never asks which type it is.
Nothing here imports torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvframe.contract.choice import ChoiceSpec
from kvframe.contract.errors import SpecError, shown
from kvframe.contract.fields import must_be, positive_int, whole_number
from kvframe.contract.formats import ITEM_BYTES as ITEM_BYTES
from kvframe.contract.formats import PLAIN, KVFormat, known_dtype
from kvframe.contract.formats import STATE_ALIGNMENT_BYTES as STATE_ALIGNMENT_BYTES
from kvframe.contract.formats import StateTensor as StateTensor
from kvframe.contract.formats import align_up as align_up
from kvframe.contract.growth import Growing
from kvframe.contract.masks import AttentionMask as AttentionMask
from kvframe.contract.masks import MaskFunction as MaskFunction

if TYPE_CHECKING:
    import torch

TokenRange = tuple[int, int]
"""Token positions ``[start, stop)``."""

TOKENS = "tokens"
"""A request's own tokens: the sequence that grows."""

ENCODER = "encoder"
"""The output of a request's encoder: a sequence that is complete before the first token is computed."""

RELATIVE_BIAS = "relative_bias"
"""The name of the learned tensor of a relative bias, ``[num_buckets, num_heads]``."""


def union(*ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return sorted, disjoint ranges that cover what any of ``ranges`` covers."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(itertools.chain(*ranges)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def blocks_of(ranges: Iterable[TokenRange], block_size: int) -> tuple[TokenRange, ...]:
    """Return the block index ranges that sorted token ranges touch, sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        first_block, stop_block = start // block_size, -(-stop // block_size)
        if merged and first_block <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop_block, merged[-1][1]))
        else:
            merged.append((first_block, stop_block))
    return tuple(merged)


def num_covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the total length of disjoint ranges."""
    return sum(stop - start for start, stop in ranges)


@attrs.frozen(kw_only=True)
class KVCacheSpec(Growing, ABC):
    """What one layer keeps of the past, and for how long: the base of every cache spec.

    A spec is a frozen value. Two laws hold for its live ranges, and ``kvframe_testing`` checks them:

    * *past*: ``live_ranges(n)`` is sorted, disjoint and within ``[0, n)``;
    * *forgetting*: what is not live at ``n`` is not live at any later position
      (``live(n + 1)`` is contained in ``live(n)`` and token ``n``).

    Attributes:
        block_size: Tokens per block.
    """

    kind: ClassVar[str]
    """The registered name of this type (``"sliding_window"``)."""
    layout_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that shape a block's bytes but not which tokens are live. Layers that differ only here share a group."""
    default_wrappers: ClassVar[tuple[str, ...]] = ()
    """The wrapper chain of a layer of this type, by registered name, unless the stack gives it another."""
    sequence: ClassVar[str] = TOKENS
    """Which sequence of a request it keeps state of; positions are those of this sequence. A sequence other than the
    request's own tokens is live as a whole while the request runs."""
    keeps_past: ClassVar[bool] = True
    """Whether any past token is ever live. A layer that sees only the current step is in no group."""

    block_size: int = positive_int

    @abstractmethod
    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the token ranges whose state must be resident to compute token ``n``, after tokens ``[0, n)``.

        Returns:
            Sorted, disjoint, non-empty ranges ``[start, stop)`` within ``[0, n)``.
        """

    @abstractmethod
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return the tensors of one block of one layer, by name, in the order they lie in a page."""

    @property
    def mask(self) -> AttentionMask | None:
        """The live range as a mask that kernels understand; None if no mask describes it."""
        return None

    @property
    def mask_function(self) -> MaskFunction | None:
        """The live range as a function of the positions of a query and a key; by default that of the mask.

        A type whose pattern no mask describes can give a function: backends that compile such functions then serve it.
        None if only ``live_ranges`` describes the pattern.
        """
        return None if self.mask is None else self.mask.sees

    @property
    def is_sparse(self) -> bool:
        """Whether a query may see fewer tokens than are live: those that ``mask_function`` shows.

        A token that later queries see stays live for the queries between, which do not see it: in a dilated window, or
        in blocks that a pattern chooses. Live ranges then say what is kept, and the function says what is seen. Such a
        type has a function and no ``mask``. Only backends that declare the mask ``sparse`` serve it.
        """
        return False

    @property
    def states_per_block(self) -> int:
        """How many states a page of a state layer holds, the first dimension of each of its tensors.

        The state after token ``p`` lies in the page of its block, at ``p % states_per_block``. With more than one, a
        step can be undone in part: the last tokens are dropped, as many as there are states beside the last one, and
        the request continues from the state before them. The first step of a request cannot be undone in part.
        """
        return 1

    @property
    def num_rollback_states(self) -> int:
        """How many states a running request keeps beside the one in its block's page, so that drafts can be rejected.

        A page of such a type holds one state, so a checkpoint, the page of a full block, costs one state. The other
        states lie in pages that only running requests have, and that are released at the end of their block. With
        ``states_per_block`` every page would hold several states, so a type has at most one of the two. The live range
        of such a type is the last token.
        """
        return 0

    @property
    def tokens_per_entry(self) -> int:
        """For how many tokens there is one entry: with ``m``, a request of ``n`` tokens has ``n // m`` entries.

        An entry is stored when the last of its tokens is computed, and depends on these tokens and earlier ones only. A
        block has whole entries, so ``block_size`` is a multiple of it, and a state tensor has ``block_size // m`` rows.
        Live ranges count tokens: an entry is resident while one of its tokens is live. The tokens of an unfinished
        group have no entry yet; a type that needs them keeps them in another entry of the layer.
        """
        return 1

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """What a layer of this type keeps beside its main state, by name: each has pages and a block table of its own.

        Its backends write and read them in ``attend``. The specs have no entries themselves, and keep state of
        the same sequence. Only a type that ``defines_attention`` has entries. A type with a ``prompt_budget`` may have
        one, named ``query``, in which the host stores the queries of each step; its state is one tensor, ``query``.
        """
        return {}

    @property
    def prompt_budget(self) -> int | None:
        """How many tokens a request keeps of its prompt, at most, when all of the prompt is computed; None for all.

        A longer prompt is read as a whole while it is computed. Then each layer chooses by content what it keeps
        (``choose_kept``). The chosen keys and values are moved together into pages that no other request finds, and
        become the last tokens of the prompt: later queries see them, and the tokens after them. The other pages of the
        prompt are released, but other requests still find them in the cache. What is computed later depends on the
        choice, so its blocks are not published.

        Only for keys and values in the plain format, and queries that see all earlier tokens. Every step of the layer
        has the extension ``SEQ_STARTS``. ``live_ranges`` says what may be kept, so it names all tokens.
        """
        return None

    def choose_kept(
        self,
        layer: LayerSpec,
        num_kept: int,
        state: Mapping[str, torch.Tensor],
        entries: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> torch.Tensor:
        """Choose the tokens of a prompt that a layer keeps, by their content: for a type with a ``prompt_budget``.

        Each KV head chooses for itself: if a rank has some of the heads, they choose as they do among all heads.

        Args:
            layer: The layer.
            num_kept: How many tokens each head keeps.
            state: The keys and values of the prompt, ``k`` and ``v``, each ``[num_tokens, num_kv_heads, size],
                device``. It is not written to.
            entries: For each entry of the type its state of the tokens that are live after the prompt, by name,
                ``[num_live, *shape], device``.

        Returns:
            ``[num_kv_heads, num_kept], int64, device``: positions of tokens, each once, in any order. They keep the
            order of their positions.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps whole prompts")

    def inputs(self, query: QuerySpec) -> Mapping[str, tuple[int, ...]]:
        """Return what an attention call is given beside query, key and value: shapes for each token, by name.

        Only models that give them serve a layer of such a type. Only a type that ``defines_attention`` has inputs.
        """
        return {}

    def dense_attention(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the attention of all tokens of one request, by definition: for types that no mask describes.

        A type defines it if what a query reads of the live tokens is chosen by their content, or if it has entries or
        inputs. Only backends that declare its kind serve it then. The kit compares them with this method, and so does
        a host's self-check.

        Args:
            layer: The layer, for its query side and its parameters' shapes.
            query: ``[num_tokens, num_heads, head_size], float64``: of the tokens ``0`` to ``num_tokens - 1``.
            key: ``[num_tokens, num_kv_heads, head_size], float64``.
            value: ``[num_tokens, num_kv_heads, head_size_v], float64``.
            inputs: The inputs of the type by name, each ``[num_tokens, *shape]``.

        Returns:
            ``[num_tokens, num_heads, head_size_v], float64``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no attention of its own: a mask describes it")

    @property
    def defines_attention(self) -> bool:
        """Whether the type has ``dense_attention``, so that only backends that declare its kind serve it."""
        return type(self).dense_attention is not KVCacheSpec.dense_attention

    def parameters(self, query: QuerySpec) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the learned tensors that a layer of this type attends with, by name.

        A layer runs only if its model binds all of them, in these shapes. The default is the relative bias, if the
        query side has one; a type may add tensors, such as those that make keys and values of its state.
        """
        bias = query.relative_bias
        return {} if bias is None else {RELATIVE_BIAS: (bias.num_buckets, query.num_heads)}

    def check_query(self, query: QuerySpec) -> None:
        """Refuse queries that cannot attend to what the type stores, such as heads of another size, by a ``SpecError``.

        Called when a layer is specified. So a backend that serves a type need not check shapes that no layer has. The
        default refuses nothing.
        """

    def with_drafts(self, num_draft_tokens: int) -> KVCacheSpec:
        """Return the spec for requests that compute up to so many draft tokens in a step, any of which may be rejected.

        Keys and values of rejected tokens are written again later, so a type that stores them returns itself. A type
        that stores a state returns one with as many ``num_rollback_states``, or with one more ``states_per_block``.
        """
        return self

    @property
    def kv_format(self) -> KVFormat:
        """How keys and values are stored; the plain format for a type that stores no keys and values."""
        return PLAIN

    def in_format(self, kv_format: KVFormat) -> KVCacheSpec:
        """Return the spec with the same keys and values in another format; itself if it stores no keys and values."""
        return self

    def retain_all(self) -> KVCacheSpec:
        """Return the spec that keeps the same state for every past token (what ``hybrid = false`` stores).

        A type that has no such form returns itself.
        """
        return self

    # --- derived: a type may override a method if it knows a faster way to the same answer -----------------------

    @property
    def group_key(self) -> tuple[Any, ...]:
        """What two layers must have in common to share a block table: the type and all but its layout."""
        names = (f.name for f in attrs.fields(type(self)) if f.name not in self.layout_fields)
        return (type(self).__module__, type(self).__qualname__, *((name, getattr(self, name)) for name in names))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, each tensor aligned."""
        return sum(align_up(tensor.num_bytes, STATE_ALIGNMENT_BYTES) for tensor in self.state_tensors().values())

    @property
    def is_per_block(self) -> bool:
        """Whether a block takes the same bytes however many tokens it has, like a recurrent state that sums them up."""
        try:
            longer = attrs.evolve(self, block_size=2 * self.block_size)
        except (SpecError, TypeError, ValueError):  # a type may allow few block sizes: one whose size matters
            return False
        return longer.block_bytes == self.block_bytes

    def live_blocks(self, n: int) -> tuple[tuple[int, int], ...]:
        """Return the block index ranges ``[start, stop)`` that the live ranges at ``n`` touch: sorted, disjoint."""
        return blocks_of(self.live_ranges(n), self.block_size)

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
        """Return the block index ranges that get a page when tokens ``[n, n + num_new_tokens)`` are computed.

        By default these are all blocks of these tokens. A type may keep fewer: a state that each token overwrites is
        needed at few block boundaries only. Every block that is live after the step must be among them, or must have
        been resident before. This must also hold if the last of the tokens are rejected after they were computed.

        Args:
            n: The position that is computed next.
            num_new_tokens: Tokens to compute, at least one.
            branch: A block boundary of every group from which a later request may continue: where the tokens diverge
                from those of an earlier request, or the last boundary before the last token. ``n`` or less for none.

        Returns:
            Sorted, disjoint ranges within the blocks of these tokens.
        """
        return ((n // self.block_size, -(-(n + num_new_tokens) // self.block_size)),)

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the most blocks that a request holds while tokens ``[n, n + num_new_tokens)`` are computed.

        These are the live blocks and the stored blocks, wherever the tokens diverge from an earlier request's.
        """
        live, end = self.live_blocks(n), n + num_new_tokens
        blocks = union(live, self.stored_blocks(n, num_new_tokens))
        left_out = n // self.block_size
        for start, stop in blocks:
            left_out = stop if start <= left_out else left_out
        branch = (left_out + 1) * self.block_size
        if branch <= end:
            blocks = max(blocks, union(live, self.stored_blocks(n, num_new_tokens, branch)), key=num_covered)
        return num_covered(blocks)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the most blocks that a request holds at once until it has ``num_tokens`` tokens.

        One step computes at most ``max_new_tokens`` of them. A type that stores all blocks of a step is asked at few
        positions, because of the law of forgetting.
        """
        if type(self).stored_blocks is KVCacheSpec.stored_blocks:
            return self._peak_of_steps_in(num_tokens, max_new_tokens) if num_tokens > 0 else 0
        steps: Iterable[tuple[int, int]] = ((n, min(max_new_tokens, num_tokens - n)) for n in range(num_tokens))
        if self.block_size < num_tokens:
            # A step that ends within the last block may store more blocks than one that ends with it.
            steps = itertools.chain(steps, self._steps_into_last_block(num_tokens, max_new_tokens))
        return max(itertools.starmap(self.num_resident_blocks, steps), default=0)

    def _peak_of_steps_in(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the peak of a type that stores all blocks of a step.

        While a step begins within one block, the number of live blocks before that block only falls. So of all steps
        that end in the same block, the first one holds the most. From one block to the next, the live blocks before it
        become at most one more. So a range of blocks is left out if even that could not exceed the peak found so far.
        """
        size, last_block = self.block_size, (num_tokens - 1) // self.block_size

        def alive_before(block: int) -> int:
            return self.num_resident_blocks(block * size, 1) - 1

        def held_from(block: int, alive: int) -> int:
            first_token, end = block * size, -(-min(block * size + max_new_tokens, num_tokens) // size)
            ends_later = end * size - max_new_tokens + 1  # where the first step begins that ends in the next block
            if end * size < num_tokens and ends_later < first_token + size:
                return max(alive + end - block, self.num_resident_blocks(ends_later, max_new_tokens))
            return alive + end - block

        most_new = -(-(max_new_tokens + size - 1) // size)
        peak = max(held_from(0, 0), held_from(last_block, alive_before(last_block)))
        block_ranges = [(0, last_block, 0)]
        while block_ranges:
            first_block, stop, alive = block_ranges.pop()
            if stop - first_block < 2 or alive - first_block + min(stop - 1 + most_new, last_block + 1) <= peak:
                continue
            middle = (first_block + stop) // 2
            alive_there = alive_before(middle)
            peak = max(peak, held_from(middle, alive_there))
            block_ranges += [(first_block, middle, alive), (middle, stop, alive_there)]
        return peak

    def _steps_into_last_block(self, num_tokens: int, max_new_tokens: int) -> Iterator[tuple[int, int]]:
        """Go through steps, starts and counts, that end less than a block before the last token; near block ends."""
        size = self.block_size
        for end in range(num_tokens - size + 1, num_tokens):
            min_start = max(0, end - max_new_tokens)
            near = (
                block * size + offset for block in range(min_start // size, end // size + 1) for offset in (-1, 0, 1)
            )
            yield from ((n, end - n) for n in {min_start, end - 1, *near} if min_start <= n < end)


@functools.lru_cache(maxsize=1 << 10)
def _stored_in(kv_format: KVFormat, *sizes: Any) -> Mapping[str, StateTensor]:
    """Ask a format, once for each of the sizes: pages are laid out by its answer, so a later one must not differ."""
    return kv_format.state_tensors(*sizes)


@attrs.frozen(kw_only=True)
class AttentionSpec(KVCacheSpec, Growing, ABC):
    """State that is one key and one value vector per token and KV head: the base of attention types.

    Attributes:
        num_kv_heads: Key/value heads.
        head_size: Elements of a key vector.
        head_size_v: Elements of a value vector; as ``head_size`` unless given.
        dtype: Element type of the keys and values as attention reads them, by torch's name.
        format: How a page stores them.
    """

    layout_fields: ClassVar[frozenset[str]] = frozenset({"num_kv_heads", "head_size", "head_size_v", "dtype", "format"})

    num_kv_heads: int = positive_int
    head_size: int = positive_int
    head_size_v: int = attrs.field(
        default=attrs.Factory(lambda self: self.head_size, takes_self=True), validator=whole_number(1)
    )
    dtype: str = attrs.field(default="float32", validator=known_dtype)
    format: KVFormat = attrs.field(
        default=PLAIN, validator=must_be("a KVFormat", lambda value: isinstance(value, KVFormat))
    )

    @property
    def kv_format(self) -> KVFormat:
        """The format that it was given."""
        return self.format

    def in_format(self, kv_format: KVFormat) -> AttentionSpec:
        """Return the spec with the same keys and values in another format."""
        return attrs.evolve(self, format=kv_format)

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return what the format makes of the sizes."""
        return _stored_in(self.format, self.block_size, self.num_kv_heads, self.head_size, self.head_size_v, self.dtype)

    def check_query(self, query: QuerySpec) -> None:
        """Refuse queries whose heads or choices cannot share the key heads evenly, or of another size than keys."""
        if query.num_heads % self.num_kv_heads:
            raise SpecError(
                f"{query.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly; the query heads must "
                "be a multiple of the KV heads"
            )
        if query.head_size != self.head_size:
            raise SpecError(
                f"a query has {query.head_size} elements, and a key {self.head_size}; they must be equal, since each "
                "score is their product"
            )
        if query.choice is not None and self.num_kv_heads % query.choice.num_choosers:
            raise SpecError(
                f"{query.choice.num_choosers} choices for each query do not belong to {self.num_kv_heads} KV heads "
                "evenly; the KV heads must be a multiple of num_choosers"
            )


@attrs.frozen(kw_only=True)
class RelativeBias:
    """A learned number per head that is added to each score, by the distance of key and query in buckets.

    The buckets are those of T5 (arXiv 1910.10683): one for each small distance, then logarithmically wider ones. The
    layer's parameter ``relative_bias: [num_buckets, num_heads]`` holds the numbers.

    Attributes:
        num_buckets: Buckets, for both directions together; at least two for each.
        max_distance: From this distance on all keys fall into the last bucket. More than the distances with a bucket
            of their own, which are half of a direction's buckets.
        bidirectional: Whether keys after the query have buckets of their own.
    """

    num_buckets: int = positive_int
    max_distance: int = positive_int
    bidirectional: bool = False

    def __attrs_post_init__(self) -> None:
        num_exact = self.num_buckets // (4 if self.bidirectional else 2)
        if num_exact < 1 or self.max_distance <= num_exact:
            raise SpecError(
                f"a relative bias of {self.num_buckets} buckets{' for two directions' if self.bidirectional else ''} "
                f"up to a distance of {self.max_distance} has no bucket of one distance or none of several: give at "
                f"least {4 if self.bidirectional else 2} buckets and a distance of more than {num_exact}"
            )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_slopes(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_choice(value: ChoiceSpec | Mapping[str, Any] | None) -> ChoiceSpec | None:
    return ChoiceSpec(**value) if isinstance(value, Mapping) else value


def _as_relative_bias(value: RelativeBias | Mapping[str, Any] | None) -> RelativeBias | None:
    return RelativeBias(**value) if isinstance(value, Mapping) else value


def _table(kind: type) -> Any:
    return attrs.validators.optional(must_be("a table", lambda value: isinstance(value, kind)))


_flag = must_be("true or false", lambda value: isinstance(value, bool))


@attrs.frozen(kw_only=True)
class QuerySpec:
    """The query side of an attention layer: what a backend must support beyond the cache.

    Attributes:
        num_heads: Query heads, a multiple of the KV heads.
        head_size: Elements of a query vector.
        scale: Factor on the query-key products, before soft cap and softmax.
        soft_cap: ``c`` in ``c * tanh(score / c)``, more than 0; None for none.
        has_sinks: Whether each head adds a learned logit to the softmax's denominator (``sinks: [num_heads]``).
        relative_bias: What is added to the scores, after scale and soft cap, by distance; None for nothing.
        alibi_slopes: ALiBi (arXiv 2108.12409): ``alibi_slopes[h] * distance`` is subtracted from the scores of head
            ``h``, after scale and soft cap; the distance of a key from its query is a number of tokens, at least 0, in
            both directions. A slope per head; None for nothing. Not beside a relative bias.
        first_token: The first token of a request for which the layer is computed, and whose key its queries see. If it
            is not 0, every step of the layer has the extension ``SEQ_STARTS``, so backends and wrappers must take it.
        choice: The form of the choices by content that come with each call: a query reads only the chosen ones of the
            tokens that its mask shows. None for a layer that reads all of them.
        merged: Whether the model merges the layer's output with other attention of the same queries, so that the
            backend must return the log-sum-exp.
    """

    num_heads: int = positive_int
    head_size: int = positive_int
    scale: float = attrs.field(validator=must_be("a finite number", _is_finite))
    soft_cap: float | None = attrs.field(
        default=None,
        validator=must_be(
            "a finite number of more than 0, or None for no cap",
            lambda value: value is None or (_is_finite(value) and value > 0),
        ),
    )
    has_sinks: bool = attrs.field(default=False, validator=_flag)
    relative_bias: RelativeBias | None = attrs.field(
        default=None, converter=_as_relative_bias, validator=_table(RelativeBias)
    )
    alibi_slopes: tuple[float, ...] | None = attrs.field(default=None, converter=_as_slopes)
    first_token: int = attrs.field(default=0, validator=whole_number(0))
    choice: ChoiceSpec | None = attrs.field(default=None, converter=_as_choice, validator=_table(ChoiceSpec))
    merged: bool = attrs.field(default=False, validator=_flag)

    def __attrs_post_init__(self) -> None:
        slopes = self.alibi_slopes
        if self.choice is not None and (slopes is not None or self.relative_bias is not None):
            raise SpecError("QuerySpec has a choice and a bias by distance; chosen tokens are read without one")
        if slopes is None:
            return
        if not isinstance(slopes, tuple) or len(slopes) != self.num_heads or not all(map(_is_finite, slopes)):
            raise SpecError(
                f"QuerySpec.alibi_slopes must be a finite number for each of {self.num_heads} heads, not "
                f"{shown(slopes)}"
            )
        if self.relative_bias is not None:
            raise SpecError("QuerySpec has a relative_bias and alibi_slopes; a layer adds only one of them to scores")


@attrs.frozen(kw_only=True)
class LayerSpec:
    """One layer of a model, as the contract sees it.

    Attributes:
        name: Unique in the model (``"model.layers.3.self_attn"``).
        spec: What it keeps; None for a layer that keeps nothing and is in no group.
        query: The query side; None for a layer that does not attend: the model computes it, on the pages it is given.
        shares_with: The layer whose cache this one reads instead of keeping its own; None for none.
        entry_of: The layer of which this is an entry: one more thing that it keeps. Its name is that layer's name, a
            slash, and the entry's own name. It does not attend. None for a layer.
    """

    name: str
    spec: KVCacheSpec | None
    query: QuerySpec | None = None
    shares_with: str | None = None
    entry_of: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.entry_of is not None and (self.query is not None or not self.name.startswith(f"{self.entry_of}/")):
            raise SpecError(
                f"{self.name!r} is an entry of layer {self.entry_of!r}: it must be named {self.entry_of}/… and have no "
                "query side"
            )
        if self.spec is None or self.query is None:
            return
        try:
            self.spec.check_query(self.query)
        except SpecError as error:
            raise SpecError(f"layer {self.name!r}: {error}") from error
        if self.spec.sequence == TOKENS:
            return
        if self.query.choice is not None:
            raise SpecError(
                f"layer {self.name!r} reads chosen tokens and attends to the {self.spec.sequence} sequence; choices "
                "are made of a request's own tokens"
            )
        for feature, has_feature in (
            ("a relative bias", self.query.relative_bias is not None),
            ("ALiBi slopes", self.query.alibi_slopes is not None),
        ):
            if has_feature:
                raise SpecError(
                    f"layer {self.name!r} has {feature} and attends to the {self.spec.sequence} sequence, to whose "
                    "tokens a query has no distance"
                )

    @property
    def entry(self) -> str | None:
        """The name of the entry within its layer; None for a layer."""
        return None if self.entry_of is None else self.name.removeprefix(f"{self.entry_of}/")
