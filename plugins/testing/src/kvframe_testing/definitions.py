"""Compares a backend with the attention that a type defines, over requests that grow in steps of random sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvframe.attention.batch_metadata import build_metadata
from kvframe.attention.staging import HOST
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import BackendError
from kvframe.contract.specs import AttentionSpec, LayerSpec, QuerySpec
from kvframe.planning.layer_specs import with_entries
from kvframe.selection.refusals import find_refusals
from kvframe_testing.case import Request as Part
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_batch
from kvframe_testing.runner import Runner

_NUM_HEADS = 4
_NUM_ROUNDINGS = 8


def check_definition(
    backend_class: type[AttentionBackend],
    spec: AttentionSpec,
    *,
    lengths: Sequence[int] = (1, 55, 61),
    num_heads: int = _NUM_HEADS,
    seed: int = 0,
) -> None:
    """Raise ``ConformanceError`` if a backend computes other attention than ``dense_attention`` of a type.

    Requests grow together, in steps of one token and of many, in pages that hold NaN before they are written and after
    they are released. So a backend that reads a token too far, an entry of another request, or one that is not complete
    shows.

    Args:
        backend_class: The backend; it declares the type's kind.
        spec: The type, which defines its attention, with keys and values in float32 or float64.
        lengths: The lengths of the requests at their ends.
        num_heads: Query heads, a multiple of the KV heads.
        seed: Of the random numbers.
    """
    side = QuerySpec(num_heads=num_heads, head_size=spec.head_size, scale=spec.head_size**-0.5)
    layer = LayerSpec(name="layer", spec=spec, query=side)
    if refusals := find_refusals(backend_class.capabilities, layer, "cpu"):
        raise ConformanceError(f"{backend_class.__name__} {refusals[0].reason}")
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(length, heads, size, generator=generator).to(dtype)

    input_shapes = spec.inputs(side)
    requests = [
        (
            draw(length, num_heads, spec.head_size),
            draw(length, spec.num_kv_heads, spec.head_size),
            draw(length, spec.num_kv_heads, spec.head_size_v),
            {name: torch.randn(length, *shape, generator=generator).to(dtype) for name, shape in input_shapes.items()},
        )
        for length in lengths
    ]
    outputs = _serve(backend_class, layer, requests, [*_draw_steps(lengths, torch.Generator().manual_seed(seed))])
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        errors = find_wrong(layer, request, output, generator)
        if errors:
            token = min(errors)
            raise ConformanceError(
                f"{backend_class.__name__} on {spec.kind}: the output for token {token} of request {number} "
                f"({len(output)} tokens) differs from dense_attention by {errors[token]:.1e} of its size, allowed "
                f"{_allowed(dtype):.1e}; {len(errors)} tokens differ"
            )


Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def find_wrong(
    layer: LayerSpec, request: Request, output: torch.Tensor, generator: torch.Generator
) -> dict[int, float]:
    """Return the tokens for which an output is not what a type defines, and by how much, as a share of its size.

    Where two tokens or blocks are nearly equally good, rounding decides which one is chosen. So the output of each head
    may also be what the definition gives if the queries, keys and inputs are rounded otherwise.

    Args:
        layer: A layer whose type defines its attention.
        request: Query, key, value and inputs of all tokens.
        output: ``[num_tokens, num_heads, head_size_v]``.
        generator: Of the roundings.
    """
    spec, (query, key, value, inputs) = layer.spec, request
    assert spec is not None

    def rounded(tensor: torch.Tensor, size: float) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.double() * (1 + size * noise)

    def error_of(size: float) -> torch.Tensor:
        more = {name: rounded(tensor, size) for name, tensor in inputs.items()}
        exact = spec.dense_attention(layer, rounded(query, size), rounded(key, size), value.double(), more)
        error: torch.Tensor = (output.double() - exact).norm(dim=2) / exact.norm(dim=2).clamp_min(1e-30)
        return error

    allowed, error = _allowed(query.dtype), error_of(0.0)
    if not (error <= allowed).all():
        # Among few roundings, each of two choices that are equally good is made.
        rounded_errors = [error_of(4 * torch.finfo(query.dtype).eps) for _ in range(_NUM_ROUNDINGS)]
        error = torch.where((torch.stack(rounded_errors) <= allowed).any(0), torch.zeros_like(error), error)
    token_errors = error.amax(1)
    return {token: float(token_errors[token]) for token in torch.nonzero(~(token_errors <= allowed)).flatten().tolist()}


def _allowed(dtype: torch.dtype) -> float:
    """Return the largest error of a right output, as a share of its size."""
    return float(torch.finfo(dtype).eps ** 0.5)


def _draw_steps(lengths: Sequence[int], generator: torch.Generator) -> Iterator[dict[str, Part]]:
    """Yield steps of random sizes in which requests grow to their lengths, by number; some have no new tokens."""
    num_computed = np.zeros(len(lengths), dtype=np.int64)
    while (rest := np.array(lengths) - num_computed).any():
        # Some steps compute a single token of each request, as decodes do.
        max_new = 1 if torch.rand((), generator=generator) < 0.5 else 12
        num_new = np.minimum(rest, torch.randint(0, max_new + 1, (len(lengths),), generator=generator).numpy())
        if num_new.any():
            pairs = zip(num_computed.tolist(), num_new.tolist(), strict=True)
            yield {str(number): Part(*pair) for number, pair in enumerate(pairs)}
        num_computed = num_computed + num_new


def _serve(
    backend_class: type[AttentionBackend],
    layer: LayerSpec,
    requests: Sequence[Request],
    steps: Sequence[dict[str, Part]],
) -> list[torch.Tensor]:
    """Return the outputs of all tokens of the requests, which are computed in steps."""
    runner = Runner(backend_class, [*with_entries(layer, frozenset(requests[0][3]))], steps, HOST)
    runner.poison()
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in steps:
        runner.give_pages(step)
        growing = {name: part for name, part in step.items() if part.num_new}
        batch = make_batch([*growing.values()], runner.rows(growing), HOST)
        runner.begin(build_metadata(batch, runner.manager.tables, HOST), batch)
        parts = [(requests[int(name)], slice(part.num_computed, part.seq_len)) for name, part in growing.items()]
        query, key, value = (
            torch.cat(tensors)
            for tensors in zip(*([tensor[tokens] for tensor in request[:3]] for request, tokens in parts), strict=True)
        )
        inputs = {name: torch.cat([request[3][name][tokens] for request, tokens in parts]) for name in requests[0][3]}
        try:
            computed = runner.attention[layer.name](query, key, value, inputs=inputs)
        except BackendError as error:
            raise ConformanceError(str(error)) from error
        for name, output in zip(growing, computed.split([part.num_new for part in growing.values()]), strict=True):
            outputs[int(name)].append(output)
        runner.commit(growing)
    return [torch.cat(parts) for parts in outputs]
