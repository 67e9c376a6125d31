"""Batches of every kind, with lengths around the ends of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice

from kvframe.testing.case import Request


def backend_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that a backend must compute, by name."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 41})
    return {
        "prefill": tuple(Request(0, length) for length in ends),
        "extend": tuple(Request(length, new) for length in ends for new in (2, block_size + 1)),
        "decode": tuple(Request(length, 1) for length in (0, *ends)),
        "mixed": (Request(41, 1), Request(0, 19), Request(23, 7), Request(block_size, 1), Request(0, 1)),
        "uneven": (Request(300, 1), Request(9, 140), Request(2, 1), Request(0, 3)),
        # Two queries are the least that are more than one. A sample prefers "mixed", which costs less, for all else.
        "at_most_two": (Request(150, 2), Request(190, 1), Request(block_size, 1), Request(0, 2)),
    }


def wrapper_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that a wrapper must transform, by name; a request may have no new tokens."""
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
        "one_prompt": (Request(0, block_size + 3),),
        "one_decode": (Request(2 * block_size + 1, 1),),
        "many": (
            Request(0, 280),
            Request(600, 5),
            *(Request(length, 1) for length in islice(cycle((9, 33, block_size)), 20)),
        ),
    }


def cross_wrapper_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return batches for wrappers, by name, in which the keys are of another sequence than the queries."""
    return {
        "cross": (
            Request(0, 7, 1, num_keys=block_size + 1),
            Request(0, 2, 0, num_keys=3 * block_size),
            Request(0, 1, num_keys=0),
            Request(0, 5, 3, num_keys=2),
        )
    }


def cross_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch in which the keys are of another sequence than the queries, by name."""
    lengths = sorted({0, 1, max(1, block_size - 1), block_size, block_size + 1, 41})

    def request(num_new: int, num_keys: int, num_hidden: int = 0) -> Request:
        return Request(0, num_new, num_keys=num_keys, num_hidden=num_hidden)

    return {
        "cross_prefill": tuple(request(19, length) for length in lengths),
        "cross_decode": tuple(request(1, length) for length in lengths),
        "cross_mixed": (request(1, 41), request(19, 3), request(5, 0), request(1, 0), request(7, block_size + 7)),
        "cross_uneven": (request(1, 300), request(140, 9), request(1, 0), request(3, 1), request(1, 2)),
        "cross_without_keys": (request(2, 0), request(1, 0)),
    }


HIDDEN_STARTS: Mapping[str, tuple[Request, ...]] = {
    "hidden_starts": (
        Request(41, 1, num_hidden=5),
        Request(23, 7, num_hidden=23),
        Request(0, 4),
        Request(18, 2, num_hidden=17),
    )
}
"""Batches in which the first tokens are hidden, for backends that honour such an extension."""

HIDDEN_CROSS_STARTS: Mapping[str, tuple[Request, ...]] = {
    "cross_hidden_starts": (
        Request(0, 1, num_keys=41, num_hidden=5),
        Request(0, 30, num_keys=23, num_hidden=23),
        Request(0, 4, num_keys=18),
        Request(0, 2, num_keys=0),
    )
}
"""Likewise for keys of another sequence: its first tokens are hidden, or all of them."""

RANGES: Mapping[str, tuple[Request, ...]] = {
    "ranges": (
        Request(41, 1),
        Request(0, 19, ranges=((0, 7), (7, 9), (12, 19))),
        Request(23, 7, ranges=((24, 29),)),
        Request(16, 18, ranges=((16, 34),)),
        Request(2, 5),
    ),
    "long_ranges": (Request(0, 150, ranges=((3, 140),)), Request(5, 140, ranges=((8, 60), (90, 145)))),
}
"""Batches with ranges of prompts that see each other in both directions, for backends that honour them."""

PARTLY_GENERATING: Mapping[str, tuple[Request, ...]] = {
    "draft_tokens": (Request(41, 4, 4), Request(0, 5, 1), Request(16, 2, 2), Request(9, 1), Request(0, 6, 6)),
    "unfinished": (Request(41, 1), Request(0, 19, 0), Request(23, 7, 0), Request(16, 18)),
    "all_unfinished": (Request(0, 19, 0), Request(16, 5, 0)),
}
"""Batches in which not only the last token of each request generates, for chains that drop tokens."""
