"""Wrappers: pure functions from batch metadata to batch metadata, chained as an ordered list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvframe.attention.metadata import CommonAttentionMetadata


@attrs.frozen(kw_only=True)
class MetadataWrapper(ABC):
    """One transformation of a step's batch metadata.

    A wrapper is a frozen value (its parameters) and a function. It knows no backend, and no backend knows of it.
    """

    name: ClassVar[str]
    """The registered name (``"decode_only"``)."""

    @abstractmethod
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the transformed metadata.

        Called once a step for each attention group whose chain holds it.

        Args:
            metadata: The step's metadata, or what the wrapper before this one made of it. Never written to.

        Returns:
            New metadata, or ``metadata`` itself where nothing changes.
        """


WrapperChain = tuple[MetadataWrapper, ...]


def apply_chain(chain: Sequence[MetadataWrapper], metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Apply the wrappers of ``chain`` in order."""
    for wrapper in chain:
        metadata = wrapper(metadata)
    return metadata
