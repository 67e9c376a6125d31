"""Recurrent and convolution state: of the past, only the state after the last token is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from kvframe.contract import KVCacheSpec, SpecError, StateTensor, TokenRange, align_up, must_be, whole_number

Shapes = tuple[tuple[int, ...], ...]

CHECKPOINTS = ("none", "aligned", "all")
"""Where states are kept for prefix caching: at all block ends, at few, or at none."""

WHOLE_REQUEST = 1 << 30
"""Tokens of a block that is longer than any request, so that a request has a single block."""

AUTO = "auto"
"""The name for the model's dtype."""


def _as_shapes(value: Any) -> Any:
    is_nested = isinstance(value, list | tuple) and all(isinstance(shape, list | tuple) for shape in value)
    return tuple(map(tuple, value)) if is_nested else value


def _as_names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_shapes(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(shape, tuple) and shape and all(type(size) is int and size > 0 for size in shape) for shape in value
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


_shapes = must_be("a list of shapes, such as [[64, 4]]", _is_shapes)
_names = must_be("a list of dtypes, such as ['float32']", _is_names)
_density = must_be(f"one of {', '.join(map(repr, CHECKPOINTS))}", lambda value: value in CHECKPOINTS)


@attrs.frozen(kw_only=True)
class MambaSpec(KVCacheSpec):
    """The state of one recurrent or convolution layer: Mamba, Mamba-2, gated delta, short convolution.

    The state after token ``n - 1`` is live at ``n``. A request writes the state into the page of its current block. A
    full block's page is never written again: it is a checkpoint from which any number of requests continue, each in a
    page of its own for the next block. A page holds one state. With draft tokens, a running request has a second page,
    for its rollback states; without checkpoints, its only page holds all of its states.

    Attributes:
        conv_shapes: Shapes of the convolution states (``((128, 4),)``).
        recurrent_shapes: Shapes of the recurrent states.
        conv_dtypes: Their dtypes by torch's name, or ``"auto"`` for the model's; empty if all have the model's.
        recurrent_dtypes: Likewise.
        model_dtype: The model's dtype. The dtype of the cache is for keys and values only: in a state, an error adds up
            from token to token.
        checkpoints: Where states are kept for prefix caching: ``"all"``: at every block's end. ``"aligned"``: at the
            last block's end before a step's last token, and where a request's tokens differ from an earlier request's.
            ``"none"``: nowhere, for any block size.
        num_draft_tokens: Speculative tokens of a step that may be rejected; a running request keeps as many states
            before its last one.
    """

    kind: ClassVar[str] = "mamba"
    layout_fields: ClassVar[frozenset[str]] = frozenset(
        {"conv_shapes", "recurrent_shapes", "conv_dtypes", "recurrent_dtypes", "model_dtype"}
    )

    conv_shapes: Shapes = attrs.field(default=(), converter=_as_shapes, validator=_shapes)
    recurrent_shapes: Shapes = attrs.field(default=(), converter=_as_shapes, validator=_shapes)
    conv_dtypes: tuple[str, ...] = attrs.field(default=(), converter=_as_names, validator=_names)
    recurrent_dtypes: tuple[str, ...] = attrs.field(default=(), converter=_as_names, validator=_names)
    model_dtype: str = "float32"
    checkpoints: str = attrs.field(default="aligned", validator=_density)
    num_draft_tokens: int = attrs.field(default=0, validator=whole_number(0))

    def __attrs_post_init__(self) -> None:
        """Give every state a dtype, and a request a single block if there are no checkpoints."""
        if not self.conv_shapes and not self.recurrent_shapes:
            raise SpecError(
                f"{type(self).__name__} needs conv_shapes or recurrent_shapes: without them it keeps no state"
            )
        for kind, shapes in (("conv", self.conv_shapes), ("recurrent", self.recurrent_shapes)):
            dtypes = getattr(self, f"{kind}_dtypes") or (AUTO,) * len(shapes)
            if len(dtypes) != len(shapes):
                raise SpecError(
                    f"{type(self).__name__} has {len(shapes)} {kind}_shapes and {len(dtypes)} {kind}_dtypes; "
                    "give one dtype for each shape, or none"
                )
            dtypes = tuple(self.model_dtype if dtype == AUTO else dtype for dtype in dtypes)
            object.__setattr__(self, f"{kind}_dtypes", dtypes)
        if self.checkpoints == "none":
            object.__setattr__(self, "block_size", WHOLE_REQUEST)
        self.state_tensors()  # raises for a dtype that does not exist

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the last token, because the state after it is needed."""
        return ((n - 1, n),) if n else ()

    @property
    def states_per_block(self) -> int:
        """One state; without checkpoints, also one for each token that may be rejected."""
        return 1 if self.checkpoints != "none" else 1 + self.num_draft_tokens

    @property
    def num_rollback_states(self) -> int:
        """One for each token that may be rejected; without checkpoints, these states are in the request's only page."""
        return self.num_draft_tokens if self.checkpoints != "none" else 0

    def with_drafts(self, num_draft_tokens: int) -> MambaSpec:
        """Return the spec with a state for each draft token; one that has more already stays."""
        return attrs.evolve(self, num_draft_tokens=max(self.num_draft_tokens, num_draft_tokens))

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return ``conv_{i}`` and ``recurrent_{i}``, each ``[states_per_block, *shape]``."""
        return {
            f"{kind}_{index}": StateTensor((self.states_per_block, *shape), dtype)
            for kind, shapes, dtypes in (
                ("conv", self.conv_shapes, self.conv_dtypes),
                ("recurrent", self.recurrent_shapes, self.recurrent_dtypes),
            )
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        }

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
        """Return the blocks of ``[n, n + num_new_tokens)`` that get a page.

        With ``"aligned"``, these are: the block that the request continues in; the block that ends at ``branch``; the
        last block, and those before it to which a rollback may lead. These include the block before the last one: a
        request that is repeated continues there, because its last token is always computed.
        """
        size = self.block_size
        first, stop = n // size, align_up(n + num_new_tokens, size) // size
        if self.checkpoints != "aligned":
            return ((first, stop),)
        wanted = set(range(max(first, stop - self._num_last_blocks), stop))
        if n % size:
            wanted.add(first)
        if branch % size == 0 and first < branch // size <= stop:
            wanted.add(branch // size - 1)
        ranges: list[tuple[int, int]] = []
        for block in sorted(wanted):
            if ranges and ranges[-1][1] == block:
                ranges[-1] = (ranges[-1][0], block + 1)
            else:
                ranges.append((block, block + 1))
        return tuple(ranges)

    @property
    def _num_last_blocks(self) -> int:
        """The number of blocks at a step's end that get a page with ``"aligned"``."""
        return 1 + max(1, align_up(self.num_draft_tokens, self.block_size) // self.block_size)

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the block with the state after ``n - 1``, and the most blocks that the step adds, for any branch."""
        size = self.block_size
        # A partly filled block counts once: it has that state, and the step writes it.
        num_new = align_up(n + num_new_tokens, size) // size - align_up(n, size) // size
        return bool(n) + self._num_stored_of(num_new)

    def _num_stored_of(self, num_new: int) -> int:
        return min(num_new, self._num_last_blocks + 1) if self.checkpoints == "aligned" else num_new

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the peak: that of the first step, or of a step that begins at the first block's end.

        Steps of one length begin the most blocks if they start at a block's end. A later such step has no more tokens
        left than the first one.
        """
        starts = [n for n in (0, self.block_size) if n < num_tokens]
        return max((self.num_resident_blocks(n, min(max_new_tokens, num_tokens - n)) for n in starts), default=0)
