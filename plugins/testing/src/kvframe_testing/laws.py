"""The laws of cache specs, checked at every position of a short request. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from kvframe.contract.errors import KVFrameError, PluginError
from kvframe.contract.foreign import call
from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import (
    RELATIVE_BIAS,
    AttentionMask,
    KVCacheSpec,
    QuerySpec,
    RelativeBias,
    TokenRange,
)
from kvframe.planning.answers import are_ranges


class ConformanceError(KVFrameError):
    """A spec or a backend breaks the contract; the message says which part, and where."""


def require(holds: object, *message: object) -> None:
    """Raise ``ConformanceError`` unless something holds; the message is the part, if it is given, and what is wrong."""
    if not holds:
        raise ConformanceError(": ".join(map(str, message)))


def answer_of(label: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a part's method; raise ``ConformanceError`` with the label if the method raises."""
    try:
        return call(label, method, *arguments)
    except PluginError as error:
        raise ConformanceError(str(error)) from error.__cause__


def masked_tokens(mask: AttentionMask, position: int) -> set[int]:
    """Return the positions before ``position`` that a query there sees, by the definition of the mask."""
    first_token = 0 if mask.window is None else position - mask.window + 1
    if mask.chunk is not None:
        first_token = position - position % mask.chunk
    return {token for token in range(position) if token >= first_token or token < mask.num_sink_tokens}


def check_spec(spec: KVCacheSpec, max_tokens: int = 64, *, num_refused: int = 0) -> None:
    """Check a spec: its laws, its mask against its live ranges, its derivations against the default ones.

    Args:
        spec: The spec; choose sizes that are small against ``max_tokens``, so that blocks and windows end within it.
        max_tokens: Positions up to this one are checked.
        num_refused: The most tokens of a step that may be refused after they were computed.
    """
    for law in LAWS:
        check_law(law, spec, max_tokens, num_refused=num_refused)


def check_law(law: str, spec: KVCacheSpec, max_tokens: int = 64, *, num_refused: int = 0) -> None:
    """Check one of the ``LAWS``, and with it that live ranges keep the law of the past."""
    live = [_ask(spec, n) for n in range(max_tokens + 1)]
    LAWS[law](_SpecAnswers(spec, live, max_tokens, num_refused))


@attrs.frozen(eq=False)
class _SpecAnswers:
    """A spec with its live ranges at every position up to ``max_tokens``."""

    spec: KVCacheSpec
    live: list[tuple[TokenRange, ...]]
    max_tokens: int
    num_refused: int


def _check_past(answers: _SpecAnswers) -> None:
    for n, ranges in enumerate(answers.live):
        second_ranges = _ask(answers.spec, n)
        problem = f"live_ranges({n}) is {ranges} the first time and {second_ranges} the second time"
        require(ranges == second_ranges, answers.spec, problem)
    if not answers.spec.keeps_past:
        live = next(filter(None, answers.live), ())
        require(not live, answers.spec, f"keeps_past is False, and live_ranges gives {live}")


def _check_forgetting(answers: _SpecAnswers) -> None:
    spec, live = answers.spec, answers.live
    for n in range(answers.max_tokens):
        returned = _tokens(live[n + 1]) - _tokens(live[n]) - {n}
        problem = f"law of forgetting: tokens {sorted(returned)} are live at {n + 1} and were not at {n}"
        require(not returned, spec, problem)
    if spec.num_rollback_states:
        require(spec.states_per_block == 1, spec, "it has num_rollback_states, and several states_per_block")
        for n, ranges in enumerate(live):
            is_last = ranges == (((n - 1, n),) if n else ())
            require(is_last, spec, f"num_rollback_states is for the last token's state, and live at {n} is {ranges}")


def _check_mask(answers: _SpecAnswers) -> None:
    mask = answers.spec.mask
    if mask is not None and mask.causal:
        for n, ranges in enumerate(answers.live):
            seen_tokens, live_tokens = masked_tokens(mask, n), _tokens(ranges)
            require(
                seen_tokens == live_tokens,
                answers.spec,
                f"at {n} the mask shows {sorted(seen_tokens)}, live are {sorted(live_tokens)}",
            )


