"""Masks: which tokens a query sees, as terms that kernels know or as a function.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs.validators import optional

from kvframe.contract.errors import SpecError
from kvframe.contract.fields import whole_number

MaskFunction = Callable[[Any, Any], Any]
"""``sees(query, key)`` for the positions of a query and a key: whether the query sees the key.

The arguments are whole numbers, or arrays of them that broadcast against each other; the result has the same shape, of
booleans. So the function uses operators (``&``, ``|``, ``~``, ``<=``, ``//``, ``%``) and reads no single element. A
query always sees its own position. If the type is causal, it sees no later position.
"""


@attrs.frozen
class AttentionMask:
    """Which tokens a query attends to, in the terms that kernels understand.

    Attributes:
        causal: Whether a query sees only its own and earlier positions, or later ones too.
        window: How many tokens up to its own a query sees, its own included; None for all.
        num_sink_tokens: Tokens at the start that every later query sees, with any window.
        chunk: Tokens per chunk; a query sees its own chunk only: at ``n`` it sees ``[n - n % chunk, n]``. None for no
            chunks. Only for a causal mask without a window.
        lookahead: How many later tokens a query of a bidirectional mask with a window sees; None in other masks.
    """

    causal: bool = True
    window: int | None = attrs.field(default=None, validator=optional(whole_number(1)))
    num_sink_tokens: int = attrs.field(default=0, validator=whole_number(0))
    chunk: int | None = attrs.field(default=None, validator=optional(whole_number(1)))
    lookahead: int | None = attrs.field(default=None, validator=optional(whole_number(0)))

    def __attrs_post_init__(self) -> None:
        if (self.lookahead is not None) != (not self.causal and self.window is not None):
            raise SpecError(
                "a bidirectional mask has a window and a lookahead or neither, and a causal mask has no lookahead "
                f"(here the window is {self.window}, and the lookahead {self.lookahead})"
            )
        if self.lookahead is not None and self.num_sink_tokens:
            raise SpecError("a window in both directions has no sink tokens")
        if self.chunk is not None and (not self.causal or self.window is not None or self.num_sink_tokens):
            raise SpecError(
                "a mask of chunks is causal and has no window and no sink tokens: give the spec no mask instead"
            )

    @property
    def sees_all(self) -> bool:
        """Whether a query sees every token of its request."""
        return not self.causal and self.window is None

    @property
    def features(self) -> frozenset[str]:
        """The words of ``Capabilities.masks`` that a backend needs for it."""
        if self.lookahead is not None:
            return frozenset({"bidirectional_window"})
        names = ["causal" if self.causal else "bidirectional"]
        if self.window is not None:
            names.append("window")
        if self.num_sink_tokens:
            names.append("sink_tokens")
        if self.chunk is not None:
            names.append("chunk")
        return frozenset(names)

    def sees(self, query: Any, key: Any) -> Any:
        """Return whether queries see keys, by their positions: this mask as a ``MaskFunction``."""
        if self.window is not None and self.lookahead is not None:
            return (key > query - self.window) & (key <= query + self.lookahead)
        if not self.causal:
            return (query == query) & (key == key)
        is_seen = key <= query
        if self.chunk is not None:
            return is_seen & (key // self.chunk == query // self.chunk)
        if self.window is not None:
            in_window = key > query - self.window
            is_seen = is_seen & (in_window | (key < self.num_sink_tokens))
        return is_seen
