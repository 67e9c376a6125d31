"""Checks a backend's steps on a device without memory: one copy to the device, no wait for it, declared host fields.

The device is torch's ``meta``: any read of a value raises, and every copy to it can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvframe.attention.request_order import is_ordered, permute
from kvframe.attention.staging import HOST
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.capture import GraphCapture, NotReplayableError
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.metadata import DEVICE_FIELDS, CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec, align_up
from kvframe.selection.refusals import find_refusals
from kvframe_testing.case import Case, Learned, Request
from kvframe_testing.grid import formats_of, in_format, make_layer, make_masks, usual_head_size
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import META
from kvframe_testing.runner import Content, Runner
from kvframe_testing.state import ALIBI_SLOPES, BIAS_SIZES, SOFT_CAP, StateForm, form_of

MASKS = (
    *("full", "window=5", "window=5-sink_tokens=3", "bidirectional", "chunk=6", "stride=6", "function-stride=6"),
    "window=4-dilation=3",
)
"""The masks of the grid that the layers have."""

NUM_FORMATTED = 3
"""The number of layers in each format: a backend handles all pages in the same way."""

Requests = tuple[tuple[int, int], ...]
"""For each request, the computed tokens and the new tokens."""

DECODES: Requests = ((5, 1), (13, 1), (4, 1))
STEPS: Mapping[str, tuple[Requests, bool]] = {
    "decodes": (DECODES, False),
    "decodes of a graph": (DECODES, True),
    "a mixed batch": (((9, 1), (0, 7), (5, 3), (13, 1), (0, 300)), False),
}
"""Steps by name, and whether they are replayed, if the backend's steps can be captured."""


class CopyCounter(TorchDispatchMode):
    """A torch mode that records the operations that copy tensors from the host to the device.

    Attributes:
        names: Their names, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call ``func``, and record it if it reads a tensor of the host, and reads or makes one of the device."""
        result = func(*args, **(kwargs or {}))
        read_devices = [
            tensor.device.type for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
        ]
        result_devices = [tensor.device.type for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        if HOST.type in read_devices and META.type in read_devices + result_devices:
            self.names.append(str(func))
        return result


def check_staging(backend_class: type[AttentionBackend], formats: Sequence[KVFormat] | None = None) -> None:
    """Check that every step on a backend copies to its device once, and never waits for it.

    Layers of each mask and feature that the backend serves compute decodes and a mixed batch, and also the decodes of a
    graph if these can be captured. A few layers do so in every format that the backend reads, and in one whose pages
    are copied for it; ``formats`` are those that exist, the installed ones unless given. If it declares
    ``returns_lse``, each layer is also computed with the log-sum-exp. Functions outside of torch do not work on such a
    device: replace them by functions that return tensors of the right shape. Copies inside a library are not counted.

    What each builder can be captured for must be what the capabilities declare. A builder that builds on the host is
    also given metadata whose undeclared fields lie on the device only, as another host may have them.
    """
    form, capabilities = form_of(backend_class), backend_class.capabilities
    read_formats = formats_of(capabilities, formats)
    copied_formats = [kv_format for kv_format in read_formats if kv_format.name not in capabilities.formats]
    for kv_format in (
        PLAIN,
        *(kv_format for kv_format in read_formats if kv_format.name in capabilities.formats),
        *copied_formats[:1],
    ):
        layers = _layers(backend_class, form, kv_format)
        if kv_format != PLAIN:
            del layers[NUM_FORMATTED:]
        elif not layers:
            raise ConformanceError(f"{backend_class.__name__} serves no layer of the kit")
        for step, (requests, is_replayed) in STEPS.items() if layers else ():
            where = f"{backend_class.__name__} on {step}, stored as {kv_format.name},"
            try:
                copies = _copies_of_a_step(backend_class, form, layers, requests, is_replayed)
            except NotReplayableError as error:
                raise ConformanceError(f"{where} differs from what was captured: {error}") from error
            except (RuntimeError, BackendError) as error:
                if not _is_of_torch(error):
                    raise
                raise ConformanceError(f"{where} asks the device for a value: {error}") from error
            if copies is not None and len(copies) != 1:
                raise ConformanceError(f"{where} makes {len(copies)} copies to the device: {', '.join(copies)}")


def _is_of_torch(error: Exception) -> bool:
    """Return whether torch raised an error, or the cause of the error."""
    return isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)


