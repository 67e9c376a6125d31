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


def refresh(target: Any, source: Any, memory: torch.Tensor, label: str) -> None:
    """Write the values of a step's tensors into those of a captured step; host copies keep their captured values.

    Args:
        target: Tensors in attrs classes, dataclasses, tuples, lists and mappings.
        source: The same of another step.
        memory: The captured memory; tensors in it have their values already.
        label: The name of the value, for errors.

    Raises:
        NotReplayableError: Anything but the values of tensors differs; batch metadata may count other tokens.
    """
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        if target.shape != source.shape or target.dtype != source.dtype or target.device != source.device:
            raise NotReplayableError(f"{label} was {_in_words(target)} and is {_in_words(source)}")
        if not _lies_in(target, memory):
            target.copy_(source)
        elif target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            raise NotReplayableError(f"{label} is another tensor of the step than at the capture")
        return
    if isinstance(target, Mapping) and isinstance(source, Mapping):
        if target.keys() != source.keys():
            raise NotReplayableError(f"{label} had {sorted(map(str, target))} and has {sorted(map(str, source))}")
        for key, value in target.items():
            refresh(value, source[key], memory, f"{label}[{key!r}]")
        return
    if type(target) is not type(source):
        raise NotReplayableError(f"{label} was of {type(target).__name__} and is of {type(source).__name__}")
    names = field_names(type(target))
    if names is not None:
        counts = _COUNTS if isinstance(target, CommonAttentionMetadata) else ()
        for name in names:
            if name not in counts:
                refresh(getattr(target, name), getattr(source, name), memory, f"{type(target).__name__}.{name}")
    elif isinstance(target, tuple | list):
        if len(target) != len(source):
            raise NotReplayableError(f"{label} had {len(target)} items and has {len(source)}")
        for index, (target_item, source_item) in enumerate(zip(target, source, strict=True)):
            refresh(target_item, source_item, memory, f"{label}[{index}]")
    elif isinstance(target, np.ndarray):
        if not np.array_equal(target, source):
            raise NotReplayableError(f"{label}, an array on the host, has other numbers")
    elif target is not source and target != source:
        raise NotReplayableError(f"{label} was {target!r} and is {source!r}")


_COUNTS = ("num_actual_tokens", "num_generating")
"""Fields of the batch metadata that differ with the amount of padding."""


def _in_words(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
