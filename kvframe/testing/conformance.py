"""Runs a backend on one case, after the case's wrapper chain, and compares it with the reference.

The reference is computed from the original layer, without pages, wrappers or virtual requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import RELATIVE_BIAS
from kvframe.testing.case import Case, Inputs, Learned, draw_inputs
from kvframe.testing.effects import without_side_effects
from kvframe.testing.error_bound import attention_error_bound, lse_error_bound
from kvframe.testing.hosts import KVFRAME, Host
from kvframe.testing.laws import ConformanceError
from kvframe.testing.reference import (
    alibi_bias,
    chosen_tokens,
    dense_attention,
    dense_lse,
    relative_bias,
    visible_tokens,
)
from kvframe.testing.step import WITHOUT_SINKS, Attended, run_step

_SCORES_AT_A_TIME = 1 << 19
_JOINED_SCORES = 1 << 16
"""The most scores of small requests whose reference is computed together, in little more than the time of one."""


@without_side_effects
def check_backend(
    backend_class: type[AttentionBackend],
    case: Case,
    device: str = "cpu",
    poison: float = float("nan"),
    host: Host = KVFRAME,
) -> None:
    """Check that a backend's output is within ``attention_error_bound``, and that it writes to no other memory.

    If it declares ``returns_lse``, it is also called for the log-sum-exp, which is held to ``lse_error_bound``, and the
    output of that call to the same bound. For a layer with learned sinks it is called once more without them.

    Its metadata is built as the framework builds it, from requests in the order that the builder asks for. If the
    builder declares which fields depend on block tables, it is also built for other tables and then refreshed.

    It must leave the process as it was (``without_side_effects``).

    Args:
        backend_class: The backend.
        case: A case that its capabilities cover (``make_cases``).
        device: The device of the backend.
        poison: The value of all memory without live state. A large finite value finds a backend that hides NaN.
        host: Whose memory and step the backend is given: kvframe's own engine, or an ``OtherHost``.

    Raises:
        ConformanceError: The output is wrong, or other memory was written.
        WrapperError: The case's chain refuses the layer or the step.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    inputs = draw_inputs(case, generator)
    learned = Learned.draw(case, generator)
    try:
        output = run_step(backend_class, case, inputs, learned, torch.device(device), poison, host)
    except ConformanceError as error:
        raise _failure(backend_class, case, str(error)) from error
    if not len(output.rows):
        return
    has_lse = any(lse is not None for _, lse in output.results.values())
    expected = make_reference(case, inputs, learned, with_lse=has_lse)
    for how, attended in output.results.items():
        reference = expected
        if how == WITHOUT_SINKS:
            reference = make_reference(case, inputs, learned.without_sinks(), with_lse=True)
        problem = find_problem(case, reference, attended, output.rows)
        if problem:
            raise _failure(backend_class, case, how + problem)


@attrs.frozen(eq=False)
class Reference:
    """What a backend must return for all packed queries, and its allowed error, both in float64."""

    output: tuple[torch.Tensor, torch.Tensor]
    lse: tuple[torch.Tensor, torch.Tensor] | None


def find_problem(case: Case, expected: Reference, attended: Attended, rows: torch.Tensor) -> str:
    """Return a text about the wrong queries and the largest error; empty if no query is wrong.

    ``attended`` is what the backend returned for the packed queries ``rows``, with padding after them.
    """
    output, lse = attended
    problem = _find_error(case, expected.output, output, rows)
    if problem or lse is None or expected.lse is None:
        return problem
    problem = _find_error(case, expected.lse, lse, rows)
    return problem and f"the log-sum-exp: {problem}"


def _find_error(
    case: Case, expected: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor, rows: torch.Tensor
) -> str:
    exact, allowed = (part[rows] for part in expected)
    values = values.cpu()[: len(exact)].double()
    # The log-sum-exp of a query that sees nothing is -inf.
    errors = torch.where(values == exact, 0.0, (values - exact).abs())
    # A comparison with NaN is false, so NaN counts as wrong.
    is_wrong = ~(errors <= allowed).flatten(1)
    wrong = is_wrong.any(1).nonzero().flatten().tolist()
    if not wrong:
        return ""
    first = wrong[0]
    index, position = [*_positions(case)][int(rows[first])]
    # argmax takes NaN for the largest.
    worst = int((errors[first] - allowed[first]).argmax())
    error, bound = float(errors[first].flatten()[worst]), float(allowed[first].flatten()[worst])
    hint = "; NaN is state that is not live" if bool(errors[wrong].isnan().any()) else ""
    return (
        f"{len(wrong)} of {len(errors)} queries are wrong, the first at position {position} of request {index} "
        f"({case.requests[index]}), by {error:.3g} where {bound:.3g} is allowed{hint}"
    )


def make_reference(case: Case, inputs: Sequence[Inputs], learned: Learned, *, with_lse: bool) -> Reference:
    """Return the reference for all packed queries, with the log-sum-exp or without it."""
    output, lse = [], []
    dtype = case.query_dtype
    for whole, magnitudes in _join_small(dense_arguments(case, inputs, learned)):
        for arguments in _split_queries(whole):
            allowed = attention_error_bound(**arguments, dtype=dtype, magnitudes=magnitudes)
            output.append((dense_attention(**arguments), allowed))
            if with_lse:
                del arguments["value"]
                allowed = lse_error_bound(**arguments, dtype=dtype, magnitude=magnitudes[0])
                lse.append((dense_lse(**arguments), allowed))
    return Reference(_joined(output), _joined(lse) if with_lse else None)


