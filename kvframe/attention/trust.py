"""Calls a wrapper in a step, and checks its result before a kernel reads it.

A kernel that reads a wrong length or a wrong block id reads foreign memory, and the process ends. Builders and backends
are trusted: what they make of right metadata is their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from kvframe.attention.values import find_foreign_id, find_wrong_tensor
from kvframe.attention.wrapping import apply_wrapper, wrapper_mistake
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.wrapper import MetadataWrapper


@attrs.frozen(eq=False)
class WrapperCall:
    """One call of a wrapper in every step.

    Attributes:
        wrapper: The wrapper, made for the layers.
        layers: The names of the layers that read what comes of it.
        pages: A state tensor of these layers, as long as there are pages that block ids may name; None if there is
            none to ask. A cache that is resized resizes it.
    """

    wrapper: MetadataWrapper
    layers: Sequence[str]
    pages: torch.Tensor | None = None

    @property
    def _num_block_ids(self) -> int | None:
        return None if self.pages is None else self.pages.shape[0]

    def __call__(self, given: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return what the wrapper makes of a step.

        What it changed is checked: numbers and host copies always, the other tensors if they lie on the host too, as
        they do in an engine unless a step's extension lies on the device only.

        Args:
            given: The step's metadata, or what another wrapper made of it.

        Raises:
            WrapperError: What ``apply_wrapper`` raises; or a tensor is not what its host copy says, or names a page
                that there is none of (``wrong_value``).
        """
        made = apply_wrapper(self.wrapper, given, self.layers)
        if made is not given and made.slot_mapping.is_cpu:
            self._require(find_wrong_tensor(made, given, self._num_block_ids))
        return made

    def audit(self, given: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the same, with everything checked on any device: waits for it, and takes time for each block id.

        Args:
            given: The step's metadata, or what another wrapper made of it.

        Raises:
            WrapperError: What a call raises; or the wrapper wrote to its input, or names blocks or slots that are not
                those of the step.
        """
        before = {name: tensor.clone() for name, tensor in _tensors(given).items()}
        made = apply_wrapper(self.wrapper, given, self.layers)
        written = [name for name, tensor in _tensors(given).items() if not torch.equal(tensor, before[name])]
        self._require(f"it writes to {written[0]} of its input" if written else None)
        if made is not given:
            self._require(find_wrong_tensor(made, given, self._num_block_ids) or find_foreign_id(made, given))
        return made

    def _require(self, problem: str | None) -> None:
        if problem is not None:
            raise wrapper_mistake(self.wrapper, self.layers, f"gives wrong values: {problem}", "wrong_value")


def _tensors(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(metadata, field.name) for field in attrs.fields(CommonAttentionMetadata)}
    extensions = metadata.extensions.items()
    return {
        **{name: value for name, value in fields.items() if isinstance(value, torch.Tensor)},
        **{name: extension.values for name, extension in extensions},
        **{f"{name} on the host": each.values_cpu for name, each in extensions if each.values_cpu is not None},
    }