def _check_mask_function(answers: _SpecAnswers) -> None:
    """Check that a mask function agrees with the live ranges, for all positions at once and for each alone."""
    spec, live = answers.spec, answers.live
    function, is_causal = spec.mask_function, spec.mask is None or spec.mask.causal
    if spec.is_sparse:
        require(spec.mask is None, spec, "is_sparse is True, and a mask shows every live token")
        require(function is not None, spec, "is_sparse is True, and no mask_function says what a query sees")
    if function is None:
        return
    positions = np.arange(len(live))
    try:
        mask_values, lone_value = np.asarray(function(positions[:, None], positions[None, :])), bool(function(1, 0))
    except (TypeError, ValueError) as error:
        raise ConformanceError(f"{spec}: mask_function does not take arrays of positions: {error}") from error
    shape = (len(live), len(live))
    require(
        mask_values.shape == shape and mask_values.dtype == np.bool_,
        spec,
        f"mask_function returns {mask_values.shape}, {mask_values.dtype} for all positions, not {shape}, bool",
    )
    _require_equal(spec, "mask_function(1, 0)", bool(mask_values[1, 0]), lone_value)
    for n, ranges in enumerate(live):
        shown_tokens = set(mask_values[n].nonzero()[0].tolist())
        needed_tokens = _tokens(ranges) | {n} if is_causal else _seen_both_ways(spec, n, len(live))
        problem = f"at {n} mask_function shows {sorted(shown_tokens)}, live and its own are {sorted(needed_tokens)}"
        if spec.is_sparse:
            require(shown_tokens <= needed_tokens, spec, problem)
            require(n in shown_tokens, spec, f"at {n} mask_function does not show the query itself")
            continue
        hint = "; a type whose queries see fewer tokens than are live declares is_sparse"
        require(shown_tokens == needed_tokens, spec, problem + hint * (shown_tokens < needed_tokens))


def _seen_both_ways(spec: KVCacheSpec, n: int, num_tokens: int) -> set[int]:
    """Return the tokens that a bidirectional mask shows to the query at a position of a request."""
    window, lookahead = (None, None) if spec.mask is None else (spec.mask.window, spec.mask.lookahead)
    if window is None or lookahead is None:
        return set(range(num_tokens))
    return {token for token in range(num_tokens) if n - window < token <= n + lookahead}


def _ask(spec: KVCacheSpec, n: int) -> tuple[TokenRange, ...]:
    """Return the live ranges at a position; raise if they break the law of the past."""
    ranges: Any = spec.live_ranges(n)
    problem = (
        f"law of the past: live_ranges({n}) is {ranges}, not sorted, disjoint and within [0, {n}), in pairs of int"
    )
    require(are_ranges(ranges, 0, n), spec, problem)
    return tuple(ranges)


def _check_format(answers: _SpecAnswers) -> None:
    """Check that a spec with a format can leave it and return to it, and keeps the same tokens in every format."""
    spec = answers.spec
    plain = spec.in_format(PLAIN)
    require(plain.kv_format == PLAIN, spec, f"in_format(PLAIN) is in the format {plain.kv_format.name}")
    returned_spec = plain.in_format(spec.kv_format)
    require(returned_spec.kv_format == spec.kv_format, spec, "in_format() does not lead back to its own format")
    require(returned_spec == spec, spec, "in_format() changes more than the format")


def _check_derivations(answers: _SpecAnswers) -> None:
    spec, max_tokens, general = answers.spec, answers.max_tokens, KVCacheSpec
    for name in ("group_key", "block_bytes", "is_per_block"):
        _require_equal(spec, name, getattr(general, name).fget(spec), getattr(spec, name))
    sizes = sorted({1, 2, spec.block_size, spec.block_size + 1, max_tokens})
    for n in range(max_tokens + 1):
        _require_equal(spec, f"live_blocks({n})", general.live_blocks(spec, n), spec.live_blocks(n))
        for size in sizes:
            derived_answer, own_answer = general.num_resident_blocks(spec, n, size), spec.num_resident_blocks(n, size)
            _require_equal(spec, f"num_resident_blocks({n}, {size})", derived_answer, own_answer)
            derived_answer, own_answer = _peak_by_definition(spec, n, size), spec.peak_blocks(n, size)
            _require_equal(spec, f"peak_blocks({n}, {size})", derived_answer, own_answer)


