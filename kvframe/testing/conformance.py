"""Run a backend on one case, behind the case's wrapper chain, and hold it against the reference.

The reference is computed from the layer as the model has it: it knows no pages, no wrappers, no virtual requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from kvframe.attention.backend import AttentionBackend
from kvframe.attention.relative_bias import RELATIVE_BIAS
from kvframe.testing.case import Case
from kvframe.testing.inputs import Inputs, Learned, draw_inputs
from kvframe.testing.laws import ConformanceError
from kvframe.testing.reference import dense_attention, relative_bias, visible_tokens
from kvframe.testing.step import run_step

ERROR_FACTOR = 2
"""A backend may err by this factor more than the reference does in the same dtype."""

ROUNDING_UNITS = 4
"""And by as many rounding units of the largest output, for where the reference happens to err by nothing."""

_LOWER_DTYPE = {torch.float64: torch.float32}


def check_backend(
    backend_class: type[AttentionBackend], case: Case, device: str = "cpu", poison: float = float("nan")
) -> None:
    """Check that a backend computes a case within the error that its dtype allows, and writes nowhere it may not.

    Its metadata is built as the framework does it: of requests in the order that the builder asks for, and once more
    for other tables and then refreshed, if the builder declares which fields depend on them.

    Args:
        backend_class: The backend.
        case: One that its capabilities cover (``make_cases``).
        device: Where it runs.
        poison: What lies where no live state is; a large finite value finds a backend that hides NaN.

    Raises:
        ConformanceError: It does not; says at which request and position, and by how much.
        WrapperError: The case's chain refuses the layer or the step.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    inputs = draw_inputs(case, generator)
    learned = Learned.draw(case, generator)
    try:
        output = run_step(backend_class, case, inputs, learned, torch.device(device), poison)
    except ConformanceError as error:
        raise _failure(backend_class, case, str(error)) from error
    for made, values in output.values.items():
        problem = _find_error(case, inputs, learned, values, output.rows) if len(output.rows) else ""
        if problem:
            raise _failure(backend_class, case, made + problem)


def _find_error(
    case: Case, inputs: Sequence[Inputs], learned: Learned, values: torch.Tensor, rows: torch.Tensor
) -> str:
    """Return which queries' values are wrong, and by how much; empty if none are."""
    dtype = _LOWER_DTYPE.get(case.query_dtype, case.query_dtype)
    exact = torch.cat([*_reference(case, inputs, learned, torch.float64)])[rows]
    rounded = torch.cat([*_reference(case, inputs, learned, dtype)])[rows]
    unit = torch.finfo(case.query_dtype).eps
    # Nothing is more exact than float64 to measure its error by: it errs by as many of its units as float32 does.
    own_error = float((rounded - exact).abs().max()) * unit / torch.finfo(dtype).eps
    allowed = ERROR_FACTOR * own_error + ROUNDING_UNITS * unit * float(exact.abs().max())
    errors = (values.cpu()[: len(exact)].double() - exact).abs().flatten(1).amax(1)
    # NaN is never within, as it compares false with everything.
    wrong = (~(errors <= allowed)).nonzero().flatten().tolist()
    if not wrong:
        return ""
    index, position = [*_places(case)][int(rows[wrong[0]])]
    hint = "; NaN is state that is not live" if bool(errors[wrong].isnan().any()) else ""
    return (
        f"{len(wrong)} of {len(errors)} queries are wrong, the first at position {position} of request {index} "
        f"({case.requests[index]}), by {float(errors[wrong[0]]):.3g} where {allowed:.3g} is allowed{hint}"
    )


def _reference(case: Case, inputs: Sequence[Inputs], learned: Learned, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield each request's output, computed in ``dtype``, as float64."""
    mask = case.spec.mask
    causal = case.causal and (mask is None or mask.causal)
    learned = learned.to(dtype)
    for request, tensors in zip(case.requests, inputs, strict=True):
        visible = torch.ones(request.num_new, request.seq_len, dtype=torch.bool)
        if causal:
            visible = visible_tokens(case.spec, request.num_computed, request.seq_len)
        visible[:, : request.num_hidden] = False
        bias = None
        if case.query.relative_bias is not None:
            table = learned.parameters[RELATIVE_BIAS]
            bias = relative_bias(case.query.relative_bias, table, request.num_computed, request.seq_len)
        query, key, value = (each.to(dtype) for each in (tensors.query, tensors.read_key, tensors.read_value))
        key, value = case.form.expand(case.layer, key, value, learned.parameters)
        yield dense_attention(case.query, query, key, value, visible, learned.sinks, bias).double()


def _places(case: Case) -> Iterator[tuple[int, int]]:
    """Yield the request and the position of each packed query."""
    for index, request in enumerate(case.requests):
        for position in range(request.num_computed, request.num_computed + request.num_new):
            yield index, position


def _failure(backend_class: type[AttentionBackend], case: Case, message: str) -> ConformanceError:
    return ConformanceError(f"{backend_class.__name__} on {case.name}: {message}")
