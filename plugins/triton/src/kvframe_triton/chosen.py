"""Chosen tokens in Triton: the metadata of their queries, each of which is a request of its own."""

from __future__ import annotations

import attrs
import torch
from kvframe_kernels.triton.attention import PagedAttention
from kvframe_kernels.triton.attention_plan import Programs, batch_of_chosen
from kvframe_kernels.triton.mla import LatentAttention

from kvframe.contract import (
    AttentionMetadataBuilder,
    ChoiceSpec,
    ChosenTokens,
    CommonAttentionMetadata,
    LayerSpec,
    find_chosen,
)


@attrs.frozen(eq=False)
class ChosenMetadata:
    """A step's metadata for layers that read chosen tokens.

    Attributes:
        step: The step.
        numbers: ``[num_numbers], int32, device``: the work of all programs.
        programs: The programs, by shape.
    """

    step: CommonAttentionMetadata
    numbers: torch.Tensor
    programs: tuple[Programs, ...]

    def slots(self, layer: LayerSpec, chosen: ChosenTokens) -> torch.Tensor:
        """Return the slots of the tokens that queries read, ``[num_tokens, num_choosers, num_chosen], int32, device``.

        A token that a query does not read has the slot -1.

        Args:
            layer: The layer that reads them.
            chosen: The choices.
        """
        assert layer.spec is not None
        assert layer.spec.mask_function is not None
        places = find_chosen(chosen, self.step, layer.spec.mask_function)
        slots = places.blocks * self.step.block_size + places.offsets
        return slots.masked_fill_(~places.seen, -1).int()


class ChosenMetadataBuilder(AttentionMetadataBuilder):
    """Divides the queries of a step into work items, for the most tokens that can be chosen."""

    on_host = frozenset()
    needs_exact_lens = False

    def __init__(self, attention: PagedAttention | LatentAttention, dtype: torch.dtype, choice: ChoiceSpec) -> None:
        """Keep the properties of the group's layers.

        Args:
            attention: Their attention.
            dtype: The dtype that it is computed in.
            choice: The form of their choices.
        """
        self._attention = attention
        self._dtype = dtype
        self._num_chosen = choice.max_chosen * choice.block_size

    def build(self, metadata: CommonAttentionMetadata) -> ChosenMetadata:
        """Return the step and its work items."""
        batch = batch_of_chosen(metadata.slot_mapping.shape[0], self._num_chosen)
        work = self._attention.plan(batch, self._dtype)
        return ChosenMetadata(metadata, work.tensor, work.programs)