def _peak_by_definition(spec: KVCacheSpec, num_tokens: int, max_new_tokens: int) -> int:
    """Return the most blocks of any step of a request, one after the other, or of one that ends before its end."""
    steps = [(n, min(max_new_tokens, num_tokens - n)) for n in range(num_tokens)]
    if type(spec).stored_blocks is not KVCacheSpec.stored_blocks:
        return KVCacheSpec.peak_blocks(spec, num_tokens, max_new_tokens)
    return max((KVCacheSpec.num_resident_blocks(spec, *step) for step in steps), default=0)


def _check_stored(answers: _SpecAnswers) -> None:
    """Check the blocks that a step stores: they are its own, and cover the live tokens if some tokens are refused."""
    spec, max_tokens, num_refused = answers.spec, answers.max_tokens, answers.num_refused
    block_size = spec.block_size
    live = [_tokens(spec.live_blocks(n)) for n in range(2 * max_tokens + 1)]
    for n in range(max_tokens + 1):
        sizes = {1, 2, block_size - 1, block_size, 2 * block_size + 1, max_tokens} & set(range(1, max_tokens + 1))
        for size in sorted(sizes):
            first_block, stop = n // block_size, -(-(n + size) // block_size)
            limit = spec.num_resident_blocks(n, size)
            # Block boundaries within the step, and the ones before and after it.
            for branch in {0, *range(first_block * block_size, (stop + 1) * block_size + 1, block_size)}:
                call = f"stored_blocks({n}, {size}, {branch})"
                ranges = tuple(spec.stored_blocks(n, size, branch))
                ends = [first_block, *(end for item in ranges for end in item), stop]
                in_order = all(start < end for start, end in ranges) and ends == sorted(ends)
                require(in_order, spec, f"{call} is {ranges}, not sorted, disjoint and within [{first_block}, {stop})")
                resident = _tokens(ranges) | live[n]
                for end in range(max(n, n + size - num_refused), n + size + 1):
                    lost = live[end] - resident
                    require(not lost, spec, f"{call} has no page for the blocks {sorted(lost)}, live at {end}")
                require(
                    len(resident) <= limit,
                    spec,
                    f"{call} and what is live at {n} are {len(resident)} blocks, more than num_resident_blocks: "
                    f"{limit}",
                )


def _check_retained(answers: _SpecAnswers) -> None:
    spec, live = answers.spec, answers.live
    wider = spec.retain_all()
    require(
        dict(wider.state_tensors()) == dict(spec.state_tensors()),
        spec,
        "retain_all() stores other state tensors",
    )
    for n, ranges in enumerate(live):
        lost = _tokens(ranges) - _tokens(wider.live_ranges(n))
        require(not lost, spec, f"retain_all() loses tokens {sorted(lost)} at {n}")


def _check_layout(answers: _SpecAnswers) -> None:
    """Check that no field of the layout changes which tokens are live, and that each changes what a block stores."""
    spec, fields = answers.spec, {field.name: field for field in attrs.fields(type(answers.spec)) if field.init}
    unknown_names = sorted(spec.layout_fields - fields.keys())
    require(not unknown_names, spec, f"layout_fields names {unknown_names}, which are no fields")
    require(attrs.evolve(spec) == spec, spec, "it is not equal to a spec with the same fields: layers find no group")
    for name in sorted(spec.layout_fields):
        variants = list(_others(spec, name))
        for variant in variants:
            change = f"layout_fields has {name}, and with {name} = {getattr(variant, name)} instead"
            for n, ranges in enumerate(answers.live):
                ranges_of_other = _ask(variant, n)
                hint = "so layers that differ in it cannot share a block table"
                require(
                    ranges_of_other == ranges,
                    spec,
                    f"{change} live_ranges({n}) is {ranges_of_other}, not {ranges}: {hint}",
                )
            require(variant.mask == spec.mask, spec, f"{change} the mask is {variant.mask}")
        # Sizes of what a type makes of its state may be there too.
        if variants and (name == "dtype" or {*spec.in_format(PLAIN).state_tensors()} == {"k", "v"}):
            is_stored = any(dict(variant.state_tensors()) != dict(spec.state_tensors()) for variant in variants)
            require(is_stored, spec, f"layout_fields has {name}, which changes nothing of state_tensors()")