def _layers(backend_class: type[AttentionBackend], form: StateForm, kv_format: KVFormat) -> list[LayerSpec]:
    """Return a layer of each mask and feature that the backend serves, at one block size."""
    capabilities = backend_class.capabilities
    device, block_size = min(capabilities.devices), align_up(16, capabilities.block_size_multiple)
    masks = make_masks(block_size)
    scores: Sequence[Mapping[str, Any]] = ({"soft_cap": SOFT_CAP}, {"has_sinks": True})
    biases: Sequence[Mapping[str, Any]] = ({"relative_bias": BIAS_SIZES}, {"alibi_slopes": ALIBI_SLOPES})
    form_features = form.features(usual_head_size(capabilities, form)).values()
    layers = []
    for index, options in enumerate((*(masks[name] for name in MASKS), *scores, *biases, *form_features)):
        layer = in_format(make_layer(capabilities, form, **{"block_size": block_size, **options}), kv_format)
        if layer is not None and not find_refusals(capabilities, layer, device):
            layers.append(attrs.evolve(layer, name=f"layers.{index}"))
    return layers


def _copies_of_a_step(
    backend_class: type[AttentionBackend],
    form: StateForm,
    layers: Sequence[LayerSpec],
    requests: Requests,
    is_replayed: bool,
) -> list[str] | None:
    """Run a step of all layers; return the operations that copied to the device."""
    step = {str(index): Request(*request) for index, request in enumerate(requests)}
    runner = Runner(backend_class, layers, [step], META)
    cases = [Case(name=layer.name, layer=layer, requests=(*step.values(),), form=form) for layer in layers]
    learned = {case.name: Learned.draw(case, torch.Generator()).to(META) for case in cases}
    runner.bind({name: Content({}, tensors) for name, tensors in learned.items()})
    runner.give_pages(step)
    metadata, attention = runner.metadata(cases[0], step), runner.attention
    num_tokens = sum(request.num_new for request in step.values())
    for group in attention.groups:
        _check_capture(group.builder, backend_class)
        _check_host_fields(group.builder, metadata[group.cache_group])
    captured = None
    if is_replayed:
        if attention.capture is GraphCapture.NEVER:
            return None
        metadata = tuple(attrs.evolve(layer, static_shapes=True) for layer in metadata)
        captured = attention.capture_step(metadata, ())
    with CopyCounter() as copies:
        if captured is None:
            attention.begin_step(metadata)
        else:
            attention.replay_step(captured, metadata, ())
        for case in cases:
            _attend(runner, case, learned[case.name], num_tokens)
    names: list[str] = copies.names
    return names


def _check_capture(builder: AttentionMetadataBuilder, backend_class: type[AttentionBackend]) -> None:
    """Check that a builder can be captured for what the capabilities declare, so that ``auto`` knows it."""
    declared = backend_class.capabilities.capture
    if builder.capture is not declared:
        raise ConformanceError(
            f"{backend_class.__name__} declares capture = GraphCapture.{declared.name} in its capabilities, and its "
            f"builder declares GraphCapture.{builder.capture.name}: declare the builder's in both"
        )


def _check_host_fields(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> None:
    """Check that a builder reads no other fields on the host than it declares."""
    if builder.on_host is None:
        return
    if builder.batch_order is not None and not is_ordered(builder.batch_order, common):
        common, _ = permute(common, builder.batch_order)
    device_tensors = {
        name: getattr(common, name).to(META)
        for name in DEVICE_FIELDS - builder.on_host
        if getattr(common, name) is not None
    }
    undeclared = f"its builder reads other fields on the host than on_host = {sorted(builder.on_host)}"
    with CopyCounter() as counter:
        try:
            builder.build_together([(builder, attrs.evolve(common, **device_tensors))])
        except (RuntimeError, TypeError) as error:
            raise ConformanceError(f"{undeclared}: {error}") from error
    if counter.names:
        raise ConformanceError(f"{undeclared}: {counter.names[0]} mixes tensors of host and device")


def _attend(runner: Runner, case: Case, learned: Learned, num_tokens: int) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=case.query_dtype, device=META)

    layer = runner.attention[case.layer.name]
    try:
        layer.write(*case.form.draw(case.spec, num_tokens, draw), layer.kv_cache, layer.step.read)
        runner.attend(case, draw(num_tokens, case.query.num_heads, case.query.head_size), learned)
    except (BackendError, ConformanceError) as error:
        if _is_of_torch(error):
            raise
        raise ConformanceError(f"{case.name}: {error}") from error
