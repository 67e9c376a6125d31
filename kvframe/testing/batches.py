"""Batches of every kind, with lengths around the ends of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from kvframe.testing.case import Request


def backend_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that attention has to be computed for, by name."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 41})
    return {
        "prefill": tuple(Request(0, length) for length in ends),
        "extend": tuple(Request(length, new) for length in ends for new in (2, block_size + 1)),
        "decode": tuple(Request(length, 1) for length in (0, *ends)),
        "mixed": (Request(41, 1), Request(0, 19), Request(23, 7), Request(block_size, 1), Request(0, 1)),
        "uneven": (Request(300, 1), Request(9, 140), Request(2, 1), Request(0, 3)),
    }


def wrapper_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that a wrapper has to transform, by name; a request may have no new tokens."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 2})
    return {
        "decode": tuple(Request(end, 1) for end in (0, *ends)),
        "later_decode": tuple(Request(2 * end + 1, 1) for end in ends),
        "drafts": tuple(Request(end, 3, 3) for end in ends),
        "later_drafts": tuple(Request(end + 2, 3, 3) for end in ends[:2]),
        "prefill": tuple(Request(0, end) for end in ends),
        "unfinished": tuple(Request(end, end, 0) for end in ends),
        "cached_prefix": tuple(Request(end, new) for end in ends for new in (2, block_size + 1)),
        "all_rows": (Request(0, 9, 9), Request(5, block_size, 1)),
        "mixed": (
            Request(4 * block_size, 1),
            Request(0, 2 * block_size + 3, 0),
            Request(block_size + 1, 7),
            Request(5, 3, 3),
        ),
        "without_tokens": (Request(5, 2), Request(block_size + 3, 0, 0), Request(0, 4), Request(7, 0, 0)),
    }


HIDDEN_STARTS: Mapping[str, tuple[Request, ...]] = {
    "hidden_starts": (
        Request(41, 1, num_hidden=5),
        Request(23, 7, num_hidden=23),
        Request(0, 4),
        Request(18, 2, num_hidden=17),
    )
}
"""Batches whose first tokens are hidden, for backends that honour such an extension."""

PARTLY_GENERATING: Mapping[str, tuple[Request, ...]] = {
    "draft_tokens": (Request(41, 4, 4), Request(0, 5, 1), Request(16, 2, 2), Request(9, 1), Request(0, 6, 6)),
    "unfinished": (Request(41, 1), Request(0, 19, 0), Request(23, 7, 0), Request(16, 18)),
    "all_unfinished": (Request(0, 19, 0), Request(16, 5, 0)),
}
"""Batches in which other tokens generate than the last one of each request, for chains that drop tokens."""
