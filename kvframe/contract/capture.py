"""Graph capture: for which batches a part of the metadata's path can be captured once and replayed."""

from __future__ import annotations

from enum import IntEnum


class GraphCapture(IntEnum):
    """For which batches a part keeps to shapes that are known beforehand. A chain can do what all its parts can.

    A part that is replayed sees ``CommonAttentionMetadata.static_shapes`` set, and makes tensors whose shapes follow
    from those of its input and from ``max_query_len`` alone. Which tensors it makes, and which it hands on, does not
    depend on the numbers in them either. It is called for capture and for replay alike. What a layer's ``forward``
    reads beside tensors on the device, it reads at capture only: so nothing else in a builder's metadata may differ
    from one step to the next, and host copies are not read in ``forward``.
    """

    NEVER = 0
    """Its shapes depend on the batch's values."""
    DECODE = 1
    """Batches of one token per request."""
    UNIFORM = 2
    """Batches with the same number of tokens for each request."""
    ALWAYS = 3
    """Any batch."""


class NotReplayableError(Exception):
    """A step cannot be captured, or differs from what a graph was captured of in something that it cannot be told."""
