"""Checks a wrapper: runs it on batches of every kind, and compares its effect with its declarations.

Attention after the wrapper is compared with attention before it: each query has to attend to the same slots, unless
the wrapper declares another mask.

Errors that ``apply_wrapper`` finds in any wrapper, such as an unknown extension, are not checked again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.attention.padding import pad_metadata
from kvframe.attention.wrapping import MISTAKES, apply_wrapper
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import WrapperError
from kvframe.contract.metadata import (
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
)
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.loading.plugins import load_plugins
from kvframe.selection.choice import bind_chain
from kvframe_testing.attended import find_difference
from kvframe_testing.batches import wrapper_batches
from kvframe_testing.case import Case, Request
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.composition import (
    CROSS,
    CROSS_STEPS,
    LAYERS,
    NOT_CAUSAL,
    RANGES,
    SHARING,
    make_cases_of,
    make_labelled_layer,
)
from kvframe_testing.conformance import check_backend
from kvframe_testing.effects import without_side_effects
from kvframe_testing.grid import chain_refusals
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import find_problem, make_metadata, on_device
from kvframe_testing.state import form_of
from kvframe_testing.writes import num_writes

_AXES = {
    SEQ_STARTS: Axis.REQUEST,
    RANGE_ENDS: Axis.TOKEN,
}
_FIELDS = tuple(field.name for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions")
_LOOP_SIZES = (8, 256)
_UNIFORM_FAMILIES: Mapping[GraphCapture, tuple[str, ...]] = {
    GraphCapture.DECODE: ("decode", "later_decode"),
    GraphCapture.UNIFORM: ("drafts", "later_drafts"),
    GraphCapture.ALWAYS: (),
}
"""The batches that one graph may serve, for each level of capture; all of them at the last one."""
_OF_A_BATCH = (NOT_CAUSAL, CROSS, RANGES)
"""Kinds that differ in their batches only; a layer's declarations are checked once."""


@without_side_effects
def check_wrapper(wrapper: MetadataWrapper, layer: LayerSpec) -> None:
    """Check a wrapper's declarations and its effect against the contract.

    Args:
        wrapper: The wrapper, as a stack gives it.
        layer: A layer that it can serve; choose small sizes, so that windows and chunks end within a few tokens.
    """
    _check_declaration(wrapper)
    bound = wrapper.for_layer(layer)
    assert layer.spec is not None
    batches = wrapper_batches(layer.spec.block_size)
    num_accepted, results = 0, list[_Kept]()
    for name, requests in {**batches, "cross": CROSS_STEPS["mixed"]}.items():
        for batch, metadata in _variants(name, make_metadata(requests, layer.spec.block_size)):
            for axis in _open_axes(bound):
                num_accepted += _check_batch(bound, layer, batch, _extend(bound, metadata, axis), results)
        for batch, metadata in _of_another_host(name, make_metadata(requests, layer.spec.block_size)):
            _check_batch(bound, layer, batch, metadata, results)
    if not num_accepted:
        raise _failure(wrapper, "any batch", "it refuses all of them")
    for batch, wrapped_metadata, values_before in results:
        _require_equal(wrapper, batch, "a later call writes to its result", values_before, _values(wrapped_metadata))
    _check_loops(bound, batches["mixed"], layer.spec.block_size)
    for level, names in _UNIFORM_FAMILIES.items():
        if bound.capture >= level:
            _check_static_shapes(bound, {name: batches[name] for name in names or batches}, layer.spec.block_size)


# --- batches ----------------------------------------------------------------------------------------------------------


def _variants(name: str, metadata: CommonAttentionMetadata) -> Iterator[tuple[str, CommonAttentionMetadata]]:
    yield name, metadata
    padded = pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + 3,
        num_tokens=metadata.num_actual_tokens + 5,
        num_generating=metadata.num_generating_rows + 2,
        max_query_len=metadata.max_query_len,
    )
    yield f"{name}, padded", attrs.evolve(padded, static_shapes=False)
    yield f"{name}, padded, with static shapes", padded


