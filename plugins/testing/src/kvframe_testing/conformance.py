"""Runs a backend on one case, after the case's wrapper chain, and compares it with the reference.

The reference is computed from the original layer, without pages, wrappers or virtual requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import BackendError, WrapperError
from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import RELATIVE_BIAS
from kvframe.loading.registry import Registry
from kvframe.selection.choice import bind_chain
from kvframe_testing.case import Case, Inputs, Learned, draw_inputs
from kvframe_testing.checks import Check, find_backend
from kvframe_testing.effects import without_side_effects
from kvframe_testing.error_bound import attention_error_bound, lse_error_bound, score_with_errors
from kvframe_testing.hosts import KVFRAME, Host
from kvframe_testing.laws import ConformanceError
from kvframe_testing.reference import (
    alibi_bias,
    chosen_tokens,
    relative_bias,
    visible_tokens,
    weigh,
)
from kvframe_testing.runner import WITHOUT_SINKS, Attended, Content, Output, Runner


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
    chain, wrapped_layer, _ = bind_chain(case.wrappers, case.layer)
    layers = [case.layer]
    if case.layer.shares_with is not None:
        layers.insert(0, attrs.evolve(case.layer, name=case.layer.shares_with, shares_with=None))
    # One more layer in the group takes a part of each page, so that the layer's own parts are not contiguous.
    in_pool = [attrs.evolve(layers[0], name="neighbour"), *layers]
    generator, torch_device = torch.Generator().manual_seed(zlib.crc32(case.name.encode())), torch.device(device)
    inputs = draw_inputs(case, generator)
    learned = Learned.draw(case, generator)
    step = {str(index): request for index, request in enumerate(case.requests)}
    content = {case.layer.name: Content(dict(zip(step, inputs, strict=True)), learned.to(torch_device))}
    try:
        runner = Runner(backend_class, [wrapped_layer], [step], torch_device, host=host, in_pool=in_pool)
        runner.bind(content)
        runner.prepare([case], content, step, poison)
        (metadata,) = runner.metadata(case, step)
        output = runner.compute(case, inputs, content[case.layer.name].learned, metadata, poison, chain=chain)
        check_results(case, output, inputs, learned)
    except WrapperError:
        raise
    except (BackendError, ConformanceError) as error:
        raise failure(backend_class, case, error) from error


def attention_checks(
    registry: Registry,
    cases_of: Callable[[str, type[AttentionBackend]], tuple[Mapping[str, Case], tuple[str, ...]]],
) -> tuple[list[Check], dict[str, tuple[str, ...]]]:
    """Return checks of the attention of every installed backend, and the codes of the refusals by feature.

    ``cases_of`` takes a backend's name and class, and returns cases by the names of their checks, or codes.
    """
    checks, refused_codes = list[Check](), dict[str, tuple[str, ...]]()
    for name in registry.backends.names():
        feature, backend_class = f"attention by {name}", find_backend(registry, name)
        if isinstance(backend_class, str):
            refused_codes[feature] = (backend_class,)
            continue
        cases, codes = cases_of(name, backend_class)
        for label, case in cases.items():
            checks.append(Check(name=label, features=(feature,), run=partial(check_backend, backend_class, case)))
        if codes:
            refused_codes[feature] = codes
    return checks, refused_codes


def check_results(case: Case, output: Output, inputs: Sequence[Inputs], learned: Learned) -> None:
    """Raise ``ConformanceError`` if a layer's output in a step differs from the reference by more than its bound."""
    if not len(output.rows):
        return
    full_reference = make_reference(case, inputs, learned)
    for way, result in output.results.items():
        reference = full_reference
        if way == WITHOUT_SINKS:
            reference = make_reference(case, inputs, learned.without_sinks())
        problem = find_problem(case, reference, result, output.rows)
        if problem:
            raise ConformanceError(way + problem)


@attrs.frozen(eq=False)
class Reference:
    """What a backend must return for all packed queries, and its allowed error, both in float64."""

    output: tuple[torch.Tensor, torch.Tensor]
    lse: tuple[torch.Tensor, torch.Tensor]


def find_problem(case: Case, reference: Reference, result: Attended, rows: torch.Tensor) -> str:
    """Return a text about the wrong queries and the largest error; empty if no query is wrong.

    ``attended`` is what the backend returned for the packed queries ``rows``, with padding after them.
    """
    output, lse = result
    problem = _find_error(case, reference.output, output, rows)
    if problem or lse is None:
        return problem
    problem = _find_error(case, reference.lse, lse, rows)
    return problem and f"the log-sum-exp: {problem}"


def _find_error(
    case: Case, exact_and_bound: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor, rows: torch.Tensor
) -> str:
    exact, allowed = (part[rows] for part in exact_and_bound)
    values = values.cpu()[: len(exact)].double()
    # The log-sum-exp of a query that sees nothing is -inf.
    errors = torch.where(values == exact, 0.0, (values - exact).abs())
    # A comparison with NaN is false, so NaN counts as wrong.
    is_wrong = ~(errors <= allowed).flatten(1)
    wrong = is_wrong.any(1).nonzero().flatten().tolist()
    if not wrong:
        return ""
    first_row = wrong[0]
    index, position = [*_positions(case)][int(rows[first_row])]
    # argmax takes NaN for the largest.
    worst = int((errors[first_row] - allowed[first_row]).argmax())
    error, bound = float(errors[first_row].flatten()[worst]), float(allowed[first_row].flatten()[worst])
    hint = "; NaN is state that is not live" if bool(errors[wrong].isnan().any()) else ""
    return (
        f"{len(wrong)} of {len(errors)} queries are wrong, the first at position {position} of request {index} "
        f"({case.requests[index]}), by {error:.3g} where {bound:.3g} is allowed{hint}"
    )


def make_reference(case: Case, inputs: Sequence[Inputs], learned: Learned) -> Reference:
    """Return the reference for all packed queries."""
    parts = []
    for arguments, (key_size, value_size) in dense_arguments(case, inputs, learned):
        value, visible, dtype = arguments.pop("value"), arguments["visible"], case.query_dtype
        scores = score_with_errors(**arguments, magnitude=key_size)
        allowed = attention_error_bound(scores, value, visible, dtype=dtype, magnitude=value_size)
        lse = torch.logsumexp(scores.logits, dim=-1).T
        parts.append((weigh(scores.logits, value, visible), allowed, lse, lse_error_bound(scores, dtype=dtype)))
    exact, bounds, exact_lse, lse_bounds = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Reference((exact, bounds), (exact_lse, lse_bounds))


def dense_arguments(
    case: Case, inputs: Sequence[Inputs], learned: Learned
) -> Iterator[tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]]:
    """Yield each request's arguments of ``dense_attention``, in float64, and the magnitudes for the error bound."""
    spec = case.spec
    learned = learned.to(torch.float64)
    sizes = {name: tensor.abs() for name, tensor in learned.parameters.items()}
    for index, (request, tensors) in enumerate(zip(case.requests, inputs, strict=True)):
        first_position = request.num_computed if request.num_keys is None else request.num_keys - request.num_new
        hidden, ends = request.num_hidden, request.range_ends
        visible = visible_tokens(
            spec, first_position, request.seq_len, causal=case.causal, num_hidden=hidden, range_ends=ends
        )
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


def failure(backend_class: type[AttentionBackend], case: Case, message: object) -> ConformanceError:
    """Return an error that names the backend and the case."""
    return ConformanceError(f"{backend_class.__name__} on {case.name}: {message}")