Arguments = tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]
"""What ``dense_arguments`` yields."""


def _join_small(requests: Iterable[Arguments]) -> Iterator[Arguments]:
    """Yield the same with small neighbours as one request, whose queries see the keys of their own part only."""
    small: list[Arguments] = []
    num_queries = num_keys = 0
    for arguments in requests:
        more_queries, more_keys = arguments[0]["visible"].shape[-2:]
        num_scores = (num_queries + more_queries) * (num_keys + more_keys) * arguments[0]["query"].shape[1]
        if small and num_scores > _JOINED_SCORES:
            yield _join(small)
            small, num_queries, num_keys = [], 0, 0
        small.append(arguments)
        num_queries, num_keys = num_queries + more_queries, num_keys + more_keys
    if small:
        yield _join(small)


def _join(requests: Sequence[Arguments]) -> Arguments:
    if len(requests) == 1:
        return requests[0]
    (first, _), whole = requests[0], [arguments for arguments, _ in requests]
    joined = {name: torch.cat([request[name] for request in whole]) for name in ("query", "key", "value")}
    visible = _block_diagonal([request["visible"] for request in whole]).bool()
    bias = None if first["bias"] is None else _block_diagonal([request["bias"] for request in whole])
    key_sizes, value_sizes = (torch.cat(parts) for parts in zip(*(sizes for _, sizes in requests), strict=True))
    return {**first, **joined, "visible": visible, "bias": bias}, (key_sizes, value_sizes)


def _block_diagonal(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``[…, num_queries, num_keys]`` of all parts, with zeros for a query and a key of two parts."""
    if parts[0].ndim == 2:
        whole: torch.Tensor = torch.block_diag(*parts)
        return whole
    return torch.stack([torch.block_diag(*of_head) for of_head in zip(*parts, strict=True)])


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    exact, allowed = zip(*parts, strict=True)
    return torch.cat(exact), torch.cat(allowed)


def _split_queries(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the same arguments for a few queries at a time, whose scores fit into a processor's cache."""
    query, bias = arguments["query"], arguments["bias"]
    count = max(1, _SCORES_AT_A_TIME // (query.shape[1] * max(1, len(arguments["key"]))))
    for rows in (slice(start, start + count) for start in range(0, max(1, len(query)), count)):
        part = None if bias is None else bias[:, rows]
        yield {**arguments, "query": query[rows], "visible": arguments["visible"][..., rows, :], "bias": part}


def dense_arguments(case: Case, inputs: Sequence[Inputs], learned: Learned) -> Iterator[Arguments]:
    """Yield each request's arguments of ``dense_attention``, in float64, and the magnitudes for the error bound."""
    spec = case.attended_spec
    mask = spec.mask
    sees_all = not case.causal or (mask is not None and mask.sees_all)
    learned = learned.to(torch.float64)
    sizes = {name: tensor.abs() for name, tensor in learned.parameters.items()}
    for index, (request, tensors) in enumerate(zip(case.requests, inputs, strict=True)):
        visible = torch.ones(request.num_new, request.seq_len, dtype=torch.bool)
        if not sees_all:
            visible = visible_tokens(spec, request.num_computed, request.seq_len)
            for start, stop in request.ranges:
                for position in range(start, stop):
                    visible[position - request.num_computed, position:stop] = True
        visible[:, : request.num_hidden] = False
        if case.query.choice is not None:
            visible = visible & chosen_tokens(case.query, case.chosen(index), request.seq_len)
        bias = None
        if case.query.relative_bias is not None:
            table = learned.parameters[RELATIVE_BIAS]
            bias = relative_bias(case.query.relative_bias, table, request.num_computed, request.seq_len)
        elif case.query.alibi_slopes is not None:
            bias = alibi_bias(case.query.alibi_slopes, request.num_computed, request.seq_len)
        stored = tensors.read_key.double(), tensors.read_value.double()
        key, value = case.form.expand(case.layer, *stored, learned.parameters)
        if case.spec.kv_format != PLAIN:
            # A format may store an element as its difference from another. Its error is then relative to the largest.
            stored = _largest(stored[0]), _largest(stored[1])
        arguments = {
            "layer": case.query,
            "query": tensors.query.double(),
            "key": key,
            "value": value,
            "visible": visible,
            "sinks": learned.sinks,
            "bias": bias,
        }
        yield arguments, case.form.magnitudes(case.layer, *stored, sizes)


def _largest(vectors: torch.Tensor) -> torch.Tensor:
    """Return a tensor in which each element is replaced by the largest magnitude of its vector."""
    return vectors if not vectors.numel() else vectors.abs().amax(-1, keepdim=True).expand_as(vectors)


def _positions(case: Case) -> Iterator[tuple[int, int]]:
    """Yield the request and the position of each packed query."""
    for index, request in enumerate(case.requests):
        for position in range(request.num_computed, request.num_computed + request.num_new):
            yield index, position


def _failure(backend_class: type[AttentionBackend], case: Case, message: str) -> ConformanceError:
    return ConformanceError(f"{backend_class.__name__} on {case.name}: {message}")
