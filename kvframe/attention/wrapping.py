"""Applies wrappers to metadata, and checks every result before a kernel reads it.

A kernel that reads a wrong length or a wrong block id reads foreign memory, and the process ends. What builders and
backends make of right metadata is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.attention.shapes import find_misfit
from kvframe.attention.values import find_contradiction, find_foreign_id, find_wrong_tensor
from kvframe.contract.errors import KVFrameError, WrapperError
from kvframe.contract.foreign import safe_text
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.wrapper import FieldUse, MetadataWrapper

MISTAKES = frozenset({"changed_field", "failed", "lost_extension", "wrong_shape", "wrong_value"})
"""Codes of the errors that only a mistake in a wrapper causes."""


def apply_wrapper(
    wrapper: MetadataWrapper, metadata: CommonAttentionMetadata, layers: Sequence[str] = ()
) -> CommonAttentionMetadata:
    """Apply one wrapper, and check that its result is what it declares.

    Args:
        wrapper: The wrapper, made for the layers that will read the result.
        metadata: The step's metadata, or what another wrapper made of it.
        layers: The names of these layers, for errors.

    Raises:
        WrapperError: The step has something that the wrapper rejects (``rejected_field``, ``rejected_extension``) or
            does not know (``unknown_field``, ``unknown_extension``). Or the wrapper makes a mistake: it changed a field
            or lost an extension that it declares to pass on (``changed_field``, ``lost_extension``), its result has
            parts that do not go together (``wrong_shape``), or numbers and host copies that contradict each other
            (``wrong_value``). Or it raised anything else (``failed``).
    """
    for field, default, code in _guarded_fields(type(wrapper)):
        if getattr(metadata, field) != default:
            raise WrapperError(
                f"wrapper {wrapper.name!r} cannot take a step with {field} = {getattr(metadata, field)!r}: "
                + ("it rejects it" if code == "rejected_field" else "it does not know this field"),
                code=code,
            )
    optional = {name for name, extension in metadata.extensions.items() if extension.optional}
    unknown = optional - wrapper.extensions.keys()
    if unknown:
        known_extensions = {name: extension for name, extension in metadata.extensions.items() if name not in unknown}
        metadata = attrs.evolve(metadata, extensions=MappingProxyType(known_extensions))
    for name in metadata.extensions:
        use = wrapper.extensions.get(name)
        if use is None or use is FieldUse.REJECT:
            accepted_names = ", ".join(
                sorted(name for name, use in wrapper.extensions.items() if use is not FieldUse.REJECT)
            )
            raise WrapperError(
                f"wrapper {wrapper.name!r} "
                + ("does not know" if use is None else "rejects")
                + f" the extension {name!r}; it takes {accepted_names or 'none'}",
                code="unknown_extension" if use is None else "rejected_extension",
            )
    try:
        wrapped = wrapper(metadata)
    except (KVFrameError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise wrapper_mistake(wrapper, layers, f"failed: {safe_text(error)}", "failed") from error
    if wrapped is metadata:
        return wrapped
    if not isinstance(wrapped, CommonAttentionMetadata):
        raise wrapper_mistake(wrapper, layers, f"returns {type(wrapped).__name__!r}, not metadata", "wrong_shape")
    problem = find_misfit(wrapped, metadata)
    if problem is not None:
        problem = f"gives metadata that does not fit together: {problem}"
        raise wrapper_mistake(wrapper, layers, problem, "wrong_shape")
    changed = _find_changed(wrapper, metadata, wrapped)
    if changed is not None:
        problem = f"declares to carry {changed} and returns another"
        raise wrapper_mistake(wrapper, layers, problem, "changed_field")
    for name in metadata.extensions:
        if wrapper.extensions[name] is not FieldUse.RESET and name not in wrapped.extensions:
            problem = f"lost the extension {name!r}, which it declares to pass on"
            raise wrapper_mistake(wrapper, layers, problem, "lost_extension")
    problem = find_contradiction(wrapped, metadata)
    if problem is not None:
        raise wrapper_mistake(wrapper, layers, f"gives wrong values: {problem}", "wrong_value")
    return wrapped


def wrapper_mistake(wrapper: MetadataWrapper, layers: Sequence[str], problem: str, code: str) -> WrapperError:
    """Return the error for a wrapper that does what no wrapper may do.

    Args:
        wrapper: The wrapper.
        layers: The names of the layers that read its result; empty if that is not known.
        problem: What it does: a verb and what follows.
        code: One of ``MISTAKES``.
    """
    where = ""
    if layers:
        where = f", of the layer {layers[0]!r}" + (f" and {len(layers) - 1} others," if len(layers) > 1 else ",")
    return WrapperError(f"wrapper {wrapper.name!r}{where} {problem}; this is a mistake in the wrapper", code=code)


def apply_chain(chain: Sequence[MetadataWrapper], metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Apply the wrappers of ``chain`` in order; raises what ``apply_wrapper`` raises."""
    for wrapper in chain:
        metadata = apply_wrapper(wrapper, metadata)
    return metadata


