"""Graph capture: for which batches a part of the metadata's path can be captured once and replayed."""

from __future__ import annotations

from enum import IntEnum


class GraphCapture(IntEnum):
    """For which batches a wrapper or builder makes tensors of shapes that are known before it runs.

    A chain supports what all of its parts support. A part is called for capture and for replay alike, with
    ``CommonAttentionMetadata.static_shapes`` set. It must then make tensors whose shapes follow from the shapes of its
    input and from ``max_query_len`` alone, and the numbers in its input must not decide which tensors it makes or
    passes on. A layer's ``forward`` runs only at capture. Therefore all values that are not tensors on the device must
    be equal in every step, and ``forward`` must not read copies on the host.
    """

    NEVER = 0
    """No batch, because its shapes depend on values."""
    DECODE = 1
    """Batches of one token per request."""
    UNIFORM = 2
    """Batches with the same number of tokens for each request."""
    ALWAYS = 3
    """Any batch."""


class NotReplayableError(Exception):
    """A step cannot be captured, or differs from the captured step in more than the values of tensors."""