def _others(spec: KVCacheSpec, name: str) -> Iterator[KVCacheSpec]:
    """Yield the spec with other values of a field, as far as it takes them."""
    value = getattr(spec, name)
    if isinstance(value, bool):
        values: tuple[Any, ...] = (not value,)
    elif isinstance(value, int):
        values = (2 * value, value + 1, 4 * value)
    else:
        values = tuple(
            dtype for dtype in ("float32", "bfloat16", "float16") if isinstance(value, str) and dtype != value
        )
    for new_value in values:
        try:
            variant = attrs.evolve(spec, **{name: new_value})
            variant.state_tensors()
        except (KVFrameError, ValueError):
            continue
        yield variant


def _check_state(answers: _SpecAnswers) -> None:
    """Check the state tensors: they have a row for each entry of a block's tokens, or for each state of it."""
    spec = answers.spec
    require(spec.block_size % spec.tokens_per_entry == 0, spec, "a block has whole entries of tokens_per_entry tokens")
    length = spec.states_per_block if spec.is_per_block else spec.block_size // spec.tokens_per_entry
    for name, tensor in spec.state_tensors().items():
        text = f"the state {name!r} of a block has the shape {tensor.shape}, and {length} must be its first dimension"
        require(tensor.shape[:1] == (length,), spec, text)


def _check_queries(answers: _SpecAnswers) -> None:
    """Check what a layer's queries must be: which are refused, and the shapes of learned tensors."""
    spec, state = answers.spec, answers.spec.in_format(PLAIN).state_tensors()
    if {*state} != {"k", "v"} or len(state["k"].shape) != 3:
        return
    _, num_kv_heads, head_size = state["k"].shape
    right_query = QuerySpec(num_heads=2 * num_kv_heads, head_size=head_size, scale=1.0)
    wrong_queries = {"head_size": attrs.evolve(right_query, head_size=head_size + 1)}
    if num_kv_heads > 1:
        wrong_queries["num_heads"] = attrs.evolve(right_query, num_heads=2 * num_kv_heads + 1)
    for name, query in wrong_queries.items():
        try:
            spec.check_query(query)
        except KVFrameError:
            continue
        sizes = f"{num_kv_heads} KV heads of {head_size} elements"
        raise ConformanceError(f"{spec}: check_query accepts {name} = {getattr(query, name)} for {sizes}")
    spec.check_query(right_query)
    bias = RelativeBias(num_buckets=8, max_distance=20)
    for query in (right_query, attrs.evolve(right_query, relative_bias=bias)):
        shapes = spec.parameters(query)
        for name, shape in shapes.items():
            is_shape = isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)
            require(is_shape, spec, f"the parameter {name!r} has the shape {shape}, not a tuple of whole numbers")
        expected = None if query.relative_bias is None else (bias.num_buckets, query.num_heads)
        bias_shape = shapes.get(RELATIVE_BIAS)
        require(
            bias_shape == expected,
            spec,
            f"the parameter {RELATIVE_BIAS!r} has the shape {bias_shape}, not {expected}",
        )


def _check_drafts(answers: _SpecAnswers) -> None:
    """Check that the same tokens are live for requests that compute draft tokens."""
    with_drafts = answers.spec.with_drafts(2)
    for n, ranges in enumerate(answers.live):
        live = _ask(with_drafts, n)
        require(live == ranges, answers.spec, f"with_drafts(2) has live {live} at {n}, and the type {ranges}")


LAWS: Mapping[str, Callable[[_SpecAnswers], None]] = {
    "past": _check_past,
    "forgetting": _check_forgetting,
    "mask": _check_mask,
    "mask function": _check_mask_function,
    "formats": _check_format,
    "derivations": _check_derivations,
    "stored blocks": _check_stored,
    "retaining all": _check_retained,
    "layout": _check_layout,
    "state": _check_state,
    "queries": _check_queries,
    "drafts": _check_drafts,
}
"""The laws by name, in the order in which ``check_spec`` checks them."""


def _tokens(ranges: Iterable[TokenRange]) -> set[int]:
    return {token for start, stop in ranges for token in range(start, stop)}


def _require_equal(spec: KVCacheSpec, question: str, derived_answer: object, own_answer: object) -> None:
    require(derived_answer == own_answer, spec, f"{question} is {own_answer}, and {derived_answer} by the live ranges")