def _find_changed(
    wrapper: MetadataWrapper, source: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> str | None:
    """Return a field that a wrapper declares to carry and does not; None if there is none."""
    names, values_of = _carried_fields(type(wrapper))
    source_values, result_values = values_of(source), values_of(wrapped)
    if all(map(is_, source_values, result_values)):
        return None
    for name, source_value, result_value in zip(names, source_values, result_values, strict=True):
        # Tensors are carried as they are; equal numbers may be two objects.
        if source_value is not result_value and not (isinstance(source_value, int) and source_value == result_value):
            return name
    return None


@cache
def _carried_fields(
    wrapper_class: type[MetadataWrapper],
) -> tuple[tuple[str, ...], Callable[[CommonAttentionMetadata], tuple[Any, ...]]]:
    """Return the fields that such a wrapper carries, and a function that reads them from metadata."""
    field_names = (field.name for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions")
    names = tuple(name for name in field_names if wrapper_class.fields.get(name) is FieldUse.CARRY)
    # For fewer than two names, attrgetter does not return a tuple, so a field that no wrapper may change is added.
    return (*names, "block_size", "block_size"), attrgetter(*names, "block_size", "block_size")


@cache
def _guarded_fields(wrapper_class: type[MetadataWrapper]) -> tuple[tuple[str, Any, str], ...]:
    """Return the fields that a step must leave at their default for such a wrapper, with the code if it does not."""
    guarded = []
    for field in attrs.fields(CommonAttentionMetadata):
        use = wrapper_class.fields.get(field.name)
        if field.name == "extensions" or use not in (None, FieldUse.REJECT):
            continue
        if field.default is attrs.NOTHING:
            raise WrapperError(
                f"wrapper {wrapper_class.name!r} does not say what it does with the field {field.name!r}, which every "
                "step has",
                code="unknown_field",
            )
        guarded.append((field.name, field.default, "unknown_field" if use is None else "rejected_field"))
    return tuple(guarded)


# --- in a step --------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class WrapperCall:
    """One call of a wrapper in every step.

    Attributes:
        wrapper: The wrapper, made for the layers.
        layers: The names of the layers that read its result.
        pages: A state tensor of these layers, whose length is the number of block ids; None if it is not known. If the
            cache is resized, this tensor is too.
    """

    wrapper: MetadataWrapper
    layers: Sequence[str]
    pages: torch.Tensor | None = None

    @property
    def _num_block_ids(self) -> int | None:
        return None if self.pages is None else self.pages.shape[0]

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Apply the wrapper to a step.

        What it changed is checked: numbers and host copies always, the other tensors if they lie on the host. In an
        engine they do, unless an extension of the step lies on the device only.

        Args:
            metadata: The step's metadata, or what another wrapper made of it.

        Raises:
            WrapperError: As ``apply_wrapper`` raises it; or a tensor differs from its host copy, or a block id is too
                large (``wrong_value``).
        """
        result = apply_wrapper(self.wrapper, metadata, self.layers)
        if result is not metadata and result.slot_mapping.is_cpu:
            self._require(find_wrong_tensor(result, metadata, self._num_block_ids))
        return result

    def audit(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Apply the wrapper, and check everything on any device: waits for it, and takes time for each block id.

        Args:
            metadata: The step's metadata, or what another wrapper made of it.

        Raises:
            WrapperError: As a call raises it; or the wrapper wrote to its input, or its result has blocks or slots that
                its input does not have.
        """
        copies = {name: tensor.clone() for name, tensor in _tensors(metadata).items()}
        result = apply_wrapper(self.wrapper, metadata, self.layers)
        written_names = [name for name, tensor in _tensors(metadata).items() if not torch.equal(tensor, copies[name])]
        self._require(f"it writes to {written_names[0]} of its input" if written_names else None)
        if result is not metadata:
            self._require(find_wrong_tensor(result, metadata, self._num_block_ids) or find_foreign_id(result, metadata))
        return result

    def _require(self, problem: str | None) -> None:
        if problem is not None:
            raise wrapper_mistake(self.wrapper, self.layers, f"gives wrong values: {problem}", "wrong_value")


def _tensors(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(metadata, field.name) for field in attrs.fields(CommonAttentionMetadata)}
    extensions = metadata.extensions.items()
    return {
        **{name: value for name, value in fields.items() if isinstance(value, torch.Tensor)},
        **{name: extension.values for name, extension in extensions},
        **{
            f"{name} on the host": extension.values_cpu
            for name, extension in extensions
            if extension.values_cpu is not None
        },
    }