def _of_another_host(name: str, metadata: CommonAttentionMetadata) -> Iterator[tuple[str, CommonAttentionMetadata]]:
    """Yield the batch as hosts describe it that do not know its generating tokens, or its exact lengths."""
    yield (
        f"{name}, with unknown generating tokens",
        attrs.evolve(
            metadata,
            num_generating=metadata.num_actual_tokens,
            generating_indices=None,
            generating_indices_cpu=None,
        ),
    )
    num_slots = metadata.block_table.shape[1] * metadata.block_size
    bounds_of_lengths = (metadata.seq_lens_cpu + 1).clamp_(max=num_slots)
    bounded = attrs.evolve(metadata, seq_lens_cpu=bounds_of_lengths, max_seq_len=num_slots, exact_lens=False)
    yield f"{name}, with upper bounds of lengths", bounded


def _open_axes(wrapper: MetadataWrapper) -> Sequence[Axis]:
    """Return the axes along which extensions may lie whose names leave that open; one if the wrapper takes none."""
    takes_others = any(use is not FieldUse.REJECT and name not in _AXES for name, use in wrapper.extensions.items())
    return [*Axis] if takes_others else [Axis.REQUEST]


def _extend(wrapper: MetadataWrapper, metadata: CommonAttentionMetadata, axis: Axis) -> CommonAttentionMetadata:
    """Return the batch with every extension that the wrapper takes, along ``axis`` if its name leaves the axis open."""
    sizes = {Axis.REQUEST: metadata.num_reqs, Axis.TOKEN: metadata.slot_mapping.shape[0], Axis.STEP: 2}

    def extension(name: str) -> Extension:
        along = _AXES.get(name, axis)
        host = torch.arange(sizes[along], dtype=torch.int32) % 2
        if name == SEQ_STARTS:
            host = torch.minimum(host, metadata.seq_lens_cpu - metadata.query_start_loc_cpu.diff()).clamp_(min=0)
        if name == RANGE_ENDS:
            host = _make_range_ends(metadata)
        return Extension(host.clone(), along, host)

    accepted_names = [name for name, use in wrapper.extensions.items() if use is not FieldUse.REJECT]
    return attrs.evolve(metadata, extensions={name: extension(name) for name in accepted_names})


_Kept = tuple[str, CommonAttentionMetadata, dict[str, Any]]
"""A batch's name, what a wrapper made of it, and a copy of the values of that."""


