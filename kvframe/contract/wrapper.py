"""The interface of a wrapper: a pure function from batch metadata to batch metadata."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self

import attrs

from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import NO_EXTENSIONS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec

if TYPE_CHECKING:
    import torch

DROPS_TOKENS = "drops_tokens"
"""The effect of a wrapper out of which fewer tokens come than go in."""

VIRTUAL_REQUESTS = "virtual_requests"
"""The effect of a wrapper that makes several rows of one request."""

CHANGES_MASK = "changes_mask"
"""The effect of a wrapper after which queries attend to other tokens than before: those of the mask that
``wrapped_layer`` gives the layer, over the rows of the batch as they were. Any other wrapper leaves to each query the
tokens that it attended to."""


class FieldUse(StrEnum):
    """What a wrapper does with a field of the metadata, or with an extension."""

    CARRY = "carry"
    """Hands it on as it is."""
    SLICE = "slice"
    """Hands on the rows that belong to the tokens or requests that it makes."""
    RESET = "reset"
    """Computes a field anew; leaves an extension out, because it says nothing about what comes out."""
    REJECT = "reject"
    """Refuses a step that has it: a field with another value than its default, or the extension at all."""


@attrs.frozen(kw_only=True)
class MetadataWrapper(ABC):
    """One transformation of a step's batch metadata.

    A wrapper is a frozen value (its parameters) and a pure function. It knows no backend, and no backend knows of it.
    It asks the device for nothing (no ``.item()``, no ``.cpu()``), loops over no requests, and writes into nothing
    that it was given: what it needs to know on the host, the metadata has there.
    """

    name: ClassVar[str]
    """The registered name (``"decode_only"``)."""
    fields: ClassVar[Mapping[str, FieldUse]]
    """What happens to each field of ``CommonAttentionMetadata``, ``extensions`` left out. A field that is not listed,
    of a later version of the contract, is refused unless it has its default."""
    extensions: ClassVar[Mapping[str, FieldUse]] = MappingProxyType({})
    """What happens to each extension; one that is not listed is refused."""
    effects: ClassVar[frozenset[str]] = frozenset()
    """What it does to a batch that others of a chain may care about: ``DROPS_TOKENS``, ``VIRTUAL_REQUESTS``,
    ``CHANGES_MASK``, or words of its own."""
    not_after: ClassVar[frozenset[str]] = frozenset()
    """Wrappers, or effects, that may not stand before it in a chain."""
    not_before: ClassVar[frozenset[str]] = frozenset()
    """Wrappers, or effects, that may not stand behind it in a chain."""
    capture: ClassVar[GraphCapture] = GraphCapture.NEVER
    """For which batches its output's shapes are known beforehand."""

    def for_layer(self, layer: LayerSpec) -> Self:
        """Return the wrapper with the parameters that the layer decides. Called at set-up, before any other method.

        Args:
            layer: The layer, as what stands before this wrapper leaves it.

        Raises:
            WrapperError: It cannot serve such a layer; ``code`` says why.
        """
        return self

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        """Return the layer as what stands behind this wrapper sees it. Called at set-up.

        Args:
            layer: The layer, as what stands before this wrapper leaves it. Where the wrapper changes what a row of
                the batch means, the result's mask is the one over the new rows.
        """
        return layer

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        """Return the extensions that it may add for such a layer, and that the backend has to honour then.

        Args:
            layer: The layer, as what stands before this wrapper leaves it.
        """
        return frozenset()

    @abstractmethod
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the transformed metadata.

        Called once a step for each cache group and chain that holds it, for capture and replay alike.

        Args:
            metadata: The step's metadata, or what the wrapper before this one made of it, with nothing in it that the
                wrapper rejects or does not know. Never written to.

        Returns:
            New metadata, or ``metadata`` itself where nothing changes.

        Raises:
            WrapperError: The step cannot be transformed; ``code`` says why.
        """

    def pass_extensions(
        self,
        metadata: CommonAttentionMetadata,
        requests: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        *,
        requests_cpu: torch.Tensor | None = None,
        tokens_cpu: torch.Tensor | None = None,
    ) -> Mapping[str, Extension]:
        """Return the extensions of ``metadata`` as ``extensions`` of the class says.

        A sliced extension keeps its host copy if the index is there on the host too.

        Args:
            metadata: The wrapper's input.
            requests: ``[num_new_reqs], int64 or int32, device``: the request that each new row comes from; None if
                they are the same.
            tokens: ``[num_new_tokens], int64 or int32, device``: likewise for tokens.
            requests_cpu: ``requests`` on the host; None if it is not there.
            tokens_cpu: ``tokens`` on the host; None if it is not there.
        """
        if not metadata.extensions:
            return NO_EXTENSIONS
        index_of = {Axis.REQUEST: requests, Axis.TOKEN: tokens, Axis.STEP: None}
        index_cpu_of = {Axis.REQUEST: requests_cpu, Axis.TOKEN: tokens_cpu}
        passed = {}
        for name, extension in metadata.extensions.items():
            use = self.extensions[name]
            index = index_of[extension.axis]
            if use is FieldUse.SLICE and index is not None:
                values_cpu, index_cpu = extension.values_cpu, index_cpu_of[extension.axis]
                if values_cpu is not None:
                    values_cpu = None if index_cpu is None else values_cpu.index_select(0, index_cpu)
                passed[name] = Extension(extension.values.index_select(0, index), extension.axis, values_cpu)
            elif use in (FieldUse.CARRY, FieldUse.SLICE):
                passed[name] = extension
        return passed
