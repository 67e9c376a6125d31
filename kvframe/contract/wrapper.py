"""The interface of a wrapper: a pure function from batch metadata to batch metadata."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs

from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import WrapperError
from kvframe.contract.growth import Growing
from kvframe.contract.metadata import NO_EXTENSIONS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec

if TYPE_CHECKING:
    import torch

DROPS_TOKENS = "drops_tokens"
"""The effect of a wrapper that returns fewer tokens than it is given."""

VIRTUAL_REQUESTS = "virtual_requests"
"""The effect of a wrapper that splits a request into several rows."""


class FieldUse(StrEnum):
    """What a wrapper does with a field or an extension of the metadata."""

    CARRY = "carry"
    """Passes it on unchanged."""
    SLICE = "slice"
    """Passes on the rows of the tokens or requests that it returns."""
    RESET = "reset"
    """Computes a field anew, or leaves out an extension that does not apply to the result."""
    REJECT = "reject"
    """Refuses a step in which the field differs from its default, or in which the extension occurs."""


FIRST_FIELDS = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "num_reqs", "num_actual_tokens"),
    *("max_query_len", "max_seq_len", "block_table", "slot_mapping", "block_size", "num_generating"),
    *("generating_indices", "generating_indices_cpu", "causal", "static_shapes", "exact_lens"),
)
"""The fields that every version of ``CommonAttentionMetadata`` has, without ``extensions``."""

_AXES: Mapping[str, Axis] = {
    "seq_lens": Axis.REQUEST,
    "seq_lens_cpu": Axis.REQUEST,
    "block_table": Axis.REQUEST,
    "slot_mapping": Axis.TOKEN,
}
"""The fields that have a row for each request or token."""


def field_uses(
    *,
    reset: Collection[str] = (),
    slice: Collection[str] = (),
    reject: Collection[str] = (),
    carry: Collection[str] = (),
) -> Mapping[str, FieldUse]:
    """Return what a wrapper does with each field of the metadata: it carries those of version 1.0 that are not named.

    A field that a later version adds is carried only if it is named. Otherwise a step in which it differs from its
    default is refused, so that a wrapper cannot pass on what its author did not know.

    Args:
        reset: Fields that it computes anew.
        slice: Fields with a row for each token or request. It passes on the rows of those that it returns.
        reject: Fields that must have their default.
        carry: Fields of later versions that it passes on unchanged.

    Raises:
        WrapperError: A field has two uses (``wrong_fields``).
    """
    uses: dict[str, FieldUse] = {}
    for use, names in (
        (FieldUse.RESET, reset),
        (FieldUse.SLICE, slice),
        (FieldUse.REJECT, reject),
        (FieldUse.CARRY, carry),
    ):
        for name in names:
            if name in uses:
                raise WrapperError(f"a wrapper declares two uses of the field {name!r}", code="wrong_fields")
            uses[name] = use
    return MappingProxyType({**dict.fromkeys(FIRST_FIELDS, FieldUse.CARRY), **uses})


@attrs.frozen(kw_only=True)
class MetadataWrapper(Growing, ABC):
    """One transformation of a step's batch metadata.

    A wrapper is a frozen value, its parameters, and a pure function. It knows no backend, and no backend knows it. It
    never waits for the device (no ``.item()``, no ``.cpu()``), never loops over requests in Python, and never writes
    to its input. The metadata holds copies on the host of the numbers that a wrapper needs there.

    Methods that get a layer get it as the earlier wrappers of the chain leave it.
    """

    name: ClassVar[str]
    """The registered name (``"decode_only"``)."""
    fields: ClassVar[Mapping[str, FieldUse]]
    """What it does with each field of ``CommonAttentionMetadata`` except ``extensions``, made by ``field_uses``. A
    field that is not listed (one of a later version of the contract) must have its default, or the step is refused."""
    extensions: ClassVar[Mapping[str, FieldUse]] = MappingProxyType({})
    """What it does with each extension. One that is not listed is left out if it is optional; otherwise the step is
    refused."""
    effects: ClassVar[frozenset[str]] = frozenset()
    """Its effects on a batch, which other wrappers of a chain may name: ``DROPS_TOKENS``, ``VIRTUAL_REQUESTS``, or
    names of its own. No wrapper changes which tokens a query attends to."""
    not_after: ClassVar[frozenset[str]] = frozenset()
    """Wrappers, or effects, that must not come before it in a chain."""
    capture: ClassVar[GraphCapture] = GraphCapture.NEVER
    """For which batches the shapes of its output are known before it runs."""

    def for_layer(self, layer: LayerSpec) -> Self:
        """Return the wrapper with the parameters that depend on the layer. Called at set-up, before any other method.

        Raises:
            WrapperError: It cannot serve such a layer; ``code`` says why.
        """
        return self

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        """Return the layer as later wrappers and the backend see it. Called at set-up.

        If this wrapper changes what a row of the batch stands for, the mask of the returned layer applies to the new
        rows.
        """
        return layer

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        """Return the extensions that it may add for such a layer. The backend must then support them."""
        return frozenset()

    @abstractmethod
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the transformed metadata.

        Called once a step for each cache group and each chain that contains it, for capture and replay alike.

        Args:
            metadata: The step's metadata, or the result of the wrapper before this one. It has no field or extension
                that this wrapper rejects or does not know. Must not be written to.

        Returns:
            New metadata, or ``metadata`` itself if nothing changes.

        Raises:
            WrapperError: The step cannot be transformed; ``code`` says why.
        """

    def evolve(
        self,
        metadata: CommonAttentionMetadata,
        *,
        requests: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        requests_cpu: torch.Tensor | None = None,
        tokens_cpu: torch.Tensor | None = None,
        **values: Any,
    ) -> CommonAttentionMetadata:
        """Return ``metadata`` with each field and each extension treated as the class declares.

        It carries and slices what ``fields`` says, and extensions as ``pass_extensions`` does. The indices are for what
        is sliced; leave one out if its rows stay the same.

        Args:
            metadata: The wrapper's input.
            requests: ``[num_new_reqs], int64 or int32, device``: the request that each new row comes from.
            tokens: ``[num_new_tokens], int64 or int32, device``: the token that each new token comes from.
            requests_cpu: ``requests`` on the host, if it is known there.
            tokens_cpu: ``tokens`` on the host, if it is known there.
            **values: Fields by name: all that are reset. For others, such as a sliced one, the value that is passed on.

        Raises:
            TypeError: A field that is reset or sliced has neither a value nor an index: a mistake in the wrapper.
        """
        index_of = {"seq_lens_cpu": requests_cpu, "seq_lens": requests, "block_table": requests, "slot_mapping": tokens}
        carried, values_of, changed_fields = _uses_of(type(self))
        for name in changed_fields:
            if name in values:
                continue
            index = index_of.get(name)
            if index is None:
                requirement = f"an index of {_AXES[name].value}s" if name in _AXES else "a value"
                raise TypeError(f"evolve() needs {requirement} for the field {name!r}")
            values[name] = getattr(metadata, name).index_select(0, index)
        values = {**dict(zip(carried, values_of(metadata), strict=True)), **values}
        if "extensions" not in values:
            values["extensions"] = self.pass_extensions(
                metadata, requests, tokens, requests_cpu=requests_cpu, tokens_cpu=tokens_cpu
            )
        return type(metadata)(**values)

    def pass_extensions(
        self,
        metadata: CommonAttentionMetadata,
        requests: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        *,
        requests_cpu: torch.Tensor | None = None,
        tokens_cpu: torch.Tensor | None = None,
    ) -> Mapping[str, Extension]:
        """Return the extensions of ``metadata``, treated as the class declares in ``extensions``.

        The indices are those of ``evolve``; None if the rows or tokens stay the same. A sliced extension keeps its copy
        on the host if the index is given on the host too.
        """
        if not metadata.extensions:
            return NO_EXTENSIONS
        index_of = {Axis.REQUEST: requests, Axis.TOKEN: tokens, Axis.STEP: None}
        index_cpu_of = {Axis.REQUEST: requests_cpu, Axis.TOKEN: tokens_cpu}
        extensions = {}
        for name, extension in metadata.extensions.items():
            use = self.extensions[name]
            index = index_of[extension.axis]
            if use is FieldUse.SLICE and index is not None:
                values_cpu, index_cpu = extension.values_cpu, index_cpu_of[extension.axis]
                if values_cpu is not None:
                    values_cpu = None if index_cpu is None else values_cpu.index_select(0, index_cpu)
                values = extension.values.index_select(0, index)
                extensions[name] = Extension(values, extension.axis, values_cpu, extension.optional)
            elif use in (FieldUse.CARRY, FieldUse.SLICE):
                extensions[name] = extension
        return extensions


@cache
def _uses_of(
    wrapper_class: type[MetadataWrapper],
) -> tuple[tuple[str, ...], Callable[[CommonAttentionMetadata], tuple[Any, ...]], tuple[str, ...]]:
    """Return the fields that such a wrapper passes on, a function that reads them, and those it resets or slices."""
    uses = wrapper_class.fields.items()
    # A rejected field has its default, which is passed on like any other value. The block size, which no wrapper
    # changes, is read again, because attrgetter does not return a tuple for one name.
    carried = (*(name for name, use in uses if use in (FieldUse.CARRY, FieldUse.REJECT)), "block_size", "block_size")
    return carried, attrgetter(*carried), tuple(name for name, use in uses if use in (FieldUse.RESET, FieldUse.SLICE))