def _make_range_ends(metadata: CommonAttentionMetadata) -> torch.Tensor:
    """Return ends of ranges, ``[num_tokens], int32, host``: the second half of each request's new tokens is in one."""
    ends = torch.zeros(metadata.slot_mapping.shape[0], dtype=torch.int32)
    starts = metadata.query_start_loc_cpu.tolist()
    for start, stop, seq_len in zip(starts, starts[1:], metadata.seq_lens_cpu.tolist(), strict=False):
        ends[(start + stop) // 2 : stop] = seq_len
    return ends


# --- the checks -------------------------------------------------------------------------------------------------------


def _check_declaration(wrapper: MetadataWrapper) -> None:
    undeclared = [name for name in _FIELDS if name not in wrapper.fields]
    unknown = sorted(set(wrapper.fields) - set(_FIELDS))
    if undeclared or unknown:
        problem = f"does not declare {undeclared}" if undeclared else f"declares {unknown}, which the metadata lacks"
        raise _failure(wrapper, "its class", f"it {problem}")


def _check_batch(
    wrapper: MetadataWrapper,
    layer: LayerSpec,
    batch: str,
    metadata: CommonAttentionMetadata,
    results: list[_Kept],
) -> bool:
    """Check one batch, and add what is made of it to the results; return whether the wrapper accepts it."""
    values_before, writes_before = _values(metadata, copy=True), _writes(metadata)
    try:
        first_result = apply_wrapper(wrapper, metadata)
        second_result = apply_wrapper(wrapper, metadata)
    except WrapperError as error:
        if error.code in MISTAKES:
            raise _failure(wrapper, batch, str(error)) from error
        return False
    _require_equal(wrapper, batch, "it writes to its input", writes_before, _writes(metadata))
    _require_equal(wrapper, batch, "it writes to its input", values_before, _values(metadata))
    _require_equal(wrapper, batch, "it gives two results for one input", _values(first_result), _values(second_result))
    _check_extensions(wrapper, layer, batch, metadata, first_result)
    problem = find_problem(first_result) or find_difference(wrapper, layer, metadata, first_result)
    if problem:
        raise _failure(wrapper, batch, problem)
    _check_devices(wrapper, batch, metadata)
    results.append((batch, first_result, _values(first_result, copy=True)))
    return True


def _check_devices(wrapper: MetadataWrapper, batch: str, metadata: CommonAttentionMetadata) -> None:
    """Check that a wrapper does not wait for the device, and makes each field where it belongs."""
    try:
        wrapped_metadata = wrapper(on_device(metadata))
    except (RuntimeError, TypeError) as error:
        raise _failure(
            wrapper, batch, f"it waits for a value of the device, or mixes its tensors with the host's: {error}"
        ) from error
    for name, value in _values(wrapped_metadata).items():
        if isinstance(value, torch.Tensor) and value.is_meta == name.endswith("_cpu"):
            place, right_place = ("device", "host") if value.is_meta else ("host", "device")
            raise _failure(wrapper, batch, f"it makes {name} on the {place}, and it belongs to the {right_place}")


def _check_extensions(
    wrapper: MetadataWrapper,
    layer: LayerSpec,
    batch: str,
    metadata: CommonAttentionMetadata,
    wrapped_metadata: CommonAttentionMetadata,
) -> None:
    for name, extension in metadata.extensions.items():
        use, wrapped_extension = wrapper.extensions[name], wrapped_metadata.extensions.get(name)
        if use is FieldUse.CARRY and (wrapped_extension is None or wrapped_extension.values is not extension.values):
            raise _failure(wrapper, batch, f"it declares to carry the extension {name!r} and returns another")
        if use is FieldUse.RESET and wrapped_extension is extension and wrapped_metadata is not metadata:
            raise _failure(wrapper, batch, f"it declares to reset the extension {name!r} and returns it unchanged")
    added_names = set(wrapped_metadata.extensions) - set(metadata.extensions) - wrapper.added_extensions(layer)
    if added_names:
        raise _failure(wrapper, batch, f"it adds the extensions {sorted(added_names)} and does not declare them")


def _check_loops(wrapper: MetadataWrapper, requests: Sequence[Request], block_size: int) -> None:
    """Raise if a larger batch takes more of the interpreter's instructions: the wrapper then loops over requests."""
    for variant in range(3):
        counts = []
        for size in _LOOP_SIZES:
            same_shape = [requests[index % len(requests)] for index in range(size)]
            batch, metadata = list(_variants("", make_metadata(same_shape, block_size)))[variant]
            counts.append(_count_instructions(wrapper, metadata))
        if counts[-1] > counts[0]:
            raise _failure(
                wrapper,
                f"{_LOOP_SIZES[-1]} requests{batch}",
                f"it loops over requests in Python: {counts[0]} instructions for {_LOOP_SIZES[0]} requests, "
                f"{counts[-1]} for {_LOOP_SIZES[-1]}",
            )


def _count_instructions(wrapper: MetadataWrapper, metadata: CommonAttentionMetadata) -> int:
    wrapper(metadata)
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    trace_before = sys.gettrace()
    for _ in range(2):  # Python 3.12 counts from the second time on
        count = 0
        sys.settrace(trace)
        try:
            wrapper(metadata)
        finally:
            sys.settrace(trace_before)
    return count


def _check_static_shapes(wrapper: MetadataWrapper, batches: Mapping[str, Sequence[Request]], block_size: int) -> None:
    steps = {name: make_metadata(requests, block_size) for name, requests in batches.items()}
    sizes = {
        "num_reqs": max(step.num_reqs for step in steps.values()),
        "num_tokens": max(step.num_actual_tokens for step in steps.values()),
        "num_generating": max(step.num_generating_rows for step in steps.values()),
        "max_query_len": max(step.max_query_len for step in steps.values()),
        "max_seq_len": max(step.max_seq_len for step in steps.values()),
    }
    # Graphs also run with fewer requests; the other rows then have no tokens.
    fewer = {
        f"{name} but one": make_metadata(requests[:-1], block_size)
        for name, requests in batches.items()
        if len(requests) > 1
    }
    shapes = {}
    for name, step in {**steps, **fewer}.items():
        padded = pad_metadata(step, **sizes)
        shapes[name] = _shapes(padded, apply_wrapper(wrapper, padded))
    (first, shapes_of_first), *other_shapes = shapes.items()
    for name, wrapped_shapes in other_shapes:
        _require_equal(
            wrapper,
            f"{name} at a graph's sizes",
            f"shapes differ from those of {first}",
            shapes_of_first,
            wrapped_shapes,
        )


# --- comparing --------------------------------------------------------------------------------------------------------


def _values(metadata: CommonAttentionMetadata, *, copy: bool = False) -> dict[str, Any]:
    """Return all values of the metadata by name; ``copy`` copies the tensors."""
    values = {name: getattr(metadata, name) for name in _FIELDS}
    for name, extension in metadata.extensions.items():
        values[f"extensions[{name!r}]"] = extension.values
        values[f"extensions[{name!r}].values_cpu"] = extension.values_cpu
    return {
        name: value.clone() if copy and isinstance(value, torch.Tensor) else value for name, value in values.items()
    }


def _writes(metadata: CommonAttentionMetadata) -> dict[str, int]:
    """Return the number of writes to the memory of each tensor, by name."""
    return {name: num_writes(value) for name, value in _values(metadata).items() if isinstance(value, torch.Tensor)}


def _shapes(padded: CommonAttentionMetadata, wrapped_metadata: CommonAttentionMetadata) -> dict[str, Any]:
    """Return what must be equal in all steps that a graph serves: shapes, and which tensors are the batch's own."""
    values_before, values_after = _values(padded), _values(wrapped_metadata)
    tensors = {name: value for name, value in values_after.items() if isinstance(value, torch.Tensor)}
    return {
        **{name: (value.shape, value is values_before.get(name)) for name, value in tensors.items()},
        "num_reqs": wrapped_metadata.num_reqs,
        "max_query_len": wrapped_metadata.max_query_len,
    }


def _require_equal(
    wrapper: MetadataWrapper, batch: str, message: str, expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> None:
    different_names = sorted(expected.keys() ^ actual.keys())
    for name in expected.keys() & actual.keys():
        expected_value, actual_value = expected[name], actual[name]
        tensors = isinstance(expected_value, torch.Tensor) and isinstance(actual_value, torch.Tensor)
        if not (torch.equal(expected_value, actual_value) if tensors else expected_value == actual_value):
            different_names.append(name)
    if different_names:
        raise _failure(wrapper, batch, f"{message}: {', '.join(sorted(different_names))}")


def _failure(wrapper: MetadataWrapper, batch: str, problem: str) -> ConformanceError:
    return ConformanceError(f"wrapper {wrapper.name!r}, {batch}: {problem}")


# --- the checks of a wrapper ------------------------------------------------------------------------------------------


def wrapper_checks(
    wrapper_class: type[MetadataWrapper],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    layers: Mapping[str, LayerSpec] = MappingProxyType({}),
) -> Checks:
    """Return the checks of a wrapper: ``check_wrapper``, and the reference backend's attention after it.

    ``layers`` are more layers that it can serve, by name, for which its declarations are checked.
    """
    part = f"wrapper {name or wrapper_class.name!r}"
    wrapper = make_part(part, wrapper_class, options)
    reference: type[AttentionBackend] = load_plugins().registry.backends.load("torch_reference")
    checks: list[Check] = []
    refused_codes: dict[str, tuple[str, ...]] = {}
    for label in (label + sharing for label in LAYERS for sharing in ("", SHARING)):
        layer = make_labelled_layer(label, reference.capabilities, form_of(reference))
        try:
            bind_chain((wrapper,), layer)
        except WrapperError as error:
            refused_codes[label] = (error.code,)
            continue
        if not any(kind in label for kind in _OF_A_BATCH):
            run = partial(check_wrapper, wrapper, layer)
            checks.append(Check(name=f"declared-{_slug(label)}", features=(label,), run=run))
        codes = tuple(refusal.code for refusal in chain_refusals((wrapper,), layer, reference.capabilities, "cpu"))
        if codes:
            refused_codes.setdefault(label, codes)
            continue
        checks += [
            Check(
                name=f"attention-{_slug(case.name)}", features=(label,), run=partial(_check_attention, reference, case)
            )
            for case in make_cases_of((wrapper,), label, layer, NOT_CAUSAL not in label)
        ]
    checks += [
        Check(name=f"declared-{label}", features=("more layers",), run=partial(check_wrapper, wrapper, layer))
        for label, layer in layers.items()
    ]
    return Checks(part=part, checks=tuple(checks), refused=refused_codes)


def _slug(label: str) -> str:
    return label.replace(", ", "-").replace(": ", "-").replace(" ", "_")


def _check_attention(backend_class: type[AttentionBackend], case: Case) -> str | None:
    """Compare attention after the wrapper; return the code if the wrapper refuses the step."""
    try:
        check_backend(backend_class, case)
    except WrapperError as error:
        if error.code in MISTAKES:
            raise ConformanceError(str(error)) from error
        return error.code
    return None
