"""What a forward without weights records."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import nn

from kvframe_transformers.compressors import Compressed
from kvframe_transformers.known_values import KnownValues
from kvframe_transformers.latents import Expansion
from kvframe_transformers.masks import MaskFunction
from kvframe_transformers.states import Inputs
from kvframe_transformers.uniform import UniformTensors


@attrs.frozen(eq=False)
class RecordedCall:
    """One attention call of the probe forward: tensors without data, and its other arguments."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    inputs: dict[str, Any]
    is_direct: bool = False

    @property
    def is_cross(self) -> bool:
        """Whether the keys are of another sequence than the queries: an encoder's."""
        return self.key.shape[2] != self.query.shape[2]


@attrs.frozen(eq=False)
class RecordedState:
    """One call of a state mixer in the probe forward: the states that it left, its arguments and its output."""

    module: nn.Module
    states: Mapping[str, torch.Tensor]
    inputs: Inputs
    output: Any


@attrs.frozen(eq=False)
class RecordedMask:
    """One mask of the probe forward: the tensor in its place, and the function that would have made it."""

    marker: torch.Tensor
    function: MaskFunction
    local_size: int | None
    chunk_size: int | None


@attrs.frozen(eq=False)
class Recording:
    """The result of the probe forward.

    Attributes:
        calls: The calls of attention and of mixers, in order.
        masks: The masks.
        ran: Every module that ran.
        expansions: The latents of attention modules.
        index_keys: The shape of a token's keys, for each sparse indexer that ran.
        compressed: What each compressor that ran keeps, by the names of its cache.
        uniform: The tensors whose numbers are known, because they are all the same.
        values: What is known of other tensors; None if values are not wanted.
    """

    calls: list[RecordedCall | RecordedState] = attrs.field(factory=list)
    masks: list[RecordedMask] = attrs.field(factory=list)
    values: KnownValues | None = None
    ran: list[nn.Module] = attrs.field(factory=list)
    expansions: dict[nn.Module, Expansion] = attrs.field(factory=dict)
    index_keys: dict[nn.Module, tuple[int, ...]] = attrs.field(factory=dict)
    compressed: dict[nn.Module, Mapping[str, Compressed]] = attrs.field(factory=dict)
    uniform: UniformTensors = attrs.field(factory=UniformTensors)


RECORDING: ContextVar[Recording] = ContextVar("kvframe_transformers_recording")
