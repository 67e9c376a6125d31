"""Runs several layers for several steps, and compares each layer's output with the reference.

Between steps, requests leave and join, the batch is reordered, and the inputs of the first step are overwritten: the
tensors of its metadata hold those of the second step, or zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe_testing.case import Case, Inputs, Learned, Request, draw_inputs
from kvframe_testing.conformance import check_results, failure
from kvframe_testing.effects import without_side_effects
from kvframe_testing.runner import Content, Runner
from kvframe_testing.runs import Run
from kvframe_testing.writes import tensors_of

_POISONS = (float("nan"), 1e4)
"""The values of all memory without live state, in turns. If a backend hides NaN, the large value shows the error."""

_STORED = ("key", "value", "read_key", "read_value")


@without_side_effects
def check_run(backend_class: type[AttentionBackend], run: Run, device: str = "cpu") -> None:
    """Check that a backend's output is within the error bound of the dtype, and that it writes to no other memory.

    If it declares ``returns_lse``, what it writes for the log-sum-exp is compared too.
    """
    target, case = torch.device(device), run.case(run.layers[0], 0)
    contents = {layer.name: _draw(run, layer) for layer in run.layers}
    on_device = {name: attrs.evolve(content, learned=content.learned.to(target)) for name, content in contents.items()}
    last_metadata: tuple[CommonAttentionMetadata, ...] = ()
    try:
        runner = Runner(backend_class, run.layers, run.steps, target, num_shared=run.num_shared)
        runner.bind(on_device)
        for number, poison in zip(range(len(run.steps)), cycle(_POISONS)):
            run, step = _packed(run, number, runner)
            cases = [run.case(layer, number) for layer in run.layers]
            case = cases[0]
            runner.prepare(cases, on_device, step, poison)
            metadata = runner.metadata(case, step)
            for common in last_metadata:
                for tensor in tensors_of(common):
                    tensor.zero_()
            last_metadata = metadata = tuple(map(_in_memory_of, last_metadata, metadata)) or metadata
            runner.begin(metadata)
            for case in cases:
                name = case.layer.name
                inputs = _of_step(contents[name], step)
                common = metadata[runner.group_of(case.layer)]
                output = runner.compute(case, inputs, on_device[name].learned, common, poison)
                check_results(case, output, inputs, contents[name].learned)
            runner.commit(step)
    except KVFrameError as error:
        raise failure(backend_class, case, error) from error


def _draw(run: Run, layer: LayerSpec) -> Content:
    """Return a layer's random tensors for the whole run."""
    lengths = {name: request.seq_len for step in run.steps for name, request in step.items()}
    requests = tuple(Request(0, length) for length in lengths.values())
    case = Case(name=f"{run.name}, {layer.name}", layer=layer, requests=requests, form=run.form)
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    inputs_of = dict(zip(lengths, draw_inputs(case, generator), strict=True))
    first_inputs = next(iter(inputs_of.values()))
    for inputs in inputs_of.values():
        for name in _STORED:
            getattr(inputs, name)[: run.num_shared] = getattr(first_inputs, name)[: run.num_shared]
    return Content(inputs_of, Learned.draw(case, generator))


def _of_step(content: Content, step: Mapping[str, Request]) -> list[Inputs]:
    """Return the inputs of one step's case."""
    return [
        Inputs(
            query=content.requests[name].query[request.num_computed : request.seq_len],
            **{field: getattr(content.requests[name], field)[: request.seq_len] for field in _STORED},
        )
        for name, request in step.items()
    ]


def _packed(run: Run, number: int, runner: Runner) -> tuple[Run, dict[str, Request]]:
    """Return a run and a step with the step's requests in the order in which an engine packs them."""
    items = [*run.steps[number].items()]
    order = runner.attention.order_for(np.array([request.num_new for _, request in items]))
    step = dict(items if order is None else [items[index] for index in order])
    return attrs.evolve(run, steps=(*run.steps[:number], step, *run.steps[number + 1 :])), step


def _in_memory_of(last_metadata: CommonAttentionMetadata, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return metadata in the memory of the step before if they have static shapes, as in a graph."""
    changes: dict[str, Any] = {}
    for field in attrs.fields(CommonAttentionMetadata) if metadata.static_shapes else ():
        old, new = getattr(last_metadata, field.name), getattr(metadata, field.name)
        if isinstance(new, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype):
            changes[field.name] = old.copy_(new)
    return attrs.evolve(metadata, **changes)
