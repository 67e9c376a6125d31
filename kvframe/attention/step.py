"""A step that was begun. If a graph is captured of it, its tensors stay: each replayed step writes its values there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.attention.build import GroupMetadata
from kvframe.attention.nested import field_names, replace_tensors
from kvframe.attention.staging import StagedMemory
from kvframe.contract.capture import NotReplayableError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.state import StateStep


@attrs.frozen(eq=False)
class Step:
    """A step of a model's layers that was begun.

    Invariant: the tensors of a captured step stay where they are. A graph reads them there.

    Attributes:
        groups: What the layers of each attention group read.
        inputs: The step's further tensors, on the device.
        kept_rows: The rows that the skipped layers compute; None for all.
        states: What the state layers compute.
        memory: Of a captured step, the memory of the tensors that came from the host; otherwise None.
    """

    groups: Sequence[GroupMetadata]
    inputs: tuple[torch.Tensor, ...]
    kept_rows: torch.Tensor | None
    states: Sequence[StateStep]
    memory: StagedMemory | None = None

    def kept_in(self, memory: StagedMemory) -> Step:
        """Return the step with its tensors in the memory that it was staged into, or in copies of their own."""
        groups, kept_rows = replace_tensors((self.groups, self.kept_rows), lambda tensor: _keep(tensor, memory))
        return attrs.evolve(self, groups=groups, kept_rows=kept_rows, memory=memory)

    def refresh(self, step: Step) -> None:
        """Write another step's values into the tensors of this one, which was captured.

        Args:
            step: The other step, staged into the same memory.

        Raises:
            NotReplayableError: Something other than the values of tensors differs.
        """
        assert self.memory is not None
        refresh((self.groups, self.kept_rows), (step.groups, step.kept_rows), self.memory.memory, "the step")


def _keep(tensor: torch.Tensor, memory: StagedMemory) -> torch.Tensor:
    """Return the tensor itself if it lies in the captured memory; otherwise return a copy."""
    return tensor if _lies_in(tensor, memory.memory) else tensor.clone()


def _lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def refresh(kept: Any, fresh: Any, memory: torch.Tensor, what: str) -> None:
    """Write the values of a step's tensors into those of a captured step; host copies keep their captured values.

    Args:
        kept: Tensors in attrs classes, dataclasses, tuples, lists and mappings.
        fresh: The same of another step.
        memory: The captured memory; tensors in it have their values already.
        what: What it is, for errors.

    Raises:
        NotReplayableError: Anything but the values of tensors differs; batch metadata may count other tokens.
    """
    if isinstance(kept, torch.Tensor) and isinstance(fresh, torch.Tensor):
        if kept.shape != fresh.shape or kept.dtype != fresh.dtype or kept.device != fresh.device:
            raise NotReplayableError(f"{what} was {_in_words(kept)} and is {_in_words(fresh)}")
        if not _lies_in(kept, memory):
            kept.copy_(fresh)
        elif kept.data_ptr() != fresh.data_ptr() or kept.stride() != fresh.stride():
            raise NotReplayableError(f"{what} is another tensor of the step than at the capture")
        return
    if isinstance(kept, Mapping) and isinstance(fresh, Mapping):
        if kept.keys() != fresh.keys():
            raise NotReplayableError(f"{what} had {sorted(map(str, kept))} and has {sorted(map(str, fresh))}")
        for key, value in kept.items():
            refresh(value, fresh[key], memory, f"{what}[{key!r}]")
        return
    if type(kept) is not type(fresh):
        raise NotReplayableError(f"{what} was of {type(kept).__name__} and is of {type(fresh).__name__}")
    names = field_names(type(kept))
    if names is not None:
        counts = _COUNTS if isinstance(kept, CommonAttentionMetadata) else ()
        for name in names:
            if name not in counts:
                refresh(getattr(kept, name), getattr(fresh, name), memory, f"{type(kept).__name__}.{name}")
    elif isinstance(kept, tuple | list):
        if len(kept) != len(fresh):
            raise NotReplayableError(f"{what} had {len(kept)} items and has {len(fresh)}")
        for index, (one, other) in enumerate(zip(kept, fresh, strict=True)):
            refresh(one, other, memory, f"{what}[{index}]")
    elif isinstance(kept, np.ndarray):
        if not np.array_equal(kept, fresh):
            raise NotReplayableError(f"{what}, an array on the host, has other numbers")
    elif kept is not fresh and kept != fresh:
        raise NotReplayableError(f"{what} was {kept!r} and is {fresh!r}")


_COUNTS = ("num_actual_tokens", "num_generating")
"""Fields of the batch metadata that differ with the amount of padding."""


def _in_words(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
