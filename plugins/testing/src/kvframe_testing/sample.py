"""A small sample of the grid's cases in which every feature occurs, for a backend that is slow on each case.

A case's traits are its properties: the mask, the block size, the format, the dtype, the kind of batch and so on. A
sample has every trait of the grid, and every pair of those traits that kernels treat together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from heapq import heapify, heapreplace

from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import KVCacheSpec, num_covered
from kvframe_testing.case import Case, Request
from kvframe_testing.laws import ConformanceError

TOGETHER = (
    ("batch", "visible"),
    ("batch", "format"),
    ("batch", "is_padded"),
    ("batch", "causal"),
    ("is_long", "dtype"),
    ("dtype", "is_padded"),
    ("is_long", "state"),
    ("is_long", "num_heads"),
    ("block_size", "visible"),
    ("most_queries", "visible"),
    ("format", "dtype"),
    ("format", "state"),
    ("format", "num_heads"),
    ("has_sinks", "dtype"),
    ("has_sinks", "soft_cap"),
    ("bias", "num_heads"),
    ("size", "has_sinks"),
    ("most_seen", "alibi"),
)
"""Traits whose pairs all occur in a sample, unless others are given."""

LONG = 200
"""Tokens of a request that several programs share if the other requests of its batch are short."""

ROW_TOKENS, COLUMN_TOKENS = 4, 16
"""New tokens and tokens that an interpreted program takes at a time, from which a case's cost is estimated."""


def sample(cases: Sequence[Case], together: Iterable[tuple[str, str]] = TOGETHER) -> tuple[Case, ...]:
    """Return a few of the cases, in the grid's order, in which all traits and all pairs ``together`` occur."""
    if not cases:
        raise ConformanceError("there is no case to choose from")
    joint_traits = {(first_trait, second_trait) for first_trait, second_trait in map(sorted, together)}
    numbers: dict[Hashable, int] = {}
    pairs = [_pairs(case, joint_traits, numbers) for case in cases]
    return tuple(cases[index] for index in cover(pairs, [_cost(case) for case in cases]))


def cover(parts: Sequence[Collection[Hashable]], costs: Sequence[float]) -> list[int]:
    """Return the indices of collections, each with a cost, that together contain every element, in order."""
    missing_elements: set[Hashable] = set().union(*parts)
    chosen_indices: list[int] = []
    # Greedy set cover: next is the collection with the most missing elements for its cost. This figure never grows, so
    # a collection is counted again only if it comes first by its last figure.
    heap = [(-len(part) / cost, index) for index, (part, cost) in enumerate(zip(parts, costs, strict=True))]
    heapify(heap)
    while missing_elements:
        negative_gain, index = heap[0]
        counted = -len(missing_elements.intersection(parts[index])) / costs[index]
        if counted == negative_gain:
            chosen_indices.append(index)
            missing_elements.difference_update(parts[index])
        else:
            heapreplace(heap, (counted, index))
    return sorted(chosen_indices)


def traits(case: Case) -> dict[str, Hashable]:
    """Return the properties of a case, by name."""
    mask, query = case.spec.mask, case.query
    state = case.spec.in_format(PLAIN).state_tensors()
    return {
        "mask": mask,
        "visible": _visible(case.spec),
        "block_size": case.spec.block_size,
        "format": case.spec.kv_format.name,
        "dtype": case.stored_dtype,
        "soft_cap": query.soft_cap,
        "has_sinks": query.has_sinks,
        "bias": query.relative_bias,
        "alibi": query.alibi_slopes is not None,
        "choice": query.choice,
        "num_heads": query.num_heads,
        "state": tuple(sorted((name, tensor.shape[1:]) for name, tensor in state.items())),
        "batch": _kind(case.requests),
        "size": _size(case.requests),
        "group": _group(case),
        "shift": case.shift and (case.shift, query.soft_cap, case.stored_dtype),
        "is_long": max(request.seq_len for request in case.requests) > LONG,
        "is_padded": case.num_padding > 0,
        "causal": case.causal,
        "most_queries": _most_queries(case),
        "most_seen": _steps(max(_num_live(case.spec, request) for request in case.requests), 512, 1024),
        "wrappers": tuple(wrapper.name for wrapper in case.wrappers),
    }


def _visible(spec: KVCacheSpec) -> Hashable:
    """Return the kind of a mask, without its sizes; if there is no mask, how the spec says what queries see."""
    mask = spec.mask
    if mask is None:
        return spec.mask_function is not None, spec.is_sparse
    sizes = mask.window, mask.lookahead, mask.chunk, mask.num_sink_tokens or None
    return mask.causal, *(size is None for size in sizes)


def _kind(requests: Sequence[Request]) -> Hashable:
    """Return the properties that distinguish a kind of batch from others."""
    return (
        requests[0].num_keys is not None,
        frozenset(_part(request) for request in requests),
        any(request.num_hidden for request in requests),
        any(request.ranges for request in requests),
        min(request.seq_len for request in requests) == 0,
    )


def _size(requests: Sequence[Request]) -> Hashable:
    """Return the class of a batch by its numbers: kernels divide their work by these, and serve one request apart."""
    longest = max(request.seq_len for request in requests)
    num_tokens = sum(request.num_new for request in requests)
    few = _part(requests[0]) if len(requests) == 1 else len(requests) == 2 and requests[0].num_keys is None
    return few, _steps(len(requests), 18, 36, 128), _steps(num_tokens, 256, 512), _steps(longest, 512, 1024)


def _steps(number: int, *ends: int) -> int:
    """Return how many of the ends a number exceeds."""
    return sum(number > end for end in ends)


def _num_live(spec: KVCacheSpec, request: Request) -> int:
    """Return how many tokens are live for the last query of a request."""
    ranges = spec.live_ranges(request.num_cached)
    return num_covered(ranges)


def _group(case: Case) -> int:
    """Return how many query heads read the same keys."""
    return case.query.num_heads // int(getattr(case.spec, "num_kv_heads", 1))


def _most_queries(case: Case) -> Hashable:
    """Return whether some request has one query, two or more: kernels are chosen by that, and are causal or not."""
    most_new = max(request.num_new for request in case.requests)
    return min(3, most_new), case.causal, case.requests[0].num_keys is not None


def _part(request: Request) -> str:
    if request.num_new == 1 < request.seq_len:
        return "decode"
    return "extend" if request.num_computed else "prompt"


def _pairs(case: Case, together: Collection[tuple[str, str]], numbers: dict[Hashable, int]) -> set[Hashable]:
    """Return a case's traits, and those pairs of them that must occur together, each trait as its number."""
    # A mask takes long to hash, so it is hashed once a case and not once a pair.
    number_of = {name: numbers.setdefault((name, value), len(numbers)) for name, value in traits(case).items()}
    return {*number_of.values(), *((number_of[name], number_of[other_name]) for name, other_name in together)}


def _cost(case: Case) -> float:
    """Return the approximate cost of a case, in iterations of programs, without the cost of starting them."""
    return 60.0 + num_iterations(case.requests)


def num_iterations(requests: Sequence[Request]) -> int:
    """Return the number of iterations that programs take for a batch, with tiles of a few rows and columns."""
    return sum(-(-request.num_new // ROW_TOKENS) * -(-request.seq_len // COLUMN_TOKENS) for request in requests)
