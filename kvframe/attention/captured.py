"""The tensors that a captured graph reads: they stay where they are, and each replayed step writes its values there."""

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
class CapturedStep:
    """A step that a graph was captured of.

    Invariant: the tensors that the graph reads are those of ``groups``, ``kept_rows``, ``states`` and ``inputs``, from
    the capture on.

    Attributes:
        memory: The tensors that came from the host.
        groups: What the layers of each attention group read.
        kept_rows: The rows that the skipped layers compute; None for all.
        inputs: The step's further tensors, on the device.
        states: What the state layers compute; its tensors are in the memory.
    """

    memory: StagedMemory
    groups: Sequence[GroupMetadata]
    kept_rows: torch.Tensor | None
    inputs: tuple[torch.Tensor, ...]
    states: Sequence[StateStep] = ()

    @classmethod
    def of(
        cls,
        memory: StagedMemory,
        groups: Sequence[GroupMetadata],
        kept_rows: torch.Tensor | None,
        inputs: tuple[torch.Tensor, ...],
        states: Sequence[StateStep] = (),
    ) -> CapturedStep:
        """Return a step whose tensors stay where they are: in the memory, or in copies of their own.

        Args:
            memory: The memory that the step was staged into.
            groups: What was built of the step.
            kept_rows: The rows that the skipped layers compute; None for all.
            inputs: The step's further tensors, in the memory.
            states: What the state layers compute, in the memory.
        """
        groups, kept_rows = replace_tensors((groups, kept_rows), lambda tensor: _keep(tensor, memory))
        return cls(memory, groups, kept_rows, inputs, states)

    def refresh(self, groups: Sequence[GroupMetadata], kept_rows: torch.Tensor | None) -> None:
        """Write another step's values, which was staged into the same memory, into the tensors of this one.

        Args:
            groups: What was built of the other step.
            kept_rows: The rows that the skipped layers compute in it; None for all.

        Raises:
            NotReplayableError: Something other than the values of tensors differs.
        """
        refresh((self.groups, self.kept_rows), (groups, kept_rows), self.memory.memory, "the step")


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
